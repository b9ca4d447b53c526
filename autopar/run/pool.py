"""A pool of warm gloo processes: torch is imported once, and each call gets a default process group of its own.

Verification and the tests run one program after the other in a pool. Arguments and results are tensors, numbers, text, and lists,
tuples and dicts of these. A rank that raises, dies or hangs ends the call with its error; the next call finds new processes.
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
from autopar.run.processes import Processes
from autopar.run.worker import resolve
from autopar.torch_private import forget_meshes

_NOT_CONNECTED = "Gloo connectFullMesh failed"
"""A group that could not be made, seen where many groups come and go on one machine: nothing has run yet, so it is made once more."""

START_S = 300  # importing torch takes seconds, and on a machine that is busy a minute


class WorkerPool:
    """``count`` processes, started at the first call and again after a failure."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._processes: Processes | None = None

    def run(self, target: str, *args: Any, timeout_s: float = 60, **kwargs: Any) -> list[Any]:
        """Run ``"module:function"`` on every rank with the same arguments; the results by rank.

        Raises ``LaunchError`` when a rank raises, dies, or does not answer within ``timeout_s`` seconds.
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
    """Called in a worker: does nothing, but its answer says that the process has started and imported torch."""


def in_fresh_group(target: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Called in a worker: makes the call inside a new default gloo group, so that no group or mesh outlives the call."""
    global _calls
    _calls += 1
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if _calls % FREEZE_EVERY == 2:
        # Imports and caches that outlive a call need not be looked through after every other one: after a thousand calls that took half
        # of a worker's time. Nothing holds a group here.
        gc.collect()
        gc.freeze()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    timeout = datetime.timedelta(seconds=60)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    # spmd-types still calls the names of the collectives that 2.13 deprecates
    warnings.filterwarnings("ignore", category=FutureWarning, module="spmd_types")
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(str(_calls), store), rank=rank, world_size=world, timeout=timeout
    )
    try:
        return resolve(target)(*args, **kwargs)
    finally:
        # FSDP's modules and the schedules' stages are reference cycles that hold process groups, and every gloo group that lives has
        # threads that spin when a peer's sockets are closed: after some hundred calls a machine did little else. Groups that are
        # destroyed while they are held stay, so cycles go before that.
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()
