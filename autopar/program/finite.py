"""Locates the origin of a NaN or infinite loss: an input, a parameter, or the first layer with such a result."""

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
    """A loss that is NaN or infinite; raised on every rank, before the update unless ``late``. ``hint`` says what to do."""

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
    """Describe the first value of the step that is not finite; all ranks call this. The forward passes run once more."""
    tensors = batch.tensors if isinstance(batch, Rows) else batch
    inputs = [f"the input {name!r} has one" for name, tensor in sorted(tensors.items()) if not _finite(tensor)]
    masters = [master for group in groups for master in group.masters]
    parameters = [f"the parameter {master.layout.original} has one" for master in masters if not _finite(master.tensor)]
    places: list[tuple[int, int, int, str]] = []
    hooks = [
        child.register_forward_hook(_Watch(places, stage, order, name))
        for stage, module in schedule.stages.items()
        for order, (name, child) in enumerate(layers_of(module).items())
    ]
    schedule.forward(batch, key)
    for hook in hooks:
        hook.remove()
    layers = [
        (microbatch, stage, order, f"it is a result of the layer {name} (stage {stage}, microbatch {microbatch})")
        for microbatch, stage, order, name in places
    ]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (inputs[:1], parameters[:1], sorted(layers)[:1]))
    for kind in range(3):
        said = [(what[kind][0], rank) for rank, what in enumerate(found) if what[kind]]
        if said:
            first, rank = min(said, key=lambda pair: pair[0][:3] if kind == 2 else ())
            return f"{first[3] if kind == 2 else first}, on rank {rank}"
    return "no layer's result has one: the loss itself overflows in the sum over microbatches or ranks"


class _Watch:
    """A forward hook that notes the microbatches in which a layer's result is not finite."""

    def __init__(self, places: list[tuple[int, int, int, str]], stage: int, order: int, name: str) -> None:
        self._places, self._stage, self._order, self._name = places, stage, order, name
        self._results = 0.0  # a half of a microbatch's is half of one

    def __call__(self, module: nn.Module, args: Any, result: Any) -> Any:
        if isinstance(result, Generator):  # a half of a microbatch (halves.py), whose result comes when it ends
            return self._of_half(result)
        self._note(result, 1.0)
        return None

    def _of_half(self, half: Generator[None, None, Any]) -> Generator[None, None, Any]:
        result = yield from half
        self._note(result, 0.5)
        return result

    def _note(self, result: Any, share: float) -> None:
        results = result if isinstance(result, tuple | list) else (result,)
        if not all(_finite(each) for each in results if isinstance(each, Tensor)):
            self._places.append((int(self._results), self._stage, self._order, self._name))
        self._results += share


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
