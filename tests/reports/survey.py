"""Models that nobody here wrote, against eager PyTorch: ``python tests/reports survey`` (``make report NAME=survey``), and with
``--models-of survey_further`` those of further packages (``make report NAME=survey-further``), with ``--models-of survey_mixtures``
mixtures of experts (``make report NAME=mixtures``).

Each is built tiny, with a batch that is always the same, captured, and compared in float64 with eager PyTorch: the captured graph on
one device, then its programs on a few processes under a few kinds of plans (``--kinds all``: every kind that ``verify`` knows). A
model is worked on in a process of its own rank, which is ended where it takes longer than ``--limit`` seconds, and begun anew where
it dies: a crash is a result like another. One JSON line per model; the page beside them is made from them. A run does what the file
lacks for this code (``--fresh``: everything; ``--keep``: only what no code has passed). Ends with status 1 where a model is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from places import EVIDENCE, ROOT
from results import Results, options, quiet
from survey_models import Entry
from survey_page import OUTCOMES, write_page
from workers import WorkerPool

from autopar.capture import reference
from autopar.emit.opaque import describe_opaque
from autopar.errors import AutoparError, LaunchError, UsageError
from autopar.measure import EXACT, compare
from autopar.verify import Subject, check_plan, kinds, make_subject


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What is done with the ``MODELS`` of a module: the file of the results, the number of processes, and the kinds of plans."""

    results: Path
    devices: int
    kinds: tuple[str, ...]


ON_TWO = (
    "data 2, zero 3",
    "tensor 2",
    "tensor+sequence 2",
    "expert 2",
    "pipeline 2",
    "recompute in part, data 2, zero 3",
)
OF_EXPERTS = (
    "expert 4",
    "data 2 x expert 2, zero 2",
    "expert 2 x tensor 2",
    "data 2 x tensor 2, experts folded, zero 3",
    "expert 2 x tensor+sequence 2, experts folded",
    "expert 2 x ulysses 2, experts folded, zero 1",
    "data 2 x ring 2, experts folded, zero 2",
    "ring 2 x tensor+sequence 2, experts folded",
    "pipeline 2 x expert 2",
    "pipeline 2 x tensor+sequence 2, experts folded",
    "data 4, zero 3",
)
CATALOGUES = {
    "survey_models": Catalogue(EVIDENCE / "survey.jsonl", 2, ON_TWO),
    "survey_further": Catalogue(EVIDENCE / "survey-further.jsonl", 2, ON_TWO),
    "survey_mixtures": Catalogue(EVIDENCE / "mixtures.jsonl", 4, OF_EXPERTS),
}
"""By the name of the module of the models."""
LIMIT_S = 240


# -- one model, in the process that works ------------------------------------------------------------------------------


def models_of(catalogue: str) -> dict[str, Entry]:
    models: dict[str, Entry] = importlib.import_module(catalogue).MODELS
    return models


def examine(entry: Entry, name: str, wanted: list[str], devices: int, pool: WorkerPool) -> dict[str, Any]:
    """The line of a model: what one device and every plan gave."""
    model, batch, loss_fn = entry.make()
    start_s = time.perf_counter()
    try:
        subject = make_subject(model, batch, loss_fn, name=name)
        describe_opaque(subject.graph)
    except AutoparError as error:
        return {"outcome": "refused", "reason": error.message}
    parameters = sum(p.numel() for p in model.parameters())
    line: dict[str, Any] = {"parameters": parameters, "capture_s": round(time.perf_counter() - start_s, 2)}
    line["layers"] = len(subject.graph.layers)
    line["experts"] = max(layer.experts for layer in subject.graph.classes.values())
    plans: dict[str, Any] = {"one device": _on_one_device(subject)}
    for kind in kinds(devices):
        if not wanted or kind.name in wanted:
            plans[kind.name] = _under(kind, subject, pool)
    return line | {"plans": plans} | verdict(plans)


def _on_one_device(subject: Subject) -> dict[str, Any]:
    """The captured graph, held against the model."""
    state = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in subject.state.items()}
    loss = reference.run(subject.graph, state, subject.batch)
    loss.backward()
    found = {n: t.grad for n, t in state.items() if n in subject.gradients and t.grad is not None}
    error = compare(float(loss.detach()), found, subject.loss, subject.gradients, rounding=subject.rounding)
    return {"error": error.value, "where": error.where}


def _under(kind: Any, subject: Subject, pool: WorkerPool) -> dict[str, Any]:
    start_s = time.perf_counter()
    try:
        plan = kind.plan(subject.graph)
    except UsageError as error:
        return {"reason": error.message}
    except Exception as error:
        return {"failure": sentence(error), "at": place(error), "kind": kind_of(error)}
    try:
        outcome = check_plan(subject, plan, pool)
    except UsageError as error:
        return {"failure": f"offered, then refused: {error.message}"}
    except Exception as error:
        return {"failure": sentence(error), "at": place(error), "kind": kind_of(error)}
    seconds = round(time.perf_counter() - start_s, 2)
    return {"error": outcome.error.value, "where": outcome.error.where, "seconds": seconds}


def kind_of(error: Exception) -> str:
    """What a plan that was offered and did not run was: dead where a rank died, a traceback where the exception is none of autopar's."""
    if not isinstance(error, AutoparError):
        return "traceback"
    return "dead" if isinstance(error, LaunchError) and "signal" in error.message else "failed"


def sentence(error: Exception) -> str:
    return error.message if isinstance(error, AutoparError) else f"{type(error).__name__}: {error}"[:600]


def place(error: Exception) -> str:
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if str(ROOT) in f.filename and ".venv" not in f.filename
    ]
    return f"{Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}" if frames else ""


def verdict(plans: dict[str, Any]) -> dict[str, Any]:
    """What the plans' results make of a model: the first that is wrong, else the first that failed, else exact."""
    ran = {kind: plan for kind, plan in plans.items() if "error" in plan}
    for kind, plan in ran.items():
        if not plan["error"] <= EXACT:
            return {"outcome": "wrong", "reason": f"{kind}: {plan['where']} is off by {plan['error']:.2g}"}
    for kind, plan in plans.items():
        if "failure" in plan:
            return {"outcome": plan.get("kind", "failed"), "reason": f"{kind}: {plan['failure']}"}
    return {"outcome": "exact", "error": max(plan["error"] for plan in ran.values())}


def work(connection: Connection, catalogue: str, wanted: list[str]) -> None:
    """In the process that works: answer names with lines until there are no more."""
    os.setsid()  # so that all that it starts can be ended with it
    quiet()
    torch.set_num_threads(1)
    models, devices = models_of(catalogue), CATALOGUES[catalogue].devices
    with WorkerPool(devices) as pool:
        while (name := connection.recv()) is not None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    line = examine(models[name], name, wanted, devices, pool)
            except Exception as error:
                line = {"outcome": "traceback", "reason": sentence(error), "at": place(error)}
            connection.send(line)


# -- the process that asks ---------------------------------------------------------------------------------------------


class Worker:
    """A process that works; a model that ends or outlasts it gets that as its line, and the next model a new one."""

    def __init__(self, catalogue: str, wanted: list[str]) -> None:
        self.catalogue, self.wanted = catalogue, wanted
        self.process: Any = None
        self.connection: Any = None

    def line(self, name: str, limit_s: float) -> dict[str, Any]:
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=work, args=(theirs, self.catalogue, self.wanted))
            self.process.start()
            theirs.close()
        self.connection.send(name)
        try:
            if self.connection.poll(limit_s):
                return self.connection.recv()
            line = {"outcome": "dead", "reason": f"no result after {limit_s:.0f} s"}
        except EOFError:
            self.process.join()
            line = {"outcome": "dead", "reason": f"the process ended with {self.process.exitcode}"}
        self.close()
        return line

    def close(self) -> None:
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # it may not have become the leader of a group yet
        self.process.join()
        self.process = None


def results_in(path: Path) -> Results:
    return Results(path, ("model",), lambda line: line["outcome"] in ("exact", "refused"))


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = options(__doc__, None)
    parser.add_argument("--models-of", choices=CATALOGUES, default="survey_models", help="the module of the models")
    parser.add_argument("--models", metavar="NAMES", help="these models only, separated by commas")
    parser.add_argument("--groups", metavar="NAMES", help="models of these groups only, separated by commas")
    parser.add_argument("--kinds", metavar="NAMES", help="these kinds of plans, separated by semicolons; all")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one model")
    args = parser.parse_args(argv)
    args.results = args.results or CATALOGUES[args.models_of].results
    return args


def chosen(args: argparse.Namespace, models: dict[str, Entry]) -> list[str]:
    names = [name for name, entry in models.items() if not args.groups or entry.group in args.groups.split(",")]
    if not args.models:
        return names
    unknown = set(args.models.split(",")) - set(models)
    if unknown:
        raise SystemExit(f"there is no model {', '.join(sorted(unknown))}")
    return [name for name in names if name in args.models.split(",")]


def main() -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    args = arguments()
    models, results = models_of(args.models_of), results_in(args.results)
    names, done = chosen(args, models), results.kept(args)
    wanted = (
        [] if args.kinds == "all" else args.kinds.split(";") if args.kinds else list(CATALOGUES[args.models_of].kinds)
    )
    worker = Worker(args.models_of, wanted)
    columns = (TextColumn("{task.description:26}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            for name in progress.track(names):
                progress.update(progress.task_ids[0], description=name)
                if (name,) in done:
                    continue
                start_s = time.perf_counter()
                line = {"model": name, "group": models[name].group} | worker.line(name, args.limit)
                line |= {"seconds": round(time.perf_counter() - start_s, 1)}
                results.append(anywhere(line))  # after every model, so that an interrupted run can be resumed
                if line["outcome"] != "exact":
                    said = {key: line.get(key) for key in ("model", "outcome", "reason", "at", "seconds")}
                    progress.console.print(json.dumps(said), markup=False, highlight=False, soft_wrap=True)
    finally:
        worker.close()
    return finish(args, names, models)


def anywhere(line: dict[str, Any]) -> dict[str, Any]:
    """A line that says which file is meant and not where this machine keeps it."""
    if "reason" not in line:
        return line
    return line | {"reason": re.sub(r"/\S*/(?:site-packages/|survey-further/|(?=tests/))", "", line["reason"])}


def finish(args: argparse.Namespace, names: list[str], models: dict[str, Entry]) -> int:
    """Keep the last line of each model in the models' order, write the page, say how it went; the exit status."""
    lines = results_in(args.results).tidy((name,) for name in models)
    write_page(lines, args.results.with_suffix(".md"), len(models), CATALOGUES[args.models_of].devices)
    count = {outcome: sum(line["outcome"] == outcome for line in lines) for outcome in OUTCOMES}
    print(", ".join(f"{number} {outcome}" for outcome, number in count.items()), f"of {len(models)}: {args.results}")
    return 1 if any(line["outcome"] == "wrong" for line in lines if line["model"] in names) else 0


if __name__ == "__main__":
    sys.exit(main())
