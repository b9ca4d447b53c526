"""Nodes inside of one machine, with links of a given rate: network namespaces on a bridge, each of which sends no faster than the rate,
and, where asked, processors of their own (``limited_processors``).

A transfer then takes its time on the link and costs almost no processor time, as between machines. Communication that runs under
computation is measurably faster than one after the other, on two cores and without a GPU::

    with limited_nodes(2, "200mbit") as netns:
        workers = Processes(2, placement=netns)

It needs Linux, root, ``ip`` and ``tc`` (iproute2), and cgroup v1 for processors. Namespaces carry the number of the process that made
them. They are removed when the context ends, however it ends; those of a process that was killed are removed by the next one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import limited_processors

from autopar.errors import LaunchError, UsageError
from autopar.run.processes import Placement

BURST = "64kb"  # what a link passes at once after a pause: tc's bucket must hold a packet, and the kernel makes them of up to 64 KB
QUEUE = "100ms"  # how long bytes wait for their turn, beyond which packets are dropped
INTERFACE = "eth0"
_NAME = re.compile(r"autopar(\d+)-\w+")


def missing(own_processors: bool = False) -> str:
    """What this machine lacks for limited nodes; empty if nothing."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"{' and '.join(absent)} not found"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    return limited_processors.missing() if own_processors else ""


@contextlib.contextmanager
def limited_nodes(count: int, rate: str, own_processors: bool = False) -> Iterator[Placement]:
    """``count`` nodes whose links send at ``rate`` in each direction, written as in tc(8): ``200mbit``, ``1gbit``.

    ``own_processors``: each node computes with its own part of the machine's processors, whether other nodes are busy or idle. Processes
    that still run on the nodes at the end are killed.

    Raises:
        UsageError: this machine lacks what it takes.
        LaunchError: ``ip`` or ``tc`` fails.
    """
    if reason := missing(own_processors):
        raise UsageError(
            f"limited nodes cannot be made: {reason}",
            "run as root on Linux with iproute2 (`apt-get install iproute2`) and, for processors, cgroup v1",
        )
    assert 0 < count < 254, count
    _remove_stale()
    me = f"autopar{os.getpid()}"
    switch, nodes = f"{me}-switch", [f"{me}-{i}" for i in range(count)]
    network = f"10.77.{os.getpid() % 256}"
    parent = f"ap{os.getpid()}"
    with _terminated_as_interrupted(), contextlib.ExitStack() as stack:
        try:
            own: list[tuple[str, ...]] = [()] * count
            if own_processors:
                own = stack.enter_context(limited_processors.limited_processors(nodes))
            _run("ip", "netns", "add", switch)
            _inside(switch, "ip", "link", "add", "bridge", "type", "bridge")
            _inside(switch, "ip", "link", "set", "bridge", "up")
            for i, node in enumerate(nodes):
                _run("ip", "netns", "add", node)
                _plug(switch, f"port{i}", "ip", "link", "add", INTERFACE, "netns", node)
                _inside(node, "ip", "link", "set", "lo", "up")
                _inside(node, "ip", "addr", "add", f"{network}.{i + 1}/24", "dev", INTERFACE)
                _inside(node, "ip", "link", "set", INTERFACE, "up")
                limit = ("rate", rate, "burst", BURST, "latency", QUEUE)
                _inside(node, "tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *limit)
            # the parent's own way to the nodes, for the store where workers meet
            _plug(switch, "parent", "ip", "link", "add", parent)
            _run("ip", "addr", "add", f"{network}.254/24", "dev", parent)
            _run("ip", "link", "set", parent, "up")
            prefixes = tuple((*words, "ip", "netns", "exec", node) for words, node in zip(own, nodes, strict=True))
            yield Placement(prefixes, {"MASTER_ADDR": f"{network}.254", "GLOO_SOCKET_IFNAME": INTERFACE})
        finally:
            # the kernel removes a namespace's links some time after the namespace, and the next nodes need this link's name
            subprocess.run(("ip", "link", "delete", parent), capture_output=True)
            for name in (*nodes, switch):
                _remove(name)


def _plug(switch: str, port: str, *link: str) -> None:
    """Make a link whose other end is a port of the switch."""
    _run(*link, "type", "veth", "peer", "name", port, "netns", switch)
    _inside(switch, "ip", "link", "set", port, "master", "bridge", "up")


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise LaunchError(
            f"`{' '.join(words)}` ended with status {done.returncode}: {done.stderr.strip()}",
            "a container needs the capabilities NET_ADMIN and SYS_ADMIN for network namespaces",
        )


def _inside(namespace: str, *words: str) -> None:
    _run("ip", "netns", "exec", namespace, *words)


def _remove(namespace: str) -> None:
    """Remove a namespace, if there is one, with its links and the processes in it."""
    found = subprocess.run(("ip", "netns", "pids", namespace), capture_output=True, text=True)
    for pid in found.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(("ip", "netns", "delete", namespace), capture_output=True)


def _remove_stale() -> None:
    """Remove the namespaces of processes that are gone."""
    listed = subprocess.run(("ip", "netns", "list"), capture_output=True, text=True).stdout
    for match in _NAME.finditer(listed):
        if not Path("/proc", match[1]).exists():
            _remove(match[0])
            limited_processors.remove(match[0])


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Inside, SIGTERM raises ``SystemExit``, so that the context's end is reached."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
