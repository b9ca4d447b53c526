"""The loop of a tuning: measure a few different plans, correct the prices, plan again, and measure what could be faster."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autopar.devices import Cluster
from autopar.devices.calibration import MEMORY, Calibration, calibrated
from autopar.errors import OUT_OF_MEMORY, AutoparError, InfeasibleError, LaunchError, UsageError
from autopar.graph import Graph
from autopar.plan import DEGREES, Plan
from autopar.planning import compared_graph, plan_graph
from autopar.precision import name_of
from autopar.profile import profile
from autopar.progress import Progress, report
from autopar.run.processes import Placement
from autopar.search import SearchOptions
from autopar.timing import TimingSession, median_interval, paired_ratio
from autopar.timing.session import LOSS_TOLERANCE, TIMEOUT_S
from autopar.tune.fit import Measured, Posterior, fit, program_of
from autopar.tune.log import CRASH, WRONG_LOSS, Failure, Log, Request, Round
from autopar.tune.memory import memory_factor
from autopar.tune.prices import CorrectedPrices
from autopar.tune.result import Correction, RunnerUp, Trial, TuneResult
from autopar.units import Constant, seconds
from autopar.workload import Workload

ROUND_SD = Constant(
    0.065,
    "log of a step time",
    "measured: docs/evidence/measured-time.jsonl, deviation of a program's rounds, median over programs; until rounds are repeated",
)
NORMAL_95 = 1.96  # standard deviations on each side of a 95 % interval
MEDIAN_ERROR = math.sqrt(math.pi / 2)  # standard error of a median over that of a mean, for normal samples
PATIENCE = 20.0  # a program that takes this many times as long as expected hangs
HOPELESS = 1.5  # a new plan that takes this many times as long as the best one gets no further rounds
WORTHWHILE = 0.02  # a plan that could be faster than the best one by more than this, or than the noise, is measured
DRAWS = 2  # plans are also made under prices that are drawn from the posterior
FAMILIES_SHARE, SEARCH_SHARE, FINAL_SHARE = (
    0.2,
    1 / 30,
    0.2,
)  # of the time: all families, one search, the final comparison
SPREAD = 2.0  # the first plans are priced at most this many times as slow as the best one


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: in about ``seconds`` in total, ``rounds`` of ``steps`` timed steps for each plan, starting with ``first_plans``
    different ones; the best two get ``final_rounds``. A program that does not answer is ended after ``floor_s`` seconds or later."""

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
        cluster = calibrated(cluster, record.base, cluster.notes, "profile")
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
        return Tuning(prices, record, effort, session, progress).run(first)


def _request(graph: Graph, cluster: Cluster, options: SearchOptions) -> Request:
    sizes = graph.batch_size, graph.tokens
    pins = json.loads(json.dumps(options.pins))
    return Request(graph.name, cluster.count, cluster.kind, name_of(graph.dtype), *sizes, pins, sorted(options.allow))


class Tuning:
    """The state of one tuning."""

    def __init__(
        self,
        prices: CorrectedPrices,
        log: Log,
        effort: Effort,
        session: TimingSession,
        progress: Progress | None = None,
    ) -> None:
        self.prices, self.log, self.effort, self.session, self.progress = prices, log, effort, session, progress
        self._random = random.Random(effort.seed)
        self._draws = np.random.default_rng(effort.seed)
        self._start_s = time.monotonic()
        self._pool: list[Plan] = []  # plans that were made, measured or not

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self, first: Plan) -> TuneResult:
        """Run the loop, then compare the best two plans."""
        self._pool = [first, *self.log.plans.values()]
        if not self._times():
            self._measure_first(first)
        widened, bound_s = False, 0.0
        while True:
            if not self._times():
                if (untried := self._untried()) and self._left_s() > 0:
                    self._measure([self._name(untried[0])], self.effort.rounds)
                    continue
                raise self._none_runs()
            posterior = self._fit()
            if self._left_s() < 0:
                stopped = f"the time of {seconds(self.effort.seconds)} is over"
                break
            bound_s = self._plan_again(posterior)
            choice = self._most_promising(posterior)
            if choice is None and not widened:
                widened = True
                report(self.progress, "search", "the best plan of each kind, under corrected prices")
                self._pool += self._families(posterior.factors)
                choice = self._most_promising(posterior)
            if choice is None:
                stopped = self._why_none(bound_s)
                break
            self._measure([self._name(choice), self._best()], self.effort.rounds)
        winner, runner_up = self._compare_best()
        return self._result(winner, runner_up, bound_s, stopped)

    def _measure_first(self, first: Plan) -> None:
        """Measure the first plan and the best plans of different kinds, under uncorrected prices."""
        report(self.progress, "search", "the best plan of each kind")
        self._pool += self._families({})
        limit_s = SPREAD * first.prediction.step_time_s
        chosen: dict[object, Plan] = {}
        for plan in [first, *sorted(self._pool, key=lambda plan: plan.prediction.step_time_s)]:
            if plan.prediction.step_time_s <= limit_s:
                chosen.setdefault(_kind(plan), plan)
        names = [self._name(plan) for plan in list(chosen.values())[: self.effort.first_plans]]
        self._measure(names, self.effort.rounds)

    def _families(self, factors: dict[str, float]) -> list[Plan]:
        """Return the best plans of families, as many as a share of the time allows."""
        begun_s, found = time.monotonic(), []
        for plan in self.prices.families(factors, self._search_s()):
            if plan is not None:
                found.append(plan)
            if time.monotonic() - begun_s > FAMILIES_SHARE * self.effort.seconds:
                break
        return found

    def _plan_again(self, posterior: Posterior) -> float:
        """Plan under the corrected prices and under prices drawn from the posterior; return the bound under the corrected ones."""
        learned = posterior.factors | self._memory()
        bound_s = 0.0
        for number, factors in enumerate(
            [learned, *(posterior.draw(self._draws) | self._memory() for _ in range(DRAWS))]
        ):
            report(self.progress, "search", "under corrected prices" if not number else "under other likely prices")
            without = {name: f for name, f in factors.items() if name != MEMORY}
            for tried in [factors, *([without] if MEMORY in factors else [])]:
                try:
                    plan = self.prices.plan(tried, self._search_s())
                except InfeasibleError:
                    continue
                self._pool.append(plan)
                bound_s = bound_s if number else plan.bound_s
                break
        return bound_s

    def _most_promising(self, posterior: Posterior) -> Plan | None:
        """Return the plan that could be fastest, one standard deviation below its expected time, or ``None`` if none could be faster than
        the best measured one by more than the margin."""
        chosen, least_s = None, self._times()[self._best()] * (1 - self._margin())
        for plan in self._untried():
            expected_s, deviation = posterior.predict(plan)
            if (hoped_s := expected_s * math.exp(-deviation)) < least_s:
                chosen, least_s = plan, hoped_s
        return chosen

    def _why_none(self, bound_s: float) -> str:
        best_s, margin = self._times()[self._best()], self._margin()
        if bound_s >= best_s * (1 - margin):
            return (
                f"no plan takes less than {seconds(bound_s)} under the corrected prices (proved), and the best one takes "
                f"{seconds(best_s)}, measured to within {self._noise():.1%}"
            )
        return (
            f"all plans found that could be faster than {seconds(best_s)} by more than {margin:.1%} were measured; the bound under the "
            f"corrected prices is {seconds(bound_s)}"
        )

    def _compare_best(self) -> tuple[str, RunnerUp | None]:
        """Measure the best two plans in shared rounds until they have ``final_rounds``; return the winner, and how the other compares."""
        if not (times := self._times()):
            raise self._none_runs()
        best, *others = sorted(times, key=times.__getitem__)[:2]
        if not others:
            return best, None
        missing = self.effort.final_rounds - len(self.log.rounds_of(best, others[0]))
        self._measure([best, others[0]], missing, final=True)
        if {best, others[0]} & self.log.failures.keys():
            return self._compare_best()
        if not (pairs := self.log.rounds_of(best, others[0])):
            return best, None
        ours, theirs = zip(*pairs, strict=True)
        ratio, (low, high) = paired_ratio(ours, theirs, self.effort.seed)
        if ratio > 1:  # the other one is faster in shared rounds
            return others[0], RunnerUp(best, 1 / ratio, (1 / high, 1 / low))
        return best, RunnerUp(others[0], ratio, (low, high))

    # -- measuring ----------------------------------------------------------------------------------------------------

    def _measure(self, names: Sequence[str], rounds: int, final: bool = False) -> None:
        """Run ``rounds`` in which each plan takes a turn in random order. A plan that fails, or is hopeless, has no further turns."""
        live = [name for name in dict.fromkeys(names) if name not in self.log.failures]
        for number in range(rounds):
            if self._left_s(final) < 0 and self._times():
                return
            report(self.progress, "run", f"{' and '.join(live)}, round {number + 1} of {rounds}")
            found = {name: step_s for name in self._random.sample(live, len(live)) if (step_s := self._turn(name))}
            if not (found := {name: step_s for name, step_s in found.items() if self._has_right_loss(name)}):
                return
            peaks = {name: peak for name in found if (peak := self.session.peak_bytes[name])}
            self.log.add_round(Round(found, self.effort.steps, peaks))
            fastest_s = min(self._times().values())
            live = [name for name in found if final or self._times()[name] <= HOPELESS * fastest_s]
            if not final and len(live) == 1 and live[0] not in names[:1]:
                return  # the new plan is hopeless

    def _turn(self, name: str) -> float | None:
        """Return the measured step time of a plan, opened if it isn't, or record why it fails."""
        plan, others = self.log.plans[name], [other for other in self.session.remaining if other != name]
        try:
            if name not in self.session.rounds:
                self.session.open_program(name, self.prices.graph, plan, required=False)
            if name not in self.session.errors and (step_s := self.session.measure(name, self._timeout_s(name))):
                return step_s
            error = self.session.errors[name]
            if error.cause == OUT_OF_MEMORY and others:  # it may run if no other program is in memory
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

    def _times(self) -> dict[str, float]:
        """Return the median step time of each plan that runs."""
        names = dict.fromkeys(name for one in self.log.rounds for name in one.seconds)
        medians = {name: float(np.median(self.log.rounds_of(name))) for name in names}
        return {name: step_s for name, step_s in medians.items() if name not in self.log.failures}

    def _best(self) -> str:
        times = self._times()
        return min(times, key=times.__getitem__)

    def _errors(self) -> dict[str, float]:
        """Return the relative standard error of each plan's median; rounds of all plans are assumed to vary alike."""
        logs = [np.log(self.log.rounds_of(name)) for name in self._times()]
        freedom = sum(len(own) - 1 for own in logs)
        squares = float(sum(((own - own.mean()) ** 2).sum() for own in logs))
        # the prior deviation counts as one more observation
        deviation = math.sqrt((squares + ROUND_SD.value**2) / (freedom + 1))
        return {
            name: MEDIAN_ERROR * deviation / math.sqrt(len(own)) for name, own in zip(self._times(), logs, strict=True)
        }

    def _margin(self) -> float:
        """Return by how much a plan must promise to be faster than the best one, to be measured."""
        return min(self._noise(), WORTHWHILE)

    def _noise(self) -> float:
        """Return the relative standard error of the best plan's step time."""
        return self._errors()[self._best()]

    def _fit(self) -> Posterior:
        times, errors = self._times(), self._errors()
        measured = [Measured(self.log.plans[name], times[name], errors[name]) for name in times]
        return fit(self.prices.log_prices, self.prices.groups, measured)

    def _memory(self) -> dict[str, float]:
        """Return the factor of memory, if anything is known of it."""
        factor = memory_factor(self.log)
        return {} if factor is None else {MEMORY: factor}

    def _search_s(self) -> float:
        return max(1.0, SEARCH_SHARE * self.effort.seconds)

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

    def _result(self, winner: str, runner_up: RunnerUp | None, bound_s: float, stopped: str) -> TuneResult:
        posterior = self._fit()
        factors, steps = posterior.factors | self._memory(), self.log.measured_steps
        found = self._trials(posterior)
        trials = sorted(found, key=lambda trial: (trial.name != winner, trial.measured_s or math.inf))
        best = trials[0].plan
        priced = self.prices.repriced([best], factors)[0]
        step_s = priced.prediction.step_time_s
        note = (
            f"measured: {seconds(trials[0].measured_s or 0.0)} a step, the best of {len(self._times())} plans; the prediction is by "
            f"prices corrected by {steps} measured steps"
        )
        best = dataclasses.replace(
            best,
            prediction=priced.prediction,
            stages=priced.stages,
            bound_s=min(bound_s, step_s),
            gap=1 - min(bound_s, step_s) / step_s,
            notes=(*best.notes, note),
            sensitivity=None,  # of other prices
            alternatives=(),
        )
        return TuneResult(
            best=best,
            trials=tuple(trials),
            corrections=tuple(_corrections(posterior)),
            calibration=self.prices.calibration_with(factors, steps),
            runner_up=runner_up,
            bound_s=bound_s,
            measured_steps=steps,
            stopped=stopped,
            took_s=time.monotonic() - self._start_s,
        )

    def _trials(self, posterior: Posterior) -> Iterator[Trial]:
        names = [name for name in self.log.plans if name in self._times() or name in self.log.failures]
        plans = [self.log.plans[name] for name in names]
        before = self.prices.repriced(plans, {})
        after = self.prices.repriced(plans, posterior.factors)
        for name, plan, predicted, corrected in zip(names, plans, before, after, strict=True):
            rounds_s = tuple(step_s for (step_s,) in self.log.rounds_of(name))
            failure = self.log.failures.get(name)
            has_time = rounds_s and failure is None
            measured_s, interval_s = median_interval(rounds_s, self.effort.seed) if has_time else (None, None)
            yield Trial(
                name,
                plan,
                predicted.prediction.step_time_s,
                corrected.prediction.step_time_s,
                posterior.predict(plan)[0],
                rounds_s,
                measured_s,
                interval_s,
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
