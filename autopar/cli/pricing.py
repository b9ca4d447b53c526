"""``autopar price`` and ``autopar compare``: the price of a plan that the user wrote down, by the same model of costs as a search.

A plan is given as degrees on the command line, as a ``plan.json``, or as flags of Megatron-LM or torchtitan (``FLAGS``).
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.cli.commands import allowed, check_pins, recapture
from autopar.cli.console import Messages, console, plain_table
from autopar.cli.load import Sizes, load_model
from autopar.cli.output import output_file
from autopar.cli.render import print_plan
from autopar.cli.timeline import print_timeline, timeline_data
from autopar.devices import Cluster, parse
from autopar.errors import BatchError, UsageError
from autopar.graph import Graph
from autopar.ops.cost import is_attention
from autopar.pins import OF_PLAN, OWNERS, PlanPins
from autopar.plan import (
    REPLICATING,
    LayerPlan,
    Plan,
)
from autopar.plan_files import check_devices, check_model, read_plan
from autopar.precision import name_of
from autopar.price import Pricer
from autopar.search import manual_plan, memory_timeline, reprice
from autopar.search.concessions import Concession
from autopar.search.options import check_replicas
from autopar.search.timeline import Moment
from autopar.techniques import LAYER
from autopar.units import seconds, size
from autopar.workload import with_concession

# A flag of another trainer: the name of our option that means the same. Flags without a value are true.
FLAGS = {
    "--tensor-model-parallel-size": "tensor",
    "--pipeline-model-parallel-size": "pipeline",
    "--context-parallel-size": "context",
    "--expert-model-parallel-size": "expert",
    "--micro-batch-size": "microbatch",
    "--global-batch-size": "global_batch",
    "--seq-length": "seq",
    "--sequence-parallel": "sequence",
    "--use-distributed-optimizer": "zero1",
    "--recompute-granularity": "recompute",
    "--recompute-method": "recompute_method",
    "--recompute-num-layers": "segment",
    "--num-virtual-stages-per-pipeline-rank": "chunks",
    "--bf16": "bfloat16",
    "--fp16": "float16",
    "--parallelism.tensor_parallel_degree": "tensor",
    "--parallelism.pipeline_parallel_degree": "pipeline",
    "--parallelism.context_parallel_degree": "context",
    "--parallelism.expert_parallel_degree": "expert",
    "--parallelism.data_parallel_shard_degree": "shard",
    "--parallelism.data_parallel_replicate_degree": "replicate",
    "--training.local_batch_size": "local_batch",
    "--training.global_batch_size": "global_batch",
    "--training.seq_len": "seq",
    "--activation_checkpoint.mode": "recompute",
}
_NOTHING = 1e-9  # seconds: a smaller bubble is rounding error
_WORDS = frozenset({"recompute", "recompute_method"})
_SWITCHES = frozenset({"sequence", "zero1", "bfloat16", "float16"})


def read_flags(words: Sequence[str]) -> dict[str, Any]:
    """Values by the names in ``FLAGS``, from another trainer's ``--flag value`` or ``--flag=value``.

    Raises:
        UsageError: a flag that is not in ``FLAGS``, or a flag without its value.
    """
    found: dict[str, Any] = {}
    queue = list(words)
    while queue:
        flag, given, value = queue.pop(0).partition("=")
        name = FLAGS.get(flag)
        if name is None:
            raise UsageError(f"{flag!r} is not a supported flag", f"these are: {', '.join(FLAGS)}")
        if name in _SWITCHES:
            found[name] = True
            continue
        if not given:
            if not queue:
                raise UsageError(f"{flag} has no value", f"write {flag} followed by its value")
            value = queue.pop(0)
        if name not in _WORDS and not value.isdigit():
            raise UsageError(f"{flag} = {value!r} is not a whole number", "degrees and sizes are whole numbers")
        found[name] = value if name in _WORDS else int(value)
    if found.get("recompute_method", "uniform") != "uniform":
        raise UsageError(
            f"--recompute-method {found['recompute_method']} is not supported", "write uniform, or a plan's JSON file"
        )
    return found


def price_command(
    as_json: bool, timeline: bool, plan_file: str | None, output: str | None, flags: Sequence[str], **request: Any
) -> None:
    """``autopar price``: prints the plan's prediction as ``autopar plan`` does, and with ``timeline`` the memory through a step. Ends with
    status 1 where the plan does not fit."""
    file = output_file(output, "-o") if output else None
    check_pins(request | {"plan_file": plan_file})
    plan, moments = price_request(request | translated(read_flags(flags)), plan_file, timeline)
    if file is not None:
        file.write_text(plan.dumps() + "\n")
    if as_json:
        print(json.dumps(plan.to_json() | ({"timeline": timeline_data(moments)} if timeline else {}), indent=1))
    else:
        out = console()
        print_plan(plan, out)
        if timeline:
            out.print()
            print_timeline(moments, out)
    if plan.too_full:
        raise SystemExit(1)


def translated(found: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``autopar price`` that another trainer's flags mean."""
    options = {
        key: value
        for key, value in found.items()
        if key in ("tensor", "pipeline", "context", "expert", "global_batch", "seq", "chunks")
    }
    for key in ("microbatch", "local_batch"):
        if key in found:
            options["microbatch"] = found[key]
    for name in ("bfloat16", "float16"):
        if found.get(name):
            options["precision"] = name
    if found.get("sequence"):
        options["sequence"] = True
    if found.get("zero1"):
        options["zero"] = 1
    if "shard" in found:  # torchtitan shards parameters, gradients and optimizer state over this degree
        options["zero"] = 3 if found["shard"] > 1 else 0
    if "recompute" in found:
        options["recompute"] = "none" if found["recompute"] == "off" else str(found["recompute"])
    if "segment" in found and options.get("recompute", "full") == "full":  # other recomputation has no use for it
        options["segment"] = found["segment"]
    return options


def price_request(
    request: Mapping[str, Any], plan_file: str | None, timeline: bool = False
) -> tuple[Plan, tuple[tuple[Moment, ...], ...]]:
    """The priced plan of a command line, and with ``timeline`` the memory of its devices at each action of a step."""
    cluster = parse(request["devices"], calibration=request.get("calibration"))
    given = read_plan(plan_file) if plan_file else None
    sizes = Sizes(
        request.get("seq"), given.global_batch if given else request.get("global_batch"), request.get("precision")
    )
    with Messages() as messages:
        messages("load", request["model"])
        default = "float32" if cluster.kind == "cpu" else "bfloat16"
        try:
            workload = load_model(request["model"], sizes, default_precision=default)
        except BatchError:
            if given is None:
                raise
            sizes = dataclasses.replace(sizes, global_batch=None)  # a factory that makes its own batch
            workload = load_model(request["model"], sizes, default_precision=default)
        messages("capture")
        graph = dataclasses.replace(workload, precision=sizes.precision).capture()
        again = recapture(dict(request) | dataclasses.asdict(sizes) | {"local_batch_norm": False}, cluster)
        graph = with_concession(graph, again, Concession() if given is None else Concession.of(given))
        messages("price")
        pricer = Pricer(graph, cluster, name_of(graph.dtype))
        plan = price_plan(graph, cluster, given or write_plan(graph, cluster, request), pricer)
        return plan, memory_timeline(graph, cluster, pricer, plan) if timeline else ()


def write_plan(graph: Graph, cluster: Cluster, request: Mapping[str, Any]) -> Plan:
    """The manual plan with the request's degrees in every layer, and data parallelism on the remaining devices.

    Raises:
        UsageError: degrees that the devices do not divide into.
        BatchError: a batch that does not divide.
    """
    tensor, pipeline = request.get("tensor") or 1, request.get("pipeline") or 1
    context, expert = request.get("context") or 1, request.get("expert") or 1
    rest, odd = divmod(cluster.count, tensor * pipeline * context)
    if odd or rest % expert or not rest:
        raise UsageError(
            f"{cluster.count} devices do not divide into tensor {tensor} x pipeline {pipeline} x context {context} x expert {expert}",
            "the product of the degrees must divide the number of devices",
        )
    if expert > 1 and not any(cls.experts for cls in graph.classes.values()):
        raise UsageError(f"expert {expert}: {graph.name} has no mixture of experts", "leave out --expert")
    called = [node for cls in graph.classes.values() for node in cls.graph.graph.nodes if node.op == "call_function"]
    if context > 1 and not any(is_attention(node) for node in called):
        raise UsageError(
            f"context {context}: {graph.name} has no attention, whose keys and values a ring passes on",
            "leave out --context",
        )
    microbatches = request.get("microbatches") or 1
    if size := request.get("microbatch"):
        microbatches, odd = divmod(graph.batch_size, rest * size)
        if odd or not microbatches:
            raise UsageError(
                f"a global batch of {graph.batch_size} does not divide into microbatches of {size} on {rest} data-parallel devices",
                f"--microbatch times {rest} must divide it; without --microbatch there is one microbatch",
            )
    names = (*OF_PLAN, "zero")
    whole: PlanPins = PlanPins(**{name: request.get(name) for name in names if name in request})
    whole.check("every layer", whole)
    check_replicas(graph, whole, [rest // expert, rest])  # layers with experts, and without
    pins = {name: request.get(name) for name in (*OF_PLAN, "tensor", "expert", *OWNERS)}
    pins |= {"data": rest // expert, "ring": context, "microbatches": microbatches}
    how: dict[str, Any] = {"sequence": bool(request.get("sequence")), "compiled": cluster.kind != "cpu", **pins}
    plan = manual_plan(graph, allow=allowed(dict(request)), **how)

    def own(layer: LayerPlan) -> LayerPlan:
        """The layer without expert parallelism where it has no experts, and with ZeRO where its parameters have copies."""
        strategy = layer.strategy if graph.classes[layer.cls].experts else layer.strategy.dense
        zero = (request.get("zero") or 0) if strategy.degree(plan.mesh, *REPLICATING) > 1 else 0
        return dataclasses.replace(layer, strategy=dataclasses.replace(strategy, zero=zero))

    return dataclasses.replace(plan, layers=tuple(map(own, plan.layers)))


def price_plan(graph: Graph, cluster: Cluster, plan: Plan, pricer: Pricer) -> Plan:
    """``plan`` with its prediction on ``cluster``."""
    check_model(plan, graph)
    check_devices(plan, cluster)
    priced = reprice(graph, cluster, pricer, plan, pricer.numbers.name)
    return dataclasses.replace(priced, notes=(*priced.notes, *cluster.notes))


def compare_command(first: str, second: str, as_json: bool) -> None:
    """``autopar compare``: two plans (files of ``plan -o`` or ``price -o``) side by side."""
    rows = compared(read_plan(first), read_plan(second))
    if as_json:
        print(json.dumps([{"figure": a, "first": b, "second": c} for a, b, c, _ in rows], indent=1))
        return
    table = plain_table(None, ("",), (Path(first).name, Path(second).name, "second / first"))
    for figure, a, b, form in rows:
        numbers = isinstance(a, (int, float)) and isinstance(b, (int, float)) and a > _NOTHING
        table.add_row(figure, _form(a, form), _form(b, form), f"{b / a:.2f}" if numbers and form else "")
    console().print(table)


def compared(a: Plan, b: Plan) -> list[tuple[str, Any, Any, str]]:
    """(figure, value of ``a``, value of ``b``, unit) for every row of the comparison."""

    def degree(plan: Plan, name: str) -> int:
        return max(layer.strategy.degrees(plan.mesh)[name] for layer in plan.layers)

    def largest(plan: Plan, part: str) -> int:
        return max(getattr(stage.memory, part) for stage in plan.stages)

    found: list[tuple[str, Any, Any, str]] = [("model", a.model, b.model, ""), ("devices", a.devices, b.devices, "")]
    found += [(name, degree(a, name), degree(b, name), "") for name in ("data", "tensor", "expert", "sequence")]
    found += [
        (name, getattr(a, name), getattr(b, name), "")
        for name in ("pipeline", "chunks", "microbatches", "schedule", "sync", "global_batch")
    ]
    found.append(("ZeRO", *(max(layer.strategy.zero for layer in plan.layers) for plan in (a, b)), ""))  # type: ignore[arg-type]
    for technique in LAYER:
        values = [Counter(layer.strategy.options[technique] for layer in plan.layers) for plan in (a, b)]
        found.append((technique.name, _counted(values[0]), _counted(values[1]), ""))
    for name in ("step_time_s", "compute_s", "communication_s", "bubble_s", "optimizer_s"):
        found.append(
            (name.removesuffix("_s").replace("_", " "), getattr(a.prediction, name), getattr(b.prediction, name), "s")
        )
    found.append(("MFU", a.prediction.mfu, b.prediction.mfu, "%"))
    for part in ("total", "parameters", "gradients", "optimizer", "activations", "transients"):
        found.append((f"memory, {part}", largest(a, part), largest(b, part), "B"))
    for words, name in (("memory in the host", "host_bytes"), ("on NVMe", "nvme_bytes")):
        outside = [max(getattr(stage, name) for stage in plan.stages) for plan in (a, b)]
        found += [(words, outside[0], outside[1], "B")] if any(outside) else []
    return found


def _counted(values: Counter[str]) -> str:
    """``full 30, keep 4``: the number of layers with each value; the value alone if all have it."""
    return next(iter(values)) if len(values) == 1 else ", ".join(f"{v} {n}" for v, n in values.most_common())


def _form(value: Any, unit: str) -> str:
    if unit == "s":
        return seconds(value if value > _NOTHING else 0.0)
    if unit == "B":
        return size(value)
    return f"{100 * value:.1f} %" if unit == "%" else str(value)
