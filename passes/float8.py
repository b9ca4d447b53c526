"""Selects the products that run in 8 bits where ``fp8`` is allowed."""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch
from torch import Tensor, fx

from autopar.ops.experts import Experts
from autopar.ops.facts import facts
from autopar.ops.meta import meta
from autopar.ops.operands import operands, shape_of
from autopar.program import kernels_fp8

_LINEAR = torch.ops.aten.linear.default


def float8_pass(
    gm: fx.GraphModule, parameters: Container[fx.Node], last: bool, decisive: Container[int] = ()
) -> fx.GraphModule:
    """``linear(x, weight)`` becomes ``kernels_fp8.linear(x, weight)`` if ``weight`` is one of ``parameters``, the placeholders of the
    layer's parameters, in bfloat16 and of two dims that are both multiples of 16.

    Routers stay as they are: products on which a mixture's choice of experts or the experts' weights depend, but not the experts' tokens;
    and the last products before any other choice (``choices``), which may be in another layer that reads the results ``decisive``. If
    ``gm`` has the ``last`` products of the model, those that no other product reads stay, too: the head. Embeddings, attention and experts
    are other ops.
    """
    kept = {node for node in gm.graph.nodes if _feeds_a_router(node)} | choices(gm, decisive)
    if last:
        kept |= _last_products(gm.graph.nodes)
    for node in gm.graph.nodes:
        if node.target is _LINEAR and node not in kept and _fits(node, parameters):
            node.target = kernels_fp8.linear
    gm.graph.lint()
    return gm


def choices(gm: fx.GraphModule, decisive: Container[int] = ()) -> set[fx.Node]:
    """The nodes on which a choice depends, back to and including the nearest products.

    A choice turns floating numbers into integers or booleans (``topk``, ``argmax``, a comparison), which rounding may change completely.
    The results of the graph at the indices ``decisive`` take part in choices of other layers.
    """
    results = list(next(node for node in gm.graph.nodes if node.op == "output").all_input_nodes)
    waiting = [node for index, node in enumerate(results) if index in decisive]
    for node in gm.graph.nodes:
        if node.op == "call_function" and any(map(_is_discrete, _tensors(node))):
            waiting += [each for each in node.all_input_nodes if not all(map(_is_discrete, _tensors(each)))]
    found: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [] if node.op == "call_function" and facts(node).is_expensive else node.all_input_nodes
    return found


def _tensors(node: fx.Node) -> list[Tensor]:
    value = meta(node).get("val")
    return [each for each in (value if isinstance(value, list | tuple) else [value]) if isinstance(each, Tensor)]


def _is_discrete(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex())


def has_products(gm: fx.GraphModule) -> bool:
    """Whether the graph has products with weights."""
    return any(node.target is _LINEAR for node in gm.graph.nodes)


def _fits(node: fx.Node, parameters: Container[fx.Node]) -> bool:
    weight = operands(node)[1]
    sizes, alike = shape_of(weight), meta(weight)["val"].dtype == meta(node)["val"].dtype == torch.bfloat16
    whole = all(size % kernels_fp8.MULTIPLE == 0 for size in sizes)
    return weight in parameters and len(operands(node)) == 2 and len(sizes) == 2 and alike and whole


def _feeds_a_router(node: fx.Node) -> bool:
    """Whether a mixture's choice of experts or their weights depend on ``node``, but its tokens do not."""
    if node.target is not _LINEAR:
        return False
    reached = {node, *_readers(node)}
    for mixture in reached:
        if isinstance(mixture.target, Experts):
            tokens, *choice = operands(mixture)[:3]
            if tokens not in reached and any(value in reached for value in choice):
                return True
    return False


def _last_products(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The products whose results reach no other product and no attention."""
    found = [node for node in nodes if node.target is _LINEAR]
    return {node for node in found if not any(facts(reader).is_expensive for reader in _readers(node))}


def _readers(node: fx.Node) -> set[fx.Node]:
    """The nodes that depend on ``node``."""
    found: set[fx.Node] = set()
    waiting = list(node.users)
    while waiting:
        reader = waiting.pop()
        if reader not in found:
            found.add(reader)
            waiting += reader.users
    return found
