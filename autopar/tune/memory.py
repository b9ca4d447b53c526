"""Learns how much more memory programs take than prices predict."""

from __future__ import annotations

import math

from autopar.errors import OUT_OF_MEMORY
from autopar.summary import memory_bytes
from autopar.tune.log import Log
from autopar.units import Constant

MEMORY_SD = Constant(
    0.05,
    "log of bytes",
    "measured: docs/evidence/measured-memory.md, 3 % in the median and 14 % at worst over 134 pairs of predicted and measured peaks",
)
_PLAUSIBLE = 3 * MEMORY_SD.value
_BEYOND = 1.01  # a plan that ran out of memory is to be over the limit, not at it


def memory_factor(log: Log) -> float | None:
    """Return the measured over the predicted peak bytes: the mean over plans that ran on GPUs, or more if a plan ran out of memory that the
    mean would not explain. ``None`` if nothing was measured.

    A plan that ran out of memory far below the limit is no evidence: other programs took the memory, or something else failed.
    """
    ratios = [
        math.log(peak / memory_bytes(log.plans[name])) for one in log.rounds for name, peak in one.peak_bytes.items()
    ]
    factor = math.exp(sum(ratios) / len(ratios)) if ratios else None
    for name, failure in log.failures.items():
        if failure.cause != OUT_OF_MEMORY:
            continue
        # the stages' own limits have the factor that was known when they were planned
        needed = log.request.memory_limit_bytes / memory_bytes(log.plans[name])
        if math.log(needed) <= max(_PLAUSIBLE, math.log(factor or 1.0) + _PLAUSIBLE):
            factor = max(factor or 1.0, needed * _BEYOND)
    return factor
