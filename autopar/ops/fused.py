"""A registry of fused ops that autopar's passes create, with functions for the cost model, padding, kernels and checks.

The pass's module registers the op, and adds its rule to ``rules.table``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.ops.facts import op_name

Size = Callable[[torch.Tensor], int]
"""A function that returns the bytes of a tensor in the precision that the cost model assumes."""


class ExtraWork(NamedTuple):
    """An op's work besides its matrix products: bytes moved forward and backward, live bytes while it runs, kernels in each pass."""

    forward_bytes: float
    backward_bytes: float
    live_bytes: float
    forward_kernels: float
    backward_kernels: float


@dataclass(frozen=True, slots=True)
class FusedOp:
    """A fused op that a runtime function computes.

    ``name`` is the op's name in ``ops.facts``. ``flops`` counts its forward products, which the backward recomputes; ``slices`` is the
    number of parts in which the op computes them. ``extra_work`` is the rest of the work. ``padding_after`` returns the same as
    ``rules.padding.padding_after``; ``resize(new, old)`` stores the unpadded sizes of call ``old`` in its padded copy ``new``. ``call``
    returns a rank's call (``passes.kernel_calls``). ``samples`` returns arguments for checking the rule; it gets functions that draw
    normal floats of a shape, and integers below a limit.
    """

    name: str
    function: Callable[..., Any]
    flops: Callable[[fx.Node], float]
    slices: Callable[[fx.Node], float]
    extra_work: Callable[[fx.Node, Size], ExtraWork]
    padding_after: Callable[[Sequence[bool | None]], bool | None]
    resize: Callable[[fx.Node, fx.Node], None]
    call: Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]
    samples: Callable[[Callable[..., Any], Callable[..., Any]], Sequence[tuple[tuple[Any, ...], dict[str, Any]]]]


FUSED_OPS: dict[str, FusedOp] = {}
"""Maps names to the registered ops."""


def register(op: FusedOp) -> None:
    """Add an op to the registry."""
    FUSED_OPS[op.name] = op


def fused_op(node: fx.Node) -> FusedOp | None:
    """Return the registered op of a node, or ``None``."""
    return FUSED_OPS.get(op_name(node)) if FUSED_OPS else None
