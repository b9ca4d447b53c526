"""``Program``: steps in local processes, launches under torchrun, and says what is wrong when something is."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
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
from autopar.run import Program


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def state() -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in mlp_model().state_dict().items()}


def mlp(folder: Path, shape: Shape, **options: Any) -> Program:
    options = {"state": state(), "optimizer": sgd} | options
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


@pytest.mark.parametrize("shape", [Shape(), Shape(pipeline=2, microbatches=2, schedule="1f1b")], ids=str)
def test_training_in_worker_processes_equals_one_process(tmp_path: Path, shape: Shape) -> None:
    losses, model = one_process(3)
    seen: list[tuple[int, float]] = []
    with mlp(tmp_path, shape) as program:
        found = program.train([mlp_batch(0), mlp_batch(1)], steps=3, on_step=lambda *step: seen.append(step))
        trained = program.state_dict()
        program.load_state_dict(state())
        loss, grads = program.gradients(mlp_batch(0))
    assert found == pytest.approx(losses, rel=1e-12)
    assert seen == list(enumerate(found))
    assert all((trained[name] - value).abs().max() < 1e-12 for name, value in model.state_dict().items())
    assert loss == pytest.approx(losses[0], rel=1e-12)
    assert set(grads) == {name for name, _ in model.named_parameters()}


def test_a_worker_that_dies_is_named_and_ends_the_training(tmp_path: Path) -> None:
    with mlp(tmp_path, Shape(data=2)) as program:
        program.step(mlp_batch())
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
    with pytest.raises(UsageError, match="cannot import the optimizer"):
        mlp(tmp_path, Shape(data=2), optimizer=lambda params: torch.optim.SGD(params, lr=0.1)).step(mlp_batch())
    with pytest.raises(BatchError, match="the batches ended after 0 of 2"):
        program.train([], steps=2)
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


def test_the_folder_runs_under_torchrun_and_knows_nothing_of_autopar(tmp_path: Path) -> None:
    program = mlp(tmp_path / "program", Shape(data=2, zero=(1, 3)))
    folder = program.emit(tmp_path / "emitted")
    for file in folder.glob("*.py"):
        assert not re.search(r"^\s*(from|import) autopar", file.read_text(), re.MULTILINE), file
    torch.save({name: tensor.repeat(2, 1) for name, tensor in mlp_batch().items()}, tmp_path / "data.pt")
    torch.save(state(), tmp_path / "state.pt")
    options = [
        "--steps",
        "3",
        "--data",
        str(tmp_path / "data.pt"),
        "--init",
        str(tmp_path / "state.pt"),
        "--lr",
        "0.01",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(folder / "train.py"), *options, "--save", str(tmp_path / "out.pt")],
        capture_output=True, text=True, env=env, timeout=100, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    model, losses = mlp_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(**mlp_batch())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-10)
    assert "step    2  loss" in done.stderr
    saved = torch.load(tmp_path / "out.pt", weights_only=True)
    assert all((saved[name] - value).abs().max() < 1e-10 for name, value in model.state_dict().items())


def test_launch_says_why_train_failed(tmp_path: Path) -> None:
    program = mlp(tmp_path, Shape(data=2))
    torch.save({"input_ids": torch.zeros(8, 3, dtype=torch.long)}, tmp_path / "data.pt")
    talk = io.StringIO()
    with redirect_stderr(talk), pytest.raises(LaunchError, match="ValueError: the batch has no 'labels'"):
        program.launch("--data", str(tmp_path / "data.pt"))
    assert "Traceback" in talk.getvalue()


def test_launch_streams_and_makes_data_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mlp(tmp_path, Shape()).launch("--steps", "2", "--clip", "1.0")
    losses = [json.loads(line)["loss"] for line in capfd.readouterr().out.splitlines()]
    assert len(losses) == 2 and all(0 < loss < 20 for loss in losses)
