"""Replaces indexing by simpler ops where it is a broadcast (transformers pads masks by ``mask[batch_index, key_index]`` with ``arange``
indices), or picks one row of each example (``hidden[arange(batch), last]``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autopar.ops.facts import op_name
from autopar.ops.operands import args_of, dtype_of, shape_of
from passes.clean.nodes import add, aten, calls, replace

_DROPPED = -1


def indexing_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """``index(x, [i0, i1, ...])`` becomes ``unsqueeze``, which inserts dims of size 1 into ``x``. Each ``i`` must be an ``arange`` over the
    full dim of ``x`` that it indexes, and the output must keep the order of the dims of ``x``. ``index(x, [arange, i])`` becomes a
    ``gather`` along dim 1, which does not mix examples."""
    for node in calls(gm, aten.index.Tensor):
        source, indices = args_of(node)
        assert isinstance(source, fx.Node) and isinstance(indices, list | tuple)
        if (row := _row_of_each(node, source, indices)) is not None:
            replace(node, row)
            continue
        if len(indices) != len(shape_of(source)):
            continue
        rank = len(shape_of(node))
        places = [_arange_place(i, extent, rank) for i, extent in zip(indices, shape_of(source), strict=True)]
        kept = [place for place in places if place is not None and place != _DROPPED]
        if None in places or kept != sorted(set(kept)):
            continue
        new = source
        for dim in reversed([dim for dim, place in enumerate(places) if place == _DROPPED]):
            new = add(node, aten.select.int, (new, dim, 0))
        for dim in range(rank):
            if dim not in kept:
                new = add(node, aten.unsqueeze.default, (new, dim))
        if shape_of(new) == shape_of(node):
            replace(node, new)
    return gm


def _row_of_each(node: fx.Node, source: fx.Node, indices: Sequence[object]) -> fx.Node | None:
    """Return ``x[arange(b), i]``, with ``i`` of shape ``[b]``, as a gather along dim 1; ``None`` for any other index."""
    sizes = shape_of(source)
    if len(indices) != 2 or _arange_place(indices[0], sizes[0], 1) != 0:
        return None
    examples, row = indices
    if not isinstance(examples, fx.Node) or not isinstance(row, fx.Node):
        return None
    if not shape_of(examples) == shape_of(row) == sizes[:1] or dtype_of(row) not in (torch.int64, torch.int32):
        return None
    counted = add(node, aten.remainder.Scalar, (row, sizes[1]))  # a negative index counts from the end
    wide = add(node, aten.to.dtype, (counted, torch.int64))
    each = add(node, aten.view.default, (wide, [sizes[0]] + [1] * (len(sizes) - 1)))
    whole = add(node, aten.expand.default, (each, [sizes[0], 1, *sizes[2:]]))
    return add(node, aten.select.int, (add(node, aten.gather.default, (source, 1, whole)), 1, 0))


def _arange_place(index: object, extent: int, rank: int) -> int | None:
    """Return the output dim along which ``index`` counts 0, 1, ..., ``extent - 1``; ``_DROPPED`` for a single index into a dim of size 1;
    ``None`` for any other index."""
    if not isinstance(index, fx.Node):
        return None
    sizes = (1,) * (rank - len(shape_of(index))) + shape_of(index)
    long = [dim for dim, size in enumerate(sizes) if size != 1]
    if not long and extent == 1:
        return _DROPPED
    if len(long) != 1 or sizes[long[0]] != extent:
        return None
    while op_name(index) in ("aten.unsqueeze", "aten.reshape", "aten.view", "aten.expand"):
        index = args_of(index)[0]
        assert isinstance(index, fx.Node)
    if index.target is aten.arange.default and index.args == (extent,):
        return long[0]
    return None
