"""Hand-written mixtures of experts, to check their sharding rule; tests use them, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from autopar.ops.experts import Experts
from autopar.ops.meta import meta
from autopar.program.kernels_experts import grouped_linear, of_rows

aten = torch.ops.aten


def gated_experts(rows: int, width: int, inner: int = 12, count: int = 6, *, weights_first: bool = False) -> Experts:
    """Return experts that compute ``down(silu(gate(x)) * up(x))`` for ``rows`` chosen rows, as in most models."""
    graph = fx.Graph()
    x, counts = _inputs(graph, rows, width, count)
    gate, up = (_input(graph, name, count, inner, width) for name in ("gate", "up"))
    down = _input(graph, "down", count, width, inner)
    hidden = [_apply(graph, grouped_linear, x, weight, counts) for weight in (gate, up)]
    product = _apply(graph, aten.mul.Tensor, _apply(graph, aten.silu.default, hidden[0]), hidden[1])
    graph.output(_apply(graph, grouped_linear, product, down, counts))
    return Experts(fx.GraphModule(nn.Module(), graph), count, weights_first=weights_first)


def plain_experts(rows: int, width: int, count: int, inner: int = 12) -> Experts:
    """Return experts that compute ``gelu(x @ a + b) @ c + d``; ``c`` is stored as [expert, input, output]."""
    graph = fx.Graph()
    x, counts = _inputs(graph, rows, width, count)
    first, bias = _input(graph, "first", count, inner, width), _input(graph, "bias", count, inner)
    second, last = _input(graph, "second", count, inner, width), _input(graph, "last", count, width)
    hidden = _apply(graph, grouped_linear, x, first, counts)
    hidden = _apply(graph, aten.add.Tensor, hidden, _apply(graph, of_rows, bias, x, counts))
    hidden = _apply(graph, aten.gelu.default, hidden)
    result = _apply(graph, grouped_linear, hidden, _apply(graph, aten.transpose.int, second, 1, 2), counts)
    graph.output(_apply(graph, aten.add.Tensor, result, _apply(graph, of_rows, last, x, counts)))
    return Experts(fx.GraphModule(nn.Module(), graph), count)


def _inputs(graph: fx.Graph, rows: int, width: int, count: int) -> tuple[fx.Node, fx.Node]:
    x, counts = _input(graph, "rows", rows, width), _input(graph, "counts", count)
    meta(counts)["val"] = meta(counts)["val"].long()
    return x, counts


def _input(graph: fx.Graph, name: str, *shape: int) -> fx.Node:
    node = graph.placeholder(name)
    meta(node)["val"] = torch.empty(shape, dtype=torch.float64, device="meta")
    return node


def _apply(graph: fx.Graph, target: Callable[..., Any], *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    meta(node)["val"] = target(*fx.map_arg(args, lambda n: meta(n)["val"]))
    return node
