"""``autopar price`` predicts a user's plan with the search's cost model; ``autopar compare`` shows two plans side by side.

A plan is written as pins, as a ``plan.json``, or as flags of Megatron-LM or torchtitan (``autopar.trainers.flags``).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group

from autopar.cli.commands import capture_request, check_pins, cluster_and_options, with_recorded_options
from autopar.cli.console import Messages, output_file, plain_table, show
from autopar.cli.options import PlanRequest
from autopar.cli.render import plan_tables
from autopar.cli.timeline import timeline_data, timeline_table
from autopar.devices import Cluster
from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.pins import OF_PLAN
from autopar.plan import Plan
from autopar.plan_files import check_devices, check_model, read_plan
from autopar.planning import write_plan
from autopar.precision import name_of, normalise
from autopar.price import Pricer
from autopar.search import memory_timeline, reprice
from autopar.techniques import LAYER
from autopar.trainers.flags import MICROBATCH, SEQUENCE, read_flags
from autopar.units import seconds, size

_SIZES = ("global_batch", "seq", "precision")
_NEGLIGIBLE = 1e-9  # seconds below this are the rounding error of a difference (the bubble is one)


def price_command(
    request: PlanRequest,
    microbatch: int | None,
    sequence: bool,
    timeline: bool,
    output: str | None,
    flags: Sequence[str],
    as_json: bool,
) -> None:
    """Print the plan's prediction as ``autopar plan`` does, and with ``timeline`` also the memory through a step. Exit with 1 if the plan
    doesn't fit."""
    file = output_file(output, "-o") if output else None
    pins, others = read_flags(flags)
    _check_flags(others, {MICROBATCH: microbatch, **{name: getattr(request, name) for name in _SIZES}})
    microbatch, sequence = others.pop(MICROBATCH, microbatch), others.pop(SEQUENCE, sequence)
    request = dataclasses.replace(request, pins=(*request.pins, *pins), **others)
    check_pins(request, *["--microbatch"] * (microbatch is not None), *["--sequence"] * sequence)
    given = read_plan(request.plan_file) if request.plan_file else None
    request = with_recorded_options(given, request)
    cluster, options = cluster_and_options(request)
    with Messages() as messages:
        graph, _ = capture_request(request, cluster, given, messages)
        messages("price")
        plan = given or write_plan(graph, cluster, options, microbatch=microbatch, sequence=sequence)
        cluster = cluster.used_by(plan.device_count)
        pricer = Pricer(graph, cluster, name_of(graph.dtype))
        plan = price_plan(graph, cluster, plan, pricer)
        moments = memory_timeline(graph, cluster, pricer, plan) if timeline else ()
    if file is not None:
        file.write_text(plan.dumps() + "\n")
    data, parts = plan.to_json(), [plan_tables(plan)]
    if timeline:
        data |= {"timeline": timeline_data(moments)}
        parts.append(Group("", timeline_table(moments)))
    show(as_json, data, *parts)
    if plan.too_full:
        raise SystemExit(1)


def _check_flags(flags: dict[str, Any], options: dict[str, Any]) -> None:
    """Raise ``UsageError`` if a trainer's flag contradicts one of autopar's ``options``."""
    for name, value in options.items():
        wanted = normalise(value) if name == "precision" and value else value
        if value is not None and flags.get(name, wanted) != wanted:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is {value}, and {flags[name]} in the flags after --", f"leave {option} out")


def price_plan(graph: Graph, cluster: Cluster, plan: Plan, pricer: Pricer) -> Plan:
    """Return ``plan`` with its prediction on ``cluster``."""
    check_model(plan, graph)
    check_devices(plan, cluster)
    priced = reprice(graph, cluster, pricer, plan, pricer.precision.name)
    return dataclasses.replace(priced, notes=(*priced.notes, *cluster.notes))


def compare_command(first: str, second: str, as_json: bool) -> None:
    """Print two plans (files of ``plan -o`` or ``price -o``) side by side."""
    rows = compared(read_plan(first), read_plan(second))
    table = plain_table(None, ("",), (Path(first).name, Path(second).name, "second / first"))
    for figure, a, b, form in rows:
        numbers = isinstance(a, (int, float)) and isinstance(b, (int, float)) and a > _NEGLIGIBLE
        table.add_row(figure, _formatted(a, form), _formatted(b, form), f"{b / a:.2f}" if numbers and form else "")
    show(as_json, [{"figure": a, "first": b, "second": c} for a, b, c, _ in rows], table)


def compared(a: Plan, b: Plan) -> list[tuple[str, Any, Any, str]]:
    """Return (figure, value of ``a``, value of ``b``, unit) for every row of the comparison."""

    def degree(plan: Plan, name: str) -> int:
        return max(layer.strategy.degrees(plan.mesh)[name] for layer in plan.layers)

    def largest(plan: Plan, part: str) -> int:
        return max(getattr(stage.memory, part) for stage in plan.stages)

    found: list[tuple[str, Any, Any, str]] = [("model", a.model, b.model, ""), ("devices", a.devices, b.devices, "")]
    found += [(name, degree(a, name), degree(b, name), "") for name in a.layers[0].strategy.degrees(a.mesh)]
    found += [(name, getattr(a, name), getattr(b, name), "") for name in (*OF_PLAN, "global_batch")]
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
    """Return how many layers have each value, such as ``full 30, keep 4``, or only the value if all layers have it."""
    return next(iter(values)) if len(values) == 1 else ", ".join(f"{v} {n}" for v, n in values.most_common())


def _formatted(value: Any, unit: str) -> str:
    if unit == "s":
        return seconds(value if value > _NEGLIGIBLE else 0.0)
    if unit == "B":
        return size(value)
    return f"{100 * value:.1f} %" if unit == "%" else str(value)
