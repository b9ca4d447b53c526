"""``Program``: steps in local processes, launches under torchrun, and says what is wrong when something is."""

from __future__ import annotations

import functools
import importlib
import io
import json
import os
import re
import signal
import socket
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import Shape, mlp_batch, mlp_model, mlp_plan, write_mlp
from torch import Tensor, nn

from autopar.devices import parse
from autopar.errors import BatchError, LaunchError, UsageError
from autopar.program import train as train_script
from autopar.program import training
from autopar.run import Program
from autopar.run.data import import_path
from autopar.run.folder import program_modules
from autopar.run.torchrun import _stream
from autopar.run.training import train


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def variant(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.2)


variant_of_sgd = functools.wraps(sgd)(variant)


class Base:
    rate = 0.1

    @classmethod
    def make(cls, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=cls.rate)


class Derived(Base):
    rate = 0.2


def state() -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in mlp_model().state_dict().items()}


def mlp(folder: Path, shape: Shape, **options: Any) -> Program:
    # written by hand, without the types of borders and inputs that the checker starts from
    options = {"state": state(), "optimizer": sgd, "type_check": False} | options
    return Program(mlp_plan(shape), write_mlp(folder, shape), **options)


def one_process(steps: int) -> tuple[list[float], nn.Module]:
    model, losses = mlp_model(), []
    optimizer = sgd(list(model.parameters()))
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**mlp_batch(step % 2))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def check_training(program: Program) -> None:
    losses, model = one_process(3)
    seen: list[tuple[int, float]] = []
    found = program.train([mlp_batch(0), mlp_batch(1)], steps=3, on_step=lambda *step: seen.append(step[:2]))
    assert found == pytest.approx(losses, rel=1e-12)
    assert seen == list(enumerate(found, 1))
    trained = program.state_dict()
    assert all((trained[name] - value).abs().max() < 1e-12 for name, value in model.state_dict().items())
    program.load_state_dict(state())
    loss, grads = program.gradients(mlp_batch(0))
    assert loss == pytest.approx(losses[0], rel=1e-12)
    assert set(grads) == {name for name, _ in model.named_parameters()}


def test_one_device_trains_as_the_model_does(tmp_path: Path) -> None:
    with mlp(tmp_path, Shape()) as program:
        check_training(program)


def test_two_workers_train_alike_until_one_is_killed(tmp_path: Path) -> None:
    with mlp(tmp_path, Shape(pipeline=2, microbatches=2, schedule="1f1b")) as program:
        check_training(program)
        assert program._processes is not None
        pids = [worker.pid for worker in program._processes._workers]
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(LaunchError, match="rank 1: was killed by signal 9"):
            program.step(mlp_batch())
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        with pytest.raises(LaunchError, match="a rank failed before"):
            program.step(mlp_batch())


def test_errors_before_anything_starts(tmp_path: Path) -> None:
    program = mlp(tmp_path, Shape(data=2))
    with pytest.raises(BatchError, match=r"'labels' has shape \(6, 3\).*global batch of 8"):
        program.step({name: tensor[:6] for name, tensor in reversed(mlp_batch().items())})
    for give in (program.step, program.loader):
        with pytest.raises(BatchError, match=r"'labels' of the (batch|data set) is a numpy array") as arrays:
            give({name: tensor.numpy() for name, tensor in reversed(mlp_batch().items())})
        assert "torch.from_numpy" in str(arrays.value.hint)
    with pytest.raises(UsageError, match="cannot import the optimizer"):
        mlp(tmp_path, Shape(data=2), optimizer=lambda params: torch.optim.SGD(params, lr=0.1)).step(mlp_batch())
    with pytest.raises(BatchError, match="the batches ended after 0 of 2"):
        program.train([], steps=2)
    for nonsense in (-1, 1.5, True, "3"):
        with pytest.raises(UsageError, match=f"steps is {nonsense!r}, but must be a non-negative integer") as refused:
            program.train([mlp_batch()], steps=nonsense)  # type: ignore[arg-type]
        assert refused.value.hint
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = mlp(tmp_path, Shape(data=2), port=taken.getsockname()[1])
        for run in (lambda: busy.step(mlp_batch()), busy.launch):
            with pytest.raises(LaunchError, match="already taken") as error:
                run()
            assert error.value.hint
    far = mlp(tmp_path, Shape(data=2), cluster=parse("2xH100-80GB"))
    for run in (lambda: far.step(mlp_batch()), far.launch):
        with pytest.raises(LaunchError, match="which are not here: this machine has"):
            run()


@pytest.mark.parametrize(
    "given", [Derived.make, variant_of_sgd, lambda params: None], ids=["inherited", "wrapped", "lambda"]
)
def test_worker_processes_import_what_was_given_or_nothing(given: Any) -> None:
    with pytest.raises(UsageError, match="cannot import the optimizer") as error:
        import_path(given, "optimizer", "a function")
    assert error.value.hint
    assert [import_path(it, "optimizer", "a function").partition(":")[2] for it in (Base.make, sgd, torch.optim.SGD)] == [
        "Base.make", "sgd", "SGD",
    ]  # fmt: skip


def test_training_takes_no_batch_that_it_does_not_train_on() -> None:
    batches = iter(range(6))
    trained: list[int] = []

    def step(batch: int) -> tuple[dict[str, Any], bool]:
        trained.append(batch)
        return {"loss": 0.0}, False

    for steps in (2, 0, 3):
        assert len(train(batches, steps, step, None)) == steps
    assert trained == [0, 1, 2, 3, 4] and list(batches) == [5]


@pytest.mark.parametrize("steps", ["0", "-1"])
def test_the_folder_refuses_fewer_steps_than_one(
    steps: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--steps", steps])
    with pytest.raises(SystemExit):
        training.arguments(train_script.recipe())
    assert f"--steps: {steps} is too small: it must be at least 1" in capsys.readouterr().err


def test_the_folder_runs_under_torchrun_and_knows_nothing_of_autopar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In one process; ``test_standalone`` starts two."""
    program = mlp(tmp_path / "program", Shape(), optimizer=None)
    program.folder = program.emit(tmp_path / "emitted")
    for file in program.folder.rglob("*.py"):
        assert not re.search(r"^\s*(from|import) autopar", file.read_text(), re.MULTILINE), file
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    torch.save({name: tensor.repeat(2, 1) for name, tensor in mlp_batch().items()}, "data.pt")
    program.launch("--steps", "3", "--dataset", "data.pt", "--lr", "0.01", "--clip", "0.5", "--save", "out.pt")
    out, err = capfd.readouterr()
    model, losses = mlp_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(**mlp_batch())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    assert [json.loads(line)["loss"] for line in out.splitlines()] == pytest.approx(losses, rel=1e-10)
    assert "step    3  loss" in err
    saved = torch.load("out.pt", weights_only=True)
    assert all((saved[name] - value).abs().max() < 1e-10 for name, value in model.state_dict().items())


def test_synthetic_data_has_the_programs_shapes(tmp_path: Path) -> None:
    folder = write_mlp(tmp_path, Shape())
    with program_modules(folder):
        model, loader = importlib.import_module("model"), importlib.import_module("runtime.loader")
        made = loader.Synthetic(model.Whole.SPEC.inputs, seed=3)
        first, second = made.__getitems__(list(range(8))), made.__getitems__(list(range(8, 16)))
    for name, tensor in mlp_batch().items():
        assert first[name].shape == tensor.shape and first[name].dtype == tensor.dtype
        assert set(first[name].unique().tolist()) == {0, 1} and not torch.equal(first[name], second[name])


def test_launch_says_why_train_failed(tmp_path: Path) -> None:
    program = mlp(tmp_path, Shape())
    torch.save({"input_ids": torch.zeros(8, 3, dtype=torch.long)}, tmp_path / "data.pt")
    talk = io.StringIO()
    with redirect_stderr(talk), pytest.raises(LaunchError, match="DataError: the batch has no 'labels'"):
        program.launch("--dataset", str(tmp_path / "data.pt"))
    assert "Traceback" in talk.getvalue()


LAUNCHER = """
import signal, sys, time

def save(*_):
    print("saving", file=sys.stderr, flush=True)
    time.sleep(0.2)
    print("saved", file=sys.stderr, flush=True)
    sys.exit(1)

signal.signal(signal.SIGTERM, save)
print("training", file=sys.stderr, flush=True)
time.sleep(60)
"""
"""In place of torchrun and its ranks."""


@pytest.mark.parametrize(("presses", "end"), [(("training",), "saved"), (("training", "saving"), "saving")])
def test_ctrl_c_leaves_a_launched_training_time_to_save_and_a_second_one_none(
    presses: tuple[str, ...], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def write(self, text: str) -> int:
            super().write(text)
            if text.strip() in presses:
                raise KeyboardInterrupt
            return len(text)

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(KeyboardInterrupt):
        _stream([sys.executable, "-c", LAUNCHER], os.environ)
    assert terminal.getvalue().split()[-1] == end
