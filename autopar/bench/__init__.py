"""The benchmark: automatic plans against hand-tuned ones, measured on this machine's devices.

``models`` has the models, ``baselines`` the hand-written programs, built with PyTorch's own parts only; ``contest``
runs all of them in the same processes, in turns; ``report`` turns the times into tables, lines and a plot.
"""

from autopar.bench.contest import contest
from autopar.bench.models import MODELS

__all__ = ["MODELS", "contest"]
