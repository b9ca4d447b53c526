"""The benchmark: automatic plans against hand-tuned ones, measured on this machine's devices.

``models`` has the models, ``baselines`` hand-written programs that only use PyTorch; ``contest`` runs all of them in the same processes,
in turns; ``report`` makes tables, JSON lines and a plot.
"""

from autopar.bench.contest import contest
from autopar.bench.models import MODELS

__all__ = ["MODELS", "contest"]
