"""``autopar dev validate`` compares predictions with a file of measurements."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType

from autopar.cli.console import Messages, plain_table, show
from autopar.validate import Score, ValidationReport, scores, validate

_MAX_REASONS = 20  # maximum number of printed reasons why rows could not be priced


def validate_command(file: str, as_json: bool) -> None:
    """Predict every row of ``file`` and print how well the predictions agree with the measurements."""
    with Messages() as messages:
        messages("price", file)
        report = validate(file, lambda done, total: messages("price", f"{done} of {total} rows"))
    by_title = scores(report)
    show(as_json, _json(report, by_title), *_tables(report, by_title), width=170)


def _json(report: ValidationReport, by_title: dict[str, Any]) -> dict[str, Any]:
    """Return what ``--json`` prints: the scores, the rows that could not be priced, and every row's prediction."""
    return {
        "overall": dataclasses.asdict(by_title["overall"]),
        "sources": {name: dataclasses.asdict(score) for name, score in by_title["sources"].items()},
        "groups": {name: dataclasses.asdict(score) for name, score in by_title["groups"].items()},
        "n_unpriced": sum(not o.priced for o in report.outcomes),
        "unpriced": [{"id": o.id, "group": o.group, "reason": o.reason} for o in report.outcomes if not o.priced],
        "rows": [
            {
                "id": o.id,
                "group": o.group,
                "step_time_s": o.step_s,
                "measured_step_time_s": o.measured.step_s,
                "memory_bytes": o.memory_bytes,
                "measured_memory_bytes": o.measured.memory_bytes,
                "feasible": o.feasible,
                "failed": o.measured.failed,
                "refused": o.refused,
            }
            for o in report.outcomes
        ],
    }


def _tables(report: ValidationReport, by_title: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield the tables of scores, and the reasons why rows could not be priced."""
    for title in ("sources", "groups"):
        table = plain_table(title)
        table.add_column(title.removesuffix("s"), overflow="ellipsis", no_wrap=True, max_width=52)
        for name in ("rows", "priced", "Spearman", "regret", "ran", "refused", "failed", "refused", "time median",
                     "p90", "memory median", "p90"):  # fmt: skip
            table.add_column(name, justify="right", no_wrap=True)
        rows = {**by_title[title], **({"all": by_title["overall"]} if title == "sources" else {})}
        for name, score in rows.items():
            table.add_row(name, *_cells(score))
        yield from (table, "")
    unpriced = [o for o in report.outcomes if not o.priced]
    yield f"{len(unpriced)} of {len(report.outcomes)} rows could not be priced"
    for reason, count in Counter(o.reason for o in unpriced).most_common(_MAX_REASONS):
        first = next(o.id for o in unpriced if o.reason == reason)
        yield f"  {count} x {reason} ({first}{', ...' if count > 1 else ''})"


def _cells(score: Score) -> list[str]:
    def share(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f} %"

    return [
        str(score.n_rows),
        str(score.n_priced),
        "-" if score.spearman is None else f"{score.spearman:.2f}",
        share(score.regret),
        str(score.n_ran),
        str(score.ran_called_infeasible),
        str(score.n_failed),
        str(score.failed_called_infeasible),
        share(score.time_median_error),
        share(score.time_p90_error),
        share(score.memory_median_error),
        share(score.memory_p90_error),
    ]
