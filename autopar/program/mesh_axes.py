"""Looks up process groups in the current mesh, by one axis or by several axes flattened into one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .spmd import spmd

Axis = str | dist.ProcessGroup
Groups = Mapping[tuple[str, ...], dist.ProcessGroup]
"""Process groups by the axes that they run over (outermost first)."""

_meshes: list[DeviceMesh] = []
_flat: ContextVar[Groups | None] = ContextVar("groups of flattened axes", default=None)


@contextlib.contextmanager
def on_mesh(mesh: DeviceMesh, flat: Groups | None = None) -> Iterator[None]:
    """Inside this context, the collectives of ``spmd_types`` and the kernels look up single axes in ``mesh`` by name, and flattened axes
    in ``flat``."""
    _meshes.append(mesh)
    token = _flat.set(flat)
    try:
        with spmd.set_current_mesh(mesh):
            yield
    finally:
        _flat.reset(token)
        _meshes.pop()


def group_of(*axes: Axis) -> dist.ProcessGroup:
    """Return the process group over ``axes`` (outermost first; names of ``on_mesh``). Raises ``RuntimeError`` if several axes have none."""
    if len(axes) == 1:
        if not isinstance(axes[0], str):
            return axes[0]
        assert _meshes, "a kernel with collectives needs on_mesh"
        return _meshes[-1].get_group(axes[0])
    found = (_flat.get() or {}).get(tuple(axis for axis in axes if isinstance(axis, str)))
    if found is None:
        raise RuntimeError(
            f"no process group runs over {', '.join(map(str, axes))}: name them in PROGRAM.flattened of model.py"
        )
    return found
