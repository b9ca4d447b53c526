"""A pool of warm gloo processes: they import torch once, and each call gets a new default process group.

Verification and the tests run many programs in one pool. Arguments and results are tensors, numbers, text, and lists, tuples and dicts
of these. If a rank raises, dies or hangs, the call raises ``LaunchError`` and the next call starts new processes.
"""

from __future__ import annotations

import datetime
import gc
import os
import random
import warnings
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import LaunchError
from autopar.program.importing import resolve
from autopar.run.processes import Processes
from autopar.torch_private import forget_meshes

_NOT_CONNECTED = "Gloo connectFullMesh failed"
"""A sporadic failure of gloo on a machine where many groups start and end. Nothing has run yet, so the call is retried once."""

START_S = 300  # seconds: importing torch takes a few, on a busy machine 60


class WorkerPool:
    """A pool of ``count`` processes; the first call starts them, and the call after a failure starts new ones."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._processes: Processes | None = None

    def run(self, target: str, *args: Any, timeout_s: float = 60, **kwargs: Any) -> list[Any]:
        """Run ``"module:function"`` on every rank with the same arguments and return the results by rank.

        Raises ``LaunchError`` if a rank raises, dies, or doesn't answer within ``timeout_s`` seconds.
        """
        try:
            return self._run(target, args, kwargs, timeout_s)
        except LaunchError as error:
            if _NOT_CONNECTED not in error.message:
                raise
        return self._run(target, args, kwargs, timeout_s)

    def _run(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float) -> list[Any]:
        if self._processes is None or not self._processes.alive:
            self.close()
            self._processes = Processes(self.count)
            self._processes.call("autopar.run.pool:ready", timeout_s=START_S)
        return self._processes.call("autopar.run.pool:in_fresh_group", target, args, kwargs, timeout_s=timeout_s)

    def close(self) -> None:
        """End the processes. Idempotent."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


FREEZE_EVERY = 8
_calls = 0


def ready() -> None:
    """Return at once. Called in a worker, it shows that the process has started and imported torch."""


def in_fresh_group(target: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call the target inside a new default gloo group, so that no group or mesh outlives the call. Runs in a worker."""
    global _calls
    _calls += 1
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if _calls % FREEZE_EVERY == 2:
        # Freeze imports and caches, so that collections don't scan them: after a thousand calls, scans took half of a worker's time.
        # No process group is alive here.
        gc.collect()
        gc.freeze()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    timeout = datetime.timedelta(seconds=60)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    # spmd-types still calls collectives by names that torch 2.13 deprecates
    warnings.filterwarnings("ignore", category=FutureWarning, module="spmd_types")
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(str(_calls), store), rank=rank, world_size=world, timeout=timeout
    )
    try:
        return resolve(target)(*args, **kwargs)
    finally:
        # FSDP modules and pipeline stages are reference cycles that hold process groups, and the threads of a live gloo group spin once
        # a peer's sockets are closed: after some hundred calls the machine did little else. Destroying a group that is still referenced
        # doesn't free it, so collect cycles first.
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()
