"""Updates masters whose gradients or Adam moments are in bfloat16, chunk by chunk.

torch's optimizers compute in the dtype of the parameter, and need gradients and states in it. So a chunk of the masters at a time gets
its gradients and moments in float32, the user's optimizer updates the chunk, and the new moments are rounded to bfloat16. Only a chunk's
copies are in memory.

Moments are not rounded to nearest. With ``beta2=0.999`` a step changes ``exp_avg_sq`` by 0.1 % of the difference to the squared gradient,
and neighbours in bfloat16 are 0.4 to 0.8 % apart: rounded to nearest, it could grow, but never shrink again. Here an element is rounded up
if the 16 bits that bfloat16 drops exceed a threshold, and from step to step its threshold takes all 2**16 values, in the order of a
low-discrepancy sequence (multiples of the golden ratio, modulo 1). So the roundings of an element have the mean of
exact arithmetic. A threshold is a function of the step and of the element's position in the user's parameter: there is no random state, and
the rounding is the same under every plan and on all ranks that have a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .optimizers import RefusedOptimizerError
from .parameters import Master
from .world import Layout, LoadedProgram, World

CHUNK_ELEMENTS = 2**22
"""The most elements that are updated at a time."""
MOMENTS = ("exp_avg", "exp_avg_sq")
_WITH_MOMENTS = ("Adam", "AdamW", "NAdam", "RAdam")
# 2**16 times the golden ratio and the root of 2, modulo 2**16; odd numbers
_STEP_STRIDE, _POSITION_STRIDE = 40503, 27147


class ChunkedUpdates(torch.optim.Optimizer):
    """Runs ``optimizer``, whose groups and state this object shares, on chunks of ``masters`` that are converted to the masters' dtype.

    A chunk is a list of flat parts of masters, which replace the parameters in the optimizer's groups while it updates them: an elementwise
    optimizer computes the same on parts. The states that are not tensors of the parameter's shape (``step``) are those of its last part.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, masters: Sequence[Master], program: LoadedProgram, world: World
    ) -> None:
        super().__init__([{"params": []}], {})
        self._optimizer, self._coordinates = optimizer, world.coordinates
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self._masters = {id(master.tensor): master for master in masters}
        self._rounds = "bfloat16_moments" in program.plan["allow"]

    @staticmethod
    def check(torch_class: str, name: str, allow: Sequence[str]) -> None:
        """Raise ``RefusedOptimizerError`` unless the optimizer, of torch's class ``torch_class`` or of a class of the user's (``""``), can
        be updated in chunks, and has moments if they are to be rounded."""
        if "bfloat16_moments" in allow and torch_class not in _WITH_MOMENTS:
            raise RefusedOptimizerError(
                f"the plan keeps Adam's moments in bfloat16 (bfloat16_moments), but {name} does not support that (supported: "
                f"{', '.join(_WITH_MOMENTS)})",
                "train with one of them, or plan without bfloat16_moments in allow",
            )
        if not torch_class:
            raise RefusedOptimizerError(
                f"the plan's gradients are in bfloat16 (bfloat16_gradients), and {name} may need them in the parameters' dtype",
                "train with an elementwise optimizer of torch, such as AdamW, or plan without bfloat16_gradients in allow",
            )

    def state_dtype(self, master: Master, key: str) -> torch.dtype:
        """Return the dtype of a state that has the master's shape."""
        rounded = self._rounds and key in MOMENTS and master.layout.dtype.itemsize == 2 and master.tensor.dim() > 0
        return torch.bfloat16 if rounded and master.tensor.dtype == torch.float32 else master.tensor.dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        everything = [group["params"] for group in self.param_groups]
        try:
            for chunk in _chunks(everything, self.state):
                self._update(chunk)
        finally:
            for group, params in zip(self.param_groups, everything, strict=True):
                group["params"] = params

    def _update(self, chunk: Sequence[_Part]) -> None:
        for group in self.param_groups:
            group["params"] = []
        stand_ins = []
        for part in chunk:
            stand_in = nn.Parameter(part.of(part.param.detach()))
            assert part.param.grad is not None
            stand_in.grad = part.of(part.param.grad.contiguous()).to(stand_in.dtype)
            if part.before:
                self.state[stand_in] = {key: part.of_state(value) for key, value in part.before.items()}
            self.param_groups[part.group]["params"].append(stand_in)
            stand_ins.append(stand_in)
        self._optimizer.step()
        for part, stand_in in zip(chunk, stand_ins, strict=True):
            if new := self.state.pop(stand_in, {}):
                self._store(part, new)

    def _store(self, part: _Part, new: Mapping[str, Any]) -> None:
        """Store the new state of a part in the state of its parameter; moments are rounded if their dtype says so."""
        state, master = self.state[part.param], self._masters[id(part.param)]
        thresholds: Tensor | None = None
        for key, value in new.items():
            if not (isinstance(value, Tensor) and value.dim()):
                if part.high == part.param.numel():
                    state[key] = value
                continue
            if key not in state:
                dtype = self.state_dtype(master, key)
                state[key] = torch.zeros(part.param.shape, dtype=dtype, device=value.device)
            target = part.of(state[key])
            if target.dtype != value.dtype:
                if thresholds is None:
                    first = master.first + part.low
                    where = positions(master.layout, self._coordinates, first, first + value.numel(), value.device)
                    thresholds = thresholds_at(where, new["step"])
                round_into(target, value, thresholds)
            elif target.data_ptr() != value.data_ptr():  # it is no view of the state: the optimizer has created it
                target.copy_(value)


@dataclass(frozen=True, slots=True)
class _Part:
    """The elements ``low`` to ``high`` (exclusive) of a parameter in a group. ``before`` is the parameter's state before the step."""

    group: int
    param: Tensor
    low: int
    high: int
    before: Mapping[str, Any]

    def of(self, tensor: Tensor) -> Tensor:
        """Return a view of the part of a tensor of the parameter's shape; a scalar has no parts."""
        return tensor.view(-1)[self.low : self.high] if self.param.dim() else tensor

    def of_state(self, value: Any) -> Any:
        """Return the part of a state, in the parameter's dtype; a copy of a number, if other parts need its value, too."""
        if not isinstance(value, Tensor):
            return value
        if value.dim():
            return self.of(value).to(self.param.dtype)
        return value if self.high - self.low == self.param.numel() else value.clone()


def _chunks(groups: Sequence[Sequence[Tensor]], states: Mapping[Tensor, Any]) -> Iterator[list[_Part]]:
    """Yield the parts of all parameters with a gradient, in chunks of at most ``CHUNK_ELEMENTS``."""
    chunk: list[_Part] = []
    room = CHUNK_ELEMENTS
    for group, params in enumerate(groups):
        for param in params:
            before, low = dict(states.get(param, {})), 0
            while param.grad is not None and low < param.numel():
                high = min(param.numel(), low + room)
                chunk.append(_Part(group, param, low, high, before))
                low, room = high, room - (high - low)
                if not room:
                    yield chunk
                    chunk, room = [], CHUNK_ELEMENTS
    if chunk:
        yield chunk


# -- rounding ---------------------------------------------------------------------------------------------------------


def positions(
    layout: Layout, coordinates: Mapping[str, tuple[int, int]], first: int, stop: int, device: torch.device
) -> Tensor:
    """Return the positions, in the user's parameter, of the elements ``first`` to ``stop`` of this rank's slice; both in row-major order.

    Padding gets positions, too, of other elements: its values are zeros.
    """
    found = torch.arange(first, stop, device=device)
    below = 1  # the elements of one row of this dim in the user's parameter
    part = layout.part or (-1, 0, 0)
    sizes = (len(layout.stacked), *layout.original_shape) if layout.stacked else layout.original_shape
    for dim in reversed(range(len(sizes))):
        (start, extent), size = layout.window(coordinates)[dim], sizes[dim]
        start += part[1] if dim == part[0] else 0
        if start or extent != size:
            row = found.div(extent * below, rounding_mode="floor") if extent else found
            found += row * ((size - extent) * below) + start * below
        below *= size
    return found


def thresholds_at(positions: Tensor, step: Any) -> Tensor:
    """Return the thresholds of the elements at ``positions`` after update number ``step``: integers below 2**16."""
    count = step.long() if isinstance(step, Tensor) else int(step)
    return (positions * _POSITION_STRIDE + count * _STEP_STRIDE).bitwise_and_(0xFFFF).to(torch.int32)


def round_into(target: Tensor, values: Tensor, thresholds: Tensor) -> None:
    """Round float32 ``values``, which this overwrites, to the bfloat16 tensor ``target``: towards zero, or away from zero if the sum of the
    16 bits that are dropped and the threshold carries. Values that bfloat16 has stay as they are."""
    halves = values.view(torch.int32).add_(thresholds).view(torch.int16)  # little-endian: the kept half comes second
    target.view(torch.int16).copy_(halves[1::2])
