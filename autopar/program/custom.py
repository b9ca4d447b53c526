"""Calls the user's custom ops on this rank's slices; results have the types that the registered rule declares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import kernels
from .spmd import spmd


def call(
    op: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    partition: kernels.Partition,
    partial_axes: Sequence[kernels.Axis] = (),
) -> Any:
    """Return ``op(*args, **kwargs)``; ``partition`` gives the axes that shard the first dims of every result.

    ``partial_axes`` are the axes on which the results are terms of a sum (P). The type checker cannot derive the results' types, so they
    are declared from the op's rule, which was checked by execution when it was registered.
    """
    with spmd.local():
        result = op(*args, **kwargs)
    if not spmd.is_type_checking():
        return result
    is_sequence = isinstance(result, tuple | list)
    typed = [_typed(item, partition, partial_axes) for item in (result if is_sequence else [result])]
    return tuple(typed) if is_sequence else typed[0]


def _typed(x: Any, partition: kernels.Partition, partial_axes: Sequence[kernels.Axis]) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    kernels._declare(x, kernels._partition_axes(partition[: x.ndim]))
    return kernels._as_partial(x, [axis for axis in partial_axes if kernels._size(axis) > 1])
