"""What a slightly other batch would be worth, where devices do not divide the one that was asked for."""

from __future__ import annotations

import math

from autopar.errors import AutoparError
from autopar.explain.study import Study
from autopar.plan import GIVEN, Plan
from autopar.progress import Progress, report
from autopar.units import seconds

NEARBY = 0.05
"""Of the batch: a change that few trainings would notice."""
WORTH = 0.01
"""The least gain, in rows per second, of which a word is said."""


def nearby_batch(study: Study, plan: Plan, progress: Progress | None = None) -> str:
    """How much faster the best plan for a batch nearby is per row; empty if all devices divide the batch, the plan was given, or nothing
    nearby is worth it. The batches are those next to the plan's that all devices divide, each planned like the request."""
    batch, devices = plan.global_batch, study.cluster.count
    if plan.solver == GIVEN or batch % devices == 0:
        return ""
    below = batch // devices * devices
    found = []
    for near in (below, below + devices):
        if near and abs(near - batch) <= NEARBY * batch:
            report(progress, "search", f"with a global batch of {near:,}")
            try:
                step_s = study.solve(graph=study.sized(global_batch=near)).prediction.step_time_s
            except AutoparError:  # a batch that the model refuses, pins that do not divide it, nothing that fits
                continue
            found.append((near / step_s * plan.prediction.step_time_s / batch - 1, near, step_s))
    gain, near, step_s = max(found, default=(0.0, 0, 0.0))
    if gain < WORTH:
        return ""
    return (
        f"a global batch of {near:,} instead of {batch:,} would be {gain:.0%} faster per row, {seconds(step_s)} a step: "
        f"{near:,} divides by all {devices:,} devices, {batch:,} by {math.gcd(batch, devices):,} of them"
    )
