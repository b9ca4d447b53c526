"""Runs the measurements with each number of processes, and makes a calibration from them."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from autopar.devices.calibration import Calibration, Figure, this_machine
from autopar.errors import UsageError
from autopar.profile.sweep import Task, tasks
from autopar.run.processes import Processes

_TIMEOUT_S = 600.0  # of a measurement, which takes about a second
Progress = Callable[[str, int, int], None]
"""A function that gets the title of the last measurement, the number of measurements done, and their total number."""


def profile(processes: Iterable[int], device: str | None = None, progress: Progress | None = None) -> Calibration:
    """Measure this machine with each of the ``processes`` counts, on ``device`` ("cpu" or "cuda"; by default on GPUs if there are enough).

    Raises:
        UsageError: ``device`` is "cuda", and there are fewer GPUs than processes.
        LaunchError: a worker failed.
    """
    counts = sorted(set(processes))
    tell = progress or (lambda text, done, total: None)
    kinds = {count: _device(device, count) for count in counts}
    plans = [(count, kind, tasks(count, kind)) for count, kind in kinds.items()]
    total, done = sum(len(planned) for _, _, planned in plans), 0
    figures: list[Figure] = []
    for count, kind, planned in plans:
        workers = Processes(count)
        try:
            for task, made in zip(planned, measured(workers, kind, planned), strict=True):
                figures += made
                done += 1
                tell(f"{count} processes: {task.title}", done, total)
        finally:
            workers.close()
    tell("done", total, total)
    return calibration(figures)


def measured(workers: Processes, device: str, planned: Iterable[Task]) -> Iterator[list[Figure]]:
    """Yield the figures of each task, measured on ``workers``, which must be freshly started."""
    workers.call("autopar.profile.remote:join", device, timeout_s=_TIMEOUT_S)
    for task in planned:
        answers = workers.call("autopar.profile.remote:measure", task.function, task.arguments, timeout_s=_TIMEOUT_S)
        yield [_figure(of_ranks, device, workers.count) for of_ranks in zip(*answers, strict=True)]


def calibration(figures: Iterable[Figure]) -> Calibration:
    """Return a calibration with these figures, for this machine and the present time."""
    machine = this_machine() | {"torch": torch.__version__}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        machine |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory}
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Calibration(machine, now, tuple(figures))


def _device(device: str | None, count: int) -> str:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and gpus < count:
        raise UsageError(f"this machine has {gpus} GPUs, not {count}", "measure with fewer processes, or --device cpu")
    return device or ("cuda" if gpus >= count else "cpu")


def _figure(of_ranks: Sequence[dict[str, Any]], device: str, count: int) -> Figure:
    first = of_ranks[0]
    samples = np.concatenate([found["samples"] for found in of_ranks])
    low, median, high = (float(q) for q in np.quantile(samples, (0.25, 0.5, 0.75)))
    return Figure(
        name=first["name"],
        device=device,
        processes=count,
        variant=first["variant"],
        backward=first["backward"],
        size=first["size"],
        unit=first["unit"],
        median=median,
        low=low,
        high=high,
        count=len(samples),
    )
