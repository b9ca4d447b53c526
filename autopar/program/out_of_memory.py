"""A rank without memory, in one sentence: the predicted bytes of its stage by part, the measured ones, and the change that saves most."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

_SIGNS = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "out of memory")
_CHANGES = {
    "activations": "recompute more (--pin activations=full), or make microbatches smaller (--pin microbatches=N)",
    "transients": "make microbatches smaller (--pin microbatches=N), or shard layers (--pin tensor=N)",
    "optimizer": "shard the optimizer's states (--pin zero=1), or keep them in the host's memory (--pin states=host)",
    "gradients": "shard gradients (--pin zero=2)",
    "parameters": "shard parameters (--pin zero=3), or use more pipeline stages (--pin pipeline=N)",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(sign in str(error) for sign in _SIGNS)


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Inside, an error of a failed allocation becomes a ``MemoryError`` that says what the plan in ``folder`` predicted."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        plan = json.loads((folder / "plan.json").read_text())
        asked = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise MemoryError(sentence(plan, int(os.environ.get("RANK", "0")), _measured(), asked)) from error


def sentence(plan: Mapping[str, Any], rank: int, measured: tuple[int, str], asked: str) -> str:
    """``measured`` are bytes and a name for them; ``asked`` is the allocator's own first line."""
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
        f"`autopar explain` says what each change saves ({asked})"
    )


def _measured() -> tuple[int, str]:
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated(), "the most that was allocated on the device"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "the most memory of the process"


def _size(size: int) -> str:
    for unit, bytes_ in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= bytes_:
            return f"{size / bytes_:.3g} {unit}"
    return f"{size} bytes"
