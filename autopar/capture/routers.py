"""Samples the choices of routers, because a router that is limited to a few groups of experts (DeepSeek-V3, arXiv:2412.19437, section
2.1.2) sends a token to fewer nodes than one that chooses all sets of experts equally often.

The router's ops run on the CPU, on random scores for a few tokens in place of the product that scores the experts. Parameters are zeros,
and so are floating constants if their values unbalance the loads of experts: a trained bias balances trained scores, not random ones.
Prices take all sets of experts as equally likely if a router can't be sampled: it runs custom ops or random ops, reads other activations
than the scores, or its sampled loads aren't balanced.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.graph import GraphLayer, LayerClass
from autopar.ops.cost import tensors
from autopar.ops.experts import Experts
from autopar.ops.facts import OpKind, facts, is_random, op_name
from autopar.ops.meta import meta
from autopar.ops.operands import first_tensor, operands, shape_of
from autopar.ops.routing import STANDARD_ERRORS, Routing, SampledChoices
from passes.clean.nodes import ancestors
from passes.localise import apply, local_call

TOKENS = 2048
"""Tokens of a sample: the mean number of reached ranks is then accurate to about 1 %."""
_SEED = 0
_BUDGET_BYTES = 2**26
"""Maximum bytes of a value of the router for ``TOKENS`` tokens."""
_REFUSED = (RuntimeError, ValueError, LookupError, TypeError, AssertionError)
"""What ops raise that can't run at another number of tokens."""


def sample_routers(
    layers: Sequence[GraphLayer], classes: Mapping[str, LayerClass], constants: Mapping[str, Tensor]
) -> None:
    """Write ``meta(node)["choices"]`` of each mixture whose router doesn't choose all sets of experts equally often."""
    for name, cls in classes.items():
        if not cls.experts:
            continue
        layer = next(layer for layer in layers if layer.cls == name)
        known = {
            value.name: constants[of_layer]
            for value, of_layer in zip(cls.constants, layer.constants, strict=True)
            if of_layer in constants
        }
        for node in cls.graph.graph.nodes:
            if isinstance(node.target, Experts):
                sample = sampled_choices(cls, node, known)
                routing = Routing(node.target.count, shape_of(operands(node)[1])[-1])
                if sample is not None and not routing.agrees_with(sample):
                    meta(node)["choices"] = sample


def sampled_choices(cls: LayerClass, node: fx.Node, constants: Mapping[str, Tensor]) -> SampledChoices | None:
    """Return the choices of the router of the mixture ``node`` for random scores, or ``None`` if it can't run on them. ``constants`` are
    the known values of the class's constants."""
    assert isinstance(node.target, Experts)
    count, index = node.target.count, operands(node)[1]

    def scores_experts(each: fx.Node) -> bool:
        return facts(each).kind in (OpKind.PRODUCT, OpKind.EINSUM) and shape_of(each)[-1:] == (count,)

    used = ancestors([index], lambda each: not scores_experts(each))
    scores = {each for user in used for each in user.all_input_nodes if scores_experts(each)}
    if len(scores) != 1:
        return None
    product = scores.pop()
    ordered = [each for each in node.graph.nodes if each in used]
    for known in (constants, {name: value for name, value in constants.items() if not value.is_floating_point()}):
        try:
            choices = _run(ordered, product, _leaves(cls, used, known))
        except _REFUSED:
            return None
        if choices is not None and _balanced(choices, count):
            return SampledChoices(choices)
    return None


def _leaves(cls: LayerClass, used: Collection[fx.Node], known: Mapping[str, Tensor]) -> dict[fx.Node, Tensor]:
    """Return the values of the ``used`` constants and parameters; those that aren't ``known`` are zeros, if they are floating."""
    placeholders = [node for node in cls.graph.graph.nodes if node.op == "placeholder"]
    start = len(cls.activations) + len(cls.inputs)
    values = zip(placeholders[start:], (*cls.constants, *cls.scalars, *cls.parameters), strict=True)
    found = {}
    for node, value in values:
        if node not in used or value in cls.scalars or value.bytes > _BUDGET_BYTES:
            continue
        if value.name in known:
            table = known[value.name]
            found[node] = (table.float() if table.is_floating_point() else table).expand(value.shape)
        elif value.dtype.is_floating_point:
            found[node] = torch.zeros((), dtype=torch.float32, device="cpu").expand(value.shape)
    return found


def _run(nodes: Sequence[fx.Node], product: fx.Node, leaves: Mapping[fx.Node, Tensor]) -> Tensor | None:
    """Return the last node's choices ``[TOKENS, k]`` for random scores in place of ``product``; ``None`` if a node can't be evaluated."""
    leading = shape_of(product)[:-1]
    tokens = math.prod(leading)

    def resized(shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape with all dims of tokens, which come first, merged into one of ``TOKENS``, the others of size 1."""
        dims = next((i for i in range(1, len(shape) + 1) if math.prod(shape[:i]) == tokens), 0)
        return (TOKENS, *[1] * (dims - 1), *shape[dims:]) if dims else shape

    generator = torch.Generator().manual_seed(_SEED)
    values: dict[fx.Node, Any] = {
        product: torch.randn(resized(shape_of(product)), generator=generator, dtype=torch.float32, device="cpu")
    }
    for node in nodes:
        if node.op == "placeholder":
            values[node] = _of_tokens(leaves[node], leading)
            continue
        shape = resized(shape_of(node))
        runs = op_name(node).startswith(("aten.", "_operator.")) and not is_random(node)
        if not runs or math.prod(shape) * first_tensor(node).dtype.itemsize > _BUDGET_BYTES:
            return None
        inputs = [values[operand] for operand in operands(node)]
        with torch.no_grad():
            call = local_call(node, [tuple(tensors(value)[0].shape) for value in inputs], shape)
            values[node] = apply(call, node, inputs)
        if tuple(tensors(values[node])[0].shape) != shape:
            return None
    choices: Tensor = values[nodes[-1]]
    return choices.reshape(TOKENS, -1).long()


def _of_tokens(table: Tensor, leading: Sequence[int]) -> Tensor:
    """Return the table for ``TOKENS`` tokens if its first dims are those of tokens (or of size 1) and all tokens have equal rows; else
    ``table`` itself."""
    dims = len(leading)
    if table.dim() <= dims or any(n not in (1, size) for n, size in zip(table.shape, leading, strict=False)):
        return table
    row = table[(slice(0, 1),) * dims]
    return row.expand(TOKENS, *row.shape[1:]) if bool((table == row).all()) else table


def _balanced(choices: Tensor, count: int) -> bool:
    """Return whether the tokens' experts differ, and all experts are chosen equally often, up to the sampling error."""
    repeated = (choices.sort(-1).values.diff(dim=-1) == 0).any()
    loads = torch.bincount(choices.flatten(), minlength=count).double()
    mean = choices.numel() / count
    return not repeated and len(loads) == count and bool(((loads - mean).abs() <= STANDARD_ERRORS * mean**0.5).all())
