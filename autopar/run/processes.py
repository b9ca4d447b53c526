"""Local worker processes: started once, kept warm, called together, ended together.

The parent hosts the rendezvous store, so that it reports a taken port before anything starts, and the system can pick a free one.
Arguments and results are ``torch.save`` files in a private folder, calls and replies are JSON lines. When one rank fails, the parent kills
all of them, so that none waits for a dead one; the error names the rank that caused the failure, and its error.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import HANG, OUT_OF_MEMORY, LaunchError, UsageError

# seconds to wait for other ranks' reports after the first failure, to tell the cause from its consequences
_GRACE_S = 0.5

_LOCALHOST = "127.0.0.1"
_LOOPBACK = dict([("GLOO_SOCKET_IFNAME", name) for _, name in socket.if_nameindex() if name in ("lo", "lo0")][:1])
_BACKLOG = 2048

PROCESSES_PER_CORE = 8
"""Maximum number of processes per core. More would mostly wait for each other, and each takes some hundred MB."""
ALLOWED = "AUTOPAR_PROCESSES"
"""The environment variable that raises this limit."""


def check_count(count: int) -> None:
    """Raise ``UsageError`` if ``count`` exceeds the limit for this machine and the environment doesn't raise it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most, allowed = PROCESSES_PER_CORE * cores, os.environ.get(ALLOWED, "")
    if count > max(most, int(allowed) if allowed.isdecimal() else 0):
        raise UsageError(
            f"{count} processes on {cores} processor{'s' if cores > 1 else ''} would mostly wait for each other",
            f"start up to {most} here; {ALLOWED}={count} in the environment allows more",
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """How to start workers on other nodes, or in other network namespaces.

    ``prefixes`` has a command prefix per rank, such as ``("ip", "netns", "exec", "node0")`` or one of ``srun``; ``env`` is added to the
    workers' environment, for example ``MASTER_ADDR``, the parent's address on their network. Each node has ``per_node`` ranks (``None``:
    all run on this machine). ``folder`` is one that all nodes share, for files that workers read; ``None``: the temporary folder.
    """

    prefixes: tuple[tuple[str, ...], ...]
    env: Mapping[str, str] = field(default_factory=dict)
    per_node: int | None = None
    folder: Path | None = None


def finalize_unless_forked(
    owner: Any, work: Callable[..., object], *args: Any, **kwargs: Any
) -> weakref.finalize[Any, Any]:
    """Call ``work`` when ``owner`` is garbage-collected or this process exits, but not in a fork with a copy of ``owner``."""
    return weakref.finalize(owner, _unless_forked, os.getpid(), work, *args, **kwargs)


def _unless_forked(process: int, work: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    if os.getpid() == process:
        work(*args, **kwargs)


_alive: weakref.WeakSet[Processes] = weakref.WeakSet()


def _end_all() -> None:
    for processes in list(_alive):
        processes.close()


def _close_pipes_in_fork() -> None:
    """Close a fork's copies of the pipes, so that the workers end with their parent even if the fork lives on."""
    for processes in list(_alive):
        for worker in processes._workers:
            for stream in (worker.stdin, worker.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_pipes_in_fork)


class Processes:
    """``count`` single-threaded Python processes on this machine, with ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and
    ``MASTER_PORT`` set as ``torchrun`` sets them.

    Raises ``LaunchError`` if ``port`` (0: any free one) is taken, ``UsageError`` if ``count`` is too high for this machine.
    """

    def __init__(
        self, count: int, *, port: int = 0, env: dict[str, str] | None = None, placement: Placement | None = None
    ) -> None:
        placement = placement or Placement(((),) * count)
        assert count == len(placement.prefixes) > 0
        per_node = placement.per_node or count
        if placement.per_node is None:  # this machine says nothing of other nodes' processors
            check_count(count)
        self.count = count
        address = {**(env or {}), **placement.env}.get("MASTER_ADDR", _LOCALHOST)
        self.store = _listen(address, port, count)
        self.folder = Path(tempfile.mkdtemp(prefix="autopar-", dir=placement.folder))
        self._calls = 0
        self._target = ""  # the function of the last call
        self._unanswered = set[int]()  # the ranks whose reply to it was not read
        self._workers: list[subprocess.Popen[str]] = []
        common = {
            **(_LOOPBACK if address == _LOCALHOST else {}),
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(per_node),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(self.store.port),
            **(env or {}),
            **placement.env,
        }
        for rank, prefix in enumerate(placement.prefixes):
            with self._log(rank).open("w") as log:
                self._workers.append(
                    subprocess.Popen(
                        [*prefix, sys.executable, "-m", "autopar.run.worker"],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank % per_node)},
                    )
                )
        self._parent = os.getpid()
        self._finalizer = finalize_unless_forked(self, _end, self._workers, self.folder)
        _alive.add(self)
        # re-register: exit functions run last in, first out, and workers must end before anything that existed when they started
        atexit.unregister(_end_all)
        atexit.register(_end_all)

    @property
    def alive(self) -> bool:
        return self._finalizer.alive and all(worker.poll() is None for worker in self._workers)

    @property
    def started_here(self) -> bool:
        """Whether this process started the workers, and is no fork of the process that did."""
        return os.getpid() == self._parent

    def call(self, target: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Call ``"module:function"`` on every rank with the same arguments and return the results by rank.

        ``torch.load(weights_only=True)`` must be able to read arguments and results. Raises ``LaunchError`` and kills all ranks if one
        raises, dies, or doesn't answer within ``timeout_s`` seconds. In a fork of the process that started them, it only raises.

        If a call is interrupted (``KeyboardInterrupt``) while it waits, the ranks finish it, and the next call waits for that first. If it
        is interrupted while it is sent, all ranks are killed, because only some would run it.
        """
        if not self.started_here:
            raise LaunchError(
                "this process is a fork, and the worker processes are those of its parent",
                "call the program in the process that started it, or compile another one here",
            )
        if not self._finalizer.alive:
            raise LaunchError("the worker processes were ended, and their state is gone", "compile the program again")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._wait(deadline)
        self._calls += 1
        path = self.folder / f"call{self._calls}.pt"
        results = [self.folder / f"call{self._calls}.rank{rank}.pt" for rank in range(self.count)]
        torch.save((args, kwargs), path)
        self._target, self._unanswered = target, set(range(self.count))
        try:
            for rank, worker in enumerate(self._workers):
                call = {"call": self._calls, "target": target, "args": str(path), "result": str(results[rank])}
                # if the worker died, ``_wait`` sees the end of its standard output
                with contextlib.suppress(OSError, ValueError):
                    assert worker.stdin is not None
                    worker.stdin.write(json.dumps(call) + "\n")
                    worker.stdin.flush()
        except BaseException:
            self.close()
            raise
        self._wait(deadline)
        loaded = [torch.load(result, weights_only=True) for result in results]
        for file in (path, *results):
            file.unlink()
        return loaded

    def close(self) -> None:
        """End the processes and remove their folder. Idempotent; this process's exit does the same."""
        self._finalizer()

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def _wait(self, deadline: float | None) -> None:
        """Read the replies to the last call that were not read yet. Raises ``LaunchError`` as ``call`` does."""
        failures: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank in sorted(self._unanswered):
                worker = self._workers[rank]
                assert worker.stdout is not None
                selector.register(worker.stdout, selectors.EVENT_READ, rank)
            while selector.get_map():
                left = None if deadline is None else deadline - time.monotonic()
                ready = selector.select(left if left is None or left > 0 else 0)
                if not ready:
                    break
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    line = self._workers[key.data].stdout.readline()
                    self._unanswered.discard(key.data)
                    reply = json.loads(line) if line else self._death(key.data)
                    if not reply["ok"]:
                        failures[key.data] = reply
                        deadline = min(deadline or float("inf"), time.monotonic() + _GRACE_S)
            silent = sorted(key.data for key in selector.get_map().values())
        if failures or silent:
            raise self._failure(failures, silent)

    def _death(self, rank: int) -> dict[str, Any]:
        code = self._workers[rank].wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        last = _last_line(self._log(rank))
        error = how + (f" after printing: {last}" if last else "")
        # Linux kills the process that uses most when memory runs out; this process kills workers only after it read their replies
        return {"ok": False, "error": error, "consequence": False, "out_of_memory": code == -signal.SIGKILL}

    def _failure(self, failures: dict[int, dict[str, Any]], silent: list[int]) -> LaunchError:
        logs = {rank: self._log(rank).read_text(errors="replace")[-4000:] for rank in failures or silent}
        self.close()
        if not failures:
            ranks = ", ".join(map(str, silent))
            return LaunchError(
                f"no answer from rank {ranks} to {self._target}; all ranks were terminated",
                "probably a rank waits in a collective that another rank never calls",
                HANG,
            )
        rank = min(failures, key=lambda rank: failures[rank]["consequence"])  # the first reported cause
        error = LaunchError(
            f"rank {rank}: {failures[rank]['error']}",
            "all ranks were ended; fix the cause and run again",
            OUT_OF_MEMORY if failures[rank]["out_of_memory"] else "",
        )
        error.add_note(logs[rank])
        return error


def _listen(address: str, port: int, count: int) -> dist.TCPStore:
    """Return a store that listens on ``address`` only: torch's store by default listens on all interfaces, without authentication."""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
        # the store closes the listener
        return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    except (OSError, OverflowError, dist.DistNetworkError) as error:
        listener.close()
        is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        why = "is already taken" if is_taken else f"cannot be used ({getattr(error, 'strerror', None) or error})"
        raise LaunchError(
            f"port {port} on {address} {why}, so {count} processes have no rendezvous",
            "choose another port, or 0 for any that is free",
        ) from error


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _end(workers: list[subprocess.Popen[str]], folder: Path) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.wait()
        for stream in (worker.stdin, worker.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # unsent bytes to a dead process
                    stream.close()
    shutil.rmtree(folder, ignore_errors=True)
