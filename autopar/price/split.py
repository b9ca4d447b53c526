"""A backward in two: what makes gradients of a layer's inputs (I) and what makes gradients of its parameters alone (W).

Nothing waits for W but the step's end, so that schedules like zero bubble put it where a device would wait. Op by op: a product has one
product for each factor that wants a gradient, and belongs to W as far as these are parameters; what is computed from parameters alone (an
embedding, a weight's cast) belongs to W whole; attention is one kernel and belongs to I whole, as do views and all that has no
parameter; of other ops (norms, biases) it is the share of the bytes. Recomputation and collectives belong to I.

Between the two PyTorch keeps what it has saved, recomputed values included, and the gradient of every op's result that a parameter's
gradient is taken from.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from autopar.ops import cost
from autopar.ops.operands import operands
from autopar.price.memory import Trace


def weight_shares(
    ops: tuple[fx.Node, ...], run: Trace, activations: tuple[str, ...], size: Callable[[torch.Tensor], int]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """By op: the share of its backward that belongs to W, and whether W needs the gradient of its result."""
    flows = {name for name in activations if run.requires_grad[name]}  # what a gradient of the inputs passes through
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
            shares[i], waits[i] = _share(node, read, {o.name for o in wanting}, own, size), True
    return shares, waits


def _share(
    node: fx.Node, read: tuple[fx.Node, ...], wanting: set[str], own: set[str], size: Callable[[torch.Tensor], int]
) -> float:
    """Of an op that reads parameters (``own``) and values that a gradient passes through."""
    if cost.model_flops(node):
        among = [o.name for o in cost.factors(node) if o.name in wanting] or list(wanting)
        return sum(name in own for name in among) / len(among)

    def moved(node: fx.Node) -> float:
        return float(sum(map(size, cost.tensors(node.meta["val"]))))

    # Both read the result's gradient and what the op has read. W writes the parameters' gradients instead of reading them, I the others.
    read_by_both = moved(node) + sum(map(moved, read))
    passed_on = sum(moved(o) for o in read if o.name in wanting - own)
    return read_by_both / (2 * read_by_both + passed_on)
