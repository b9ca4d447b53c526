"""Starts worker processes on the nodes of a SLURM allocation: ``srun`` starts each, from the node where this process runs."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from autopar.errors import LaunchError, UsageError
from autopar.run.processes import Placement

# All steps share the allocation's processors, memory and GPUs. A rank's standard input is the pipe of its srun, and a rank ends with it.
# What the allocation binds to each of its tasks (``--gpus-per-task``) would give a rank's step one GPU, whatever its local rank.
_UNBOUND = ("env", "-u", "SLURM_GPUS_PER_TASK", "-u", "SLURM_TRES_PER_TASK", "-u", "SLURM_GPU_BIND")
_SRUN = (*_UNBOUND, "srun", "--overlap", "--cpu-bind=none", "--kill-on-bad-exit=1", "--ntasks-per-node=1")
_TIMEOUT_S = 120.0  # of a command of SLURM, which waits while its controller is busy


def is_in_allocation() -> bool:
    return "SLURM_JOB_NODELIST" in os.environ


def is_one_task_of_several() -> bool:
    """Return whether ``srun`` started this process as one of several tasks, unlike ``sbatch`` and ``salloc``."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def slurm_placement(nodes: int, per_node: int, folder: Path) -> Placement:
    """Return how to start ``per_node`` ranks on each of the first ``nodes`` nodes of this allocation, with files in ``folder``.

    Raises:
        UsageError: the allocation has fewer nodes, or they don't share ``folder``.
        LaunchError: a command of SLURM fails.
    """
    hosts = _run("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
    if len(hosts) < nodes:
        raise UsageError(
            f"the SLURM allocation has {len(hosts)} nodes, and the devices are {nodes} nodes",
            f"allocate {nodes} nodes, or give --devices for {len(hosts)}",
        )
    hosts, folder = hosts[:nodes], folder.resolve()
    every_node = (*_SRUN, f"--nodes={nodes}", f"--ntasks={nodes}", f"--nodelist={','.join(hosts)}")
    found = _run(*every_node, "sh", "-c", 'test -d "$0" && echo yes || echo no', str(folder)).split()
    if set(found) != {"yes"}:
        raise UsageError(
            f"not all of the nodes {', '.join(hosts)} have the folder {folder}",
            "name a log in a folder that all nodes share: --log FILE",
        )
    prefixes = [(*_SRUN, "--nodes=1", "--ntasks=1", f"--nodelist={host}") for host in hosts for _ in range(per_node)]
    return Placement(tuple(prefixes), {"MASTER_ADDR": _address(hosts)}, per_node, folder)


def _address(hosts: Sequence[str]) -> str:
    """Return this machine's address on the network of the last host; no packet is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((hosts[-1], 9))
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise LaunchError(
            f"the node {hosts[-1]} has no address here: {error.strerror or error}",
            "run it on a node of the allocation, whose names resolve",
        ) from error


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            f"{command[0]} cannot be run: {error}", "run it where SLURM's commands are installed"
        ) from error
    if done.returncode != 0:
        raise LaunchError(f"{' '.join(command)} failed: {done.stderr.strip()}", "see the message of SLURM")
    return done.stdout
