"""Checks the folder that a program is emitted into, and imports its modules even if this process has other modules of the same names."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from autopar.errors import UsageError
from autopar.program.type_check import IMPORTING, take_modules
from autopar.run.ranks import CLAIM

_PROGRAM_FILES = ("plan.json", "model.py", "train.py")
"""Files of every emitted folder; a folder that has them and a runtime may be overwritten."""


def folder_for_program(name: Any) -> Path:
    """Return ``name`` as the path of the folder to emit into.

    Raises ``UsageError`` if it is no path, a file, a folder with other files than an emitted program, or not writable.
    """
    if not isinstance(name, str | os.PathLike) or not os.fspath(name):
        raise UsageError(f"the program's folder is {name!r}, which is no path", 'write "program"')
    folder = Path(name)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, and the program is a folder", "give a new folder")
    has_files = folder.is_dir() and any(not path.name.startswith(CLAIM) for path in folder.iterdir())
    if has_files and not _is_program(folder):
        raise UsageError(f"{folder} has files that are not a program's", "give a new or an empty folder")
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        reason = "no permission" if there.is_dir() else f"{there} is a file"
        raise UsageError(f"{folder} cannot be made: {reason}", "give a folder that can be made and written to")
    return folder


def _is_program(folder: Path) -> bool:
    files = all((folder / file).is_file() for file in _PROGRAM_FILES)
    return files and ((folder / "runtime").is_dir() or (folder / "runtime.py").is_file())


@contextmanager
def program_modules(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Let ``import model`` etc. import the folder's modules; on exit, restore the process's modules of these names.

    The user's files are likely to have such names, too, and one process may run several programs. Other threads wait until the exit.
    """
    with IMPORTING:
        yield from _program_modules(folder)


def _program_modules(folder: str | os.PathLike[str]) -> Iterator[None]:
    there = Path(folder).resolve()
    before, finder = take_modules(there), _Finder(str(there))
    sys.path.insert(0, str(there))
    sys.meta_path.insert(0, finder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.path.remove(str(there))
        for path in (there, there / "runtime"):
            sys.path_importer_cache.pop(str(path), None)
        ours = take_modules(there)
        if ours.keys() & {"compiled", "runtime.compiled"}:
            _rename(ours, str(there))
        sys.modules.update(before)


class _Finder:
    """Finds a folder's modules. Compiled sources are cached: a process may run many programs, and their files are mostly the same."""

    def __init__(self, path: str) -> None:
        self._files = {where: FileFinder(where, (_Loader, [".py"])) for where in (path, os.path.join(path, "runtime"))}
        self._folder = path

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        finder = self._files.get(self._folder if path is None else "".join(path))
        return None if finder is None else finder.find_spec(name)


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return _with_file_name(path, _compiled(self.get_data(path)))


@functools.lru_cache(maxsize=512)
def _compiled(source: bytes) -> CodeType:
    code: CodeType = compile(source, "<program>", "exec", dont_inherit=True)
    return code


def compile_sources(folder: str | os.PathLike[str]) -> None:
    """Compile the folder's modules, so that forks of this process import them sooner."""
    for source in (*Path(folder).glob("*.py"), *Path(folder).glob("runtime/*.py")):
        _compiled(source.read_bytes())


def _with_file_name(path: str, code: CodeType) -> CodeType:
    """Return the code with ``path`` as its file name, which tracebacks show."""
    inner = tuple(_with_file_name(path, each) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=path, co_consts=inner)


def _rename(modules: Mapping[str, ModuleType], path: str) -> None:
    """Give the folder's modules unique names: in the first step ``torch.compile`` imports the module of each traced function by name."""
    for name, module in modules.items():
        module.__name__ = f"{name} of {path}"
        sys.modules[module.__name__] = module


def import_train(folder: Path) -> Any:
    """Import the folder's ``train.py``; its recipe may import modules of the working folder. Call inside ``program_modules``.

    Raises ``UsageError`` if it can't be imported or has no recipe.
    """
    train, before = folder / "train.py", list(sys.path)
    sys.path.append(os.getcwd())
    try:
        module: Any = importlib.import_module("train")
        absent = [name for name in _RECIPE if not hasattr(module, name)]
    except Exception as error:  # users edit this file
        raise UsageError(
            f"the recipe in {train} cannot be read: {type(error).__name__}: {error}",
            "the modules that it imports are in the folder, in the working folder, or installed",
        ) from error
    finally:
        sys.path[:] = before
    if absent:
        raise UsageError(f"{train} has no {', '.join(absent)}", "give optimizer= and the rest of the recipe")
    if module.REFUSED:
        raise UsageError(
            f"{train} has no recipe: {module.REFUSED}",
            "give optimizer=, scheduler= and the rest, or write the recipe there",
        )
    return module


_RECIPE = ("REFUSED", "LR", "MAX_NORM", "SEED", "INIT", "DRAW_INIT", "make_optimizer", "make_scheduler")


def optimizer_maker(train: Any, lr: float | None, world: Any) -> Callable[..., Any]:
    """Return ``train.py``'s ``make_optimizer`` as a function of named parameters, as a ``Trainer`` takes it."""
    return lambda named_parameters: train.make_optimizer(dict(named_parameters), lr, world)


def import_runtime(folder: str | os.PathLike[str]) -> ModuleType:
    """Import the folder's module that has ``Trainer``. Call inside ``program_modules``."""
    there = Path(folder) / "runtime"
    former = "runtime.runtime" if there.is_dir() else "runtime"  # in folders that earlier versions emitted
    return importlib.import_module("runtime.trainer" if (there / "trainer.py").is_file() else former)
