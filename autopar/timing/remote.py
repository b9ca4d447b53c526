"""Functions that a ``TimingSession`` calls in its worker processes, which keep every opened program and run their steps in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from autopar.run import remote

Step = Callable[..., float | None]
"""Trains on a global batch, a positional argument for each tensor, and returns this rank's loss, ``None`` if it has none."""

programs: dict[str, Step] = {}
"""The opened programs by name. An opener puts its program here."""

_held: dict[str, int] = {}  # program -> the bytes that it keeps allocated on the GPU between steps


def open_program(name: str, folder: str, inputs: list[str], lr: float, state: str, device: str) -> None:
    """Load an emitted program with the values in the file ``state``; ``inputs`` has the program's names for the batch's tensors."""
    before = _allocated()
    options = {"optimizer": None, "lr": lr, "seed": 0, "max_norm": None, "state": state}
    trainer = remote.open_trainer(folder, options, device=device, timeout_s=300)
    programs[name] = lambda *batch: float(trainer.step(dict(zip(inputs, batch, strict=True))))
    _held[name] = _allocated() - before


def close_program(name: str) -> None:
    """Free the memory of a program."""
    programs.pop(name, None)
    _held.pop(name, None)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0


def steps(name: str, batch: str, count: int) -> dict[str, Any]:
    """Run ``count`` steps of a program on the tensors in the file ``batch``.

    Returns the ``seconds`` of each step, from one barrier to the next; the ``losses`` on this rank, ``None`` without the last stage of a
    pipeline; and the ``peak_bytes`` that the program alone allocates on a GPU, 0 on a CPU, where programs share one allocator.
    """
    tensors = torch.load(batch, weights_only=True)
    before, seconds, losses = _allocated(), [], []
    others = before - _held.get(name, 0)
    if before:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(count):
        dist.barrier()
        start = time.perf_counter()
        losses.append(programs[name](*tensors))
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    _held[name] = _allocated() - others
    peak = torch.cuda.max_memory_allocated() - others if torch.cuda.is_initialized() else 0
    return {"seconds": seconds, "losses": losses, "peak_bytes": peak}
