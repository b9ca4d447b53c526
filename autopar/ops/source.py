"""Finds the lines of the user's code that created a node, and the name that the code assigns the node's value to."""

from __future__ import annotations

import ast
import builtins
import linecache
import operator
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autopar.ops.meta import meta

_TORCH = str(Path(torch.__file__).parent)
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ([^\n]+)\n\s*(.+)')

Frame = tuple[str, int, str, str]
"""File, line number, name of the function, text of the line."""


@dataclass(frozen=True, slots=True)
class _Statement:
    """A statement: its first line, the names that it assigns, and whether it returns its value."""

    line: int
    targets: tuple[str, ...] = ()
    returns: bool = False


def frames(node: fx.Node) -> list[Frame]:
    """Return the frames that created the node, innermost last."""
    return _frames(str(meta(node).get("stack_trace") or ""))


@lru_cache(maxsize=4096)
def _frames(trace: str) -> list[Frame]:
    return [(file, int(line), function, text) for file, line, function, text in _FRAME.findall(trace)]


def user_frame(node: fx.Node) -> Frame | None:
    """Return the user's frame that created the node: the innermost one of a ``forward`` method, or else of any function; the innermost
    frame if none is the user's; ``None`` without frames."""
    found = frames(node)
    users = [frame for frame in found if not frame[0].startswith(_TORCH)]
    best = [frame for frame in users if frame[2] == "forward"] or users or found
    return best[-1] if best else None


def source_line(node: fx.Node) -> str:
    """Return ``user_frame`` in the format of a traceback, or an empty string."""
    if (frame := user_frame(node)) is None:
        return ""
    file, line, function, text = frame
    return f'File "{file}", line {line}, in {function}\n    {text}'


def source_name(node: fx.Node) -> str:
    """Return the name that the user's code assigns the node's value to, or one derived from the code.

    In ``y = self.up(x) * -f(x)`` the product is named ``y``, the negation ``y_neg``, and the results of ``self.up`` and ``f`` are named
    ``up`` and ``f``.
    """
    return _name(node)[0]


def is_bound(node: fx.Node) -> bool:
    """Return whether the user's code assigns the node's value to a name."""
    return _name(node)[1]


def _name(node: fx.Node) -> tuple[str, bool]:
    """Return the name, and whether the code assigns the value to it. If a function returns the value, its caller's assignment counts."""
    op, module, at = _op(node), _module_name(node), frames(node)
    for depth in reversed(range(len(at))):
        here = _statement(*at[depth][:2])
        if here is None or not (here.returns or here.targets):
            break
        if _ends_statement(node, at[: depth + 1]):
            if here.returns:
                continue
            if len(here.targets) == 1:
                return here.targets[0], True
            if (index := _result_index(node)) is not None and index < len(here.targets):
                return here.targets[index], True
        elif depth + 1 < len(at) and at[depth + 1][2] != "forward":
            return at[depth + 1][2].strip("_<>") or op, False
        elif depth + 1 == len(at) and len(here.targets) == 1:
            return f"{here.targets[0]}_{op}", False
        break
    return module or op, False


def _op(node: fx.Node) -> str:
    """Return the op's name, with fx's number if the name is also a Python builtin's."""
    name = re.sub(r"_\d+$", "", node.name)
    return node.name if hasattr(builtins, name) else name


def _module_name(node: fx.Node) -> str:
    """Return the attribute name of the module that created the node; empty for a member of a module list."""
    modules: list[Any] = list((meta(node).get("nn_module_stack") or {}).values())
    name = str(modules[-1][0]).split("@")[0].rpartition(".")[2] if modules else ""
    return "" if name.isdigit() or name == "module" else name


def _result_index(node: fx.Node) -> int | None:
    """Return the index of the node among an op's results; ``None`` if it is the only result."""
    index = node.args[1] if node.target is operator.getitem else None
    return index if isinstance(index, int) and index >= 0 else None


def _ends_statement(node: fx.Node, at: list[Frame]) -> bool:
    """Return whether the node is its statement's final value: no other node of the same statement and frames (``at``) reads it."""
    place = [(file, _first_line(file, line)) for file, line, *_ in at]
    waiting, seen = list(node.users), set[fx.Node]()
    while waiting:
        user = waiting.pop()
        if user in seen or user.op != "call_function":
            continue
        seen.add(user)
        if getattr(user.target, "__module__", "") == "passes.collectives":  # the same value, in another type
            waiting += user.users
            continue
        there = frames(user)[: len(at)]
        if [(file, _first_line(file, line)) for file, line, *_ in there] == place:
            return False
    return True


def _first_line(file: str, line: int) -> int:
    found = _statement(file, line)
    return line if found is None else found.line


def _statement(file: str, line: int) -> _Statement | None:
    return _statements(file).get(line)


@lru_cache(maxsize=64)
def _statements(file: str) -> dict[int, _Statement]:
    """Return the simple statements of a file, keyed by line number; empty if the file can't be parsed."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[int, _Statement] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            made = _Statement(node.lineno, *_assignment(node))
            found.update(dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), made))
    return found


_COLLECTIONS = (ast.Tuple, ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)


def _assignment(node: ast.stmt) -> tuple[tuple[str, ...], bool]:
    """Return the names to which a statement assigns its expression, and whether it returns the expression."""
    if isinstance(getattr(node, "value", None), _COLLECTIONS):
        return (), False
    if isinstance(node, ast.Return):
        return (), node.value is not None
    if isinstance(node, ast.Assign):
        target = node.targets[0]
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        target = node.target
    else:
        return (), False
    elements = target.elts if isinstance(target, ast.Tuple) else [target]
    names = tuple(element.id for element in elements if isinstance(element, ast.Name))
    return (names, False) if len(names) == len(elements) else ((), False)
