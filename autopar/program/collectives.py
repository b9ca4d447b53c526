"""Collectives under one name in every torch version, a reduce-scatter that sends half as many bytes on gloo, and an exchange of tensors.

torch 2.13 renamed two collectives; torch 2.11 has only the old names. gloo implements a reduce-scatter as an all-reduce, and every rank
keeps its slice: each of ``n`` ranks sends ``2 (n - 1) / n`` of the tensor. Here ``reduce_scatter`` on gloo is an all-to-all of the slices
and a local sum: a rank sends ``(n - 1) / n`` of the tensor, the least that a reduce-scatter can send (Chan et al., 2007, table 1). The
terms are added in the order of the ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
backend_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Work(Protocol):
    """A running async collective."""

    def wait(self) -> Any:
        """Wait for the collective; on a GPU the current stream waits, not the host."""


def reduce_scatter(
    output: Tensor, input: Tensor, *, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Sum all ranks' ``input``, and write this rank's slice of the sum into ``output``. The slices are equal, in rank order.

    Both tensors are contiguous. With ``async_op``, return the work: ``output`` is valid after its ``wait``.
    """
    if dist.get_backend(group) != "gloo":
        work: Work | None = backend_reduce_scatter(output, input, group=group, async_op=async_op)
        return work
    exchange = _GlooReduceScatter(output, input, group)
    if async_op:
        return exchange
    exchange.wait()
    return None


class _GlooReduceScatter:
    """A reduce-scatter on gloo: an asynchronous all-to-all, and the sum of the received slices."""

    def __init__(self, output: Tensor, input: Tensor, group: dist.ProcessGroup | None) -> None:
        self._output = output
        self._terms = torch.empty_like(input)
        self._work = dist.all_to_all_single(self._terms, input, group=group, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        torch.sum(self._terms.view(-1, self._output.numel()), 0, out=self._output.view(-1))


def exchange(
    sent: Sequence[tuple[int, Tensor]],
    received: Sequence[tuple[int, Tensor]],
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Send each tensor of ``sent`` to its rank of the group, and fill each tensor of ``received`` from its rank.

    For each pair of ranks, the sender and the receiver list the tensors in the same order. They are sent in ``dtype``, from buffers on
    ``device``. All ranks of the group call this."""
    by_rank = [[tensor for _, tensor in sorted(own, key=lambda item: item[0])] for own in (sent, received)]
    sizes = []
    for own in (sent, received):
        count = Counter[int]()
        for rank, tensor in own:
            count[rank] += tensor.numel()
        sizes.append([count[rank] for rank in range(dist.get_world_size(group))])
    outgoing, incoming = (torch.empty(sum(own), dtype=dtype, device=device) for own in sizes)
    for tensor, part in zip(by_rank[0], outgoing.split([tensor.numel() for tensor in by_rank[0]]), strict=True):
        part.view(tensor.shape).copy_(tensor)
    dist.all_to_all_single(incoming, outgoing, sizes[1], sizes[0], group=group)
    for tensor, part in zip(by_rank[1], incoming.split([tensor.numel() for tensor in by_rank[1]]), strict=True):
        tensor.copy_(part.view(tensor.shape))


class ShardedReduceScatter:
    """Adapts ``reduce_scatter`` to ``FSDPModule.set_custom_reduce_scatter``."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised tensor for FSDP2's operand or result."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Work | None:
        assert op == dist.ReduceOp.SUM, op  # FSDP2 is told to sum
        return reduce_scatter(output_tensor, input_tensor, group=group, async_op=async_op)


class RowFormat(Protocol):
    """A format in which rows are sent: each row as some bytes."""

    def pack(self, rows: Tensor) -> Tensor:
        """Return ``rows [n, h]`` as uint8 ``[n, bytes]``."""
        ...

    def unpack(self, packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Return the rounded rows ``[n, width]``."""
        ...


Formats = tuple[RowFormat | None, RowFormat | None]
"""The formats of rows in the forward pass and of their gradients in the backward pass; ``None`` sends them unchanged."""
