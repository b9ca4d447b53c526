"""The memory of every process while a program starts and saves, against its share of the model (``make report NAME=startup``).

Llama-2-7B in bfloat16 on meta, under three plans that give each of 8 local processes a part, and a smaller one with masters in float32.
Its own initialisers write the program's initial values in one process; the ranks start from these values, write weights as a folder of
safetensors files, read these files, write a checkpoint, and read it. Before each of these the kernel's mark of a process's peak (VmHWM,
pages of mapped files included) begins anew.

A process's share are the bytes of its parameters, master copies and gradient buffers. The limit is 1.15 shares and 0.5 GB. One
JSON line per step and plan; a run does what the file lacks for this code (``--fresh``: everything). Ends with status 1 if a process is
above the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from places import EVIDENCE
from results import available_bytes, fingerprint, quiet
from startup_ranks import TIMEOUT_S, model
from torch import Tensor
from workers import WorkerPool

from autopar.capture import capture
from autopar.emit import emit
from autopar.program.state import INITIAL
from autopar.program.weights import mapped
from autopar.run.initialise import OWN, with_buffer_values
from autopar.search.manual import manual_plan
from autopar.shard import annotate

RESULTS = EVIDENCE / "startup.jsonl"
GB = 10**9
PROCESSES = 8
STEPS = ("start", "save weights", "load safetensors", "save checkpoint", "load checkpoint")


@dataclass(frozen=True)
class Case:
    """A plan; ``masters`` are those in float32, which a plan in bfloat16 has. The others train the parameters themselves."""

    pins: dict[str, int]
    layers: int
    masters: bool = False


def cases(layers: int) -> dict[str, Case]:
    """Those of a model with so many layers, and the one with masters, which has a quarter as many at the most."""
    few = min(layers, 4)
    return {
        "tensor 8": Case({"tensor": 8}, layers),
        "data 8, zero 3": Case({"data": 8, "zero": 3}, layers),
        "pipeline 2 x tensor 4": Case({"pipeline": 2, "tensor": 4, "microbatches": 8}, layers),
        "data 2 x tensor 4, zero 1, masters in float32": Case({"data": 2, "tensor": 4, "zero": 1}, few, True),
    }


def line_of_values(layers: int, home: Path) -> dict[str, Any]:
    """Make the initial values, and the line that says what this took."""
    home.mkdir()
    (home / "plan.json").write_text("{}")
    with WorkerPool(1) as one:
        (alone,) = one.run("startup_ranks:initialised", layers, str(home), timeout_s=TIMEOUT_S)
    size = (home / INITIAL).stat().st_size
    return {
        "step": "initialise",
        "rank": None,
        "share_bytes": size // PROCESSES,
        "peak_bytes": alone["added_bytes"],
        **alone,
    }


def lines_of(case: Case, values: Path) -> list[dict[str, Any]]:
    """The lines of a plan, one for each step: of the process that is farthest up to its limit."""
    graph = annotate(capture(with_buffer_values(model(case.layers), OWN), _batch()))
    plan = manual_plan(graph, precision="bfloat16" if case.masters else "float32", **case.pins)
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "program"
        emit(graph, plan, folder)
        os.link(values, folder / INITIAL)
        with WorkerPool(PROCESSES) as pool:
            ranks = pool.run("startup_ranks:rank", str(folder), home, timeout_s=TIMEOUT_S)
        files = len([*(Path(home) / "weights").glob("*.safetensors")])
        first = mapped(values)
        assert all(torch.equal(tensor, first[name]) for name, tensor in mapped(Path(home) / "weights").items())
    found = []
    for step in STEPS:
        for i, own in enumerate(ranks):
            # after the start the share is in memory all the time
            own[step] |= {"rank": i, "share_bytes": own["share_bytes"], "peak_bytes": own[step]["added_bytes"]}
            own[step]["peak_bytes"] += 0 if step == "start" else own["share_bytes"]
        worst = max((own[step] for own in ranks), key=lambda line: line["peak_bytes"] - limit(line["share_bytes"]))
        found.append({"step": step, "files": files, **worst})
    return found


def _batch() -> dict[str, Tensor]:
    ids = torch.zeros(8, 64, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": torch.zeros_like(ids)}


def limit(share: int) -> float:
    return 1.15 * share + 0.5 * GB


def passed(line: dict[str, Any]) -> bool:
    return bool(line["peak_bytes"] <= limit(line["share_bytes"]))


def page(lines: list[dict[str, Any]]) -> str:
    rows = "".join(
        f"| {line['plan']} | {line['layers']} | {line['step']} | {'alone' if line['rank'] is None else line['rank']} "
        f"| {line['share_bytes'] / GB:.2f} | {line['peak_bytes'] / GB:.2f} | {limit(line['share_bytes']) / GB:.2f} "
        f"| {line['added_bytes'] / GB:.2f} | {line['seconds']:.0f} |\n"
        for line in lines
    )
    most = max(lines, key=lambda line: line["layers"])
    later = [line for line in lines if line["step"] not in ("initialise", "start")]
    return f"""# Memory while a program starts and saves

The limit of a process is 1.15 times its *share* (its parameters, master copies and gradient buffers) plus 0.5 GB.
{sum(map(passed, lines))} of {len(lines)} steps stay below it in every process, and saving and loading add at most
{max(line["added_bytes"] for line in later) / GB:.2f} GB to a process.

The model is Llama-2-7B in bfloat16 with {most["layers"]} of its 32 layers, {most["model_bytes"] / GB:.2f} GB, built on meta, on
{most["processes"]} processes without master copies. Only the last plan has float32 master copies, with few layers: with all layers they
exceed the memory of this machine. Parameters without replicas have gradients only during a step.

*Peak* is the increase of VmHWM, which includes pages of mapped files, over its value after torch, the program's modules and the process
group are loaded. *Added* is the peak after start-up less the share. Each row shows the process that is closest to its limit. `initialise`
runs the model's own initialisers in one process, which writes `initial.safetensors`; its share is that of a rank. `save weights` writes
{max(line.get("files", 0) for line in lines)} safetensors files (fewer for fewer layers), which `load safetensors` reads. Before each
load, parameters and master copies are zeroed; after it, they are compared byte by byte.

| plan | layers | step | rank | share GB | peak GB | limit GB | added GB | seconds |
|---|---|---|---|---|---|---|---|---|
{rows}
Made by `make report NAME=startup` with torch {torch.__version__}, gloo, on a CPU that also did other work, from the lines of
[startup.jsonl](startup.jsonl). Do not edit.
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--layers", type=int, default=32, metavar="N", help="of the model: 0.4 GB each, and 0.5 GB for the rest"
    )
    parser.add_argument("--plan", help="measure no other one")
    parser.add_argument("--fresh", action="store_true", help="measure everything anew")
    return parser.parse_args()


def why_not(layers: int) -> str:
    """What this machine lacks for the report."""
    whole = sum(parameter.nbytes for parameter in model(layers).parameters())
    memory, disk = whole + PROCESSES * 5 * GB // 8, 3 * whole + GB
    if available_bytes() < memory or shutil.disk_usage(tempfile.gettempdir()).free < disk:
        return f"needs {memory / GB:.0f} GB of memory and {disk / GB:.0f} GB on the disk"
    return ""


def main() -> int:
    args = arguments()
    quiet()
    torch.set_num_threads(1)
    if why := why_not(args.layers):
        print(why, file=sys.stderr)
        return 2
    old = [json.loads(text) for text in args.results.read_text().splitlines()] if args.results.exists() else []
    kept = [] if args.fresh else [line for line in old if line["code"] == fingerprint()]
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as home:
        for name, case in cases(args.layers).items():
            mine = [line for line in kept if line["plan"] == name and line["layers"] == case.layers]
            values = Path(home) / str(case.layers)
            if not mine and args.plan in (None, name):
                for other in Path(home).iterdir():
                    if other != values:
                        shutil.rmtree(other)
                first = [] if values.is_dir() else [line_of_values(case.layers, values)]
                common = {
                    "plan": name,
                    "processes": PROCESSES,
                    "layers": case.layers,
                    "model_bytes": (values / INITIAL).stat().st_size,
                    "code": fingerprint(),
                }
                mine = [{**common, **line} for line in (*first, *lines_of(case, values / INITIAL))]
            lines += mine
            args.results.write_text("".join(json.dumps(line) + "\n" for line in lines))
            args.results.with_suffix(".md").write_text(page(lines))
    bad = [line for line in lines if not passed(line)]
    print(f"{len(lines)} steps, {len(bad)} above the limit: {args.results}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
