"""Every model under every kind of plan: ``python tests/matrix.py [--results docs/exactness.jsonl] [--resume]``.

Each case is emitted, type-checked, run on real gloo processes, and compared with eager PyTorch on one device; its program
for 64 devices is emitted and type-checked too. One JSON line per case; the page beside the results is generated from them.
Ends with status 1 if a case is not exact.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import sys
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from exactness import KINDS, MODELS, ROWS, Kind, run_case
from torch import Tensor
from workers import WorkerPool

from autopar.capture import WholeFloat64, capture
from autopar.check import check_program
from autopar.emit import emit
from autopar.graph import Graph
from autopar.measure import EXACT
from autopar.plan import Plan, Role, Strategy
from autopar.search.hand import hand_plan, make_mesh

ROOT = Path(__file__).resolve().parent.parent
DEVICES = 64
ROWS_AT_64 = 128  # 64 devices in two microbatches, or 16 in eight


# -- 64 devices -------------------------------------------------------------------------------------------------------


@functools.cache
def graph_at_64(name: str) -> Graph:
    """The model with a batch of ``ROWS_AT_64`` rows. Nothing of it is run, so the rows are those of the small batch again."""
    torch.manual_seed(0)
    model, batch, loss_fn = MODELS[name]()

    def longer(tensor: Tensor) -> Tensor:
        return tensor.repeat(ROWS_AT_64 // ROWS, *(1 for _ in tensor.shape[1:]))

    rows: Any = {k: longer(t) for k, t in batch.items()} if isinstance(batch, dict) else tuple(map(longer, batch))
    with WholeFloat64():
        return capture(model.double().train(), rows, loss_fn, precision="float64", name=name)


def plan_at_64(graph: Graph, kind: Kind) -> Plan:
    """The kind's plan with more data parallelism: a larger data degree, or an outermost data axis where layers differ."""
    more = DEVICES // kind.devices
    if kind.mixed is None:
        return hand_plan(graph, **(kind.options | {"data": kind.options.get("data", 1) * more}))
    small = kind.mixed(graph)
    assert small.pipeline == 1
    mesh = make_mesh(("data", more), *((axis.name, axis.size) for axis in small.mesh))
    wider = {
        i: Strategy((Role.DATA, *layer.strategy.roles), layer.strategy.zero, layer.strategy.recompute)
        for i, layer in enumerate(small.layers)
    }
    return hand_plan(graph, mesh=mesh, strategies=wider, microbatches=small.microbatches)


def check_at_64(model: str, kind: Kind) -> int:
    """Emit the program for 64 devices and type-check it; the number of stages checked."""
    graph = graph_at_64(model)
    plan = plan_at_64(graph, kind)
    assert plan.device_count == DEVICES, plan.device_count
    with tempfile.TemporaryDirectory() as folder:
        emit(graph, plan, folder)
        return check_program(folder)


# -- cases ------------------------------------------------------------------------------------------------------------


def case(model: str, kind: Kind, pool: WorkerPool) -> dict[str, Any]:
    """One line of the results. What goes wrong is recorded as ``failure`` and does not end the matrix."""
    start_s = time.perf_counter()
    line: dict[str, Any] = {"model": model, "kind": kind.name, "devices": kind.devices}
    try:
        outcome = run_case(model, kind, pool)
        line |= {"error": outcome.error.value, "where": outcome.error.where, "stages_typed": outcome.stages_typed}
        line |= {"stages_typed_at_64": check_at_64(model, kind)}
    except Exception as error:  # whatever it is, it is this case's result
        line |= {"failure": f"{type(error).__name__}: {error}".splitlines()[0]}
    return line | {"seconds": round(time.perf_counter() - start_s, 2), "torch": torch.__version__}


def passed(line: dict[str, Any]) -> bool:
    return "failure" not in line and line["error"] <= EXACT


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


# -- the page ---------------------------------------------------------------------------------------------------------


def page(results: list[dict[str, Any]]) -> str:
    """The results as a document: kinds down, models across."""
    found = {(line["model"], line["kind"]): line for line in results}
    models = list(dict.fromkeys(line["model"] for line in results))
    kinds = dict.fromkeys(line["kind"] for line in results)
    exact = sum(map(passed, results))
    worst = max((line["error"] for line in results if "failure" not in line), default=0.0)
    versions = sorted({line["torch"] for line in results})
    stages = sum(line.get("stages_typed", 0) for line in results)
    stages_64 = sum(line.get("stages_typed_at_64", 0) for line in results)
    rows = [f"| plan | devices | {' | '.join(models)} |", f"|---|---|{'---|' * len(models)}"]
    for kind in kinds:
        lines = [found.get((model, kind)) for model in models]
        devices = next(line["devices"] for line in lines if line is not None)
        rows.append(f"| {kind} | {devices} | {' | '.join(map(_cell, lines))} |")
    return f"""# Exactness

Each number is the largest error of a training step's loss and gradients under a plan, against eager PyTorch on one device, in float64:
`max|g - g0| / max(max|g0|, 1e-6 max|all gradients|)` over all parameters, and the loss's relative error. Below {EXACT:.0e} the two are
the same up to rounding. {exact} of {len(results)} cases are; the largest error is {worst:.1e}.

{chr(10).join(rows)}

The models are small, four blocks each, and made to be awkward: masked labels that fall unevenly over microbatches and slices, tied and
fused weights, biases, padding ({", ".join(models)}). Each program was also type-checked ({stages} stages), and so was the same plan
widened to {DEVICES} devices ({stages_64} stages).

Made by `make matrix` with torch {", ".join(versions)}, gloo, on CPUs, from the lines of [exactness.jsonl](exactness.jsonl). Do not edit.
"""


def _cell(line: dict[str, Any] | None) -> str:
    if line is None:
        return ""
    if "failure" in line:
        return line["failure"].replace("|", "/")
    return f"{line['error']:.1e}" if passed(line) else f"**{line['error']:.1e}** in {line['where']}"


# -- the command ------------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "exactness.jsonl")
    parser.add_argument("--resume", action="store_true", help="keep what passed with this torch, and do the rest")
    return parser.parse_args()


def quiet() -> None:
    """What libraries say at every capture is not about the cases."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="spmd_types")
    from transformers.utils import logging

    logging.set_verbosity_error()


def main() -> int:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    args = arguments()
    quiet()
    torch.set_num_threads(1)
    kept = [line for line in read(args.results) if passed(line) and line["torch"] == torch.__version__]
    done = {(line["model"], line["kind"]): line for line in kept} if args.resume else {}
    order = [(model, kind) for model in MODELS for kind in KINDS]
    columns = (TextColumn("{task.description:50}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    pools = {count: WorkerPool(count) for count in sorted({kind.devices for kind in KINDS})}
    try:
        with Progress(*columns, console=_stderr()) as progress:
            task = progress.add_task("", total=len(order))
            for model, kind in order:
                progress.update(task, description=f"{model}: {kind.name}")
                if (model, kind.name) not in done:
                    done[model, kind.name] = line = case(model, kind, pools[kind.devices])
                    if not passed(line):
                        progress.console.print(json.dumps(line), markup=False)
                    _write(args.results, done)  # after every case, so that an interrupted run can be resumed
                progress.advance(task)
    finally:
        for pool in pools.values():
            pool.close()
    results = [done[model, kind.name] for model, kind in order]
    _write(args.results, {(line["model"], line["kind"]): line for line in results})
    args.results.with_suffix(".md").write_text(page(results))
    bad = sum(not passed(line) for line in results)
    print(f"{len(results) - bad} of {len(results)} cases are exact: {args.results}")
    print(
        f"{platform.python_implementation()} {platform.python_version()}, spmd-types {version('spmd-types')}",
        file=sys.stderr,
    )
    return 1 if bad else 0


def _stderr() -> Any:
    from rich.console import Console

    return Console(stderr=True)


def _write(path: Path, lines: dict[tuple[str, str], dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines.values()))


if __name__ == "__main__":
    sys.exit(main())
