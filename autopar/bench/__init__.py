"""Measures automatic plans against hand-tuned programs on this machine's devices.

``models`` has the models, ``baselines`` the hand-written programs, which use only PyTorch. ``contest`` runs all programs in the same
processes, in turns; ``report`` makes tables, JSON lines and a plot.
"""

from autopar.bench.contest import contest
from autopar.bench.models import MODELS

__all__ = ["MODELS", "contest"]
