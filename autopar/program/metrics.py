"""Figures of the training: a record of each step, for files and TensorBoard, and the measured step beside the predicted one."""

from __future__ import annotations

import json
import os
import resource
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

COMPARED_STEPS = 20
"""The step after which measurement and prediction are compared; the first five are left out, in which memory is allocated and layers are
compiled."""
_FAR = 0.2


def peak_memory_bytes() -> int:
    """The peak of this process's memory: allocated tensors on a GPU; on a CPU what is resident, Python and torch included."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Meter:
    """The records of a training's steps, on the one rank that writes them.

    ``plan`` is the content of ``plan.json``. Records go to ``log``, one JSON object a line after those that are there, and to a TensorBoard
    in the folder ``tensorboard``. ``seconds`` has the times of the steps before, and gets those of further ones.

    Raises ``ModuleNotFoundError`` with what to install if there is no tensorboard.
    """

    def __init__(
        self,
        plan: Mapping[str, Any],
        log: str | os.PathLike[str] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
        seconds: list[float] | None = None,
    ) -> None:
        self._plan = plan
        self._log = None if log is None else Path(log).open("a", encoding="utf-8")  # noqa: SIM115  open until close
        self._board = None if tensorboard is None else _board(tensorboard)
        self._seconds: list[float] = [] if seconds is None else seconds
        self._began, self._due = time.perf_counter(), False

    def begin(self) -> None:
        """Before a step, or before the first of several with one record, its data included."""
        self._began = time.perf_counter()

    def end(
        self, step: int, loss: float, memory_bytes: int, more: Mapping[str, float | None], steps: int = 1
    ) -> dict[str, Any]:
        """After a step: its record, with the mean time of the ``steps`` since ``begin``. ``more`` are further figures; those that are
        ``None`` are left out.

        The MFU is that of the plan, at the measured time: its FLOPs and the peak of the device kind are the plan's.
        """
        seconds = (time.perf_counter() - self._began) / steps
        self._due = len(self._seconds) < COMPARED_STEPS <= len(self._seconds) + steps
        self._seconds += [seconds] * steps
        predicted_s, devices = self._plan["step_time_s"], _devices(self._plan)
        tokens = self._plan["tokens_per_s_per_device"] * devices * predicted_s
        record: dict[str, Any] = {"step": step, "loss": loss, "step_time_s": seconds}
        record["rows_per_s"] = self._plan["global_batch"] / seconds
        record["tokens_per_s"] = tokens / seconds
        record["peak_memory_bytes"] = memory_bytes
        if self._plan["mfu"]:
            record["mfu"] = self._plan["mfu"] * predicted_s / seconds
        record |= {name: value for name, value in more.items() if value is not None}
        if self._log is not None:
            self._log.write(json.dumps(record) + "\n")
            self._log.flush()
        if self._board is not None:
            for name, value in record.items():
                if name != "step":
                    self._board.add_scalar(name, value, step)
        return record

    def comparison(self, memory_bytes: int, predicted_bytes: int) -> str:
        """After ``COMPARED_STEPS`` steps, once: a table of the predicted and the measured step; empty otherwise. Both numbers of bytes are
        peaks of one device."""
        if not self._due:
            return ""
        plan, measured_s = self._plan, statistics.median(self._seconds[5:])
        memory = "peak memory" if torch.cuda.is_available() else "peak memory, Python and torch included"
        rows = [
            ("", "predicted", "measured", "measured / predicted"),
            ("step time", *_pair(plan["step_time_s"], measured_s, 1e-3, "ms")),
            (memory, *_pair(predicted_bytes, memory_bytes, 1e6, "MB")),
        ]
        lines = ["  ".join(cell.rjust(20) if i else cell.ljust(40) for i, cell in enumerate(row)) for row in rows]
        if abs(measured_s - plan["step_time_s"]) > _FAR * plan["step_time_s"]:
            parts = {"compute": "compute_s", "exposed communication": "communication_s", "bubble": "bubble_s"}
            parts["once a step"] = "optimizer_s"
            shown = ", ".join(f"{name} {plan[key] * 1e3:,.1f} ms" for name, key in parts.items())
            lines += [
                f"The prediction has {shown}. The measured step is not divided into these: torch.profiler shows its parts.",
                "`autopar profile` measures this machine, and plans that use it predict its speed.",
            ]
        return "\n".join(lines)

    def close(self) -> None:
        """Close the file and the TensorBoard."""
        if self._log is not None:
            self._log.close()
        if self._board is not None:
            self._board.close()


def _pair(predicted: float, measured: float, unit: float, name: str) -> tuple[str, str, str]:
    return (
        f"{predicted / unit:,.1f} {name}",
        f"{measured / unit:,.1f} {name}",
        f"{measured / predicted:.2f}" if predicted else "-",
    )


def _devices(plan: Mapping[str, Any]) -> int:
    return max(int(start) + int(count) for start, count in (stage["devices"] for stage in plan["stages"]))


def _board(folder: str | os.PathLike[str]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ModuleNotFoundError(
            f"there is no tensorboard here to write {folder} with: pip install tensorboard, or leave it out; log= (--log-file) does without"
        ) from error
    return SummaryWriter(str(folder))
