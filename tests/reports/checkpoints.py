"""Training that goes on under another plan, pairs of plans drawn at random: ``make report NAME=checkpoints``.

A case draws a model, an optimizer, two numbers of processes and a plan for each. The first program trains and saves, the second one loads
and trains on. All losses, and the parameters and buffers at the end, are compared with eager PyTorch on one device, in float64.

One JSON line per case; the page is generated from them. A run does what the file lacks for this code (``--fresh``: everything; ``--keep``:
only what no code has passed). ``--count 500 --seed 7 --results FILE`` draws others. Ends with status 1 if a case is not exact.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from exactness import KINDS, subject
from places import EVIDENCE
from results import Results, options, quiet
from resumed import STEPS, chain
from workers import WorkerPool

from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.measure import EXACT
from autopar.plan import Plan
from autopar.verify.mixtures import describe, draw

RESULTS = EVIDENCE / "checkpoints.jsonl"
COUNT, SEED = 80, 1
MODELS = ("mlp", "gpt2", "llama", "mixtral", "odd_gpt2", "odd_llama", "adapters", "bert")
DEVICES = (1, 2, 2, 4, 4)
OPTIMIZERS = ("adamw", "momentum")
ELEMENTWISE = 64
"""The number of pairs with ``OPTIMIZERS``; the others are with optimizers that look at whole tensors, in turn."""
WHOLE = ("adafactor", "muon")


def case_line(number: int, seed: int, pools: dict[int, WorkerPool]) -> dict[str, Any]:
    """One line of the results. What goes wrong is recorded as ``failure`` and does not end the report."""
    rng, began = random.Random(f"{seed} {number}"), time.perf_counter()
    model, optimizer = MODELS[number % len(MODELS)], rng.choice(OPTIMIZERS)
    if number >= ELEMENTWISE:
        optimizer = WHOLE[number // len(MODELS) % len(WHOLE)]
    line: dict[str, Any] = {"case": f"{seed}.{number}", "model": model, "optimizer": optimizer}
    try:
        graph = subject(model).graph
        plans = [_plan(graph, rng) for _ in range(2)]
        line["devices"] = [plan.device_count for plan in plans]
        line["plans"] = [describe(plan) for plan in plans]
        with tempfile.TemporaryDirectory() as folder:
            line["errors"] = chain(model, plans, optimizer, functools.partial(_pool, pools), Path(folder))
    except Exception as error:  # noqa: BLE001  whatever it is, it is this case's result
        line["failure"] = f"{type(error).__name__}: {error}".splitlines()[0]
    line |= {"seconds": round(time.perf_counter() - began, 2), "torch": torch.__version__}
    return line


def _plan(graph: Graph, rng: random.Random) -> Plan:
    """A plan whose layers differ, or a kind of plan: with ZeRO 2 and 3, hybrid sharding and pipelines of several chunks more often."""
    if rng.random() < 0.5:
        return draw(graph, rng.choice(DEVICES), rng)
    kinds = [kind for kind in KINDS if kind.devices <= max(DEVICES)]
    while True:
        with contextlib.suppress(UsageError):  # not admitted by this model
            return rng.choice(kinds).plan(graph)


def _pool(pools: dict[int, WorkerPool], count: int) -> WorkerPool:
    return pools.setdefault(count, WorkerPool(count))


def passed(line: dict[str, Any]) -> bool:
    return "failure" not in line and max(line["errors"].values()) <= EXACT


# -- the page ---------------------------------------------------------------------------------------------------------


def page(lines: list[dict[str, Any]]) -> str:
    ran = [line for line in lines if "failure" not in line]
    worst = max((max(line["errors"].values()) for line in ran), default=0.0)
    versions = ", ".join(sorted({line["torch"] for line in lines}))
    rows = "".join(_row(line) for line in lines)
    return f"""# Checkpoints

A program trains for {STEPS} steps under one plan and saves a checkpoint; another program loads it under another plan and trains for
{STEPS} more. {sum(map(passed, lines))} of {len(lines)} pairs of plans are exact. The error is the largest relative error of any loss,
final parameter or final buffer, against an uninterrupted run of eager PyTorch on one device, in float64. Exact means at most {EXACT:.0e};
the largest error is {worst:.1e}. Before loading, the second program has other values and no optimizer state.

A seeded generator draws models, optimizers, numbers of processes and plans. Half of the plans are of the kinds in
[exactness](exactness.md), the other half have a randomly drawn strategy for each layer (`autopar/verify/mixtures.py`). Optimizers are
AdamW with amsgrad and weight decay, SGD with Nesterov momentum, and in the last {max(0, len(lines) - ELEMENTWISE)} pairs Adafactor, or
Muon together with AdamW, with a scheduler of warm-up and cosine. `python tests/reports checkpoints --count 500 --seed 7 --results FILE`
draws other pairs.

| model | optimizer | processes | saved under | loaded under | error |
|---|---|---|---|---|---|
{rows}
Made by `make report NAME=checkpoints` with torch {versions}, gloo, on CPUs, from the lines of [checkpoints.jsonl](checkpoints.jsonl).
Do not edit.
"""


def _row(line: dict[str, Any]) -> str:
    before, after = line.get("plans", ("", ""))
    devices = " → ".join(map(str, line.get("devices", ())))
    error = line["failure"] if "failure" in line else f"{max(line['errors'].values()):.0e}"
    return f"| {line['model']} | {line['optimizer']} | {devices} | {before} | {after} | {error} |\n"


# -- the command ------------------------------------------------------------------------------------------------------


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = options(__doc__, RESULTS)
    parser.add_argument("--count", type=int, default=COUNT, metavar="N", help="how many pairs")
    parser.add_argument("--seed", type=int, default=SEED, help="of the draws")
    return parser.parse_args(argv)


def main() -> int:
    args = arguments()
    quiet()
    torch.set_num_threads(1)
    results = Results(args.results, ("case",), passed)
    kept = results.kept(args)
    pools: dict[int, WorkerPool] = {}
    try:
        for number in range(args.count):
            if (f"{args.seed}.{number}",) not in kept:
                line = case_line(number, args.seed, pools)
                results.append(line)  # after every case, so that an interrupted run can be resumed
                print(json.dumps(line) if not passed(line) else f"{line['case']} {line['model']}", file=sys.stderr)
    finally:
        for pool in pools.values():
            pool.close()
    lines = results.tidy((f"{args.seed}.{number}",) for number in range(args.count))
    args.results.with_suffix(".md").write_text(page(lines))
    bad = [line for line in lines if not passed(line)]
    print(f"{len(lines)} pairs, {len(bad)} not exact: {args.results}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
