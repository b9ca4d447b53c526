"""Process groups: their time limit, their number, the order of their first use; groups of two pipeline ranks."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pipelines import emitted
from programs import Shape, write_mlp
from workers import WorkerPool

from autopar.program import processes
from autopar.program.processes import ProcessGroups
from autopar.run.folder import import_runtime, program_modules
from autopar.torch_private import fake_store

TIMEOUT_S = 77.0


def opened(folder: str) -> dict[str, Any]:
    """In a worker: every group that starting the program has made, as its ranks and time limit; the same of the program's own groups."""
    made: list[tuple[list[int], datetime.timedelta | None]] = []
    new_group = dist.new_group

    def noted(ranks: list[int], timeout: datetime.timedelta | None = None, **options: Any) -> Any:
        made.append((list(ranks), timeout))
        return new_group(ranks, timeout=timeout, **options)

    with program_modules(folder), mock.patch.object(dist, "new_group", noted):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        world = runtime.start(program, device="cpu", timeout_s=TIMEOUT_S)
    own = {f"axis {axis}": world.mesh.get_group(axis) for axis in world.mesh.mesh_dim_names}
    own |= {f"axes {axes}": group for axes, group in world.groups.items()} | {
        f"link to {rank}": group for rank, group in world.links.items()
    }
    limits = {}
    for name, group in own.items():
        backend = group._get_backend(torch.device("cpu"))
        limits[name] = backend.options._timeout.total_seconds()
    return {
        "made": [(ranks, timeout and timeout.total_seconds()) for ranks, timeout in made],
        "limits": limits,
        "ranks": {name: dist.get_process_group_ranks(group) for name, group in own.items()},
        "world": [name for name, group in own.items() if group is dist.group.WORLD],
    }


def test_every_group_has_the_time_limit_of_the_program(workers4: WorkerPool, tmp_path: Path) -> None:
    """All ranks are one axis, or two together: the world's group serves, and no second one."""
    for shape in (Shape(data=2, tensor=2), Shape(data=4, tensor=1)):
        folder = write_mlp(tmp_path / str(shape.data), shape)
        for rank, found in enumerate(workers4.run("test_groups:opened", str(folder))):
            assert {timeout for _, timeout in found["made"]} == {TIMEOUT_S}
            of_groups = {name: limit for name, limit in found["limits"].items() if name not in found["world"]}
            assert of_groups and set(of_groups.values()) == {TIMEOUT_S}
            alone = [ranks for ranks, _ in found["made"] if len(ranks) == 1]
            assert alone == [[rank]]  # one group for all axes of one rank, and none of other ranks
            assert [0, 1, 2, 3] not in [ranks for ranks, _ in found["made"]]
            assert all(rank in ranks for ranks in found["ranks"].values())
        assert len(found["world"]) == 1  # one axis, or both together, are all ranks


@pytest.mark.parametrize(("schedule", "linked"), [("zero-bubble", True), ("chimera", True), ("1f1b", False)], ids=str)
def test_pipeline_ranks_exchange_over_groups_of_two(
    schedule: str, linked: bool, workers4: WorkerPool, tmp_path: Path
) -> None:
    folder, _, _ = emitted(tmp_path, schedule=schedule, pipeline=4, chunks=1)
    for rank, found in enumerate(workers4.run("test_groups:opened", folder)):
        links = {name: ranks for name, ranks in found["ranks"].items() if name.startswith("link")}
        wanted = {f"link to {peer}": sorted((rank, peer)) for peer in (rank - 1, rank + 1) if 0 <= peer < 4}
        assert links == (wanted if linked else {})


@pytest.fixture
def fake_world() -> Any:
    dist.init_process_group("fake", rank=1, world_size=8, store=fake_store())
    yield
    dist.destroy_process_group()


class Worked:
    def wait(self) -> None:
        pass


def first_uses(one_by_one: bool) -> tuple[list[str], list[list[int]]]:
    """How ``warm_up`` uses the groups of rank 1 of 8, a pipeline of 4 with 2 ranks each; and the ranks of all groups that were made."""
    used: list[str] = []
    made: list[list[int]] = []
    new_group = dist.new_group

    def noted(ranks: list[int], **options: Any) -> Any:
        made.append(list(ranks))
        return new_group(ranks, **options)

    def name(group: Any) -> str:
        return f"{dist.get_process_group_ranks(group)}"

    def transfer(kind: str) -> Any:
        def start(tensor: torch.Tensor, peer: int, group: Any) -> Worked:
            used.append(f"{kind} {peer} {name(group)}")
            return Worked()

        return start

    def batch(ops: list[Any]) -> list[Worked]:
        used.extend(f"batch {op.peer} {name(op.group)}" for op in ops)
        return [Worked()]

    lines = torch.arange(8).view(4, 2)
    maker = ProcessGroups(datetime.timedelta(seconds=5))
    isend, irecv = transfer("send to"), transfer("receive from")
    with (
        mock.patch.object(dist, "new_group", noted),
        mock.patch.object(dist, "all_reduce", lambda tensor, group: used.append(f"reduce {name(group)}")),
        mock.patch.object(dist, "batch_isend_irecv", batch),
        mock.patch.object(dist, "isend", isend),
        mock.patch.object(dist, "irecv", irecv),
        mock.patch.object(dist.distributed_c10d, "_check_op", lambda op: None),
        mock.patch.object(processes, "ONE_BY_ONE", one_by_one),
    ):
        pipeline = maker.new_groups(lines.t())
        assert pipeline is not None
        maker.new_groups(lines)
        maker.new_groups(lines.view(1, 8))
        maker.new_groups(lines.view(8, 1))
        links = maker.links(lines, [(0, 1), (1, 2), (2, 3), (0, 3)], pipeline)
        assert set(links) == {3, 7}
        maker.warm_up(torch.device("cpu"))
    return used, made


@pytest.mark.usefixtures("fake_world")
def test_groups_are_first_used_in_the_order_in_which_they_were_made() -> None:
    used, made = first_uses(one_by_one=True)
    collectives = ["reduce [0, 1, 2, 3, 4, 5, 6, 7]", "reduce [1, 3, 5, 7]", "reduce [0, 1]"]
    assert [line for line in used if line.startswith("reduce")][:3] == collectives
    assert used[-2:] == ["send to 3 [1, 3]", "send to 7 [1, 7]"]
    # pairs without a common rank one after the other; no group of the world, and of one rank only this one's
    assert made[6:] == [[1], [0, 2], [1, 3], [0, 6], [1, 7], [4, 6], [5, 7], [2, 4], [3, 5]]
    batched, _ = first_uses(one_by_one=False)
    assert batched[-2:] == ["batch 3 [1, 3]", "batch 7 [1, 7]"]


@pytest.mark.usefixtures("fake_world")
def test_gloo_needs_no_first_use() -> None:
    with (
        mock.patch.object(dist, "get_backend", lambda: "gloo"),
        mock.patch.object(dist, "all_reduce", side_effect=AssertionError),
    ):
        ProcessGroups(datetime.timedelta(seconds=5)).warm_up(torch.device("cpu"))
