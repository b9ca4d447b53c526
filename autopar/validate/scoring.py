"""Scores predictions against measurements: rank correlation, regret, feasibility, relative errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.validate.run import RowOutcome, ValidationReport, of_groups


@dataclass(frozen=True, slots=True)
class Score:
    """The scores of a set of rows. ``spearman`` and ``regret`` compare the layouts within each group, and are means over groups. Both
    ignore layouts without a measured or a predicted time, such as failed runs.

    ``regret`` is the measured time of the layout with the shortest predicted time (among those predicted to be feasible, if any) over the
    shortest measured time, minus one; of equal predictions, the faster layout counts. Errors are relative to the measurement.
    """

    n_rows: int
    n_priced: int
    n_ran: int
    n_failed: int
    spearman: float | None
    regret: float | None
    worst_regret: float | None
    ran_called_infeasible: int
    failed_called_infeasible: int
    time_median_error: float | None
    time_p90_error: float | None
    memory_median_error: float | None
    memory_p90_error: float | None


def score(outcomes: Sequence[RowOutcome]) -> Score:
    """Return the score of rows; ranks and regrets are computed within groups."""
    ran = [o for o in outcomes if not o.measured.failed]
    failed = [o for o in outcomes if o.measured.failed]
    groups = list(of_groups(outcomes, lambda o: o.group).values())
    ranks = [r for r in map(spearman, groups) if r is not None]
    regrets = [r for r in map(regret, groups) if r is not None]
    time = [
        abs(o.step_s / o.measured.step_s - 1) for o in ran if o.priced and o.step_s is not None and o.measured.step_s
    ]
    memory = [
        abs(o.memory_bytes / o.measured.memory_bytes - 1)
        for o in ran
        if o.priced and o.memory_bytes is not None and o.measured.memory_bytes
    ]
    return Score(
        n_rows=len(outcomes),
        n_priced=sum(o.priced for o in outcomes),
        n_ran=len(ran),
        n_failed=len(failed),
        spearman=_mean(ranks),
        regret=_mean(regrets),
        worst_regret=max(regrets, default=None),
        ran_called_infeasible=sum(o.feasible is False for o in ran),
        failed_called_infeasible=sum(o.feasible is False for o in failed),
        time_median_error=_quantile(time, 0.5),
        time_p90_error=_quantile(time, 0.9),
        memory_median_error=_quantile(memory, 0.5),
        memory_p90_error=_quantile(memory, 0.9),
    )


def _timed(outcomes: Iterable[RowOutcome]) -> list[tuple[float, float, bool]]:
    return [
        (o.step_s, o.measured.step_s, bool(o.feasible))
        for o in outcomes
        if o.priced and not o.measured.failed and o.step_s is not None and o.measured.step_s is not None
    ]


def spearman(outcomes: Sequence[RowOutcome]) -> float | None:
    """Return Spearman's rank correlation of predicted and measured speed, with average ranks for ties. Return ``None`` for fewer than three
    rows with both times, or if all predictions or all measurements are equal."""
    pairs = _timed(outcomes)
    if len(pairs) < 3:
        return None
    a, b = (_ranks(np.array([-p[i] for p in pairs])) for i in (0, 1))
    if a.std() == 0 or b.std() == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def regret(outcomes: Sequence[RowOutcome]) -> float | None:
    """Return the regret (see ``Score``); ``None`` for fewer than two rows with both times."""
    pairs = _timed(outcomes)
    if len(pairs) < 2:
        return None
    picked = min([p for p in pairs if p[2]] or pairs)
    return picked[1] / min(p[1] for p in pairs) - 1


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[inverse], dtype=np.float64)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _quantile(values: Sequence[float], q: float) -> float | None:
    return float(np.quantile(values, q)) if values else None


def scores(report: ValidationReport) -> dict[str, Any]:
    """Return the ``Score`` of all rows (``overall``), and those of each source (``sources``) and each group (``groups``) by name."""
    return {
        "overall": score(report.outcomes),
        "sources": {name: score(rows) for name, rows in of_groups(report.outcomes, lambda o: o.source).items()},
        "groups": {name: score(rows) for name, rows in of_groups(report.outcomes, lambda o: o.group).items()},
    }
