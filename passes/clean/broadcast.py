"""Moves each ``expand`` past pointwise ops and embeddings, towards the outputs, and removes it where the next op broadcasts by itself.

Position tables and masks are the same for every row of the batch: computed once, with size 1 along the batch dim, they cost little. The ops
that read them can still shard the batch dim.
"""

from __future__ import annotations

from torch import fx
from torch.fx.node import map_arg

from autopar.ops.facts import OpKind, facts, is_pointwise, op_name
from autopar.ops.operands import args_of, shape_of, val
from passes.clean.nodes import add, aten, calls, replace


def broadcast_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Move every ``expand`` as far as possible; see the module's docstring."""
    queue = calls(gm, aten.expand.default)
    while queue:
        expand = queue.pop(0)
        source = args_of(expand)[0]
        assert isinstance(source, fx.Node)
        if shape_of(source) == shape_of(expand):
            replace(expand, source)
            continue
        for user in list(expand.users):
            moved = _push(expand, source, user)
            if moved is not None:
                queue.append(moved)
        if not expand.users:
            gm.graph.erase_node(expand)
    return gm


def _push(expand: fx.Node, source: fx.Node, user: fx.Node) -> fx.Node | None:
    """Let ``user`` read ``source`` if it can; return the new ``expand`` after ``user``, if one is needed."""
    name = op_name(user)
    if facts(user).is_attention:
        if (
            args_of(user)[3:4] == (expand,)
            and expand not in args_of(user)[:3]
            and len(shape_of(source)) == len(shape_of(expand))
        ):
            user.args = (*args_of(user)[:3], source, *args_of(user)[4:])
        return None
    if facts(user).kind is OpKind.LOOKUP:
        if args_of(user)[1] is not expand:
            return None
    elif name == "aten.unsqueeze":
        if len(shape_of(source)) != len(shape_of(expand)):
            return None
    elif not is_pointwise(user):
        return None
    if name == "aten.expand":
        user.args = (source, *args_of(user)[1:])
        return None
    args = map_arg(user.args, lambda n: source if n is expand else n)
    new = add(user, user.target, args, dict(user.kwargs))
    if val(new).dtype != val(user).dtype:  # the source has no dims, and so counts less for the result's dtype
        new.graph.erase_node(new)
        return None
    if val(new).shape == val(user).shape:
        replace(user, new)
        return None
    moved = add(user, aten.expand.default, (new, list(shape_of(user))))
    replace(user, moved)
    return moved
