"""Import the runtime of emitted folders once for all folders that have the same files, in a worker that runs many programs.

Importing the thirty modules of a runtime takes a sixth of the time of a small program's step. Each folder still has its own ``model``; and
what an earlier program, or a test, left in the modules and their classes is taken back before they are used again.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections import OrderedDict
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from autopar.run import folder

_MOST = 24
"""Different runtimes that are kept."""
_runtimes: OrderedDict[str, dict[str, _Imported]] = OrderedDict()
_find_spec = folder._Finder.find_spec


def share_runtimes() -> None:
    """From now on this process and its forks import equal runtimes once."""
    folder._Finder.find_spec = _find_shared  # type: ignore[method-assign]


def _find_shared(finder: Any, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
    spec = _find_spec(finder, name, path, target)
    if name == "runtime":
        finder.shared = _modules_like(spec)
    if spec is None or spec.origin is None or name.partition(".")[0] != "runtime" or finder.shared is None:
        return spec
    spec.loader = _Loader(name, spec.origin, finder.shared)
    return spec


def _modules_like(spec: ModuleSpec | None) -> dict[str, _Imported] | None:
    """The modules that were imported from a package with the same files. Compiled programs have modules of their own, because
    ``torch.compile`` imports them by name."""
    if spec is None or not spec.submodule_search_locations:
        return None
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.py"))
    if any(file.name == "compiled.py" for file in files):
        return None
    digest = hashlib.blake2b()
    for file in files:
        digest.update(b"%d %s\0" % (file.stat().st_size, file.name.encode()) + file.read_bytes())
    found = _runtimes.setdefault(digest.hexdigest(), {})
    _runtimes.move_to_end(digest.hexdigest())
    if len(_runtimes) > _MOST:
        _runtimes.popitem(last=False)
    return found


class _Loader(folder._Loader):
    def __init__(self, name: str, path: str, shared: dict[str, _Imported]) -> None:
        super().__init__(name, path)
        self._shared = shared

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._shared[spec.name].again(self.path) if spec.name in self._shared else None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ not in self._shared:
            super().exec_module(module)
            self._shared[module.__name__] = _Imported(module)
        elif module.__name__ == "runtime":
            for name, imported in self._shared.items():
                if imported.module is not module:
                    file = os.path.basename(str(imported.module.__file__))
                    sys.modules[name] = imported.again(os.path.join(os.path.dirname(self.path), file))
                    setattr(module, name.rpartition(".")[2], sys.modules[name])


class _Imported:
    """A module and what it, and each of its classes, had when it was imported."""

    def __init__(self, module: ModuleType) -> None:
        classes = [
            each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__
        ]
        self.module = module
        self._before = [
            (owner, {name: (value, _copy(name, value)) for name, value in vars(owner).items()})
            for owner in (module, *classes)
        ]

    def again(self, path: str) -> ModuleType:
        """The module as it was imported, in another file."""
        for owner, before in self._before:
            for name in vars(owner).keys() - before.keys():
                delattr(owner, name)
            for name, (value, content) in before.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)
                if content is not None:
                    value.clear()
                    (value.extend if isinstance(value, list) else value.update)(content)
                elif isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
        self.module.__file__ = path
        if hasattr(self.module, "__path__"):
            self.module.__path__ = [os.path.dirname(path)]
        return self.module


def _copy(name: str, value: Any) -> Any:
    """The content of a container that may change."""
    return value.copy() if type(value) in (dict, list, set) and not name.startswith("__") else None
