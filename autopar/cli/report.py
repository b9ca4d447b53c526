"""``autopar report`` writes a plan as a page, and its predicted step as a figure and as a trace."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from autopar.cli.commands import capture_request, cluster_and_options
from autopar.cli.console import Messages, console, output_file, plain_table
from autopar.cli.explain import explained, same_prices
from autopar.cli.options import PlanRequest
from autopar.cli.recorded import command_line, missing_options, require, with_recorded_options
from autopar.cli.trainers import pricer_of
from autopar.devices import Cluster
from autopar.devices.figures import cluster_figures
from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.plan_files import check_devices, check_model, read_plan
from autopar.program import tracing
from autopar.report import PlanFigures, PredictedStep, page, predict_step
from autopar.report.picture import plot
from autopar.report.trace import compare_actions, predicted_events, read_trace
from autopar.trainers.reading import exported_plan, trainer_named
from autopar.units import seconds, size


def report_command(
    request: PlanRequest,
    plan: str,
    other: str | None,
    explain: bool,
    measured: str | None,
    as_json: bool,
    **outputs: str | None,
) -> None:
    """Write the requested page (of one plan or two), figure and trace, and print their paths; compare the trace with a measured one."""
    options = {"page": "-o", "figure": "--plot", "trace": "--trace"}
    paths = {
        name: output_file(file, option, picture=name == "figure")
        for name, option in options.items()
        if (file := outputs[name])
    }
    if not paths:
        raise UsageError("nothing is written", f"add {', '.join(f'{option} FILE' for option in options.values())}")
    if "trace" in paths and other is not None:
        raise UsageError("a trace shows one plan, but there are two", "leave --trace out, or one of the plans")
    if measured is not None and "trace" not in paths:
        raise UsageError("--measured FILE is added to the trace, and no trace is written", "add --trace FILE")
    events = None if measured is None else read_trace(measured)
    files = [plan, *([other] if other else [])]
    plans = [read_plan(file) for file in files]
    for file, written in zip(files, plans, strict=True):
        if explain or {"figure", "trace"} & set(paths):  # they need the model and the devices, not only the plan's file
            require(with_recorded_options(written, request), written, file)
    subjects = [_subject(file, written, request, explain) for file, written in zip(files, plans, strict=True)]
    steps = [one.step for one in subjects if one.step]
    if path := paths.get("page"):
        path.write_text(page(subjects), "utf-8")
        with Messages() as messages:
            messages.say(f"one self-contained page of {size(path.stat().st_size)}")
            for text in (text for one in subjects for text in one.missing):
                messages.say(f"note: {text}")
    if path := paths.get("figure"):
        plot([(f"{one.name}: {one.plan.model} on {one.plan.devices}", one.step) for one in subjects if one.step], path)
    if path := paths.get("trace"):
        tracing.write(path, [*predicted_events(steps[0]), *(events or ())])
    if as_json:
        actions = {"actions": [asdict(row) for row in compare_actions(steps[0], events)]} if events is not None else {}
        print(json.dumps({name: str(path) for name, path in paths.items()} | actions, indent=1))
        return
    if events is not None:
        console(width=100).print(_errors(steps[0], events))
    for path in paths.values():
        print(path)


def _errors(step: PredictedStep, events: list[tracing.Event]) -> Table:
    title = "seconds of each action: mean over all microbatches and ranks"
    table = plain_table(title, ("action",), ("predicted", "measured", "measured / predicted"))
    for row in compare_actions(step, events):
        table.add_row(
            row.name, seconds(row.predicted_s), seconds(row.measured_s), f"{row.measured_s / row.predicted_s:.2f}"
        )
    return table


def _subject(file: str, plan: Plan, request: PlanRequest, explain: bool) -> PlanFigures:
    """Return the figures of a plan's page; if the model or the devices are unknown, only those of the plan's file."""
    name = Path(file).name
    completed = with_recorded_options(plan, request)
    if (lacking := missing_options(completed, plan, name)) is not None:
        parts = ["the timeline", "the costs of layers", "the traffic"]
        parts += [f"the configuration of {trainer_named(completed.trainer).title}"] if completed.trainer else []
        why = f"{lacking[0]}. `{lacking[1]}` also shows {', '.join(parts)} and the sources of all figures."
        return PlanFigures(name, plan, missing=(why,), command=command_line(plan))
    graph, cluster, step = _predicted(plan, completed)
    configuration, warnings = _configuration(plan, completed.trainer, graph, cluster)
    if not same_prices(plan, step.step_time_s):
        warnings.append(
            f"The plan's file predicts {seconds(plan.prediction.step_time_s)} a step, today's cost model {seconds(step.step_time_s)}: "
            "other version, calibration or model. The timeline, costs of layers and traffic are today's; totals and peak memory "
            "are the file's."
        )
    explanation = explained(completed, plan).to_json() if explain else None
    sources, command = cluster_figures(cluster), command_line(plan)
    return PlanFigures(name, plan, step, explanation, sources, tuple(warnings), command, configuration)


def _configuration(
    plan: Plan, trainer: str | None, graph: Graph, cluster: Cluster
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the configuration of a plan for another trainer, or ``None`` with the reason why there is none."""
    if not trainer:
        return None, []
    try:
        return asdict(exported_plan(trainer_named(trainer), plan, graph, cluster)), []
    except UsageError as error:
        return None, [f"The configuration of the trainer is missing: {error.message}."]


def _predicted(plan: Plan, request: PlanRequest) -> tuple[Graph, Cluster, PredictedStep]:
    """Return the graph of the model of ``request``, the cluster of its devices, and the predicted step of ``plan`` on them."""
    cluster = cluster_and_options(request)[0].used_by(plan.device_count)
    with Messages() as messages:
        graph, _ = capture_request(request, cluster, plan, messages)
        check_model(plan, graph)
        check_devices(plan, cluster, may_be_idle=True)
        messages("price")
        cluster, pricer = pricer_of(request, graph, cluster, plan)
        return graph, cluster, predict_step(graph, cluster, pricer, plan)
