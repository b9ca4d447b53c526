"""The worker process of ``autopar ui``: ``python -m autopar.cli.planner`` reads jobs from standard input, one JSON object per line, and
writes their progress to standard output. A line ``{"cancel": number}`` ends the search of that job; the worker and its graph stay.

A job has a kind, the arguments of ``autopar plan`` and a folder. A job of kind ``plan`` writes ``plan.json`` (as ``autopar plan --json``
prints it), ``figures.json`` (the data of its report) and ``report.html`` into the folder; one of kind ``program`` writes the program of
that plan. The worker keeps the graph of the last model, so planning that model again with another pin needs no capture.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from autopar.cli.app import cli
from autopar.cli.commands import cluster_and_options, load, recapture
from autopar.cli.load import config_file
from autopar.cli.options import PlanRequest
from autopar.cli.recorded import command_line, recorded_options
from autopar.cli.trainers import plan_graph_for_trainer, pricer_of
from autopar.compile import emit_program
from autopar.devices import Cluster
from autopar.devices.figures import cluster_figures
from autopar.errors import AutoparError
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.plan_files import read_plan
from autopar.planning import check_schedule, compared_graph, plan_graph
from autopar.report import PlanFigures, figures, page_of, predict_step
from autopar.run.worker import read_calls
from autopar.search import SearchOptions

Tell = Callable[[str, str], None]


class Cancelled(BaseException):
    """The job whose search runs was cancelled; no handler of errors is for it."""


class Calls(queue.Queue[dict[str, Any]]):
    """Jobs that wait. A line ``{"cancel": number}`` is no job: it sets ``cancelled`` at once."""

    cancelled = ""

    def put(self, item: dict[str, Any], block: bool = True, timeout: float | None = None) -> None:
        if "cancel" in item:
            self.cancelled = item["cancel"]
        else:
            super().put(item, block, timeout)


class Planner:
    """Runs jobs, one at a time, and reports progress by calling ``tell(stage, text)``. Searches call ``interrupt``, which may raise."""

    def __init__(self, tell: Tell, interrupt: Callable[[], None] = lambda: None) -> None:
        self._tell, self._interrupt = tell, interrupt
        self._key: tuple[Any, ...] = ()
        self._graph: Graph | None = None

    def plan(self, arguments: list[str], folder: Path) -> None:
        request, cluster, options, graph = self._captured(arguments)
        exported = None
        if request.trainer:
            plan, exported = plan_graph_for_trainer(request, graph, cluster, options, self._tell)
        else:
            options = dataclasses.replace(options, pin_time_s=options.time_limit_s / 2)
            own_dtype = request.precision is None
            again = recapture(request, cluster)
            graph, plan = plan_graph(graph, cluster, options, again, progress=self._tell, own_dtype=own_dtype)
        plan = dataclasses.replace(plan, request=plan.request | recorded_options(_without_folder(request, folder)))
        self._tell("report", "")
        cluster, pricer = pricer_of(request, graph, cluster.used_by(plan.device_count), plan)
        subject = PlanFigures(
            Path(request.model).name,
            plan,
            predict_step(graph, cluster, pricer, plan),
            provenance=cluster_figures(cluster),
            command=command_line(plan),
            configuration=None if exported is None else dataclasses.asdict(exported),
        )
        drawn = figures(subject)
        (folder / "figures.json").write_text(json.dumps(drawn, allow_nan=False), "utf-8")
        (folder / "report.html").write_text(page_of([drawn]), "utf-8")
        (folder / "plan.json").write_text(plan.dumps() + "\n", "utf-8")

    def program(self, arguments: list[str], folder: Path) -> None:
        request, cluster, options, graph = self._captured(arguments)
        plan: Plan = read_plan(folder / "plan.json")
        again = recapture(request, cluster)
        graph, plan = plan_graph(graph, cluster, options, again, plan=plan, progress=self._tell)
        shutil.rmtree(folder / "program", ignore_errors=True)  # left over from a cancelled job
        emit_program(graph, plan, folder / "program", self._tell)

    def _captured(self, arguments: list[str]) -> tuple[PlanRequest, Cluster, SearchOptions, Graph]:
        request = PlanRequest.taken_from(cli.commands["plan"].make_context("plan", list(arguments)).params)
        cluster, options = cluster_and_options(request)
        options = dataclasses.replace(options, interrupt=self._interrupt)
        check_schedule(options)
        model = Path(request.model)
        key = (
            request.model,
            _content(request.model),
            request.seq,
            request.global_batch,
            request.precision,
            request.local_batch_norm,
            cluster.kind,
        )
        if self._graph is None or self._key != key:
            self._graph = None
            self._tell("load", model.name)
            workload = load(request, cluster)
            self._graph, self._key = compared_graph(workload, progress=self._tell), key
        return request, cluster, options, self._graph


def _without_folder(request: PlanRequest, folder: Path) -> PlanRequest:
    """Return the request with the names of files that are in the job's ``folder``, which is deleted with the job."""
    model, devices = (
        Path(text).name if Path(text).parent == folder else text for text in (request.model, request.devices)
    )
    return dataclasses.replace(request, model=model, devices=devices)


def _content(model: str) -> str:
    """Return the text of the file that MODEL names, or an empty string: the file may be edited between two jobs."""
    source = model.rpartition(":")[0]
    file = Path(source) if source.endswith(".py") else config_file(model)
    return file.read_text("utf-8", "surrogateescape") if file is not None and file.is_file() else ""


def failure(error: BaseException) -> dict[str, Any]:
    """Return an error as the page shows it: message, hint, and for an infeasible request the changes that would make it feasible."""
    if isinstance(error, AutoparError):
        changes = [change.text for change in getattr(error, "changes", ())]
        return {"message": error.message, "hint": error.hint or "", "changes": changes}
    if isinstance(error, click.ClickException):
        return {"message": error.format_message(), "hint": "`autopar plan --help` describes the options"}
    traceback.print_exc()
    return {
        "message": f"{type(error).__name__}: {error}",
        "hint": "this is a bug in autopar; the terminal of `autopar ui` has the traceback",
    }


def main() -> None:
    progress_stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the model's code prints goes to the terminal, not into the stream of progress
    calls, running = Calls(), ""
    threading.Thread(target=read_calls, args=(os.fdopen(os.dup(0)), calls), daemon=True).start()

    def say(**line: Any) -> None:
        progress_stream.write(json.dumps(line) + "\n")
        progress_stream.flush()

    def interrupt() -> None:
        if calls.cancelled == running:
            raise Cancelled

    planner = Planner(lambda stage, text: say(stage=stage, text=text), interrupt)
    while True:
        call = calls.get()
        running = call["number"]
        work = {"plan": planner.plan, "program": planner.program}[call["kind"]]
        try:
            work(call["arguments"], Path(call["folder"]))
            say(error=None)
        except Cancelled:
            say(error={"message": "cancelled", "hint": ""})
        except Exception as error:  # report any error to the page
            say(error=failure(error))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
