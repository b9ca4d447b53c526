"""Corrections: planted factors are found within the stated uncertainty, and a corrected calibration is a calibration."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import tuned

from autopar.devices import parse
from autopar.devices.calibration import MEMORY, from_json, read, this_machine
from autopar.devices.corrections import ARITHMETIC, corrected, group_of
from autopar.errors import HANG, OUT_OF_MEMORY
from autopar.plan import Plan
from autopar.tune.fit import MODEL_SD, PRIOR_SD, Posterior, fit, similarity
from autopar.tune.log import Failure, Log, Request, Round
from autopar.tune.memory import memory_factor

WIRES = "collectives over 2"
RUN = ("data 2, ZeRO 0", "data 2, ZeRO 3", "tensor 2", "pipeline 2, 4 microbatches", "data 2, ZeRO 1")
REQUEST = Request("decoder", "2 processes", 1, 2, 2**34, "cpu", "float32", 16, 2048, {}, [])


def measured(names: tuple[str, ...], true: dict[str, float], errors: np.ndarray) -> tuple[list[Plan], np.ndarray]:
    """The named plans, and the logarithms of their step times on a machine whose figures are ``true`` times those of the calibration."""
    plans = [tuned.plans()[name] for name in names]
    theta = np.log([true.get(group, 1.0) for group in tuned.prices().groups])
    return plans, tuned.prices().log_prices(plans, theta) + errors


def fitted(seen: tuple[list[Plan], np.ndarray], noise: float) -> Posterior:
    prices = tuned.prices()
    return fit(prices.log_prices, prices.groups, *seen, noise**2 * np.eye(len(seen[0])))


@pytest.mark.parametrize(
    "true", [{ARITHMETIC: 0.6}, {WIRES: 0.5}, {ARITHMETIC: 0.6, WIRES: 0.5}, {ARITHMETIC: 1.8, WIRES: 2.5}]
)
def test_planted_factors_are_found(true: dict[str, float]):
    prices = tuned.prices()
    found = fitted(measured(RUN, true, np.zeros(len(RUN))), 0.02)
    for group in prices.groups:
        miss = abs(math.log(found.factors[group] / true.get(group, 1.0)))
        assert miss <= 2 * found.deviations[group], (group, found.factors[group], found.deviations[group])
    assert found.deviations[ARITHMETIC] < PRIOR_SD.value / 4 and found.deviations[WIRES] < PRIOR_SD.value / 2
    assert found.factors[ARITHMETIC] == pytest.approx(true.get(ARITHMETIC, 1.0), rel=0.1)
    assert found.factors[WIRES] == pytest.approx(true.get(WIRES, 1.0), rel=0.2)


def test_the_uncertainty_is_neither_too_small_nor_too_large():
    """Over machines whose factors and errors of the model are drawn from the prior, misses have the stated size."""
    prices, rng, misses = tuned.prices(), np.random.default_rng(0), []
    for _ in range(6):
        true = dict(zip(prices.groups, np.exp(rng.normal(0, PRIOR_SD.value, len(prices.groups))).tolist(), strict=True))
        errors = rng.normal(0, MODEL_SD.value, len(RUN))
        found = fitted(measured(RUN, true, errors), 0.02)
        misses += [math.log(found.factors[g] / true[g]) / found.deviations[g] for g in prices.groups]
    assert 0.7 < float(np.std(misses)) < 1.3
    assert np.mean(np.abs(misses) < 1.96) > 0.88


def test_predictions_of_other_plans_have_the_stated_error():
    """Of plans that were not measured, over drawn machines; a plan that was measured is predicted as it was measured."""
    prices, rng, misses = tuned.prices(), np.random.default_rng(1), []
    others = tuple(name for name in tuned.plans() if name not in RUN)[:6]
    for _ in range(4):
        true = dict(zip(prices.groups, np.exp(rng.normal(0, PRIOR_SD.value, len(prices.groups))).tolist(), strict=True))
        plans, logs = seen = measured(RUN, true, rng.normal(0, MODEL_SD.value, len(RUN)))
        found = fitted(seen, 0.005)
        unseen, logs_s = measured(others, true, rng.normal(0, MODEL_SD.value, len(others)))
        for plan, log_s, (expected_s, deviation) in zip(unseen, logs_s, found.predict(unseen), strict=True):
            if all(similarity(plan, other) == 0 for other in plans):
                misses.append((log_s - math.log(expected_s)) / deviation)
        ((expected_s, deviation),) = found.predict(plans[:1])
        assert expected_s == pytest.approx(math.exp(logs[0]), rel=0.02) and deviation < 0.02
    assert len(misses) > 10 and 0.6 < float(np.std(misses)) < 1.4


def test_without_measurements_the_posterior_is_the_prior():
    prices = tuned.prices()
    found = fitted(([], np.zeros(0)), 0.0)
    assert set(found.factors.values()) == {1.0} and set(found.deviations.values()) == {PRIOR_SD.value}
    plan = tuned.plans()["tensor 2"]
    ((expected_s, deviation),) = found.predict([plan])
    assert expected_s == pytest.approx(prices.repriced([plan], {})[0].prediction.step_time_s)
    assert deviation > MODEL_SD.value


def test_similarity_of_plans():
    one, other = tuned.plans()["data 2, ZeRO 0"], tuned.plans()["tensor 2"]
    assert similarity(one, one) == 1 and similarity(one, other) == 0
    changed = dataclasses.replace(one.layers[0], strategy=one.layers[0].strategy.with_options(activations="full"))
    near = dataclasses.replace(one, layers=(changed, *one.layers[1:]))
    assert similarity(one, near) == 1 - 1 / len(one.layers)


def test_a_corrected_calibration_is_a_calibration(tmp_path: Path):
    found = corrected(tuned.base(), {ARITHMETIC: 0.6, WIRES: 0.5, MEMORY: 1.25}, "cpu", 2, 40)
    for before, after in zip(tuned.base().figures, found.figures, strict=False):
        factor = {ARITHMETIC: 0.6, WIRES: 0.5}.get(group_of(before), 1.0)
        assert after.median == pytest.approx(factor * before.median) and after.size == before.size
    path = tmp_path / "tuned.json"
    path.write_text(dataclasses.replace(found, machine={**found.machine, **this_machine()}).dumps())
    cluster = parse(2, calibration=path)
    assert any("corrected by measured steps" in note for note in cluster.notes)
    assert read(path).machine["corrected"]["2 cpu"]["measured_steps"] == 40
    assert cluster.memory_limit_bytes == pytest.approx(parse(2).memory_limit_bytes / 1.25, rel=1e-6)
    limited = parse(2, memory_limit_bytes=1_000_000_000, calibration=path)
    assert limited.memory_limit_bytes == 800_000_000
    # memory's factor is the whole ratio of measured to predicted bytes: a later one replaces it
    again = corrected(from_json(json.loads(found.dumps())), {MEMORY: 1.1}, "cpu", 2, 10)
    assert [f.median for f in again.figures if f.name == MEMORY] == [1.1]


def log_of(plan: Plan, share: float) -> Log:
    """A log with a plan whose predicted peak is this share of the limit."""
    limit = int(max(stage.memory.total for stage in plan.stages) / share)
    log = Log(None, dataclasses.replace(REQUEST, memory_limit_bytes=limit))
    log.add_plan(plan)
    return log


def test_memory_is_learned_from_peaks_and_from_plans_that_ran_out_of_it():
    plan = tuned.prices().repriced([tuned.plans()["tensor 2"]], {})[0]
    log = log_of(plan, 0.95)
    assert memory_factor(log) is None
    peak = max(stage.memory.total for stage in plan.stages)
    log.add_round(Round({"plan-1": 1.0}, 3, {"plan-1": round(peak * 1.02)}))
    assert memory_factor(log) == pytest.approx(1.02, rel=1e-3)
    log.add_failure("plan-1", Failure(HANG, "it hangs"))
    assert memory_factor(log) == pytest.approx(1.02, rel=1e-3)
    log.failures.clear()
    log.add_failure("plan-1", Failure(OUT_OF_MEMORY, "it is full"))
    assert (factor := memory_factor(log)) is not None and factor * peak > log.request.memory_limit_bytes
    corrected = (dataclasses.replace(stage, memory_limit_bytes=int(peak / 0.99)) for stage in plan.stages)
    log.add_plan(dataclasses.replace(plan, stages=tuple(corrected)))  # it was to take 99 % of a corrected limit
    log.add_failure("plan-2", Failure(OUT_OF_MEMORY, "it is full"))
    assert memory_factor(log) == factor
    log = log_of(plan, 0.2)  # far below the limit: no lesson about prices
    log.add_failure("plan-1", Failure(OUT_OF_MEMORY, "it is full"))
    assert memory_factor(log) is None
