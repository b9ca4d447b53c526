"""Rewrites embedding bags of equal length as an embedding and a sum."""

from __future__ import annotations

import operator

from torch import fx

from autopar.ops.facts import op_name
from autopar.ops.operands import args_of, argument, dtype_of, shape_of
from passes.clean.nodes import add, aten, calls, replace

_SUM, _MEAN = 0, 1
_UNSUPPORTED = {3: "scale_grad_by_freq", 5: "sparse", 7: "include_last_offset"}


def bags_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """``embedding_bag`` becomes ``embedding`` and a sum or mean over each bag, if the bags are the rows of a matrix of indices.

    ``nn.EmbeddingBag`` calls the op in this form for a two-dimensional input: it flattens the input, and passes offsets that grow by the
    length of a row. Bags of other lengths, options (``_UNSUPPORTED``), and the maximum of a bag (whose gradient goes to one of several
    equal elements) stay torch's op, which no axis shards.
    """
    for node in calls(gm, aten.embedding_bag.padding_idx):
        weight, flat, offsets = args_of(node)[:3]
        assert isinstance(weight, fx.Node) and isinstance(flat, fx.Node) and isinstance(offsets, fx.Node)
        mode = argument(node, 4, "mode", _SUM)
        read = [user for user in node.users if user.target is operator.getitem]
        if mode not in (_SUM, _MEAN) or len(read) != len(node.users) or any(user.args[1] != 0 for user in read):
            continue
        if any(argument(node, at, name, False) for at, name in _UNSUPPORTED.items()):
            continue
        length = _length(offsets, shape_of(flat)[0])
        if length is None:
            continue
        new = _bags(node, weight, flat, length, mode)
        for user in read:
            replace(user, new)
        gm.graph.erase_node(node)
    return gm


def _bags(node: fx.Node, weight: fx.Node, flat: fx.Node, length: int, mode: int) -> fx.Node:
    rows = [shape_of(flat)[0] // length, length]
    index = add(node, aten.reshape.default, (flat, rows))
    found = add(node, aten.embedding.default, (weight, index))
    scales = argument(node, 6, "per_sample_weights")
    if scales is not None:
        wide = add(node, aten.unsqueeze.default, (add(node, aten.reshape.default, (scales, rows)), 2))
        found = add(node, aten.mul.Tensor, (found, wide))
    padding = argument(node, 8, "padding_idx", None)
    if padding is None:
        total = add(node, aten.sum.dim_IntList, (found, [1]))
        return total if mode == _SUM else add(node, aten.mul.Tensor, (total, 1.0 / length))
    not_padding = add(
        node, aten.to.dtype, (add(node, aten.ne.Scalar, (index, padding % shape_of(weight)[0])), dtype_of(found))
    )
    found = add(node, aten.mul.Tensor, (found, add(node, aten.unsqueeze.default, (not_padding, 2))))
    total = add(node, aten.sum.dim_IntList, (found, [1]))
    if mode == _SUM:
        return total
    count = add(node, aten.clamp_min.default, (add(node, aten.sum.dim_IntList, (not_padding, [1], True)), 1.0))
    return add(node, aten.div.Tensor, (total, count))  # a bag with nothing but padding is zero, as in torch


def _length(offsets: fx.Node, count: int) -> int | None:
    """Return the length of every bag if ``offsets`` grow in equal steps that divide the ``count`` indices; ``None`` otherwise."""
    if op_name(offsets) != "aten.arange" or offsets.target is not aten.arange.start_step:
        return None
    start, end, step = (*args_of(offsets), 1)[:3]
    even = start == 0 and step > 0 and count % step == 0 and count - step < end <= count
    return step if even and shape_of(offsets)[0] == count // step else None
