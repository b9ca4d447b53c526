"""Selective recomputation: which results of a layer are kept, so that its backward pass need not compute them again.

Matrix products, convolutions and attention are dear to compute, everything else is bound by memory or smaller. A product that is a term
of a sum over devices is not kept, its sum is: that costs more to have again than the product. Nothing is kept from the last op on
whose operands autograd saves, for a recomputation ends before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from autopar.ops.operands import op_name
from passes.collectives import MICROBATCH, convert

_DEAR = frozenset(
    """linear matmul mm bmm addmm baddbmm einsum convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    scaled_dot_product_attention attention""".split()  # noqa: SIM905  a list of words
)
# Lookups in a table of which a device has some rows give terms of a sum, as products over slices do, and so does adding to these.
_SUMMED = frozenset(("embedding", "masked_embedding", "add", "sub"))
_SAVE_NOTHING = frozenset(
    """add sub neg to _to_copy clone contiguous detach cat stack sum mean convert share scale getitem view reshape transpose permute t
    unsqueeze squeeze expand flatten unflatten chunk split split_with_sizes slice select narrow unbind""".split()  # noqa: SIM905  a list
)


def bare(node: fx.Node) -> str:
    """The op's name without its namespace: ``linear``."""
    return op_name(node.target).rpartition(".")[2] if node.op == "call_function" else ""


def is_dear(node: fx.Node) -> bool:
    """Whether the op's result is kept, unless it is a term of a sum over devices."""
    return bare(node) in _DEAR


def may_be_summed(node: fx.Node) -> bool:
    """Whether the sum of the op's result over devices is kept, where it is the term of one."""
    return bare(node) in _DEAR | _SUMMED


def recomputed(nodes: Sequence[fx.Node], flows: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """The leading ``nodes``, in the order of the graph, up to the last whose operands or result autograd may save.

    ``flows`` says whether a gradient flows through a node's value. A product saves its operands alone, and it saves them first: where
    one comes last it does not run again itself.
    """
    ops = [node for node in nodes if node.op == "call_function"]
    while ops and (bare(ops[-1]) in _SAVE_NOTHING or not flows(ops[-1])):
        ops.pop()
    if ops and is_dear(ops[-1]) and "attention" not in bare(ops[-1]):
        ops.pop()
    return ops


def keep_pass(gm: fx.GraphModule, axes: Sequence[str]) -> fx.GraphModule:
    """Marks what is kept: ``meta["kept"]``. Runs on a local graph, whose conversions are nodes and whose types are those on ``axes``."""
    for node in recomputed(list(gm.graph.nodes), lambda node: bool(node.meta.get("gradient"))):
        if node.target is convert:
            node.meta["kept"] = node.args[2] == "P" and may_be_summed(_converted(node))
        else:
            node.meta["kept"] = is_dear(node) and not is_partial(node, axes)
    return gm


def is_partial(node: fx.Node, axes: Sequence[str]) -> bool:
    """Whether the node's value is a term of a sum over devices; ``axes`` are the names of those of its types."""
    return any(t.kind == "P" for axis, t in zip(axes, node.meta["types"], strict=True) if axis != MICROBATCH)


def _converted(node: fx.Node) -> fx.Node:
    """The value of which ``node`` is a conversion."""
    while node.target is convert:
        value = node.args[0]
        assert isinstance(value, fx.Node)
        node = value
    return node
