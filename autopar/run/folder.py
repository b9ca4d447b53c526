"""A program's folder: where it may be written, and importing it into a process whose own modules may have the same names."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from autopar.errors import UsageError


def folder_for_program(name: Any) -> Path:
    """The folder to emit into: new, empty, or one that an earlier emission filled.

    Raises:
        UsageError: the folder is a file, contains other files, or cannot be written into.
    """
    if not isinstance(name, str | os.PathLike):
        raise UsageError(f"the program's folder is {name!r}, which is no path", 'write "program"')
    folder = Path(name)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, and the program is a folder", "give a new folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "plan.json").is_file():
        raise UsageError(f"{folder} holds other files than a program", "give a new or an empty folder")
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        reason = "no permission" if there.is_dir() else f"{there} is a file"
        raise UsageError(f"{folder} cannot be made: {reason}", "give a folder that can be made and written to")
    return folder


@contextmanager
def program_modules(folder: str | os.PathLike[str]) -> Iterator[None]:
    """A context in which ``import model`` and the like import the folder's modules; afterwards the process's own ones are back.

    Names as ordinary as ``model`` are likely to be taken by the user's own files, and one process may run several programs.
    """
    path = str(Path(folder).resolve())
    names = [source.stem for source in Path(path).glob("*.py")]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, path)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(path)
        ours = {name: module for name in names if (module := sys.modules.pop(name, None)) is not None}
        if "compiled" in ours:
            _rename(ours, path)
        sys.modules.update(before)


def _rename(modules: Mapping[str, ModuleType], path: str) -> None:
    """Give the folder's modules names that no other module has: ``torch.compile`` imports the module of each function that it traces, by
    name, in the program's first step."""
    for name, module in modules.items():
        module.__name__ = f"{name} of {path}"
        sys.modules[module.__name__] = module


def import_runtime(folder: str | os.PathLike[str]) -> ModuleType:
    """The folder's own ``runtime.py``, so that the code in the folder is the code that runs. Call inside ``program_modules``."""
    return importlib.import_module("runtime")
