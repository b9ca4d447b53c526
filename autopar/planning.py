"""The stages before emission: capture, which creates a workload's graph, and search, which finds a plan."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import time
from collections.abc import Iterator
from pathlib import Path

from autopar.capture import check_capture, without_check
from autopar.devices import Cluster
from autopar.errors import InfeasibleError, UsageError
from autopar.expert_loads import EVEN, UNEVEN
from autopar.explain import Study, suggest
from autopar.graph import Graph
from autopar.memory import peak_memory_bytes
from autopar.ops.compilation import stays_eager
from autopar.ops.cost import is_attention
from autopar.pins import refuse_pins
from autopar.plan import DEGREES, Plan
from autopar.plan_files import check_devices, check_model, read_plan
from autopar.precision import FP8_RECIPES, name_of
from autopar.price import Pricer as LayerPricer
from autopar.progress import Progress, report
from autopar.run import ranks
from autopar.schedules import NO_PIPELINE
from autopar.search import (
    PriceSource,
    SearchOptions,
    Shared,
    filled_plan,
    price_pins,
    reprice,
    search,
    search_again,
)
from autopar.search.notes import odd_experts, unsplit_layers
from autopar.search.numerics import Numerics, allowed_numerics, best_plan
from autopar.search.options import SequencePin
from autopar.search.problem import divisors
from autopar.search.strategies import LONG_SEQUENCE, MOST_NODES, SEQUENCE_ROLES
from autopar.units import gigabytes
from autopar.workload import Recapture, Workload, sequence_length, with_numerics


def plan_model(
    workload: Workload,
    cluster: Cluster,
    options: SearchOptions,
    *,
    plan: Plan | str | Path | None = None,
    capture_check: bool = True,
    recapture: Recapture | None = None,
    progress: Progress | None = None,
    for_program: bool = True,
) -> tuple[Graph, Plan]:
    """Run stages ``capture`` and ``search``: return the graph and its plan, or the given ``plan``, which must fit the graph.

    ``recapture`` captures the graph with other sizes; by default it slices or repeats the example batch. ``for_program`` as in
    ``compared_graph``. The plan's ``wall_time_s`` counts from this call; ``planning_memory_bytes`` is the peak memory of this process. If
    the plan treats microbatches as separate batches, the graph is that of one microbatch.
    """
    start_s = time.perf_counter()
    if plan is not None:
        refuse_pins([f"{key}={value}" for key, value in options.pins.items()], "plan")
    check_schedule(options)
    given = plan if isinstance(plan, Plan | None) else read_plan(plan)
    if given is not None:
        workload.check_plan(given)
    graph = compared_graph(workload, capture_check, progress, for_program=for_program)
    again = recapture or workload.resized
    own_dtype = workload.precision is None
    return plan_graph(
        graph, cluster, options, again, plan=given, progress=progress, start_s=start_s, own_dtype=own_dtype
    )


def _slow_dtype(graph: Graph, cluster: Cluster) -> tuple[str, ...]:
    """Return a note if the model is in float32, and the devices are GPUs that are faster in bfloat16."""
    peaks = cluster.gpu.peak_flops
    faster = peaks.get("bfloat16", 0.0) / peaks.get("float32", math.inf)
    if name_of(graph.dtype) != "float32" or faster <= 1 or cluster.kind != "cuda":
        return ()
    return (
        f"the model is in float32; in bfloat16 (--precision bfloat16) the devices have {faster:.0f} times the peak FLOP/s",
    )


def check_schedule(options: SearchOptions) -> None:
    """Raise ``UsageError`` if a schedule is pinned without a pipeline. This runs before capture, which may take minutes."""
    if options.schedule not in (None, NO_PIPELINE) and options.pipeline == 1 and (options.chunks or 1) == 1:
        raise UsageError(
            f"schedule={options.schedule} orders the microbatches of a pipeline, but pipeline=1 has no pipeline",
            "leave one of the two pins out",
        )


def plan_graph(
    graph: Graph,
    cluster: Cluster,
    options: SearchOptions,
    recapture: Recapture,
    *,
    plan: Plan | None = None,
    progress: Progress | None = None,
    start_s: float | None = None,
    own_dtype: bool = False,
) -> tuple[Graph, Plan]:
    """Run stage ``search`` of ``plan_model`` for a captured graph, after ``check_schedule``. ``wall_time_s`` counts from ``start_s``.
    ``own_dtype``: no precision was requested, so that the plan notes if the model's dtype is slow."""
    begun_s = time.perf_counter() if start_s is None else start_s
    again = functools.cache(recapture)

    def find() -> Plan:
        found = search_model(graph, cluster, options, again, progress)
        return dataclasses.replace(
            found,
            notes=(*(_slow_dtype(graph, cluster) if own_dtype else ()), *found.notes),
            wall_time_s=time.perf_counter() - begun_s,
            planning_memory_bytes=peak_memory_bytes(),
        )

    chosen = plan or ranks.plan_of_rank_0(find)
    of_plan = with_numerics(graph, again, Numerics.of(chosen))
    if plan is not None:
        check_model(plan, of_plan)
        precision = name_of(of_plan.dtype)
        if plan.precision != precision:  # not in ``check_model``: a plan is verified in float64
            raise UsageError(
                f"the plan is for training in {plan.precision}, and the model is in {precision}",
                f"give precision={plan.precision} (--precision {plan.precision}), or plan again",
            )
        check_devices(plan, cluster, may_be_idle=True)
    return dataclasses.replace(of_plan, no_evaluation=graph.no_evaluation), chosen


def write_plan(
    graph: Graph, cluster: Cluster, options: SearchOptions, *, microbatch: int | None = None, sequence: bool = False
) -> Plan:
    """Return the plan that the pins of ``options`` describe, without a search or prices (``autopar.search.filled_plan``).

    Raises:
        UsageError: pins of named layers, or pins that are invalid for the devices or the model.
        BatchError: the batch isn't divisible.
    """
    if options.pin:
        raise UsageError(
            f"{next(iter(options.pin))} pins some layers, and a plan without a search has the same pins for every layer",
            "leave the layers out of the key, or let `autopar plan` complete the plan",
        )
    if (options.ring or 1) > 1 and not _has_attention(graph):
        raise UsageError(
            f"ring={options.ring}: {graph.name} has no attention for ring attention",
            "leave ring out",
        )
    compiled = cluster.kind != "cpu"
    return filled_plan(
        graph,
        cluster.count,
        options.pins,
        microbatch=microbatch,
        sequence=sequence,
        allow=options.allow,
        compiled=compiled,
    )


def capture_model(workload: Workload, progress: Progress | None = None) -> Graph:
    """Run stage ``capture``: return the graph of layers."""
    return _captured(workload, progress)[-1]


def _captured(workload: Workload, progress: Progress | None) -> tuple[Workload, Graph, Graph]:
    """Report the capture, and return ``workload.with_all_blocks()``."""
    report(progress, "capture")
    captured = workload.with_all_blocks()
    graph = captured[-1]
    report(progress, "capture", f"{len(graph.layers)} layers of {len(graph.classes)} classes")
    return captured


def compared_graph(
    workload: Workload, compare: bool = True, progress: Progress | None = None, *, for_program: bool = True
) -> Graph:
    """Run stage ``capture``; compare the graph with the model on rank 0 (unless ``compare`` is false), and note the result. Without
    ``for_program``, a model that can't run here is not captured in evaluation mode."""
    workload, built, graph = _captured(workload, progress)
    model, batch, loss_fn = workload.model, workload.batch, workload.loss_fn

    def check() -> dict[str, str]:
        if not compare:
            return without_check(built, model, loss_fn)._asdict()
        report(progress, "capture", "comparing the graph with the model")
        options = {"local_batch_norm": workload.local_batch_norm, "for_program": for_program}
        return check_capture(built, model, batch, loss_fn, **options)._asdict()

    checked = ranks.answer_of_rank_0(check)
    note = checked["note"]
    if workload.few_blocks is not None:
        note += (
            f"; {len(built.layers)} of its {len(graph.layers)} layers were captured, and the others repeat one of them"
        )
    return dataclasses.replace(graph, notes=(*graph.notes, note), no_evaluation=checked["no_evaluation"])


def search_model(
    graph: Graph, cluster: Cluster, options: SearchOptions, recapture: Recapture, progress: Progress | None = None
) -> Plan:
    """Run stage ``search`` over all allowed numerical deviations.

    Raises ``InfeasibleError`` with changes that would make the request feasible.
    """

    def find(numerics: Numerics, shared: SearchOptions) -> Plan:
        again = with_numerics(graph, recapture, numerics)
        return find_plan(again, cluster, shared, progress=progress, may_be_idle=True)

    unused = {} if name_of(graph.dtype) != "bfloat16" else _formats_without_gain(cluster, options)
    options = dataclasses.replace(options, allow=[name for name in options.allow if name not in unused])
    try:
        best = best_plan(
            allowed_numerics(graph, options), options, find, lambda text: report(progress, "capture", text)
        )
        return dataclasses.replace(best, notes=(*best.notes, *unused.values()))
    except InfeasibleError as error:
        study = Study(graph, cluster, options, recapture=recapture, seq=sequence_length(graph))
        raise suggest(study, error, lambda text: report(progress, "search", text)) from None


def _formats_without_gain(cluster: Cluster, options: SearchOptions) -> dict[str, str]:
    """Return a note for each allowed format of matmuls in which no device is faster than in bfloat16: rounding would only take time."""
    gpus = [part.gpu for part in cluster.parts or (cluster,)]
    kinds = " and ".join(dict.fromkeys(gpu.name for gpu in gpus))
    return {
        name: f"{name} is allowed, but not used: on {kinds}, matmuls in it are not faster than in bfloat16"
        for name, recipe in FP8_RECIPES.items()
        if name in options.allow and not any(gpu.measured or gpu.is_faster_in(recipe.precision) for gpu in gpus)
    }


@contextlib.contextmanager
def _collection_paused() -> Iterator[None]:
    """Pause the collection of reference cycles. A search creates millions of objects and hardly any cycle, and each full collection visits
    all of them: on a mixture for 256 devices these took a sixth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_collection_paused()
def find_plan(
    graph: Graph,
    cluster: Cluster,
    options: SearchOptions,
    *,
    pricer: PriceSource | None = None,
    progress: Progress | None = None,
    may_be_idle: bool = False,
) -> Plan:
    """Run stage ``search`` for one graph. ``pricer`` may have cached prices. If devices ``may_be_idle``, the result is a plan on fewer
    devices if that is faster or no other plan fits; a note then says so."""
    start_s = time.perf_counter()
    report(progress, "search")
    options = dataclasses.replace(
        options,
        precision=name_of(graph.dtype),
        progress=lambda text: report(progress, "search", text),
        sequences=_sequences(graph, cluster),
        sequences_last=graph.batch_size >= cluster.count,  # data parallelism can use all devices
    )
    pricer = pricer or LayerPricer(graph, cluster, options.precision)
    shared = Shared()
    found, cluster = _search_device_subsets(graph, cluster, options, pricer, shared, may_be_idle)
    if options.pin_time_s is not None:
        found = price_pins(graph, cluster, pricer.on(cluster), options, found, options.pin_time_s, shared)
    without_rule = f"replicated, because no sharding rule covers it: {', '.join(graph.replicated)}"
    notes = (*found.notes, *cluster.notes, *graph.notes, *([without_rule] if graph.replicated else []))
    notes += (
        *_cost_of_uneven_loads(graph, cluster, found),
        *_eager_layers(graph, found),
        *unsplit_layers(found, pricer.on(cluster)),
        *odd_experts(found, pricer.on(cluster)),
    )
    wall_time_s = time.perf_counter() - start_s
    return dataclasses.replace(found, wall_time_s=wall_time_s, planning_memory_bytes=peak_memory_bytes(), notes=notes)


def _cost_of_uneven_loads(graph: Graph, cluster: Cluster, plan: Plan) -> tuple[str, ...]:
    """Return a note on what uneven loads of experts cost, or would cost, if the plan distributes experts."""
    if all(layer.strategy.degree(plan.mesh, *DEGREES["expert"]) == 1 for layer in plan.layers):
        return ()
    assumed = EVEN if any(cls.loads for cls in graph.classes.values()) else UNEVEN
    other = assumed.on(graph)
    again = reprice(other, cluster, LayerPricer(other, cluster, plan.precision), plan, plan.precision)
    even, uneven = (again, plan) if assumed is EVEN else (plan, again)
    slower = uneven.prediction.step_time_s / even.prediction.step_time_s - 1
    more = max(b.memory.total - a.memory.total for a, b in zip(even.stages, uneven.stages, strict=True))
    if not slower and not more:
        return ()  # padded experts make loads as uneven
    over = any(stage.memory.total > stage.memory_limit_bytes for stage in again.stages)
    effect = f"{slower:.1%} to the step and {gigabytes(more)} to the memory of a device{', which is too much' if over else ''}"
    if assumed is EVEN:
        return (f"the uneven loads of experts add {effect}",)
    return (
        f"if the busiest device's experts got {UNEVEN.assumed:g} times the mean number of tokens, that would add {effect}; "
        "--expert-loads prices measured loads",
    )


def _sequences(graph: Graph, cluster: Cluster) -> tuple[SequencePin, ...]:
    """Return the sequence parallelism to try in all layers: none without attention, and none for long sequences, for which the search
    decides per layer. A degree spans at most ``MOST_NODES`` nodes."""
    length = graph.tokens // graph.batch_size
    if length >= LONG_SEQUENCE or not _has_attention(graph):
        return ()
    degrees = [n for n in divisors(cluster.count)[1:] if length % n == 0 and n <= MOST_NODES * cluster.gpus_per_node]
    return tuple((role.value, n) for n in degrees for role in SEQUENCE_ROLES)


def _has_attention(graph: Graph) -> bool:
    nodes = (node for cls in graph.classes.values() for node in cls.graph.graph.nodes)
    return any(is_attention(node) for node in nodes if node.op == "call_function")


def _eager_layers(graph: Graph, plan: Plan) -> tuple[str, ...]:
    """Return a note on layers that can't be compiled in a plan that compiles layers."""
    wanted = [layer for layer in plan.layers if layer.strategy.options.compiled]
    reasons = {name: stays_eager(cls) for name, cls in graph.classes.items()}
    eager = [layer for layer in wanted if reasons[layer.cls]]
    if not eager:
        return ()
    return (f"{len(eager)} of {len(wanted)} layers are not compiled: {eager[0].name} {reasons[eager[0].cls]}",)


def _search_device_subsets(
    graph: Graph, cluster: Cluster, options: SearchOptions, pricer: PriceSource, shared: Shared, may_be_idle: bool
) -> tuple[Plan, Cluster]:
    """Return the fastest plan on the cluster or on a part of it, and the devices that it uses. Its bound holds for all of these."""
    deadline = time.thread_time() + options.time_limit_s
    full_plan: Plan | None = None
    refused: InfeasibleError | None = None
    try:
        full_plan = search(graph, cluster, pricer, options, shared)
    except InfeasibleError as error:
        refused = error
    best, devices = full_plan, cluster
    bounds = [] if full_plan is None else [full_plan.bound_s]
    late: list[str] = []
    for fewer in cluster.smaller_clusters() if may_be_idle else ():
        left_s = deadline - time.thread_time()
        if best is None:  # find any plan, even beyond the time limit
            left_s = max(left_s, options.time_limit_s / 4)
        elif left_s <= 0:
            late.append(f"time ran out before plans on {fewer.count} of the {cluster.count} devices were searched")
            continue
        left = dataclasses.replace(options, time_limit_s=left_s)
        known_s = float("inf") if best is None else best.fastest_s
        trial = search_again(graph, fewer, pricer.on(fewer), left, known_s)  # ``None``: the pins don't divide them
        if trial is None:
            continue
        bounds.append(trial.bound_s)
        if trial.plan is not None and trial.step_s < known_s:
            best, devices = trial.plan, fewer
    if best is None:
        assert refused is not None
        raise refused
    bound_s, step_s = min(bounds), best.prediction.step_time_s
    gap = max(0.0, 1 - bound_s / step_s) if step_s > 0 else 0.0
    best = dataclasses.replace(best, bound_s=bound_s, gap=gap, notes=(*best.notes, *late))
    if devices is cluster:
        return best, cluster
    because = (
        f"with all of them it takes {full_plan.fastest_s:.4g} s"
        if full_plan is not None
        else f"with all of them: {refused.message if refused else 'no plan'}"
    )
    note = f"{cluster.count - devices.count} of the {cluster.count} devices are idle: {because}"
    return dataclasses.replace(best, notes=(*best.notes, note)), devices
