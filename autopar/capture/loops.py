"""Refuses long loops over data in a forward: a trace unrolls loops, and a recurrence over thousands of positions becomes a graph that is
too large to plan."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType, MethodWrapperType
from typing import Any

from torch.overrides import TorchFunctionMode

from autopar.capture.backward import NOT_USER_CODE, TORCH, NotTraceableError
from autopar.errors import OPAQUE_HINT

MAX_ITERATIONS = 1000
"""Maximum executions of an expression in one function call: more than a model has layers, fewer than a long sequence has positions."""


class RefuseLongLoops(TorchFunctionMode):
    """A context in which a loop of more than ``MAX_ITERATIONS`` raises ``NotTraceableError``, so that its module may become opaque."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[FrameType, Counter[int]]] = []  # open frames, and how often each instruction ran

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, MethodWrapperType):  # torch itself reads attributes of tensors
            frame = _user_frame(sys._getframe(1))
            if frame is not None:
                self._count(frame)
        return func(*args, **(kwargs or {}))

    def __exit__(self, *exception: Any) -> None:
        self._calls.clear()
        super().__exit__(*exception)

    def _count(self, frame: FrameType) -> None:
        callers, outer = set[FrameType](), frame.f_back
        while outer is not None:
            callers.add(outer)
            outer = outer.f_back
        while self._calls and self._calls[-1][0] is not frame and self._calls[-1][0] not in callers:
            self._calls.pop()
        if not self._calls or self._calls[-1][0] is not frame:
            self._calls.append((frame, Counter()))
        place, counts = frame.f_lasti, self._calls[-1][1]
        counts[place] += 1
        if counts[place] > MAX_ITERATIONS:
            code = frame.f_code
            raise NotTraceableError(
                f"{code.co_filename}:{frame.f_lineno} runs more than {MAX_ITERATIONS:,} times in one call of {code.co_name}: a trace would "
                "unroll this loop over data",
                OPAQUE_HINT,
            )


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame, from ``frame`` outwards, that isn't torch's; ``None`` if it is autopar's."""
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, "<")):
        frame = frame.f_back
    return None if frame is None or frame.f_code.co_filename.startswith(NOT_USER_CODE) else frame
