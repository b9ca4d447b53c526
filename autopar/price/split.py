"""A backward in two parts: I computes gradients of a layer's inputs, W computes gradients of its parameters only.

Only the end of the step waits for W, so schedules like zero bubble run it when a device would be idle. Op by op: the backward of a
product has one product for each factor that requires a gradient, and those for parameters belong to W; an op on parameters alone (an
embedding, a weight's cast) belongs to W entirely; attention is one kernel and belongs to I, as do views and all ops without a
parameter; of other ops (norms, biases) W has a share by bytes. Recomputation and collectives belong to I.

Between the two parts PyTorch keeps all saved values, recomputed ones included, and the gradient of every op's result from which W
computes a parameter's gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from autopar.ops import cost
from autopar.ops.operands import operands
from autopar.price.trace import Trace


def weight_shares(
    ops: tuple[fx.Node, ...], run: Trace, activations: tuple[str, ...], size: Callable[[torch.Tensor], int]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Per op: the share of its backward that belongs to W, and whether W needs the gradient of its result."""
    flows = {name for name in activations if run.requires_grad[name]}  # values on the path of the inputs' gradients
    shares, waits = np.zeros(len(ops)), np.zeros(len(ops), dtype=bool)
    for i, node in enumerate(ops):
        if not run.requires_grad[node.name]:
            continue
        read = operands(node)
        wanting = [o for o in read if run.requires_grad[o.name]]
        if not any(o.name in flows for o in wanting):
            shares[i] = 1.0
            continue
        flows.add(node.name)
        own = {o.name for o in wanting if o.name not in flows}
        if own and not cost.is_attention(node):
            products = cost.gradient_products(node, run.requires_grad)
            shares[i], waits[i] = _share(node, read, products, {o.name for o in wanting}, own, size), True
    return shares, waits


def _share(
    node: fx.Node,
    read: tuple[fx.Node, ...],
    products: tuple[cost.GradientProduct, ...],
    wanting: set[str],
    own: set[str],
    size: Callable[[torch.Tensor], int],
) -> float:
    """W's share for an op that reads parameters (``own``) and values on the path of the inputs' gradients."""
    if products:
        return sum(p.flops for p in products if p.operand in own) / sum(p.flops for p in products)

    def moved(node: fx.Node) -> float:
        return float(sum(map(size, cost.tensors(node.meta["val"]))))

    # both parts read the result's gradient and the op's operands; W writes gradients of parameters, I those of other operands
    read_by_both = moved(node) + sum(map(moved, read))
    passed_on = sum(moved(o) for o in read if o.name in wanting - own)
    return read_by_both / (2 * read_by_both + passed_on)
