"""Ranks of large plans alone on one device, measured against the prediction: ``make report NAME=rehearsal`` writes
``docs/evidence/rehearsal.md``.

On a GPU (``--device cuda``) plans of published models at full size; elsewhere the same models at reduced width and few layers, whose plans
have the same axes, stages and schedules. Each rank runs the emitted program at its local shapes with collectives that return at once
(``autopar dev rehearse``). With ``--calibration FILE`` (of ``autopar profile``) prices are those of the ops measured on such a device.

One JSON line for each rank; a run does what the file lacks for its device (``--fresh``: everything).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from places import EVIDENCE

from autopar import zoo
from autopar.cli.pricing import price_plan
from autopar.compile import emit_program
from autopar.devices import parse
from autopar.planning import plan_model
from autopar.price import Pricer
from autopar.run.rehearsal import random_batch, rank_of_each_position, rehearse, with_free_communication
from autopar.search import SearchOptions
from autopar.units import seconds, size
from autopar.workload import Workload
from autopar.zoo.hf import build_config

RESULTS, PAGE = EVIDENCE / "rehearsal.jsonl", EVIDENCE / "rehearsal.md"
STEPS = 3
GPU = "H100-80GB"
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and which of its ranks to rehearse (none: the first of every stage). ``reduced`` are sizes of the model's
    configuration for a processor."""

    name: str
    model: str
    devices: str
    kind: str
    global_batch: int
    pins: Mapping[str, Any] = field(default_factory=dict)
    seq: int | None = None
    reduced: Mapping[str, int] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()


NARROW = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "vocab_size": 2048,
}

CASES = (
    Case("8B on 8", "llama3-8b", f"1x8x{GPU}", "cuda", 32),
    Case(
        "70B on 64, 4 stages",
        "llama3-70b",
        f"8x8x{GPU}",
        "cuda",
        32,
        {"pipeline": 4, "tensor": 8, "schedule": "1f1b"},
        ranks=(0, 48),
    ),
    Case("70B on 64", "llama3-70b", f"8x8x{GPU}", "cuda", 64),
    Case(
        "8B narrow on 64, ZeRO 3",
        "llama3-8b",
        f"8x8x{GPU}",
        "cpu",
        64,
        {"data": 64, "zero": 3, "compile": False},
        256,
        NARROW,
    ),
    Case(
        "70B narrow on 64, 4 stages",
        "llama3-70b",
        f"8x8x{GPU}",
        "cpu",
        32,
        {"pipeline": 4, "tensor": 8, "schedule": "1f1b", "compile": False},
        256,
        NARROW,
    ),
    Case(
        "405B narrow on 1,024, 8 stages",
        "llama3-405b",
        f"128x8x{GPU}",
        "cpu",
        128,
        {"pipeline": 8, "tensor": 8, "microbatches": 8, "schedule": "1f1b", "recompute": "full", "compile": False},
        256,
        NARROW,
    ),
)


def run_case(case: Case, calibration: str | None, done: set[int]) -> Iterator[Line]:
    """A line for every rank that is not ``done``."""
    entry = zoo.find(case.model)
    precision = "bfloat16" if case.kind == "cuda" else "float32"
    module, batch = build_config(
        {**entry.config, **case.reduced}, case.seq or entry.seq, case.global_batch, precision, "meta"
    )
    cluster = parse(case.devices, calibration=calibration)
    options = SearchOptions(pin=dict(case.pins), time_limit_s=60)
    graph, plan = plan_model(Workload(module, batch, None, case.name, precision), cluster, options, capture_check=False)
    free = with_free_communication(cluster)
    alone = price_plan(graph, free, plan, Pricer(graph, free, plan.precision))
    ranks = [rank for rank in case.ranks or rank_of_each_position(plan) if rank not in done]
    with tempfile.TemporaryDirectory() as folder:
        emit_program(graph, plan, Path(folder), type_check=False)
        for found in rehearse(folder, alone, random_batch(graph), ranks, case.kind, STEPS):
            yield {
                "case": case.name,
                "kind": case.kind,
                "model": case.model,
                "devices": case.devices,
                "global_batch": case.global_batch,
                "plan": ", ".join(f"{axis.name} {axis.size}" for axis in plan.mesh if axis.size > 1),
                "pipeline": plan.pipeline,
                "microbatches": plan.microbatches,
                "calibrated": calibration is not None,
                "torch": torch.__version__,
                "values": "finite",  # a rehearsal ends with an error where a loss or a parameter is no number
                **found.to_json(),
            }


HEAD = """# Ranks of large plans alone on one device

Each rank runs its emitted program alone: the real stage modules, local shapes and schedule, with collectives that return at once
(`autopar dev rehearse`). Peak memory is measured by PyTorch's allocator over a step. Times are for computation and the optimizer step,
without communication; predictions are those of the cost model for the same parts.
"""


def is_timed(line: Line) -> bool:
    """Whether the rank is known to have computed with numbers, and not with NaN, which takes less power and time: the rank that computes
    the loss, or one whose parameters were checked."""
    return line.get("values") == "finite" or line["pipeline"] - 1 in line["stages"]


def page(lines: list[Line]) -> str:
    parts = [HEAD]
    for kind, text in (
        ("cuda", "Published models at full size, in bfloat16 with AdamW in float32, planned for H100s."),
        (
            "cpu",
            "The same models at reduced width on a CPU, in float32: memory only, because the plans are for GPUs.",
        ),
    ):
        here = [line for line in lines if line["kind"] == kind]
        if not here:
            continue
        parts.append(f"\n## {here[0]['device']} (torch {here[0]['torch']})\n\n{text}\n\n")
        timed = kind == "cuda"
        head = ["request", "plan", "rank", "stages", "predicted", "measured", "error"]
        head += ["step predicted", "measured", "error"] if timed else []
        parts.append(f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n")
        for line in here:
            cells = [
                line["case"],
                f"{line['plan']}; {line['microbatches']} microbatches",
                str(line["rank"]),
                ", ".join(map(str, line["stages"])),
                size(line["predicted_bytes"]),
                size(line["peak_bytes"]),
                f"{line['memory_error']:+.1%}",
            ]
            if timed and is_timed(line):
                cells += [seconds(line["predicted_s"]), seconds(line["step_s"]), f"{line['time_error']:+.1%}"]
            elif timed:
                cells += [seconds(line["predicted_s"]), "values unchecked", "-"]
            parts.append(f"| {' | '.join(cells)} |\n")
        errors = [abs(line["memory_error"]) for line in here]
        parts.append(
            f"\nMemory of {len(here)} ranks: error {statistics.median(errors):.1%} in the median, {max(errors):.1%} at most.\n"
        )
        if timed:
            times = [abs(line["time_error"]) for line in here if is_timed(line)]
            parts.append(
                f"Time of {len(times)} ranks: error {statistics.median(times):.1%} in the median, {max(times):.1%} at most.\n"
            )
    return "".join(parts) + "\nMade by `make report NAME=rehearsal`. Do not edit.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--calibration", metavar="FILE", help="what `autopar profile` measured on a GPU of this kind")
    parser.add_argument("--fresh", action="store_true", help="measure everything on this device anew")
    parser.add_argument("--page", action="store_true", help="make the page anew, measure nothing")
    asked = parser.parse_args()
    lines = [json.loads(text) for text in RESULTS.read_text().splitlines()] if RESULTS.is_file() else []
    if asked.fresh:
        lines = [line for line in lines if line["kind"] != asked.device]
    for case in CASES:
        if asked.page or case.kind != asked.device:
            continue
        done = {line["rank"] for line in lines if line["case"] == case.name}
        for line in run_case(case, asked.calibration, done):
            lines.append(line)
            print(
                f"{case.name}, rank {line['rank']}: memory {line['memory_error']:+.1%}, time {line['time_error']:+.1%}",
                file=sys.stderr,
                flush=True,
            )
            RESULTS.write_text("".join(json.dumps(each) + "\n" for each in lines))
    PAGE.write_text(page(lines))
    print(PAGE)


if __name__ == "__main__":
    main()
