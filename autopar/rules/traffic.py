"""Lists the collectives inside kernels, which aren't conversions between types.

A kernel replaces an op if a letter is sharded (``candidates``), and may communicate while it runs. The op-level solver
(``autopar.shard``), the cost model and the check of collectives all take a kernel's collectives and bytes from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import fx

from autopar.ops.experts import Experts
from autopar.ops.meta import meta
from autopar.ops.operands import arguments, dtype_of, operands, shape_of
from autopar.ops.routing import Routing
from autopar.program.kernels_fp8 import TILED_ROWS
from autopar.types import Collective

MICROBATCHABLE_KERNELS = frozenset(("step_statistics", "local_batch_norm"))
"""Kernels that may run on one microbatch at a time, and so don't rule out microbatches."""


SHARE = "expert_share"
"""The kernel of an axis whose ranks have the same tokens and different experts."""

DISPATCHES = ("expert_exchange", "expert_relay")
"""Kernels that send tokens to the owners of their experts."""


@dataclass(frozen=True, slots=True)
class KernelCollective:
    """Communication over the axes on which a kernel runs.

    Its bytes are ``scale`` times the global size of ``value``, at ``itemsize`` bytes per element (``None``: the value's); the caller
    divides them by the other axes that shard ``value``. ``forward`` and ``backward`` are the collectives of the two passes. With
    ``per_rank`` the bytes are each rank's contribution to an all-gather. With ``routing`` a row is sent to each rank that it reaches.
    ``router`` is set if ``value`` has a row for each token, which is sent to its experts or back. ``overlapped``: the kernel overlaps the
    communication with its compute. ``rounded``: ``value`` is rounded to 8 bits before it is sent.
    """

    value: fx.Node
    forward: Collective
    backward: Collective
    scale: float = 1.0
    itemsize: int | None = None
    per_rank: bool = False
    routing: Routing | None = None
    router: Routing | None = None
    overlapped: bool = False
    rounded: bool = False

    def bytes(self, element_bytes: float | None = None) -> float:
        """Return the bytes at global size; ``element_bytes`` overrides the element size of ``value``, unless ``itemsize`` is set."""
        tensor = meta(self.value)["val"]
        size = self.itemsize or (tensor.dtype.itemsize if element_bytes is None else element_bytes)
        return float(math.prod(tensor.shape) * size * self.scale)


def kernel_traffic(kernel: str, node: fx.Node) -> tuple[KernelCollective, ...]:
    """Return the communication of ``kernel`` when it replaces ``node``; empty if it doesn't communicate."""
    traffic_of = _TRAFFIC.get(kernel)
    return traffic_of(node) if traffic_of is not None else ()


def _accumulation_itemsize(node: fx.Node) -> int:
    """Return the element size of the dtype in which kernels accumulate: float32 or wider."""
    return max(4, int(dtype_of(node).itemsize))


def _vocabulary_loss(node: fx.Node, place: int = 1) -> tuple[KernelCollective, ...]:
    """Return an all-gather of the ranks' maxima, and an all-reduce of two sums per label; ``place`` is the index of the labels operand."""
    size, labels = _accumulation_itemsize(operands(node)[0]), operands(node)[place]
    return (
        KernelCollective(labels, Collective.ALL_GATHER, Collective.NONE, itemsize=size, per_rank=True),
        KernelCollective(labels, Collective.ALL_REDUCE, Collective.NONE, scale=2, itemsize=size),
    )


def _ring(node: fx.Node) -> tuple[KernelCollective, ...]:
    """Return the rotations of keys and values around the ring in both passes, and of their gradients, which then shift back to their ranks.
    With a causal mask, every sequence-sharded tensor also moves to its position in the balanced (zigzag) order and back."""
    query, key, value = operands(node)[:3]
    rotate, shift, none = Collective.ROTATE, Collective.SHIFT, Collective.NONE
    found = []
    for tensor in (key, value):
        found.append(KernelCollective(tensor, rotate, rotate, overlapped=True))
        found.append(KernelCollective(tensor, none, rotate, itemsize=_accumulation_itemsize(tensor), overlapped=True))
        found.append(KernelCollective(tensor, none, shift, itemsize=_accumulation_itemsize(tensor)))
    if arguments(node)["is_causal"]:
        # gradients move back between the two orders, too
        found += [KernelCollective(tensor, shift, shift) for tensor in (query, key, value, node)]
    return tuple(found)


def _statistics(node: fx.Node) -> tuple[KernelCollective, ...]:
    """Return an all-gather of means and variances: two of the result's three rows. A conversion after the op reduces the gradient."""
    return (KernelCollective(node, Collective.ALL_GATHER, Collective.NONE, scale=2 / 3, per_rank=True),)


def _expert_exchange(node: fx.Node) -> tuple[KernelCollective, ...]:
    """Return the all-to-alls of row counts, then of each token's row to its experts and back, and those of the gradients."""
    index, router = operands(node)[1], _routing(node)
    counts = router.experts / math.prod(shape_of(index))
    counted = KernelCollective(index, Collective.ALL_TO_ALL, Collective.NONE, scale=counts)
    rows = (replace(one, scale=one.scale * router.choices, router=router) for one in _dispatch_and_combine(node))
    return (counted, *rows)


def _routing(node: fx.Node) -> Routing:
    assert isinstance(node.target, Experts)
    return Routing(node.target.count, shape_of(operands(node)[1])[-1], sample=meta(node).get("choices"))


def _dispatch_and_combine(node: fx.Node) -> tuple[KernelCollective, KernelCollective]:
    """Return the all-to-alls of rows to their experts with those of the results' gradients, which have the same format, then the
    all-to-alls of results with those of the rows' gradients."""
    tokens = operands(node)[0]
    assert isinstance(node.target, Experts)
    combine = KernelCollective(tokens, Collective.ALL_TO_ALL, Collective.ALL_TO_ALL)
    width = shape_of(tokens)[-1]
    narrow = replace(combine, scale=TILED_ROWS.row_bytes(width) / width, itemsize=1, rounded=True)
    return narrow if node.target.fp8_dispatch else combine, combine


def _expert_relay(node: fx.Node) -> tuple[KernelCollective, ...]:
    """Return the all-to-alls of row counts, then of each token's row, choices and weights to the ranks with any of its experts, and of
    the results back."""
    _, index, weights = operands(node)[:3]
    routing = _routing(node)
    both = Collective.ALL_TO_ALL, Collective.ALL_TO_ALL
    dispatch, combine = (replace(one, routing=routing) for one in _dispatch_and_combine(node))
    return (
        KernelCollective(index, Collective.ALL_TO_ALL, Collective.NONE, scale=1 / math.prod(shape_of(index))),
        dispatch,
        KernelCollective(index, Collective.ALL_TO_ALL, Collective.NONE, routing=routing),
        KernelCollective(weights, *both, routing=routing),
        combine,
    )


_TRAFFIC: dict[str, Callable[[fx.Node], tuple[KernelCollective, ...]]] = {
    "expert_exchange": _expert_exchange,
    "expert_relay": _expert_relay,
    "vocab_parallel_cross_entropy_sum": _vocabulary_loss,
    "loss_in_slices": lambda node: _vocabulary_loss(node, 2),
    "ring_attention": _ring,
    "batch_statistics": _statistics,
    "step_statistics": _statistics,
}
