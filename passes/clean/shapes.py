"""Brings shapes into one form: explicit sizes, one reshape instead of two, slices instead of splits."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from autopar.ops.facts import OpKind, facts, op_name
from autopar.ops.operands import args_of, argument, dtype_of, shape_of
from passes.clean.nodes import add, aten, calls, replace
from passes.clean.views import split_ranges


def reshapes_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Every flatten, unflatten, view and reshape becomes ``reshape`` with explicit sizes; chains collapse, identities disappear."""
    for node in calls(gm):
        kind = facts(node).kind
        if kind is OpKind.EXPANSION:
            node.target, node.args, node.kwargs = aten.expand.default, (args_of(node)[0], list(shape_of(node))), {}
        if kind is not OpKind.RESHAPE and op_name(node) != "aten.squeeze":
            continue
        source, sizes = args_of(node)[0], list(shape_of(node))
        assert isinstance(source, fx.Node)
        if source.target is aten.reshape.default:
            source = source.args[0]
        if list(shape_of(source)) == sizes:
            replace(node, source)
        else:
            node.target, node.args, node.kwargs = aten.reshape.default, (source, sizes), {}
    return gm


def splits_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """``split``, ``chunk`` and ``tensor_split`` become slices, and ``unbind`` selects; slices get explicit ends, indices become positive.

    A slice of a ``cat`` that cuts none of its operands becomes these operands: a tensor that is written slice by slice, as the keys of
    DeepSeek's attention, would keep its initial values alive. ``broadcast_tensors`` becomes an ``expand`` of each operand, and so does
    ``repeat_interleave`` of a single element."""
    for node in calls(gm):
        name = op_name(node)
        if facts(node).kind is OpKind.SPLIT:
            _unpack(node)
        elif name == "aten.broadcast_tensors":
            for user in list(node.users):
                operand = args_of(node)[0][args_of(user)[1]]
                replace(user, add(user, aten.expand.default, (operand, list(shape_of(user)))))
            gm.graph.erase_node(node)
        elif name == "aten.narrow":
            source, dim, start, length = args_of(node)
            start %= max(shape_of(source)[dim], 1)
            new = add(node, aten.slice.Tensor, _slice_args(source, dim, start, start + length))
            replace(node, new)
        elif name == "aten.slice" and argument(node, 4, "step", 1) == 1:
            source, dim = args_of(node)[0], argument(node, 1, "dim", 0)
            start, end = argument(node, 2, "start"), argument(node, 3, "end")
            node.args, node.kwargs = _slice_args(source, dim, start, end), {}
            if (parts := _concatenated_parts(*args_of(node))) is not None:
                replace(node, parts[0] if len(parts) == 1 else add(node, aten.cat.default, (parts, args_of(node)[1])))
        elif name == "aten.repeat_interleave" and isinstance(argument(node, 1, "repeats"), int):
            _repeat(node)
        elif name == "aten.select":
            source, dim, index = args_of(node)
            sizes = shape_of(source)
            dim = dim % len(sizes)
            node.args = (source, dim, index % sizes[dim])
    return gm


def _repeat(node: fx.Node) -> None:
    """Remove ``output_size``, which would be wrong on a rank's slices: the number of repetitions gives the size. Replace the repetition of
    a single element by an ``expand``."""
    source, dim = args_of(node)[0], argument(node, 2, "dim")
    if dim is not None and shape_of(source)[dim] == 1:
        replace(node, add(node, aten.expand.default, (source, list(shape_of(node)))))
    else:
        node.kwargs = {key: value for key, value in node.kwargs.items() if key != "output_size"}


def _slice_args(source: Any, dim: int, start: int | None, end: int | None) -> tuple[Any, int, int, int]:
    sizes = shape_of(source)
    dim %= len(sizes)
    first, last, _ = slice(start, end).indices(sizes[dim])
    return source, dim, first, last


def _concatenated_parts(source: fx.Node, dim: int, start: int, end: int) -> list[fx.Node] | None:
    """Return the operands of ``source``, a ``cat`` along ``dim``, from ``start`` to ``end``; ``None`` where these cut an operand."""
    if op_name(source) != "aten.cat" or argument(source, 1, "dim", 0) % len(shape_of(source)) != dim:
        return None
    parts, at = [], 0
    for part in args_of(source)[0]:
        if len(shape_of(part)) != len(shape_of(source)) or dtype_of(part) != dtype_of(source):
            return None
        size = shape_of(part)[dim]
        if at < end and start < at + size:
            if at < start or end < at + size:
                return None
            parts.append(part)
        at += size
    return parts or None


def _unpack(node: fx.Node) -> None:
    """Replace each ``getitem`` of a node with several outputs by a slice or select of its operand."""
    source, parts = args_of(node)[0], split_ranges(node)
    assert isinstance(source, fx.Node) and parts is not None
    for user in list(node.users):
        assert user.target is operator.getitem, user
        dim, first, last = parts[args_of(user)[1]]
        if op_name(node) == "aten.unbind":
            replace(user, add(user, aten.select.int, (source, dim, first)))
        else:
            replace(user, add(user, aten.slice.Tensor, (source, dim, first, last)))
    node.graph.erase_node(node)
