"""The memory of every process while a program starts and saves, against its share of the model (``make report NAME=startup``).

A Llama of 7B's widths on meta, with as many layers as local processes have memory for, under three plans that give each process a part.
Its own initialisers write the program's initial values in one process; the ranks start from these values, write weights, write a
checkpoint, and load it. Before each of these the kernel's mark of a process's peak (VmHWM, pages of mapped files included) begins anew;
what counts is the peak beyond what the process has before, without the values of its parameters.

A process's share are the bytes of its parameters, master copies and gradient buffers. The limit is 1.15 shares and 0.5 GB. One JSON
line per step and plan; a run does what the file lacks for this code (``--fresh``: everything). Ends with status 1 if a process is above
the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from places import EVIDENCE
from results import fingerprint, quiet
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import capture
from autopar.emit import emit
from autopar.program.state import INITIAL
from autopar.program.weights import Weights
from autopar.run import remote
from autopar.run.folder import import_runtime, program_modules
from autopar.run.initialise import OWN, with_tables, write_values
from autopar.search.manual import manual_plan
from autopar.shard import annotate

RESULTS = EVIDENCE / "startup.jsonl"
PLANS: dict[str, Callable[[int], dict[str, Any]]] = {
    "tensor": lambda count: {"tensor": count},
    "data, zero 3": lambda count: {"data": count, "zero": 3},
    "pipeline 2 x tensor": lambda count: {"pipeline": 2, "tensor": count // 2, "microbatches": 8},
}
GB = 10**9
TIMEOUT_S = 1800


def model(layers: int) -> nn.Module:
    """Llama-2-7B with fewer layers, in float32, on meta."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False))


# -- in the processes -------------------------------------------------------------------------------------------------


def memory(key: str) -> int:
    """Bytes of this process: ``VmHWM``, the peak, or ``VmRSS``, now."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def peak_of(work: Callable[[], object]) -> dict[str, float]:
    """The peak of memory beyond that before the work, and the work's seconds."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, began = memory("VmRSS"), time.perf_counter()
    work()
    return {"peak_bytes": memory("VmHWM") - before, "seconds": time.perf_counter() - began}


def initialised(layers: int, folder: str) -> dict[str, Any]:
    """Write the initial values of the folder, alone."""
    planned = with_tables(model(layers), OWN)
    return peak_of(lambda: write_values(planned, OWN, 0, Path(folder)))


def rank(folder: str, saved: str) -> dict[str, Any]:
    """Start from the folder's initial values, save weights and a checkpoint, load it."""
    with program_modules(folder):
        import_runtime(folder)
    options = {"optimizer": None, "lr": 1e-3, "seed": 0, "max_norm": None, "state": f"{folder}/{INITIAL}"}
    opened: list[Any] = []
    found = {
        "start": peak_of(lambda: opened.append(remote.open_trainer(folder, options, device="cpu", timeout_s=TIMEOUT_S)))
    }
    (trainer,) = opened
    share = sum(_bytes(group) for group in trainer._groups)
    found["save weights"] = peak_of(lambda: trainer.save_weights(f"{saved}/weights"))
    found["save checkpoint"] = peak_of(lambda: trainer.save(f"{saved}/checkpoints"))
    found["load checkpoint"] = peak_of(lambda: trainer.load(f"{saved}/checkpoints"))
    for name, step in found.items():
        step["own_bytes"] = step["peak_bytes"] + (0 if name == "start" else share)
    return {"share_bytes": share, **found}


def _bytes(group: Any) -> int:
    """Of a group's parameters, masters and gradient buffers, each memory once."""
    if hasattr(group, "_values"):  # flat buffers
        own = [group._values, group._owned, group._grads]
    else:
        own = [master.tensor for master in (*group.masters, *group.frozen)]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in own}.values())


# -- in the report ----------------------------------------------------------------------------------------------------


def lines_of(name: str, count: int, layers: int, alone: dict[str, Any], values: Path) -> list[dict[str, Any]]:
    """The lines of a plan, one for each step: of the process whose peak is highest. ``alone`` is what initialising took."""
    graph = annotate(capture(with_tables(model(layers), OWN), _batch()))
    plan = manual_plan(graph, precision="float32", **PLANS[name](count))
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "program"
        emit(graph, plan, folder)
        os.link(values, folder / INITIAL)
        with WorkerPool(count) as pool:
            ranks = pool.run("startup:rank", str(folder), home, timeout_s=TIMEOUT_S)
        with Weights(Path(home) / "weights") as written, Weights(folder / INITIAL) as first:
            assert all(written.digest(each) == first.digest(each) for each in written.tensors)
    common = {
        "plan": name,
        "processes": count,
        "layers": layers,
        "model_bytes": values.stat().st_size,
        "code": fingerprint(),
    }
    shares = [found["share_bytes"] for found in ranks]
    lines = [
        {
            **common,
            "step": "initialise",
            "share_bytes": min(shares),
            "rank": None,
            **alone,
            "own_bytes": alone["peak_bytes"],
        }
    ]
    for step in ("start", "save weights", "save checkpoint", "load checkpoint"):
        worst = max(range(count), key=lambda i: ranks[i][step]["own_bytes"] - limit(shares[i]))
        lines.append({**common, "step": step, "rank": worst, "share_bytes": shares[worst], **ranks[worst][step]})
    return lines


def _batch() -> dict[str, Tensor]:
    ids = torch.zeros(8, 64, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": torch.zeros_like(ids)}


def limit(share: int) -> float:
    return 1.15 * share + 0.5 * GB


def passed(line: dict[str, Any]) -> bool:
    return bool(line["own_bytes"] <= limit(line["share_bytes"]))


def page(lines: list[dict[str, Any]]) -> str:
    first = lines[0]
    rows = "".join(
        f"| {line['plan']} | {line['step']} | {'alone' if line['rank'] is None else line['rank']} | {line['share_bytes'] / GB:.2f} "
        f"| {line['own_bytes'] / GB:.2f} | {limit(line['share_bytes']) / GB:.2f} | {line['seconds']:.0f} |\n"
        for line in lines
    )
    return f"""# Memory while a program starts and saves

{sum(map(passed, lines))} of {len(lines)} steps stay within 1.15 shares and 0.5 GB in every process. The model has the widths of Llama-2-7B
and {first["layers"]} of its 32 layers, {first["model_bytes"] / GB:.2f} GB in float32, so that {first["processes"]} processes with their
libraries and gradient buffers fit into this machine; it is built on meta. A process's share are its parameters, master copies and gradient
buffers (under ZeRO 3 gradients have memory in a step alone).

Peaks are VmHWM, pages of mapped files included, beyond what the process had before, which is torch, the program's modules and the process
group; after the start the share is part of the peak. Each row is the process that is farthest up to its limit. `initialise` is the one
process that runs the model's own initialisers into `initial.safetensors`; its row has the smallest share of a rank. The other steps are
those of the ranks.

| plan | step | rank | share GB | peak GB | limit GB | seconds |
|---|---|---|---|---|---|---|
{rows}
Made by `make report NAME=startup` with torch {torch.__version__}, gloo, on a CPU that did other work too, from the lines of
[startup.jsonl](startup.jsonl). Do not edit.
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--processes", type=int, default=8, metavar="N")
    parser.add_argument(
        "--layers", type=int, default=4, metavar="N", help="of the model: 0.8 GB each, and 1 GB for the rest"
    )
    parser.add_argument("--fresh", action="store_true", help="measure everything anew")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    quiet()
    torch.set_num_threads(1)
    needed = 2 * (args.layers + 1) * GB + args.processes * GB // 3  # with gradient buffers
    available = int(re.findall(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())[0]) * 1024
    room = shutil.disk_usage(tempfile.gettempdir()).free
    if available < 1.2 * needed or room < 4 * needed:
        print(f"needs {1.2 * needed / GB:.0f} GB of memory and {4 * needed / GB:.0f} GB on the disk", file=sys.stderr)
        return 2
    old = [json.loads(text) for text in args.results.read_text().splitlines()] if args.results.exists() else []
    same = {"processes": args.processes, "layers": args.layers, "code": fingerprint()}
    kept = [] if args.fresh else [line for line in old if same.items() <= line.items()]
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as home:
        (Path(home) / "plan.json").write_text("{}")
        with WorkerPool(1) as one:
            (alone,) = one.run("startup:initialised", args.layers, home, timeout_s=TIMEOUT_S)
        for name in PLANS:
            own = [line for line in kept if line["plan"] == name]
            lines += own or lines_of(name, args.processes, args.layers, alone, Path(home) / INITIAL)
            args.results.write_text("".join(json.dumps(line) + "\n" for line in lines))
            args.results.with_suffix(".md").write_text(page(lines))
    bad = [line for line in lines if not passed(line)]
    print(f"{len(lines)} steps, {len(bad)} above the limit: {args.results}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
