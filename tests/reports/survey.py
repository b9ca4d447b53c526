"""Models that nobody here wrote, against eager PyTorch: ``python tests/reports survey`` (``make report NAME=survey``).

Each is built tiny, with a batch that is always the same, captured, and compared in float64 with eager PyTorch: the captured graph on
one device, then its programs on two processes under a few kinds of plans (``--kinds all``: every kind that ``verify`` knows). A
model is worked on in a process of its own rank, which is ended where it takes longer than ``--limit`` seconds, and begun anew where
it dies: a crash is a result like another. One JSON line per model; the page beside them is made from them. A run does what the file
lacks for this code (``--fresh``: everything; ``--keep``: only what no code has passed). Ends with status 1 where a model is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from places import EVIDENCE, ROOT
from results import Results, options, quiet
from survey_models import MODELS
from survey_page import write_page
from workers import WorkerPool

from autopar.capture import reference
from autopar.errors import AutoparError, UsageError
from autopar.measure import EXACT, compare
from autopar.verify import Subject, check_plan, kinds, make_subject

RESULTS = EVIDENCE / "survey.jsonl"
DEVICES = 2
KINDS = (
    f"data {DEVICES}, zero 3",
    f"tensor {DEVICES}",
    f"tensor+sequence {DEVICES}",
    f"expert {DEVICES}",
    f"pipeline {DEVICES}",
    f"recompute in part, data {DEVICES}, zero 3",
)
LIMIT_S = 240


# -- one model, in the process that works ------------------------------------------------------------------------------


def examine(name: str, wanted: list[str], pool: WorkerPool) -> dict[str, Any]:
    """The line of a model: what one device and every plan gave."""
    model, batch, loss_fn = MODELS[name].make()
    parameters = sum(p.numel() for p in model.parameters())
    start_s = time.perf_counter()
    try:
        subject = make_subject(model, batch, loss_fn, name=name)
    except AutoparError as error:
        return {"outcome": "refused", "reason": error.message}
    line: dict[str, Any] = {"parameters": parameters, "capture_s": round(time.perf_counter() - start_s, 2)}
    line["layers"] = len(subject.graph.layers)
    plans: dict[str, Any] = {"one device": _on_one_device(subject)}
    for kind in kinds(DEVICES):
        if not wanted or kind.name in wanted:
            plans[kind.name] = _under(kind, subject, pool)
    return line | {"plans": plans} | verdict(plans)


def _on_one_device(subject: Subject) -> dict[str, Any]:
    """The captured graph, held against the model."""
    state = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in subject.state.items()}
    loss = reference.run(subject.graph, state, subject.batch)
    loss.backward()
    found = {n: t.grad for n, t in state.items() if n in subject.gradients and t.grad is not None}
    error = compare(float(loss.detach()), found, subject.loss, subject.gradients)
    return {"error": error.value, "where": error.where}


def _under(kind: Any, subject: Subject, pool: WorkerPool) -> dict[str, Any]:
    start_s = time.perf_counter()
    try:
        plan = kind.plan(subject.graph)
    except UsageError as error:
        return {"reason": error.message}
    except Exception as error:
        return {"failure": sentence(error), "at": place(error)}
    try:
        outcome = check_plan(subject, plan, pool)
    except UsageError as error:
        return {"failure": f"offered, then refused: {error.message}"}
    except Exception as error:
        return {"failure": sentence(error), "at": place(error)}
    seconds = round(time.perf_counter() - start_s, 2)
    return {"error": outcome.error.value, "where": outcome.error.where, "seconds": seconds}


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
            return {"outcome": "failed", "reason": f"{kind}: {plan['failure']}"}
    return {"outcome": "exact", "error": max(plan["error"] for plan in ran.values())}


def work(connection: Connection, wanted: list[str]) -> None:
    """In the process that works: answer names with lines until there are no more."""
    os.setsid()  # so that all that it starts can be ended with it
    quiet()
    torch.set_num_threads(1)
    with WorkerPool(DEVICES) as pool:
        while (name := connection.recv()) is not None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    line = examine(name, wanted, pool)
            except Exception as error:
                line = {"outcome": "failed", "reason": sentence(error), "at": place(error)}
            connection.send(line)


# -- the process that asks ---------------------------------------------------------------------------------------------


class Worker:
    """A process that works; a model that ends or outlasts it gets that as its line, and the next model a new one."""

    def __init__(self, wanted: list[str]) -> None:
        self.wanted = wanted
        self.process: Any = None
        self.connection: Any = None

    def line(self, name: str, limit_s: float) -> dict[str, Any]:
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=work, args=(theirs, self.wanted))
            self.process.start()
            theirs.close()
        self.connection.send(name)
        try:
            if self.connection.poll(limit_s):
                return self.connection.recv()
            line = {"outcome": "failed", "reason": f"no result after {limit_s:.0f} s"}
        except EOFError:
            self.process.join()
            line = {"outcome": "failed", "reason": f"the process ended with {self.process.exitcode}"}
        self.close()
        return line

    def close(self) -> None:
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.process = None


def results_in(path: Path) -> Results:
    return Results(path, ("model",), lambda line: line["outcome"] in ("exact", "refused"))


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = options(__doc__, RESULTS)
    parser.add_argument("--models", metavar="NAMES", help="these models only, separated by commas")
    parser.add_argument("--groups", metavar="NAMES", help="models of these groups only, separated by commas")
    parser.add_argument("--kinds", metavar="NAMES", help="these kinds of plans, separated by semicolons; all")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one model")
    return parser.parse_args(argv)


def chosen(args: argparse.Namespace) -> list[str]:
    names = [name for name, entry in MODELS.items() if not args.groups or entry.group in args.groups.split(",")]
    if not args.models:
        return names
    unknown = set(args.models.split(",")) - set(MODELS)
    if unknown:
        raise SystemExit(f"there is no model {', '.join(sorted(unknown))}")
    return [name for name in names if name in args.models.split(",")]


def main() -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    args = arguments()
    results = results_in(args.results)
    names, done = chosen(args), results.kept(args)
    wanted = [] if args.kinds == "all" else args.kinds.split(";") if args.kinds else list(KINDS)
    worker = Worker(wanted)
    columns = (TextColumn("{task.description:26}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            for name in progress.track(names):
                progress.update(progress.task_ids[0], description=name)
                if (name,) in done:
                    continue
                start_s = time.perf_counter()
                line = {"model": name, "group": MODELS[name].group} | worker.line(name, args.limit)
                line |= {"seconds": round(time.perf_counter() - start_s, 1)}
                results.append(anywhere(line))  # after every model, so that an interrupted run can be resumed
                if line["outcome"] != "exact":
                    said = {key: line.get(key) for key in ("model", "outcome", "reason", "at", "seconds")}
                    progress.console.print(json.dumps(said), markup=False, highlight=False, soft_wrap=True)
    finally:
        worker.close()
    return finish(args, names)


def anywhere(line: dict[str, Any]) -> dict[str, Any]:
    """A line that says which file is meant and not where this machine keeps it."""
    if "reason" not in line:
        return line
    return line | {"reason": re.sub(r"/\S*/(?:site-packages/|(?=tests/))", "", line["reason"])}


def finish(args: argparse.Namespace, names: list[str]) -> int:
    """Keep the last line of each model in the models' order, write the page, say how it went; the exit status."""
    lines = results_in(args.results).tidy((name,) for name in MODELS)
    write_page(lines, args.results.with_suffix(".md"), len(MODELS))
    count = {
        outcome: sum(line["outcome"] == outcome for line in lines)
        for outcome in ("exact", "refused", "wrong", "failed")
    }
    print(", ".join(f"{number} {outcome}" for outcome, number in count.items()), f"of {len(MODELS)}: {args.results}")
    return 1 if any(line["outcome"] == "wrong" for line in lines if line["model"] in names) else 0


if __name__ == "__main__":
    sys.exit(main())
