"""The training as people write it on one device: eager PyTorch, torch's optimizers, clipping and schedulers. Nothing of autopar's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn


def plain_loop(
    model: nn.Module,
    losses: Iterable[Callable[[], Tensor]],
    make: Callable[[Any], Any],
    schedule: Callable[[Any], Any] | None = None,
    max_norm: float | None = None,
) -> list[float]:
    """A step with each of ``losses``; their values. ``make`` returns an optimizer or a list of them, and each has a scheduler."""
    named = "named_parameters" in inspect.signature(make).parameters
    made = make(list(model.named_parameters()) if named else list(model.parameters()))
    optimizers = made if isinstance(made, list) else [made]
    schedulers = [schedule(optimizer) for optimizer in optimizers] if schedule is not None else []
    found = []
    for loss in losses:
        model.zero_grad()
        value = loss()
        value.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        for each in (*optimizers, *schedulers):
            each.step()
        found.append(float(value.detach()))
    return found
