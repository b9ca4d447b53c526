"""Loops over data in a forward: a trace writes every turn of them down, so that a recurrence over thousands of positions becomes a graph
that no plan can be searched for in reasonable time."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType, MethodWrapperType
from typing import Any

from torch.overrides import TorchFunctionMode

from autopar.capture.backward import OPAQUE_HINT, OURS, TORCH, KeptWholeError

TURNS = 1000
"""How often one expression may be computed in one call of its function. Layers are fewer, positions are more."""


class ShortLoops(TorchFunctionMode):
    """Inside, a loop of more than ``TURNS`` turns raises ``KeptWholeError``: the module that has the loop can be kept as one op."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[
            tuple[FrameType, Counter[int]]
        ] = []  # of functions that have not returned, and how often each instruction ran

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = _of_user(sys._getframe(1))
        if frame is not None and not isinstance(func, MethodWrapperType):  # torch itself reads attributes of tensors
            self._count(frame)
        return func(*args, **(kwargs or {}))

    def __exit__(self, *exception: Any) -> None:
        self._calls.clear()
        super().__exit__(*exception)

    def _count(self, frame: FrameType) -> None:
        around, outer = set[FrameType](), frame.f_back
        while outer is not None:
            around.add(outer)
            outer = outer.f_back
        while self._calls and self._calls[-1][0] is not frame and self._calls[-1][0] not in around:
            self._calls.pop()
        if not self._calls or self._calls[-1][0] is not frame:
            self._calls.append((frame, Counter()))
        place, turns = frame.f_lasti, self._calls[-1][1]
        turns[place] += 1
        if turns[place] > TURNS:
            code = frame.f_code
            raise KeptWholeError(
                f"{code.co_filename}:{frame.f_lineno} runs more than {TURNS:,} times in one call of {code.co_name}: a loop over data would "
                "be written out turn by turn",
                OPAQUE_HINT,
            )


def _of_user(frame: FrameType | None) -> FrameType | None:
    """The innermost frame from ``frame`` on that is not torch's; ``None`` if it is autopar's, as around a forward."""
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, "<")):
        frame = frame.f_back
    return None if frame is None or frame.f_code.co_filename.startswith(OURS) else frame
