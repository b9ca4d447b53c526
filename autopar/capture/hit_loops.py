"""Traces loops over the positions of true values, such as the experts that tokens chose: ``for expert in (counts > 0).nonzero():``.

The number of iterations depends on the data. So the trace runs the body for every position, between two markers, and
``passes.clean.expert_loops`` then proves from the graph that an iteration that eager PyTorch would skip contributes nothing. A loop
without this proof is refused.

A body that counts its iterations would compute something else when eager PyTorch skips some. The positions are therefore in descending
order, although eager PyTorch's are ascending: such a body then differs in every step, which the comparison of graph and model shows. The
comparison is mandatory (``Graph.assumed``) unless each iteration asks for the value of its position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import has_side_effect
from torch.overrides import TorchFunctionMode

from autopar.capture.backward import NotTraceableError, caller
from autopar.capture.blocks import stack
from autopar.errors import OPAQUE_HINT, CaptureError
from autopar.ops.meta import graph_meta
from autopar.ops.source import source_line
from passes.clean.expert_loops import ENTER, LEAVE, lower_expert_loops
from passes.clean.nodes import note


@torch.library.custom_op(f"autopar::{ENTER}", mutates_args=())
def _enter_loop(condition: Tensor) -> None:
    raise AssertionError("markers are never run")


@torch.library.custom_op(f"autopar::{LEAVE}", mutates_args=())
def _leave_loop(condition: Tensor, unread: str) -> None:
    raise AssertionError("markers are never run")


_enter_loop.register_fake(lambda condition: None)
_leave_loop.register_fake(lambda condition, unread: None)
for _name in (ENTER, LEAVE):
    has_side_effect(getattr(torch.ops.autopar, _name).default)  # or export would drop the markers, which have no result

_NONZERO: tuple[Any, ...] = (Tensor.nonzero, torch.nonzero, torch.where)
_SAME_VALUES: tuple[Any, ...] = (
    Tensor.__getitem__,
    *(getattr(Tensor, name) for name in ("squeeze", "view", "reshape", "flatten", "cpu")),
    *(getattr(torch, name) for name in ("squeeze", "reshape", "flatten")),
)
"""Functions whose result has the same values, if it is as long as the operand."""
_READS: dict[Any, Callable[..., Any]] = {
    Tensor.item: lambda value: value,
    Tensor.__int__: lambda value: value,
    Tensor.__index__: lambda value: value,
    Tensor.__format__: format,
}
"""Function that reads the value of a position -> the function of the value."""


class TraceHitLoops(TorchFunctionMode):
    """A context in which a loop over the result of ``nonzero`` runs its body for every position, between markers."""

    def __init__(self) -> None:
        super().__init__()
        self._conditions: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # by the id of positions: the positions, and the condition
        self._values: dict[int, tuple[Tensor, int]] = {}  # by the id of one position: its tensor and value
        self._read: set[int] = set()  # the values that were read since the last ``forget_reads``
        self.loop = ""  # the line of the loop whose body runs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], Tensor) else None
        _, condition = self._conditions.get(id(first), (None, None))
        if condition is not None and first is not None and func is Tensor.unbind and not any(args[1:]) and not kwargs:
            return _Positions(self, condition, tuple(first.shape[1:]))
        _, value = self._values.get(id(first), (None, None))
        if value is not None and _is_among(func, _READS):
            self._read.add(value)
            return _READS[func](value, *args[1:])
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if not self.loop or isinstance(error, CaptureError):
                raise
            # eager PyTorch may never run the body for this position, such as one beyond the experts' parameters
            raise NotTraceableError(
                f"torch.export refused {self.loop}: its control flow depends on the data", OPAQUE_HINT
            ) from error
        if _is_among(func, _NONZERO) and len(args) == 1 and first is not None and first.dim() == 1:
            positions = result[0] if isinstance(result, tuple) else result
            self._conditions[id(positions)] = positions, first
        elif _is_among(func, _SAME_VALUES) and isinstance(result, Tensor) and first is not None:
            if condition is not None and str(result.numel()) == str(first.numel()):
                self._conditions[id(result)] = result, condition
            if value is not None and result.numel() == 1:
                self._values[id(result)] = result, value
        return result

    def numbers(self, positions: Tensor) -> Any:
        """Return the positions as an iterable of numbers; ``None`` if the tensor doesn't have positions."""
        _, condition = self._conditions.get(id(positions), (None, None))
        return _Positions(self, condition) if condition is not None and positions.dim() == 1 else None

    def forget_reads(self) -> set[int]:
        """Return the values of positions that were read since the last call."""
        read, self._read = self._read, set()
        return read

    def position(self, value: int, shape: tuple[int, ...]) -> Tensor:
        """Return a position as a tensor, whose value the trace knows."""
        made = torch.full(shape, value, dtype=torch.int64)
        self._values[id(made)] = made, value
        return made


def _is_among(func: Any, functions: Any) -> bool:
    try:
        return func in functions
    except TypeError:  # an unhashable function
        return False


class _Positions:
    """Iterates over every position of a condition, in descending order: as tensors of ``shape``, or as numbers."""

    def __init__(self, mode: TraceHitLoops, condition: Tensor, shape: tuple[int, ...] | None = None) -> None:
        self._mode, self._condition, self._shape = mode, condition, shape
        self._line = caller()

    def __iter__(self) -> Iterator[Any]:
        torch.ops.autopar.enter_loop(self._condition)
        unread, self._mode.loop = False, self._line
        try:
            for value in reversed(range(self._condition.shape[0])):
                self._mode.forget_reads()
                yield value if self._shape is None else self._mode.position(value, self._shape)
                unread |= self._mode.forget_reads() != {value}
        finally:  # also after a ``break``
            self._mode.loop = ""
        torch.ops.autopar.leave_loop(self._condition, self._line if unread else "")

    def __getattr__(self, name: str) -> Any:
        raise NotTraceableError(
            f"{self._line} uses nonzero() outside of a for loop over its result, whose shape depends on the data",
            OPAQUE_HINT,
        )


def lower_hit_loops(
    gm: fx.GraphModule, parameters: Mapping[fx.Node, str]
) -> tuple[list[tuple[str, str]], dict[int, dict[fx.Node, fx.Node]]]:
    """Lower the loops over experts in ``gm``. Return assumptions about them that only a comparison can confirm, and
    ``LoweredLoops.branched``. ``parameters`` has the names of the parameters' placeholders.

    Raises ``NotTraceableError`` for a loop over the positions of true values that isn't one over experts, and for a branch on whether there
    are any outside of such loops.
    """
    lowered = lower_expert_loops(gm, set(parameters))
    for marker in lowered.refused:
        raise NotTraceableError(
            f"{source_line(marker)}\nloops over nonzero(), or branches on any(), and a skipped iteration may change the result",
            OPAQUE_HINT,
            tuple(path for path, _, _ in stack(marker)),
        )
    graph_meta(gm)["possibly_unused"] = frozenset(parameters[node] for node in lowered.skippable)
    if lowered.skippable:
        note(
            gm,
            f"{len(lowered.skippable)} parameters of experts that forward skips in a step in which no token chooses them get a gradient of "
            "zeros then, and none in eager PyTorch: an optimizer with momentum or weight decay still updates them",
        )
    assumed = [
        (f"{line} loops over experts, and is taken not to count its iterations", OPAQUE_HINT) for line in lowered.unread
    ]
    return assumed, lowered.branched
