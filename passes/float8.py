"""Runs matrix products with weights in FP8 if the user allows one of ``precision.FP8_RECIPES``; routers and the head do not change."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable

import torch
from torch import Tensor, fx

from autopar.ops.experts import Experts
from autopar.ops.facts import facts
from autopar.ops.meta import meta
from autopar.ops.operands import operands, shape_of
from autopar.precision import Fp8Recipe
from autopar.program import kernels_experts, kernels_fp8

_LINEAR = torch.ops.aten.linear.default


def float8_pass(
    gm: fx.GraphModule,
    parameters: Container[fx.Node],
    recipe: Fp8Recipe,
    has_head: bool,
    choice_outputs: Container[int] = (),
) -> fx.GraphModule:
    """``linear(x, weight)`` becomes ``kernels_fp8.linear(x, weight, scaling=...)`` if ``weight`` is in ``parameters`` (the placeholders of
    the layer's parameters), a bfloat16 matrix, and both its dims are multiples of the recipe's ``multiple``.

    These products stay in bfloat16: routers (``_is_router``); the last products before any other choice (``nodes_before_choices``), in
    this layer or in one that reads the results ``choice_outputs``; if ``has_head``, the products whose results reach no other product.
    Embeddings and attention are other ops and don't change. The grouped products of experts do if the recipe says so.
    """
    excluded = {node for node in gm.graph.nodes if _is_router(node)} | nodes_before_choices(gm, choice_outputs)
    if has_head:
        excluded |= _last_products(gm.graph.nodes)
    for node in gm.graph.nodes:
        if node.target is _LINEAR and node not in excluded and _runs_in_fp8(node, parameters, recipe):
            node.target, node.kwargs = kernels_fp8.linear, {"scaling": recipe.scaling}
        elif recipe.experts and isinstance(node.target, Experts):
            node.target = _in_float8(node.target, recipe)
    gm.graph.lint()
    return gm


def nodes_before_choices(gm: fx.GraphModule, choice_outputs: Container[int] = ()) -> set[fx.Node]:
    """Return the nodes that determine a discrete choice, back to and including the nearest products.

    A choice turns floating-point numbers into integers or booleans (``topk``, ``argmax``, a comparison): a rounding error may change it
    completely. Choices in other layers depend on the graph's results at the indices ``choice_outputs``.
    """
    results = list(next(node for node in gm.graph.nodes if node.op == "output").all_input_nodes)
    pending = [node for index, node in enumerate(results) if index in choice_outputs]
    for node in gm.graph.nodes:
        if node.op == "call_function" and any(map(_is_discrete, _tensors(node))):
            pending += [operand for operand in node.all_input_nodes if not all(map(_is_discrete, _tensors(operand)))]
    found: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [] if node.op == "call_function" and facts(node).is_expensive else node.all_input_nodes
    return found


def _tensors(node: fx.Node) -> list[Tensor]:
    value = meta(node).get("val")
    return [x for x in (value if isinstance(value, list | tuple) else [value]) if isinstance(x, Tensor)]


def _is_discrete(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex())


def has_products(gm: fx.GraphModule) -> bool:
    """Return whether the graph has products with weights."""
    return any(node.target is _LINEAR for node in gm.graph.nodes)


def _runs_in_fp8(node: fx.Node, parameters: Container[fx.Node], recipe: Fp8Recipe) -> bool:
    weight = operands(node)[1]
    sizes, is_bfloat16 = shape_of(weight), meta(weight)["val"].dtype == meta(node)["val"].dtype == torch.bfloat16
    is_aligned = all(size % recipe.multiple == 0 for size in sizes)
    return weight in parameters and len(operands(node)) == 2 and len(sizes) == 2 and is_bfloat16 and is_aligned


def _in_float8(op: Experts, recipe: Fp8Recipe) -> Experts:
    """Return the mixture with the grouped products of its body in FP8, if they are in bfloat16 and of dims that ``multiple`` divides."""
    body = copy.deepcopy(op.body)
    for node in body.graph.nodes:
        if node.target is kernels_experts.grouped_linear:
            weight = meta(operands(node)[1])["val"]
            if weight.dtype == torch.bfloat16 and not any(size % recipe.multiple for size in weight.shape[1:]):
                node.target, node.kwargs = kernels_fp8.grouped_linear, {"scaling": recipe.scaling}
    return op.with_body(body)


def _is_router(node: fx.Node) -> bool:
    """Return whether a product determines which experts a mixture chooses for a token, or how it weighs their results, but not the tokens
    themselves."""
    if node.target is not _LINEAR:
        return False
    dependents = {node, *_dependents(node)}
    for mixture in dependents:
        if isinstance(mixture.target, Experts):
            tokens, *routing = operands(mixture)[:3]
            if tokens not in dependents and any(value in dependents for value in routing):
                return True
    return False


def _last_products(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the products whose results reach no other product and no attention."""
    products = [node for node in nodes if node.target is _LINEAR]
    return {node for node in products if not any(facts(user).is_expensive for user in _dependents(node))}


def _dependents(node: fx.Node) -> set[fx.Node]:
    """Return the nodes that depend on ``node``, directly or not."""
    found: set[fx.Node] = set()
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user not in found:
            found.add(user)
            pending += user.users
    return found
