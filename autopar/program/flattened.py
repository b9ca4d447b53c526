"""Collectives over several mesh axes at once, flattened into one axis with the outermost axis slowest.

One collective on the flattened axis moves fewer bytes than one collective per axis, and waits once. Each function is the ``spmd_types``
function of the same name with a tuple of axis names (outermost first) instead of one name. Source and destination types are the same on all
of these axes; the outermost axis divides a sharded dim first. The process groups are created when the program starts (``World.groups``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from spmd_types import I, R
from torch import Tensor

from .mesh_axes import Axis, group_of
from .spmd import spmd

Axes = Sequence[Axis]  # names, or a single process group


def all_reduce(x: Tensor, axes: Axes, **options: Any) -> Tensor:
    """Convert P to I or R."""
    return _on_flattened(spmd.all_reduce, x, axes, options)


def all_gather(x: Tensor, axes: Axes, **options: Any) -> Tensor:
    """Convert S(d) to I or R."""
    return _on_flattened(spmd.all_gather, x, axes, options)


def reduce_scatter(x: Tensor, axes: Axes, **options: Any) -> Tensor:
    """Convert P to S(d)."""
    return _on_flattened(spmd.reduce_scatter, x, axes, options)


def all_to_all(x: Tensor, axes: Axes, **options: Any) -> Tensor:
    """Convert S(i) to S(j)."""
    return _on_flattened(spmd.all_to_all, x, axes, options)


def convert(x: Tensor, axes: Axes, **options: Any) -> Tensor:
    """Convert without communication in the forward pass, such as I to R."""
    return _on_flattened(spmd.convert, x, axes, options)


@torch.compiler.disable  # a collective, see compiled.py
def _on_flattened(collective: Callable[..., Tensor], x: Tensor, axes: Axes, options: dict[str, Any]) -> Tensor:
    """Call the collective on the flattened axis. During the call, the type checker's mesh has the flattened axis in place of ``axes``."""
    if len(axes) < 2:
        return collective(x, axes[0], **options) if axes else x
    flat = group_of(*axes)
    if not spmd.is_type_checking():
        return collective(x, flat, **options)
    names, mesh = spmd.current_mesh_names(), spmd.current_mesh()
    assert names is not None and mesh is not None
    on_mesh = {names[axis] for axis in axes if isinstance(axis, str) and axis in names}
    if len(on_mesh) < 2:
        return collective(x, flat, **options)
    merged = frozenset((mesh - on_mesh) | {spmd.MeshAxis.of(flat)})
    if options.get("src") in (I, R) and not x.requires_grad:
        x = _declared(x, dict.fromkeys(on_mesh, options["src"]))
    # reinterpret_mesh checks types itself, and returns an alias, which the type checker would refuse for P
    with spmd.no_typecheck():
        x = spmd.reinterpret_mesh(x, merged)
    with spmd.set_current_mesh(merged):
        x = collective(x, flat, **options)
    with spmd.no_typecheck():
        return spmd.reinterpret_mesh(x, mesh)


def _declared(x: Tensor, types: dict[Any, Any]) -> Tensor:
    """Return ``x`` with these types for a few axes. Without a gradient, I and R are the same, so axes may come with either. Other axes
    keep their types, and the dims that they shard."""
    known: dict[Any, Any] = spmd.get_local_type(x)
    with spmd.no_typecheck():
        own = x.view_as(x)
    spmd.assert_type(own, known | types, spmd.get_partition_spec(x))
    return own
