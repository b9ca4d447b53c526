"""Which device a process takes, whatever launcher has started it, and which processes are refused."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs import Shape, write_mlp

from autopar.program import processes, world
from autopar.program.processes import (
    ProcessRanks,
    StartError,
    check_node,
    device_of,
    ranks_from_environment,
    set_rendezvous,
)
from autopar.program.watch import dump_collectives
from autopar.run.folder import program_modules

TORCHRUN = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
STEP = {
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_JOB_ID": "70123",
}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets the number of GPUs that torch sees; the node has device files of GPUs where ``files`` is set."""

    def see(count: int, files: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(processes, "_has_gpus", lambda: files)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield see


def test_places() -> None:
    assert ranks_from_environment(TORCHRUN) == ranks_from_environment(TORCHRUN | STEP) == ProcessRanks(9, 16, 1, 8)
    assert ranks_from_environment(STEP) == ProcessRanks(9, 11, 1, 3)
    assert ranks_from_environment(STEP | {"SLURM_NODEID": "1"}).local_size == 4
    by_hand = {"RANK": "9", "WORLD_SIZE": "11"}
    assert ranks_from_environment(by_hand | STEP) == ProcessRanks(9, 11, 1, 3)  # srun, with some variables exported
    assert ranks_from_environment(by_hand) == ProcessRanks(9, 11, None, None)
    assert ranks_from_environment({"RANK": "1", "WORLD_SIZE": "2"} | STEP) == ProcessRanks(
        1, 2, None, None
    )  # of another launcher inside the step
    # a batch script itself is no step, however many tasks its job has
    assert (
        ranks_from_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"})
        == ranks_from_environment({})
        == ProcessRanks(0, 1, 0, 1)
    )


def test_processes_meet() -> None:
    one_node: dict[str, str] = STEP | {"SLURM_STEP_NUM_NODES": "1"}
    set_rendezvous(one_node, ranks_from_environment(one_node))
    assert [one_node[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")] == [
        "9",
        "11",
        "127.0.0.1",
        "30123",
    ]
    with pytest.raises(
        StartError, match="11 processes on 3 nodes, and MASTER_ADDR, the address of the first node, is not set"
    ) as caught:
        set_rendezvous(dict(STEP), ranks_from_environment(STEP))
    assert "scontrol show hostnames" in caught.value.hint
    named: dict[str, str] = STEP | {"MASTER_ADDR": "node0"}  # as the hint says
    set_rendezvous(named, ranks_from_environment(named))
    assert (named["MASTER_ADDR"], named["MASTER_PORT"]) == ("node0", "30123")
    by_hand = {"RANK": "1", "WORLD_SIZE": "2"}
    with pytest.raises(StartError, match="RANK is 1 of 2 processes, and MASTER_ADDR and MASTER_PORT of the process of"):
        set_rendezvous(by_hand, ranks_from_environment(by_hand))
    given = STEP | {"MASTER_ADDR": "node0", "MASTER_PORT": "5"}
    set_rendezvous(given, ranks_from_environment(given))
    assert given["MASTER_ADDR"] == "node0" and given["RANK"] == "9"


def test_each_process_takes_a_gpu_of_its_own(gpus: Any) -> None:
    gpus(8)
    assert device_of(ProcessRanks(9, 16, 1, 8), None) == torch.device("cuda", 1)
    assert device_of(ProcessRanks(9, 16, 1, 8), "cpu") == torch.device("cpu")
    gpus(1)  # one for each process, as srun --gpus-per-task=1 and CUDA_VISIBLE_DEVICES give them
    for ranks in (ProcessRanks(9, 16, 1, 8), ProcessRanks(9, 16, None, None), ProcessRanks(0, 1, 0, 1)):
        assert device_of(ranks, None) == device_of(ranks, "cuda") == torch.device("cuda", 0)
    gpus(0)
    assert device_of(ProcessRanks(1, 2, 1, 2), None) == torch.device("cpu")


def test_gpus_are_not_left_unused(gpus: Any) -> None:
    gpus(4)
    with pytest.raises(StartError, match="8 processes of the program, and each of them sees 4 GPUs") as caught:
        device_of(ProcessRanks(9, 16, 1, 8), None)
    assert "--device cpu" in caught.value.hint
    with pytest.raises(StartError, match="sees 4 GPUs, and LOCAL_RANK does not say"):
        device_of(ProcessRanks(9, 16, None, None), None)
    with pytest.raises(StartError, match="6 processes of the program"):
        device_of(ProcessRanks(9, 16, 5, None), None)
    gpus(0, files=True)
    with pytest.raises(
        StartError, match=r"this node has GPUs, and torch .* sees none .* CUDA_VISIBLE_DEVICES is not set"
    ):
        device_of(ProcessRanks(0, 1, 0, 1), None)
    assert device_of(ProcessRanks(0, 1, 0, 1), "cpu") == torch.device("cpu")
    gpus(0)
    with pytest.raises(StartError, match=r"^torch .* sees none"):
        device_of(ProcessRanks(0, 1, 0, 1), "cuda")


def test_hidden_gpus_are_not_wanted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(processes, "Path", lambda path: tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert processes._has_gpus()
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not processes._has_gpus()


def test_other_nodes_than_the_plans_are_refused() -> None:
    axes = {"pipeline": 1, "data": 2, "tensor": 8}
    plan: dict[str, Any] = {"gpus_per_node": 8, "devices": "2x8xH100-80GB"}
    check_node(ProcessRanks(9, 16, 1, 8), plan, axes)
    check_node(ProcessRanks(9, 16, None, None), plan, axes)
    check_node(ProcessRanks(9, 16, 1, 4), plan | {"gpus_per_node": 0}, axes)
    with pytest.raises(StartError, match="nodes of 8 GPUs") as caught:
        check_node(ProcessRanks(9, 16, 1, 4), plan, axes)
    assert "(2x8xH100-80GB: pipeline 1 x data 2 x tensor 8), and this node has 4 of the program's 16" in str(
        caught.value
    )
    assert "plan for nodes of 4 GPUs" in caught.value.hint


def test_the_flight_recorder_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    backend = SimpleNamespace(name="nccl")
    monkeypatch.setattr("autopar.program.watch.dist.get_backend", lambda: backend.name)
    monkeypatch.delenv("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", raising=False)
    assert not dump_collectives(3)
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", str(tmp_path / "rank-"))
    assert not dump_collectives(3)  # nobody has made the pipe
    os.mkfifo(tmp_path / "rank-3.pipe")
    assert not dump_collectives(3)  # nobody listens
    reader = os.open(tmp_path / "rank-3.pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert dump_collectives(3) and os.read(reader, 8) == b"1\n"
        backend.name = "gloo"
        assert not dump_collectives(3)
    finally:
        os.close(reader)


class ReachedError(Exception):
    """The processes are about to meet."""


def test_processes_with_gpus_meet_on_nccl_without_a_bound_device(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With ``device_id`` NCCL would run all transfers of a pipeline on one communicator. A node is held against the plan before that."""
    met: list[tuple[Any, dict[str, Any]]] = []

    def init(*args: Any, **options: Any) -> None:
        met.append((args, options))
        raise ReachedError

    gpus(1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(world.dist, "init_process_group", init)
    monkeypatch.setattr(world.dist, "is_initialized", lambda: False)
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    monkeypatch.setattr(os, "environ", TORCHRUN | meeting | {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    folder = write_mlp(tmp_path, Shape(data=2))
    with program_modules(str(folder)):
        program = world.load(folder)
        with pytest.raises(ReachedError):
            world.start(program, timeout_s=77)
        assert met == [(("nccl",), {"timeout": datetime.timedelta(seconds=77)})]
        program = replace(program, plan={**program.plan, "gpus_per_node": 1, "devices": "2x1xH100-80GB"})
        with pytest.raises(StartError, match="nodes of 1 GPU "):
            world.start(program)
        with pytest.raises(ReachedError):
            world.start(program, device="cpu")  # the plan's nodes are those of GPUs
        assert len(met) == 2 and met[1][0] == ("gloo",)


def test_processes_that_share_a_gpu_are_told_so() -> None:
    class Shared:
        error = "NCCL error\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 50"

        def warm_up(self, device: torch.device) -> None:
            raise RuntimeError(self.error)

    shared: Any = Shared()
    with pytest.raises(StartError, match="use the same GPU: Duplicate GPU detected : rank 1 and rank 0") as caught:
        world._warm_up(shared, torch.device("cuda", 0))
    assert "--device cpu" in caught.value.hint
    shared.error = "unhandled system error"
    with pytest.raises(RuntimeError, match="unhandled system error"):
        world._warm_up(shared, torch.device("cuda", 0))
