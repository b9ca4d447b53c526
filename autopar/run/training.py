"""The loop of ``Program.train``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from numbers import Integral
from typing import Any

from autopar.errors import BatchError, UsageError
from autopar.run.data import Data

OnStep = Callable[[int, float, dict[str, Any]], None]
"""Called after each step with its number (from 1), its loss and its record."""


def train(
    batches: Iterable[Any] | Data,
    steps: int | None,
    step: Callable[[Any], tuple[dict[str, Any], bool]],
    on_step: OnStep | None,
) -> list[float]:
    """The losses of ``steps`` steps. ``step`` takes a batch, or the data set whose next one is meant; its record, and whether an epoch
    ends.

    Raises:
        BatchError: the batches ended before.
        UsageError: ``steps`` is no number of steps.
    """
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 0):
        raise UsageError(
            f"steps is {steps!r}, but a number of steps must be a whole number from 0 up",
            "steps=100 trains 100 steps; without steps the training takes one for each batch",
        )
    losses: list[float] = []
    given = _without_end(batches) if isinstance(batches, Data) or steps is not None else batches
    for batch in given:
        if steps is not None and len(losses) >= steps:
            break
        record, ends = step(batch)
        losses.append(record["loss"])
        if on_step is not None:
            on_step(len(losses), losses[-1], record)
        if ends and steps is None:
            break
    if steps is not None and len(losses) < steps:
        raise BatchError(f"the batches ended after {len(losses)} of {steps} steps", "give a list, or fewer steps")
    return losses


def _without_end(batches: Iterable[Any] | Data) -> Iterator[Any]:
    """The batches over and over, as long as there are some; or the data set over and over."""
    while isinstance(batches, Data):
        yield batches
    while True:
        empty = True
        for batch in batches:
            yield batch
            empty = False
        if empty:
            return
