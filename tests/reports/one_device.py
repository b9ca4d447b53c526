"""One device: emitted programs against eager PyTorch and ``torch.compile``: ``make report NAME=one-device`` writes
``docs/evidence/one-device.md``.

On a processor the five models of ``autopar bench`` in float32; with ``--device cuda`` models of 0.1 to 1 billion parameters, emitted in
bfloat16 with float32 master parameters and by hand under ``torch.autocast``. Every program uses AdamW (on a GPU the fused one).
An emitted program and its counterpart take turns in one process, in an order drawn anew each round.

One JSON line for each model and pair; a run does what the file lacks for its device (``--fresh``: everything).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from places import EVIDENCE

from autopar.bench.baselines import HandTunedRecipe
from autopar.bench.contest import BenchmarkSession
from autopar.bench.models import LARGE, MODELS, BenchModel
from autopar.search import manual_plan
from autopar.timing import paired_ratio

RESULTS, PAGE = EVIDENCE / "one-device.jsonl", EVIDENCE / "one-device.md"
EMITTED = "emitted"
LIMITS = {"none": 1.02, "layers": 1.00}  # of emitted / by hand, by what is compiled

Line = dict[str, Any]

HEAD = """# One device: emitted programs against eager PyTorch

An emitted program on one device does not communicate. It is compared with a plain training loop of the same model, without and with
`torch.compile`; the emitted program compiles each layer class once, the plain loop the full model. Both use AdamW and start from the same
values. They take turns, in a new random order in each round. Ratios are medians over rounds, with a bootstrap 95 % interval.
"""


def run_pair(subject: BenchModel, compiled: bool, device: str, rounds: int, steps: int, seed: int) -> Line:
    """Times of the emitted program and of the plain loop."""
    recipe = HandTunedRecipe(compiled=compiled, autocast=device == "cuda")
    precision = "bfloat16" if device == "cuda" else "float32"
    with (
        tempfile.TemporaryDirectory() as folder,
        BenchmarkSession(subject, 1, steps, Path(folder), device=device, precision=precision) as session,
    ):
        graph = session.workload.capture()
        session.open_program(EMITTED, graph, manual_plan(graph, precision=precision, compile=compiled))
        session.open_hand_tuned(recipe)
        order = random.Random(seed)
        for _ in range(rounds):
            for name in order.sample(session.remaining, len(session.remaining)):
                session.measure(name)
        if session.errors:
            raise next(iter(session.errors.values()))
        session.check_losses(EMITTED)
        losses = {"emitted": session.losses[EMITTED], "by hand": session.losses[recipe.name]}
        if not all(math.isfinite(loss) for found in losses.values() for loss in found):
            raise RuntimeError(f"losses are no numbers: {losses}")
        parameters = sum(p.numel() for p in session.workload.model.parameters())
        return {
            "model": subject.name,
            "compiled": compiled,
            "kind": device,
            "device": torch.cuda.get_device_name() if device == "cuda" else "CPU, 1 thread",
            "parameters": parameters,
            "tokens": subject.tokens,
            "by_hand": recipe.name,
            "rounds_s": {EMITTED: session.rounds[EMITTED], "by hand": session.rounds[recipe.name]},
            "last_losses": {name: found[-1] for name, found in losses.items()},
            "rounds": rounds,
            "steps": steps,
            "seed": seed,
            "torch": torch.__version__,
        }


def ratio(line: Line) -> tuple[float, tuple[float, float]]:
    times = line["rounds_s"]
    return paired_ratio(tuple(times[EMITTED]), tuple(times["by hand"]), line["seed"])


def page(lines: list[Line]) -> str:
    parts = [HEAD]
    for device in dict.fromkeys(line["device"] for line in lines):
        here = [line for line in lines if line["device"] == device]
        versions = ", ".join(sorted({line["torch"] for line in here}))
        parts.append(f"\n## {device} (torch {versions})\n\n")
        rows = [
            "| model | parameters | tokens per step | programs | emitted | plain loop | emitted / plain |",
            "|---|---|---|---|---|---|---|",
        ]
        for line in here:
            middle, (low, high) = ratio(line)
            times = {name: 1e3 * statistics.median(found) for name, found in line["rounds_s"].items()}
            kind = "compiled" if line["compiled"] else "eager"
            rows.append(
                f"| {line['model']} | {line['parameters'] / 1e6:,.1f} M | {line['tokens']:,} | {kind} | {times[EMITTED]:.1f} ms "
                f"| {times['by hand']:.1f} ms | {middle:.3f} ({low:.3f} to {high:.3f}) |"
            )
        parts.append("\n".join(rows) + "\n")
        for compiled, limit in ((False, LIMITS["none"]), (True, LIMITS["layers"])):
            found = [ratio(line)[0] for line in here if line["compiled"] is compiled]
            if found:
                parts.append(
                    f"\n{'Compiled' if compiled else 'Eager'}: median {statistics.median(found):.3f}, largest {max(found):.3f}; "
                    f"{sum(r <= limit for r in found)} of {len(found)} ratios are at most {limit:.2f}.\n"
                )
    return "".join(parts) + "\nMade by `make report NAME=one-device`. Do not edit.\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--fresh", action="store_true", help="measure everything on this device anew")
    parser.add_argument("--only", nargs="*", metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a measurement")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", action="store_true", help="make the page anew, measure nothing")
    asked = parser.parse_args()
    lines = [json.loads(text) for text in RESULTS.read_text().splitlines()] if RESULTS.is_file() else []
    if asked.fresh:
        lines = [line for line in lines if line["kind"] != asked.device]
    models = LARGE if asked.device == "cuda" else MODELS
    failed = False
    for name, subject in models.items():
        for compiled in (False, True):
            done = any(
                (line["model"], line["compiled"], line["kind"]) == (name, compiled, asked.device) for line in lines
            )
            if asked.page or done or (asked.only and name not in asked.only):
                continue
            try:
                line = run_pair(subject, compiled, asked.device, asked.rounds, asked.steps, asked.seed)
            except Exception as error:  # noqa: BLE001  the other models have nothing to do with it
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                failed = True
                continue
            lines.append(line)
            middle, (low, high) = ratio(line)
            print(f"{name}, compiled {compiled}: {middle:.3f} ({low:.3f} to {high:.3f})", file=sys.stderr, flush=True)
            RESULTS.write_text("".join(json.dumps(each) + "\n" for each in lines))
    PAGE.write_text(page(lines))
    print(PAGE)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
