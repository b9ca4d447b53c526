"""Keeps batch and sequence as separate dims: a ``reshape`` that flattens them moves down past row-wise ops.

Routers work on ``[batch * sequence, hidden]``. Its rows can be sharded along the batch only if the sequence is not, and a layer that
returns such a tensor has no batch dim to shard. Once moved down, the reshape cancels against one that undoes it, or ends at a sum over all
rows, which becomes a sum over batch and sequence.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import prod
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from autopar.ops.experts import Experts
from autopar.ops.facts import is_pointwise, op_name
from autopar.ops.meta import meta
from autopar.ops.operands import args_of, argument, shape_of
from passes.clean.nodes import add, aten, calls, replace


def rows_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Push down every ``reshape`` that only merges leading dims; see the module's docstring."""
    _separate_copies(gm)
    parameters = _of_parameters(gm)
    queue = [node for node in calls(gm, aten.reshape.default) if _merged_dims(node)]
    while queue:
        node = queue.pop(0)
        for user in list(node.users):
            queue += _push(user, _merged_dims(node), node, parameters)
        if not node.users:
            gm.graph.erase_node(node)
    return gm


def _separate_copies(gm: fx.GraphModule) -> None:
    """Let copies of all rows one after another, ``repeat(x, [k, 1])``, be a dim of their own that a ``reshape`` merges with the rows. So is
    a column of numbers for them, ``reshape(x, [k * n, 1])`` of ``[k, n]``."""
    for node in calls(gm, aten.repeat.default):
        source, times = args_of(node)
        sizes = shape_of(source)
        if len(sizes) < 2 or len(times) != len(sizes) or set(times[1:]) != {1}:
            continue
        copies = add(node, aten.expand.default, (add(node, aten.unsqueeze.default, (source, 0)), [times[0], *sizes]))
        replace(node, add(node, aten.reshape.default, (copies, list(shape_of(node)))))
    for node in calls(gm, aten.reshape.default):
        sizes = shape_of(args_of(node)[0])
        if len(sizes) > 1 and shape_of(node) == (prod(sizes), 1) and sizes[-1] != 1:
            column = add(node, aten.unsqueeze.default, (args_of(node)[0], -1))
            replace(node, add(node, aten.reshape.default, (column, [prod(sizes), 1])))


def _merged_dims(node: object) -> tuple[int, ...]:
    """Return the sizes of the leading dims that the reshape merges into one; empty if it does anything else."""
    if not isinstance(node, fx.Node) or node.target is not aten.reshape.default:
        return ()
    before, after = shape_of(args_of(node)[0]), shape_of(node)
    merged = len(before) - len(after) + 1
    return before[:merged] if merged > 1 and len(after) > 1 and before[merged:] == after[1:] else ()


def _of_parameters(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the parameters, and what is computed from parameters alone, such as a router's weight in float32."""
    parameters: set[fx.Node] = set()
    for node in gm.graph.nodes:
        inputs = node.all_input_nodes
        if "parameter" in meta(node) if node.op == "placeholder" else inputs and parameters.issuperset(inputs):
            parameters.add(node)
    return parameters


def _push(user: fx.Node, lead: tuple[int, ...], merged: fx.Node, parameters: set[fx.Node]) -> list[fx.Node]:
    """Let ``user`` work on unmerged dims; return the reshapes that now follow it."""
    if user.op != "call_function":
        return []
    rewrite = _REWRITES.get(op_name(user))
    if rewrite is None and not isinstance(user.target, Experts) and not is_pointwise(user):
        return []
    args: Any = rewrite(user, lead) if rewrite is not None else user.args
    if args is None:
        return []
    weights = parameters.intersection(user.all_input_nodes)
    if is_pointwise(user):
        rank = len(shape_of(merged))
        if any(_has_rows(operand, rank) for operand in weights):
            return []
    elif weights and op_name(user) != "aten.linear" and not isinstance(user.target, Experts):
        return []  # such as a gather from it, whose dims are those of the rows
    unmerged = [each if each in weights else _unmerged(each, lead, user) for each in user.all_input_nodes]
    if any(operand is None for operand in unmerged):
        return []
    swap = dict(zip(user.all_input_nodes, unmerged, strict=True))
    new = add(user, user.target, map_arg(args, swap.__getitem__), map_arg(dict(user.kwargs), swap.__getitem__))
    if isinstance(meta(new)["val"], tuple | list):
        made = []
        for item in list(user.users):
            assert item.target is operator.getitem, item
            picked = add(item, operator.getitem, (new, args_of(item)[1]))
            made.append(add(item, aten.reshape.default, (picked, list(shape_of(item)))))
            replace(item, made[-1])
        user.graph.erase_node(user)
        return made
    if shape_of(new) == shape_of(user):
        replace(user, new)
        return []
    moved = add(user, aten.reshape.default, (new, list(shape_of(user))))
    replace(user, moved)
    return [moved]


def _has_rows(operand: fx.Node, rank: int) -> bool:
    """Return whether an operand has the dim of the rows of a value of this rank, or dims before it: an unmerged value has neither."""
    return shape_of(operand)[: 1 - rank] not in ((), (1,))


def _unmerged(operand: fx.Node, lead: tuple[int, ...], anchor: fx.Node) -> fx.Node | None:
    """Return the operand with unmerged leading dims: the reshape's source, or a constant created with other sizes; the operand itself if
    it has no rows; ``None`` if it can't be unmerged."""
    rows = prod(lead)
    if _merged_dims(operand) == lead:
        return args_of(operand)[0]
    sizes = shape_of(operand)
    if operand.target is aten.full.default and sizes[:1] == (rows,):
        return add(anchor, aten.full.default, ([*lead, *sizes[1:]], args_of(operand)[1]), dict(operand.kwargs))
    return operand if len(sizes) < 2 else None


Rewrite = Callable[[fx.Node, tuple[int, ...]], Any]


def _along(position: int, name: str) -> Rewrite:
    """Return the rewrite of an op along one dim, which counts the dim from the end; ops along the rows' dim can't be rewritten."""

    def rewrite(node: fx.Node, lead: tuple[int, ...]) -> Any:
        del lead
        rank = len(shape_of(node.all_input_nodes[0]))
        dim = argument(node, position, name, -1)
        if dim % rank == 0 or len(node.args) <= position:
            return node.args if dim % rank and len(node.args) <= position and name not in node.kwargs else None
        return (*node.args[:position], dim % rank - rank, *node.args[position + 1 :])

    return rewrite


def _reduced(node: fx.Node, lead: tuple[int, ...]) -> Any:
    """Return the arguments of a reduction on unmerged dims; a reduction over the rows becomes one over all dims that were merged."""
    dims = argument(node, 1, "dim")
    if dims is None or len(node.args) < 2:
        return None
    rank = len(shape_of(args_of(node)[0]))
    chosen = [d % rank for d in (dims if isinstance(dims, list | tuple) else [dims])]
    if 0 in chosen and argument(node, 2, "keepdim", False):
        return None
    new = [*(range(len(lead)) if 0 in chosen else ()), *(d - rank for d in chosen if d)]
    return (args_of(node)[0], new, *node.args[2:])


def _resized(node: fx.Node, lead: tuple[int, ...]) -> Any:
    """Return the arguments of a reshape or expand on unmerged dims; ``None`` if it changes the rows."""
    sizes = shape_of(node)
    if sizes[:1] != (prod(lead),) or len(sizes) < 2 or len(shape_of(args_of(node)[0])) > len(sizes) + 1:
        return None
    return (args_of(node)[0], [*lead, *sizes[1:]])


def _inserted(node: fx.Node, lead: tuple[int, ...]) -> Any:
    """Return the arguments of an ``unsqueeze`` after the rows; ``None`` for one before them."""
    del lead
    rank = len(shape_of(node))
    dim = args_of(node)[1] % rank
    return None if dim == 0 else (args_of(node)[0], dim - rank)


_REWRITES: dict[str, Rewrite] = {
    "aten.linear": lambda node, lead: node.args if _merged_dims(args_of(node)[0]) == lead else None,
    **dict.fromkeys(("aten.softmax", "aten.log_softmax", "aten.gather", "aten.scatter"), _along(1, "dim")),
    **dict.fromkeys(("aten.topk",), _along(2, "dim")),
    **dict.fromkeys(("aten.sum", "aten.mean", "aten.amax"), _reduced),
    "aten.reshape": _resized,
    "aten.expand": _resized,
    "aten.unsqueeze": _inserted,
}
