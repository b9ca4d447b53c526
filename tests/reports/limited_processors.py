"""Processors of their own for nodes inside of one machine: each node's computing thread gets a given part of a processor, and no more.

Without a limit, nodes that outnumber the processors share them: while one node waits, another one computes faster, which no two machines
do. The kernel's CPU bandwidth control (cgroup v1's ``cpu.cfs_quota_us``) limits the main thread of each process. All other threads
are let out of the group: gloo's threads then move bytes as a network card does, in the processor time that is left. A thread that waits
saves up at most one period's time. Threads that call ``compute_here`` stay in the group, and share its processor time.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/cpu")
LEAST_QUOTA_US = 1000  # the kernel takes no shorter one; the shorter, the steadier is a node's speed
SWEEP_S = 0.05  # how often new threads are let out
SHARES = 1 << 15  # of a busy machine's processors: 32 times those of an ordinary group, so that nodes get their parts
COMPUTING = 0.75  # of the machine's processors: nodes compute with them; the rest moves bytes
GONE_S = 5.0  # how long a killed process may take to leave its group


def missing() -> str:
    """What this machine lacks for limited processors; empty if nothing."""
    return "" if (GROUPS / "cpu.cfs_quota_us").is_file() and os.access(GROUPS, os.W_OK) else f"no cgroup v1 at {GROUPS}"


COMPUTES = "computes"
"""The system's name of a thread that computes."""


def compute_here(*_: str) -> None:
    """Let this thread compute with the processor time of its node, and stay on one processor: the kernel hands out that time by processor,
    so threads that take turns must be on the same one."""
    Path("/proc/self/task", str(threading.get_native_id()), "comm").write_text(COMPUTES)
    os.sched_setaffinity(0, {int(os.environ["RANK"]) % (os.cpu_count() or 1)})


@contextlib.contextmanager
def limited_processors(names: list[str]) -> Iterator[list[tuple[str, ...]]]:
    """For each of ``names`` a group of threads with an equal part of the processors (``COMPUTING``); yields the words that go before a
    command that is to run in it. The commands must have ended when the context ends."""
    share = min(1.0, COMPUTING * (os.cpu_count() or 1) / len(names))
    groups = [GROUPS / name for name in names]
    ended = threading.Event()
    sweeper = threading.Thread(target=_let_out, args=(groups, ended), daemon=True)
    try:
        for group in groups:
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(round(LEAST_QUOTA_US / share)))
            (group / "cpu.cfs_quota_us").write_text(str(LEAST_QUOTA_US))
            (group / "cpu.shares").write_text(str(SHARES))
        sweeper.start()
        yield [("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh") for group in groups]
    finally:
        ended.set()
        if sweeper.ident is not None:
            sweeper.join()
        for group in groups:
            remove(group.name)


def remove(name: str) -> None:
    """Remove a group, if there is one; processes that were killed may take a moment to leave it."""
    group, deadline = GROUPS / name, time.monotonic() + GONE_S
    while group.is_dir() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.01)


def _let_out(groups: list[Path], ended: threading.Event) -> None:
    """Move every thread but the computing ones of each process out of the groups, until ``ended``."""
    while not ended.wait(SWEEP_S):
        for group in groups:
            main = set((group / "cgroup.procs").read_text().split())
            inside = set((group / "tasks").read_text().split())
            computing = main | {thread for process in main for thread in _computing(process)}
            for threads, tasks in ((inside - computing, GROUPS), (computing - inside, group)):
                for thread in threads:
                    with contextlib.suppress(OSError):  # it has ended
                        (tasks / "tasks").write_text(thread)


def _computing(process: str) -> list[str]:
    """The threads of a process that called ``compute_here``."""
    found = []
    with contextlib.suppress(OSError):  # it, or one of its threads, has ended
        for thread in Path("/proc", process, "task").iterdir():
            if (thread / "comm").read_text().strip() == COMPUTES:
                found.append(thread.name)
    return found
