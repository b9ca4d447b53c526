"""``autopar report`` and ``autopar trace``: a plan as a page, and its predicted step as a trace."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from autopar.cli.commands import asked
from autopar.cli.console import Messages, console, plain_table
from autopar.cli.explain import captured, check_named, explained, lacking, repeated
from autopar.cli.output import output_file, print_file
from autopar.cli.pricing import compared
from autopar.devices import Cluster
from autopar.devices.figures import cluster_figures
from autopar.errors import BatchError
from autopar.plan import Plan
from autopar.plan_files import check_devices, check_model, read_plan
from autopar.precision import name_of
from autopar.price import Pricer
from autopar.program import tracing
from autopar.report import PredictedStep, Subject, page, predict_step
from autopar.report.picture import plot
from autopar.report.trace import compare_actions, predicted_events, read_trace
from autopar.units import seconds, size

_SAME = 1e-6  # relative: prices that agree to this are the prices that the plan was made with


def report_command(
    plan: str, other: str | None, output: str, plot_file: str | None, explain: bool, as_json: bool, **request: Any
) -> None:
    """Writes the page of one plan or of two, draws the picture that was asked for, and prints the page's path."""
    path = output_file(output, "-o")
    picture = output_file(plot_file, "--plot", picture=True) if plot_file else None
    files = [plan, *([other] if other else [])]
    plans = [read_plan(file) for file in files]
    for file, written in zip(files, plans, strict=True):
        if explain or picture:  # which the file alone does not suffice for
            check_named(file, repeated(written, request), written)
    subjects = [subject(file, written, request, explain) for file, written in zip(files, plans, strict=True)]
    rows = compared(subjects[0].plan, subjects[1].plan) if other else ()
    path.write_text(page(subjects, rows), "utf-8")
    if picture is not None:
        plot(
            [(f"{one.name}: {one.plan.model} on {one.plan.devices}", one.step) for one in subjects if one.step], picture
        )
    with Messages() as messages:
        messages.console.print(f"one page of {size(path.stat().st_size)}, which loads nothing", highlight=False)
    print_file(path, as_json)


def trace_command(plan: str, output: str, measured: str | None, as_json: bool, **request: Any) -> None:
    """Writes the predicted step, above a measured one where there is one, and compares the seconds of their actions."""
    path = output_file(output, "-o")
    events = None if measured is None else read_trace(measured)
    written = read_plan(plan)
    found = repeated(written, request)
    check_named(plan, found, written)
    step, _ = predicted(written, found)
    tracing.write(path, [*predicted_events(step), *(events or ())])
    if as_json:
        actions = None if events is None else [asdict(row) for row in compare_actions(step, events)]
        print(json.dumps({"file": str(path), "actions": actions}, indent=1))
        return
    if events is not None:
        console(width=100).print(_errors(step, events))
    print(path)


def _errors(step: PredictedStep, events: list[tracing.Event]) -> Table:
    title = "seconds of each action: mean over all microbatches and ranks"
    table = plain_table(title, ("action",), ("predicted", "measured", "measured / predicted"))
    for row in compare_actions(step, events):
        table.add_row(
            row.name, seconds(row.predicted_s), seconds(row.measured_s), f"{row.measured_s / row.predicted_s:.2f}"
        )
    return table


def subject(file: str, plan: Plan, request: dict[str, Any], explain: bool) -> Subject:
    """The plan of a file with everything that a page shows; without a model the file's own figures."""
    name = Path(file).name
    found = repeated(plan, request)
    if (lacks := lacking(found, plan)) is not None:
        why = (
            f"The plan's file {lacks[0]}. With {lacks[1]}, this page also shows the timeline, the prices of layers, the "
            "traffic and the sources of all figures."
        )
        return Subject(name, plan, missing=(why,))
    step, cluster = predicted(plan, found)
    said = []
    before, now = plan.prediction.step_time_s, step.step_time_s
    if abs(now - before) > _SAME * before:
        said.append(
            f"The plan's file says {seconds(before)} a step, and today's prices {seconds(now)}: another version, calibration or model made "
            "it. The timeline, prices of layers and traffic are today's, totals and memory at the peak the file's."
        )
    explanation = explained(found, plan).to_json() if explain else None
    return Subject(name, plan, step, explanation, cluster_figures(cluster), tuple(said))


def predicted(plan: Plan, request: dict[str, Any]) -> tuple[PredictedStep, Cluster]:
    """The predicted step of a plan of that request, and its devices."""
    cluster, _ = asked(request)
    with Messages() as messages:
        try:
            graph, _ = captured(request, cluster, plan, messages)
        except BatchError:
            if plan.request:
                raise
            graph, _ = captured(request | {"global_batch": None}, cluster, plan, messages)  # the factory's own batch
        check_model(plan, graph)
        check_devices(plan, cluster, may_be_idle=True)
        messages("price")
        return predict_step(graph, cluster, Pricer(graph, cluster, name_of(graph.dtype)), plan), cluster
