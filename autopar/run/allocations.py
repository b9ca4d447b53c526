"""Measures the peak memory of PyTorch's CPU allocator: the highest running sum of the profiler's allocation and release events."""

from __future__ import annotations

import contextlib
import gc
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

STEP = "the measured step"


class Allocations:
    """Records allocations inside the context ``recorded``. Afterwards, ``at_rest_bytes`` has the bytes allocated before the step that ran
    inside the context ``step``, and ``peak_bytes`` the peak during that step."""

    def __init__(self) -> None:
        self.peak_bytes = self.at_rest_bytes = 0

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record allocations; enter this context before allocating the first tensor that counts."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield
            # not isinstance: on a weak proxy it reads the class of the referent, and raises if that is dead
            tensors = [value for value in gc.get_objects() if issubclass(type(value), Tensor)]
            alive = {address for value in tensors for address in _addresses(value)}
        with tempfile.TemporaryDirectory() as home:
            path = Path(home) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        self.at_rest_bytes, self.peak_bytes = running_peak(events, alive)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Mark the step whose peak is measured."""
        with torch.profiler.record_function(STEP):
            yield


def _addresses(tensor: Tensor) -> list[int]:
    """Return the addresses of the storages of a tensor and of its gradient."""
    tensors = [tensor] if not tensor.is_leaf or tensor.grad is None else [tensor, tensor.grad]
    return [t.untyped_storage().data_ptr() for t in tensors if type(t) in (Tensor, torch.nn.Parameter)]


def running_peak(events: list[dict[str, Any]], alive: set[int]) -> tuple[int, int]:
    """Return the bytes allocated when the traced step begins, and the peak while it runs.

    The profiler has no event for a release by another thread. Such a release is inferred if there is a second allocation at the block's
    address, or if ``alive`` lacks the address at the end; the block then counts until the next event.
    """
    step = next(e for e in events if e.get("name") == STEP and "dur" in e)
    changes = sorted(
        (float(e["ts"]), int(e["args"]["Bytes"]), int(e["args"]["Addr"])) for e in events if e.get("name") == "[memory]"
    )
    open_blocks: dict[int, int] = {}  # address: index of its allocation
    lost: set[int] = set()
    for i, (_, change, address) in enumerate(changes):
        if change < 0:
            open_blocks.pop(address, None)
            continue
        if address in open_blocks:
            lost.add(open_blocks[address])
        open_blocks[address] = i
    lost |= {i for address, i in open_blocks.items() if address not in alive}
    start, stop = float(step["ts"]), float(step["ts"]) + float(step["dur"])
    allocated = at_rest = highest = released = 0
    for i, (when, change, _) in enumerate(changes):
        allocated += change - released
        released = change if i in lost else 0
        if when <= start:
            at_rest = highest = allocated
        elif when <= stop:
            highest = max(highest, allocated)
    return at_rest, highest
