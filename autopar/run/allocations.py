"""The memory that PyTorch's CPU allocator gives out: every allocation and release as the profiler sees them, and the highest
running sum."""

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
    """All allocations while the context ``recorded`` lasts; ``peak_bytes`` and ``at_rest_bytes`` after it, of the step that ran inside
    of ``step``."""

    def __init__(self) -> None:
        self.peak_bytes = self.at_rest_bytes = 0

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """A context in which allocations are seen: from before the first tensor that counts is made."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            yield
            # not isinstance, which a weak proxy answers for its referent, alive or not
            tensors = [value for value in gc.get_objects() if issubclass(type(value), Tensor)]
            alive = {address for value in tensors for address in _addresses(value)}
        with tempfile.TemporaryDirectory() as home:
            path = Path(home) / "trace.json"
            seen.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        self.at_rest_bytes, self.peak_bytes = running_peak(events, alive)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """The step whose peak counts."""
        with torch.profiler.record_function(STEP):
            yield


def _addresses(tensor: Tensor) -> list[int]:
    """Where a tensor's values are, and its gradient's."""
    found = [tensor] if not tensor.is_leaf or tensor.grad is None else [tensor, tensor.grad]
    return [t.untyped_storage().data_ptr() for t in found if type(t) in (Tensor, torch.nn.Parameter)]


def running_peak(events: list[dict[str, Any]], alive: set[int]) -> tuple[int, int]:
    """From a trace: the bytes allocated when the step begins, and the most that are while it runs.

    What another thread released has no event of its own: its place is taken anew, or nothing is ``alive`` there at the end. Such a
    block counts until the next event.
    """
    step = next(e for e in events if e.get("name") == STEP and "dur" in e)
    changes = sorted(
        (float(e["ts"]), int(e["args"]["Bytes"]), int(e["args"]["Addr"])) for e in events if e.get("name") == "[memory]"
    )
    open_blocks: dict[int, int] = {}  # address: which change made it
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
    allocated = at_rest = highest = passing = 0
    for i, (when, change, _) in enumerate(changes):
        allocated += change - passing
        passing = change if i in lost else 0
        if when <= start:
            at_rest = highest = allocated
        elif when <= stop:
            highest = max(highest, allocated)
    return at_rest, highest
