"""Training metrics: a record of each step, for files, TensorBoard and Weights & Biases, and a comparison of measured and predicted steps.

An out-of-memory error becomes one sentence: the predicted bytes of the rank's stage by part, the measured bytes, and changes of the plan
that need less memory.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

COMPARED_STEPS = 20
"""The number of steps after which measurement and prediction are compared. The first five don't count: they allocate memory and
compile layers."""
_LARGE_DEVIATION = 0.2


def peak_memory_bytes() -> int:
    """Return this process's peak memory in bytes: allocated tensors on a GPU; on a CPU resident memory, including Python and torch."""
    return _peak_memory()[0]


def _peak_memory() -> tuple[int, str]:
    """Return this process's peak memory in bytes, and what it measures."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated(), "peak device allocation"
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "peak resident memory"


def as_json(record: Mapping[str, Any]) -> str:
    """Return the record of a step as JSON, which has no NaN and no infinity: they become ``null``."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }
    return json.dumps(finite)


class Meter:
    """Records the steps of a training. Every rank may have one, but only one rank should get ``log``, ``tensorboard`` and ``wandb``.

    ``plan`` is the content of ``plan.json``. Records are appended to the file ``log``, one JSON object per line, written to the
    TensorBoard folder ``tensorboard``, and to a run of the W&B project ``wandb``. ``seconds`` has the times of previous steps; new ones
    are appended.

    Raises ``ModuleNotFoundError``, which says what to install, for ``tensorboard`` or ``wandb`` without the package of this name.
    """

    def __init__(
        self,
        plan: Mapping[str, Any],
        log: str | os.PathLike[str] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
        wandb: str | None = None,
        *,
        seconds: list[float] | None = None,
    ) -> None:
        self._plan = plan
        self._log = None if log is None else Path(log).open("a", encoding="utf-8")  # noqa: SIM115  open until close
        self._board = None if tensorboard is None else _summary_writer(tensorboard)
        self._run = None if wandb is None else _wandb_run(wandb, plan)
        self._seconds: list[float] = [] if seconds is None else seconds
        self._began, self._due = time.perf_counter(), False

    def begin(self) -> None:
        """Call this before a step (or the first of several with one record), before its data is read."""
        self._began = time.perf_counter()

    def end(
        self, step: int, loss: float, memory_bytes: int, more: Mapping[str, float | None], steps: int = 1
    ) -> dict[str, Any]:
        """Write and return the record of a finished step, with the mean time of the ``steps`` steps since ``begin``. ``more`` has further
        figures; those that are ``None`` are left out.

        The MFU uses the plan's FLOPs and peak FLOP/s, and the measured time.
        """
        seconds = (time.perf_counter() - self._began) / steps
        self._due = len(self._seconds) < COMPARED_STEPS <= len(self._seconds) + steps
        self._seconds += [seconds] * steps
        predicted_s, devices = self._plan["step_time_s"], device_count(self._plan)
        tokens = self._plan["tokens_per_s_per_device"] * devices * predicted_s
        record: dict[str, Any] = {"step": step, "loss": loss, "step_time_s": seconds}
        record["rows_per_s"] = self._plan["global_batch"] / seconds
        record["tokens_per_s"] = tokens / seconds
        record["peak_memory_bytes"] = memory_bytes
        if self._plan["mfu"]:
            record["mfu"] = self._plan["mfu"] * predicted_s / seconds
        return self.write(record | {name: value for name, value in more.items() if value is not None})

    def write(self, record: dict[str, Any]) -> dict[str, Any]:
        """Write and return a record, which has its ``step``."""
        if self._log is not None:
            self._log.write(as_json(record) + "\n")
            self._log.flush()
        if self._board is not None:
            for name, value in record.items():
                if name != "step":
                    self._board.add_scalar(name, value, record["step"])
        if self._run is not None:
            self._run.log(record, step=record["step"])
        return record

    def comparison(self, memory_bytes: int, predicted_bytes: int) -> str:
        """Return a table of the predicted and the measured step once, after ``COMPARED_STEPS`` steps; otherwise an empty string. Both
        numbers of bytes are one device's peak memory."""
        if not self._due:
            return ""
        plan, measured_s = self._plan, statistics.median(self._seconds[5:])
        memory = "peak memory" if torch.cuda.is_available() else "peak memory, Python and torch included"
        rows = [
            ("", "predicted", "measured", "measured / predicted"),
            ("step time", *_table_cells(plan["step_time_s"], measured_s, 1e-3, "ms")),
            (memory, *_table_cells(predicted_bytes, memory_bytes, 1e6, "MB")[: 3 if torch.cuda.is_available() else 2]),
        ]
        lines = ["  ".join(cell.rjust(20) if i else cell.ljust(40) for i, cell in enumerate(row)) for row in rows]
        if abs(measured_s - plan["step_time_s"]) > _LARGE_DEVIATION * plan["step_time_s"]:
            parts = {"compute": "compute_s", "exposed communication": "communication_s", "bubble": "bubble_s"}
            parts["once a step"] = "optimizer_s"
            shown = ", ".join(f"{name} {plan[key] * 1e3:,.1f} ms" for name, key in parts.items())
            lines += [
                f"The prediction has {shown}. The measured step is not divided into these: torch.profiler shows its parts.",
                "`autopar profile` measures this machine, and plans that use it predict its speed.",
            ]
        return "\n".join(lines)

    def close(self) -> None:
        """Close the file, the TensorBoard and the run."""
        if self._log is not None:
            self._log.close()
        if self._board is not None:
            self._board.close()
        if self._run is not None:
            self._run.finish()


def _table_cells(predicted: float, measured: float, unit: float, name: str) -> tuple[str, str, str]:
    return (
        f"{predicted / unit:,.1f} {name}",
        f"{measured / unit:,.1f} {name}",
        f"{measured / predicted:.2f}" if predicted else "-",
    )


def device_count(plan: Mapping[str, Any]) -> int:
    """Return the number of devices of a plan (``plan.json``). Stages of an interleaved pipeline share their devices."""
    return max(int(start) + int(count) for start, count in (stage["devices"] for stage in plan["stages"]))


def _summary_writer(folder: str | os.PathLike[str]) -> Any:
    return _optional(
        "torch.utils.tensorboard", "tensorboard", f"writing TensorBoard events into {folder}"
    ).SummaryWriter(str(folder))


def _wandb_run(project: str, plan: Mapping[str, Any]) -> Any:
    """Start a run of W&B; ``WANDB_MODE=offline`` writes it into the folder ``wandb`` without a network."""
    described = {
        name: plan.get(name) for name in ("model", "devices", "precision", "global_batch", "microbatches", "schedule")
    }
    return _optional("wandb", "wandb", f"the W&B project {project}").init(project=project, config=described)


def _optional(module: str, package: str, what: str) -> Any:
    """Import a module that needs a ``package``; raise ``ModuleNotFoundError``, which says what to install, without it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"{what} needs a package: pip install {package}, or use log= (--log-file) instead ({error})"
        ) from error


# -- out of memory ----------------------------------------------------------------------------------------------------

_OUT_OF_MEMORY_TEXTS = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "out of memory")
_CHANGES = {
    "activations": "recompute more (--pin activations=full), or make microbatches smaller (--pin microbatches=N)",
    "transients": "make microbatches smaller (--pin microbatches=N), or shard layers (--pin tensor=N)",
    "optimizer": "shard the optimizer's states (--pin zero=1), or keep them in the host's memory (--pin states=host)",
    "gradients": "shard gradients (--pin zero=2)",
    "parameters": "shard parameters (--pin zero=3), or use more pipeline stages (--pin pipeline=N)",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(sign in str(error) for sign in _OUT_OF_MEMORY_TEXTS)


@contextlib.contextmanager
def explaining_out_of_memory(folder: Path) -> Iterator[None]:
    """Convert a failed allocation inside this context to a ``MemoryError`` that describes it (``sentence``) by the plan in ``folder``."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        plan = json.loads((folder / "plan.json").read_text())
        allocator_message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MemoryError(
            sentence(plan, int(os.environ.get("RANK", "0")), _peak_memory(), allocator_message)
        ) from error


def sentence(plan: Mapping[str, Any], rank: int, measured: tuple[int, str], allocator_message: str) -> str:
    """Describe an out-of-memory error, and what to change. ``measured`` is a number of bytes and what it measures; ``allocator_message``
    is the first line of the allocator's message."""
    index, stage = next(
        (i, stage)
        for i, stage in enumerate(plan["stages"])
        if stage["devices"][0] <= rank < stage["devices"][0] + stage["devices"][1]
    )
    parts: dict[str, int] = stage["memory_by_part_bytes"]
    largest = max(parts, key=lambda name: parts[name])
    shown = ", ".join(f"{name} {_size(size)}" for name, size in parts.items())
    limit = int(stage["memory_limit_bytes"])
    beyond = max(0, measured[0] - sum(parts.values()))
    lower = max(limit - beyond, limit // 2) if beyond else limit * 9 // 10
    return (
        f"out of memory on rank {rank}, stage {index}: the plan predicts {_size(sum(parts.values()))} ({shown}) of {_size(limit)}, "
        f"{measured[1]} is {_size(measured[0])}; plan again with --memory-limit {lower / 1e9:.3g}GB, or {_CHANGES[largest]}; "
        f"`autopar explain` shows what each change saves ({allocator_message})"
    )


def _size(size: int) -> str:
    for unit, bytes_ in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= bytes_:
            return f"{size / bytes_:.3g} {unit}"
    return f"{size} bytes"
