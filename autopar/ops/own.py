"""Fused ops that a pass of autopar creates, each with what the cost model, padding, kernels and checks need.

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
"""Returns a tensor's bytes at the priced precision."""


class Passes(NamedTuple):
    """An op's work besides its products: bytes moved forward and backward, live bytes while it runs, and kernels of each pass."""

    forward_bytes: float
    backward_bytes: float
    live_bytes: float
    forward_kernels: float
    backward_kernels: float


@dataclass(frozen=True, slots=True)
class OwnOp:
    """A fused op, computed by a runtime function.

    ``name`` is that of ``ops.facts``. ``flops`` are those of its forward products, which backward recomputes (``slices`` kernels in each
    direction); ``passes`` is the rest. ``padding_after`` is that of ``rules.padding`` for the op; ``resize`` gives the call of a padded
    graph its true sizes. ``call`` makes a rank's call (``passes.kernel_calls``). ``samples`` makes arguments for checking the rule, from
    functions that draw normal floats of a shape, and integers below a limit.
    """

    name: str
    function: Callable[..., Any]
    flops: Callable[[fx.Node], float]
    slices: Callable[[fx.Node], float]
    passes: Callable[[fx.Node, Size], Passes]
    padding_after: Callable[[Sequence[bool | None]], bool | None]
    resize: Callable[[fx.Node, fx.Node], None]
    call: Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]
    samples: Callable[[Callable[..., Any], Callable[..., Any]], Sequence[tuple[tuple[Any, ...], dict[str, Any]]]]


OWN_OPS: dict[str, OwnOp] = {}
"""The ops by their names."""


def register(op: OwnOp) -> None:
    """Make an op known."""
    OWN_OPS[op.name] = op


def own_op(node: fx.Node) -> OwnOp | None:
    """Return the record of a node's fused op, or ``None``."""
    return OWN_OPS.get(op_name(node)) if OWN_OPS else None
