"""A table of facts about each op, by its name: its kind, and properties that follow from the kind.

Rules, cost model, passes, capture, emit and checks use ``facts(node)``. Ops that aren't in the table are of
kind ``OTHER``. FLOPs and bytes depend on shapes, and are in ``autopar.ops.cost``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx

from autopar.ops.operands import argument
from autopar.torch_private import overload_name

_BUILTIN_NAMESPACES = frozenset(("aten", "prim", "prims", "autopar", "profiler", "higher_order"))


def aten_names(text: str) -> tuple[str, ...]:
    """Return the full names of the ATen ops in ``text``, such as ``"aten.view"``."""
    return tuple(f"aten.{name}" for name in text.split())


class OpKind(Enum):
    """The kind of an op; the value lists the ops by their full names."""

    ATTENTION = ("aten.scaled_dot_product_attention", "kernels.attention")
    PRODUCT = (*aten_names("linear matmul mm bmm mv addmm addbmm baddbmm"), "kernels_fp8.linear")
    EINSUM = aten_names("einsum")
    GROUPED_PRODUCT = (  # as models call it
        "aten._grouped_mm",
        "transformers.grouped_mm_fallback",
        "autopar.grouped_product",
    )
    EXPERTS_PRODUCT = (
        "kernels_experts.grouped_linear",
        "kernels_fp8.grouped_linear",
    )  # as the body of a mixture calls it
    CONVOLUTION = (*aten_names("convolution conv1d conv2d conv3d"), "kernels.convolution")
    TRANSPOSED_CONVOLUTION = aten_names("conv_transpose1d conv_transpose2d conv_transpose3d")
    RECURRENCE = aten_names("lstm gru rnn_tanh rnn_relu")
    LOOKUP = ("aten.embedding", "kernels_vocab.masked_embedding")  # rows of a table
    EMBEDDING_BAG = aten_names("embedding_bag _embedding_bag")  # sums of rows of a table
    GATHER = aten_names("gather index_select index")
    CLASS_LOSS = ("kernels.cross_entropy_sum",)
    LOSS = aten_names(
        """mse_loss l1_loss smooth_l1_loss huber_loss kl_div soft_margin_loss binary_cross_entropy
        binary_cross_entropy_with_logits"""
    )  # pointwise, with a reduction
    DROPOUT = ("aten.dropout", "kernels.dropout")
    RANDOM = ("kernels_random.uniform", "kernels_random.normal", "kernels_random.bernoulli")  # seeded random numbers
    VALUE_INDEPENDENT = aten_names(
        "rand randn randint rand_like randn_like empty empty_like new_empty"
    )  # independent of operands' values
    ADDITION = aten_names("add sub")
    CAST = aten_names("to type_as _to_copy cpu cuda")
    DETACH = aten_names("detach")
    IDENTITY = aten_names("alias contiguous clone lift lift_fresh lift_fresh_copy positive")
    RESHAPE = aten_names("view reshape _unsafe_view view_copy flatten unflatten view_as reshape_as")
    SQUEEZE = aten_names("squeeze unsqueeze ravel _reshape_alias atleast_1d atleast_2d atleast_3d")
    EXPANSION = aten_names("expand expand_as broadcast_to")
    PERMUTATION = aten_names("transpose t permute swapdims swapaxes movedim moveaxis numpy_T mT mH matrix_H adjoint")
    SLICE = aten_names("select slice narrow")
    SPLIT = aten_names("split split_with_sizes chunk tensor_split unbind unsafe_chunk unsafe_split")
    OTHER = ()


_KINDS = {name: kind for kind in OpKind for name in kind.value}
_PRODUCTS = frozenset((OpKind.PRODUCT, OpKind.CONVOLUTION, OpKind.TRANSPOSED_CONVOLUTION))
_STRIDED = frozenset((OpKind.EXPANSION, OpKind.PERMUTATION, OpKind.SLICE, OpKind.SPLIT))
_VIEWS = _STRIDED | {OpKind.RESHAPE, OpKind.SQUEEZE, OpKind.DETACH}
_OTHER_VIEWS = frozenset(
    (*aten_names("alias as_strided diagonal lift_fresh sym_size view view_copy"), "_operator.getitem")
)
_LINEAR = frozenset(
    (*aten_names("rsub neg sum mean cat stack"), "_operator.getitem", "kernels.reshape", "kernels.expand")
    + ("collectives.convert", "collectives.share", "localise_layer.scale")
)
# Pointwise ops that torch doesn't tag as pointwise, or not in all overloads; the tests check each by execution. Views are left out, and so
# are ops with an operand that isn't broadcast (``prelu``), copies (``type_as``), and ops on rows (``renorm``).
ALSO_POINTWISE = frozenset(
    aten_names(
        """where to _to_copy clamp clip masked_fill fill zero zeros_like ones_like full_like
        hardswish log_sigmoid special_expit special_ndtr special_xlogy special_logit
        logical_and logical_or __and__ __or__ __xor__ isclose greater greater_equal less less_equal not_equal
        rsub subtract multiply divide true_divide floor_divide absolute negative fix
        arccos arcsin arctan arctan2 arccosh arcsinh arctanh"""
    )
)
_BIT_CASTS = frozenset(("aten::view.dtype", "aten::view_copy.dtype"))  # they have a dtype where a view has sizes
NOT_POINTWISE = frozenset(("aten::where",))  # this overload, with one argument, returns indices


@dataclass(frozen=True, slots=True)
class Op:
    """The facts about an op, for all its overloads, arguments and shapes.

    ``name`` is ``"aten.linear"`` for every overload of ``aten::linear``; for a Python function it is the last part of the module's name and
    the function's name, as in ``"kernels.cross_entropy_sum"`` and ``"_operator.getitem"``; it is empty for a node that isn't a call.
    ``seeded``: torch tags the op as random. ``pointwise``: each element of the result depends only on the operands' elements at the same
    (broadcast) position.
    """

    name: str
    kind: OpKind
    seeded: bool = False
    pointwise: bool = False

    @property
    def short(self) -> str:
        """The name without its namespace: ``linear``."""
        return self.name.rpartition(".")[2]

    @property
    def is_attention(self) -> bool:
        """Whether the op is attention with the same arguments as torch's."""
        return self.kind is OpKind.ATTENTION

    @property
    def is_product(self) -> bool:
        """Whether the op is a matrix product or a convolution, which require operands of one dtype."""
        return self.kind in _PRODUCTS

    @property
    def in_float8(self) -> bool:
        """Whether the op is an FP8 product."""
        return self.name in ("kernels_fp8.linear", "kernels_fp8.grouped_linear")

    @property
    def is_expensive(self) -> bool:
        """Whether selective recomputation saves the result, because recomputing it costs more than keeping it in memory."""
        return self.is_product or self.is_attention or self.kind is OpKind.EINSUM

    @property
    def may_be_summed(self) -> bool:
        """Whether selective recomputation saves the reduced result if the result is a partial sum.

        Lookups in a row-sharded table give partial sums; so do products that contract a sharded dim, and additions to partial sums.
        """
        return self.is_expensive or self.kind in (OpKind.LOOKUP, OpKind.ADDITION)

    @property
    def saves_nothing(self) -> bool:
        """Whether the gradient doesn't depend on operands and result, so that autograd saves neither."""
        return self.kind in _VIEWS or self.backward_is_free or self.name in _LINEAR

    @property
    def backward_is_free(self) -> bool:
        """Whether the backward runs no kernel if each operand has as many bytes as the result."""
        return self.kind in (OpKind.ADDITION, OpKind.CAST, OpKind.IDENTITY)

    @property
    def is_view(self) -> bool:
        """Whether the op usually returns a view (a reshape may copy: ``price.trace`` runs the op to find out)."""
        return self.kind in _VIEWS or self.name in _OTHER_VIEWS

    @property
    def is_strided(self) -> bool:
        """Whether the op is a view that may be non-contiguous."""
        return self.kind in _STRIDED

    @property
    def is_cross_entropy(self) -> bool:
        """Whether the op is a categorical or binary cross entropy."""
        return "cross_entropy" in self.name

    @property
    def looks_up(self) -> bool:
        """Whether the op looks up rows of a table, and possibly sums them."""
        return self.kind in (OpKind.LOOKUP, OpKind.EMBEDDING_BAG)

    @property
    def added_operand(self) -> int | None:
        """The index of the operand that is added to a product, if any."""
        return {"aten.linear": 2, "aten.addmm": 0, "aten.addbmm": 0, "aten.baddbmm": 0}.get(self.name)


_NO_CALL = Op("", OpKind.OTHER)


@functools.lru_cache(maxsize=4096)
def op_of(target: Any) -> Op:
    """Return the facts about the op of a call's target."""
    overload = overload_name(target)
    if overload is not None:
        name = overload.partition(".")[0].replace("::", ".")
    else:
        name = f"{getattr(target, '__module__', '').rpartition('.')[2]}.{getattr(target, '__name__', target)}"
    tags = getattr(target, "tags", ())
    return Op(
        name,
        _KINDS.get(name, OpKind.OTHER) if overload not in _BIT_CASTS else OpKind.OTHER,
        seeded=torch.Tag.nondeterministic_seeded in tags,
        pointwise=torch.Tag.pointwise in tags or (name in ALSO_POINTWISE and overload not in NOT_POINTWISE),
    )


def facts(node: fx.Node) -> Op:
    """Return the facts about the node's op."""
    return op_of(node.target) if node.op == "call_function" else _NO_CALL


def op_name(node: fx.Node) -> str:
    """Return the full name of the node's op, such as ``"aten.linear"``; empty for a node that isn't a call."""
    return facts(node).name


def is_random(node: fx.Node) -> bool:
    """Return whether two evaluations may differ (dropout, rand, bernoulli)."""
    op = facts(node)
    if op.is_attention:
        return bool(argument(node, 4, "dropout_p", 0.0))
    if op.kind is OpKind.DROPOUT:
        return bool(argument(node, 1, "p", 0.5)) and bool(argument(node, 2, "train", False))
    return op.seeded or op.kind is OpKind.RANDOM


def is_pointwise(node: fx.Node) -> bool:
    """Return whether each element of the result depends only on the operands' elements at the same (broadcast) position."""
    return facts(node).pointwise and not is_random(node)


def is_custom(target: Any) -> bool:
    """Return whether ``target`` is an operator that is neither torch's nor autopar's."""
    return overload_name(target) is not None and op_of(target).name.partition(".")[0] not in _BUILTIN_NAMESPACES
