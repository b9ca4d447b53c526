"""Data sets: every rank opens the data set itself, and reads only its rows (``autopar.program.loader``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from autopar.capture.batch import check_tensors
from autopar.errors import BatchError, UsageError
from autopar.program.importing import resolve


@dataclass(frozen=True)
class Data:
    """A data set that all ranks of a program have opened; ``program.train`` and ``program.evaluate`` accept it instead of batches.

    ``number`` identifies it, ``rows`` is its number of rows, ``batch`` the number of rows in a global batch, ``batches`` (and ``len``) the
    number of global batches in an epoch.
    """

    number: int
    rows: int
    batch: int
    batches: int

    def __len__(self) -> int:
        return self.batches


def shareable_source(dataset: Any, sample: Any, path: Path) -> dict[str, str]:
    """Return how worker processes open a data set: ``{"file": path}`` (of tensors by name), or ``{"target": "module:function"}``.

    ``sample`` is ``ProgramSpec.sample``. Tensors are written to ``path``. Raises ``UsageError`` if worker processes couldn't open it,
    ``BatchError`` if the tensors don't fit.
    """
    if isinstance(dataset, TensorDataset):
        flat = _flat(sample)
        if len(flat) != len(dataset.tensors):
            raise BatchError(
                f"the TensorDataset has {len(dataset.tensors)} tensors, and a sample of the model {len(flat)}: {', '.join(flat)}",
                "give a dict of tensors by the names of the model's inputs",
            )
        dataset = dict(zip(flat, dataset.tensors, strict=True))
    for name, value in dataset.items() if isinstance(dataset, Mapping) else ():
        check_tensors(f"{name!r} of the data set", value)
    if isinstance(dataset, Mapping) and all(isinstance(tensor, Tensor) for tensor in dataset.values()):
        torch.save(dict(dataset), path)
        return {"file": str(path)}
    if isinstance(dataset, str | Path):
        return named_source(dataset)
    return named_source(import_path(dataset, "data set", "a function that returns the data set"))


def named_source(name: str | Path) -> dict[str, str]:
    """Return how worker processes open a file of tensors or the function ``"module:function"`` or ``"file.py:function"``.

    Raises ``UsageError`` if there is no such file, or the function can't be imported.
    """
    text = str(name)
    if isinstance(name, Path) or ":" not in text or Path(text).exists():
        if not Path(text).is_file():
            raise UsageError(f"there is no file {text}", "a file of torch.save of tensors by name, or module:function")
        return {"file": str(Path(text).resolve())}
    source, _, function = text.rpartition(":")
    target = f"{Path(source).resolve()}:{function}" if source.endswith(".py") else text
    try:
        resolve(target)
    except (ImportError, AttributeError, AssertionError, FileNotFoundError) as error:
        raise UsageError(
            f"there is no data set {text}: {error}",
            "write module:function or file.py:function, a function that returns the data set",
        ) from error
    except Exception as error:
        raise UsageError(
            f"{source} raised {type(error).__name__}: {error}", "the data set's module must be importable"
        ) from error
    return {"target": target}


def import_path(given: Any, what: str, function: str) -> str:
    """Return ``given`` as ``"module:function"`` for import in another process. Raises ``UsageError`` if that is impossible."""
    if isinstance(given, str):
        return given
    module, name = getattr(given, "__module__", "__main__"), getattr(given, "__qualname__", "")
    if module == "__main__" or not name or "<" in name:
        shown = f"{module}.{name}" if name else f"a {type(given).__name__}"
        raise UsageError(
            f"worker processes cannot import the {what} {shown}",
            f"make it {function}, at the top of a module (not of the script itself), or start the script with torchrun",
        )
    path = f"{module}:{name}"
    try:
        found: Any = resolve(path)
    except (ImportError, AttributeError, AssertionError):
        found = None
    if found != given:  # not ``is not``: every access to a class method makes another object
        raise UsageError(
            f"worker processes cannot import the {what} {module}.{name}: its module has "
            f"{'nothing' if found is None else 'another object'} under this name",
            f"make it {function} that its module has under its own name, or give that name as 'module:function'",
        )
    return path


def _flat(names: Any) -> list[str]:
    if isinstance(names, str):
        return [names]
    parts = names.values() if isinstance(names, dict) else names or ()
    return [name for part in parts for name in _flat(part)]
