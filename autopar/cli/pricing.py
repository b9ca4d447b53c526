"""``autopar price`` predicts the plan that a user has; ``autopar compare`` shows plans side by side.

A plan is written as pins or as a ``plan.json``, and priced as an emitted program runs it; or as a configuration of another trainer
(``autopar.trainers``), and priced as that trainer runs it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from autopar.cli.commands import (
    capture_request,
    cluster_and_options,
)
from autopar.cli.console import Messages, output_file, plain_table, show
from autopar.cli.options import PlanRequest
from autopar.cli.render import plan_tables
from autopar.cli.timeline import timeline_data, timeline_table
from autopar.cli.trainers import compared as compare_configuration
from autopar.cli.trainers import configured, pinned, priced_as, pricer_of, recorded
from autopar.devices import Cluster
from autopar.errors import AutoparError, UsageError
from autopar.graph import Graph
from autopar.pins import OF_PLAN, refuse_pins
from autopar.plan import Plan
from autopar.plan_files import check_devices, check_model, read_plan
from autopar.planning import write_plan
from autopar.precision import name_of
from autopar.price import Pricer
from autopar.search import SearchOptions, memory_timeline, reprice
from autopar.search.numerics import Numerics, allowed_numerics, preferred
from autopar.techniques import LAYER, LAYER_DEVIATIONS
from autopar.trainers.choose import with_deviations
from autopar.trainers.reading import setting_of_plan, trainer_named
from autopar.units import seconds, size
from autopar.workload import Recapture, with_numerics

_NEGLIGIBLE = 1e-9  # seconds below this are the rounding error of a difference (the bubble is one)


def price_command(
    request: PlanRequest,
    microbatch: int | None,
    sequence: bool,
    timeline: bool,
    source: str | None,
    output: str | None,
    flags: Sequence[str],
    as_json: bool,
) -> None:
    """Print the plan's prediction as ``autopar plan`` does, and with ``timeline`` also the memory through a step. Exit with 1 if the plan
    doesn't fit."""
    file = output_file(output, "-o") if output else None
    own = [*["--microbatch"] * (microbatch is not None), *["--sequence"] * sequence]
    with Messages() as messages:
        if source is not None or flags:
            refuse_pins([*own, *["the flags after --"] * bool(source and flags)], source or "the flags after --")
            found = configured(request, source, flags, messages)
        elif request.trainer and not request.plan_file:
            found = pinned(request, microbatch, sequence, messages)
        else:
            refuse_pins(own if request.plan_file else (), "--plan")
            found = None
            graph, cluster, plan, pricer = _priced(request, microbatch, sequence, messages)
        if found is not None:
            graph, cluster, plan, pricer = (
                found.graph,
                found.pricers.cluster,
                found.plan,
                found.pricers.of(found.setting),
            )
            plan = dataclasses.replace(plan, request=recorded(request, found.trainer, found.setting))
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


def _priced(
    request: PlanRequest, microbatch: int | None, sequence: bool, messages: Messages
) -> tuple[Graph, Cluster, Plan, Pricer]:
    """Return the priced plan of pins or of a plan's file, with its graph, devices and pricer. A file of a plan for another trainer is
    priced as that trainer runs it."""
    given = read_plan(request.plan_file) if request.plan_file else None
    cluster, options = cluster_and_options(request)
    graph, again = capture_request(request, cluster, given, messages)
    messages("price")
    if given is None:
        return _pinned(graph, again, cluster, options, microbatch, sequence)
    cluster, pricer = pricer_of(request, graph, cluster.used_by(given.device_count), given)
    plan = price_plan(graph, cluster, given, pricer)
    if request.trainer:
        trainer = trainer_named(request.trainer)
        plan = with_deviations(plan, setting_of_plan(trainer, given))
        plan = dataclasses.replace(plan, notes=(priced_as(trainer), *plan.notes))
    return graph, cluster, plan, pricer


def _pinned(
    graph: Graph,
    exact: Recapture,
    cluster: Cluster,
    options: SearchOptions,
    microbatch: int | None,
    sequence: bool,
) -> tuple[Graph, Cluster, Plan, Pricer]:
    """Return the priced plan of the pins, with its graph, devices and pricer. Of the allowed deviations from exact training it has those
    with which it is faster, or without which it doesn't fit; a note says why one of them can't be used."""

    def priced(numerics: Numerics) -> tuple[Graph, Cluster, Plan, Pricer]:
        deviating = with_numerics(graph, exact, numerics)
        plan = write_plan(deviating, cluster, options, microbatch=microbatch, sequence=sequence)
        used = cluster.used_by(plan.device_count)
        pricer = Pricer(deviating, used, name_of(graph.dtype))
        return deviating, used, price_plan(deviating, used, plan, pricer), pricer

    found: list[tuple[Graph, Cluster, Plan, Pricer]] = []
    refused: dict[Numerics, AutoparError] = {}
    for numerics in _numerics_of_pins(graph, cluster, options, microbatch):
        try:
            found.append(priced(numerics))
        except AutoparError as error:
            refused[numerics] = error
    best = preferred(found, operator.itemgetter(2), options.target_gap)
    if best is None:
        raise next(iter(refused.values()))
    deviating, used, plan, pricer = best
    notes = [f"{each.narrow[0]} is not used: {why.message}" for each, why in refused.items() if len(each.narrow) == 1]
    return deviating, used, dataclasses.replace(plan, notes=(*plan.notes, *notes)), pricer


def _numerics_of_pins(graph: Graph, cluster: Cluster, options: SearchOptions, microbatch: int | None) -> list[Numerics]:
    """Return the allowed deviations for pins, which fix the number of microbatches and the techniques of layers."""
    allow = set(options.allow) - (set(LAYER_DEVIATIONS) - set(options.deviations))
    found = allowed_numerics(graph, dataclasses.replace(options, allow=allow))
    if len({each.microbatches for each in found}) == 1:
        return found
    count = write_plan(graph, cluster, options, microbatch=microbatch).microbatches
    return [each for each in found if each.microbatches == count]


def price_plan(graph: Graph, cluster: Cluster, plan: Plan, pricer: Pricer) -> Plan:
    """Return ``plan`` with its prediction on ``cluster``."""
    check_model(plan, graph)
    check_devices(plan, cluster)
    priced = reprice(graph, cluster, pricer, plan, pricer.precision.name)
    return dataclasses.replace(priced, notes=(*priced.notes, *cluster.notes))


def compare_command(request: PlanRequest, first: str, second: str | None, as_json: bool) -> None:
    """Print two plans (files of ``plan -o`` or ``price -o``) side by side, or a trainer's configuration beside the best ones."""
    if second is None:
        _compare_configuration(request, first, as_json)
        return
    if request.model or request.devices:
        raise UsageError(
            "--model and --devices describe a trainer's configuration, and two plans need neither", "leave them out"
        )
    rows = compared([read_plan(first), read_plan(second)])
    table = plain_table(None, ("",), (Path(first).name, Path(second).name, "second / first"))
    for figure, (a, b), form in _telling(rows):
        numbers = isinstance(a, (int, float)) and isinstance(b, (int, float)) and a > _NEGLIGIBLE
        table.add_row(figure, _formatted(a, form), _formatted(b, form), f"{b / a:.2f}" if numbers and form else "")
    show(as_json, [{"figure": a, "first": b, "second": c} for a, (b, c), _ in rows], table)


def _compare_configuration(request: PlanRequest, source: str, as_json: bool) -> None:
    """Print a trainer's configuration beside that trainer's best one and autopar's program, and the changes that gain most."""
    missing = [name for name, given in (("--model", request.model), ("--devices", request.devices)) if not given]
    if missing:
        raise UsageError(
            f"{source} is one file, and there is no second plan",
            f"give another plan's file, or {' and '.join(missing)} if the file is a configuration of your trainer",
        )
    with Messages() as messages:
        found = compare_configuration(request, source, messages)
    title = found.own.trainer.title
    plans = {"yours": found.own.plan, f"best of {title}": found.best, "autopar's program": found.program}
    rows = compared(list(plans.values()))
    table = plain_table(None, ("",), tuple(plans))
    for figure, values, form in _telling(rows):
        table.add_row(figure, *(_formatted(value, form) for value in values))
    now_s = found.own.plan.prediction.step_time_s
    changes = plain_table("single changes that gain most", ("change",), ("step", "gains"))
    for change in found.changes:
        step_s = change.plan.prediction.step_time_s
        changes.add_row(change.words, seconds(step_s), f"{1 - step_s / now_s:.1%}")
    fits = "" if not found.own.plan.too_full else ", and does not fit"
    words = f"your configuration takes {seconds(now_s)}{fits}; "
    words += "; ".join(f"{name} {seconds(plan.prediction.step_time_s)}" for name, plan in list(plans.items())[1:])
    data = {
        "trainer": found.own.trainer.name,
        "figures": [{"figure": a, **dict(zip(plans, b, strict=True))} for a, b, _ in rows],
        "changes": [{"change": c.words, "step_time_s": c.plan.prediction.step_time_s} for c in found.changes],
        "files": dict(found.exported.files),
        "notes": list(found.own.plan.notes),
    }
    notes: list[RenderableType] = [Text(f"note: {note}", "dim") for note in found.own.plan.notes]
    gains: list[RenderableType] = ["", changes] if found.changes else []
    show(as_json, data, words, "", table, *gains, *notes)


def compared(plans: Sequence[Plan]) -> list[tuple[str, list[Any], str]]:
    """Return (figure, its value for each plan, unit) for every row of the comparison."""

    def row(name: str, value: Callable[[Plan], Any], unit: str = "") -> tuple[str, list[Any], str]:
        return name, [value(plan) for plan in plans], unit

    def degree(plan: Plan, name: str) -> int:
        return max(layer.strategy.degrees(plan.mesh)[name] for layer in plan.layers)

    def largest(plan: Plan, part: str) -> int:
        return max(getattr(stage.memory, part) for stage in plan.stages)

    found = [row("model", lambda p: p.model), row("devices", lambda p: p.devices)]
    degrees = plans[0].layers[0].strategy.degrees(plans[0].mesh)
    found += [row(name, lambda p, name=name: degree(p, name)) for name in degrees]  # type: ignore[misc]
    found += [row(name, operator.attrgetter(name)) for name in (*OF_PLAN, "global_batch")]
    found.append(row("ZeRO", lambda p: max(layer.strategy.zero for layer in p.layers)))
    for technique in LAYER:
        found.append(
            row(technique.name, lambda p, t=technique: _counted(Counter(x.strategy.options[t] for x in p.layers)))  # type: ignore[misc]
        )
    for name in ("step_time_s", "compute_s", "communication_s", "bubble_s", "optimizer_s"):
        words = name.removesuffix("_s").replace("_", " ")
        found.append(row(words, operator.attrgetter(f"prediction.{name}"), "s"))
    found.append(row("MFU", lambda p: p.prediction.mfu, "%"))
    for part in ("total", "parameters", "gradients", "optimizer", "activations", "transients"):
        found.append(row(f"memory, {part}", lambda p, part=part: largest(p, part), "B"))  # type: ignore[misc]
    for words, name in (("memory in the host", "host_bytes"), ("on NVMe", "nvme_bytes")):
        outside = row(words, lambda p, name=name: max(getattr(stage, name) for stage in p.stages), "B")  # type: ignore[misc]
        found += [outside] if any(outside[1]) else []
    return found


def _telling(rows: Sequence[tuple[str, list[Any], str]]) -> list[tuple[str, list[Any], str]]:
    """Return the rows of a comparison that a table shows: predictions, and decisions in which the plans differ."""
    return [row for row in rows if row[2] or any(value != row[1][0] for value in row[1])]


def _counted(values: Counter[str]) -> str:
    """Return how many layers have each value, such as ``full 30, keep 4``, or only the value if all layers have it."""
    return next(iter(values)) if len(values) == 1 else ", ".join(f"{v} {n}" for v, n in values.most_common())


def _formatted(value: Any, unit: str) -> str:
    if unit == "s":
        return seconds(value if value > _NEGLIGIBLE else 0.0)
    if unit == "B":
        return size(value)
    return f"{100 * value:.1f} %" if unit == "%" else str(value)
