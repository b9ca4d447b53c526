"""What the watch costs the ranks' store: requests a second and connections, for nodes of 8 ranks.

Two nodes of watches run as threads of this process over a store that counts, until both have made 20 beats. A node's requests in a beat
and its connections are measured there; how far beats are apart at a number of nodes is ``Watch``'s own rule.

    python tests/reports watch-load
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from autopar.program import watch
from autopar.program.watch import NodeHeartbeats, Watch

RANKS = 8


@dataclass
class CountingStore:
    """A store in this process, shared by all its clients, that counts requests."""

    store: dist.HashStore
    requests: Counter[str] = field(default_factory=Counter)

    def __getattr__(self, name: str) -> Any:
        self.requests[name] += 1
        return getattr(self.store, name)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one node in one beat, and connections of one node."""

    requests: float
    connections: float


def measure(nodes: int = 2, ranks: int = RANKS, beats: int = 20) -> Load:
    """Run the watches of ``nodes`` times ``ranks``, and count."""
    environment = dict(os.environ)
    counting, opened = CountingStore(dist.HashStore()), []
    token = f"load-{os.getpid()}-{time.monotonic_ns()}"
    made = []
    for rank in range(nodes * ranks):
        place = {"GROUP_RANK": rank // ranks, "GROUP_WORLD_SIZE": nodes, "LOCAL_RANK": rank % ranks}
        os.environ.update({name: str(value) for name, value in place.items()} | {"LOCAL_WORLD_SIZE": str(ranks)})
        node, one = NodeHeartbeats(token, rank, nodes * ranks), Watch({"set-up": 600.0}, lost_after_s=6.0)
        one._interval_s = 0.02

        def connect(one: Watch = one) -> CountingStore:
            if one._store is None:
                opened.append(one)
                one._store = counting
            return counting

        one._open = connect  # type: ignore[method-assign]
        if node.speaker(6.0) == node.rank:
            connect()
        one._beat(node)
        made.append((node, one))
    os.environ.clear()
    os.environ.update(environment)
    counting.requests.clear()
    before = [one._beats for _, one in made]
    threads = [threading.Thread(target=one._watch, args=(node,), daemon=True) for node, one in made]
    for thread in threads:
        thread.start()
    while min(one._beats - b for (_, one), b in zip(made, before, strict=True)) < beats:
        time.sleep(0.01)
    for _, one in made:
        one._ended.set()
    for thread in threads:
        thread.join()
    speakers = sum(one._beats - b for (node, one), b in zip(made, before, strict=True) if node.rank % ranks == 0)
    return Load(sum(counting.requests.values()) / speakers, len(opened) / nodes)


def request_s(requests: int = 20_000) -> float:
    """Processor seconds that a ``TCPStore`` needs for a request, counted in the process that has the store."""
    code = "import sys, torch.distributed as d; s = d.TCPStore('127.0.0.1', 0, None, True); print(s.port, flush=True); sys.stdin.read()"
    words = [sys.executable, "-W", "ignore", "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdin is not None
        store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), None, False)
        before = _processor_s(server.pid)
        for i in range(requests // 3):  # those of a beat
            store.set(f"node {i % 64}", "the heartbeats of eight ranks." * 20)
            store.check(["stop"])
            store.get(f"node {i % 64}")
        used = _processor_s(server.pid) - before
        server.stdin.close()
    return used / requests


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    load, each_s = measure(), request_s()
    print(f"a request takes the store {each_s * 1e6:.1f} us of a processor (measured on this machine)")
    print(f"a node of {RANKS} ranks: {load.requests:.2f} requests a beat, {load.connections:.0f} connection")
    print("ranks    nodes   seconds between beats   requests/s   the store's processor   connections")
    for count in (64, 1024, 16384, 131072):
        nodes = count // RANKS
        interval_s = watch.interval_s(nodes, 60.0)
        rate = load.requests * nodes / interval_s
        row = f"{count:>7,} {nodes:>7,} {interval_s:>23.2f} {rate:>12,.0f} {rate * each_s:>22.1%}"
        print(f"{row} {load.connections * nodes:>13,.0f}")


if __name__ == "__main__":
    main()
