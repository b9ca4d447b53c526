"""Rewrites a fused projection that a view unpacks: ``linear(x).view(b, n, 3, h, d)``, permuted, then ``unbind``.

Each part becomes a view of a slice of the projection, as if the model had called ``chunk``; ``fused_projections_pass`` then splits the
projection like any other. Without this, one dim would mix parts and heads, and heads could not be sharded.
"""

from __future__ import annotations

import math

from torch import fx

from autopar.ops.operands import args_of, shape_of
from passes.clean.nodes import add, aten, calls, replace


def packed_projections_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace ``select`` of a viewed projection by a view of a slice of it."""
    for node in calls(gm, aten.reshape.default):
        source = args_of(node)[0]
        if not isinstance(source, fx.Node) or source.target is not aten.linear.default:
            continue
        # the dim of the parts: the first of the dims that the view makes of the projection's last dim
        dim = len(shape_of(source)) - 1
        if len(shape_of(node)) < dim + 2 or shape_of(node)[:dim] != shape_of(source)[:dim] or shape_of(node)[dim] < 2:
            continue
        for user in list(node.users):
            if user.target is aten.permute.default:
                order = [d % len(shape_of(node)) for d in args_of(user)[1]]
                _unpack(source, node, dim, order, list(user.users))
            else:
                _unpack(source, node, dim, list(range(len(shape_of(node)))), [user])
    return gm


def _unpack(source: fx.Node, view: fx.Node, dim: int, order: list[int], readers: list[fx.Node]) -> None:
    """Replace ``readers`` of the view (its dims in ``order``) by views of the projection's slices, if each selects one part."""
    sizes = list(shape_of(view))
    width = math.prod(sizes[dim + 1 :])
    kept = [d - (d > dim) for d in order if d != dim]
    if not all(reader.target is aten.select.int and order[args_of(reader)[1]] == dim for reader in readers):
        return
    for reader in readers:
        index = args_of(reader)[2]
        part = add(reader, aten.slice.Tensor, (source, len(shape_of(source)) - 1, index * width, (index + 1) * width))
        part = add(reader, aten.reshape.default, (part, sizes[:dim] + sizes[dim + 1 :]))
        if kept != sorted(kept):
            part = add(reader, aten.permute.default, (part, kept))
        replace(reader, part)
