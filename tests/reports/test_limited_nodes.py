"""Nodes with limited links: the rate holds, workers find each other there, and nothing is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from limited_nodes import limited_nodes, missing
from limited_processors import COMPUTING, GROUPS, compute_here

from autopar.errors import LaunchError, UsageError
from autopar.run.processes import Processes

pytestmark = pytest.mark.slow  # a report is no part of the product

here = pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing")
MEBIBYTES = 4


def namespaces(pid: int) -> list[str]:
    listed = subprocess.run(("ip", "netns", "list"), capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"autopar{pid}-")]


def send_s() -> float:
    """In a worker: seconds of sending ``MEBIBYTES`` to the next node, as the receiver sees it."""
    tensor = torch.zeros(MEBIBYTES << 18)
    for _ in range(2):  # the first one connects
        dist.barrier()
        start = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
    return time.perf_counter() - start


@here
def test_a_link_has_its_rate(processes_of_their_own: None):
    with limited_nodes(2, "200mbit") as netns:
        workers = Processes(2, placement=netns)
        try:
            workers.call("autopar.run.remote:join", "cpu", 60, timeout_s=120)
            seconds = workers.call("test_limited_nodes:send_s", timeout_s=60)[1]
        finally:
            workers.close()
    on_the_link_s = MEBIBYTES * 2**20 * 8 / 200e6
    assert seconds > 0.9 * on_the_link_s  # a busy machine may take longer, and nothing makes the link faster
    assert not namespaces(os.getpid())


def part_of_a_processor(seconds: float) -> tuple[float, list[str]]:
    """In a worker: the part of the time that the main thread runs if it never waits, and the groups of it, of another thread that computes
    and of one that doesn't."""
    asked, found = threading.Event(), {}

    def other(computes: bool) -> None:
        if computes:
            compute_here()
        asked.wait()
        found[computes] = group()

    def group() -> str:
        lines = Path(f"/proc/self/task/{threading.get_native_id()}/cgroup").read_text().splitlines()
        return next(line.split(":")[2] for line in lines if line.split(":")[1] == "cpu")

    threads = [threading.Thread(target=other, args=(computes,)) for computes in (True, False)]
    for thread in threads:
        thread.start()
    start, used = time.perf_counter(), time.thread_time()
    while time.perf_counter() < start + seconds:
        pass
    used = time.thread_time() - used
    asked.set()
    for thread in threads:
        thread.join()
    return used / seconds, [group(), found[True], found[False]]


@pytest.mark.skipif(bool(missing(own_processors=True)), reason=missing(own_processors=True) or "nothing is missing")
def test_a_node_computes_with_its_own_part_of_the_processors(processes_of_their_own: None):
    nodes = 2 * (os.cpu_count() or 1)
    with limited_nodes(nodes, "1gbit", own_processors=True) as netns:
        workers = Processes(nodes, placement=netns)
        try:
            found = workers.call("test_limited_nodes:part_of_a_processor", 1.0, timeout_s=60)
        finally:
            workers.close()
        groups = [GROUPS / f"autopar{os.getpid()}-{i}" for i in range(nodes)]
        assert all(group.is_dir() for group in groups)
    for (used, of_threads), group in zip(found, groups, strict=True):
        assert used < 1.1 * COMPUTING / 2  # less on a busy machine
        assert of_threads == [f"/{group.name}", f"/{group.name}", "/"]
    assert not any(group.exists() for group in groups)


@here
def test_nothing_is_left_after_a_failure():
    with pytest.raises(ZeroDivisionError), limited_nodes(2, "1gbit") as netns:
        assert len(namespaces(os.getpid())) == 3
        asleep = subprocess.Popen([*netns.prefixes[1], "sleep", "600"])
        time.sleep(0.2)
        1 / 0  # noqa: B018
    assert asleep.wait(10) == -signal.SIGKILL
    assert not namespaces(os.getpid())
    with pytest.raises(LaunchError, match="tbf"), limited_nodes(1, "fast"):
        pass
    assert not namespaces(os.getpid())


@here
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_process_that_was_ended(how: signal.Signals):
    code = "import time, limited_nodes\nwith limited_nodes.limited_nodes(1, '1gbit'):\n print(flush=True)\n time.sleep(600)"
    path = {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    made = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, **path})
    assert made.stdout is not None
    made.stdout.readline()
    assert len(namespaces(made.pid)) == 2
    made.send_signal(how)
    made.wait(30)
    made.stdout.close()
    if how is signal.SIGKILL:
        with limited_nodes(1, "1gbit"):
            pass
    assert not namespaces(made.pid)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(UsageError, match="tc not found") as error, limited_nodes(2, "1gbit"):
        pass
    assert error.value.hint is not None and "iproute2" in error.value.hint
