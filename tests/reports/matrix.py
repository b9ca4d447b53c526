"""Every model under every kind of plan, and plans drawn at random: ``python tests/reports exactness`` (``make report NAME=exactness``).

Each case is emitted, type-checked, run on real gloo processes, and compared with eager PyTorch on one device; of every fourth the
program for 64 devices is emitted and type-checked too. One JSON line per case; the page beside them is generated from them. A kind
that a model does not admit leaves a line with the product's reason. Lines carry a fingerprint of the code: a run does what the
file lacks for this code (``--fresh``: everything; ``--keep``: only what no code has passed), ``--part 1/2`` half of the models, and
several parts may run at a time. ``--mixtures 500 --seed 7`` draws more plans than are kept. Ends with status 1 if a case is not exact.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from exactness import KINDS, MODELS, ROWS, subject
from matrix_page import passed, write_page
from places import EVIDENCE
from results import Results, available_bytes, options, quiet, time_limit
from torch import Tensor
from workers import WorkerPool

from autopar.capture import Float64Everywhere, capture
from autopar.checks.types import check_program
from autopar.emit import emit
from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.plan import Plan, Role, Strategy
from autopar.search.manual import make_mesh, manual_plan
from autopar.shard import annotate
from autopar.verify import PlanKind, Subject, check_plan
from autopar.verify.mixtures import describe, draw

RESULTS = EVIDENCE / "exactness.jsonl"
MIXTURES, SEED = 48, 1  # kept with the code
MIXTURE_DEVICES = (2, 4, 4, 4, 8)
DEVICES = 64
ROWS_AT_64 = 128  # 64 devices in two microbatches, or 16 in eight
CASE_S = 600  # longer than any case: what takes longer hangs
LEAST_MEMORY_BYTES = 4e9  # with less, all workers are ended and started anew


# -- 64 devices -------------------------------------------------------------------------------------------------------


@functools.cache
def graph_at_64(name: str) -> Graph:
    """The model with a batch of ``ROWS_AT_64`` rows. Nothing of it is run, so the rows are those of the small batch again."""
    torch.manual_seed(0)
    model, batch, loss_fn = MODELS[name]()

    def longer(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item.repeat(ROWS_AT_64 // ROWS, *(1 for _ in item.shape[1:]))
        if isinstance(item, dict):
            return {key: longer(value) for key, value in item.items()}
        return tuple(map(longer, item)) if isinstance(item, tuple | list) else item

    with Float64Everywhere():
        return annotate(capture(model.double().train(), longer(batch), loss_fn, precision="float64", name=name))


def plan_at_64(graph: Graph, kind: PlanKind) -> Plan:
    """The kind's plan with more data parallelism: a larger data degree, or an outermost data axis where layers differ."""
    more = DEVICES // kind.devices
    if "mesh" in kind.options:
        axes = {"data": 1} | {axis.name: axis.size for axis in kind.options["mesh"]}
        mesh = make_mesh(*(axes | {"data": axes["data"] * more}).items())
        return PlanKind(kind.name, DEVICES, kind.options | {"mesh": mesh}).plan(graph)
    if kind.mixed is None:
        return PlanKind(kind.name, DEVICES, kind.options | {"data": kind.options.get("data", 1) * more}).plan(graph)
    small = kind.mixed(graph)
    assert small.pipeline == 1
    mesh = make_mesh(("data", more), *((axis.name, axis.size) for axis in small.mesh))
    wider = {
        i: Strategy((Role.DATA, *layer.strategy.roles), layer.strategy.zero, options=layer.strategy.options)
        for i, layer in enumerate(small.layers)
    }
    return manual_plan(graph, mesh=mesh, strategies=wider, microbatches=small.microbatches)


def check_at_64(model: str, kind: PlanKind) -> int:
    """Emit the program for 64 devices and type-check it; the number of stages checked."""
    graph = graph_at_64(model)
    plan = plan_at_64(graph, kind)
    assert plan.device_count == DEVICES, plan.device_count
    with tempfile.TemporaryDirectory() as folder:
        emit(graph, plan, folder)
        return check_program(folder)


# -- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model and how to plan it; ``at_64`` is the kind whose program for 64 devices is checked too."""

    model: str
    kind: str
    devices: int
    plan: Callable[[Graph], Plan]
    at_64: PlanKind | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.model, self.kind


def kind_cases() -> list[Case]:
    """Every model under every kind; the 64-device check moves over the kinds from model to model."""
    return [
        Case(
            model,
            kind.name,
            kind.devices,
            kind.plan,
            kind if (m + k) % 4 == 0 and DEVICES % kind.devices == 0 else None,
        )
        for m, model in enumerate(MODELS)
        for k, kind in enumerate(KINDS)
    ]


def mixture_cases(count: int, seed: int) -> list[Case]:
    """``count`` draws; each is a function of the seed, its number and its model, which go round."""
    names = list(MODELS)
    cases = []
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        devices = rng.choice(MIXTURE_DEVICES)
        plan = functools.partial(_drawn, devices=devices, rng=rng)
        cases.append(Case(names[number % len(names)], f"mixture {seed}.{number}", devices, plan))
    return cases


def _drawn(graph: Graph, devices: int, rng: random.Random) -> Plan:
    return draw(graph, devices, rng)


def case_line(case: Case, pools: dict[int, WorkerPool]) -> dict[str, Any]:
    """One line of the results. What goes wrong is recorded as ``failure`` and does not end the matrix."""
    start_s = time.perf_counter()
    line: dict[str, Any] = {"model": case.model, "kind": case.kind, "devices": case.devices}
    try:
        with time_limit(CASE_S):
            line |= _result(case, pools)
    except Exception as error:  # whatever it is, it is this case's result
        line |= {"failure": f"{type(error).__name__}: {error}".splitlines()[0]}
    return line | {"seconds": round(time.perf_counter() - start_s, 2), "torch": torch.__version__}


def _result(case: Case, pools: dict[int, WorkerPool]) -> dict[str, Any]:
    given = _subject(case.model)
    try:
        plan = case.plan(given.graph)
    except UsageError as error:
        return {"reason": error.message}
    pool = pools.setdefault(case.devices, WorkerPool(case.devices))
    line: dict[str, Any] = {}
    if any(layer.strategy.options.compiled for layer in plan.layers):
        line["backend"] = backend_of(case)
        pool.run("matrix:compile_with", line["backend"])
    outcome = check_plan(given, plan, pool)
    line |= {"error": outcome.error.value, "where": outcome.error.where}
    line["stages_typed"] = outcome.stages_typed
    if case.kind.startswith("mixture"):
        line["plan"] = describe(plan)
    if case.at_64 is not None:
        with contextlib.suppress(UsageError):  # 64 devices may be too many for what 4 share
            line["stages_typed_at_64"] = check_at_64(case.model, case.at_64)
    return line


def backend_of(case: Case) -> str:
    """What compiles a case's layers: every eighth case torch's default, which takes a C++ compiler up to a minute for each; the others all
    of it but the code that it writes: its tracing, its operators, its cut between forward and backward."""
    number = int(hashlib.sha256(f"{case.model} {case.kind}".encode()).hexdigest(), 16)
    return "inductor" if number % 8 == 0 else "aot_eager_decomp_partition"


_compile = torch.compile


def compile_with(backend: str) -> None:
    """In a worker: the backend of the programs that follow."""
    torch._dynamo.reset()
    torch.compile = functools.partial(_compile, backend=backend)


_broken: dict[str, Exception] = {}


def _subject(model: str) -> Subject:
    """The model's subject; one that cannot be made is not tried again for every kind."""
    if model not in _broken:
        try:
            return subject(model)
        except Exception as error:
            _broken[model] = error
    raise _broken[model]


# -- the command ------------------------------------------------------------------------------------------------------


def results_in(path: Path = RESULTS) -> Results:
    return Results(path, ("model", "kind"), passed)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = options(__doc__, RESULTS)
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the I-th of N parts of the models")
    parser.add_argument("--models", metavar="NAMES", help="these models only, separated by commas")
    parser.add_argument(
        "--devices", metavar="NUMBERS", help="cases of these numbers of processes only, separated by commas"
    )
    parser.add_argument("--mixtures", type=int, metavar="N", help="draw N plans, and do nothing else")
    parser.add_argument("--seed", type=int, default=SEED, help="of the draws")
    return parser.parse_args(argv)


def chosen(args: argparse.Namespace) -> list[Case]:
    """The cases that the arguments ask for, model by model."""
    cases = (
        kind_cases() + mixture_cases(MIXTURES, SEED)
        if args.mixtures is None
        else mixture_cases(args.mixtures, args.seed)
    )
    part, parts = map(int, args.part.split("/"))
    models = list(MODELS)[part - 1 :: parts]
    if args.models:
        models = [model for model in models if model in args.models.split(",")]
    if args.devices:
        cases = [case for case in cases if str(case.devices) in args.devices.split(",")]
    return sorted((case for case in cases if case.model in models), key=lambda case: models.index(case.model))


def main() -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    args = arguments()
    quiet()
    torch.set_num_threads(1)
    if args.mixtures is not None and args.results == RESULTS:
        args.results = Path(tempfile.gettempdir()) / f"autopar-mixtures-{args.seed}.jsonl"
    results = results_in(args.results)
    cases, skipped = chosen(args), results.kept(args)
    pools: dict[int, WorkerPool] = {}
    columns = (TextColumn("{task.description:50}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            for case in progress.track(cases):
                progress.update(progress.task_ids[0], description=f"{case.model}: {case.kind}")
                if case.key not in skipped:
                    if available_bytes() < LEAST_MEMORY_BYTES:
                        close(pools)
                    line = case_line(case, pools)
                    results.append(line)  # after every case, so that an interrupted run can be resumed
                    if not passed(line):
                        progress.console.print(json.dumps(line), markup=False)
    finally:
        close(pools)
    return finish(args, cases)


def close(pools: dict[int, WorkerPool]) -> None:
    """End the workers of all pools; the next case starts new ones. Workers grow with every case, by a megabyte or so."""
    for pool in pools.values():
        pool.close()


def finish(args: argparse.Namespace, cases: list[Case]) -> int:
    """Tidy the file, write the page, and say how it went; the exit status."""
    everything = kind_cases() + mixture_cases(MIXTURES, SEED) if args.mixtures is None else cases
    lines = results_in(args.results).tidy(case.key for case in everything)
    if args.mixtures is None:
        write_page(lines, args.results.with_suffix(".md"), [kind.name for kind in KINDS])
    mine = {case.key for case in cases}
    bad = [line for line in lines if (line["model"], line["kind"]) in mine and not passed(line)]
    ran = [line for line in lines if "reason" not in line]
    print(f"{len(ran)} cases, {len(lines) - len(ran)} not admitted, {len(bad)} not exact: {args.results}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
