"""Which process writes a program's folder: one on each machine, or one for all machines that share the folder's file system."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from workers import WorkerPool

import autopar
from autopar.errors import AutoparError
from autopar.run import ranks
from autopar.run.folder import folder_for_program


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def on_machines(folders: list[str]) -> dict[str, Any]:
    """In one of four workers, two on each of two machines: the machine's folder, which ``init="own"`` fills; and who writes it."""
    rank = int(os.environ["RANK"])
    place = {"GROUP_RANK": rank // 2, "GROUP_WORLD_SIZE": 2, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2}
    environment = {name: str(value) for name, value in place.items()} | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    with mock.patch.dict(os.environ, environment):
        folder = folders[rank // 2]
        writer = ranks.writer_of(Path(folder))
        with torch.device("meta"):
            model = Pair()
        batch, loss_fn = torch.ones(8, 8), lambda y: y.square().mean()
        options = {"capture_check": False, "type_check": False, "pin": {"data": 4}, "init": "own", "seed": 3}
        with autopar.compile(model, 4, batch, loss_fn, folder=folder, **options) as program:
            home, losses = str(program.folder), [program.step(batch) for _ in range(2)]
    return {"writer": writer, "writes": home == folder, "losses": losses}


@pytest.mark.parametrize("shared", [True, False])
def test_one_process_writes_a_folder(shared: bool, workers4: WorkerPool, tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("one", "one" if shared else "two")]
    found = workers4.run("test_run_ranks:on_machines", folders)
    writers = {each["writer"] for each in found}
    assert len(writers) == (1 if shared else 2) and sum(each["writes"] for each in found) == len(writers)
    assert len({json.dumps(each["losses"]) for each in found}) == 1
    for folder in map(Path, folders):
        assert (folder / "model.py").is_file() and not list(folder.glob(f"{ranks.CLAIM}*"))


def elected(folders: list[str]) -> str:
    """In one of four workers, two on each of two machines: the writer of the machine's folder, or why there is none."""
    rank = int(os.environ["RANK"])
    place = {"GROUP_RANK": str(rank // 2), "LOCAL_RANK": str(rank % 2), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with mock.patch.dict(os.environ, place):
        try:
            return ranks.writer_of(Path(folders[rank // 2]))
        except AutoparError as error:
            return error.message


@pytest.mark.parametrize("fails", [0, 1])
def test_a_machine_that_cannot_write_ends_the_wait_of_the_others(
    fails: int, workers4: WorkerPool, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    folders = [str(tmp_path / "folder")] * 2
    folders[fails] = str(tmp_path / "file" / "folder")
    found = workers4.run("test_run_ranks:elected", folders)
    own, other = found[2 * fails : 2 * fails + 2]
    assert "cannot be written: Not a directory" in own and "another process cannot write" in other
    rest = [each for i, each in enumerate(found) if i // 2 != fails]
    assert rest == (["0", "0"] if fails else ["another process cannot write the program's folder"] * 2)


def test_a_claim_is_no_other_file(tmp_path: Path) -> None:
    (tmp_path / f"{ranks.CLAIM}1").write_text("0")
    assert folder_for_program(tmp_path) == tmp_path
