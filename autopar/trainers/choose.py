"""The fastest setting that a trainer can run: every setting of its space is priced, or excluded by a lower bound of its time or memory.

All blocks have the same strategy, so there are few settings (thousands): degrees, ZeRO stage, microbatch size, chunks, recomputation. They
are grouped into *families* that differ only in recomputation; of a family, the setting with the least recomputation that fits counts. The
bound of a family is the mean work of a pipeline rank without recomputation; families are evaluated in the order of an estimate (the bound
plus a pipeline's bubble) until no bound is below the best step time, or the time limit ends the search.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from autopar.devices import Cluster
from autopar.errors import AutoparError, InfeasibleError, UsageError
from autopar.graph import Graph
from autopar.layer_price import LayerPrice
from autopar.plan import ALLOWED, Plan
from autopar.plan_schema import MAX_SEARCH_S
from autopar.precision import name_of
from autopar.price import Pricer
from autopar.schedules import refusal
from autopar.search.evaluation import by_stage, layer_prices, step_cost
from autopar.search.numerics import preferred
from autopar.search.options import SearchOptions
from autopar.search.problem import Configuration, divisors
from autopar.search.shared_parameters import duplicated_state_bytes
from autopar.search.timeline import Device
from autopar.shard.solve import solve
from autopar.sharding import AxisTypes
from autopar.techniques import Options
from autopar.trainers.layout import (
    PlanParts,
    block_strategy,
    end_strategy,
    is_even,
    plan_parts,
    schedule_of,
    setting_mesh,
    stage_bounds,
)
from autopar.trainers.setting import DEVIATIONS, Setting, deviations_of
from autopar.trainers.trainer import Trainer

MOST_CHUNKS = 12
"""The largest number of stages on a pipeline rank that is tried."""

MICROBATCHES = (1, 2, 4, 8, 16, 32)
"""The numbers of sequences in a microbatch that are tried."""

CONTEXT_FROM = 8192
"""The shortest sequence, in tokens, for which context parallelism is tried without a pin."""

PINS = (
    "tensor",
    "pipeline",
    "context",
    "expert",
    "zero",
    "replicate",
    "chunks",
    "microbatch",
    "activations",
    "precision",
    "facts",
)
"""The fields of ``Setting`` that may be fixed; ``facts`` are added to the trainer's own."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class TrainerPlan:
    """The best setting with its plan; ``families`` is the number of families of settings, ``evaluated`` the number of priced plans.

    ``bound_s`` is a lower bound of the step time of all settings; ``left`` is the number of families that were neither priced nor excluded
    when the time limit ended the search.
    """

    setting: Setting
    plan: Plan
    families: int
    evaluated: int
    left: int
    bound_s: float


@dataclass(frozen=True, slots=True)
class Family:
    """Settings that differ only in recomputation, with a lower bound and an estimate of their step time in seconds."""

    setting: Setting
    bound_s: float
    estimate_s: float


def best_setting(
    graph: Graph,
    cluster: Cluster,
    trainer: Trainer,
    pins: Mapping[str, Any] | None = None,
    report: Report | None = None,
    options: SearchOptions | None = None,
) -> TrainerPlan:
    """Return the fastest setting of ``trainer`` that fits; ``pins`` fixes fields of ``Setting`` (``PINS``).

    A setting with more of the deviations that ``options`` allows must be faster by more than the target gap. ``options.interrupt`` is
    called before each kind of settings is priced. Each combination of deviations has an equal share of the time limit; if no setting was
    found in it, the search goes on to the first one. No limit ends the listing of the kinds of settings, which takes seconds for thousands
    of GPUs. Without ``options`` there is no limit.

    Raises:
        UsageError: the trainer can't run what is pinned, or doesn't have a deviation.
        InfeasibleError: no setting fits.
    """
    options = options or SearchOptions(time_limit_s=MAX_SEARCH_S)
    found: list[TrainerPlan] = []
    why: InfeasibleError | None = None
    combinations = deviating_values(trainer, options.allow, graph.dtype)
    for values in combinations:
        deadline_s = time.thread_time() + options.time_limit_s / len(combinations)
        choice = _Choice(graph, cluster, trainer, {**(pins or {}), **values})
        try:
            found.append(choice.run(deadline_s, report, options.interrupt))
        except InfeasibleError as error:
            why = error
    best = preferred(found, lambda each: each.plan, options.target_gap)
    if best is None:
        assert why is not None
        raise why
    sums = {name: sum(getattr(each, name) for each in found) for name in ("families", "evaluated", "left")}
    return dataclasses.replace(best, bound_s=min(each.bound_s for each in found), **sums)


def check_values(trainer: Trainer, graph: Graph, values: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` if the trainer can't run what ``values`` (fields of ``Setting``) say, or the model has no experts for them."""
    experts = [cls.experts for cls in graph.classes.values() if cls.experts]
    if (expert := values.get("expert", 1)) > 1 and not experts:
        raise UsageError(f"expert={expert}: {graph.name} has no mixture of experts", "leave expert out")
    if any(count % expert for count in experts):
        raise UsageError(
            f"expert={expert}: {graph.name} has {min(experts)} experts in a layer",
            "use a divisor of the number of experts",
        )
    if values.get("chunks", 1) > 1 and values.get("pipeline") == 1:
        raise UsageError(
            f"chunks={values['chunks']}: a pipeline of 1 has one stage", "leave chunks out, or pin pipeline"
        )
    for name in {"zero", "activations"} & set(values):
        has = getattr(trainer.space, name)
        if values[name] not in has:
            raise UsageError(
                f"{name}={values[name]}: {trainer.title} does not have it", f"it has {', '.join(map(str, has))}"
            )
    for name in ("tensor", "pipeline", "context", "expert", "chunks", "replicate"):
        if values.get(name, 1) != 1 and not getattr(trainer.space, name):
            what = {"chunks": "interleaved pipeline", "replicate": "replicated sharding"}.get(
                name, f"{name} parallelism"
            )
            raise UsageError(f"{name}={values[name]}: {trainer.title} has no {what}", "leave it out")


def folds_of(trainer: Trainer, devices: int, values: Mapping[str, Any]) -> frozenset[str]:
    """Return the axes over which the trainer folds experts of the degree ``values["expert"]`` (``Setting.folds``): the first of its space
    whose ranks that degree divides into."""
    sizes = {name: values.get(name, 1) for name in ("context", "tensor", "pipeline")}
    expert, data = values.get("expert", 1), devices // math.prod(sizes.values())
    if expert == 1:
        return frozenset()
    possible = [frozenset(name for name in fold if sizes[name] > 1) for fold in trainer.space.folds]
    for axes in possible:
        own, odd = divmod(expert, math.prod(sizes[name] for name in axes))
        if not odd and data % own == 0:
            return axes
    return possible[0]


def deviating_values(trainer: Trainer, allow: Collection[str], dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return the fields of settings under each combination of the deviations ``allow``, the most exact one first. As in autopar's
    programs, they apply to models in 16 bits, and those of products to models in bfloat16.

    Raises ``UsageError`` for a deviation that the trainer doesn't have.
    """
    for name in allow:
        if name not in trainer.space.deviations:
            has = ", ".join(name.replace("_", "-") for name in trainer.space.deviations)
            raise UsageError(
                f"--allow {name.replace('_', '-')}: {trainer.title} does not have it",
                f"with --trainer {trainer.name} these may be allowed: {has}" if has else "leave it out",
            )
    names = [name for name in trainer.space.deviations if name in allow and dtype.itemsize == 2]
    names = [name for name in names if dtype == torch.bfloat16 or "precision" not in DEVIATIONS[name]]
    some = [each for count in range(len(names) + 1) for each in itertools.combinations(names, count)]
    return [{key: value for name in each for key, value in DEVIATIONS[name].items()} for each in some]


def with_deviations(plan: Plan, s: Setting) -> Plan:
    """Return the plan of a setting with the deviations from exact training that it has, and a note for each."""
    names = deviations_of(s)
    notes = [f"not exact, as {name} allows: {ALLOWED[name]}" for name in names]
    return dataclasses.replace(plan, allow=names, notes=(*plan.notes, *notes))


class TrainerPricers:
    """Prices settings of one trainer, with a cache of pricers: settings with equal cost models share one, and all share types."""

    def __init__(self, graph: Graph, cluster: Cluster, trainer: Trainer) -> None:
        self.graph, self.cluster, self.trainer = graph, trainer.devices(cluster), trainer
        self._pricers: dict[Any, Pricer] = {}
        self._solved: dict[tuple[Any, ...], AxisTypes | None] = {}

    def _solve(self, cls: Any, role: Any, size: int) -> AxisTypes | None:
        key = cls.name, role, size
        if key not in self._solved:
            self._solved[key] = solve(cls, role, size)
        return self._solved[key]

    def of(self, s: Setting) -> Pricer:
        """Return the pricer of a setting."""
        model = self.trainer.model(s, self.cluster)
        key, plain = (model, s.precision), (dataclasses.replace(model, overlap_experts=0.0), s.precision)
        if plain not in self._pricers:
            self._pricers[plain] = Pricer(self.graph, self.cluster, s.precision, self._solve, plain[0])
        if key not in self._pricers:  # only the last step of a price depends on ``overlap_experts``
            other = self._pricers[plain]
            own = dataclasses.replace(model, cpu=other.trainer.cpu, fuses_rounding=other.trainer.fuses_rounding)
            self._pricers[key] = other.variant(trainer=own)
        return self._pricers[key]

    def parts(self, s: Setting) -> PlanParts:
        """Return the plan of a setting, without prices."""
        return plan_parts(self.graph, s, self.trainer.root_zero(s))

    def plan(self, s: Setting) -> Plan:
        """Return the priced plan of a setting; errors as in ``search.evaluate``."""
        return with_deviations(self.parts(s).evaluate(self.graph, self.cluster, self.of(s)), s)

    def prices(self, parts: PlanParts, s: Setting) -> tuple[list[LayerPrice], list[float], list[float]]:
        """Return the arguments of ``step_cost`` for a setting; errors as in ``search.evaluate``."""
        config = Configuration(parts.mesh, parts.schedule)
        return layer_prices(self.graph, self.cluster, self.of(s), config, parts.bounds, parts.strategies)


@dataclass
class _Choice:
    graph: Graph
    cluster: Cluster
    trainer: Trainer
    pins: dict[str, Any]
    pricers: TrainerPricers = field(init=False)
    best: tuple[Setting, Plan] | None = None
    evaluated: int = 0
    refusal: str = ""
    lacking: float = math.inf
    """The fewest bytes that any setting lacks on a device."""
    layers: list[tuple[str, bool]] = field(init=False)
    """The kind of every layer: its class, and whether it is the first or the last."""
    kinds: Counter[tuple[str, bool]] = field(init=False)
    mixtures: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.pricers = TrainerPricers(self.graph, self.cluster, self.trainer)
        self.cluster = self.pricers.cluster  # as the trainer's kernels see it
        last = len(self.graph.layers) - 1
        self.layers = [(layer.cls, i in (0, last)) for i, layer in enumerate(self.graph.layers)]
        self.kinds = Counter(self.layers)
        self.mixtures = {name for name, cls in self.graph.classes.items() if cls.experts}
        assert set(self.pins) <= set(PINS), self.pins
        check_values(self.trainer, self.graph, self.pins)

    @property
    def best_s(self) -> float:
        return math.inf if self.best is None else self.best[1].prediction.step_time_s

    def run(self, deadline_s: float, report: Report | None, interrupt: Callable[[], None] | None) -> TrainerPlan:
        """Return the best setting that is found until ``thread_time`` reaches ``deadline_s``, or the first one."""
        families = sorted(self._families(interrupt or (lambda: None)), key=lambda family: family.estimate_s)
        left: list[float] = []
        for number, family in enumerate(families):
            if interrupt is not None:
                interrupt()
            if self.best is not None and time.thread_time() >= deadline_s:
                left = [other.bound_s for other in families[number:] if other.bound_s < self.best_s]
                break
            if report is not None and number % 25 == 0:
                report(f"{number} of {len(families)} kinds of settings, best {self.best_s:.4g} s")
            if family.bound_s < self.best_s:
                self._evaluate(family.setting)
        if self.best is None:
            reason = self.refusal or "none is valid for the devices, the batch and the model"
            if self.lacking < math.inf:
                reason = f"even the smallest one needs {self.lacking / 1e9:.1f} GB more per device"
            raise InfeasibleError(
                f"no setting of {self.trainer.title} fits: {reason}",
                "use more devices, more memory, or another trainer",
            )
        return TrainerPlan(*self.best, len(families), self.evaluated, len(left), min([self.best_s, *left]))

    def _evaluate(self, s: Setting) -> None:
        """Price the settings of a family, least recomputation first, until one fits."""
        kinds = self.trainer.space.activations
        for bounds in self._cuts(s):
            cut = dataclasses.replace(s, cuts=bounds[1:-1])
            if self._is_slower(cut):
                continue
            for kind in kinds:
                if self.pins.get("activations", kind) != kind:
                    continue
                chosen = cut.with_activations(kind)
                over = self._excess(chosen)
                if over is None:
                    break
                if over > 0:
                    self.lacking = min(self.lacking, over)
                    continue
                if kind == kinds[-1] and self.trainer.space.some_blocks and "activations" not in self.pins:
                    chosen = self._fewest_blocks(chosen, bounds)
                self._keep_if_faster(chosen)
                break

    def _fewest_blocks(self, s: Setting, bounds: tuple[int, ...]) -> Setting:
        """Return the setting with as few recomputed blocks in each stage as fit, by bisection: fewer take more memory and less time."""
        head = len(self.layers) - 1
        low, high, found = 0, max(min(b, head) - max(a, 1) for a, b in pairwise(bounds)), s
        while high - low > 1:
            middle = (low + high) // 2
            fewer = s.with_activations(s.activations, middle)
            if self._excess(fewer) == 0:
                high, found = middle, fewer
            else:
                low = middle
        return found

    def _is_slower(self, s: Setting) -> bool:
        """Return whether a lower bound of a setting's step time, with its pipeline's bubble, is no less than the best step time."""
        parts = self.pricers.parts(s)
        try:
            prices = self.pricers.prices(parts, s)
        except AutoparError:
            return False
        return step_cost(parts.bounds, *prices, parts.schedule, self.best_s, exact=False).step_time_s >= self.best_s

    def _excess(self, s: Setting) -> float | None:
        """Return the bytes beyond the limit on the first device that lacks memory, 0 if all have enough, ``None`` without a price."""
        parts, pricer = self.pricers.parts(s), self.pricers.of(s)
        try:
            prices = by_stage(self.pricers.prices(parts, s)[0], parts.bounds)
        except AutoparError as error:
            self.refusal = self.refusal or error.message
            return None
        config = Configuration(parts.mesh, parts.schedule)
        duplicated = duplicated_state_bytes(self.graph, pricer, config, parts.bounds, parts.strategies)
        for rank, stage in enumerate(self.cluster.stages(s.pipeline)):
            device = Device(parts.schedule, rank, [prices[i] for i in parts.schedule.stages_of(rank)])
            over = device.at_peak().total - sum(duplicated[rank]) - stage.memory_limit_bytes
            if over > 0:
                return over
        return 0.0

    def _keep_if_faster(self, s: Setting) -> None:
        """Price a setting that fits, and keep it if it is the fastest so far."""
        self.evaluated += 1
        parts = self.pricers.parts(s)
        prices, edges, sends = self.pricers.prices(parts, s)
        if step_cost(parts.bounds, prices, edges, sends, parts.schedule, self.best_s).step_time_s < self.best_s:
            plan = self.pricers.plan(s)
            assert not plan.too_full, s
            self.best = s, plan

    def _cuts(self, s: Setting) -> list[tuple[int, ...]]:
        """Return the stage bounds to try: equal numbers of blocks, and if the trainer admits any, bounds by the layers' times."""
        even = stage_bounds(self.graph, s)
        if s.stages == 1:
            return [even]
        found = [even] if is_even(even) else []
        if self.trainer.space.uneven:
            prices = self._prices(s)
            assert prices is not None, s
            seconds = [prices[kind].forward_s + prices[kind].backward_s for kind in self.layers]
            found.append(balanced_bounds(seconds, s.stages))
        return list(dict.fromkeys(found))

    def _families(self, interrupt: Callable[[], None]) -> Iterator[Family]:
        for degrees in self._degrees():
            interrupt()
            sized = [dataclasses.replace(degrees, chunks=chunks) for chunks in self._chunks(degrees)]
            # such as 1F1B with fewer microbatches than stages
            sized = [s for s in sized if refusal(schedule_of(s), self.trainer.space.any_rounds) is None]
            overlap = self.trainer.overlap_experts
            for alike in [s for s in sized if not overlap(s)], [s for s in sized if overlap(s)]:
                if alike and (least := self._seconds(max(alike, key=overlap))) is not None:
                    work_s, once_s = least
                    # recomputation adds work, but backward passes may hide more of a step's reductions then
                    bound_s = 0.0 if self.cluster.parts else work_s  # unequal devices have other prices
                    bubble = (degrees.pipeline - 1) / degrees.microbatches
                    yield from (Family(s, bound_s, work_s * (1 + bubble / s.chunks) + once_s) for s in alike)

    def _seconds(self, s: Setting) -> tuple[float, float] | None:
        """Return a pipeline rank's mean seconds of all microbatches, and of what a step does once, without recomputation; ``None`` if there
        is no price, or parameters, gradients and optimizer states alone exceed the memory."""
        of_kinds = self._prices(s)
        if of_kinds is None:
            return None
        prices = [(of_kinds[kind], count) for kind, count in self.kinds.items()]
        if self._states_exceed(prices, s.pipeline):
            return None
        work_s = s.microbatches * sum(n * (p.forward_s + p.backward_s) for p, n in prices) / s.pipeline
        return work_s, sum(n * p.step_s for p, n in prices) / s.pipeline

    def _states_exceed(self, prices: list[tuple[LayerPrice, int]], pipeline: int) -> bool:
        """Return whether parameters, gradients and optimizer states alone exceed the memory of a pipeline rank; of tied parameters, the
        sum of prices says too much."""
        limit = max(stage.memory_limit_bytes for stage in self.cluster.stages(pipeline))
        states = sum(n * (p.parameters_bytes + p.gradients_bytes + p.optimizer_bytes) for p, n in prices) / pipeline
        if states <= limit or self.graph.shared_parameters:
            return False
        self.lacking = min(self.lacking, states - limit)
        return True

    def _prices(self, s: Setting) -> dict[tuple[str, bool], LayerPrice] | None:
        """Return the price of each kind of layer (``_kind``) without recomputation; ``None`` if one has none."""
        mesh = setting_mesh(s)
        block = block_strategy(s, mesh)
        dense, ends = block.dense, end_strategy(block, self.trainer.root_zero(s))
        pricer = self.pricers.of(s).on(self.cluster.stages(s.pipeline)[0])
        found: dict[tuple[str, bool], LayerPrice] = {}
        for name, is_end in self.kinds:
            own = ends if is_end else block if name in self.mixtures else dense
            price = pricer.layer(name, mesh, own, s.microbatches)
            if price is None:
                return None
            found[name, is_end] = price
        return found

    def _chunks(self, s: Setting) -> Iterator[int]:
        """Yield the numbers of chunks to try."""
        if s.pipeline == 1 or not self.trainer.space.chunks:
            if self.pins.get("chunks", 1) == 1:
                yield 1
            return
        for chunks in (self.pins["chunks"],) if "chunks" in self.pins else range(1, MOST_CHUNKS + 1):
            if s.pipeline * chunks <= len(self.layers) - 2 and (chunks == 1 or s.microbatches >= s.pipeline):
                yield chunks

    def _degrees(self) -> Iterator[Setting]:
        """Yield the settings without chunks and recomputation that divide devices and batch."""
        space, count, batch = self.trainer.space, self.cluster.count, self.graph.batch_size
        blocks, per_node = max(1, len(self.graph.layers) - 2), self.cluster.gpus_per_node
        seq = self.graph.tokens // batch
        tensors = self._allowed("tensor", divisors(min(count, per_node)), space.tensor)
        pipelines = self._allowed("pipeline", [n for n in divisors(count) if n <= blocks], space.pipeline)
        long = [n for n in divisors(count) if n <= 4 * per_node and seq % (2 * n) == 0] if seq >= CONTEXT_FROM else [1]
        contexts = self._allowed("context", [1, *long], space.context)
        for pipeline, tensor, context in itertools.product(pipelines, tensors, contexts):
            data, odd = divmod(count, pipeline * tensor * context)
            if odd or batch % data:
                continue
            for expert, folds in self._experts(data, context, tensor):
                for zero, replicate in self._sharding(data, context, tensor, expert):
                    yield from self._sized(
                        Setting(
                            data=data,
                            tensor=tensor,
                            pipeline=pipeline,
                            context=context,
                            expert=expert,
                            chunks=1,
                            sequence=tensor > 1 and space.sequence,
                            zero=zero,
                            options=Options(),
                            precision=self.pins.get("precision", name_of(self.graph.dtype)),
                            global_batch=batch,
                            microbatch=1,
                            facts=self._facts(tensor, expert),
                            replicate=replicate,
                            folds=folds,
                        )
                    )

    def _facts(self, tensor: int, expert: int) -> frozenset[str]:
        """Return the facts of settings with these degrees: the trainer's, and those that are fixed."""
        fixed = frozenset(self.pins.get("facts", ())) - (frozenset() if tensor > 1 else {"overlapped tensor"})
        return self.trainer.facts_of(tensor, expert) | fixed

    def _allowed(self, name: str, values: list[int], has: bool) -> list[int]:
        """Return the values of a degree to try: 1 if the trainer lacks this parallelism, the pinned value, or all."""
        values = list(dict.fromkeys(values)) if has else [1]
        return [self.pins[name]] if name in self.pins else values

    def _experts(self, data: int, context: int, tensor: int) -> Iterator[tuple[int, frozenset[str]]]:
        """Yield degrees of expert parallelism, each with the axes over which experts are folded."""
        pinned = self.pins.get("expert")
        if pinned in (None, 1):
            yield 1, frozenset()
        if not self.mixtures or not self.trainer.space.expert:
            return
        least, sizes = (
            min(self.graph.classes[name].experts for name in self.mixtures),
            {"context": context, "tensor": tensor},
        )
        seen = set()
        for fold in self.trainer.space.folds:
            axes = frozenset(name for name in fold if sizes[name] > 1)
            for own in divisors(data):
                degree = own * math.prod(sizes[name] for name in axes)
                if (
                    1 < degree <= least
                    and least % degree == 0
                    and pinned in (None, degree)
                    and (degree, axes) not in seen
                ):
                    seen.add((degree, axes))
                    yield degree, axes

    def _sharding(self, data: int, context: int, tensor: int, expert: int) -> Iterator[tuple[int, int]]:
        """Yield ZeRO stages, each with numbers of HSDP replicas."""
        ranks = data * context
        stages = self.trainer.space.zero if ranks > 1 else (0,)
        wanted = self.pins.get("zero")
        for zero in stages if wanted is None or ranks == 1 else (wanted,):
            copies = (
                divisors(data)[:-1] if self.trainer.space.replicate and zero >= 2 and expert == context == 1 else [1]
            )
            for replicate in copies or [1]:
                if self.pins.get("replicate", replicate) == replicate:
                    yield zero, replicate

    def _sized(self, s: Setting) -> Iterator[Setting]:
        each, pinned = s.global_batch // s.data, self.pins.get("microbatch")
        for microbatch in MICROBATCHES if pinned is None else (pinned,):
            if each % microbatch == 0:
                yield dataclasses.replace(s, microbatch=microbatch)


def balanced_bounds(seconds: list[float], stages: int) -> tuple[int, ...]:
    """Return the bounds of ``stages`` stages, none empty, whose slowest one is as fast as possible, given the seconds of every layer.

    Bisection over the time of the slowest stage, each stage taking as many layers as fit; the most layers go to the earliest stages.
    """
    low, high = max(max(seconds), sum(seconds) / stages), sum(seconds)
    found = _filled(seconds, stages, high)
    assert found is not None, (len(seconds), stages)
    for _ in range(50):
        middle = (low + high) / 2
        bounds = _filled(seconds, stages, middle)
        if bounds is None:
            low = middle
        else:
            found, high = bounds, middle
    return found


def _filled(seconds: list[float], stages: int, most: float) -> tuple[int, ...] | None:
    """Return bounds of stages that take at most ``most`` seconds each and leave a layer for every later stage; ``None`` if there are
    none."""
    bounds, at = [0], 0
    for stage in range(stages):
        total, first = 0.0, at
        last = len(seconds) - (stages - 1 - stage)
        while at < last and total + seconds[at] <= most * (1 + 1e-12):
            total, at = total + seconds[at], at + 1
        if at == first:
            return None
        bounds.append(at)
    return tuple(bounds) if at == len(seconds) else None
