"""The choice of a tuning, with simulated programs: estimates of step times, failures of programs that ran, and a restart that fails."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
import tuned

from autopar.errors import HANG, LaunchError
from autopar.explain.families import satisfies
from autopar.plan import Plan
from autopar.tune.log import Log
from autopar.tune.run import Effort, Tuning, _request
from autopar.tune.times import ROUND_SD, estimate


def rounds(true: Mapping[str, float], turns: list[str], rng: np.random.Generator) -> list[dict[str, float]]:
    """Rounds in which the plans named by the letters of each turn ran, on a machine whose speed varies."""
    found = []
    for names in turns:
        level = rng.normal(0, 0.05)
        found.append({name: true[name] * math.exp(level + rng.normal(0, ROUND_SD.value)) for name in names})
    return found


def test_step_times_have_the_stated_errors() -> None:
    """``c`` left after three rounds, and ``d`` came when ``a`` had been measured often."""
    rng, true, misses = np.random.default_rng(0), {"a": 1.0, "b": 1.05, "c": 1.2, "d": 0.98}, []
    for _ in range(100):
        found = estimate(rounds(true, ["abc"] * 3 + ["ab"] * 4 + ["ad"] * 3, rng))
        assert found.names == ("a", "b", "c", "d")
        for one, other in ("ab", "ac", "cd"):
            ratio, error = found.ratio(one, other)
            misses.append((ratio - math.log(true[one] / true[other])) / error)
    assert 0.8 < float(np.std(misses)) < 1.2 and abs(float(np.mean(misses))) < 0.2


def test_a_slow_round_does_not_make_a_plan_slow() -> None:
    """One measurement of ``a`` was disturbed, one round was slow, and ``c`` ran in slow rounds alone; medians are 0.2 off for ``c``."""
    quick = [
        {"a": 1.0, "b": 1.1},
        {"a": 1.01, "b": 1.09},
        {"a": 1.02, "b": 1.12},
        {"a": 1.5, "b": 1.1},
        {"a": 1.0, "b": 1.11},
    ]
    found = estimate([*quick, {"a": 1.3, "b": 1.43}, {"b": 1.4, "c": 1.21}, {"b": 1.38, "c": 1.2}])
    for one, other, true in (("b", "a", 1.1), ("b", "c", 1.4 / 1.21), ("c", "a", 1.1 * 1.21 / 1.4)):
        ratio, error = found.ratio(one, other)
        assert abs(ratio - math.log(true)) < error < 0.1
    assert found.of(["b"]).seconds == {"b": found.seconds["b"]} and found.interval("b")[0] < found.seconds["b"]


def test_without_rounds_there_are_no_times() -> None:
    assert estimate([]).seconds == {}


class Simulated:
    """The interface of ``TimingSession`` for programs that take as long as predicted; ``faults``: (name, turn) -> error."""

    device = "cpu"

    def __init__(self, faults: Mapping[tuple[str, int], Exception]) -> None:
        self.faults, self.step_s = faults, dict[str, float]()
        self.rounds, self.losses = dict[str, list[float]](), dict[str, list[float]]()
        self.errors, self.peak_bytes = dict[str, LaunchError](), dict[str, int]()
        self.remaining: list[str] = []
        self._random, self._turns = np.random.default_rng(0), dict[str, int]()

    def open_program(self, name: str, graph: object, plan: Plan, *, required: bool) -> None:
        self.rounds[name], self.losses[name], self.peak_bytes[name] = [], [1.0], 0
        self.step_s[name] = tuned.prices().repriced([plan], {})[0].prediction.step_time_s
        self.remaining.append(name)

    def measure(self, name: str, timeout_s: float) -> float | None:
        self._turns[name] = turn = self._turns.get(name, 0) + 1
        if error := self.faults.get((name, turn)):
            if not isinstance(error, LaunchError) or not error.cause:  # the workers do not start again
                raise error
            self.errors[name] = error
            self.remaining.remove(name)
            return None
        noise = math.exp(self._random.normal(0, ROUND_SD.value))
        self.rounds[name].append(self.step_s[name] * noise)
        return self.rounds[name][-1]

    def retry(self, name: str) -> None:
        del self.errors[name]
        self.remaining.append(name)


def tuning(
    faults: Mapping[tuple[str, int], Exception], seconds: float = 60.0, first_plans: int = 4
) -> tuple[Tuning, Plan]:
    """A tuning with simulated programs, and its first plan."""
    prices = tuned.prices()
    log = Log(None, _request(prices.graph, tuned.cluster(), tuned.OPTIONS))
    first = prices.best_with({}, {}, 5.0)
    assert first is not None
    effort = Effort(seconds, first_plans=first_plans)
    return Tuning(prices, log, effort, Simulated(faults)), first  # type: ignore[arg-type]


def test_the_fastest_plan_of_those_measured_wins() -> None:
    """Step times are as predicted, so no other plan may win; clearly slower plans have fewer rounds than the best two."""
    tuned_, first = tuning({}, seconds=8.0)
    found = tuned_.run(first)
    priced = tuned.prices().repriced([trial.plan for trial in found.trials], {})
    times_s = [plan.prediction.step_time_s for plan in priced]
    assert times_s[0] <= 1.02 * min(times_s) and len(found.trials) > 3
    assert found.runner_up is not None and found.runner_up.name == found.trials[1].name
    counts = [len(trial.rounds_s) for trial in found.trials]
    assert min(counts[:2]) >= Effort().final_rounds > counts[-1]
    assert 0 < found.bound_s <= found.best.prediction.step_time_s and found.best.gap < 1
    assert found.took_s < 60


def test_a_plan_that_ran_is_opened_again_after_one_failure() -> None:
    hang = LaunchError("no answer", cause=HANG)
    for turns, failed in (((2,), set()), ((1,), {"plan-1"}), ((2, 3), {"plan-1"})):
        one, first = tuning({("plan-1", turn): hang for turn in turns}, seconds=2.0)
        assert len(one.run(first).trials) > 1
        assert {*one.log.failures} == failed, turns
    every = {(f"plan-{k}", turn): hang for k in range(1, 99) for turn in (2, 3)}
    with pytest.raises(LaunchError, match=r"all \d+ plans failed to run: plan-\d+: no answer"):
        none, first = tuning(every, seconds=2.0, first_plans=1)
        none.run(first)


def test_what_was_measured_is_not_lost_when_programs_can_no_longer_be_started() -> None:
    broken = LaunchError("the node is gone")
    late, first = tuning({("plan-1", 3): broken})
    found = late.run(first)
    assert found.stopped == "programs can no longer be started: the node is gone"
    assert found.trials[0].measured_s is not None and found.best.gap < 1
    assert sum(len(one.seconds) for one in late.log.rounds) == sum(len(own) for own in late.session.rounds.values())
    at_once, first = tuning({(f"plan-{k}", 1): broken for k in range(1, 9)})
    with pytest.raises(LaunchError, match="the node is gone"):
        at_once.run(first)


def test_neighbours_of_a_pipeline_are_pipelines_with_what_their_pins_say() -> None:
    prices = tuned.prices()
    plan = prices.best_with({"pipeline": 2}, {}, 5.0)
    assert plan is not None
    found = [(pins, other) for pins in prices.neighbours(plan) if (other := prices.best_with(pins, {}, 5.0))]
    assert len(found) > 3 and all(satisfies(other, pins) for pins, other in found)
    assert len({(other.schedule, other.chunks, other.microbatches) for _, other in found}) > 3
    whole = prices.best_with({"pipeline": 1}, {}, 5.0)
    assert whole is not None and {pins["pipeline"] for pins in prices.neighbours(whole)} == {1}
