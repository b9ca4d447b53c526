"""Checkpoints on a disk: files that are damaged, of another save or another format, and folders that another program writes to."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import KINDS, as_format_1, damaged
from exactness import subject
from resumed import KIND, batch_of, emitted
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from workers import WorkerPool

from autopar.program import checkpoint_files
from autopar.program.checkpoint_files import PARENT, CheckpointError, FolderLock, lock_folder, lock_for_save

# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(workers2: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, dict[str, Any]]:
    """A program on two ranks, the folder of its checkpoints after steps 1 and 2, and the values after step 2."""
    folder = tmp_path_factory.mktemp("damage")
    program = emitted("mlp", KIND["data 2, zero 1"].plan(subject("mlp").graph), folder / "program")
    for step, start in ((1, {"state": f"{program}/initial.pt"}), (2, {"load": str(folder / "saved")})):
        found = workers2.run(
            "resumed:trained", program, [batch_of("mlp", step)], "adamw", save=str(folder / "saved"), **start
        )
    return program, folder / "saved", found[0]["state"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_is_refused(
    kind: str, saved: tuple[str, Path, dict[str, Any]], workers2: WorkerPool, tmp_path: Path
) -> None:
    """Or read with the values that were saved, where the damage is in bytes that say nothing."""
    program, folder, values = saved
    cases = []
    for seed in range(2):
        step = Path(shutil.copytree(folder / "step-2", tmp_path / str(seed)))
        cases.append((str(step), damaged(step, folder / "step-1", kind, seed)))
    for answers in workers2.run("resumed:outcomes", program, [path for path, _ in cases], values):
        for (_, what), (outcome, why) in zip(cases, answers, strict=True):
            assert outcome == "refused", what
            assert why.count("\n") == 0 and "Traceback" not in why, why


class Called:
    """What a pickle names, and calls when it is read in the usual way."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("sealed", [True, False], ids=["with its checksums", "of the older format"])
def test_a_checkpoint_runs_no_code(sealed: bool, saved: tuple[str, Path, dict[str, Any]], tmp_path: Path) -> None:
    """Its metadata is a pickle, which may name any function."""
    mark = tmp_path / "attacked"
    step = Path(shutil.copytree(saved[1] / "step-2", tmp_path / "step-2"))
    if not sealed:
        as_format_1(step)
    facts = json.loads((step / "checkpoint.json").read_text())
    attacks = {
        "posix.system": pickle.dumps(Called(os.system, f"touch {mark}")),
        "builtins.exec": pickle.dumps(Called(exec, f"open({str(mark)!r}, 'w')")),
        "torch.serialization.load": pickle.dumps(Called(torch.load, str(mark))),
        "torch.distributed.checkpoint.metadata.os": b"ctorch.distributed.checkpoint.metadata\nos\n.",
        "torch.distributed.checkpoint.metadata.os.system": b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.system\x93.",
    }
    for name, content in attacks.items():
        (step / ".metadata").write_bytes(content)
        if sealed:
            (step / "checkpoint.json").write_text(json.dumps(checkpoint_files._sealed(facts, content)))
        with pytest.raises(CheckpointError, match="cannot be read") as refused:
            checkpoint_files.newest(step)
        assert name in str(refused.value)
    assert not mark.exists()


def test_a_checkpoint_without_checksums_is_read_and_said_to_be(
    saved: tuple[str, Path, dict[str, Any]], workers2: WorkerPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program, folder, values = saved
    step = as_format_1(Path(shutil.copytree(folder / "step-2", tmp_path / "step-2")))
    for ((outcome, why),) in workers2.run("resumed:outcomes", program, [str(step)], values):
        assert outcome == "read", why
    dcp_to_torch_save(step, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert all(torch.equal(whole["model"][name], values[name]) for name in whole["model"])


# -- locks ------------------------------------------------------------------------------------------------------------


def test_a_lock_is_a_file_of_its_own(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    for make in (os.symlink, os.link):
        make(precious, tmp_path / ".lock")
        with pytest.raises(CheckpointError, match=r"\.lock is a link or not a regular file"):
            lock_folder(tmp_path, 0.0)
        (tmp_path / ".lock").unlink()
    os.symlink(tmp_path / "nothing", tmp_path / ".lock")
    with pytest.raises(CheckpointError, match=r"\.lock is a link or not a regular file"):
        lock_folder(tmp_path, 0.0)
    (tmp_path / ".lock").unlink()
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(CheckpointError, match=r"\.lock is a link or not a regular file"):
        lock_folder(tmp_path, 0.0)
    assert precious.read_text() == "years of work" and not (tmp_path / "nothing").exists()


def test_a_lock_that_cannot_be_written_is_closed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor may belong to another file by the time that the second one closes it."""

    def full(*given: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    descriptor = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    with pytest.raises(OSError, match="No space left"):
        FolderLock(tmp_path, descriptor)
    gc.collect()
    os.close(descriptor)  # as the caller does


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_save_finds_that_its_lock_is_another_file(how: str, tmp_path: Path) -> None:
    lock = lock_folder(tmp_path, 0.0)
    assert lock_for_save(tmp_path) is None
    (tmp_path / ".lock").unlink()
    if how == "replaced":
        (tmp_path / ".lock").write_text("process 1 on elsewhere\n")
    with pytest.raises(CheckpointError, match="was removed or replaced after this training had locked it"):
        lock_for_save(tmp_path)
    lock.close()
    taken = lock_for_save(tmp_path)
    assert taken is not None
    taken.close(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_a_save_has_the_lock_of_the_process_that_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = lock_folder(tmp_path, 0.0)
    monkeypatch.setattr("autopar.program.checkpoint_files._locks", {})  # as in another process
    with pytest.raises(CheckpointError, match="another training writes checkpoints into"):
        lock_for_save(tmp_path)
    monkeypatch.setenv(PARENT, parent.inherited)
    assert lock_for_save(tmp_path) is None
    (tmp_path / ".lock").unlink()
    with pytest.raises(CheckpointError, match="was removed or replaced"):
        lock_for_save(tmp_path)
    lock_folder(tmp_path, 0.0).close()  # another program's
    with pytest.raises(CheckpointError, match="was removed or replaced"):
        lock_for_save(tmp_path)


def test_a_program_that_saves_is_refused_while_another_one_has_the_folder(
    saved: tuple[str, Path, dict[str, Any]], workers2: WorkerPool, tmp_path: Path
) -> None:
    program = saved[0]
    call = (program, batch_of("mlp", 0), f"{program}/initial.pt", str(tmp_path), 10**9)
    lock = lock_folder(tmp_path, 0.0)
    why = workers2.run("resumed:refused", *call)[1][0]
    assert f"another training writes checkpoints into {tmp_path} (process {os.getpid()} on " in why
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    lock.close()


def test_a_folder_that_cannot_be_written_to_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="checkpoints cannot be written to .*: Not a directory"):
        lock_folder(tmp_path / "file" / "below", 0.0)


def test_a_lock_is_taken_where_the_file_system_has_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock_folder(tmp_path, 0.0).close()
