"""Elastic training: ``autopar run --elastic MIN:MAX`` continues under a new plan when nodes leave or join.

The command replaces itself by ``torchrun``, whose agents (one per node) use ``torch.distributed.elastic``: a c10d rendezvous on the node
that ``--meet`` names. That node must stay up; the others may leave and join. When the number of nodes changes or a rank fails, the agents
stop all ranks and restart them. Each rank then runs this module: rank 0 plans and emits a program for the current number of nodes, unless
one exists, and all ranks run its ``train.py`` with ``--resume``. If there is no plan for a number of nodes (for example because its devices
don't divide the batch), the training uses the largest smaller number that has one, and the ranks of the other nodes wait.

Rank 0 hosts a new store at each restart. By default torch 2.13 reuses an agent's store, and after that agent's node has left, the other
agents still give its address to their ranks; with ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE`` they choose an address at every restart.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from autopar.errors import LaunchError, UsageError
from autopar.program.metrics import device_count
from autopar.program.watch import run
from autopar.run.folder import program_modules

BATCH, REQUEST = "batch.pt", "request.json"
RENDEZVOUS = "join_timeout=3600,last_call_timeout=10"
"""The value of ``--rdzv-conf``: wait an hour for the minimum number of nodes, then ten seconds for more."""
PRIVATE_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_POLL_S = 0.2


@dataclass(frozen=True)
class Elastic:
    """The requested training, the same on all nodes; the folder ``programs`` stores it, and the programs.

    ``request`` has the command line's options for the plan; its ``devices`` describes one node. ``ranks`` is the number of devices of a
    node. ``options`` are passed to ``train.py``.
    """

    request: Mapping[str, Any]
    ranks: int
    seed: int
    programs: str
    options: tuple[str, ...]

    @staticmethod
    def read(programs: str) -> Elastic:
        fields = json.loads((Path(programs) / REQUEST).read_text())
        return Elastic(**{**fields, "options": tuple(fields["options"])})

    def write(self) -> None:
        """Write the request for the ranks to read. Raises ``UsageError`` if the folder has another request."""
        folder, text = Path(self.programs), json.dumps(asdict(self), indent=1) + "\n"
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / REQUEST).is_file() and (folder / REQUEST).read_text() != text:
            raise UsageError(
                f"{folder} has the programs of another request", "give the same options, or another folder with -o DIR"
            )
        part = folder / f"{REQUEST}.{os.getpid()}.partial"  # other nodes may write the same file now
        part.write_text(text)
        part.replace(folder / REQUEST)

    def folder(self, nodes: int) -> Path:
        return Path(self.programs) / f"nodes-{nodes}"

    def refusal(self, nodes: int) -> Path:
        """Return the path of the file that says why there is no program for this number of nodes."""
        return Path(self.programs) / f"nodes-{nodes}.refused"

    def is_known(self, nodes: int) -> bool:
        return self.folder(nodes).is_dir() or self.refusal(nodes).is_file()

    def program(self, nodes: int, first: bool) -> Path:
        """Return the folder of the program for the largest number of nodes up to ``nodes`` that has a plan.

        Rank 0 (``first``) emits the program, and the others wait for it. Raises ``LaunchError`` if there is none, or emitting it fails.
        """
        for count in range(nodes, 0, -1):
            if first and not self.is_known(count):
                # in a subprocess, so that the search's memory is freed before training begins
                command = [sys.executable, "-m", "autopar.cli.elastic", self.programs, str(count)]
                rank_variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
                env = {name: value for name, value in os.environ.items() if name not in rank_variables}
                if subprocess.run(command, env=env).returncode:
                    raise LaunchError(
                        f"the program for {count} nodes could not be written", "the output above says why"
                    )
            while not self.is_known(count):
                time.sleep(_POLL_S)
            if self.folder(count).is_dir():
                return self.folder(count)
        why = self.refusal(nodes).read_text().strip()
        raise LaunchError(f"no number of nodes up to {nodes} has a plan: {why}", "see `autopar plan`")


@dataclass(frozen=True)
class Nodes:
    """The smallest and the largest number of nodes, the ``endpoint`` of the rendezvous, and the maximum number of restarts."""

    minimum: int
    maximum: int
    endpoint: str
    restarts: int

    @staticmethod
    def read(text: str, endpoint: str, restarts: int) -> Nodes:
        """Parse a range (``"2:4"``) and an endpoint (``HOST:PORT``). Raises ``UsageError`` if either is invalid, or the host is unknown."""
        minimum, _, maximum = text.partition(":")
        if not (minimum.isdecimal() and maximum.isdecimal() and 0 < int(minimum) <= int(maximum)):
            raise UsageError(f"--elastic {text} is not a range of nodes", "write MIN:MAX, such as 2:4")
        host, _, port = endpoint.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 2**16):
            raise UsageError(f"--meet {endpoint} is not an address", "give HOST:PORT, such as node0:29400")
        try:
            socket.getaddrinfo(host.strip("[]"), int(port))
        except OSError as error:
            raise UsageError(
                f"--meet {endpoint}: there is no host {host}", "give a node name that the other nodes can resolve"
            ) from error
        return Nodes(int(minimum), int(maximum), endpoint, restarts)


def become_agent(elastic: Elastic, nodes: Nodes) -> NoReturn:
    """Replace this process by the node's torchrun agent, which starts the ranks."""
    elastic.write()
    # the signal is for the ranks, which handle it; the agent must survive it
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"{nodes.minimum}:{nodes.maximum}"]
    words += ["--nproc-per-node", str(elastic.ranks), "--max-restarts", str(nodes.restarts), "--rdzv-backend", "c10d"]
    words += ["--rdzv-id", "autopar", "--rdzv-endpoint", nodes.endpoint, "--rdzv-conf", RENDEZVOUS]
    env = {"OMP_NUM_THREADS": "1", **os.environ, **PRIVATE_STORE}
    env["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    os.execve(sys.executable, [*words, "-m", "autopar.run.elastic", elastic.programs], env)


def rank(programs: str) -> None:
    """Run one rank, in the process that an agent started for it."""
    elastic = Elastic.read(programs)
    number, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = elastic.program(int(os.environ["GROUP_WORLD_SIZE"]), number == 0)
    devices = device_count(json.loads((folder / "plan.json").read_text()))
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=number == 0, wait_for_workers=False)
    if number >= devices:
        store.wait(["ended"], datetime.timedelta(days=365))
        store.add("left", 1)
        return
    # the store exists: don't host another
    os.environ |= {"WORLD_SIZE": str(devices), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    sys.argv = [str(folder / "train.py"), "--dataset", str(folder / BATCH), *elastic.options]
    if number == 0:
        print(f"training on {devices} devices ({folder})", file=sys.stderr, flush=True)
    with program_modules(folder):
        importlib.import_module("train").main()
    if number == 0 and world > devices:
        store.set("ended", "")
        while store.add("left", 0) < world - devices:  # this process serves the store until all waiting ranks have left
            time.sleep(_POLL_S)


if __name__ == "__main__":
    run(lambda: rank(sys.argv[1]))
