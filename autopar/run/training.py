"""Runs the loop of ``Program.train``."""

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
    """Run ``steps`` steps and return their losses. ``step`` takes a batch, or a data set from which it reads the next batch, and returns
    the step's record and whether the epoch ended.

    Raises:
        BatchError: there are fewer batches than steps.
        UsageError: ``steps`` isn't a whole number from 0 up.
    """
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 0):
        raise UsageError(
            f"steps is {steps!r}, but must be a non-negative integer",
            "steps=100 trains 100 steps; without steps the training takes one for each batch",
        )
    losses: list[float] = []
    if steps == 0:
        return losses
    for batch in _repeated(batches) if isinstance(batches, Data) or steps is not None else batches:
        record, ends = step(batch)
        losses.append(record["loss"])
        if on_step is not None:
            on_step(len(losses), losses[-1], record)
        # before the loop takes another batch, which the user's iterator would lose
        if len(losses) == steps or ends and steps is None:
            break
    if steps is not None and len(losses) < steps:
        raise BatchError(f"the batches ended after {len(losses)} of {steps} steps", "give a list, or fewer steps")
    return losses


def _repeated(batches: Iterable[Any] | Data) -> Iterator[Any]:
    """Repeat the batches, or the data set, forever; end if there are no batches."""
    while isinstance(batches, Data):
        yield batches
    while True:
        empty = True
        for batch in batches:
            yield batch
            empty = False
        if empty:
            return
