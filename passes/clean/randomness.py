"""Makes every random number a function of a seed: random ops become ``kernels_random.uniform``, ``normal`` or ``bernoulli``, which are
seeded like dropout. An op whose numbers cannot be seeded is refused: ranks would disagree, and a recomputation would draw other numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.errors import CaptureError
from autopar.ops.facts import OpKind, facts, is_random, op_name
from autopar.ops.operands import args_of, argument, dtype_of, shape_of
from autopar.ops.source import source_line
from autopar.program import kernels_random
from passes.clean.nodes import add, aten, calls, cast_like, replace

# Dropout and attention have their own seeds; recurrent ops draw only for dropout, which ``recurrent_pass`` has handled.
_SEEDED = (OpKind.DROPOUT, OpKind.ATTENTION, OpKind.RECURRENCE)
_TRAIN_POSITION = {"feature_dropout": 2, "alpha_dropout": 2, "feature_alpha_dropout": 2, "rrelu": 3}


def randomness_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace ops that draw random numbers; see the module's docstring.

    Raises:
        CaptureError: an op draws random numbers that can't be seeded; the message quotes the line that calls it.
    """
    for node in calls(gm):
        name = op_name(node)
        if not name.startswith("aten.") or facts(node).kind in _SEEDED or not is_random(node):
            continue
        position = _TRAIN_POSITION.get(name.removeprefix("aten."))
        if position is not None and not argument(node, position, "train", False) and name != "aten.feature_dropout":
            continue
        new = drawn(node)
        if new is None:
            raise CaptureError(
                f"{name} draws random numbers that cannot be made a function of the seed\n{source_line(node)}".rstrip(),
                hint="draw them from torch.rand, torch.randn or torch.randint, or give them to the model as an input",
            )
        replace(node, new)
    return gm


def drawn(node: fx.Node) -> fx.Node | None:
    """Return the node's value as a function of seeded numbers (of an in-place op, the value that it writes); ``None`` for other ops."""
    name = op_name(node).removeprefix("aten.").removesuffix("_")
    first = args_of(node)[0] if node.args else None
    if name in ("rand", "rand_like"):
        return _uniform(node, shape_of(node), dtype_of(node))
    if name in ("randn", "randn_like"):
        return _normal(node)
    if name == "uniform":
        return _uniform(
            node, shape_of(node), dtype_of(node), argument(node, 1, "from", 0.0), argument(node, 2, "to", 1.0)
        )
    if name == "normal" and isinstance(first, fx.Node) and op_name(node) == "aten.normal_":
        return _normal(node, argument(node, 1, "mean", 0.0), argument(node, 2, "std", 1.0))
    if name == "exponential":
        return _exponential(node, float(argument(node, 1, "lambd", 1.0)))
    if name == "bernoulli":
        chance = argument(node, 1, "p", first if op_name(node) == "aten.bernoulli" else 0.5)
        return _bernoulli(node, shape_of(node), dtype_of(node), chance)
    if name == "feature_dropout":
        return _feature_dropout(node)
    if name in ("randint", "randint_like"):
        return _integers(node)
    return None


def _template(node: fx.Node, sizes: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
    return add(node, aten.full.default, (list(sizes), 0.0), {"dtype": dtype})


def _uniform(node: fx.Node, sizes: tuple[int, ...], dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> fx.Node:
    given = () if (low, high) == (0.0, 1.0) else (low, high)
    return add(node, kernels_random.uniform, (_template(node, sizes, dtype), *given))


def _normal(node: fx.Node, mean: float = 0.0, std: float = 1.0) -> fx.Node:
    given = () if (mean, std) == (0.0, 1.0) else (mean, std)
    return add(node, kernels_random.normal, (_template(node, shape_of(node), dtype_of(node)), *given))


def _exponential(node: fx.Node, rate: float) -> fx.Node:
    wide = torch.promote_types(dtype_of(node), torch.float32)  # of 16-bit numbers, one in 256 would be zero
    numbers = _uniform(node, shape_of(node), wide)
    logarithms = add(node, aten.log1p.default, (add(node, aten.neg.default, (numbers,)),))
    scaled = add(node, aten.mul.Tensor, (logarithms, -1.0 / rate))
    positive = add(node, aten.clamp_min.default, (scaled, torch.finfo(wide).eps / 2 / rate))  # never zero, as in torch
    return cast_like(node, positive)


def _bernoulli(node: fx.Node, sizes: tuple[int, ...], dtype: torch.dtype, chance: Any) -> fx.Node:
    """Return numbers that are one with a probability of ``chance`` (a number or a node), else zero."""
    if not isinstance(chance, fx.Node):
        return add(node, kernels_random.bernoulli, (_template(node, sizes, dtype), float(chance)))
    numbers = _uniform(node, sizes, torch.promote_types(dtype, torch.float32))  # 16 bits would round the chance
    return add(node, aten.to.dtype, (add(node, aten.lt.Tensor, (numbers, chance)), dtype))


def _feature_dropout(node: fx.Node) -> fx.Node:
    x, p, train = args_of(node)
    assert isinstance(x, fx.Node)
    if not train or p == 0.0:
        return x
    if p == 1.0:
        return add(node, aten.mul.Tensor, (x, 0.0))
    sizes = (*shape_of(x)[:2], *(1 for _ in shape_of(x)[2:]))
    kept = _bernoulli(node, sizes, dtype_of(x), 1.0 - p)
    return add(node, aten.mul.Tensor, (x, add(node, aten.div.Tensor, (kept, 1.0 - p))))


def _integers(node: fx.Node) -> fx.Node:
    overload = str(node.target).rsplit(".", 1)[1]
    bounds = [value for value in node.args if isinstance(value, int)]
    low, high = bounds[:2] if overload.startswith("low") else (0, bounds[0])
    numbers = _uniform(node, shape_of(node), torch.float64, float(low), float(high))  # exact up to 2**53
    return add(node, aten.to.dtype, (add(node, aten.floor.default, (numbers,)), dtype_of(node)))
