"""Predicted against measured peak memory of emitted programs (``make report NAME=measured-memory``).

Each case is emitted and trained for two steps in gloo processes on the CPU, under PyTorch's memory profiler from before the program is
loaded. Every allocation and release of the CPU allocator is then an event with its bytes; their running sum over the second step (the
optimizer's state exists by then) is what the program holds, temporaries inside of kernels included, and its maximum is what is
compared with the plan's prediction for that device. The batch is made before and counts with neither.

One JSON line per case; a run measures what the file lacks (``--fresh``: everything), and predicts all anew. Bytes do not depend on how busy
the machine is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measured_plans import SMALL, memory_kinds
from places import EVIDENCE
from torch import Tensor
from workers import WorkerPool

from autopar.capture import capture
from autopar.devices import parse
from autopar.emit import emit
from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.price import Pricer
from autopar.run import remote
from autopar.run.allocations import Allocations
from autopar.search import reprice
from autopar.shard import annotate
from autopar.verify import PlanKind

RESULTS, PAGE = EVIDENCE / "measured-memory.jsonl", EVIDENCE / "measured-memory.md"
PARTS = ("parameters", "gradients", "optimizer", "activations", "transients")


def peak(folder: str, batch: dict[str, Tensor]) -> dict[str, int]:
    """In a worker: bytes that the program holds between steps, and at most during its second step.

    gloo's threads hold a collective's tensors for a moment after it has ended, and what they free the profiler does not see: so every
    wait lasts a little longer than they do.
    """
    wait = dist.Work.wait

    def wait_longer(work: dist.Work, *timeout: Any) -> bool:
        done = wait(work, *timeout)
        time.sleep(0.005)
        return done

    dist.Work.wait = wait_longer  # type: ignore[method-assign]
    try:
        return profiled_steps(folder, batch)
    finally:
        dist.Work.wait = wait  # type: ignore[method-assign]


def profiled_steps(folder: str, batch: dict[str, Tensor]) -> dict[str, int]:
    """Two steps, and the allocations of the second."""
    memory = Allocations()
    with memory.recorded():
        options = {"optimizer": None, "lr": 1e-3, "seed": 0, "max_norm": None, "state": None}
        trainer = remote.open_trainer(folder, options, device="cpu", timeout_s=600)
        trainer.step(batch)
        with memory.step():
            trainer.step(batch)
    return {"at_rest": memory.at_rest_bytes, "peak": memory.peak_bytes}


def predicted(graph: Graph, kind: PlanKind) -> list[dict[str, int]]:
    """Bytes by part of every device of the line."""
    plan = kind.plan(graph)
    cluster = parse(plan.device_count)
    priced = reprice(graph, cluster, Pricer(graph, cluster, "float32"), plan, "float32")
    return [{part: int(getattr(stage.memory, part)) for part in PARTS} for stage in priced.stages[: plan.pipeline]]


def run_case(name: str, graph: Graph, kind: PlanKind, pool: WorkerPool) -> dict[str, Any]:
    """One line of the results; ``error`` is that of the device whose memory peaks highest."""
    plan = kind.plan(graph)
    names = [value.name for value in graph.inputs]
    batch = dict(zip(names, SMALL[name].batch(0), strict=True))
    with tempfile.TemporaryDirectory() as home:
        emit(graph, plan, Path(home))
        ranks = pool.run("measured_memory:peak", home, batch, timeout_s=300)
    size = plan.devices_per_stage
    seen = [max(rank["peak"] for rank in ranks[s * size : (s + 1) * size]) for s in range(plan.pipeline)]
    worst = max(range(len(seen)), key=lambda s: seen[s])
    line = {
        "model": name,
        "plan": kind.name,
        "processes": kind.devices,
        "measured_bytes": seen[worst],
        "stage": worst,
        "at_rest_bytes": max(rank["at_rest"] for rank in ranks[worst * size : (worst + 1) * size]),
        "stages": [{"measured": m} for m in seen],
    }
    return with_prediction(line, graph, kind)


def with_prediction(line: dict[str, Any], graph: Graph, kind: PlanKind) -> dict[str, Any]:
    """A line with its measurements, and what is predicted now."""
    stages = predicted(graph, kind)
    parts = stages[line["stage"]]
    total, measured = sum(parts.values()), line["measured_bytes"]
    seen = [stage["measured"] for stage in line["stages"]]
    return line | {
        "predicted_bytes": total,
        "error": total / measured - 1,
        "parts": parts,
        "stages": [{"predicted": sum(p.values()), "measured": m} for p, m in zip(stages, seen, strict=True)],
    }


def page(lines: list[dict[str, Any]]) -> str:
    """``docs/evidence/measured-memory.md``."""
    errors = [abs(line["error"]) for line in lines]
    rows = [
        f"| {line['model']} | {line['plan']} | {line['processes']} | {line['predicted_bytes'] / 2**20:.2f} "
        f"| {line['measured_bytes'] / 2**20:.2f} | {line['error']:+.1%} |"
        for line in lines
    ]
    return "\n".join(
        [
            "# Predicted against measured memory",
            "",
            "Generated by `make report NAME=measured-memory`. Peak memory of emitted programs (float32, AdamW) during a training step, on "
            "the device that uses most: predicted by the cost model, and measured by "
            "adding up the allocations and releases of PyTorch's CPU allocator.",
            "",
            f"{len(lines)} plans of {len({line['model'] for line in lines})} models: the error of the prediction is "
            f"{statistics.median(errors):.1%} in the median and {max(errors):.1%} at worst.",
            "",
            "| model | plan | processes | predicted MiB | measured MiB | error |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="measure everything anew")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose model and plan contain this")
    options = parser.parse_args()
    old = [json.loads(text) for text in RESULTS.read_text().splitlines()] if RESULTS.is_file() else []
    kept = {} if options.fresh else {(line["model"], line["plan"]): line for line in old}
    pools: dict[int, WorkerPool] = {}
    lines: list[dict[str, Any]] = []
    for name, subject in SMALL.items():
        torch.manual_seed(0)
        graph = annotate(capture(subject.build(), subject.batch(0), subject.loss_fn, name=name))
        for kind in memory_kinds():
            done = kept.get((name, kind.name))
            if done is not None or options.only not in f"{name} {kind.name}":
                lines += [with_prediction(done, graph, kind)] if done is not None else []
                continue
            try:
                kind.plan(graph)
            except UsageError as error:
                print(f"{name}, {kind.name}: not admitted: {error.message}", file=sys.stderr)
                continue
            pool = pools.setdefault(kind.devices, WorkerPool(kind.devices))
            lines.append(run_case(name, graph, kind, pool))
            print(f"{name}, {kind.name}: {lines[-1]['error']:+.1%} {lines[-1]['parts']}", file=sys.stderr, flush=True)
            RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for pool in pools.values():
        pool.close()
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))  # with what comes after the last new one
    PAGE.write_text(page(lines))


if __name__ == "__main__":
    main()
