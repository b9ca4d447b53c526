"""Indexing that is only a broadcast: transformers pads masks by ``mask[batch_index, key_index]`` with ``arange`` indices."""

from __future__ import annotations

from torch import fx

from passes.clean.nodes import add, aten, calls, packet, replace, shape


def indexing_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """``index(x, [i0, i1, ...])`` where each ``i`` is ``arange`` over its dim, laid out along one output dim of its own, in
    the same order, is ``x`` with dims of size 1 between: ``unsqueeze``."""
    for node in calls(gm, aten.index.Tensor):
        source, indices = node.args
        assert isinstance(source, fx.Node) and isinstance(indices, list | tuple)
        if len(indices) != len(shape(source)):
            continue
        rank = len(shape(node))
        places = [_arange_place(i, extent, rank) for i, extent in zip(indices, shape(source), strict=True)]
        if None in places or places != sorted(set(places)):  # type: ignore[type-var]
            continue
        new = source
        for dim in range(rank):
            if dim not in places:
                new = add(node, aten.unsqueeze.default, (new, dim))
        if shape(new) == shape(node):
            replace(node, new)
    return gm


def _arange_place(index: object, extent: int, rank: int) -> int | None:
    """The output dim along which ``index`` counts from 0 to ``extent``; ``None`` for any other index."""
    if not isinstance(index, fx.Node):
        return None
    sizes = (1,) * (rank - len(shape(index))) + shape(index)
    long = [dim for dim, size in enumerate(sizes) if size != 1]
    if len(long) != 1 or sizes[long[0]] != extent:
        return None
    while packet(index) in ("aten.unsqueeze", "aten.reshape", "aten.view", "aten.expand"):
        index = index.args[0]
        assert isinstance(index, fx.Node)
    if index.target is aten.arange.default and index.args == (extent,):
        return long[0]
    return None
