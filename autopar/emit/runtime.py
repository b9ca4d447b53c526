"""Copies the runtime of emitted programs, ``autopar.program``, into a program's folder as the package ``runtime``."""

from __future__ import annotations

import ast
import functools
import json
import os
from collections.abc import Iterable, Set
from pathlib import Path

from autopar import program
from autopar.program.type_check import DIGESTS, file_digest
from autopar.techniques import ALL

PACKAGE = "runtime"
_HOME = Path(program.__file__).parent
FILES = frozenset(path.name for path in _HOME.glob("*.py")) - {"train.py"}
"""Names of the files of ``autopar.program`` that belong to the package ``runtime``."""
_FORMER = frozenset(
    f"{name}.py"
    for name in (
        "arrivals",
        "claims",
        "groups",
        "local_group",
        "masters",
        "out_of_memory",
        "pretrained",
        "publications",
        "runtime",
        "schedulers",
        "values",
        *(name for technique in ALL for name in technique.former_modules),
    )
)
"""Names of the runtime's files in earlier versions of autopar."""


def copy_runtime(folder: str | os.PathLike[str], uses: Iterable[str]) -> None:
    """Write ``train.py`` and the package ``runtime`` into a program's folder: the modules that ``train.py`` imports, those that
    ``model.py`` ``uses``, and their imports.

    Unneeded files of an earlier program are removed, unless they were edited.
    """
    there = Path(folder) / PACKAGE
    there.mkdir(parents=True, exist_ok=True)
    needed = needed_files({"__init__", *_imported("train.py"), *uses})
    emitted = _digests(there.parent / DIGESTS)
    for name in {*FILES, *_FORMER} - needed:
        path = there / name
        if path.is_file() and file_digest(path) == emitted.get(f"{PACKAGE}/{name}"):
            path.unlink()
    for name in needed:
        (there / name).write_bytes((_HOME / name).read_bytes())
    train = (_HOME / "train.py").read_text()
    (there.parent / "train.py").write_text(train.replace(f"{program.__name__}.", f"{PACKAGE}."))
    _remove_siblings(there.parent)


def needed_files(modules: Set[str]) -> set[str]:
    """Return the files of ``modules`` and of their imports, recursively."""
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        name = f"{waiting.pop()}.py"
        if name not in found:
            found.add(name)
            waiting += _imported(name)
    return found


@functools.cache
def _imported(name: str) -> tuple[str, ...]:
    """Return the modules of the package that a file imports."""
    found: list[str] = []
    for node in ast.walk(ast.parse((_HOME / name).read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level == 1:
            found += [node.module] if node.module else [alias.name for alias in node.names]
        elif (node.module or "").startswith(f"{program.__name__}."):
            found.append(str(node.module).removeprefix(f"{program.__name__}."))
    return tuple(found)


def _digests(file: Path) -> dict[str, str]:
    """Return a folder's digests by file name; ``{}`` if it has none."""
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError):
        return {}


def _remove_siblings(folder: Path) -> None:
    """Remove the runtime that earlier versions of autopar wrote next to ``model.py``, except edited files."""
    known = _digests(folder / "checked.json")
    for name in known.keys() & {*FILES, *_FORMER}:
        if (folder / name).is_file() and file_digest(folder / name) == known[name]:
            (folder / name).unlink()
    for name in ("checked.json", "constants.pt", "opaque.json", "schedule.csv"):
        (folder / name).unlink(missing_ok=True)
