"""Predicted against measured step time of emitted programs: ``make report NAME=measured-time`` writes ``docs/evidence/measured-time.md``.

Run after ``autopar profile``, on a machine that does nothing else. For each model and number of processes, sixteen hand-made plans and
the automatic one are open in the same gloo processes and take turns: a round visits each of them once, in an order drawn anew, and
times a few steps after one that is not timed. A plan's time is the median over rounds. Spearman's rank correlation is over the
hand-made plans; the automatic plan's regret is how much slower it is than the fastest of all, as the median over rounds of the
ratio within the round.

One JSON line per plan; a run does the models and numbers of processes that the file lacks (``--fresh``: all).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measured_plans import LARGE, time_kinds
from places import EVIDENCE

from autopar.bench.models import BenchModel
from autopar.capture import capture
from autopar.cli.pricing import price_plan
from autopar.devices import Cluster, parse
from autopar.emit import emit
from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.price import Pricer
from autopar.run.processes import Processes
from autopar.search import SearchOptions, search
from autopar.shard import annotate

RESULTS, PAGE = EVIDENCE / "measured-time.jsonl", EVIDENCE / "measured-time.md"
AUTOMATIC = "automatic"
TIMEOUT_S = 600.0


def plans(graph: Graph, cluster: Cluster) -> dict[str, Plan]:
    """The automatic plan and the hand-made ones that the model admits, priced."""
    pricer = Pricer(graph, cluster, "float32")
    found = {AUTOMATIC: search(graph, cluster, pricer, SearchOptions(precision="float32"))}
    for kind in time_kinds(cluster.count):
        try:
            found[kind.name] = price_plan(graph, cluster, kind.plan(graph), pricer)
        except UsageError as error:
            print(f"{kind.name}: not admitted: {error.message}", file=sys.stderr)
    return found


def measure(subject: BenchModel, processes: int, rounds: int, steps: int, seed: int) -> list[dict[str, Any]]:
    """One line for every plan of one model on so many processes."""
    torch.manual_seed(seed)
    module = subject.build()
    graph = annotate(capture(module, subject.batch(0), subject.loss_fn, name=subject.name))
    cluster = parse(processes)
    made = plans(graph, cluster)
    times: dict[str, list[float]] = {name: [] for name in made}
    losses: dict[str, float] = {}
    workers = Processes(processes)
    with tempfile.TemporaryDirectory() as home:
        try:
            workers.call("autopar.run.remote:join", "cpu", TIMEOUT_S)
            state, names = Path(home) / "state.pt", [value.name for value in graph.inputs]
            torch.save(module.state_dict(), state)
            for i, (name, plan) in enumerate(made.items()):
                emit(graph, plan, Path(home) / str(i))
                arguments = (name, str(Path(home) / str(i)), names, 1e-4, str(state), "cpu")
                workers.call("autopar.bench.remote:open_program", *arguments, timeout_s=TIMEOUT_S)
            order = list(made)
            for number in range(rounds):
                random.Random(seed + number).shuffle(order)
                for name in order:
                    answer = workers.call("autopar.bench.remote:steps", name, subject.name, 0, steps + 1, timeout_s=600)
                    times[name].append(statistics.median(answer[0]["seconds"][1:]))
                    losses.setdefault(name, answer[0]["losses"][0])
                print(f"{subject.name} on {processes}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        finally:
            workers.close()
    spread = max(losses.values()) - min(losses.values())
    assert spread < 1e-3 * abs(min(losses.values())), f"the programs do not compute the same: {losses}"
    return [
        {
            "model": subject.name,
            "processes": processes,
            "plan": name,
            "predicted_s": plan.prediction.step_time_s,
            "measured_s": statistics.median(times[name]),
            "rounds_s": times[name],
            "chosen": describe(plan) if name == AUTOMATIC else "",
            "notes": list(cluster.notes),
        }
        for name, plan in made.items()
    ]


def describe(plan: Plan) -> str:
    """The automatic plan in a few words."""
    mesh = " x ".join(f"{axis.name} {axis.size}" for axis in plan.mesh if axis.size > 1) or "one device"
    stages = f", {plan.pipeline} stages" if plan.pipeline > 1 else ""
    zero = sorted({layer.strategy.zero for layer in plan.layers})
    return f"{mesh}{stages}, {plan.microbatches} microbatches, ZeRO {'/'.join(map(str, zero))}"


def score(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Of one model on one number of processes: Spearman, regret, median error of the prediction, number of plans."""
    by_hand = [line for line in lines if line["plan"] != AUTOMATIC]
    automatic = next(line for line in lines if line["plan"] == AUTOMATIC)
    best = min(lines, key=lambda line: line["measured_s"])
    ratios = [ours / theirs for ours, theirs in zip(automatic["rounds_s"], best["rounds_s"], strict=True)]
    errors = [abs(line["predicted_s"] / line["measured_s"] - 1) for line in lines]
    ranks = [np.argsort(np.argsort([line[key] for line in by_hand])) for key in ("predicted_s", "measured_s")]
    return {
        "spearman": float(np.corrcoef(*ranks)[0, 1]),
        "regret": statistics.median(ratios) - 1,
        "time_median_error": statistics.median(errors),
        "plans": len(by_hand),
    }


def page(lines: list[dict[str, Any]]) -> str:
    """``docs/evidence/measured-time.md``."""
    out = [
        "# Predicted against measured step time",
        "",
        "Generated by `make report NAME=measured-time`, after `autopar profile`. Emitted programs (float32, AdamW, gloo, one thread a "
        "process): medians over rounds in which all plans take turns. Regret is "
        "how much slower the automatic plan is than the fastest of all, by hand or not.",
        "",
        "| model | processes | plans by hand | Spearman | regret of the automatic plan | median error |",
        "|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["model"], line["processes"]), []).append(line)
    for (model, processes), found in groups.items():
        s = score(found)
        out.append(
            f"| {model} | {processes} | {s['plans']} | {s['spearman']:.2f} | {s['regret']:.1%} | {s['time_median_error']:.0%} |"
        )
    for (model, processes), found in groups.items():
        out += [
            "",
            f"## {model} on {processes} processes",
            "",
            "| plan | predicted | measured | rounds |",
            "|---|---|---|---|",
        ]
        for line in sorted(found, key=lambda line: line["measured_s"]):
            name = f"{line['plan']}: {line['chosen']}" if line["chosen"] else line["plan"]
            low, high = min(line["rounds_s"]) * 1e3, max(line["rounds_s"]) * 1e3
            out.append(
                f"| {name} | {line['predicted_s'] * 1e3:.0f} ms | {line['measured_s'] * 1e3:.0f} ms | {low:.0f} to {high:.0f} ms |"
            )
    return "\n".join([*out, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="measure everything anew")
    parser.add_argument("--models", default=",".join(LARGE), metavar="NAME,...")
    parser.add_argument("--processes", default="2,4", metavar="N,...")
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="timed steps of a measurement")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    options = parser.parse_args()
    old = [json.loads(text) for text in RESULTS.read_text().splitlines()] if RESULTS.is_file() else []
    lines = [] if options.fresh else old
    for processes in map(int, options.processes.split(",")):
        for name in options.models.split(","):
            if any((line["model"], line["processes"]) == (name, processes) for line in lines):
                continue
            lines += measure(LARGE[name], processes, options.rounds, options.steps, options.seed)
            RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    PAGE.write_text(page(lines))


if __name__ == "__main__":
    main()
