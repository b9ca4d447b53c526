"""Async operations that deliver their results only at ``wait``, the latest that NCCL may (unless ``Recorder.late`` is false)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.checks.nccl.places import place
from autopar.checks.nccl.records import Wait

if TYPE_CHECKING:
    from autopar.checks.nccl.recorder import Recorder

Values = Callable[[], Sequence[Tensor]]
"""A function that computes the values of an operation's results."""


@dataclass(frozen=True, slots=True)
class IssueRequest:
    """An operation to issue. It reads ``operands`` and writes ``results``.

    ``exchanged`` computes the results at ``wait``, from the operands of all ranks. Without it, ``values`` computes them at once, on this
    rank alone. ``must_match`` has the tensors whose sizes and dtypes all ranks must agree on. ``Operation`` explains the other fields.
    """

    kind: str
    must_match: Sequence[Tensor] = ()
    operands: Sequence[Tensor] = ()
    results: Sequence[Tensor] = ()
    values: Values | None = None
    exchanged: Values | None = None
    detail: str = ""
    root: int = -1
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None


_equal = torch.equal  # the unpatched function


def _bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, for comparisons in which NaN equals NaN."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _poison(tensor: Tensor) -> None:
    """Poison a tensor (a float with NaN), so that a read or write before ``wait`` shows."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.logical_not_()
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max // 3)


class LateWork(dist.Work):
    """The ``Work`` of an async operation. With ``Recorder.late``, results are poisoned from the issue to ``wait``, which also checks that
    neither they nor the operands were written meanwhile. Otherwise the operation delivers its results at once."""

    def __init__(
        self,
        recorder: Recorder,
        index: int,
        name: str,
        operands: Sequence[Tensor],
        results: Sequence[Tensor],
        values: Values,
    ) -> None:
        super().__init__()
        self._recorder, self._index, self._name = recorder, index, name
        self._results, self._values = [result.detach() for result in results], values
        self._operands: list[tuple[Tensor, Tensor]] = []
        self._poisoned: list[Tensor] = []
        self._done = False
        with torch.no_grad():
            if not recorder.late:
                self._deliver()
                return
            self._operands = [(tensor.detach(), tensor.detach().clone()) for tensor in operands if tensor.numel()]
            for result in self._results:
                if result.numel():
                    _poison(result)
            self._poisoned = [result.clone() for result in self._results]

    def wait(self, timeout: Any = None) -> bool:
        self._recorder.events.append(Wait(self._index, self._recorder.streams[-1], place()))
        if not self._done:
            self._done = True
            if self._recorder.late:
                with torch.no_grad():
                    self._check_unwritten()
                    self._deliver()
            self._operands, self._poisoned = [], []
        return True

    def _check_unwritten(self) -> None:
        watched = [
            *(("an operand", *pair) for pair in self._operands),
            *(("a result", *pair) for pair in zip(self._results, self._poisoned, strict=True)),
        ]
        for what, now, before in watched:
            if now.numel() and not _equal(_bytes(now), _bytes(before)):
                self._recorder.races.append(f"{what} of {self._name} is written before the wait at {place()}")

    def _deliver(self) -> None:
        for result, value in zip(self._results, self._values(), strict=True):
            if result.numel():
                result.copy_(value)

    def is_completed(self) -> bool:
        return self._done or not self._recorder.late

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return self._results

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._results)
        return future
