"""When the last gradient of a group of parameters arrives in a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable


class Arrivals:
    """Counts the gradients of a group that a step still lacks: one of every parameter in every microbatch.

    A parameter's hook references this, and not the group: the garbage collector does not see a parameter's hooks, so the group, and with
    it the process groups, would never be freed. ``complete`` is called when the last gradient arrives.
    """

    def __init__(self, each_step: int) -> None:
        self._each_step, self.missing = each_step, each_step
        self.complete: weakref.WeakMethod[Callable[[], None]] | None = None

    def reset(self) -> None:
        self.missing = self._each_step

    def count(self) -> None:
        self.missing -= 1
        complete = self.complete and self.complete()
        if complete is not None and self.missing <= 0:
            if self.missing < 0:
                raise RuntimeError("a parameter got a gradient after the reduction of its group had started")
            complete()
