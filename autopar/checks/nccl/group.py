"""A process group that records its operations and computes results from this rank's operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.checks.nccl.records import Communicator
from autopar.checks.nccl.works import Issue, LateWork, Values
from autopar.torch_private import is_fake, memory

if TYPE_CHECKING:
    from autopar.checks.nccl.recorder import Recorder

BACKEND = "recording"


def _reduce_op(options: Any) -> str:
    op = getattr(getattr(options, "reduceOp", None), "op", None)
    return str(op).removeprefix("RedOpType.").lower() if op is not None else "sum"


def _reduced(op: str, tensors: Sequence[Tensor]) -> Tensor:
    """Reduce tensors by an op of ``_reduce_op``."""
    stacked = torch.stack(list(tensors))
    if op == "sum":
        return stacked.sum(0, dtype=stacked.dtype)
    if op == "product":
        return stacked.prod(0, dtype=stacked.dtype)
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def _shares(a: Tensor, b: Tensor) -> bool:
    return memory(a) == memory(b)


_Group: Any = dist.ProcessGroup  # whose methods have two signatures each, of which torch calls one


class RecordingGroup(_Group):
    """A process group with the interface of torch's ``ProcessGroup``."""

    def __init__(self, recorder: Recorder, rank: int, communicator: Communicator) -> None:
        super().__init__(rank, len(communicator.members))
        self._recorder, self._rank, self.communicator = recorder, rank, communicator
        self._count = len(communicator.members)

    def size(self) -> int:
        return self._count

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

    def _issue(self, kind: str, agreed: Sequence[Tensor] = (), **more: Any) -> LateWork:
        return self._recorder.issue(self, Issue(kind, agreed, **more))

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

        def joined(every: list[list[Tensor]]) -> list[Tensor]:
            if kind == "broadcast":
                return every[root]
            return [_reduced(detail, theirs) for theirs in zip(*every, strict=True)]

        collected = self._exchanged(kind, tensors, joined)
        return self._issue(kind, tensors, results=tensors, values=values, collected=collected, detail=detail, root=root)

    def _exchanged(
        self, kind: str, sent: Sequence[Tensor], joined: Callable[[list[list[Tensor]]], list[Tensor]]
    ) -> Values | None:
        """Return the values that ``joined`` computes from all members' integers, because they may determine what happens next, such as
        the number of rows that a rank gets, or the owner of a parameter; ``None`` for other tensors."""
        exchanges = self._recorder.objects.exchanges and sent and not any(map(is_fake, sent))
        if not exchanges or any(tensor.is_floating_point() or tensor.is_complex() for tensor in sent):
            return None
        collect = self._recorder.objects.sent(self, kind, [tensor.detach().clone() for tensor in sent])
        return lambda: joined(collect())

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> LateWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> LateWork:
        def values() -> list[Tensor]:
            return [
                own.detach().reshape(-1).repeat(self._count).view(whole.shape)
                for whole, own in zip(outputs, inputs, strict=True)
            ]

        def joined(every: list[list[Tensor]]) -> list[Tensor]:
            several = zip(outputs, zip(*every, strict=True), strict=True)
            return [torch.cat([own.reshape(-1) for own in theirs]).view(whole.shape) for whole, theirs in several]

        operands = [own for whole, own in zip(outputs, inputs, strict=True) if not _shares(whole, own)]
        collected = self._exchanged("all_gather", inputs, joined)
        return self._issue("all_gather", inputs, operands=operands, results=outputs, values=values, collected=collected)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> LateWork:
        results = [tensor for several in outputs for tensor in several]

        def values() -> list[Tensor]:
            return [own.detach().clone() for several, own in zip(outputs, inputs, strict=True) for _ in several]

        def joined(every: list[list[Tensor]]) -> list[Tensor]:
            return [theirs[number] for number in range(len(inputs)) for theirs in every]

        collected = self._exchanged("all_gather", inputs, joined)
        return self._issue("all_gather", inputs, operands=inputs, results=results, values=values, collected=collected)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> LateWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> LateWork:
        def values() -> list[Tensor]:
            return [
                whole.detach().reshape(self._count, -1)[self._rank].clone().view(own.shape)
                for own, whole in zip(outputs, inputs, strict=True)
            ]

        operands = [whole for own, whole in zip(outputs, inputs, strict=True) if not _shares(whole, own)]
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
        self, output: Tensor, input: Tensor, taken: Any = None, sent: Any = None, opts: Any = None
    ) -> LateWork:
        splits = (tuple(sent or ()), tuple(taken or ())) if sent or taken else None
        parts = list(input.detach().split(list(sent) if sent else len(input) // self._count))
        collected = self._exchanged("all_to_all", parts, lambda every: [torch.cat([own[self._rank] for own in every])])
        agreed = [input] if splits is None else []
        detail = "" if splits is None else f"rows of {str(input.dtype).removeprefix('torch.')}{list(input.shape[1:])}"
        return self._issue(
            "all_to_all",
            agreed,
            operands=[input],
            results=[output],
            values=lambda: [_prefix(output, input)],
            collected=collected,
            detail=detail,
            splits=splits,
        )

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> LateWork:
        def values() -> list[Tensor]:
            return [_prefix(whole, own) for whole, own in zip(outputs, inputs, strict=True)]

        sizes = tuple(own.numel() for own in inputs), tuple(whole.numel() for whole in outputs)
        detail = f"parts of {str(inputs[0].dtype).removeprefix('torch.')}"
        return self._issue("all_to_all", operands=inputs, results=outputs, values=values, detail=detail, splits=sizes)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> LateWork:
        results = [tensor for several in outputs for tensor in several]

        def values() -> list[Tensor]:
            return [own.detach().clone() for several, own in zip(outputs, inputs, strict=False) for _ in several]

        return self._issue("gather", inputs, operands=inputs, results=results, values=values, root=opts.rootRank)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> LateWork:
        def values() -> list[Tensor]:
            return [parts[self._rank].detach().clone() for parts in inputs] or [own.detach().clone() for own in outputs]

        operands = [part for parts in inputs for part in parts]
        return self._issue("scatter", outputs, operands=operands, results=outputs, values=values, root=opts.rootRank)

    def barrier(self, opts: Any = None) -> LateWork:
        return self._issue("barrier")

    # -- transfers -----------------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> LateWork:
        return self._issue("send", tensors, operands=tensors, root=dst)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> LateWork:
        def values() -> list[Tensor]:
            return [self._recorder.drawn(tensor, f"{self.communicator.name} {src}") for tensor in tensors]

        return self._issue("recv", tensors, results=tensors, values=values, root=src)


def _prefix(output: Tensor, input: Tensor) -> Tensor:
    """Copy this rank's elements as far as both have them, then zeros."""
    value = torch.zeros_like(output).view(-1)
    count = min(output.numel(), input.numel())
    value[:count] = input.detach().reshape(-1)[:count]
    return value.view(output.shape)
