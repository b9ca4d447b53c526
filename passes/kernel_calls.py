"""Replaces ops in a rank's graph by calls of kernels.

An op is replaced if an axis shards a letter for which its rule names a kernel (``BY_KERNEL``, keyed by that name), or if it needs a kernel
whatever its rule says (``BY_OP``, keyed by the op's name): it draws random numbers, sums over shards, or is misread by the type checker. An
entry returns the call for a ``KernelRequest``, or ``None`` if the op stays unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.errors import ProgramError
from autopar.ops.facts import is_custom, op_name
from autopar.ops.fused import fused_op
from autopar.ops.meta import meta
from autopar.ops.operands import arguments, operands, shape_of
from autopar.plan import Axis
from autopar.program import custom, kernels, kernels_norm, kernels_ring, kernels_rnn, kernels_vocab
from autopar.rules.traffic import DISPATCHES, MICROBATCHABLE_KERNELS
from autopar.sharding import Sharding
from autopar.types import I, P, R, SpmdType
from passes.collectives import MICROBATCH


@dataclass(frozen=True, slots=True)
class KernelRequest:
    """The node, the axes on which its rule names a kernel (outermost first; ``kernels`` are the kernels' names), the axes on which its
    result has type P, and the axes that shard its first operand."""

    node: fx.Node
    axes: tuple[str, ...]
    kernels: tuple[str, ...]
    partial: tuple[str, ...]
    sharding: tuple[str, ...]


KernelCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""Target, arguments, keyword arguments. ``localise_pass`` replaces the keyword argument ``seed``, a tuple of axes, by a seed that differs
along them."""


def kernel_call(node: fx.Node, sharding: Sharding) -> KernelCall | None:
    """Return the kernel call that replaces the node, or ``None``. Raises ``ProgramError`` for a kernel that couples microbatches."""
    named = {
        axis.name: types.kernel[node.name]
        for axis, types in zip(sharding.axes, sharding.types, strict=True)
        if node.name in types.kernel and not (axis.name == MICROBATCH and axis.size == 1)
    }
    if named.get(MICROBATCH, "local_batch_norm") not in MICROBATCHABLE_KERNELS:
        raise ProgramError(
            f"{node.name} would need the kernel {named[MICROBATCH]} over the microbatches, which run one by one",
            hint="plan with one microbatch",
        )
    named.pop(MICROBATCH, None)
    fused = fused_op(node)
    by_op = BY_OP.get(op_name(node)) if fused is None else fused.call
    entries: set[Entry | None] = {BY_KERNEL.get(name, by_op) for name in named.values()} or {by_op}
    assert len(entries) == 1, f"{node.name}: several kernels at once, {named}"
    (entry,) = entries
    if entry is None and is_custom(node.target):
        return _custom(node, sharding)
    if entry is None:
        return None
    first = operands(node)[:1]
    return entry(
        KernelRequest(
            node,
            tuple(named),
            tuple(named.values()),
            tuple(axis.name for axis, t in typed_axes(node, sharding) if t == P),
            tuple(axis.name for n in first for axis, t in typed_axes(n, sharding) if t.sharded),
        )
    )


def typed_axes(node: fx.Node, sharding: Sharding) -> list[tuple[Axis, SpmdType]]:
    """Return every axis of the mesh with the node's type on it."""
    pairs = zip(sharding.axes, meta(node)["types"], strict=True)
    return [(axis, t) for axis, t in pairs if axis.name != MICROBATCH]


def partition(node: fx.Node, sharding: Sharding) -> tuple[str | tuple[str, ...] | None, ...]:
    """Return the mesh axes that shard each dim of the node's value (its first tensor): ``None``, a name, or a tuple, outermost first."""
    entries: list[Any] = []
    for dim in range(len(shape_of(node))):
        names = [a.name for a, t in typed_axes(node, sharding) if t.dim == dim]
        entries.append(None if not names else names[0] if len(names) == 1 else tuple(names))
    return tuple(entries)


def _custom(node: fx.Node, sharding: Sharding) -> KernelCall | None:
    """Return the call of a user's custom op, which the type checker does not know; ``None`` if it is neither sharded nor a partial sum."""
    if all(t in (I, R) for value in (node, *operands(node)) for _, t in typed_axes(value, sharding)):
        return None
    partial = tuple(axis.name for axis, t in typed_axes(node, sharding) if t == P)
    return custom.call, (node.target, node.args, node.kwargs, partition(node, sharding), partial), {}


def _vocabulary_loss(request: KernelRequest) -> KernelCall:
    given = _loss_arguments(request)
    logits, labels = given.pop("logits"), given.pop("labels")
    return kernels_vocab.vocab_parallel_cross_entropy_sum, (logits, labels, one_or_all(request.axes)), given


def _masked_embedding(request: KernelRequest) -> KernelCall:
    args = request.node.args
    padding = {"padding_idx": args[2]} if len(args) > 2 and args[2] != -1 else {}
    return kernels_vocab.masked_embedding, (args[1], args[0]), {"axis": one_or_all(request.axes), **padding}


def _dropout(request: KernelRequest) -> KernelCall:
    return kernels.dropout, request.node.args[:2], {"seed": request.sharding}


def _random_numbers(request: KernelRequest) -> KernelCall:
    target: Any = request.node.target
    return target, request.node.args, {"seed": request.sharding}


def _recurrent(request: KernelRequest) -> KernelCall:
    seed = {"seed": request.sharding} if arguments(request.node)["dropout"] else {}
    return kernels_rnn.recurrent, request.node.args, {**request.node.kwargs, **seed}


def _attention(request: KernelRequest) -> KernelCall | None:
    given = arguments(request.node)
    if not given["dropout_p"]:
        return None
    tensors = tuple(given.pop(key) for key in ("query", "key", "value"))
    return kernels.attention, tensors, {**given, "seed": request.sharding}


def _ring_attention(request: KernelRequest) -> KernelCall:
    given = arguments(request.node)
    tensors = tuple(given.pop(key) for key in ("query", "key", "value"))
    kept = {
        key: value
        for key, value in given.items()
        if value is not None and (key == "scale" or value not in (False, 0.0))
    }
    seed = {"seed": request.sharding} if given["dropout_p"] else {}
    return kernels_ring.ring_attention, (*tensors, one_or_all(request.axes)), {**kept, **seed}


def _sum_of_losses(request: KernelRequest) -> KernelCall:
    given = _loss_arguments(request)
    return kernels.cross_entropy_sum, (given.pop("logits"), given.pop("labels")), given


def _linear(request: KernelRequest) -> KernelCall | None:
    """Return a kernel if the input is sharded and has dims of size one: the type checker misreads their strides, unless there is a bias."""
    given, sizes = arguments(request.node), shape_of(operands(request.node)[0])
    ones = [dim for dim, size in enumerate(sizes[:-1]) if size == 1]
    if not request.sharding or not ones or len(ones) == len(sizes) - 1 or given["bias"] is not None:
        return None
    return kernels.linear_without_unit_dims, (given["input"], given["weight"], ones), {}


def _loss_arguments(request: KernelRequest) -> dict[str, Any]:
    given = {**arguments(request.node), "partial_axes": request.partial}
    return {name: value for name, value in given.items() if name not in ("weight", "vocabulary") or value is not None}


def _statistics(request: KernelRequest) -> KernelCall:
    axes = {"axis": one_or_all(request.axes)} if request.axes else {}
    return request.node.target, request.node.args, axes  # type: ignore[return-value]


def _experts(request: KernelRequest) -> KernelCall:
    """Return the kernel of a mixture of experts, with the axes that distribute the experts, and those whose ranks exchange tokens, in one
    hop or in two."""
    sent = {
        name: tuple(a for a, k in zip(request.axes, request.kernels, strict=True) if k == name) for name in DISPATCHES
    }
    axes = {
        "owners": request.axes,
        "exchange": sent["expert_exchange"],
        "relay": sent["expert_relay"],
        "partial_axes": request.partial,
    }
    target: Any = request.node.target
    return target, request.node.args, {name: value for name, value in axes.items() if value}


def one_or_all(axes: tuple[str, ...]) -> str | tuple[str, ...]:
    """Return axes as kernels take them: the name of a single axis, or a tuple of names."""
    return axes[0] if len(axes) == 1 else axes


Entry = Callable[[KernelRequest], KernelCall | None]

BY_KERNEL: dict[str, Entry] = {
    "batch_statistics": _statistics,
    "local_batch_norm": lambda request: (kernels_norm.local_batch_norm, request.node.args, dict(request.node.kwargs)),
    "ring_attention": _ring_attention,
    **dict.fromkeys((*DISPATCHES, "expert_share"), _experts),
    "masked_embedding": _masked_embedding,
    "step_statistics": _statistics,
    "vocab_parallel_cross_entropy_sum": _vocabulary_loss,
}
BY_OP: dict[str, Entry] = {
    "aten.dropout": _dropout,
    "aten.linear": _linear,
    "kernels_random.bernoulli": _random_numbers,
    "kernels_random.normal": _random_numbers,
    "kernels_random.uniform": _random_numbers,
    "kernels_rnn.recurrent": _recurrent,
    "aten.scaled_dot_product_attention": _attention,
    "kernels.cross_entropy_sum": _sum_of_losses,
    "kernels_experts.experts": _experts,
}
