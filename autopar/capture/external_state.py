"""Restores Python state that the model's code writes outside of the model: globals, attributes of classes and functions, closures,
default arguments, caches.

Capture runs copies of a model, which share this state: a trace would leave fake tensors in it for the next run. So a run's changes are
undone if any of them involves tensors. A trace reports its changes, and ``state.check_again`` decides whether a later call would compute
something else.

The search starts at the model's classes and follows every class, function, container, object and Python module to which the code refers.
Of installed Python modules, it searches only those that define a class of the model or the loss; of the standard library, torch and
NumPy, none.
"""

from __future__ import annotations

import collections
import functools
import gc
import inspect
import operator
import site
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autopar.capture.storage import items

_MAX_ITEMS, _MAX_CONTAINERS = 10_000, 50_000
"""Containers with more than ``_MAX_ITEMS`` items count as data and aren't searched; about ``_MAX_CONTAINERS`` are, nearest first."""
_NOT_USER_PACKAGES = frozenset(
    (*sys.stdlib_module_names, "torch", "numpy", "autopar", "passes", "pytest", "_pytest")
) - {"__main__"}
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, functools._lru_cache_wrapper)
_CONTAINERS = (dict, list, set, collections.deque)
_MAX_KEY_LENGTH = 40
_PLAIN = (int, float, complex, str, bytes, type(None))
_MISSING = object()
_WARNING_REGISTRY = "__warningregistry__"
_TORCH_ATTRIBUTES = frozenset(vars(nn.Module())) - {"_modules"}

Content = dict[Any, Any]
"""A container's items by key, index or id; a namespace's variables by name."""


@dataclass(frozen=True, slots=True)
class Place:
    """A container, class or closure variable, and a snapshot of its content."""

    name: str
    container: Any
    content: Content

    def differs(self, content: Content) -> list[Any]:
        """Return the keys at which ``content`` has another object, unless both are equal plain data."""
        mine = self.content
        if len(mine) == len(content) and all(map(operator.is_, mine.values(), content.values())):
            return []  # the usual case: the same objects in the same order
        both = {**mine, **content}
        found = [key for key in both if not _same(mine.get(key, _MISSING), content.get(key, _MISSING))]
        return [key for key in found if key != _WARNING_REGISTRY]


@dataclass(frozen=True, slots=True)
class StateChange:
    """A run's changes in a container: the snapshot before it, the content after it, and the keys that differ."""

    before: Place
    after: Content
    keys: tuple[Any, ...]

    def named(self) -> dict[str, tuple[Any, Any]]:
        """Return the changes by name, with the values before and after (``None`` if missing)."""
        return {_dotted_name(self.before.name, k): (self.before.content.get(k), self.after.get(k)) for k in self.keys}

    def names_with_tensors(self) -> list[str]:
        """Return the names of the changes in which the old or the new value has tensors; of several names of one object, the first."""
        seen: set[int] = set()
        return [name for name, values in self.named().items() if any(_holds_tensors(value, seen) for value in values)]

    def undo(self) -> None:
        _restore(self.before.container, self.before.content, self.keys)


class Run:
    """A run of the model; ``changes`` is set when it ends."""

    changes: tuple[StateChange, ...] = ()


class ExternalState:
    """The containers and function caches that code of ``model`` or ``loss_fn`` can write."""

    def __init__(self, model: nn.Module, loss_fn: Any = None) -> None:
        found = _Search(model, loss_fn)
        self._containers, self._caches = found.containers, found.caches

    @contextmanager
    def restored(self) -> Iterator[Run]:
        """On exit, remove tensors that were stored since entry.

        If any change involves tensors, all changes are undone, because a flag may record that a tensor exists. Otherwise the changes stay
        (counters, for example), because other threads may write to the same namespaces. Function caches with new tensors are cleared.
        """
        before = [Place(name, container, _content(container)) for name, container in self._containers]
        cached = [_cached_tensors(cache) for cache in self._caches]
        run = Run()
        try:
            yield run
        finally:
            run.changes = tuple(_changes(before))
            if any(change.names_with_tensors() for change in run.changes):
                for change in run.changes:
                    change.undo()
            for cache, known in zip(self._caches, cached, strict=True):
                if _cached_tensors(cache) - known:
                    cache.cache_clear()


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in _PLAIN and one == other)


def _changes(places: Iterable[Place]) -> Iterator[StateChange]:
    for place in places:
        now = _content(place.container)
        if keys := [key for key in place.differs(now) if key in place.content or not isinstance(now[key], _CODE)]:
            # functions, classes and modules that the run imported or defined stay
            yield StateChange(place, now, tuple(keys))


# -- the search for containers and caches ------------------------------------------------------------------------------


class _Search:
    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        self.containers: list[tuple[str, Any]] = []
        self.caches: list[Any] = []
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so that ids aren't reused
        owners = [*model.modules(), *(loss_fn.modules() if isinstance(loss_fn, nn.Module) else ())]
        classes = list(dict.fromkeys(base for owner in owners for base in type(owner).__mro__))
        loss_function = getattr(loss_fn, "__func__", getattr(loss_fn, "func", loss_fn))
        self._defining = {each.__module__ for each in classes} | {getattr(loss_function, "__module__", None)}
        self._queue = collections.deque[tuple[Any, str]]((each, each.__qualname__) for each in classes)
        self._queue += [(model, "the model"), (loss_fn, "loss_fn")]
        while self._queue and len(self.containers) < _MAX_CONTAINERS:
            self._visit(*self._queue.popleft())

    def _visit(self, value: Any, name: str) -> None:
        if isinstance(value, (Tensor, *_PLAIN)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, (*_CONTAINERS, tuple, frozenset)):
            self._visit_container(value, name)
        elif isinstance(value, functools._lru_cache_wrapper):
            self.caches.append(value)
            self._queue.append((value.__wrapped__, name))
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, name)
        elif isinstance(value, type):
            if self._is_searched(value.__module__):
                self._add_container(value, name)
                self._visit_namespace(value.__module__)
        elif isinstance(value, types.ModuleType):
            self._visit_namespace(value.__name__)
        elif isinstance(value, staticmethod | classmethod):
            self._queue.append((value.__func__, name))
        elif isinstance(value, types.MethodType):
            self._queue += [(value.__func__, name), (value.__self__, name)]
        elif isinstance(value, functools.partial):
            self._queue.append(((value.func, value.args, value.keywords), name))
        elif _has_user_attributes(type(value)):
            self._queue.append((type(value), type(value).__qualname__))
            attributes = _attributes(value)
            if isinstance(value, nn.Module):  # skip torch's own tables of hooks and tensors
                self._seen |= {id(item): item for key, item in attributes.items() if key in _TORCH_ATTRIBUTES}
            self._queue.append((attributes, name))
            if _slots(value):
                self._add_container(_Slots(value), name)

    def _visit_namespace(self, name: str) -> None:
        if self._is_searched(name):
            self._queue.append((vars(sys.modules[name]), name))

    def _is_searched(self, name: str) -> bool:
        """Return whether the globals, classes and functions of the Python module ``name`` are searched."""
        if _package(name) in _NOT_USER_PACKAGES or name not in sys.modules:
            return False
        return name in self._defining or _is_not_installed(sys.modules[name])

    def _visit_container(self, value: Any, name: str) -> None:
        if len(items(value)) > _MAX_ITEMS:
            return
        if isinstance(value, _CONTAINERS):
            self._add_container(value, name)
        else:
            self._queue += [(item, f"{name}[{index}]") for index, item in enumerate(items(value))]

    def _visit_function(self, function: types.FunctionType, name: str) -> None:
        if not self._is_searched(str(function.__module__)):
            return
        self._visit_namespace(function.__module__)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self._add_container(cell, f"{name}: {variable}")
        arguments, values = inspect.getargs(function.__code__).args, function.__defaults__ or ()
        defaults = dict(zip(arguments[len(arguments) - len(values) :], values, strict=True))
        for argument, value in (defaults | (function.__kwdefaults__ or {})).items():
            self._queue.append((value, f"{name}({argument}=)"))
        self._queue.append((vars(function), name))

    def _add_container(self, container: Any, name: str) -> None:
        self.containers.append((name, container))
        self._queue += [(item, _dotted_name(name, key)) for key, item in _content(container).items()]


def _has_user_attributes(kind: type) -> bool:
    """Return whether the attributes of a class's instances are searched: not in ``_NOT_USER_PACKAGES``, with three exceptions."""
    return (
        issubclass(kind, nn.Module | types.SimpleNamespace | threading.local)
        or _package(str(kind.__module__)) not in _NOT_USER_PACKAGES
    )


def _is_not_installed(module: Any) -> bool:
    path = getattr(module, "__file__", None)
    return isinstance(path, str) and not path.startswith(_installed())


@functools.cache
def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages()})


def _package(name: str) -> str:
    return name.partition(".")[0]


def _dotted_name(name: str, key: Any) -> str:
    if key is _CELL:
        return name
    if isinstance(key, str) and key.isidentifier():
        return f"{name}.{key}"
    plain = isinstance(key, _PLAIN) or (isinstance(key, tuple) and all(isinstance(each, _PLAIN) for each in key))
    return f"{name}[{repr(key)[:_MAX_KEY_LENGTH] if plain else type(key).__name__}]"


# -- the content of containers -----------------------------------------------------------------------------------------

_CELL = object()
"""The key of a closure variable's value."""


def _attributes(value: Any) -> Any:
    if isinstance(value, threading.local):
        return vars(value)  # those of this thread
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


@dataclass(frozen=True, slots=True, eq=False)
class _Slots:
    """Represents the slots of ``owner`` as a container."""

    owner: Any


def _slots(value: Any) -> dict[str, Any]:
    """Return the descriptors of the slots that Python classes define, by name; slots of C classes may be computed or read-only."""
    found = [vars(base).items() for base in type(value).__mro__ if "__slots__" in vars(base)]
    return {name: each for items in found for name, each in items if isinstance(each, types.MemberDescriptorType)}


def _content(container: Any) -> Content:
    if isinstance(container, _Slots):
        slots = _slots(container.owner)
        return {name: value for name, slot in slots.items() if (value := _read(slot, container.owner)) is not _MISSING}
    if isinstance(container, types.CellType):
        try:
            return {_CELL: container.cell_contents}
        except ValueError:  # the variable is not bound yet
            return {}
    if isinstance(container, type):
        return dict(vars(container))
    if isinstance(container, dict):
        return dict(dict.items(container))
    found = items(container)
    return {id(item): item for item in found} if isinstance(container, set) else dict(enumerate(found))


def _read(slot: Any, owner: Any) -> Any:
    try:
        return slot.__get__(owner)
    except AttributeError:
        return _MISSING


def _restore(container: Any, content: Content, keys: Iterable[Any]) -> None:
    if isinstance(container, types.CellType):
        if _CELL in content:
            container.cell_contents = content[_CELL]
        else:
            del container.cell_contents
    elif isinstance(container, _Slots):
        slots = _slots(container.owner)
        for key in keys:
            if key in content:
                slots[key].__set__(container.owner, content[key])
            else:
                slots[key].__delete__(container.owner)
    elif isinstance(container, type):
        for key in keys:
            if key in content:
                setattr(container, key, content[key])
            elif key in vars(container):
                delattr(container, key)
    elif isinstance(container, dict):
        for key in keys:
            if key in content:
                container[key] = content[key]
            else:
                container.pop(key, None)
    else:
        kind: Any = next(kind for kind in _CONTAINERS if isinstance(container, kind))
        kind.clear(container)
        (kind.update if kind is set else kind.extend)(container, content.values())


def _children(value: Any) -> list[Any]:
    """Return the items of a container, or the attributes of a user's object."""
    if isinstance(value, (*_CONTAINERS, tuple, frozenset)):
        return items(value)
    if not _has_user_attributes(type(value)):
        return []
    return [*(_attributes(value) or {}).values(), *_content(_Slots(value)).values()]


def _holds_tensors(value: Any, seen: set[int]) -> bool:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            return True
        if not isinstance(value, (*_PLAIN, *_CODE)) and id(value) not in seen:
            seen.add(id(value))
            waiting += _children(value)
    return False


def _cached_tensors(cache: Callable[..., Any]) -> set[int]:
    """Return the ids of the tensors in a function's cache, up to five references deep."""
    found: set[int] = set()
    waiting, seen = [(cache, 0)], set[int]()
    while waiting:
        value, depth = waiting.pop()
        if id(value) in seen or depth > 5 or isinstance(value, (types.FunctionType, types.ModuleType, type, nn.Module)):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found.add(id(value))
        else:
            waiting += [(inner, depth + 1) for inner in gc.get_referents(value)]
    return found
