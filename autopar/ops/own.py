"""Ops that a pass of autopar makes of several others: what prices, padding, kernels and checks must know of such an op, in one record.

The pass's module registers it, and adds the op's rule to ``rules.table``, so that the op is known wherever a graph has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.ops.facts import op_name

Size = Callable[[torch.Tensor], int]
"""Bytes of a tensor at the priced precision."""


class Passes(NamedTuple):
    """What an op computes besides its products: bytes that it moves forward and backward, those that are live while it runs, and kernels
    of each of both passes."""

    forward_bytes: float
    backward_bytes: float
    live_bytes: float
    forward_kernels: float
    backward_kernels: float


@dataclass(frozen=True, slots=True)
class OwnOp:
    """An op, by the function of the runtime that computes it.

    ``name`` is that of ``ops.facts``. ``flops`` are those of its products, forward; its backward pass computes them once more (``slices``
    kernels in each direction), and ``passes`` are the rest. ``beyond`` says whether the result is
    right where operands are padded, as in ``rules.padding.carried``; ``reword`` gives the call of a padded graph its true sizes, from the
    call before. ``call`` is the call of one rank (``passes.kernel_calls``). ``samples`` makes arguments of calls on which the rule is
    executed, from functions that draw normal numbers of a shape, and integers below a limit.
    """

    name: str
    function: Callable[..., Any]
    flops: Callable[[fx.Node], float]
    slices: Callable[[fx.Node], float]
    passes: Callable[[fx.Node, Size], Passes]
    beyond: Callable[[Sequence[bool | None]], bool | None]
    reword: Callable[[fx.Node, fx.Node], None]
    call: Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]
    samples: Callable[[Callable[..., Any], Callable[..., Any]], Sequence[tuple[tuple[Any, ...], dict[str, Any]]]]


OWN_OPS: dict[str, OwnOp] = {}
"""The ops by their names."""


def register(op: OwnOp) -> None:
    """Make an op known."""
    OWN_OPS[op.name] = op


def own_op(node: fx.Node) -> OwnOp | None:
    """The record of a node's op, if a pass made it."""
    return OWN_OPS.get(op_name(node)) if OWN_OPS else None
