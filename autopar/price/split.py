"""A split backward: I computes input gradients, W computes weight gradients.

Only the end of the step waits for W, so zero-bubble schedules run it when a device would otherwise be idle. In emitted programs
(``program.weight_gradients``) W has one matrix product for each weight of ``ops.products.weight_of``; everything else belongs to I:
recomputation, collectives, and the gradients of biases, norms and embeddings. Between I and W, memory has the input of each such product
and the gradient of its result; I frees all other saved values. Compiled layers have no W (``ops.compilation.is_compiled``).
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.ops import cost
from autopar.ops.facts import op_name
from autopar.ops.operands import arguments
from autopar.ops.products import weight_of
from autopar.price.trace import Trace


def weight_shares(ops: tuple[fx.Node, ...], run: Trace, parameters: Collection[str]) -> NDArray[np.float64]:
    """Return the share of each op's backward that belongs to W, ``[op]``; 0 for an op without a part in W."""
    shares = np.zeros(len(ops))
    for i, node in enumerate(ops):
        weight = weight_of(node)
        if weight is None or weight.name not in parameters or not run.requires_grad[weight.name]:
            continue
        shares[i] = _weight_share(node, run)
    return shares


def product_shares(ops: tuple[fx.Node, ...], run: Trace) -> NDArray[np.float64]:
    """Return the share of each ``linear``'s backward that computes its weight gradient, ``[op]``, also if the weight is a view of a
    parameter; 0 for other ops."""
    linears = (
        (i, node) for i, node in enumerate(ops) if op_name(node) == "aten.linear" and run.requires_grad[node.name]
    )
    shares = np.zeros(len(ops))
    for i, node in linears:
        shares[i] = _weight_share(node, run)
    return shares


def _weight_share(node: fx.Node, run: Trace) -> float:
    """Return the weight gradient's share of the FLOPs of a ``linear``'s backward; 0 if only the bias requires a gradient."""
    products = cost.gradient_products(node, run.requires_grad)
    weight: fx.Node = arguments(node)["weight"]
    return sum(p.flops for p in products if p.operand == weight.name) / (sum(p.flops for p in products) or 1.0)


def deferred_values(ops: tuple[fx.Node, ...], run: Trace, shares: NDArray[np.float64]) -> set[tuple[int, str]]:
    """Return the values in memory between I and W, as (op's index, value's name): each product's input, once if several products read it,
    and the gradient of its result, under the result's name, because both have the same size."""
    found: dict[object, tuple[int, str]] = {}
    for i in np.flatnonzero(shares).tolist():
        read = arguments(ops[i])["input"].name
        found["gradient", i] = i, ops[i].name
        found.setdefault(run.storage[read], (i, read))
    return set(found.values())
