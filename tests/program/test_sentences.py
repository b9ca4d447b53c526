"""Every error that a program's folder raises on purpose ends ``train.py`` with its sentence, and without a traceback."""

from __future__ import annotations

import builtins
import importlib
import sys

import pytest

from autopar.emit.runtime import FILES
from autopar.program import train as train_script
from autopar.program import training

INSIDE = {
    "DamageError",  # reading a checkpoint makes a CheckpointError of it
    "UnequalStatesError",  # likewise writing one
    "ModeError",  # of Program.evaluate, which train.py does not call
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
