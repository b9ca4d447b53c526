"""Evaluates the model on held-out data while it trains."""

from __future__ import annotations

from collections.abc import Callable

from .loader import Loader
from .trainer import Trainer


class HeldOut:
    """Held-out data, which are evaluated after every ``every`` steps (``None``: only at the end).

    ``before_batch`` is called with the number of each batch, from 1. Raises ``ModeError`` if the program can't evaluate the model.
    """

    def __init__(
        self, trainer: Trainer, loader: Loader, every: int | None, before_batch: Callable[[int], None]
    ) -> None:
        trainer.check_evaluation()
        self._trainer, self._loader, self._every, self._before_batch = trainer, loader, every, before_batch

    def is_due(self, step: int, over: bool) -> bool:
        """Return whether to evaluate after ``step``; ``over``: it is the last one."""
        return over or (self._every is not None and step % self._every == 0)

    def loss(self) -> float:
        """Return the mean of the losses of the data's global batches. All ranks call this."""
        losses = []
        for number, rows in enumerate(self._loader.epoch(), 1):
            self._before_batch(number)
            losses.append(self._trainer.evaluate(rows))
        return sum(losses) / len(losses)
