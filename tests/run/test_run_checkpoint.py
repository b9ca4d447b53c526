"""Checkpoints through ``Program`` and through the folder's ``train.py``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import damaged
from programs import Shape, mlp_batch, mlp_model, write_mlp
from safetensors.torch import load_file
from test_run_program import mlp, one_process, state
from workers import WorkerPool

from autopar.cli import main
from autopar.cli.run import Checkpoints
from autopar.errors import CheckpointError, UsageError
from autopar.program import checkpoint_files
from autopar.program.checkpoint_files import lock_folder
from autopar.program.tracing import COMPUTATION, action_name
from autopar.program.weights import write_file
from autopar.report.trace import read_trace


def test_another_program_goes_on(tmp_path: Path) -> None:
    losses, model = one_process(4)
    with mlp(tmp_path / "first", Shape(data=2, zero=(1, 3))) as program:
        assert program.train([mlp_batch(0), mlp_batch(1)]) == pytest.approx(losses[:2], rel=1e-12)
        assert program.save(tmp_path / "saved", keep=1) == tmp_path / "saved" / "step-2"
        for refused, why in (
            (lambda: program.load(tmp_path / "nowhere"), "has no complete checkpoint"),
            (lambda: program.save(tmp_path / "saved", keep=0), "keep is 0"),
        ):
            with pytest.raises(CheckpointError, match=why):
                refused()
        assert program.step(mlp_batch(0)) == pytest.approx(losses[2], rel=1e-12)  # nothing was lost
    zeros = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    with mlp(tmp_path / "second", Shape(), state=zeros) as program:
        assert program.load(tmp_path / "saved") == 2
        assert program.train([mlp_batch(0), mlp_batch(1)]) == pytest.approx(losses[2:], rel=1e-12)
        trained = program.state_dict()
    assert all((trained[name] - value).abs().max() < 1e-12 for name, value in model.state_dict().items())


def test_weights_go_from_one_program_to_another(tmp_path: Path) -> None:
    with mlp(tmp_path / "first", Shape()) as program:
        program.save_weights(tmp_path / "weights")
        with pytest.raises(CheckpointError, match="weights exists"):
            program.save_weights(tmp_path / "weights")
        program.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in state().items()})
        program.load_weights(tmp_path / "weights")
        loaded = program.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in state().items())


def test_train_resumes_where_it_ended(workers1: WorkerPool, workers2: WorkerPool, tmp_path: Path) -> None:
    """Of three batches in the file, the fifth step reads the second one again."""
    programs = {1: write_mlp(tmp_path / "one", Shape()), 2: write_mlp(tmp_path / "two", Shape(data=2, zero=(1, 3)))}
    for program in programs.values():
        write_file(program / "initial.safetensors", state())
    batches = [mlp_batch(i) for i in range(3)]
    data, saved = str(tmp_path / "data.pt"), str(tmp_path / "saved")
    torch.save({name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}, data)

    def train(pool: WorkerPool, *args: str) -> Any:
        return pool.run("programs:ran", str(programs[pool.count]), "--dataset", data, "--lr", "0.01", *args)[0]

    straight, _ = train(workers1, "--steps", "5")
    options = ("--checkpoint", saved, "--every", "2", "--keep", "2", "--resume")
    first, talk = train(workers2, "--steps", "3", "--async-save", *options)
    assert "has no checkpoint: the training starts from the beginning" in talk and "step-3" in talk
    assert sorted(path.name for path in Path(saved).glob("step-*")) == ["step-2", "step-3"]
    ends = ("--save-weights", f"{tmp_path}/weights", "--trace", f"{tmp_path}/trace.json")
    second, talk = train(workers1, "--steps", "5", *ends, *options)
    assert "continues after step 3" in talk
    actions = [e["name"] for e in read_trace(tmp_path / "trace.json") if e["ph"] == "X" and e["tid"] == COMPUTATION]
    assert actions == [action_name("F", 0, 0), action_name("B", 0, 0)]  # of one step
    assert list(first | second) == list(straight)
    assert list((first | second).values()) == pytest.approx(list(straight.values()), rel=1e-12)
    assert sorted(path.name for path in Path(saved).glob("step-*")) == ["step-4", "step-5"]
    trained = mlp_model()
    trained.load_state_dict(load_file(tmp_path / "weights" / "model.safetensors"), strict=False)  # tied
    third, _ = train(workers2, "--steps", "1", "--init", f"{tmp_path}/weights")
    assert third[1] == pytest.approx(trained(**batches[0]).item(), rel=1e-12) != straight[1]
    for refused, why in (
        (("--checkpoint", saved), "has checkpoints of another training"),
        (("--save-weights", f"{tmp_path}/weights"), "it exists; use --save, or the name of a new folder"),
    ):
        losses, talk = train(workers1, "--steps", "1", *refused)
        assert not losses and why in talk
    assert sorted(path.name for path in Path(saved).glob("step-*")) == ["step-4", "step-5"]


def test_train_refuses_a_damaged_checkpoint_by_a_sentence(workers1: WorkerPool, tmp_path: Path) -> None:
    program, saved = write_mlp(tmp_path / "one", Shape()), tmp_path / "saved"
    options = ("--draw-init", "--checkpoint", str(saved), "--resume", "--keep", "1")
    assert list(workers1.run("programs:ran", str(program), "--steps", "1", *options)[0][0]) == [1]
    for kind, why in (("a bit of values", "do not match their checksum"), ("truncated", "has no complete checkpoint")):
        damaged(saved / "step-1", saved / "step-1", kind, 0)
        losses, talk = workers1.run("programs:ran", str(program), "--steps", "2", *options)[0]
        assert not losses and why in talk and "Traceback" not in talk, talk


def test_train_reads_the_losses_that_it_prints(workers2: WorkerPool, tmp_path: Path) -> None:
    program = write_mlp(tmp_path / "two", Shape(data=2, zero=(1, 3)))
    write_file(program / "initial.safetensors", state())
    batches = [mlp_batch(i) for i in range(3)]
    torch.save({name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}, tmp_path / "data.pt")

    def train(*args: str) -> Any:
        options = ("--dataset", f"{tmp_path}/data.pt", "--lr", "0.01", "--log-file", f"{tmp_path}/log", *args)
        return workers2.run("programs:ran", str(program), *options)[0]

    every, _ = train("--steps", "8")
    some, _ = train("--steps", "8", "--log-every", "3")
    assert list(some) == [1, 3, 6, 8] and all(every[step] == loss for step, loss in some.items())
    saved = ("--checkpoint", f"{tmp_path}/saved", "--every", "2")
    lost, talk = train("--steps", "5", "--log-every", "5", "--lr", "1e200", *saved)
    assert list(lost) == [1] and "exit NonFiniteLossError: the loss of step 2 is nan; first non-finite" in talk, talk
    assert [path.name for path in (tmp_path / "saved").glob("step-*")] == ["step-1"]  # of before it
    lost, talk = train("--steps", "5", "--log-every", "5", "--lr", "1e200")
    assert "the loss of step 2 is nan, which was not read before 4 steps were done" in talk, talk
    assert "resume from a checkpoint before that step" in talk


def test_a_new_run_does_not_replace_the_checkpoints_of_another(tmp_path: Path) -> None:
    (tmp_path / "step-7").mkdir()
    assert Checkpoints(str(tmp_path), every=1, keep=2, resume=True).folder == str(tmp_path)
    with pytest.raises(UsageError, match="has checkpoints of another training"):
        Checkpoints(str(tmp_path), every=1, keep=2, resume=False)


def test_a_folder_that_cannot_be_written_to_is_found_before_the_model_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("autopar.cli.run.make_plan", lambda *_, **__: pytest.fail("it plans"))
    with pytest.raises(SystemExit) as ended:
        main(["run", "gpt2", "--devices", "1", "--checkpoint", str(tmp_path / "file" / "saved")])
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert f"checkpoints cannot be written to {tmp_path}/file/saved: Not a directory" in err and "hint:" in err
    assert not out and "Traceback" not in err


def test_train_goes_on_where_a_checkpoint_cannot_be_written(workers1: WorkerPool, tmp_path: Path) -> None:
    program, saved = write_mlp(tmp_path / "one", Shape()), tmp_path / "saved"
    saved.mkdir()
    for step in (1, 2):
        (saved / f"step-{step}.partial").touch()  # a file where a save makes its folder
    args = ("--draw-init", "--steps", "2", "--every", "1", "--checkpoint", str(saved))
    losses, talk = workers1.run("programs:ran", str(program), *args)[0]
    assert list(losses) == [1, 2]
    assert talk.count("no checkpoint: the checkpoint could not be written to") == 2 and talk.endswith("exit 1\n")
    (tmp_path / "file").touch()
    losses, talk = workers1.run("programs:ran", str(program), *args[:-1], str(tmp_path / "file" / "saved"))[0]
    assert not losses and "Traceback" not in talk
    assert f"checkpoints cannot be written to {tmp_path}/file/saved: Not a directory; give a folder" in talk
    for option in (("--resume",), ("--every", "5"), ("--keep", "3"), ("--async-save",)):
        talk = workers1.run("programs:ran", str(program), "--draw-init", *option)[0][1]
        assert f"{option[0]} needs --checkpoint DIR" in talk and talk.endswith("exit 2\n")


def test_a_second_training_is_refused_until_the_first_one_ends(workers1: WorkerPool, tmp_path: Path) -> None:
    program, saved = write_mlp(tmp_path / "one", Shape()), tmp_path / "saved"
    lock = lock_folder(saved, 0.0)
    assert lock is not None
    args = ("--draw-init", "--steps", "1", "--checkpoint", str(saved), "--lost-after", "0.3")
    losses, talk = workers1.run("programs:ran", str(program), *args)[0]
    with pytest.raises(UsageError, match="another training writes checkpoints into"):
        Checkpoints(str(saved), every=1, keep=2, resume=False).lock()
    assert not losses and f"another training writes checkpoints into {saved} (process {os.getpid()} on " in talk
    lock.close()
    losses, talk = workers1.run("programs:ran", str(program), *args)[0]
    assert list(losses) == [1] and "step-1" in talk


def test_a_checkpoint_that_is_being_removed_has_no_final_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed in between leaves nothing that looks whole; the next save removes the rest."""
    for step in (1, 2, 3):
        (tmp_path / f"step-{step}").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        checkpoint_files._remove_old(tmp_path / "step-3", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1.removed", "step-2.removed", "step-3"]
    assert checkpoint_files.has_any(tmp_path) and [p.name for p in checkpoint_files._steps(tmp_path)] == ["step-3"]
    checkpoint_files._remove_old(tmp_path / "step-3", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
