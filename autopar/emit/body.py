"""The lines of a method that computes a graph."""

from __future__ import annotations

import re
from typing import Any

from torch import fx

from autopar.emit.expressions import Text, expression, literal
from autopar.emit.names import Names
from autopar.ops.facts import facts
from autopar.ops.meta import meta
from passes.collectives import convert

WIDTH = 110  # a longer line is split: its expression gets a name


def statements(nodes: list[fx.Node], texts: dict[fx.Node, Text], names: Names, watch: bool = False) -> list[str]:
    """One line per value that is used twice, is converted, or is too long to stand inside another expression; with ``watch`` one per
    value.

    At the end of each part of the model, names that nothing reads any more are deleted: the backward pass keeps the tensors that it
    needs, and the rest would otherwise stay in memory until the method returns.
    """
    lines: list[str] = []
    watched: list[str] = []
    named: list[str] = []
    ends: list[int] = []  # the lines where a part of the model ends
    scope = None
    for node in nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            results: Any = node.args[0] if isinstance(node.args[0], tuple | list) else node.args
            if watch:
                lines.append(f"        self.watched = {{{', '.join(watched)}}}")
            lines.append("        return " + ", ".join(literal(result, texts) for result in results))
            if not watch:
                lines = _with_deletions(lines, named, ends)
            break
        text = expression(node, texts)
        if meta(node).get("kept"):
            text = Text(f"selective.keep(lambda: {text.text})")
        if _inline(node, text) and not watch:
            texts[node] = text
            continue
        here = _scope(node)
        if here and here != scope:
            ends.append(len(lines))
            lines.append(f"        # {here}")
        scope = here or scope
        name = names.fresh(_name(node))
        lines.append(f"        {name} = {text.text}")
        texts[node] = Text(name)
        watched.append(f'"{node.name}": {name}')
        named.append(name)
    return lines


def _with_deletions(lines: list[str], named: list[str], ends: list[int]) -> list[str]:
    """``lines`` with a ``del`` before each of ``ends``, for the ``named`` values that are not read after it."""
    last = dict.fromkeys(named, 0)
    for index, line in enumerate(lines):
        if not line.lstrip().startswith("#"):
            last.update((word, index) for word in re.findall(r"\w+", line) if word in last)
    found: list[str] = []
    start = 0
    for end in ends:
        found += lines[start:end]
        if dead := [name for name in named if start <= last[name] < end]:
            found.append(f"        del {', '.join(dead)}")
        start = end
    return found + lines[start:]


def _name(node: fx.Node) -> str:
    """The node's name; a conversion is named after its value and its new type: ``linear_3_i``."""
    if node.target is not convert:
        return node.name
    value, _, _, target = node.args
    assert isinstance(value, fx.Node) and isinstance(target, str)
    return f"{_name(value)}_{target[0].lower()}"


def _inline(node: fx.Node, text: Text) -> bool:
    """Whether the expression may stand in its only reader: a conversion always gets its own line, so that readers see it."""
    # values inside ``keep`` are saved: a product that is not saved gets its own line
    if meta(node).get("kept") or ("kept" in meta(node) and facts(node).is_expensive):
        return False
    if node.target is convert or len(node.users) != 1 or len(text.text) > WIDTH // 2:
        return False
    user = next(iter(node.users))
    places: list[fx.Node] = []
    fx.map_arg((user.args, user.kwargs), lambda n: places.append(n) if n is node else None)
    return len(places) == 1 and user.op != "output"


def _scope(node: fx.Node) -> str:
    """The innermost module of the user's model that the node came from, relative to its layer."""
    stack = meta(node).get("nn_module_stack") or {}
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    parts = path.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbered[0] + 1 :]) if numbered else path
