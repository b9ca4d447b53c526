"""Every error that a program's folder raises on purpose ends ``train.py`` with its sentence, and without a traceback."""

from __future__ import annotations

import builtins
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.emit.runtime import FILES
from autopar.program import train as train_script
from autopar.program import training
from autopar.program.finite import NonFiniteLossError

INSIDE = {
    "DamageError",  # reading a checkpoint makes a CheckpointError of it
    "UnequalStatesError",  # likewise writing one
}


def errors() -> dict[str, type[Exception]]:
    """The classes of errors that the folder's modules define."""
    found: dict[str, type[Exception]] = {}
    for name in sorted({*FILES, "train.py"} - {"__init__.py"}):
        module = importlib.import_module(f"autopar.program.{name.removesuffix('.py')}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == module.__name__:
                found[value.__name__] = value
    return found


ERRORS = errors()


def test_errors_that_stay_inside_are_errors_of_the_folder() -> None:
    assert set(ERRORS) > INSIDE and {"CheckpointError", "DataError", "GuardError", "PlaceError"} < set(ERRORS)


@pytest.mark.parametrize("name", sorted({*ERRORS, "FileNotFoundError"} - INSIDE))
def test_an_error_is_a_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind: type[Exception] = ERRORS.get(name) or getattr(builtins, name)

    def fails(*_: object) -> None:
        error = kind.__new__(kind)
        Exception.__init__(error, "what is wrong; what to do")
        raise error

    monkeypatch.setattr(training, "train", fails)
    monkeypatch.setattr(sys, "argv", ["train.py", "--dataset", "synthetic"])
    with pytest.raises(SystemExit) as ended:
        train_script.main()
    assert ended.value.code == f"{name}: what is wrong; what to do"


def test_a_late_nan_waits_for_the_checkpoint_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message says to resume from there."""
    waited: list[str] = []
    trainer = SimpleNamespace(stages={}, steps=105, finish_saving=lambda: waited.append("finish"))

    def steps(*given: object) -> str:
        raise NonFiniteLossError("the loss of step 101 is nan", late=True)

    monkeypatch.setattr(training, "open_trainer", lambda *given: (trainer, None))
    monkeypatch.setattr(training, "open_loader", lambda *given: None)
    monkeypatch.setattr(training, "run_steps", steps)
    args: Any = SimpleNamespace(checkpoint=str(tmp_path), dataset="data.pt", eval_data=None)
    watch: Any = SimpleNamespace(follow=lambda stages: None, enter=lambda *phase: None)
    with pytest.raises(SystemExit, match="the loss of step 101 is nan"):
        training.train(None, args, watch)  # type: ignore[arg-type]
    assert waited == ["finish"]


def test_gradient_norms_are_computed_for_logged_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--on-nan skip`` reads the loss of every step, ``--log-every`` logs a few."""
    with_norms: list[bool] = []
    world = SimpleNamespace(device="cpu")
    trainer: Any = SimpleNamespace(steps=0, world=world, program=SimpleNamespace(plan={}), check_unread=lambda: None)

    def step_from(loader: object, on_nan: str, *, with_norm: bool = True) -> tuple[float, bool]:
        trainer.steps += 1
        with_norms.append(with_norm)
        return 0.0, False

    trainer.step_from = step_from
    monkeypatch.setattr(training.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(training, "log", lambda *given: None)
    monkeypatch.setattr(training, "Meter", lambda *given: SimpleNamespace(begin=lambda: None, close=lambda: None))
    unused = dict.fromkeys(
        (
            "epochs",
            "trace",
            "record_expert_loads",
            "checkpoint",
            "every",
            "eval_every",
            "log_file",
            "tensorboard",
            "wandb",
        )
    )
    args: Any = SimpleNamespace(**unused, steps=5, log_every=3, on_nan="skip", noise_scale=False)
    watch: Any = SimpleNamespace(enter=lambda *phase: None, stop_asked=lambda device: None)
    training.run_steps(args, trainer, SimpleNamespace(close=lambda: None), watch)  # type: ignore[arg-type]
    assert with_norms == [True, False, True, False, True]
