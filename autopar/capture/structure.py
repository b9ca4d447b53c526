"""Compares the structure of two captured graphs of one model."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, fx

from autopar.graph import Graph
from autopar.measure import as_real
from autopar.ops.facts import OpKind, facts
from autopar.ops.meta import meta


def same_structure(graph: Graph, other: Graph) -> str:
    """Return the first difference between captures of different batch sizes, or an empty string; batch sizes and precision may differ."""
    rows, others = graph.inputs[0].shape[0], other.inputs[0].shape[0]
    if [layer.name for layer in graph.layers] != [layer.name for layer in other.layers]:
        return f"{len(graph.layers)} layers, not {len(other.layers)}"
    for layer, counterpart in zip(graph.layers, other.layers, strict=True):
        mine, theirs = _skeleton(graph.classes[layer.cls].graph), _skeleton(other.classes[counterpart.cls].graph)
        if len(mine) != len(theirs):
            return f"{layer.name} has {len(mine)} nodes, not {len(theirs)}"
        for (node, args), (_, others_args) in zip(mine, theirs, strict=True):
            if not _args_match(args, others_args, rows, others):
                return f"{node.name} in {layer.name}"
        for name, own in zip(layer.constants, counterpart.constants, strict=False):
            one, two = graph.constants.get(name), other.constants.get(own)
            if one is not None and two is not None and one.shape == two.shape and not _same_values(one, two):
                return f"the constant {name} in {layer.name}"
    return ""


def same_graph(graph: Graph, other: Graph) -> str:
    """Return the first difference between captures of one batch in two modes of the model, or an empty string; only dropout may differ.
    Constants without values (of a model on meta) are compared by name."""
    if difference := same_structure(graph, other):
        return difference
    if graph.guards or other.guards:
        return "both depend on values of the batch"
    for layer, counterpart in zip(graph.layers, other.layers, strict=True):
        for kind in ("parameters", "inputs", "constants"):
            if getattr(layer, kind) != getattr(counterpart, kind):
                return f"the {kind} of {layer.name}"
        if len(layer.scalars) != len(counterpart.scalars):
            return f"the scalars of {layer.name}"
        for name in layer.constants:
            one, two = graph.constants.get(name), other.constants.get(name)
            if one is not None and two is not None and not (one.dtype == two.dtype and torch.equal(one, two)):
                return f"the constant {name} in {layer.name}"
    preludes = [[] if each.prelude is None else _skeleton(each.prelude) for each in (graph, other)]
    return "" if [args for _, args in preludes[0]] == [args for _, args in preludes[1]] else "the scalars of the batch"


def accumulated_rounding(dtype: torch.dtype) -> float:
    """Estimate a dtype's accumulated relative rounding error."""
    return 1e4 * torch.finfo(dtype).eps


def _same_values(one: Tensor, other: Tensor) -> bool:
    """Return whether two constants agree to the narrower dtype's precision (the rounding of rotary angles grows with the position)."""
    exact = [t.dtype for t in (one, other) if t.is_floating_point() or t.is_complex()]
    tolerance = 10 * max(map(accumulated_rounding, exact), default=0.0)
    mine, theirs = (as_real(t).clamp(-_LARGEST, _LARGEST) for t in (one, other))
    return torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


def _skeleton(gm: fx.GraphModule) -> list[tuple[fx.Node, Any]]:
    """Return the calls of a graph with their arguments, in which numbers replace nodes.

    Dropout is skipped, because the compared graphs lack it, and so are casts between floating dtypes, because the precisions differ.
    """
    number: dict[fx.Node, int] = {}
    numbers = itertools.count()
    found: list[tuple[fx.Node, Any]] = []
    for node in gm.graph.nodes:
        kind = facts(node).kind
        if kind is OpKind.DROPOUT or (kind is OpKind.CAST and _floating(node, node.args[0])):
            number[node] = number[node.args[0]]
            continue
        number[node] = next(numbers)
        if node.op != "call_function":
            continue
        kwargs = {key: value for key, value in node.kwargs.items() if key != "dropout_p"}
        args = torch.fx.node.map_arg((node.args, kwargs), lambda n: _Numbered(number[n]))
        found.append((node, (str(node.target), args)))
    return found


def _floating(*nodes: Any) -> bool:
    return all(meta(node)["val"].is_floating_point() for node in nodes)


_LARGEST = torch.finfo(torch.float16).max
_LIMITS = [
    {getattr(torch.finfo(dtype), name) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
    for name in ("min", "max", "eps", "tiny")
]


class _Numbered(str):
    """A node's number, as a string so that it isn't taken for a size."""

    def __new__(cls, number: int) -> _Numbered:
        return super().__new__(cls, f"%{number}")


def _args_match(one: Any, other: Any, rows: int, others: int) -> bool:
    """Return whether two arguments are equal, except for numbers that scale with the rows and for floating dtypes."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        if one == other or one * others == other * rows:
            return True
        if isinstance(one, int) and isinstance(other, int):
            return rows != others and (one - other) % (rows - others) == 0 and (one - other) // (rows - others) > 0
        if any(one in limit and other in limit for limit in _LIMITS):
            return True  # limits of two dtypes, which masks and norms use
        return math.isclose(one * rows, other * others, rel_tol=1e-6) or math.isclose(one, other, rel_tol=1e-6)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(_args_match(a, b, rows, others) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_args_match(one[key], other[key], rows, others) for key in one)
    if isinstance(one, torch.dtype) and isinstance(other, torch.dtype):
        return one.is_floating_point == other.is_floating_point
    return bool(one == other)
