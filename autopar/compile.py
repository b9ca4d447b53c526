"""The whole way, as one short function of named stages.

======== =============================== ==================================================================
capture  model, batch -> graph           ``torch.export``, cleaned, cut into layers and layer classes
search   graph, cluster -> plan          prices of every strategy, OR-Tools, the bound and the gap
emit     graph, plan -> program folder   the passes, then one readable module per layer class
run      program folder -> ``Program``   what trains
======== =============================== ==================================================================

Each stage takes values and gives values back. The names are those that the command line, the logs and the progress show.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import os
import resource
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.capture import NOT_COMPARED, apart, capture, check_capture
from autopar.checks.collectives import check_collectives
from autopar.checks.types import check_program
from autopar.devices import Cluster, parse
from autopar.emit import emit
from autopar.errors import AutoparError, CaptureError, InfeasibleError, ModelError, UsageError
from autopar.explain import Study, sequence_length, suggest
from autopar.explain.resize import recapture_cut
from autopar.explain.study import Recapture
from autopar.graph import Graph
from autopar.plan import ALLOWED, MICROBATCH_STATISTICS, NARROW, Plan
from autopar.precision import name_of, normalise
from autopar.price import Pricer as LayerPricer
from autopar.run import Program
from autopar.search import Pricer, SearchOptions, price_pins, search
from autopar.shard import annotate

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


STAGES = ("capture", "search", "emit", "run")
Progress = Callable[[str, str], None]
"""Called with a stage's name and a short text, as the stage begins (empty text) and whenever there is news of it."""

_searches: list[torch.distributed.Store] = []  # of this process, under torchrun

log = logging.getLogger("autopar")


def compile(
    model: nn.Module,
    devices: Any,
    batch: Sequence[Any] | Mapping[str, Any] | Tensor,
    loss_fn: Callable[..., Tensor] | None = None,
    *,
    precision: str | None = None,
    plan: Plan | str | Path | None = None,
    pipeline: int | None = None,
    data: int | None = None,
    tensor: int | None = None,
    expert: int | None = None,
    ulysses: int | None = None,
    ring: int | None = None,
    zero: int | None = None,
    recompute: bool | str | None = None,
    offload: str | None = None,
    segment: int | None = None,
    microbatches: int | None = None,
    schedule: str | None = None,
    chunks: int | None = None,
    pin: Mapping[str, int | str | bool] | None = None,
    local_batch_norm: bool = False,
    allow: Collection[str] = (),
    memory_limit_bytes: int | None = None,
    calibration: str | Path | None = None,
    time_limit_s: float = 20.0,
    folder: str | Path | None = None,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | str | None = None,
    lr: float = 3e-4,
    max_norm: float | None = None,
    seed: int = 0,
    port: int = 0,
    capture_check: bool = True,
    type_check: bool = True,
    draw_init: bool = False,
    progress: Progress | None = None,
) -> Program:
    """Plan, rewrite and emit ``model`` for ``devices``, and load the result.

    Args:
        model: a module on the CPU or on meta that returns the loss, an object with ``.loss``, or what ``loss_fn`` takes.
        devices, calibration: ``4``, ``"128x8xH100-80GB"``, a TOML file, a list of torch devices (see ``autopar.devices.parse``).
        batch: an example of one global batch: a tuple for positional, a mapping for keyword arguments; dim 0 is the batch.
        loss_fn: ``loss_fn(output, targets)`` makes the loss, a 0-d tensor; ``batch`` is then the pair ``(inputs, targets)``.
        precision, plan: by name (``"bfloat16"``), the model's own if left out; a plan to use, or the path of its file, instead of a search.
        pipeline, data, tensor, expert, ulysses, ring, zero, recompute, segment, offload, microbatches, schedule, chunks: pinned if given.
        pin: the same by key, and pins of some layers, ``{"layers.0-7.tensor": 8, "lm_head.zero": 3}`` (see ``autopar.search.options``).
        local_batch_norm, allow: batch norm of each rank's part of a microbatch; what of exactness is given up (``autopar.plan.ALLOWED``).
        memory_limit_bytes, time_limit_s: what may be filled of one device's memory, and how long to search, in seconds.
        folder: where the program goes; without one, a temporary folder that lives as long as the ``Program``.
        optimizer, lr, max_norm, seed, port, type_check, draw_init: as for ``Program``; ``progress`` is told of each stage.
    The captured graph is compared with the model first (``autopar.capture.check``), unless ``capture_check`` is false: the plan says so.
    A model on the CPU keeps its values, which the folder holds too. Under ``torchrun`` every process calls this and rank 0 searches.

    Raises:
        UsageError: devices, a batch or pins that make no sense; exit status 2 on the command line.
        CaptureError, InfeasibleError: the model cannot be exported; no plan fits.
    """

    cluster = parse(devices, memory_limit_bytes=memory_limit_bytes, calibration=calibration)
    options = SearchOptions(time_limit_s=time_limit_s, pin=pin or {}, pipeline=pipeline, microbatches=microbatches, schedule=schedule,
                            chunks=chunks, data=data, tensor=tensor, expert=expert, ulysses=ulysses, ring=ring, zero=zero,
                            recompute=recompute, segment=segment, offload=offload)  # fmt: skip
    graph, chosen = plan_model(model, batch, loss_fn, cluster, options, precision=precision, plan=plan, progress=progress,
                               local_batch_norm=local_batch_norm, allow=allow, capture_check=capture_check)  # fmt: skip
    running = {"optimizer": optimizer, "lr": lr, "max_norm": max_norm, "seed": seed, "port": port, "draw_init": draw_init}  # fmt: skip
    return start_program(graph, chosen, cluster, folder, model, progress, type_check, **running)


def plan_model(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[..., Tensor] | None,
    cluster: Cluster,
    options: SearchOptions,
    *,
    name: str | None = None,
    precision: str | None = None,
    plan: Plan | str | Path | None = None,
    progress: Progress | None = None,
    local_batch_norm: bool = False,
    allow: Collection[str] = (),
    capture_check: bool = True,
    pin_time_s: float | None = None,
    recapture: Recapture | None = None,
) -> tuple[Graph, Plan]:
    """The first two stages: the captured graph, and the plan that was found (or given, and fits the graph).

    With ``pin_time_s`` the plan has the prices of the pins in ``options``, found in about so many seconds more.

    The plan's ``wall_time_s`` and ``peak_memory_bytes`` are those of this process from the call on. ``recapture`` makes the graph with
    other sizes, for what an infeasible request is told; without it the batch is cut down. With ``allow`` the graph may be of one
    microbatch.
    """

    start = time.perf_counter()
    check_allowed(allow)
    numbers = None if precision is None else normalise(precision)
    how = {"name": name, "precision": numbers, "local_batch_norm": local_batch_norm}
    graph = capture_model(model, batch, loss_fn, progress=progress, **how)  # type: ignore[arg-type]
    graph = _held(graph, model, batch, loss_fn, local_batch_norm, capture_check, progress)
    again = recapture or recapture_cut(model, batch, loss_fn, **how)  # type: ignore[arg-type]

    @functools.cache
    def in_parts(microbatches: int, narrow: tuple[str, ...] = ()) -> Graph:
        if narrow:
            return dataclasses.replace(in_parts(microbatches), narrow=narrow)
        return apart(graph, lambda rows: again(global_batch=rows), microbatches)

    def as_planned(plan: Plan) -> Graph:
        own = plan.microbatches if MICROBATCH_STATISTICS in plan.allow else 1
        return in_parts(own, tuple(name for name in NARROW if name in plan.allow))

    if plan is not None:
        plan = plan if isinstance(plan, Plan) else read_plan(plan)
        return as_planned(plan), _given_plan(plan, as_planned(plan), cluster)

    def find() -> Plan:
        try:
            ways = list(itertools.product(_narrow(graph, allow), _own_batches(graph, options, allow)))
            if len(ways) > 1:
                return _best_of(ways, in_parts, cluster, options, progress, start)
            only = in_parts(ways[0][1], ways[0][0])
            return find_plan(only, cluster, options, pin_time_s=pin_time_s, progress=progress, start=start)
        except InfeasibleError as error:
            study = Study(graph, cluster, options, recapture=again, seq=sequence_length(graph))
            raise suggest(study, error, lambda text: _say(progress, "search", text)) from None

    chosen = _on_rank_0(find)
    return as_planned(chosen), chosen


def _held(
    graph: Graph,
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[..., Tensor] | None,
    local_batch_norm: bool,
    wanted: bool,
    progress: Progress | None,
) -> Graph:
    """The graph, compared with the model on rank 0, with a note of what came out."""

    if os.environ.get("RANK", "0") != "0":
        return graph
    if wanted:
        _say(progress, "capture", "comparing the graph with the model")
        said = check_capture(graph, model, batch, loss_fn, local_batch_norm=local_batch_norm)
    else:
        said = f"{NOT_COMPARED}: it was asked not to be (--no-capture-check, capture_check=False)"
    return dataclasses.replace(graph, notes=(*graph.notes, said))


def check_allowed(allow: Collection[str]) -> None:
    """Raise ``UsageError`` where ``allow`` names what there is not."""
    unknown = sorted(set(allow) - set(ALLOWED))
    if unknown or isinstance(allow, str):
        raise UsageError(f"allow={allow!r} is not known", f"it is a set of: {', '.join(ALLOWED)}")


def _own_batches(graph: Graph, options: SearchOptions, allow: Collection[str]) -> list[int]:
    """The numbers of microbatches that are to be tried as batches of their own; one alone where that is nothing but the whole batch."""
    if MICROBATCH_STATISTICS not in allow or not graph.unmicrobatchable:
        return [1]
    if options.microbatches is not None:
        return [options.microbatches]
    return [m for m in range(1, graph.batch_size + 1) if graph.batch_size % m == 0]


def _narrow(graph: Graph, allow: Collection[str]) -> list[tuple[str, ...]]:
    """What of the precision may be given up, in every combination, the least first; parameters of more than 16 bits give up nothing."""
    names = [name for name in NARROW if name in allow and graph.dtype.itemsize == 2]
    return [some for count in range(len(names) + 1) for some in itertools.combinations(names, count)]


def _best_of(
    ways: Sequence[tuple[tuple[str, ...], int]],
    in_parts: Callable[[int, tuple[str, ...]], Graph],
    cluster: Cluster,
    options: SearchOptions,
    progress: Progress | None,
    start: float,
) -> Plan:
    """The fastest of the plans for each way to give up exactness: what of the precision, and the number of microbatches.

    More of the precision is given up only for more than the gap at which a search stops. The bound is the least of theirs. Pins are not
    priced.
    """
    plans: list[Plan] = []
    options = dataclasses.replace(options, time_limit_s=options.time_limit_s / len(ways))
    why: InfeasibleError | None = None
    for narrow, m in ways:
        try:
            graph = in_parts(m, narrow)
        except CaptureError as error:  # a batch norm cannot have one row
            _say(progress, "capture", f"not as {m} microbatches: {error.message}")
            continue
        try:
            plans.append(find_plan(graph, cluster, options, progress=progress, start=start))
        except InfeasibleError as error:
            why = error  # of the smallest microbatches in the end, which need least
    if not plans:
        assert why is not None
        raise why
    best = plans[0]
    for plan in plans[1:]:
        more = sum(name in plan.allow for name in NARROW) > sum(name in best.allow for name in NARROW)
        if plan.prediction.step_time_s < best.prediction.step_time_s * (1 - options.target_gap * more):
            best = plan
    bound_s = min(plan.bound_s for plan in plans)
    return dataclasses.replace(best, bound_s=bound_s, gap=max(0.0, 1 - bound_s / best.prediction.step_time_s))


def capture_model(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[..., Tensor] | None,
    *,
    name: str | None = None,
    precision: str | None = None,
    local_batch_norm: bool = False,
    progress: Progress | None = None,
) -> Graph:
    """The first stage: the graph of layers, with its fused parameters and rules noted."""
    from torch import nn

    if not isinstance(model, nn.Module):
        raise ModelError(f"the model is {type(model).__name__}, not a torch.nn.Module", "wrap a function in a module")
    _say(progress, "capture", "")
    numbers = None if precision is None else normalise(precision)
    graph = capture(model, batch, loss_fn, precision=numbers, name=name, local_batch_norm=local_batch_norm)
    graph = annotate(graph)
    _say(progress, "capture", f"{len(graph.layers)} layers of {len(graph.classes)} classes")
    return graph


def find_plan(
    graph: Graph,
    cluster: Cluster,
    options: SearchOptions,
    *,
    pricer: Pricer | None = None,
    pin_time_s: float | None = None,
    progress: Progress | None = None,
    start: float | None = None,
) -> Plan:
    """The second stage. ``start`` is when the request came in (``time.perf_counter``), ``pricer`` one that has prices already."""

    start = time.perf_counter() if start is None else start
    _say(progress, "search", "")
    options = dataclasses.replace(
        options, precision=name_of(graph.dtype), progress=lambda text: _say(progress, "search", text)
    )
    pricer = pricer or LayerPricer(graph, cluster, options.precision)
    found = search(graph, cluster, pricer, options)
    if pin_time_s is not None:
        found = price_pins(graph, cluster, pricer, options, found, pin_time_s)
    without_rule = f"replicated, because no sharding rule covers it: {', '.join(graph.replicated)}"
    notes = (*found.notes, *cluster.notes, *graph.notes, *([without_rule] if graph.replicated else []))
    wall_time_s = time.perf_counter() - start
    return dataclasses.replace(found, wall_time_s=wall_time_s, peak_memory_bytes=peak_memory_bytes(), notes=notes)


NOT_TYPED = "the program was not type-checked, as was asked for"


def emit_program(
    graph: Graph,
    plan: Plan,
    folder: str | Path | None,
    progress: Progress | None = None,
    *,
    type_check: bool = True,
    state: Mapping[str, Tensor] | None = None,
) -> Path:
    """The third stage: writes the program into ``folder`` (a new temporary one if ``None``), checks it, and gives back its path.

    ``state`` is the model's state dict, from whose values the folder starts.
    """

    _say(progress, "emit", "")
    home = Path(tempfile.mkdtemp(prefix="autopar-program-")) if folder is None else Path(folder)
    if not type_check:
        plan = dataclasses.replace(plan, notes=(*plan.notes, NOT_TYPED))
    try:
        check_collectives(emit(graph, plan, home, state=state))
    except OSError as error:
        raise UsageError(
            f"the program cannot be written to {home}: {error.strerror}",
            "give a folder that can be made and written to",
        ) from error
    if (
        type_check and os.environ.get("LOCAL_RANK", "0") == "0"
    ):  # one process of a machine speaks for all: they have the same text
        began = time.perf_counter()
        stages = check_program(home, lambda text: _say(progress, "emit", text))
        _say(progress, "emit", f"{stages} stages are well-typed ({time.perf_counter() - began:.1f} s)")
    return home


def start_program(
    graph: Graph,
    plan: Plan,
    cluster: Cluster,
    folder: str | Path | None,
    model: nn.Module,
    progress: Progress | None = None,
    type_check: bool = True,
    **running: Any,
) -> Program:
    """The last two stages: the emitted program, loaded, with the values of ``model``'s parameters where it has any.

    ``running`` is passed on to ``Program``.
    """

    if os.environ.get("LOCAL_RANK", "0") != "0":
        folder = None  # one process of a machine writes the folder, the others have the same text in one of their own
    state = model.state_dict()
    # a temporary folder is read by processes that get the values from this one
    home = emit_program(graph, plan, folder, progress, type_check=type_check, state=None if folder is None else state)
    _say(progress, "run", "")
    # it was checked when it was emitted
    program = Program(plan, home, graph, cluster=cluster, state=state, type_check=False, **running)
    if folder is None:
        weakref.finalize(program, shutil.rmtree, home, ignore_errors=True)
    return program


def peak_memory_bytes() -> int:
    """The most memory that this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere: getrusage(2)


def _on_rank_0(find: Callable[[], Plan]) -> Plan:
    """``find()``, once: under ``torchrun`` rank 0 finds the plan and the others get it from it.

    Two searches under a time limit need not agree, and ranks with different plans would wait for each other for ever.
    """
    rank, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return find()
    import torch.distributed as dist

    store, _, _ = next(dist.rendezvous("env://", rank, count))
    _searches.append(store)  # the process that serves the store must keep it until all have read
    key = f"autopar/plan/{len(_searches)}"
    if rank == 0:
        try:
            store.set(key, json.dumps({"plan": find().to_json()}))
        except AutoparError as error:
            store.set(key, json.dumps({"error": error.message, "hint": error.hint}))
            raise
    answer = json.loads(store.get(key))
    if "error" in answer:
        raise AutoparError(f"rank 0 found no plan: {answer['error']}", answer["hint"])
    return Plan.from_json(answer["plan"])


def _given_plan(plan: Plan, graph: Graph, cluster: Cluster) -> Plan:
    fit_plan(plan, graph)
    fit_devices(plan, cluster, some_idle=True)
    return plan


def fit_plan(plan: Plan, graph: Graph) -> None:
    """Raise ``UsageError`` where the plan is for another model or another batch."""
    mine, theirs = [layer.name for layer in graph.layers], [layer.name for layer in plan.layers]
    if mine != theirs:
        raise UsageError(
            f"the plan is for a model of {len(theirs)} layers ({theirs[0]} to {theirs[-1]}), "
            f"this one has {len(mine)} ({mine[0]} to {mine[-1]})",
            "a plan fits the model, the batch and the version of autopar that it was made for: make it anew",
        )
    if plan.global_batch != graph.batch_size:
        raise UsageError(
            f"the plan is for a global batch of {plan.global_batch}, this one has {graph.batch_size}",
            f"give a batch of {plan.global_batch} rows (--global-batch {plan.global_batch}), or make the plan anew",
        )


def fit_devices(plan: Plan, cluster: Cluster, some_idle: bool = False) -> None:
    """Raise ``UsageError`` where the plan is for more devices, or without ``some_idle`` for fewer."""
    if plan.device_count > cluster.count or (plan.device_count < cluster.count and not some_idle):
        raise UsageError(
            f"the plan is for {plan.device_count} devices, {cluster.name} has {cluster.count}",
            f"give {plan.device_count} devices, or make a plan for these",
        )


def read_plan(path: str | Path) -> Plan:
    """The plan in a file that ``Plan.dumps`` or ``autopar plan --json`` wrote.

    Raises:
        UsageError: no such file, or one that holds no plan.
    """
    try:
        data = json.loads(Path(path).read_text())
        return Plan.from_json(data)
    except OSError as error:
        raise UsageError(
            f"the plan {path} cannot be read: {error.strerror}", "`autopar plan MODEL --devices ... --json` writes one"
        ) from error
    except (ValueError, KeyError, TypeError, IndexError, AssertionError, AttributeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise UsageError(
            f"{path} holds no plan ({reason})",
            "`autopar plan MODEL --devices ... --json` writes one",
        ) from error


def _say(progress: Progress | None, stage: str, text: str) -> None:
    assert stage in STAGES, stage
    log.info("%s: %s", stage, text or "begins")
    if progress is not None:
        progress(stage, text)
