"""A mixture of experts in a layer that is computed in two halves: while the rows of one half travel, the other computes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from . import halves, kernels_experts
from .mesh_axes import Axis, group_of
from .spmd import spmd


@torch.compiler.disable  # the numbers of tokens depend on the batch
def experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    parameters: Sequence[Tensor],
    body: kernels_experts.Body,
    count: int,
    **axes: Sequence[Axis],
) -> Generator[None, None, Tensor]:
    """``kernels_experts.experts``, which yields while rows travel to their experts, and while they travel back."""
    if spmd.is_type_checking():
        return kernels_experts.experts(x, index, weights, parameters, body, count, **axes)
    given = axes.get("owners", ()), axes.get("exchange", ()), axes.get("partial_axes", ())
    return (yield from kernels_experts.in_steps(_sent, (x, index, weights), parameters, body, count, given))


def _sent(rows: Tensor, axes: Sequence[Axis], sent: list[int], taken: list[int]) -> Callable[[], Tensor]:
    group = group_of(*axes)
    there = lambda x: _exchange(x, group, sent, taken)  # noqa: E731
    return halves.begin(rows, there, lambda x: _exchange(x, group, taken, sent)).wait


def _exchange(rows: Tensor, group: dist.ProcessGroup, sent: list[int], taken: list[int]) -> halves.Finish:
    found, rows = rows.new_empty(sum(taken), *rows.shape[1:]), rows.contiguous()
    work = dist.all_to_all_single(found, rows, taken, sent, group=group, async_op=True)

    def finish() -> Tensor:
        assert work is not None and rows is not None  # which must live until then
        work.wait()
        return found

    return finish
