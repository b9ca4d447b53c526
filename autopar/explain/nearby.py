"""Suggests a slightly different batch if the devices don't divide the requested one."""

from __future__ import annotations

import math

from autopar.errors import AutoparError
from autopar.explain.study import Study
from autopar.plan import GIVEN, Plan
from autopar.progress import Progress, report
from autopar.units import seconds

NEARBY = 0.05
"""Maximum relative change of the global batch: too small to affect most training runs."""
WORTH = 0.01
"""Minimum relative speed-up per row worth reporting."""


def nearby_batch(study: Study, plan: Plan, progress: Progress | None = None) -> str:
    """Return a hint that a nearby global batch, which the number of devices divides, would be faster per row. Return an empty string if the
    number of devices divides the requested batch, if no search made the plan, or if no nearby batch is faster by ``WORTH``."""
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
            except AutoparError:  # refused by the model or the pins, or infeasible
                continue
            found.append((near / step_s * plan.prediction.step_time_s / batch - 1, near, step_s))
    gain, near, step_s = max(found, default=(0.0, 0, 0.0))
    if gain < WORTH:
        return ""
    return (
        f"a global batch of {near:,} instead of {batch:,} would be {gain:.0%} faster per row, {seconds(step_s)} a step: "
        f"{near:,} divides by all {devices:,} devices, {batch:,} by {math.gcd(batch, devices):,} of them"
    )
