"""Emits the lines of a method that computes a graph."""

from __future__ import annotations

import operator
import re
from typing import Any

from torch import fx

from autopar.emit.expressions import Text, experts_call, expression, joined_call, literal
from autopar.emit.names import Names, remark
from autopar.ops.experts import Experts
from autopar.ops.meta import meta
from autopar.ops.source import is_bound, source_name
from passes.clean.nodes import module_path
from passes.collectives import convert
from passes.joined import converted_types, is_joined, passed_on, results_of, weights_of

WIDTH = 110  # subexpressions of longer lines become variables
SHORT = 50  # maximum length to inline an expression that the user's code assigns to a name


def statements(
    nodes: list[fx.Node], texts: dict[fx.Node, Text], names: Names, watch: bool = False, compiled: bool = False
) -> list[str]:
    """Return a line for each value that is used twice, is converted, or is too long to inline; with ``watch`` for each value.

    ``texts`` has the expressions of the inputs, and receives those of ``nodes``. At the end of each submodule, ``del`` frees the names that
    no later line reads: autograd keeps the tensors that it needs, and the others would stay in memory until the method returns.
    ``compiled`` code has no ``del``, which would keep a name alive at a collective's graph break and make its value an output of the
    compiled part. It has no ``yield`` between the turns of two half microbatches either: ``emit.pieces`` emits those.
    """
    lines: list[str] = []
    watched: list[str] = []
    named: list[str] = []
    ends: list[int] = []  # index of the first line after each submodule
    handles: dict[fx.Node, str] = {}  # async conversions -> variables of their handles
    scope, emitted = None, set(nodes)
    for node in nodes:
        if node.op == "placeholder" or node in texts:
            lines += issue_lines(node, texts, names, handles)
            continue
        if meta(node).get("other_half_before") and not compiled:
            lines.append("        yield  # the other half's turn")
        if node.op == "output":
            results: Any = node.args[0] if isinstance(node.args[0], tuple | list) else node.args
            if watch:
                lines.append(f"        self.watched = {{{', '.join(watched)}}}")
            lines.append("        return " + ", ".join(literal(result, texts) for result in results))
            if not watch and not compiled:
                lines = _with_deletions(lines, named, ends)
            break
        text = Text(f"{handles[node]}.wait()") if node in handles else expression(node, texts)
        if _inline(node, text) and not watch:
            texts[node] = text
            continue
        here = _scope(node)
        if here and here != scope:
            ends.append(len(lines))
            lines.append(f"        # {remark(here)}")
        scope = here or scope
        made = _results(node, emitted)
        own = [names.fresh(value_name(result)) for result in made]
        left = ", ".join(own)
        if is_joined(node):
            lines += _joined_lines(node, left, texts)
        elif isinstance(node.target, Experts):
            lines += _experts_lines(node, left, texts)
        else:
            lines.append(f"        {left} = {text.text}")
        texts.update(zip(made, map(Text, own), strict=True))
        watched += [f'"{result.name}": {name}' for result, name in zip(made, own, strict=True)]
        named += own
        if not compiled:
            lines += issue_lines(node, texts, names, handles)
    return lines


def issue_lines(node: fx.Node, texts: dict[fx.Node, Text], names: Names, handles: dict[fx.Node, str]) -> list[str]:
    """Return the lines that issue the async conversions of the node's value, and add their variables to ``handles``."""
    lines = []
    for conversion in meta(node).get("issued_after", ()):
        value, axes, source, target = conversion.args
        assert isinstance(value, fx.Node) and isinstance(axes, tuple)
        handles[conversion] = names.fresh(f"{value_name(value)}_sent")
        over = literal(axes[0] if len(axes) == 1 else axes, {})
        given = f"{texts[value].text}, {over}, src=spmd.{source}, dst=spmd.{target}"
        given += ", once=True" if meta(conversion).get("shared_async") else ""
        lines.append(f"        {handles[conversion]} = {meta(conversion)['async_op']}({given})")
    return lines


def _joined_lines(node: fx.Node, names: str, texts: dict[fx.Node, Text]) -> list[str]:
    """Return the lines of a joined call (``passes.joined``): a comment on its backward pass, and the call, wrapped if it is long."""
    _, _, source = converted_types(node)
    collective = "reduce-scatter" if source.sharded else "all-reduce"
    whose = "weights' gradients are" if len(weights_of(node)) > 1 else "weight's gradient is"
    comment = f"        # backward: the {collective} of the input's gradient runs while the {whose} computed"
    return [comment, *_wrapped(names, *joined_call(node, texts))]


def _experts_lines(node: fx.Node, name: str, texts: dict[fx.Node, Text]) -> list[str]:
    """Return the lines of a mixture of experts: a comment on where tokens' rows are sent, and the call, wrapped if it is long."""
    sent_over: list[Any] = [node.kwargs.get(key, ()) for key in ("relay", "exchange")]
    axes = " and ".join(str(axis) for each in sent_over for axis in each)
    narrow = " in 8 bits" if getattr(node.target, "fp8_dispatch", False) else ""
    dispatch = f"dispatch tokens to their experts{narrow} over {axes}, " if axes else ""
    comment = f"        # {dispatch}run {meta(node)['body']}, and combine the results with the router's weights"
    return [comment, *_wrapped(name, *experts_call(node, texts))]


def _wrapped(names: str, call: str, given: list[str]) -> list[str]:
    """Return the lines of an assignment of a call, with one line for each of ``given`` if it is long."""
    line = f"        {names} = {call}({', '.join(given)})"
    if len(line) <= WIDTH:
        return [line]
    return [f"        {names} = {call}(", *(f"            {one}," for one in given), "        )"]


def _results(node: fx.Node, emitted: set[fx.Node]) -> list[fx.Node]:
    """Return the values that a node's line assigns to names: the results of a call that has several, if each of them is read, and only by
    nodes that are ``emitted`` with it; otherwise the node's own value."""
    if is_joined(node):
        return [one.node for one in results_of(node)]
    value, users = meta(node).get("val"), list(node.users)
    if not isinstance(value, list | tuple) or not emitted.issuperset(users):
        return [node]
    if any(user.target is not operator.getitem or _has_own_line(user) for user in users):
        return [node]
    results: dict[Any, fx.Node] = {user.args[1]: user for user in users}
    every = range(len(value))
    return [results[index] for index in every] if len(users) == len(value) and set(results) == set(every) else [node]


def _has_own_line(node: fx.Node) -> bool:
    """Return whether other lines are emitted before or after the node's."""
    return any(meta(node).get(key) for key in ("issued_after", "other_half_before"))


def _with_deletions(lines: list[str], named: list[str], ends: list[int]) -> list[str]:
    """Insert a ``del`` before each of ``ends``, for the ``named`` values that aren't read after it."""
    last = dict.fromkeys(named, 0)
    for index, line in enumerate(lines):
        if not line.lstrip().startswith("#"):
            last.update((word, index) for word in re.findall(r"(?<![\w.])\w+", line) if word in last)
    found: list[str] = []
    start = 0
    for end in ends:
        found += lines[start:end]
        if dead := [name for name in named if start <= last[name] < end]:
            found.append(f"        del {', '.join(dead)}")
        start = end
    return found + lines[start:]


def value_name(node: fx.Node) -> str:
    """Return the user's name of the node's value; a converted value gets its new type as a suffix (``logits_i``)."""
    if (before := passed_on(node)) is not None:
        return f"{value_name(before)}_r"
    if node.target is not convert:
        return source_name(node)
    value, _, _, target = node.args
    assert isinstance(value, fx.Node) and isinstance(target, str)
    return f"{value_name(value)}_{target[0].lower()}"


def _inline(node: fx.Node, text: Text) -> bool:
    """Return whether to inline the expression into its only reader. Conversions and inputs of joined products always get a line, so that
    they are visible. The length limit is lower for expressions that the user's code assigns to a name, and higher for returned ones."""
    if (
        any(
            meta(node).get(key)
            for key in ("other_half_before", "issued_after", "other_half_between", "kernel_async_op")
        )
        or meta(node).get("caller")
        or is_joined(node)
        or len(node.users) != 1
    ):
        return False
    user = next(iter(node.users))
    uses: list[fx.Node] = []
    fx.map_arg((user.args, user.kwargs), lambda n: uses.append(n) if n is node else None)
    if len(uses) != 1 or is_joined(user) and user.args[0] is node:
        return False
    if user.op == "output":
        return not meta(node).get("async_op") and len(text.text) <= WIDTH
    limit = WIDTH * 4 // 5 if meta(user).get("module") else SHORT if is_bound(node) else WIDTH * 2 // 3
    return node.target is not convert and len(text.text) <= limit


def _scope(node: fx.Node) -> str:
    """Return the innermost module that computes the node, relative to its layer; outside of submodules the model's class or ``loss_fn``."""
    stack = meta(node).get("nn_module_stack") or {}
    path = module_path(node)
    if not path:
        entries = list(stack.values())
        return str(entries[-1][1]).rpartition(".")[2] if len(entries) > 1 else "loss_fn" if entries else ""
    parts = path.split(".")
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbered[0] + 1 :]) if numbered else path
