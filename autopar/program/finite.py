"""Locates the origin of a NaN or infinite loss: an input, a parameter, or the first layer with a NaN or infinite result."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .microbatches import Microbatches
from .parameters import ParameterGroup
from .share import Batch, Rows
from .spec import layers_of


class NonFiniteLossError(RuntimeError):
    """Raised on every rank if a loss is NaN or infinite: before the update, or after it if ``late``. ``hint`` says what to do."""

    def __init__(self, message: str, late: bool = False) -> None:
        self.late = late
        self.hint = (
            'on_nan="skip" (--on-nan skip) leaves such batches out; a lower learning rate or max_norm may avoid them'
        )
        if late:
            self.hint = (
                "resume from a checkpoint before that step: --log-every 1 then names the first value that is not finite"
            )
        super().__init__(f"{message}; {self.hint}")
        self.message = message


def first_non_finite(schedule: Microbatches, groups: Iterable[ParameterGroup], batch: Batch, key: int) -> str:
    """Repeat a step's forward passes with its ``key`` (``Microbatches.run``); describe the first non-finite value. All ranks call this."""
    tensors = batch.tensors if isinstance(batch, Rows) else batch
    inputs = [f"in the input {name!r}" for name, tensor in sorted(tensors.items()) if not _finite(tensor)]
    masters = [master for group in groups for master in group.masters]
    parameters = [f"in the parameter {master.layout.original}" for master in masters if not _finite(master.tensor)]
    non_finite: list[tuple[int, int, int, str]] = []
    hooks = [
        child.register_forward_hook(_RecordNonFinite(non_finite, stage, order, name))
        for stage, module in schedule.stages.items()
        for order, (name, child) in enumerate(layers_of(module).items())
    ]
    schedule.forward(batch, key)
    for hook in hooks:
        hook.remove()
    layers = [
        (microbatch, stage, order, f"a result of the layer {name} (stage {stage}, microbatch {microbatch})")
        for microbatch, stage, order, name in non_finite
    ]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (inputs[:1], parameters[:1], sorted(layers)[:1]))
    for kind in range(3):
        found = [(firsts[kind][0], rank) for rank, firsts in enumerate(ranks) if firsts[kind]]
        if found:
            first, rank = min(found, key=lambda pair: pair[0][:3] if kind == 2 else ())
            return f"{first[3] if kind == 2 else first}, on rank {rank}"
    return "none in the layers' results: the loss itself overflows in the sum over microbatches or ranks"


class _RecordNonFinite:
    """A forward hook that records the microbatches in which a layer's result is not finite."""

    def __init__(self, non_finite: list[tuple[int, int, int, str]], stage: int, order: int, name: str) -> None:
        self._non_finite, self._stage, self._order, self._name = non_finite, stage, order, name
        self._microbatches = 0.0  # seen so far

    def __call__(self, module: nn.Module, args: Any, result: Any) -> Any:
        if isinstance(result, Generator):  # one half of a microbatch (halves.py): the generator returns the result
            return self._of_half(result)
        self._record(result, 1.0)
        return None

    def _of_half(self, half: Generator[None, None, Any]) -> Generator[None, None, Any]:
        result = yield from half
        self._record(result, 0.5)
        return result

    def _record(self, result: Any, microbatches: float) -> None:
        results = result if isinstance(result, tuple | list) else (result,)
        if not all(_finite(value) for value in results if isinstance(value, Tensor)):
            self._non_finite.append((int(self._microbatches), self._stage, self._order, self._name))
        self._microbatches += microbatches


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
