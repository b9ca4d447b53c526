"""The loop of a tuning: measure a few different plans, correct the prices, plan again, and measure what could be faster."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from autopar.devices import Cluster
from autopar.devices.calibration import MEMORY, Calibration, calibrated
from autopar.errors import OUT_OF_MEMORY, AutoparError, LaunchError, UsageError
from autopar.graph import Graph
from autopar.plan import DEGREES, Plan
from autopar.planning import compared_graph, plan_graph
from autopar.precision import name_of
from autopar.profile import profile
from autopar.progress import Progress, report
from autopar.run.processes import Placement
from autopar.search import SearchOptions
from autopar.timing import TimingSession
from autopar.timing.session import LOSS_TOLERANCE, TIMEOUT_S
from autopar.tune.fit import Posterior, fit, program_of
from autopar.tune.log import CRASH, WRONG_LOSS, Failure, Log, Request, Round
from autopar.tune.memory import memory_factor
from autopar.tune.prices import CorrectedPrices
from autopar.tune.result import Correction, RunnerUp, Trial, TuneResult
from autopar.tune.times import NORMAL_95, StepTimes, estimate
from autopar.units import seconds
from autopar.workload import Workload

PATIENCE = 20.0  # a program that takes this many times as long as expected hangs
CLEARLY = 2.0  # a plan that is slower than the best one by more than this many standard errors gets no further rounds
AT_ONCE = 3  # the most plans, of different kinds, that are measured in the same rounds as the best one
FINALISTS = 4  # the most plans in the final comparison
WORTHWHILE = 0.02  # a plan that could be faster than the best one by more than this, or than the noise, is measured
DRAWS = 2  # plans are also made under prices that are drawn from the posterior
FAMILIES_SHARE, SEARCH_SHARE, FINAL_SHARE = (
    0.2,
    1 / 30,
    0.2,
)  # of the time: all families, one search, the final comparison
REGRET = (
    0.005  # the final comparison ends when the best plan is expected to be slower than another one by less than this
)
SPREAD = 2.0  # the first plans are priced at most this many times as slow as the best one


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: in about ``seconds`` in total, at most ``rounds`` of ``steps`` timed steps for each plan, starting with
    ``first_plans`` different ones; the best ones get ``final_rounds`` or more. A program that does not answer is ended after ``floor_s``
    seconds or later."""

    seconds: float = 300.0
    steps: int = 3
    rounds: int = 3
    final_rounds: int = 7
    first_plans: int = 4
    seed: int = 0
    floor_s: float = 60.0


def tune(
    workload: Workload,
    cluster: Cluster,
    options: SearchOptions,
    effort: Effort,
    *,
    base: Calibration | None = None,
    log: Path | None = None,
    placement: Placement | None = None,
    progress: Progress | None = None,
) -> TuneResult:
    """Measure plans of ``workload`` in as many processes as ``cluster`` has devices, and return the best one with the corrections of the
    prices. ``placement`` starts the processes; by default they are local.

    ``base`` is the calibration that is corrected; without it, local devices are profiled first. Of others, the figures of ``cluster`` are
    corrected: their measurements would not tell links inside of nodes and between them apart. What the file ``log`` has is not measured
    again, and new measurements are appended. The first plan decides on the numerical deviations that ``options`` allow; all plans share it.

    Raises:
        UsageError: the model has no values, or ``log`` is not that of this request.
        LaunchError: no plan runs.
    """
    if any(tensor.is_meta for tensor in workload.model.state_dict().values()):
        raise UsageError(
            f"{workload.name or type(workload.model).__name__} has no values, and its programs are to be run",
            "build the model on the CPU",
        )
    captured = compared_graph(workload, progress=progress)
    record = Log(log, _request(captured, cluster, options))
    if record.base is None and (base is not None or cluster.local):
        if base is None:
            report(progress, "run", "measuring this machine")
            base = profile([cluster.count], cluster.kind, lambda text, *_: report(progress, "run", text))
        record.set_base(base)
    if record.base is not None:
        if base not in (None, record.base):
            raise UsageError(
                f"{log} was started with another calibration, whose corrections it has",
                "give another --log, or the calibration with which it was started",
            )
        cluster = calibrated(cluster, record.base, cluster.notes, "profile")
    start_s = time.monotonic()
    known = next(iter(record.plans.values()), None)
    graph, first = plan_graph(captured, cluster, options, workload.resized, plan=known, progress=progress)
    prices = CorrectedPrices(graph, cluster, record.base, options)
    with (
        tempfile.TemporaryDirectory(prefix="autopar-tune-", dir=placement.folder if placement else None) as folder,
        TimingSession(
            workload.model.state_dict(),
            list(workload.inputs(captured).values()),
            cluster.count,
            effort.steps,
            Path(folder),
            placement,
            cluster.kind,
            room_bytes=cluster.memory_limit_bytes,
        ) as session,
    ):
        return Tuning(prices, record, effort, session, progress, start_s).run(first)


def _request(graph: Graph, cluster: Cluster, options: SearchOptions) -> Request:
    limit_bytes = dataclasses.replace(cluster, memory_beyond=1.0).memory_limit_bytes
    devices = cluster.name, cluster.nodes, cluster.gpus_per_node, limit_bytes, cluster.kind
    sizes = graph.batch_size, graph.tokens
    pins = json.loads(json.dumps(options.pins))
    return Request(graph.name, *devices, name_of(graph.dtype), *sizes, pins, sorted(options.allow))


class Tuning:
    """The state of one tuning."""

    def __init__(
        self,
        prices: CorrectedPrices,
        log: Log,
        effort: Effort,
        session: TimingSession,
        progress: Progress | None = None,
        start_s: float | None = None,
    ) -> None:
        self.prices, self.log, self.effort, self.session, self.progress = prices, log, effort, session, progress
        self._random = random.Random(effort.seed)
        self._draws = np.random.default_rng(effort.seed)
        self._start_s = time.monotonic() if start_s is None else start_s
        self._pool: list[Plan] = []  # plans that were made, measured or not
        self._bound_s: float | None = None  # under the latest corrected prices
        self._families = collections.deque(prices.families())  # those that were searched least recently first
        self._varied: set[str] = set()  # the plans whose neighbours were searched
        self._retried: set[str] = set()  # plans that ran, failed, and were opened again
        # the estimate after so many rounds and failures
        self._known: tuple[tuple[int, int], StepTimes] = (0, 0), estimate([])

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self, first: Plan) -> TuneResult:
        """Run the loop, then compare the best plans."""
        self._pool = [first, *self.log.plans.values()]
        try:
            is_time_over = not self._explore(first)
            self._compare_best()
        except LaunchError as error:
            if not self._times():
                raise
            return self._result(f"programs can no longer be started: {error.message}")
        if not self._times():  # those that ran failed later
            raise self._none_runs()
        return self._result(f"the time of {seconds(self.effort.seconds)} is over" if is_time_over else self._why_none())

    def _explore(self, first: Plan) -> bool:
        """Measure plans until no plan found could be faster than the best one; return whether this was so before the time was over."""
        if not self._times():
            self._measure_first(first)
        while True:
            if not self._times():
                if (untried := self._untried()) and self._left_s() > 0:
                    self._measure([self._name(untried[0])], self.effort.rounds)
                    continue
                raise self._none_runs()
            if self._left_s() < 0:
                return False
            posterior = self._fit()
            promising = (self._most_promising(posterior) for _ in self._searches(posterior))
            if not (choices := next(filter(None, promising), [])):
                return self._left_s() >= 0
            self._measure([*map(self._name, choices), self._best()], self.effort.rounds)

    def _measure_first(self, first: Plan) -> None:
        """Measure the first plan and the best plans of different kinds, under uncorrected prices."""
        report(self.progress, "search", "the best plan of each kind")
        self._search_families({})
        limit_s = SPREAD * first.prediction.step_time_s
        chosen: dict[object, Plan] = {}
        for plan in [first, *sorted(self._pool, key=lambda plan: plan.prediction.step_time_s)]:
            if plan.prediction.step_time_s <= limit_s:
                chosen.setdefault(_kind(plan), plan)
        names = [self._name(plan) for plan in list(chosen.values())[: self.effort.first_plans]]
        self._measure(names, self.effort.rounds)

    def _searches(self, posterior: Posterior) -> Iterator[None]:
        """Search for plans in steps, each of which takes longer than those before: the best plan under corrected prices, under prices drawn
        from the posterior, pipelines like that of the best measured plan, and families."""
        learned = posterior.factors | self._memory()
        report(self.progress, "search", "under corrected prices")
        self._search_best(learned)
        yield
        report(self.progress, "search", "under other likely prices")
        for _ in range(DRAWS):
            self._plan(posterior.draw(self._draws) | self._memory())
        yield
        if (best := self._best()) not in self._varied:
            self._varied.add(best)
            report(self.progress, "search", f"pipelines like that of {best}")
            for pins in self.prices.neighbours(self.log.plans[best]):
                self._plan(learned, pins)
            yield
        report(self.progress, "search", "the best plan of each kind, under corrected prices")
        self._search_families(learned)
        yield

    def _search_best(self, factors: dict[str, float]) -> None:
        """Search for the best plan under corrected prices, or under those of time alone if no plan fits, and keep its bound."""
        without = {name: factor for name, factor in factors.items() if name != MEMORY}
        if plan := self._plan(factors) or (self._plan(without) if MEMORY in factors else None):
            self._bound_s = plan.bound_s

    def _search_families(self, factors: dict[str, float]) -> None:
        """Search for the best plans of families, as many as a share of the time allows."""
        begun_s = time.monotonic()
        for _ in range(len(self._families)):
            self._plan(factors, self._families[0])
            self._families.rotate(-1)
            if time.monotonic() - begun_s > FAMILIES_SHARE * self.effort.seconds:
                return

    def _plan(self, factors: dict[str, float], pins: Mapping[str, Any] = MappingProxyType({})) -> Plan | None:
        """Search for the best plan with these pins and keep it; ``None`` if there is none. When the time to measure plans is over, search
        only as long as no bound is known."""
        if self._left_s() < 0 and self._times() and self._bound_s is not None:
            return None
        plan = self.prices.best_with(pins, factors, max(1.0, SEARCH_SHARE * self.effort.seconds))
        if plan is not None:
            self._pool.append(plan)
        return plan

    def _most_promising(self, posterior: Posterior) -> list[Plan]:
        """Return plans of different kinds that could be faster than the best measured one by more than the margin, one standard deviation
        below their expected times; the fastest first."""
        limit_s, plans = self._times()[self._best()] * (1 - self._margin()), self._untried()
        hoped_s = [expected_s * math.exp(-deviation) for expected_s, deviation in posterior.predict(plans)]
        chosen: dict[object, Plan] = {}
        for hope_s, plan in sorted(zip(hoped_s, plans, strict=True), key=lambda one: one[0]):
            if hope_s < limit_s:
                chosen.setdefault((_kind(plan), plan.chunks, plan.microbatches), plan)
        return list(chosen.values())[:AT_ONCE]

    def _why_none(self) -> str:
        best_s, margin, error = self._times()[self._best()], self._margin(), self._estimate().error(self._best())
        limit = "no plan fits" if self._bound_s is None else f"no plan takes less than {seconds(self._bound_s)}"
        if self._bound_s is not None and self._bound_s >= best_s * (1 - margin):
            return f"under the corrected prices {limit}, and the best one takes {seconds(best_s)}, with a standard error of {error:.1%}"
        return (
            f"all plans found that could be faster than {seconds(best_s)} by more than {margin:.1%} were measured; under the corrected "
            f"prices {limit}"
        )

    def _compare_best(self) -> None:
        """Measure the best plan, and those that may be as fast (at least one), in shared rounds until they have ``final_rounds``, and
        further until the best one is known well enough or the time is over."""
        while self._left_s(final=True) >= 0 and len(times := self._times()) > 1:
            best, *others = sorted(times, key=times.__getitem__)
            finalists = [best, *(self._contenders(others)[: FINALISTS - 1] or others[:1])]
            shared = min(len(self.log.rounds_of(best, other)) for other in finalists[1:])
            if shared >= self.effort.final_rounds and self._regret(best, finalists[1:]) < REGRET:
                return
            self._measure(finalists, 1, final=True)

    def _regret(self, best: str, others: Sequence[str]) -> float:
        """Return by how much the step of the best plan is expected to be longer than that of another one, given what is known of both."""
        normal = statistics.NormalDist()
        regrets = []
        for other in others:
            log_ratio, error = self._estimate().ratio(best, other)
            regrets.append(log_ratio * normal.cdf(log_ratio / error) + error * normal.pdf(log_ratio / error))
        return max(regrets)

    # -- measuring ----------------------------------------------------------------------------------------------------

    def _measure(self, names: Sequence[str], rounds: int, final: bool = False) -> None:
        """Run ``rounds`` in which each plan takes a turn in random order. A plan that fails, or is clearly slower than the best one, has no
        further turns; one plan that is left needs none."""
        live = [name for name in dict.fromkeys(names) if name not in self.log.failures]
        for number in range(rounds):
            if not live:
                return
            which = "final comparison" if final else f"round {number + 1} of {rounds}"
            report(self.progress, "run", f"{' and '.join(live)}, {which}")
            found = self._round(live, final)
            if not found:
                return
            live = self._contenders(found)
            if len(live) == 1 < len(names):
                return

    def _round(self, names: Sequence[str], final: bool) -> dict[str, float]:
        """Give each plan a turn, in random order, until the time is over; record and return their step times, even if the workers end."""
        found: dict[str, float] = {}
        try:
            for name in self._random.sample(names, len(names)):
                if self._left_s(final) < 0 and (found or self._times()):
                    break
                if step_s := self._turn(name):
                    found[name] = step_s
        finally:
            found = {name: step_s for name, step_s in found.items() if self._has_right_loss(name)}
            if found:
                peaks = {name: peak for name in found if (peak := self.session.peak_bytes[name])}
                self.log.add_round(Round(found, self.effort.steps, peaks))
        return found

    def _turn(self, name: str) -> float | None:
        """Return the measured step time of a plan, opened if it isn't, or record why it fails; one that ran before is opened once more."""
        plan, others = self.log.plans[name], [other for other in self.session.remaining if other != name]
        try:
            if name not in self.session.rounds:
                self.session.open_program(name, self.prices.graph, plan, required=False)
            if name not in self.session.errors and (step_s := self.session.measure(name, self._timeout_s(name))):
                return step_s
            error = self.session.errors[name]
            may_run = name in self._times() and name not in self._retried  # whatever failed may not be the program
            if may_run or (error.cause == OUT_OF_MEMORY and others):  # no other program is in memory then
                self._retried.add(name)
                self.session.retry(name)
                if step_s := self.session.measure(name, self._timeout_s(name)):
                    return step_s
                error = self.session.errors[name]
        except LaunchError:
            raise  # the workers do not start
        except AutoparError as refused:
            self.log.add_failure(name, Failure(CRASH, refused.message))
            return None
        self.log.add_failure(name, Failure(error.cause or CRASH, error.message))
        return None

    def _has_right_loss(self, name: str) -> bool:
        """Return whether the plan's first loss is that of the first plan that runs; otherwise record the failure. In 16 bits, losses
        differ by rounding, and a finite one is enough."""
        reference = next(
            other for other in self.log.plans if other in self.session.losses and other not in self.log.failures
        )
        own, expected = self.session.losses[name][0], self.session.losses[reference][0]
        is_exact = self.log.plans[name].precision in ("float32", "float64") and not self.log.plans[name].allow
        is_close = abs(own - expected) <= LOSS_TOLERANCE * abs(expected)
        if is_close if is_exact else math.isfinite(own):
            return True
        self.log.add_failure(
            name, Failure(WRONG_LOSS, f"its first loss is {own:.6f}, that of {reference} {expected:.6f}")
        )
        return False

    def _timeout_s(self, name: str) -> float:
        expected_s = max(self._times().get(name, 0.0), self.log.plans[name].prediction.step_time_s)
        # on a GPU the first step compiles the layers
        floor_s = max(self.effort.floor_s, TIMEOUT_S if self.session.device == "cuda" else 0.0)
        return max(floor_s, PATIENCE * (self.effort.steps + 1) * expected_s)

    # -- what is known ------------------------------------------------------------------------------------------------

    def _name(self, plan: Plan) -> str:
        """Return the name of the plan in the log, where it is added if no equal program is there."""
        key = program_of(plan)
        known = (name for name, other in self.log.plans.items() if program_of(other) == key)
        return next(known, None) or self.log.add_plan(plan)

    def _untried(self) -> list[Plan]:
        """Return the plans that were made but not measured, one for each program."""
        tried = {*self._times(), *self.log.failures}
        done = {program_of(self.log.plans[name]) for name in tried}
        return [plan for key, plan in {program_of(plan): plan for plan in self._pool}.items() if key not in done]

    def _estimate(self) -> StepTimes:
        """Return the step times of the plans that run."""
        if self._known[0] != (state := (len(self.log.rounds), len(self.log.failures))):
            found = estimate([one.seconds for one in self.log.rounds])
            self._known = state, found.of([name for name in found.names if name not in self.log.failures])
        return self._known[1]

    def _times(self) -> dict[str, float]:
        """Return the step time of each plan that runs."""
        return self._estimate().seconds

    def _contenders(self, names: Iterable[str]) -> list[str]:
        """Return the plans that run and are not clearly slower than the best one."""
        best, times = self._best(), self._estimate()
        ratios = {name: times.ratio(name, best) for name in names if name in times.names}
        return [name for name, (log_ratio, error) in ratios.items() if log_ratio <= CLEARLY * error]

    def _best(self) -> str:
        times = self._times()
        return min(times, key=times.__getitem__)

    def _margin(self) -> float:
        """Return by how much a plan must promise to be faster than the best one, to be measured."""
        return min(self._estimate().error(self._best()), WORTHWHILE)

    def _fit(self) -> Posterior:
        times = self._estimate()
        plans = [self.log.plans[name] for name in times.names]
        return fit(self.prices.log_prices, self.prices.groups, plans, times.logs, times.covariance)

    def _memory(self) -> dict[str, float]:
        """Return the factor of memory, if anything is known of it."""
        factor = memory_factor(self.log)
        return {} if factor is None else {MEMORY: factor}

    def _left_s(self, final: bool = False) -> float:
        share = 1.0 if final else 1 - FINAL_SHARE
        return share * self.effort.seconds - (time.monotonic() - self._start_s)

    def _none_runs(self) -> LaunchError:
        name, failure = next(iter(self.log.failures.items()))
        return LaunchError(
            f"all {len(self.log.failures)} plans failed to run: {name}: {failure.error}",
            "`autopar doctor` checks what programs need; `autopar run` runs one plan",
        )

    # -- the result ---------------------------------------------------------------------------------------------------

    def _result(self, stopped: str) -> TuneResult:
        posterior, times = self._fit(), self._estimate()
        factors, steps = posterior.factors | self._memory(), self.log.measured_steps
        if self._bound_s is None:
            self._search_best(factors)
        trials = sorted(self._trials(posterior), key=lambda trial: trial.measured_s or math.inf)
        best = trials[0].plan
        priced = self.prices.repriced([best], factors)[0]
        step_s = priced.prediction.step_time_s
        bound_s = min(self._bound_s or 0.0, step_s)
        note = (
            f"measured: {seconds(times.seconds[trials[0].name])} a step, the best of {len(times.names)} plans; the prediction is by prices "
            f"corrected by {steps} measured steps"
        )
        best = dataclasses.replace(
            best,
            prediction=priced.prediction,
            stages=priced.stages,
            bound_s=bound_s,
            gap=1 - bound_s / step_s,
            notes=(*best.notes, note),
            sensitivity=None,  # of other prices
            alternatives=(),
        )
        return TuneResult(
            best=best,
            trials=tuple(trials),
            corrections=tuple(_corrections(posterior)),
            calibration=self.prices.calibration_with(factors, steps),
            runner_up=self._runner_up(trials),
            bound_s=bound_s,
            measured_steps=steps,
            stopped=stopped,
            took_s=time.monotonic() - self._start_s,
        )

    def _runner_up(self, trials: Sequence[Trial]) -> RunnerUp | None:
        best, *others = [trial.name for trial in trials if trial.measured_s is not None]
        if not others:
            return None
        log_ratio, error = self._estimate().ratio(best, others[0])
        interval = math.exp(log_ratio - NORMAL_95 * error), math.exp(log_ratio + NORMAL_95 * error)
        return RunnerUp(others[0], math.exp(log_ratio), interval)

    def _trials(self, posterior: Posterior) -> Iterator[Trial]:
        known = {*self._times(), *self.log.failures}
        names = [name for name in self.log.plans if name in known]
        plans = [self.log.plans[name] for name in names]
        before = self.prices.repriced(plans, {})
        after = self.prices.repriced(plans, posterior.factors)
        expected = posterior.predict(plans)
        for name, plan, predicted, corrected, (expected_s, _) in zip(
            names, plans, before, after, expected, strict=True
        ):
            rounds_s = tuple(step_s for (step_s,) in self.log.rounds_of(name))
            failure = self.log.failures.get(name)
            has_time = name in self._times()
            yield Trial(
                name,
                plan,
                predicted.prediction.step_time_s,
                corrected.prediction.step_time_s,
                expected_s,
                rounds_s,
                self._times()[name] if has_time else None,
                self._estimate().interval(name) if has_time else None,
                failure,
            )


def _corrections(posterior: Posterior) -> Iterator[Correction]:
    for (group, factor), deviation in zip(posterior.factors.items(), posterior.deviations.values(), strict=True):
        spread = math.exp(NORMAL_95 * deviation)
        yield Correction(group, factor, (factor / spread, factor * spread))


def _kind(plan: Plan) -> object:
    """Return what makes a plan another kind of plan: its pipeline, degrees and ZeRO stages, whatever the layers' other techniques are."""
    degrees = {tuple(layer.strategy.degree(plan.mesh, *roles) for roles in DEGREES.values()) for layer in plan.layers}
    return plan.pipeline, plan.schedule, frozenset(degrees), frozenset(layer.strategy.zero for layer in plan.layers)
