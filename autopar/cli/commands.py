"""The steps from a command line to a plan, which commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from autopar.cli.console import Messages
from autopar.cli.load import SizeOptions, batch_of, is_pretrained, load_model
from autopar.cli.options import TIME_LIMIT_S, WITHIN, PlanRequest
from autopar.cli.recorded import recorded_options
from autopar.devices import Cluster, parse
from autopar.errors import BatchError, InfeasibleError
from autopar.expert_loads import expert_loads
from autopar.graph import Graph
from autopar.pins import read_pins
from autopar.plan import Plan
from autopar.plan_schema import MAX_SEARCH_S
from autopar.planning import capture_model, plan_model
from autopar.progress import Progress
from autopar.run.initialise import with_buffer_values
from autopar.search import SearchOptions
from autopar.search.numerics import Numerics
from autopar.trainers.reading import trainer_named
from autopar.units import parse_size
from autopar.workload import Recapture, Workload, with_numerics

VALUES_LIMIT_BYTES = 4 * 10**9
"""Zoo and configuration models of up to this size are emitted with random initial values."""


def print_infeasible(error: InfeasibleError) -> NoReturn:
    """Print an infeasible request's error as one JSON object, and exit with its status."""
    changes = [change.to_json() for change in error.changes]
    print(json.dumps({"feasible": False, "error": error.message, "hint": error.hint, "changes": changes}, indent=1))
    sys.exit(error.exit_status)


def make_plan(
    request: PlanRequest, device: str | None = "meta", price_pins: bool = False, few_blocks: bool = False
) -> tuple[Workload, Cluster, Graph, Plan]:
    """Load the model, capture it, and search for the plan or read it from ``--plan``.

    The model is built on ``device``, with ``few_blocks`` if nothing but its graph is needed (see ``load``). If ``device`` is ``None``, the
    model is on the CPU if it has values or is small enough for random values, otherwise on meta.
    """
    cluster, options = cluster_and_options(request)
    if price_pins:
        options = replace(options, pin_time_s=options.time_limit_s / 2)
    with Messages() as messages:
        workload = load(request, cluster, messages, device or "meta", few_blocks)
        if device is None and _can_get_random_values(workload):
            workload = load(request, cluster, messages, "cpu")
        graph, plan = plan_model(
            workload,
            cluster,
            options,
            plan=request.plan_file,
            capture_check=request.capture_check,
            recapture=recapture(request, cluster),
            progress=messages,
            for_program=not few_blocks,
        )
        if request.trainer and request.plan_file:
            title = trainer_named(request.trainer).title
            messages.say(
                f"the plan was made for {title}: this is autopar's own program with the same degrees, and its time and memory differ from "
                f"those of {title}"
            )
    return workload, cluster, graph, replace(plan, request=plan.request or recorded_options(request))


def _can_get_random_values(workload: Workload) -> bool:
    """Return whether the model is on meta and small enough for random initial values."""
    tensors = list(workload.model.state_dict().values())
    on_meta = any(tensor.is_meta for tensor in tensors)
    return on_meta and sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= VALUES_LIMIT_BYTES


def cluster_and_options(request: PlanRequest) -> tuple[Cluster, SearchOptions]:
    """Return the cluster and the search options of a request. A search for another trainer has no time limit by default."""
    limit = parse_size(request.memory_limit) if request.memory_limit else None
    cluster = parse(request.devices, memory_limit_bytes=limit, calibration=request.calibration)
    default_s = MAX_SEARCH_S if request.trainer else TIME_LIMIT_S
    return cluster, SearchOptions(
        time_limit_s=default_s if request.time_limit is None else request.time_limit,
        within=WITHIN if request.within is None else request.within,
        allow=allowed(request.allow),
        pin=read_pins(request.pins),
    )


def allowed(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of ``--allow`` as they are spelled in ``autopar.plan.ALLOWED``."""
    return tuple(name.replace("-", "_") for name in names)


def load(
    request: PlanRequest,
    cluster: Cluster,
    messages: Progress | None = None,
    device: str = "meta",
    few_blocks: bool = False,
) -> Workload:
    """Load the model of a request, with its batch. A workload with ``few_blocks`` can only be captured."""
    if messages is not None:
        messages("load", request.model)
    sizes = SizeOptions(request.seq, request.global_batch, request.precision)
    init = init_of(request)
    workload = load_model(
        request.model,
        sizes,
        device=device,
        default_precision=default_precision(cluster),
        few_blocks=few_blocks and init is None,
    )
    few = workload.few_blocks
    return replace(
        workload,
        model=with_buffer_values(workload.model, init),
        precision=request.precision,
        local_batch_norm=request.local_batch_norm,
        expert_loads=expert_loads(request.expert_loads),
        few_blocks=few and replace(few, full=lambda: load(request, cluster, messages, device)),
    )


def default_precision(cluster: Cluster) -> str:
    """Return the precision in which zoo and configuration models are built unless ``--precision`` says otherwise."""
    return "float32" if cluster.kind == "cpu" else "bfloat16"


def init_of(request: PlanRequest) -> str | None:
    """Return the source of the initial values: ``--init``, or MODEL if it is a folder saved by transformers, else ``None``."""
    return request.init or (request.model if is_pretrained(request.model) else None)


def batch_with_values(request: PlanRequest, workload: Workload) -> Any:
    """Return the workload's batch; if it is on meta, because ``init_of`` provides the model's values, make the same one on the CPU."""
    if not init_of(request) or ":" in request.model:
        return workload.batch
    sizes = SizeOptions(request.seq, request.global_batch, request.precision)
    return batch_of(request.model, workload.model, sizes, "cpu")


def recapture(request: PlanRequest, cluster: Cluster) -> Recapture:
    """Return a function that captures the model again with other sizes. A factory's fixed batch is sliced or repeated."""

    def capture_sized(**sizes: Any) -> Graph:
        try:
            sized = replace(request, **{k: v for k, v in sizes.items() if v is not None})
            workload = load(sized, cluster, few_blocks=True)
        except BatchError as refused:
            try:
                return load(request, cluster).resized(**sizes)  # a factory that has no parameter for the size
            except BatchError:
                raise refused from None
        return workload.capture()

    return capture_sized


def capture_request(
    request: PlanRequest, cluster: Cluster, written: Plan | None, messages: Progress | None
) -> tuple[Graph, Recapture]:
    """Return the graph of a request, and a function that captures it again with other sizes. Both deviate from exact training in the same
    way as the plan ``written``; how other trainers deviate is a part of their cost models."""
    numerics = Numerics() if written is None or request.trainer else Numerics.of(written)
    exact = recapture(request, cluster)

    def again(**sizes: Any) -> Graph:
        return with_numerics(exact(**sizes), lambda **rows: exact(**sizes | rows), numerics)

    try:
        if numerics != Numerics():
            return again(), again
        return capture_model(load(request, cluster, messages, few_blocks=True), messages), again
    except BatchError:
        if written is None or written.request or request.global_batch is None:
            raise
        with_factory_batch = replace(request, global_batch=None)
        return capture_request(with_factory_batch, cluster, written, messages)
