"""Small trainings under exported configurations: two processes on a CPU against one device in plain PyTorch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from exports_cases import wanted
from package import outside

from autopar.cli.commands import cluster_and_options, load
from autopar.cli.options import PlanRequest
from autopar.trainers import TRAINERS
from autopar.trainers.choose import best_setting
from autopar.trainers.layout import stage_bounds

Line = dict[str, Any]

WORKER = Path(__file__).with_name("exports_worker.py")
SECONDS = 240
LIMIT = 1e-5
"""The largest difference of a loss that passes."""

MODEL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
RUNS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("accelerate", {"zero": 2, "microbatch": 2}),
    ("accelerate", {"zero": 3, "microbatch": 2, "activations": "full"}),
    *(("deepspeed", {"zero": zero, "microbatch": 2}) for zero in (0, 1, 2, 3)),
    ("torchtitan", {"tensor": 1, "pipeline": 1, "zero": 2, "microbatch": 2}),
    ("torchtitan", {"tensor": 1, "pipeline": 1, "zero": 3, "microbatch": 2, "activations": "full"}),
    ("torchtitan", {"tensor": 2}),
    ("torchtitan", {"pipeline": 2, "microbatch": 2, "chunks": 1}),
    ("torchtitan", {"pipeline": 2, "microbatch": 2, "chunks": 2}),
)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def started(command: Sequence[str | Path], folder: Path) -> str:
    """Run a command with all its processes ended afterwards; why it failed, if it did."""
    quiet = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "WANDB_MODE": "disabled"}
    surroundings = outside() | quiet | {"PYTHONPATH": str(WORKER.parent)}
    with (folder / "log.txt").open("w") as log:
        own = subprocess.Popen(
            list(map(str, command)),
            cwd=folder,
            env=surroundings,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = own.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(own.pid, signal.SIGKILL)
            own.wait()
    if status == 0:
        return ""
    lines = (folder / "log.txt").read_text().strip().splitlines()
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    return f"no result after {SECONDS} s" if status == -1 else (errors or lines or [f"status {status}"])[-1][-300:]


def case_of(trainer: str, pins: dict[str, Any], folder: Path) -> Line:
    """A plan of the small model for two devices."""
    (folder / "config.json").write_text(json.dumps(MODEL | {"architectures": ["LlamaForCausalLM"]}))
    request = PlanRequest(
        model=str(folder / "config.json"), devices="2xH100-80GB", seq=32, global_batch=8, precision="float32"
    )
    cluster, _ = cluster_and_options(request)
    graph = load(request, cluster).capture()
    setting = best_setting(graph, cluster, TRAINERS[trainer], pins).setting
    exported = TRAINERS[trainer].export(setting, graph, cluster)
    return {"files": dict(exported.files), "wanted": wanted(setting, stage_bounds(graph, setting), 32), "config": MODEL}


def losses_of(python: Path, name: str, case: Line, processes: int) -> list[float] | str:
    """The losses of a training, or why there are none."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "case.json").write_text(json.dumps(case))
        for file, text in case["files"].items():
            (folder / file).write_text(text)
        program = [WORKER, name, folder]
        port = str(free_port())
        if processes == 1:
            command = [python, *program]
        elif name == "accelerate":
            command = [
                python.parent / "accelerate",
                "launch",
                "--config_file",
                "accelerate.yaml",
                "--main_process_port",
                port,
                *program,
            ]
        else:
            torchrun = [python.parent / "torchrun", "--nproc-per-node", str(processes)]
            command = [*torchrun, "--master-addr", "127.0.0.1", "--master-port", port, *program]
        failure = started(command, folder)
        found = folder / "losses.json"
        return failure or [float(loss) for loss in json.loads(found.read_text())]


def runs(python: Path) -> Iterator[Line]:
    alone: dict[str, list[float] | str] = {}
    for trainer, pins in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            case = case_of(trainer, pins, Path(folder))
        reference = "alone_titan" if trainer == "torchtitan" else "alone"
        if reference not in alone:
            alone[reference] = losses_of(python, reference, case, 1)
        label = ", ".join(f"{name}={value}" for name, value in pins.items())
        line: Line = {"part": "runs", "trainer": trainer, "model": "small Llama", "devices": label}
        losses, expected = losses_of(python, trainer, case, 2), alone[reference]
        if isinstance(losses, str) or isinstance(expected, str):
            yield line | {"refused": losses if isinstance(losses, str) else f"on one device: {expected}"}
            continue
        difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        line |= {"losses": losses, "difference": difference}
        yield line if difference <= LIMIT else line | {"refused": f"losses differ by {difference:.2g}"}
