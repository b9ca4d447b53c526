"""Opens hand-written programs in a benchmark's worker processes."""

from __future__ import annotations

from typing import Any

from autopar.bench.baselines import HandTuned, HandTunedRecipe
from autopar.bench.models import subject
from autopar.timing.remote import programs


def open_hand_tuned(name: str, model: str, recipe: dict[str, Any], lr: float, device: str) -> None:
    """Load the hand-written program of ``recipe`` for ``model`` as the contender ``name``."""
    programs[name] = HandTuned(subject(model), HandTunedRecipe(**recipe), lr, device).step
