"""A process group that records its operations, and computes their results only from this rank's operands.

The results have the right shapes, not the values of a real run: an all-reduce leaves its tensor as it is, an all-gather repeats this
rank's shard. Only integer tensors are exchanged with other ranks, through files (``RecordingGroup._exchange``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.checks.nccl.records import Communicator
from autopar.checks.nccl.works import IssueRequest, LateWork, Values
from autopar.torch_private import is_fake, memory

if TYPE_CHECKING:
    from autopar.checks.nccl.recorder import Recorder

BACKEND = "recording"


def _reduce_op(options: Any) -> str:
    op = getattr(getattr(options, "reduceOp", None), "op", None)
    return str(op).removeprefix("RedOpType.").lower() if op is not None else "sum"


def _reduced(op: str, tensors: Sequence[Tensor]) -> Tensor:
    """Reduce tensors by ``op``, a name that ``_reduce_op`` returns."""
    stacked = torch.stack(list(tensors))
    if op == "sum":
        return stacked.sum(0, dtype=stacked.dtype)
    if op == "product":
        return stacked.prod(0, dtype=stacked.dtype)
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return memory(a) == memory(b)


_Group: Any = dist.ProcessGroup  # untyped: its stubs give each method two signatures, and torch calls only one


class RecordingGroup(_Group):
    """A process group with the interface of torch's ``ProcessGroup``."""

    def __init__(self, recorder: Recorder, rank: int, communicator: Communicator) -> None:
        super().__init__(rank, len(communicator.members))
        self._recorder, self._rank, self.communicator = recorder, rank, communicator
        self._size = len(communicator.members)

    def size(self) -> int:
        return self._size

    getSize = size  # noqa: N815

    def rank(self) -> int:
        return self._rank

    getRank = rank  # noqa: N815

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    @property
    def group_name(self) -> str:
        return self.communicator.name

    pg_name = group_name

    def _set_group_name(self, name: str) -> None:
        pass

    def __repr__(self) -> str:
        return f"RecordingGroup({self.communicator}, rank {self._rank})"

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def _issue(self, kind: str, must_match: Sequence[Tensor] = (), **more: Any) -> LateWork:
        return self._recorder.issue(self, IssueRequest(kind, must_match, **more))

    # -- collectives ---------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> LateWork:
        return self._in_place("all_reduce", tensors, detail=_reduce_op(opts))

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> LateWork:
        return self._in_place("broadcast", tensors, root=opts.rootRank)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> LateWork:
        return self._in_place("reduce", tensors, root=opts.rootRank, detail=_reduce_op(opts))

    def _in_place(self, kind: str, tensors: list[Tensor], detail: str = "", root: int = -1) -> LateWork:
        def values() -> list[Tensor]:
            return [tensor.detach().clone() for tensor in tensors]

        def combine(ranks: list[list[Tensor]]) -> list[Tensor]:
            if kind == "broadcast":
                return ranks[root]
            return [_reduced(detail, operands) for operands in zip(*ranks, strict=True)]

        exchanged = self._exchange(kind, tensors, combine)
        return self._issue(kind, tensors, results=tensors, values=values, exchanged=exchanged, detail=detail, root=root)

    def _exchange(
        self, kind: str, sent: Sequence[Tensor], combine: Callable[[list[list[Tensor]]], list[Tensor]]
    ) -> Values | None:
        """Send integer tensors to the other members, and return a function that combines all members' tensors; ``None`` for other tensors,
        or if this rank is recorded alone. Integers may determine a program's next operations, such as how many rows a rank receives."""
        exchanges = self._recorder.objects.exchanges and sent and not any(map(is_fake, sent))
        if not exchanges or any(tensor.is_floating_point() or tensor.is_complex() for tensor in sent):
            return None
        collect = self._recorder.objects.send(self, kind, [tensor.detach().clone() for tensor in sent])
        return lambda: combine(collect())

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> LateWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> LateWork:
        def values() -> list[Tensor]:
            return [
                shard.detach().reshape(-1).repeat(self._size).view(output.shape)
                for output, shard in zip(outputs, inputs, strict=True)
            ]

        def combine(ranks: list[list[Tensor]]) -> list[Tensor]:
            pairs = zip(outputs, zip(*ranks, strict=True), strict=True)
            return [torch.cat([shard.reshape(-1) for shard in shards]).view(output.shape) for output, shards in pairs]

        operands = [shard for output, shard in zip(outputs, inputs, strict=True) if not _same_memory(output, shard)]
        exchanged = self._exchange("all_gather", inputs, combine)
        return self._issue("all_gather", inputs, operands=operands, results=outputs, values=values, exchanged=exchanged)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> LateWork:
        results = [tensor for tensors in outputs for tensor in tensors]

        def values() -> list[Tensor]:
            return [shard.detach().clone() for tensors, shard in zip(outputs, inputs, strict=True) for _ in tensors]

        def combine(ranks: list[list[Tensor]]) -> list[Tensor]:
            return [operands[i] for i in range(len(inputs)) for operands in ranks]

        exchanged = self._exchange("all_gather", inputs, combine)
        return self._issue("all_gather", inputs, operands=inputs, results=results, values=values, exchanged=exchanged)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> LateWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> LateWork:
        def values() -> list[Tensor]:
            return [
                input.detach().reshape(self._size, -1)[self._rank].clone().view(shard.shape)
                for shard, input in zip(outputs, inputs, strict=True)
            ]

        operands = [input for shard, input in zip(outputs, inputs, strict=True) if not _same_memory(input, shard)]
        detail = _reduce_op(opts)
        return self._issue("reduce_scatter", outputs, operands=operands, results=outputs, values=values, detail=detail)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> LateWork:
        def values() -> list[Tensor]:
            return [parts[self._rank].detach().clone() for parts in inputs]

        operands = [part for parts in inputs for part in parts]
        detail = _reduce_op(opts)
        return self._issue("reduce_scatter", outputs, operands=operands, results=outputs, values=values, detail=detail)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: Any = None, input_splits: Any = None, opts: Any = None
    ) -> LateWork:
        splits = (tuple(input_splits or ()), tuple(output_splits or ())) if input_splits or output_splits else None
        parts = list(input.detach().split(list(input_splits) if input_splits else len(input) // self._size))
        exchanged = self._exchange("all_to_all", parts, lambda ranks: [torch.cat([sent[self._rank] for sent in ranks])])
        detail = "" if splits is None else f"rows of {str(input.dtype).removeprefix('torch.')}{list(input.shape[1:])}"
        return self._issue(
            "all_to_all",
            [input] if splits is None else [],
            operands=[input],
            results=[output],
            values=lambda: [_resized(input, output)],
            exchanged=exchanged,
            detail=detail,
            splits=splits,
        )

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> LateWork:
        def values() -> list[Tensor]:
            return [_resized(sent, received) for received, sent in zip(outputs, inputs, strict=True)]

        sizes = tuple(sent.numel() for sent in inputs), tuple(received.numel() for received in outputs)
        detail = f"parts of {str(inputs[0].dtype).removeprefix('torch.')}"
        return self._issue("all_to_all", operands=inputs, results=outputs, values=values, detail=detail, splits=sizes)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> LateWork:
        results = [tensor for tensors in outputs for tensor in tensors]

        def values() -> list[Tensor]:
            return [shard.detach().clone() for tensors, shard in zip(outputs, inputs, strict=False) for _ in tensors]

        return self._issue("gather", inputs, operands=inputs, results=results, values=values, root=opts.rootRank)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> LateWork:
        def values() -> list[Tensor]:
            received = [parts[self._rank] for parts in inputs] or outputs  # only the root has inputs
            return [tensor.detach().clone() for tensor in received]

        operands = [part for parts in inputs for part in parts]
        return self._issue("scatter", outputs, operands=operands, results=outputs, values=values, root=opts.rootRank)

    def barrier(self, opts: Any = None) -> LateWork:
        return self._issue("barrier")

    # -- transfers -----------------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> LateWork:
        return self._issue("send", tensors, operands=tensors, root=dst)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> LateWork:
        def values() -> list[Tensor]:
            return [self._recorder.random_like(tensor, f"{self.communicator.name} {src}") for tensor in tensors]

        return self._issue("recv", tensors, results=tensors, values=values, root=src)


def _resized(input: Tensor, output: Tensor) -> Tensor:
    """Copy ``input`` into a tensor like ``output``, truncated or padded with zeros."""
    value = torch.zeros_like(output).view(-1)
    count = min(output.numel(), input.numel())
    value[:count] = input.detach().reshape(-1)[:count]
    return value.view(output.shape)
