"""The processes of a program: reads their ranks from the launcher's variables, picks their devices, creates their process groups.

NCCL creates a communicator when its group is first used, and then waits for all of the group's ranks. So two ranks deadlock if they first
use two groups in opposite orders; a group's first batch of transfers deadlocks if some of its ranks don't take part.
``ProcessGroups.warm_up`` uses every group in the order in which all ranks created them.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NVME_FOLDER = "AUTOPAR_NVME"
"""The environment variable with the path of a folder on the node's NVMe."""


class StartError(RuntimeError):
    """Raised if the program can't run on these processes, devices or folders; the text ends with a hint."""

    def __init__(self, message: str, hint: str = "") -> None:
        self.message, self.hint = message, hint
        super().__init__(f"{message}\nhint: {hint}" if hint else message)


@dataclass(frozen=True)
class ProcessRanks:
    """This process's rank among all ``size`` processes, and among the ``local_size`` of its node; the local values are ``None`` if the
    launcher doesn't set them."""

    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None


def nvme_folder(named: str) -> str:
    """Return the folder on the node's NVMe: ``named``, from the plan or the command line, or else that of the environment. Raises
    ``StartError`` if there is none."""
    folder = named or os.environ.get(NVME_FOLDER, "")
    if not folder:
        raise StartError(
            "the plan keeps optimizer states on NVMe, and no NVMe folder is set",
            f"set one: nvme_path in the cluster file, train.py --nvme DIR, or the environment variable {NVME_FOLDER}",
        )
    return folder


def ranks_from_environment(environment: Mapping[str, str]) -> ProcessRanks:
    """Return this process's ranks, from the variables of torchrun or ``srun``.

    If a launcher sets ``RANK`` and ``WORLD_SIZE`` but not the local variables, those of an ``srun`` step with as many processes are used.
    """
    in_srun_step = "SLURM_STEP_NUM_TASKS" in environment and "SLURM_PROCID" in environment
    if "RANK" not in environment and in_srun_step:
        rank, size = int(environment["SLURM_PROCID"]), int(environment["SLURM_STEP_NUM_TASKS"])
    else:
        rank, size = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
    if size == 1:
        return ProcessRanks(rank, size, int(environment.get("LOCAL_RANK", "0")), 1)
    local_rank, local_size = environment.get("LOCAL_RANK"), environment.get("LOCAL_WORLD_SIZE")
    if local_rank is None and in_srun_step and int(environment["SLURM_STEP_NUM_TASKS"]) == size:
        local_rank = environment.get("SLURM_LOCALID")
        local_size = local_size or _tasks_of_node(environment)
    return ProcessRanks(
        rank, size, None if local_rank is None else int(local_rank), None if local_size is None else int(local_size)
    )


def _tasks_of_node(environment: Mapping[str, str]) -> str | None:
    """Return the number of the step's processes on this node: ``SLURM_STEP_TASKS_PER_NODE`` is ``4(x2),3`` for nodes with 4, 4 and 3."""
    node, nodes = int(environment.get("SLURM_NODEID", "0")), 0
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if (found := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)) is None:
            break
        nodes += int(found[2] or 1)
        if node < nodes:
            return found[1]
    return environment.get("SLURM_NTASKS_PER_NODE")


def set_rendezvous(environment: MutableMapping[str, str], ranks: ProcessRanks) -> None:
    """Set the variables of torch's rendezvous that the launcher has not set.

    Raises:
        StartError: rank 0's address is unknown: ``srun`` started processes on several nodes, or another launcher set only the ranks.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if ranks.size > 1 and missing and "RANK" in environment:
        raise StartError(
            f"RANK is {ranks.rank} of {ranks.size} processes, and {' and '.join(missing)} of the process of rank 0 is not set",
            "start the processes with torchrun, or set MASTER_ADDR and MASTER_PORT in all of them",
        )
    if ranks.size > 1 and missing:
        if "MASTER_ADDR" in missing and environment.get("SLURM_STEP_NUM_NODES", "1") != "1":
            raise StartError(
                f"srun has started {ranks.size} processes on {environment['SLURM_STEP_NUM_NODES']} nodes, and MASTER_ADDR, the address of "
                "the first node, is not set",
                'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) before srun, or start torchrun on every '
                "node (autopar dev launch writes a batch file that does)",
            )
        environment.setdefault("MASTER_PORT", str(20000 + int(environment.get("SLURM_JOB_ID", "0")) % 20000))
    defaults = {"RANK": ranks.rank, "WORLD_SIZE": ranks.size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    for name, value in defaults.items():
        environment.setdefault(name, str(value))


def device_of(ranks: ProcessRanks, kind: str | None) -> torch.device:
    """Return the device of this process; ``kind`` is ``"cuda"``, ``"cpu"``, or ``None`` for GPUs if the node has any.

    A process that sees one GPU uses it: launchers may give each process its own. Otherwise the node's processes see the same GPUs, and each
    uses the GPU of its local rank.

    Raises:
        StartError: torch can't use the node's GPUs; there are several, but too few, or the local rank is unknown; or ``kind`` is ``"cuda"``
            without GPUs.
    """
    if kind == "cpu":
        return torch.device("cpu")
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if seen == 0:
        if kind == "cuda" or _has_gpus():
            node = "this node has GPUs, and torch" if _has_gpus() else "torch"
            raise StartError(
                f"{node} {torch.__version__} sees none (torch.cuda.is_available() is {torch.cuda.is_available()}, CUDA_VISIBLE_DEVICES is "
                f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})",
                "install torch for the node's CUDA driver, or train on the CPUs with --device cpu",
            )
        return torch.device("cpu")
    if seen == 1:
        return torch.device("cuda", 0)
    if ranks.local_rank is None:
        raise StartError(
            f"this process sees {seen} GPUs, and LOCAL_RANK does not say which of them is its own",
            "start with torchrun or srun, or set LOCAL_RANK and LOCAL_WORLD_SIZE in every process; --device cpu trains on the CPUs",
        )
    if ranks.local_rank >= seen or (ranks.local_size or 0) > seen:
        processes = ranks.local_size or ranks.local_rank + 1
        raise StartError(
            f"this node has {processes} processes of the program, and each of them sees {seen} GPUs",
            f"start {seen} processes on every node with a plan for such nodes, make one GPU visible to each process, or train on the CPUs "
            "with --device cpu",
        )
    return torch.device("cuda", ranks.local_rank)


def _has_gpus() -> bool:
    """Return whether this process can open an NVIDIA GPU that ``CUDA_VISIBLE_DEVICES`` doesn't hide."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(os.access(path, os.R_OK | os.W_OK) for path in Path("/dev").glob("nvidia[0-9]*"))


def check_node(ranks: ProcessRanks, plan: Mapping[str, Any], axes: Mapping[str, int]) -> None:
    """Raise ``StartError`` if the number of the program's processes on this node isn't the plan's number of GPUs per node.

    The plan's prices assume which groups of ranks are inside a node. A plan without ``gpus_per_node`` may run on any nodes, as
    may processes without a known ``local_size``.
    """
    gpus_per_node, devices = int(plan.get("gpus_per_node", 0)), plan["devices"]
    if gpus_per_node in (0, ranks.local_size) or ranks.local_size is None:
        return
    mesh = " x ".join(f"{axis} {size}" for axis, size in axes.items())
    wanted, found = (f"{count} GPU{'s' if count != 1 else ''}" for count in (gpus_per_node, ranks.local_size))
    raise StartError(
        f"the plan is for nodes of {wanted} ({devices}: {mesh}), and this node has {ranks.local_size} of the program's {ranks.size} "
        "processes: groups of ranks that the plan priced inside one node would cross nodes",
        f"start {gpus_per_node} of them on every node, or plan for nodes of {found} and emit again; all plans resume from the same "
        "checkpoints",
    )


# -- groups -----------------------------------------------------------------------------------------------------------

ONE_BY_ONE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
"""Whether torch's pipeline schedules issue each send and receive separately; before 2.13 they issue batches. NCCL runs a separate transfer
on a communicator of the two ranks, and a batch on the group's communicator."""


class ProcessGroups:
    """Creates process groups of some ranks of the world; all ranks of the world call the methods, in the same order.

    ``timeout`` is the time limit of collectives in every group.
    """

    def __init__(self, timeout: datetime.timedelta) -> None:
        self._timeout = timeout
        self._groups: list[dist.ProcessGroup] = []  # this rank's groups, in the order of their creation
        self._links: list[dist.ProcessGroup] = []
        self._own_group: dist.ProcessGroup | None = None

    def new_groups(self, ranks: Tensor) -> dist.ProcessGroup | None:
        """Create a group for every row of ``ranks``; return this rank's group, or ``None`` if it is in no row.

        A row of all ranks gets the world's group. The group of a row with one rank is created by that rank alone, once.
        """
        mine = self._create_groups(ranks)
        if mine is not None and dist.get_world_size(mine) > 1:
            self._groups.append(mine)
        return mine

    def _create_groups(self, ranks: Tensor) -> dist.ProcessGroup | None:
        rank, world, mine = dist.get_rank(), dist.get_world_size(), None
        for row in ranks.tolist():
            if len(row) == world:
                mine = dist.group.WORLD
            elif len(row) > 1:
                group = dist.new_group(row, timeout=self._timeout)
                mine = group if rank in row else mine
            elif row == [rank]:
                mine = self._single()
        return mine

    def _single(self) -> dist.ProcessGroup:
        """Return the group of this rank alone."""
        if self._own_group is None:
            ranks = [dist.get_rank()]
            self._own_group = dist.new_group(ranks, timeout=self._timeout, use_local_synchronization=True)
        assert self._own_group is not None
        return self._own_group

    def flattened(
        self, wanted: Iterable[tuple[str, ...]], names: Sequence[str], ranks: Tensor
    ) -> dict[tuple[str, ...], dist.ProcessGroup]:
        """Return this rank's group over each combination of axes in ``wanted`` (outermost first). Dim 0 of ``ranks`` is the pipeline rank,
        or a pair of mirrored pipeline ranks; the other dims are the axes ``names``."""
        groups = {}
        for axes in sorted(wanted):
            inner = [1 + names.index(axis) for axis in axes]
            outer = [dim for dim in range(ranks.dim()) if dim not in inner]
            group = self.new_groups(ranks.permute(*outer, *inner).flatten(len(outer)).flatten(0, len(outer) - 1))
            assert group is not None
            groups[axes] = group
        return groups

    def links(
        self, ranks: Tensor, pairs: Iterable[tuple[int, int]], pipeline: dist.ProcessGroup
    ) -> Mapping[int, dist.ProcessGroup]:
        """Return ``{peer: group}``: a two-rank group for each rank that this rank exchanges tensors with.

        ``ranks[pipeline, ...]`` are all ranks, ``pairs`` the pipeline ranks that exchange tensors. NCCL runs the transfers of a
        communicator in the order of their issue: on a communicator of all pipeline ranks, a receive that was issued early holds up a send
        to another rank. If the ``pipeline`` group has only two ranks, it is used itself.
        """
        found: dict[int, dist.ProcessGroup] = {}
        rank = dist.get_rank()
        # pairs without a common rank follow each other, so that their communicators are made at the same time
        for pair in sorted(set(pairs), key=lambda pair: (pair[0] % 2, pair)):
            rows = ranks[list(pair)].flatten(1).t()
            group = pipeline if len(ranks) == 2 else self._create_groups(rows)
            for row in rows.tolist() if group is not None else ():
                if rank in row:
                    assert group is not None
                    found[row[1 - row.index(rank)]] = group
                    self._links.append(group)
        return found

    def warm_up(self, device: torch.device) -> None:
        """Use every group of this rank once, in the order of creation. With gloo, which connects when a group is created, do nothing.

        Raises ``RuntimeError`` as NCCL does, if ranks cannot connect.
        """
        if dist.get_backend() == "gloo":
            return
        one = torch.zeros(1, device=device)
        for group in (dist.group.WORLD, *self._groups):
            dist.all_reduce(one, group=group)
        for link in self._links:
            op, peer = (dist.isend, 1) if dist.get_rank(link) == 0 else (dist.irecv, 0)
            for work in start_transfers([dist.P2POp(op, one, group=link, group_peer=peer)]):
                work.wait()


def start_transfers(transfers: Sequence[dist.P2POp]) -> list[dist.Work]:
    """Start sends or receives as torch's pipeline schedules do (``ONE_BY_ONE``), so that NCCL uses the communicators that they use."""
    if not transfers:
        return []
    if not ONE_BY_ONE:
        return list(dist.batch_isend_irecv(list(transfers)))
    works = [transfer.op(transfer.tensor, transfer.peer, transfer.group) for transfer in transfers]
    return [work for work in works if work is not None]
