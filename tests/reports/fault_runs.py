"""Trainings to be interrupted: torchrun's agent and its ranks, forked from a process that has imported torch already.

Importing torch takes a rank four seconds of a processor, and the report starts some hundred ranks. A ``Server`` imports once, in its own
network namespace if it has one, and forks an agent of ``torch.distributed.launcher`` for each start, whose ranks are forks too. Signals,
groups of processes and exits are those of ``torchrun``; a case in ten is started by the ``torchrun`` command itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.run.elastic import PRIVATE_STORE, rank


def free_port() -> int:
    """A port that no process of this machine has now: several tests and reports may start trainings at a time."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Server:
    """The process that forks; ``prefix`` are the words that start it on its node."""

    def __init__(self, prefix: Sequence[str] = (), env: dict[str, str] | None = None) -> None:
        self.prefix, self.env = tuple(prefix), {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-W", "ignore", str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.env,
        )

    def start(self, job: dict[str, Any]) -> int:
        """The number of the agent's process."""
        if job["command"]:
            return self._command(job)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def _command(self, job: dict[str, Any]) -> int:
        address, port = job["meet"].split(":")
        words = ["--nnodes", job["nodes"], "--node-rank", job["node"], "--nproc-per-node", job["ranks"]]
        words += ["--master-addr", address, "--master-port", port, f"{job['folder']}/train.py", *job["options"]]
        with open(job["out"], "a") as out, open(job["err"], "a") as err:
            started = subprocess.Popen(
                [*self.prefix, sys.executable, "-m", "torch.distributed.run", *map(str, words)],
                stdout=out,
                stderr=err,
                env=self.env,
            )
        commands.append(started)
        return started.pid

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


commands: list[subprocess.Popen[bytes]] = []


@dataclass
class Run:
    """One start of a training on all its nodes: the agents, and what they have printed."""

    folder: Path
    ranks: int  # on each node
    options: Sequence[str]
    servers: Sequence[Server]
    place: Path  # of the output
    address: str = "127.0.0.1"
    command: bool = False
    least: int = 0  # of an elastic training: ``folder`` has its programs, and each node an agent on ``servers``
    agents: list[int] = field(default_factory=list)

    def start(self) -> Run:
        self.place.mkdir(parents=True, exist_ok=True)
        port = free_port()
        for node, server in enumerate(self.servers):
            job = {"nodes": len(self.servers), "node": node, "ranks": self.ranks, "meet": f"{self.address}:{port}"}
            job |= {"folder": str(self.folder), "options": list(self.options), "command": self.command}
            job |= {"programs": str(self.folder), "least": self.least} if self.least else {}
            job |= {"out": str(self.place / f"out{node}"), "err": str(self.place / f"err{node}")}
            self.agents.append(server.start(job))
        return self

    def losses(self) -> dict[int, float]:
        """What rank 0 printed, by step; of a step that was made again, the last one."""
        lines = [line for path in self.place.glob("out*") for line in path.read_text().splitlines()]
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return {line["step"]: line["loss"] for line in found}

    def talk(self) -> str:
        return "".join(path.read_text() for path in sorted(self.place.glob("err*")))

    def said(self) -> list[str]:
        """The sentences on the end."""
        return re.findall(r"the training ends: (.*)", self.talk())

    def begun(self) -> int:
        found = re.search(r"continues after step (\d+)", self.talk())
        return int(found[1]) if found else 0

    def workers(self) -> list[int]:
        """The ranks' processes, by rank."""
        return sorted(child for agent in self.agents for child in children(agent))

    def wait(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Wait until ``done``, or until the training has ended; whether it was ``done`` in time."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if done():
                return True
            if not any(alive(agent) for agent in self.agents):
                return done()
            time.sleep(0.002)
        return False


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is still to be collected does not."""
    for started in commands:
        if started.pid == pid:
            return started.poll() is None
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


# -- in the server ----------------------------------------------------------------------------------------------------


def work(folder: str, options: Sequence[str]) -> None:
    """A rank: ``train.py``."""
    ctypes.CDLL(None).prctl(1, 0)  # torch's forks, unlike torchrun's processes, end with their agent: PR_SET_PDEATHSIG
    sys.argv = [f"{folder}/train.py", *options]
    sys.path.insert(0, folder)
    importlib.import_module("train").main()


def elastic_work(programs: str) -> None:
    """A rank of an elastic training."""
    ctypes.CDLL(None).prctl(1, 0)
    rank(programs)


def agent(job: dict[str, Any]) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, path in ((1, job["out"]), (2, job["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if "programs" in job:
        os.environ |= PRIVATE_STORE
        settings = {"join_timeout": 120, "last_call_timeout": 2, "keep_alive_interval": 1}
        config = LaunchConfig(
            job["least"],
            job["nodes"],
            job["ranks"],
            run_id="autopar",
            rdzv_backend="c10d",
            rdzv_endpoint=job["meet"],
            rdzv_configs=settings,
            max_restarts=5,
            start_method="fork",
        )
        elastic_launch(config, elastic_work)(job["programs"])
        return
    config = LaunchConfig(
        job["nodes"],
        job["nodes"],
        job["ranks"],
        run_id="none",
        rdzv_backend="static",
        rdzv_endpoint=job["meet"],
        rdzv_configs={"rank": job["node"], "timeout": 60},
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(config, work)(job["folder"], job["options"])


def serve() -> None:
    import torch

    for module in (
        "torch.distributed.launcher.api",
        "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
        "autopar.program.trainer",
        "autopar.program.pipeline",
        "autopar.program.fsdp",
        "autopar.program.watch",
    ):
        importlib.import_module(module)
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody collects the agents
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                agent(json.loads(line))
                status = 0
            finally:
                os._exit(status)
        print(pid, flush=True)


if __name__ == "__main__":
    serve()
