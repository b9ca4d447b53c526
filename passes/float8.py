"""Selects the products that run in 8 bits where ``fp8`` is allowed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from autopar.ops.experts import Experts
from autopar.ops.facts import facts
from autopar.ops.meta import meta
from autopar.ops.operands import operands, shape_of
from autopar.program import kernels_fp8

_LINEAR = torch.ops.aten.linear.default


def float8_pass(gm: fx.GraphModule, last: bool) -> fx.GraphModule:
    """``linear(x, weight)`` becomes ``kernels_fp8.linear(x, weight)`` if ``weight`` is a parameter in bfloat16 of two dims that are both
    multiples of 16.

    Routers stay as they are: products on which the choice of experts or the experts' weights depend, and the experts' tokens do not. If
    ``gm`` has the ``last`` products of the model, those that no other product reads stay, too: the head. Embeddings, attention and experts
    are other ops.
    """
    kept = {node for node in gm.graph.nodes if _feeds_a_router(node)}
    if last:
        kept |= _last_products(gm.graph.nodes)
    for node in gm.graph.nodes:
        if node.target is _LINEAR and node not in kept and _fits(node):
            node.target = kernels_fp8.linear
    gm.graph.lint()
    return gm


def has_products(gm: fx.GraphModule) -> bool:
    """Whether the graph has products with weights."""
    return any(node.target is _LINEAR for node in gm.graph.nodes)


def _fits(node: fx.Node) -> bool:
    weight = operands(node)[1]
    sizes, alike = shape_of(weight), meta(weight)["val"].dtype == meta(node)["val"].dtype == torch.bfloat16
    whole = all(size % kernels_fp8.MULTIPLE == 0 for size in sizes)
    return weight.op == "placeholder" and len(operands(node)) == 2 and len(sizes) == 2 and alike and whole


def _feeds_a_router(node: fx.Node) -> bool:
    """Whether a mixture's choice of experts or their weights depend on ``node``, and its tokens do not."""
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
