"""Rewrites padding by reflection, replication or circular copies as a concatenation of slices."""

from __future__ import annotations

from torch import fx

from autopar.ops.operands import args_of, argument, shape_of
from passes.clean.nodes import add, aten, calls, replace


def borders_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """``pad(x, amounts, "reflect")``, ``"replicate"`` and ``"circular"`` become slices of ``x``, flipped or expanded, concatenated with
    ``x``: then rules and type checker can shard the dims that are not padded. An op with negative amounts, which crop, stays torch's.

    Before: ``pad(x, [1, 1], "reflect")``. After: ``cat([flip(slice(x, 1, 2)), x, flip(slice(x, n - 2, n - 1))])``.
    """
    for node in calls(gm, aten.pad.default):
        mode = argument(node, 2, "mode", "constant")
        source, amounts = args_of(node)[:2]
        assert isinstance(source, fx.Node)
        if mode == "constant" or min(amounts) < 0:
            continue
        rank, new = len(shape_of(source)), source
        for pair in range(len(amounts) // 2):
            before, after = amounts[2 * pair : 2 * pair + 2]
            if before or after:
                new = _padded(node, new, rank - 1 - pair, before, after, mode)
        replace(node, new)
    return gm


def _padded(anchor: fx.Node, x: fx.Node, dim: int, before: int, after: int, mode: str) -> fx.Node:
    n = shape_of(x)[dim]

    def part(start: int, end: int) -> fx.Node:
        return add(anchor, aten.slice.Tensor, (x, dim, start, end))

    def edge(at: int, count: int) -> fx.Node:
        sizes = [count if d == dim else size for d, size in enumerate(shape_of(x))]
        return add(anchor, aten.expand.default, (part(at, at + 1), sizes))

    def flipped(start: int, end: int) -> fx.Node:
        return add(anchor, aten.flip.default, (part(start, end), [dim]))

    if mode == "reflect":
        left, right = (lambda: flipped(1, before + 1)), (lambda: flipped(n - 1 - after, n - 1))
    elif mode == "circular":
        left, right = (lambda: part(n - before, n)), (lambda: part(0, after))
    else:
        assert mode == "replicate", mode
        left, right = (lambda: edge(0, before)), (lambda: edge(n - 1, after))
    parts = [*([left()] if before else []), x, *([right()] if after else [])]
    return add(anchor, aten.cat.default, (parts, dim))
