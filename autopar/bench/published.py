"""Computes the regret of the layout that the search chooses among published layouts, from their measured times.

A cell is a group of rows: one model on one cluster with many layouts (degrees, ZeRO stage, microbatches), each measured or failed. For each
layout, pins restrict the search to that layout, with the row's recomputation and a cost model of the row's trainer; the search chooses the
stage cuts. The layout with the shortest predicted time is the automatic choice. Layouts that exceed the memory limit with the trainer's
cuts are left out (unless all do), because the measured runs used those cuts. *Regret* is the measured time of the chosen layout over that
of the fastest, minus one. If the chosen layout failed when it was measured, the choice counts as failed. The regret is then that of the
layout with the shortest predicted time among those that ran.

Layouts whose predicted time with the trainer's cuts is more than ``HOPELESS`` times the cell's minimum aren't searched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError, UsageError
from autopar.plan import Role
from autopar.schedules import NO_PIPELINE, ONE_F_ONE_B
from autopar.search import SearchOptions, search
from autopar.validate.rows import Row, labels, read_row
from autopar.validate.run import Bench, RowOutcome, read_file

HOPELESS = 1.3


@dataclass(frozen=True, slots=True)
class MeasuredLayout:
    """A layout with its predicted and measured seconds per step; ``measured_s`` is ``None`` if it failed."""

    id: str
    predicted_s: float
    measured_s: float | None


@dataclass(frozen=True, slots=True)
class CellResult:
    """The result of one cell: it has ``layouts`` rows, of which ``measured`` ran; for ``searched`` layouts the search found a plan.
    ``choice`` is the automatic layout, ``ran`` the one with the shortest predicted time that ran (the same unless ``choice`` failed),
    ``best`` the one with the shortest measured time."""

    name: str
    devices: int
    layouts: int
    measured: int
    searched: int
    choice: MeasuredLayout
    ran: MeasuredLayout
    best: MeasuredLayout

    @property
    def failed(self) -> bool:
        return self.choice.measured_s is None

    @property
    def regret(self) -> float:
        assert self.ran.measured_s is not None and self.best.measured_s is not None
        return self.ran.measured_s / self.best.measured_s - 1

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"failed": self.failed, "regret": self.regret}


def published(
    path: str | Path, progress: Callable[[str, int, int], None] = lambda what, done, total: None
) -> list[CellResult]:
    """Return the results of the file's cells in which at least two layouts ran. Raises ``UsageError`` if the file can't be read or has no
    such cell."""
    groups: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for number, row in enumerate(read_file(path), 1):
        if not isinstance(row, str):
            groups.setdefault(labels(row, number)[2], []).append((number, row))
    found = []
    bench = Bench()
    for done, (name, rows) in enumerate(groups.items()):
        progress(name, done, len(groups))
        result = _cell(bench, name, rows)
        if result is not None:
            found.append(result)
    progress("done", len(groups), len(groups))
    if not found:
        raise UsageError(
            f"{path} has no cell in which two layouts have a price and a measured step: there is nothing to choose from",
            "rows of one `group` are a cell: give at least two of them, with `measured`",
        )
    return found


def _cell(bench: Bench, name: str, rows: Sequence[tuple[int, Mapping[str, Any]]]) -> CellResult | None:
    priced: list[tuple[Row, RowOutcome]] = []
    for number, data in rows:
        outcome = bench.outcome(data, number)
        if outcome.priced and outcome.step_s is not None:
            priced.append((read_row(data, number), outcome))
    measured = [o for _, o in priced if o.measured.step_s is not None]
    if len(measured) < 2:
        return None
    possible = [pair for pair in priced if pair[1].within_plan_limit] or priced
    fastest_s = min(o.step_s for _, o in possible if o.step_s is not None)
    found: list[MeasuredLayout] = []
    for row, outcome in possible:
        assert outcome.step_s is not None
        if outcome.step_s <= HOPELESS * fastest_s:
            step = automatic_s(bench, row)
            if step is not None:
                found.append(MeasuredLayout(outcome.id, step, outcome.measured.step_s))
    ran = [choice for choice in found if choice.measured_s is not None]
    if not ran:
        return None
    fastest = min(measured, key=lambda o: o.measured.step_s or 0.0)
    assert fastest.step_s is not None
    return CellResult(
        name,
        priced[0][0].hardware.devices,
        len(rows),
        len(measured),
        len(found),
        min(found, key=lambda c: c.predicted_s),
        min(ran, key=lambda c: c.predicted_s),
        MeasuredLayout(fastest.id, fastest.step_s, fastest.measured.step_s),
    )


def automatic_s(bench: Bench, row: Row) -> float | None:
    """Return the predicted seconds per step of the best plan with the row's layout, or ``None`` if the search finds none."""
    s = row.setting
    try:
        graph, cluster, pricer = bench.prices(row)
        options = SearchOptions(
            precision=s.precision,
            time_limit_s=10.0,
            pipeline=s.pipeline,
            tensor=s.tensor,
            data=s.data,
            zero=s.zero,
            pin={"activations": s.activations},
            microbatches=s.global_batch // (s.data * s.microbatch),
            schedule=NO_PIPELINE if s.pipeline == 1 else ONE_F_ONE_B,
            roles=(Role.TENSOR_SEQUENCE,) if s.sequence else (Role.TENSOR,),
        )
        return search(graph, cluster, pricer, options).prediction.step_time_s
    except AutoparError:
        return None


def summary(cells: Sequence[CellResult]) -> dict[str, Any]:
    """Return the mean and worst regret over cells, and the number of failed choices."""
    regrets = [cell.regret for cell in cells]
    return {
        "cells": len(cells),
        "mean_regret": sum(regrets) / len(regrets) if regrets else None,
        "worst_regret": max(regrets, default=None),
        "failed": sum(cell.failed for cell in cells),
    }


def to_json(cells: Sequence[CellResult]) -> dict[str, Any]:
    """Return the cells and their summary."""
    return {"summary": summary(cells), "cells": [cell.to_json() for cell in cells]}
