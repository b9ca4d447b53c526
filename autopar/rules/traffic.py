"""What a kernel exchanges by itself: the collectives that no conversion between types shows.

A kernel replaces an op where a letter is sharded (``candidates``), and may talk to the other ranks while it runs. The op-level
optimum, the price and the structural check all ask here what it says and how much.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from autopar.ops.experts import Experts
from autopar.ops.meta import meta
from autopar.ops.operands import arguments, dtype_of, operands, shape_of
from autopar.types import Collective

OF_MICROBATCHES = frozenset(("step_statistics", "local_batch_norm"))
"""Kernels that are meant for a part of the batch: the microbatches need not be there at one time."""


@dataclass(frozen=True, slots=True)
class Wire:
    """One exchange over the axes on which a kernel runs.

    Its bytes are ``times`` those of ``value`` (a node's tensor, whole: what of it the other axes divide is the caller's), with
    ``itemsize`` bytes per element, or the value's own (``None``). ``forward`` and ``backward`` are the collectives of the two passes.
    With ``per_rank`` the bytes are what each rank contributes to a gather. ``overlapped`` says that the exchange runs beside the
    kernel's own arithmetic.
    """

    value: fx.Node
    forward: Collective
    backward: Collective
    times: float = 1.0
    itemsize: int | None = None
    per_rank: bool = False
    overlapped: bool = False

    def bytes(self, element_bytes: float | None = None) -> float:
        """Bytes of the whole; ``element_bytes`` are those of one element of ``value`` where they differ from the captured dtype's."""
        tensor = meta(self.value)["val"]
        size = self.itemsize or (tensor.dtype.itemsize if element_bytes is None else element_bytes)
        return float(math.prod(tensor.shape) * size * self.times)


def kernel_traffic(kernel: str, node: fx.Node) -> tuple[Wire, ...]:
    """The exchanges of ``kernel`` in place of ``node``; none for a kernel that only computes."""
    known = _TRAFFIC.get(kernel)
    return known(node) if known is not None else ()


def _wide(node: fx.Node) -> int:
    """Bytes per element of what kernels add up in: float32 or wider."""
    return max(4, int(dtype_of(node).itemsize))


def _vocabulary_loss(node: fx.Node) -> tuple[Wire, ...]:
    """Every rank's maxima are gathered, then two sums per label are reduced."""
    logits, labels = operands(node)[:2]
    size = _wide(logits)
    return (
        Wire(labels, Collective.ALL_GATHER, Collective.NONE, itemsize=size, per_rank=True),
        Wire(labels, Collective.ALL_REDUCE, Collective.NONE, times=2, itemsize=size),
    )


def _ring(node: fx.Node) -> tuple[Wire, ...]:
    """Keys and values go round in both passes, their gradients once more, home included; in the balanced order of a causal
    mask, every tensor that is sharded over the sequence also goes to its place and back."""
    query, key, value = operands(node)[:3]
    rotate, shift, none = Collective.ROTATE, Collective.SHIFT, Collective.NONE
    found = []
    for tensor in (key, value):
        found.append(Wire(tensor, rotate, rotate, overlapped=True))
        found.append(Wire(tensor, none, rotate, itemsize=_wide(tensor), overlapped=True))
        found.append(Wire(tensor, none, shift, itemsize=_wide(tensor)))
    if arguments(node)["is_causal"]:
        # the result's gradient comes in as the result went out, and the operands' gradients go out as they came in
        found += [Wire(tensor, shift, shift) for tensor in (query, key, value, node)]
    return tuple(found)


def _statistics(node: fx.Node) -> tuple[Wire, ...]:
    """Every rank's means and variances are gathered; the gradient is reduced by the conversion behind."""
    return (Wire(node, Collective.ALL_GATHER, Collective.NONE, times=2 / 3, per_rank=True),)


def _expert_exchange(node: fx.Node) -> tuple[Wire, ...]:
    """Every token's row goes to each of its experts and comes back, and so does its gradient; before that, how many go where."""
    tokens, index = operands(node)[:2]
    assert isinstance(node.target, Experts)
    counts = node.target.count / math.prod(shape_of(index))
    choices = float(shape_of(index)[-1])
    return (
        Wire(index, Collective.ALL_TO_ALL, Collective.NONE, times=counts),
        Wire(tokens, Collective.ALL_TO_ALL, Collective.ALL_TO_ALL, times=choices),
        Wire(tokens, Collective.ALL_TO_ALL, Collective.ALL_TO_ALL, times=choices),
    )


_TRAFFIC: dict[str, Callable[[fx.Node], tuple[Wire, ...]]] = {
    "expert_exchange": _expert_exchange,
    "vocab_parallel_cross_entropy_sum": _vocabulary_loss,
    "ring_attention": _ring,
    "batch_statistics": _statistics,
    "step_statistics": _statistics,
}
