"""The report ``fit``: a source that is left out decides nothing, and the table of constants is complete."""

from __future__ import annotations

import numpy as np
import pytest
from fit_constants import FITTED, LIMITS, FittedBench
from fit_switches import switches
from leave_out import HUBER_DELTA, Observation, PriceTable, huber, left_out, left_out_one, spread, weights
from places import GROUNDTRUTH
from validation_page import records

from autopar.validate.run import Bench, read_file

ROWS = (("a", "time", "1"), ("a", "time", "2"), ("b", "time", "3"), ("c", "time", "4"), ("c", "memory", "4"))


def price_table(errors: dict[str, float]) -> PriceTable:
    """A table with a constant ``x``, committed at 0, that adds its value to all log errors of time, and one ``y`` that touches only ``a``.
    ``errors`` are those of each source at ``x = y = 0``."""
    observations = tuple(Observation(*row) for row in ROWS)
    base = np.array([errors[one.source] for one in observations])
    timed = np.array([one.quantity == "time" for one in observations])
    of_a = np.array([one.source == "a" for one in observations])
    values = (-0.3, 0.0, 0.3)
    changed = {"x": {v: base + v * timed for v in values}, "y": {v: base + v * of_a for v in values}}
    return PriceTable(observations, base, changed, {"x": 0.0, "y": 0.0}, {"x": -0.3, "y": 0.3})


def test_a_left_out_source_decides_nothing() -> None:
    """The values for a source are the same whatever its errors are, and are those of the others."""
    for of_a in (-5.0, 0.0, 0.3, 7.0):
        table = price_table({"a": of_a, "b": 0.3, "c": 0.3})
        chosen = left_out(table)["a"]
        assert chosen == {"x": -0.3, "y": 0.3}, "b and c want -0.3; y touches neither and is neutral"
        assert left_out_one(table, "x")["a"] == -0.3
    assert left_out(price_table({"a": -0.3, "b": 0.3, "c": -0.3}))["b"]["x"] == 0.3


def test_a_constant_of_one_source_is_fitted_on_none() -> None:
    table = price_table({"a": 0.3, "b": 0.0, "c": 0.0})
    assert left_out_one(table, "y") == {"a": None}
    everything = np.ones(len(ROWS), dtype=bool)
    assert table.fit_one("y", everything) == -0.3
    assert table.fit(everything, {"x": 0.0}) == {"x": 0.0, "y": -0.3}


def test_sources_and_quantities_weigh_the_same() -> None:
    table = price_table({"a": 0.0, "b": 0.0, "c": 0.0})
    seen = np.ones(len(ROWS), dtype=bool)
    assert weights(table.observations, seen) == pytest.approx([0.125, 0.125, 0.25, 0.25, 0.25])
    assert weights(table.observations, table.without("c")) == pytest.approx([0.25, 0.25, 0.5, 0.0, 0.0])


def test_losses_and_spreads() -> None:
    assert huber(np.array([0.0, HUBER_DELTA, -2 * HUBER_DELTA])) == pytest.approx([0.0, 0.05, 0.15])
    assert spread([]) is None
    found = spread([0.0, float(np.log(1.1)), float(np.log(0.8))])
    assert found is not None
    assert found.median == pytest.approx(0.1)


def test_every_fitted_constant_is_in_the_table() -> None:
    fitted = {record.name for record in records() if record.fitted}
    assert fitted <= {one.name for one in FITTED} | set(LIMITS)
    assert all(one.name in fitted or one.published for one in FITTED)
    assert all(one.neutral in one.values and len(one.values) > 2 for one in FITTED)


def test_committed_values_change_no_price_and_others_do() -> None:
    """Two rows of BigScience with DeepSpeed, nvidia-smi and a pipeline, priced by the real code."""
    row = next(
        r for r in read_file(GROUNDTRUTH / "published.jsonl") if not isinstance(r, str) and r.get("zero_stage") == 1
    )
    bench = Bench()
    before = bench.outcome(row, 1)
    same = FittedBench({one.name: one.committed for one in FITTED}, bench).outcome(row, 1)
    assert before.priced
    assert same.step_s == pytest.approx(before.step_s)
    assert same.memory_bytes == before.memory_bytes
    slower = FittedBench({"KERNEL_S": 1e-4}, bench).outcome(row, 1)
    assert (slower.step_s or 0) > (before.step_s or 0)
    assert slower.memory_bytes == before.memory_bytes


def test_switches_are_counted_by_source() -> None:
    rows = {"a": [{"notes": "DeepSpeed"}, {"notes": "deepspeed, eager"}], "b": [{"notes": "DeepSpeed"}]}
    found = switches(rows)
    assert found["DeepSpeed"] == ["a", "b"]
    assert found["eager"] == ["a"]
    assert found["compiled"] == []
