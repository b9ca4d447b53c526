"""Rewrites attention into the form that has a rule and a fast kernel: without repeated grouped-query heads."""

from __future__ import annotations

from torch import fx

from autopar.ops.facts import op_name
from autopar.ops.operands import args_of, shape_of
from passes.clean.nodes import add, aten, calls, replace


def grouped_query_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Let attention read keys and values whose heads are not repeated, with ``enable_gqa=True``.

    The pass recognises ``unsqueeze -> expand -> reshape`` (transformers' ``repeat_kv``) and ``repeat_interleave``, on the head dim of
    ``[batch, heads, sequence, head_dim]``, if key and value are repeated equally often.
    """
    for node in calls(gm, aten.scaled_dot_product_attention.default):
        query, key, value = args_of(node)[:3]
        assert isinstance(query, fx.Node) and isinstance(key, fx.Node) and isinstance(value, fx.Node)
        if len(shape_of(query)) != 4 or node.kwargs.get("enable_gqa"):
            continue
        sources = _unrepeated(key), _unrepeated(value)
        if sources[0] is None or sources[1] is None or shape_of(sources[0])[1] != shape_of(sources[1])[1]:
            continue
        args = (query, *sources, *args_of(node)[3:])
        replace(node, add(node, aten.scaled_dot_product_attention.default, args, {**node.kwargs, "enable_gqa": True}))
    return gm


def _unrepeated(node: fx.Node) -> fx.Node | None:
    """Return the tensor whose heads (dim 1) ``node`` repeats, each ``n`` times in a row; ``None`` if ``node`` repeats no heads."""
    if op_name(node) == "aten.repeat_interleave" and isinstance(args_of(node)[1], int):
        source = args_of(node)[0]
        dim = args_of(node)[2] if len(node.args) > 2 else node.kwargs.get("dim")
        return source if dim in (1, -3) and isinstance(source, fx.Node) else None
    if node.target not in (aten.reshape.default, aten.view.default):
        return None
    expand = args_of(node)[0]
    if not isinstance(expand, fx.Node) or expand.target is not aten.expand.default:
        return None
    unsqueeze = args_of(expand)[0]
    if not isinstance(unsqueeze, fx.Node) or op_name(unsqueeze) not in ("aten.unsqueeze", "aten.reshape", "aten.view"):
        return None
    source = args_of(unsqueeze)[0]
    assert isinstance(source, fx.Node)
    b, heads, *rest = shape_of(source)
    repeats = shape_of(expand)[2] if len(shape_of(expand)) == 5 else 0
    expected = (b, heads, 1, *rest), (b, heads, repeats, *rest), (b, heads * repeats, *rest)
    return source if (shape_of(unsqueeze), shape_of(expand), shape_of(node)) == expected else None
