"""Fitted constants of the price, fitted anew with each source of rows left out. ``make report NAME=fit`` writes ``docs/evidence/fit.*``.

Every row is priced by the product's code with each value of each constant (``fit_constants``); a row that neither the neutral nor the
extreme values change is not priced again. A line of the results has the prices of one source's rows over their measurements.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fit_page
import numpy as np
from fit_constants import FITTED, FittedBench, FittedConstant
from leave_out import Observation, PriceTable, Values, left_out
from places import EVIDENCE, GROUNDTRUTH, ROOT
from results import Line, Results, options, quiet, without_docstrings
from validation_page import SMALL_CLUSTER

from autopar.trainers.setting import FACTS
from autopar.validate import RowOutcome
from autopar.validate.rows import read_row
from autopar.validate.run import Bench, read_file
from autopar.validate.words import facts_of

RESULTS = EVIDENCE / "fit.jsonl"
PAGE = EVIDENCE / "fit.md"
FILES = ("published.jsonl", "records.jsonl", "layout_sweep.jsonl")
SWEEP_STRIDE = 4  # of the sweep's layouts on up to ``SMALL_CLUSTER`` GPUs every fourth is priced: all have one trainer and one network
COMMITTED, TOGETHER, WITHOUT = "committed", "together", "without"
QUANTITIES = ("time", "memory")
_NOT_PRICES = ("bench", "cli", "doctor", "emit", "explain", "profile", "program", "report", "run", "ui", "verify")


@functools.cache
def code() -> str:
    """The fingerprint of the code and the rows that decide a price."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "autopar").rglob("*.py")):
        if path.relative_to(ROOT).parts[1] not in _NOT_PRICES:
            digest.update(without_docstrings(path.read_text()).encode())
    for path in sorted([*(ROOT / "autopar" / "devices").rglob("*.toml"), *GROUNDTRUTH.glob("*.jsonl")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class SourceRows:
    """The rows of a source: all whose title begins with the same word, which names the publisher or the trainer."""

    name: str
    rows: tuple[Mapping[str, Any], ...]


def sources() -> tuple[SourceRows, ...]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for file in FILES:
        rows = [row for row in read_file(GROUNDTRUTH / file) if not isinstance(row, str)]
        if file == FILES[-1]:
            rows = [row for row in rows if row["n_gpus"] <= SMALL_CLUSTER][::SWEEP_STRIDE]
        for row in rows:
            source = row["source"]
            title = source["title"] if isinstance(source, Mapping) else source
            found.setdefault(title.split()[0].rstrip(","), []).append(row)
    return tuple(SourceRows(name, tuple(rows)) for name, rows in found.items())


def ratios(outcome: RowOutcome) -> dict[str, float | None]:
    """Return the price over the measurement of each quantity, ``None`` where one of them is missing."""
    pairs = {
        "time": (outcome.step_s, outcome.measured.step_s),
        "memory": (outcome.memory_bytes, outcome.measured.memory_bytes),
    }
    return {name: float(f"{ours / seen:.5g}") if ours and seen else None for name, (ours, seen) in pairs.items()}


class Pricing:
    """Prices the rows of all sources, as far as the results lack them."""

    def __init__(self, results: Results, keep: bool, fresh: bool) -> None:
        self.results = results
        self.done = {} if fresh else results.read()
        if not keep:
            self.done = {case: line for case, line in self.done.items() if line["code"] == code()}
        self.bench = Bench()
        self.sources = sources()
        self.cases: list[tuple[str, ...]] = []

    def line(self, constant: str, value: str, source: SourceRows, price: Callable[[], dict[str, Any]]) -> Line:
        """Return the line of a case, priced unless it is there."""
        case = (constant, value, source.name)
        self.cases.append(case)
        if case not in self.done:
            start = time.process_time()
            found = {"constant": constant, "value": value, "source": source.name} | price()
            line = {"code": code()} | found | {"seconds": round(time.process_time() - start, 2)}
            self.results.append(line)
            self.done[case] = line
            print(*case, f"{line['seconds']} s", file=sys.stderr, flush=True)
        return self.done[case]

    def committed(self, source: SourceRows) -> Line:
        """Price a source's rows as the product does."""

        def price() -> dict[str, Any]:
            outcomes = [self.bench.outcome(row, number) for number, row in enumerate(source.rows, 1)]
            return {
                **_columns([ratios(o) for o in outcomes]),
                "refused": {o.id: o.reason for o in outcomes if not o.priced},
                "failed": [int(o.measured.failed) for o in outcomes],
                "infeasible": [int(o.feasible is False) for o in outcomes],
                "share": [self.share(o, row) for o, row in zip(outcomes, source.rows, strict=True)],
            }

        return self.line(COMMITTED, "", source, price)

    def share(self, outcome: RowOutcome, row: Mapping[str, Any]) -> float | None:
        """The fraction of a device's memory that the row's fullest device is predicted to use."""
        if not outcome.memory_bytes:
            return None
        memory = self.bench.clusters[read_row(row, 0).hardware].gpu.memory_bytes
        return round(outcome.memory_bytes / memory, 3)

    def changed(self, values: Values, constant: str, source: SourceRows, rows: Sequence[int], fact: str = "") -> Line:
        """Price those ``rows`` of a source with changed constants, or as if they did not state ``fact``; the others have the product's
        prices."""

        def price() -> dict[str, Any]:
            bench = FittedBench(values, self.bench, fact)
            found = [{name: base[name][i] for name in QUANTITIES} for i in range(len(source.rows))]
            for i in rows:
                found[i] = ratios(bench.outcome(source.rows[i], i + 1))
            return {"priced": len(rows)} | {q: column for q, column in _columns(found).items() if column != base[q]}

        base = self.done[COMMITTED, "", source.name]
        return {q: base[q] for q in QUANTITIES} | self.line(constant, fact or _text(values), source, price)

    def without(self, fact: str) -> dict[str, tuple[list[int], Line]]:
        """Price the rows whose words state a fact as if they did not: by source, which rows they are, and their prices."""
        found = {}
        for source in self.sources:
            if rows := [i for i in self.ran(source) if fact in facts_of(source.rows[i])]:
                found[source.name] = rows, self.changed({}, WITHOUT, source, rows, fact)
        return found

    def of_constant(self, constant: FittedConstant) -> dict[float, list[Line]]:
        """Price all sources with every value of a constant. The extreme values and the neutral one tell which rows it touches."""
        name, found = constant.name, {}
        ends = {constant.values[0], constant.values[-1], constant.neutral} - {constant.committed}
        for value in ends:
            found[value] = [self.changed({name: value}, name, s, self.ran(s)) for s in self.sources]
        for value in set(constant.values) - ends - {constant.committed}:
            found[value] = []
            for i, source in enumerate(self.sources):
                base = self.done[COMMITTED, "", source.name]
                touched = [
                    row
                    for row in self.ran(source)
                    if any(found[end][i][name][row] != base[name][row] for end in ends for name in QUANTITIES)
                ]
                found[value].append(self.changed({name: value}, name, source, touched) if touched else base)
        return found

    def ran(self, source: SourceRows) -> list[int]:
        """The rows with a price and a measurement."""
        base = self.done[COMMITTED, "", source.name]
        return [i for i in range(len(source.rows)) if any(base[name][i] is not None for name in QUANTITIES)]


def _columns(found: Sequence[Mapping[str, float | None]]) -> dict[str, list[float | None]]:
    return {name: [row[name] for row in found] for name in QUANTITIES}


def _text(values: Mapping[str, float]) -> str:
    if len(values) == 1:
        return f"{next(iter(values.values())):.6g}"
    return json.dumps({name: float(f"{value:.6g}") for name, value in values.items()})


def observed(rows: Sequence[SourceRows], lines: Sequence[Line]) -> Iterator[tuple[Observation, float]]:
    """Yield every quantity of every row with its log error."""
    for source, line in zip(rows, lines, strict=True):
        for quantity in QUANTITIES:
            for row, ratio in zip(source.rows, line[quantity], strict=True):
                if ratio is not None:
                    yield Observation(source.name, quantity, row["id"]), math.log(ratio)


def table_of(pricing: Pricing, found: Mapping[str, Mapping[float, Sequence[Line]]]) -> PriceTable:
    """Return the log errors of the observations that have a price at every value of every constant."""
    rows = pricing.sources
    base = dict(observed(rows, [pricing.committed(source) for source in rows]))
    changed = {
        name: {value: dict(observed(rows, lines)) for value, lines in values.items()} for name, values in found.items()
    }
    known = [one for one in base if all(one in errors for values in changed.values() for errors in values.values())]
    arrays = {
        name: {value: np.array([errors[one] for one in known]) for value, errors in values.items()}
        for name, values in changed.items()
    }
    start = np.array([base[one] for one in known])
    for constant in FITTED:
        arrays[constant.name][constant.committed] = start
    return PriceTable(
        tuple(known),
        start,
        arrays,
        {one.name: one.committed for one in FITTED},
        {one.name: one.neutral for one in FITTED},
    )


def main() -> None:
    parser = options(__doc__, RESULTS)
    args: argparse.Namespace = parser.parse_args()
    quiet()
    results = Results(args.results, ("constant", "value", "source"), lambda line: True)
    pricing = Pricing(results, args.keep, args.fresh)
    base = [pricing.committed(source) for source in pricing.sources]
    found = {constant.name: pricing.of_constant(constant) for constant in FITTED}
    table = table_of(pricing, found)
    every = table.fit(np.ones(len(table.observations), dtype=bool))
    refitted = [pricing.changed(every, TOGETHER, s, pricing.ran(s)) for s in pricing.sources]
    chosen = left_out(table)
    left = [pricing.changed(chosen.get(s.name, every), TOGETHER, s, pricing.ran(s)) for s in pricing.sources]
    facts = {fact: pricing.without(fact) for fact in FACTS}
    seconds = sum(line["seconds"] for line in results.tidy(dict.fromkeys(pricing.cases)))
    sets = {
        "committed": dict(observed(pricing.sources, base)),
        "refitted": dict(observed(pricing.sources, refitted)),
        "left out": dict(observed(pricing.sources, left)),
    }
    rows = {source.name: source.rows for source in pricing.sources}
    lines = {source.name: line for source, line in zip(pricing.sources, base, strict=True)}
    PAGE.write_text(fit_page.page(fit_page.Fit(table, sets, every, chosen, rows, lines, facts, seconds)))


if __name__ == "__main__":
    main()
