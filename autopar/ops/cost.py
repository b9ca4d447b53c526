"""Computes the cost of an op, FLOPs and bytes of device memory, at the shapes of its node.

Matrix products, convolutions, attention, and ops that contain them have FLOPs; every op except views has bytes read plus written.
Counts are for the global tensors in ``meta(node)["val"]``; the caller divides them among the devices of an axis.

Conventions: a multiply-add is two FLOPs; attention is flash attention (no score matrix in memory). *Model* FLOPs (for MFU) of causal
attention are those of the full score matrix, as in Megatron's and nanotron's published numbers; *executed* FLOPs are half of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopar.ops.experts import Experts
from autopar.ops.facts import OpKind, facts
from autopar.ops.fused import fused_op
from autopar.ops.meta import meta
from autopar.ops.operands import arguments, operands, shape_of, val

# backward over forward FLOPs of attention: flash attention's backward has five products (one recomputes the scores), its forward two
ATTENTION_BACKWARD = 2.5
ATTENTION_BACKWARD_KERNELS = 2  # the row sums of gradient times result, then the gradients of query, key and value
SAVED_ATTENTION_BACKWARD = 2.0  # the same ratio if the scores are saved, and by the convention of model FLOPs


def tensors(value: object) -> list[torch.Tensor]:
    """Return the tensors of a node's value."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in tensors(item)]
    return []


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands of ``node`` that are tensors, in ``all_input_nodes`` order."""
    return [n for n in node.all_input_nodes if tensors(meta(n).get("val"))]


def is_attention(node: fx.Node) -> bool:
    """Return whether the op is attention: torch's, or a custom op with "attention" in its name whose first three tensors are query, key and
    value."""
    return "attention" in facts(node).short and len(tensor_operands(node)) >= 3


def factors(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the two factors of a product, without the added operand."""
    first = 1 if facts(node).added_operand == 0 else 0
    return operands(node)[first : first + 2]


def op_cost(node: fx.Node) -> tuple[float, float]:
    """Return executed FLOPs and bytes of device memory (read plus written) of the forward op."""
    return executed_flops(node), float(bytes_moved(node))


def executed_flops(node: fx.Node) -> float:
    """Return executed forward FLOPs: a causal mask halves those of attention."""
    full = model_flops(node)
    return full / 2 if full and is_attention(node) and _causal(node) else full


def model_flops(node: fx.Node) -> float:
    """Return forward FLOPs by the convention for MFU: attention counts the full score matrix."""
    if node.op != "call_function" or not tensors(meta(node).get("val")):
        return 0.0
    if is_attention(node):
        return _attention_flops(node)
    if isinstance(node.target, Experts):  # the body's rows are all pairs of a token and a chosen expert
        return sum(model_flops(inner) for inner in node.target.body.graph.nodes)
    fused = fused_op(node)
    formula = fused.flops if fused is not None else _FLOPS.get(facts(node).kind)
    return float(formula(node)) if formula is not None else 0.0


@dataclass(frozen=True, slots=True)
class GradientProduct:
    """A product in an op's backward: its FLOPs, and the operand whose gradient it computes.

    In a mixture of experts, ``operand`` is the tokens for the gradient of any value inside the experts' body.
    """

    flops: float
    operand: str


def gradient_products(node: fx.Node, needs_gradient: Mapping[str, bool]) -> tuple[GradientProduct, ...]:
    """Return the products in the backward of an op other than attention: one with the forward's FLOPs per factor that needs a gradient.

    ``needs_gradient`` maps a value's name to whether the value needs a gradient.
    """
    if isinstance(node.target, Experts):
        return tuple(_experts_products(node, node.target, needs_gradient))
    flops = model_flops(node)
    return tuple(GradientProduct(flops, o.name) for o in factors(node) if flops and needs_gradient[o.name])


def _experts_products(node: fx.Node, experts: Experts, needs_gradient: Mapping[str, bool]) -> Iterator[GradientProduct]:
    tokens, _, _, *parameters = operands(node)
    rows = next(n for n in experts.body.graph.nodes if n.op == "placeholder")
    outer = {rows: tokens} | dict(zip(experts.parameters, parameters, strict=True))
    with_gradient = {inner for inner, operand in outer.items() if needs_gradient[operand.name]}
    for inner in experts.body.graph.nodes:
        if inner.op != "call_function":
            continue
        if any(read in with_gradient for read in inner.all_input_nodes):
            with_gradient.add(inner)
        if flops := model_flops(inner):
            for factor in factors(inner):
                if factor in with_gradient:
                    yield GradientProduct(flops, outer.get(factor, tokens).name)


def bytes_moved(node: fx.Node) -> int:
    """Return bytes read plus written by the forward op."""
    if node.op != "call_function" or facts(node).is_view:
        return 0
    written = sum(t.nbytes for t in tensors(meta(node).get("val")))
    if facts(node).kind in (OpKind.LOOKUP, OpKind.GATHER):
        # only the selected rows are read, not the table
        return 2 * written + sum(t.nbytes for n in tensor_operands(node)[1:] for t in tensors(meta(n)["val"]))
    return written + sum(t.nbytes for n in tensor_operands(node) for t in tensors(meta(n).get("val")))


def attention_dropout(node: fx.Node) -> float:
    """Return the dropout probability of an attention op."""
    probability = arguments(node).get("dropout_p", 0.0)
    return float(probability) if isinstance(probability, (int, float)) else 0.0


def _causal(node: fx.Node) -> bool:
    named = arguments(node)
    return named.get("is_causal", named.get("causal")) is True


def _attention_flops(node: fx.Node) -> float:
    query, key, value = (meta(n)["val"] for n in tensor_operands(node)[:3])
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    return 2.0 * scores * (query.shape[-1] + value.shape[-1])


def _product(node: fx.Node) -> float:
    """Return the FLOPs of a product that contracts the last dim of its left factor."""
    return 2.0 * val(node).numel() * shape_of(factors(node)[0])[-1]


def _convolution(node: fx.Node) -> float:
    source, weight = operands(node)[:2]
    # weight: [out channels, in channels / groups, *kernel]; transposed convolutions swap the first two
    counted = source if facts(node).kind is OpKind.TRANSPOSED_CONVOLUTION else node
    return 2.0 * val(counted).numel() * math.prod(shape_of(weight)[1:])


def _einsum(node: fx.Node) -> float:
    sizes: dict[str, int] = {}
    for letters, operand in zip(
        str(node.args[0]).split("->")[0].replace(" ", "").split(","), operands(node), strict=True
    ):
        if "." in letters:  # only in a graph that was not cleaned
            return 0.0
        for letter, size in zip(letters, shape_of(operand), strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))  # an operand of size 1 is broadcast
    return 2.0 * math.prod(sizes.values())


_FLOPS: dict[OpKind, Callable[[fx.Node], float]] = {
    OpKind.PRODUCT: _product,
    OpKind.GROUPED_PRODUCT: _product,  # every row of the first operand is multiplied with one expert's matrix
    OpKind.EXPERTS_PRODUCT: _product,
    OpKind.CONVOLUTION: _convolution,
    OpKind.TRANSPOSED_CONVOLUTION: _convolution,
    OpKind.EINSUM: _einsum,
}
