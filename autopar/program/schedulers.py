"""The scheduler's state in a checkpoint: the part of ``state_dict`` that JSON can express.

The rest, such as the function of a ``LambdaLR``, is no part of the training's state, and always comes from the function that makes the
scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from .checkpoint_files import CheckpointError
from .optimizer_state import plain


def described(scheduler: LRScheduler | None) -> dict[str, Any] | None:
    """The scheduler's class, those of its parts included, and its state."""
    return None if scheduler is None else {"class": _class(scheduler), "state": _saved(scheduler.state_dict())}


def check(scheduler: LRScheduler | None, facts: Mapping[str, Any] | None) -> None:
    """Raise ``CheckpointError`` if the checkpoint with these ``facts`` is of a training with another scheduler."""
    own, theirs = scheduler and _class(scheduler), facts and facts["class"]
    if own != theirs:
        raise CheckpointError(
            f"the checkpoint is of a training with {theirs or 'no scheduler'}, and the program's training has "
            f"{own or 'no scheduler'}",
            f"train with {theirs or 'no scheduler'}, or start from the checkpoint's parameters alone",
        )


def restore(scheduler: LRScheduler | None, facts: Mapping[str, Any] | None) -> None:
    """Give the scheduler its state; the learning rates themselves are options of the optimizer's groups."""
    if scheduler is not None and facts is not None:
        scheduler.load_state_dict(_restored(scheduler.state_dict(), facts["state"]))


def _class(scheduler: LRScheduler) -> str:
    parts = ", ".join(_class(part) for part in getattr(scheduler, "_schedulers", ()))
    return type(scheduler).__qualname__ + (f"({parts})" if parts else "")


def _saved(value: Any) -> Any:
    """The value as JSON; ``...`` if it has no such form. Of a dict, the entries that have."""
    if isinstance(value, Mapping):
        entries = {key: _saved(item) for key, item in value.items() if isinstance(key, str)}
        return {key: item for key, item in entries.items() if item not in (..., {})}
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return [_saved(item) for item in value]
    return plain(value)


def _restored(now: Any, saved: Any) -> Any:
    """The ``saved`` value in the form of the one ``now``, which has what was not saved."""
    if isinstance(now, Mapping) and isinstance(saved, Mapping):
        return {**now, **{key: _restored(now.get(key), item) for key, item in saved.items()}}
    if isinstance(now, list) and isinstance(saved, list) and len(now) == len(saved):
        return [_restored(*pair) for pair in zip(now, saved, strict=True)]
    if isinstance(now, Tensor):
        return torch.full_like(now, saved)
    return tuple(saved) if isinstance(now, tuple) else saved
