"""Handles Python state that forward changes in the model's modules or outside of them: a counter, a list, a tensor for the next call.

A graph records the first call. If forward changed attributes or globals, the model is exported again in its new state. If the second graph
equals the first, forward doesn't read the state, and the plan notes attributes that keep changing. If the second graph differs from the
first, and the third from the second, the model is refused with the names of what changed; so it is if a repeated export fails, or if an
attribute keeps a tensor that needs a gradient and the second graph differs. If only the second and third graphs are equal, the first call
filled a cache, or did something that later calls don't: the comparison over two steps (``check``) tells which. That comparison also tells
whether a later call needs tensors outside of the modules, which are removed after every run (``external_state``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.capture.clone import FakeModel
from autopar.capture.external_state import StateChange
from autopar.capture.storage import items
from autopar.errors import CaptureError

BUFFER_HINT = (
    "register a buffer (self.register_buffer) and write to it in place: buffers that forward writes are kept up to date"
)
State = dict[tuple[str, str], Any]
"""(module path, attribute name) -> the attribute's value, for attributes with plain data or tensors."""


@dataclass(frozen=True, slots=True)
class StateAfterForward:
    """The state after a traced forward: that of the modules, and the changes outside of them."""

    state: State
    outside: tuple[StateChange, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of changed variables outside of the modules whose old or new values have tensors."""
        return tuple(name for change in self.outside for name in change.names_with_tensors())

    @property
    def plain(self) -> dict[str, tuple[Any, Any]]:
        """The changes outside of the modules, by name; empty if one has tensors, because then all were undone."""
        return {} if self.tensors else {k: v for change in self.outside for k, v in change.named().items()}


_TORCH_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
_TENSOR_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size, Tensor)


def buffers(module: nn.Module) -> State:
    """Return the buffers of a module and its submodules, including ``None``."""
    owners = [(path, each) for path, each in module.named_modules() if not isinstance(each, torch.jit.ScriptModule)]
    return {(path, name): buffer for path, each in owners for name, buffer in each._buffers.items()}


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """On exit, unless an exception is raised, undo registrations, replacements and removals of buffers."""
    before = [(m, dict(m._buffers)) for m in module.modules() if not isinstance(m, torch.jit.ScriptModule)]
    yield
    for each, own in before:
        each._buffers.clear()
        each._buffers.update(own)


def state(module: nn.Module) -> State:
    """Return the state of a module and its submodules."""
    found: State = {}
    seen: set[int] = set()  # export replaces a module with several paths by proxies with the same attributes
    for path, each in module.named_modules():
        if id(vars(each)) in seen:
            continue
        seen.add(id(vars(each)))
        for name, value in vars(each).items():
            if name not in _TORCH_ATTRIBUTES and _is_plain(value):
                found[path, name] = _copied(value, lambda tensor: tensor)
    return found


def describe(module: nn.Module) -> dict[str, Any] | None:
    """Return a module's attributes besides parameters, buffers and submodules; ``None`` if one is a hook, a tensor, or no plain data."""
    fresh = vars(nn.Module())
    described = {}
    for name, value in vars(module).items():
        if name in _TORCH_ATTRIBUTES:
            if name not in _TENSOR_TABLES and value != fresh[name]:
                return None
        elif not _is_plain(value) or _holds_tensors(value):
            return None
        else:
            described[name] = value
    return described


def changes(before: State, after: State) -> dict[str, tuple[Any, Any]]:
    """Return the values before and after of the new, changed and deleted attributes, by dotted name; ``None`` for one that is missing."""
    return {
        ".".join(filter(None, key)): (before.get(key), after.get(key))
        for key in before | after
        if key not in before or key not in after or not equal(before[key], after[key])
    }


def check_again(
    program: Any,
    before: State,
    after: StateAfterForward,
    copied: FakeModel,
    again: Callable[[], tuple[Any, StateAfterForward]],
) -> tuple[list[str], list[tuple[str, str]]]:
    """Export again from the state after the first export. Return notes on attributes that keep changing, and a message and hint on state
    that later calls may need.

    ``again`` exports the fake copy, and returns the program and the state after its forward.

    Raises ``CaptureError`` if the second graph differs from the first, and either the third differs from the second, or a changed attribute
    has a tensor that needs a gradient; and if an export from a later state fails.
    """
    inside = changes(before, after.state)
    changed = inside | after.plain
    if not changed:
        return [], _assumptions(after.tensors)

    def rerun(initial: State) -> tuple[list[Any], State, State]:
        """Export from ``initial``; return the graph's computation, and the state before and after its forward."""
        _set(copied.module, {key: _copied(value, blank) for key, value in initial.items()})
        start = state(copied.module)
        program, end = again()
        return _computation(program), start, end.state

    def blank(tensor: Tensor) -> Tensor:
        with copied.mode:
            return torch.zeros(tensor.shape, dtype=tensor.dtype)

    same = settled = False
    start = end = after.state
    try:
        second, start, end = rerun(after.state)
        same = second == _computation(program)
        # a gradient through a tensor from an earlier call would run that call's backward again, which PyTorch refuses
        settled = same or (second == rerun(end)[0] and not any(_needs_gradient(new) for _, new in inside.values()))
    except CaptureError:  # the state of the earlier call made it fail: it is not settled
        pass
    finally:
        _set(copied.module, before)
    if not settled:
        shown = ", ".join(f"{n} ({_shown(old)}, then {_shown(new)})" for n, (old, new) in list(changed.items())[:5])
        raise CaptureError(
            f"forward changes Python state and reads it in its next call: {shown}; the graph would repeat its first call",
            hint=BUFFER_HINT,
        )
    names = [n for n in changes(start, end) if n in inside and not _holds_tensors(inside[n][1])]
    notes = [f"a program does not update the attribute {name}, which forward changes in every call" for name in names]
    return notes, _assumptions(after.tensors if same else (*changed, *after.tensors))


def _assumptions(names: Sequence[str]) -> list[tuple[str, str]]:
    return [(f"forward leaves state for its next call in {', '.join(names[:3])}", BUFFER_HINT)] if names else []


def _set(module: nn.Module, values: State) -> None:
    """Give a module and its submodules the attributes in ``values``, and remove their other attributes with plain data."""
    for path, name in state(module).keys() - values.keys():
        del vars(module.get_submodule(path))[name]
    for (path, name), value in values.items():
        owner = module.get_submodule(path)
        (owner._buffers if name in owner._buffers else vars(owner))[name] = value


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, dict.keys(value))) and all(map(_is_plain, items(value)))
    if isinstance(value, list | tuple | set) and not isinstance(value, torch.Size):
        return all(map(_is_plain, items(value)))
    return isinstance(value, _PLAIN) and not isinstance(value, nn.Parameter)  # export replaces parameters while it runs


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or any(map(_holds_tensors, items(value)))


def _needs_gradient(value: Any) -> bool:
    return value.requires_grad if isinstance(value, Tensor) else any(map(_needs_gradient, items(value)))


def _copied(value: Any, tensor: Callable[[Tensor], Tensor]) -> Any:
    """Copy plain data, with each tensor ``t`` replaced by ``tensor(t)``."""
    if isinstance(value, Tensor):
        return tensor(value)
    if type(value) in (tuple, set):
        return type(value)(_copied(item, tensor) for item in value)
    copied = copy.copy(value)  # of a list's or a dict's subclass, too, such as defaultdict
    if isinstance(value, list):
        list.__setitem__(copied, slice(None), [_copied(item, tensor) for item in items(value)])
    if isinstance(value, dict):
        for key in dict.keys(value):
            dict.__setitem__(copied, key, _copied(dict.__getitem__(value, key), tensor))
    return copied


def equal(a: Any, b: Any) -> bool:
    """Return whether plain data is equal; tensors are equal only to themselves."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        ours, theirs = items(a), items(b)
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    return bool(a == b)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if not _is_plain(value):
        return f"a {type(value).__name__}"
    text = repr(value) if not _holds_tensors(value) else f"a {type(value).__name__} with tensors"
    return text if len(text) <= 40 else text[:40] + "..."


def _shape(node: fx.Node) -> str:
    value = node.meta.get("val")
    return str(tuple(value.shape)) if isinstance(value, Tensor) else ""


def _computation(program: Any) -> list[Any]:
    """Return an exported program's computation: the nodes of all its graphs, and its constants (of large ones only the type)."""
    lines: list[Any] = []
    for name, gm in program.graph_module.named_modules():
        if isinstance(gm, fx.GraphModule):
            lines += [
                (name, n.name, n.op, str(n.target), str(n.args), str(n.kwargs), _shape(n)) for n in gm.graph.nodes
            ]
    for name, value in program.constants.items():
        real = isinstance(value, Tensor) and type(value) is Tensor and not value.is_meta
        lines.append((name, repr(value.tolist()) if real and value.numel() < 4096 else type(value)))
    return lines
