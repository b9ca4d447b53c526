"""What one op costs: floating-point operations and bytes of device memory, at the shapes its node carries.

Own small table by ATen name. Matrix products, convolutions and attention count FLOPs; every other op is priced by
the bytes it reads and writes, which is what bounds it; views cost nothing. An op that the table does not know is priced
by its bytes. Counts are those of the whole tensors of ``node.meta["val"]``; what an axis takes of them is the caller's.

Conventions: a multiply-add is two operations; attention is flash-like (no score matrix in memory); *executed* FLOPs
of causal attention are half, *model* FLOPs (for MFU) are those of the full square, as in Megatron's and nanotron's
published numbers.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable

import torch
from torch import fx

from autopar.ops.experts import Experts
from autopar.ops.operands import operands

# Backward FLOPs of one op over its forward FLOPs, when every floating operand needs a gradient. Matrix products: one
# product of the same size per operand. Flash attention: five products (one recomputes the scores) for forward's two.
MATMUL_BACKWARD = 2.0
ATTENTION_BACKWARD = 2.5

_VIEWS = frozenset(
    """alias as_strided chunk detach diagonal expand expand_as flatten getitem lift_fresh movedim narrow permute
    ravel reshape reshape_as select slice split split_with_sizes squeeze swapaxes swapdims t transpose unbind unflatten
    unsafe_chunk unsafe_split unsqueeze view view_as tensor_split sym_size numpy_T mT
    """.split()  # noqa: SIM905  a list of words
)
# Kernels and ops that are attention, by a part of their name.
_ATTENTION = "attention"


def op_name(node: fx.Node) -> str:
    """``aten.linear.default`` is ``linear``; a Python function goes by its own name, a placeholder by its kind."""
    if node.op != "call_function":
        return node.op
    if hasattr(node.target, "overloadpacket"):  # an op overload prints as namespace.name.overload
        return _overload(node.target).split(".")[1]
    return getattr(node.target, "__name__", str(node.target))


_overload = functools.lru_cache(maxsize=4096)(str)


def tensors(value: object) -> list[torch.Tensor]:
    """The tensors of a node's value, which may be a tensor, a tuple or list of them, or something else."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in tensors(item)]
    return []


def value_of(node: object) -> torch.Tensor | None:
    """The meta tensor that an argument stands for; ``None`` where it is not a single tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """The nodes that ``node`` reads and that hold tensors, in ``all_input_nodes`` order."""
    return [n for n in node.all_input_nodes if tensors(n.meta.get("val"))]


def is_view(node: fx.Node) -> bool:
    """Whether the op moves no data, as far as its name tells (a reshape may copy: ``memory.trace`` sees it)."""
    return op_name(node) in _VIEWS or node.target is operator.getitem


def is_attention(node: fx.Node) -> bool:
    """Whether the op is (flash) attention: its first three tensors are query, key and value."""
    return node.op == "call_function" and _ATTENTION in op_name(node) and len(tensor_operands(node)) >= 3


def factors(node: fx.Node) -> tuple[fx.Node, ...]:
    """The two factors of a product; the first operand of addmm and its like is only added."""
    first = 1 if op_name(node) in ("addmm", "addbmm", "baddbmm") else 0
    return operands(node)[first : first + 2]


def op_cost(node: fx.Node) -> tuple[float, float]:
    """``(flops, bytes)`` of the forward op: operations executed, and bytes of device memory read plus written."""
    return executed_flops(node), float(bytes_moved(node))


def executed_flops(node: fx.Node) -> float:
    """Forward FLOPs as executed: a causal mask halves attention."""
    full = model_flops(node)
    return full / 2 if full and is_attention(node) and _causal(node) else full


def model_flops(node: fx.Node) -> float:
    """Forward FLOPs by the usual convention for utilisation: attention counts the full square."""
    if node.op != "call_function" or not tensors(node.meta.get("val")):
        return 0.0
    if is_attention(node):
        return _attention_flops(node)
    if isinstance(node.target, Experts):  # of all chosen rows, which is what its body's shapes say
        return sum(model_flops(inner) for inner in node.target.body.graph.nodes)
    formula = _FLOPS.get(op_name(node))
    return float(formula(node)) if formula is not None else 0.0


def backward_factor(node: fx.Node, needing_gradient: int, floating: int) -> float:
    """Backward FLOPs over forward FLOPs, when ``needing_gradient`` of ``floating`` factors want a gradient."""
    if is_attention(node):
        return ATTENTION_BACKWARD if needing_gradient else 0.0
    return MATMUL_BACKWARD * min(1.0, needing_gradient / max(1, min(2, floating)))


def bytes_moved(node: fx.Node) -> int:
    """Bytes read plus written by the forward op."""
    if node.op != "call_function" or is_view(node):
        return 0
    written = sum(t.nbytes for t in tensors(node.meta.get("val")))
    if op_name(node) in ("embedding", "gather", "index_select", "index", "masked_embedding"):
        # only the rows that are picked are read, not the table
        return 2 * written + sum(v.nbytes for n in tensor_operands(node)[1:] if (v := value_of(n)) is not None)
    return written + sum(t.nbytes for n in tensor_operands(node) for t in tensors(n.meta.get("val")))


def _causal(node: fx.Node) -> bool:
    named = node.kwargs.get("is_causal", node.kwargs.get("causal"))
    if named is not None:
        return bool(named)
    # scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal)
    return len(node.args) > 5 and node.args[5] is True


def _attention_flops(node: fx.Node) -> float:
    query, key, value = (n.meta["val"] for n in tensor_operands(node)[:3])
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    return 2.0 * scores * (query.shape[-1] + value.shape[-1])


def _product(left: int) -> Callable[[fx.Node], float]:
    """A product whose contracted dim is the last of argument number ``left``."""

    def flops(node: fx.Node) -> float:
        factor = value_of(node.args[left])
        assert factor is not None, node.format_node()
        return 2.0 * node.meta["val"].numel() * factor.shape[-1]

    return flops


def _convolution(node: fx.Node) -> float:
    weight = value_of(node.args[1])
    assert weight is not None, node.format_node()
    # weight: [out channels, in channels / groups, *kernel]; transposed convolutions swap the first two
    if "transpose" in op_name(node):
        source = value_of(node.args[0])
        assert source is not None
        return 2.0 * source.numel() * math.prod(weight.shape[1:])
    return 2.0 * node.meta["val"].numel() * math.prod(weight.shape[1:])


def _einsum(node: fx.Node) -> float:
    equation, operands = node.args[0], node.args[1]
    assert isinstance(equation, str) and isinstance(operands, (list, tuple))
    sizes: dict[str, int] = {}
    for letters, operand in zip(equation.split("->")[0].replace(" ", "").split(","), operands, strict=True):
        value = value_of(operand)
        if value is None or "." in letters:
            return 0.0
        sizes |= dict(zip(letters, value.shape, strict=True))
    return 2.0 * math.prod(sizes.values())


_FLOPS: dict[str, Callable[[fx.Node], float]] = {
    "linear": _product(0),
    "matmul": _product(0),
    "mm": _product(0),
    "bmm": _product(0),
    "mv": _product(0),
    # every row of the first operand meets one expert's matrix
    **dict.fromkeys(("grouped_linear", "_grouped_mm", "grouped_mm"), _product(0)),
    "addmm": _product(1),
    "addbmm": _product(1),
    "baddbmm": _product(1),
    "einsum": _einsum,
    **dict.fromkeys(
        ("convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        _convolution,
    ),
}
