"""Imports functions that are given by name: ``"module:function"`` or ``"file.py:function"``."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def resolve(target: str) -> Callable[..., Any]:
    """Import ``"package.module:function"`` or ``"folder/file.py:function"``; a file that is imported already is not run again.

    Raises ``ImportError``, ``AttributeError`` or ``FileNotFoundError``; ``AssertionError`` if it isn't callable.
    """
    source, _, name = target.rpartition(":")
    module = _imported_file(source) if source.endswith(".py") else importlib.import_module(source)
    function = functools.reduce(getattr, name.split("."), module)
    assert callable(function), target
    return function


def _imported_file(source: str) -> ModuleType:
    path = Path(source).resolve()
    for name in (path.stem, str(path)):
        if name not in sys.modules:
            return import_file(source, name)
        if getattr(sys.modules[name], "__file__", None) == str(path):
            break
    return sys.modules[name]


def import_file(source: str, name: str | None = None) -> ModuleType:
    """Run a Python file as the module ``name`` (default: the file's name), with its folder on ``sys.path``, as ``python FILE`` does."""
    path = Path(source).resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name or path.stem, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]  # so that the next import runs the file again
        raise
    return module
