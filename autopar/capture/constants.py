"""Folds nodes that depend on no input, parameter, written buffer or random number: position ids, rotary tables, masks.

Constants are evaluated on the CPU at full size (``evaluate``). A constant with equal rows along dim 0 is stored as one row, which an
``expand`` repeats, so that the batch can still be sharded. Attention masks are recognised first (``masks``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from autopar.capture.evaluate import Evaluator, TooLargeError, constant_nodes, same_bits
from autopar.capture.layers import identifier, unique
from autopar.ops.facts import op_name
from autopar.ops.meta import meta
from autopar.ops.operands import args_of, dtype_of, shape_of, val
from autopar.ops.source import source_name
from passes.clean.nodes import add, aten, calls, has_gradient, like, replace

# a larger table stays in the layer's graph, which computes it from small constants and can shard it
LIMIT_BYTES = 16 * 2**20


def share_constants(gm: fx.GraphModule) -> None:
    """Merge equal constant expressions, such as the position ids that every layer computes."""
    seen: dict[Any, fx.Node] = {}
    constant = constant_nodes(gm)
    for node in calls(gm):
        if node in constant:
            key = (node.target, _freeze(node.args), _freeze(node.kwargs))
            if key in seen:
                replace(node, seen[key])
            else:
                seen[key] = node


def _freeze(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _freeze(item)) for key, item in sorted(value.items()))
    if isinstance(value, tuple | list):
        return tuple(_freeze(item) for item in value)
    return (type(value), value.hex() if isinstance(value, float) else value)  # 0.0 and -0.0 are equal, NaN isn't


def fold_constants(gm: fx.GraphModule, evaluator: Evaluator) -> dict[str, torch.Tensor]:
    """Replace constants by placeholders (``meta["constant"]``) where a node that isn't folded reads them; return their values by name."""
    constants: dict[str, torch.Tensor] = {}
    # compute all values before replacing any: a node that is too large to fold may lie between two constants, and keeps its inputs
    values = {node: value for node in gm.graph.nodes if (value := _value_to_fold(evaluator, node)) is not None}
    for node, value in values.items():
        readers = [user for user in node.users if user not in values]
        if not readers:
            continue
        stored = _first_of_equal_rows(value)
        new = _placeholder(gm, constants, node, stored)
        if stored is not value:
            new = add(_first_call(gm), aten.expand.default, (new, list(shape_of(node))), origin=node)
        for reader in readers:
            reader.replace_input_with(node, new)
    return constants


def _value_to_fold(evaluator: Evaluator, node: fx.Node) -> torch.Tensor | None:
    """Return a constant node's value if it is small enough to store, or the model's own tensor, else ``None``."""
    if node not in evaluator.constant:
        return None
    if node.op != "call_function":
        return evaluator(node) if node.users else None  # whatever its size: no op can compute it in a layer
    tensor = val(node)
    rows = tensor.shape[0] if tensor.dim() else 1
    if tensor.numel() * tensor.dtype.itemsize > LIMIT_BYTES * max(rows, 1):
        return None  # too large even as a single row
    try:
        value = evaluator(node)
    except TooLargeError:
        return None
    stored = _first_of_equal_rows(value)
    return value if stored.numel() * stored.itemsize <= LIMIT_BYTES else None


def _first_of_equal_rows(value: torch.Tensor) -> torch.Tensor:
    """Return the part of a constant that is stored: all of it, or the first row if all rows are views of the same memory."""
    return value[:1] if value.dim() > 0 and value.shape[0] > 1 and value.stride(0) == 0 else value


def _placeholder(gm: fx.GraphModule, constants: dict[str, torch.Tensor], node: fx.Node, value: torch.Tensor) -> fx.Node:
    """Return a placeholder for ``value``: an existing one with an equal value, or a new one."""
    for other in gm.graph.nodes:
        if other.op != "placeholder":
            break
        name = meta(other).get("constant")
        known = constants[name] if name is not None else None
        if known is not None and (known.dtype, known.shape) == (value.dtype, value.shape) and same_bits(known, value):
            return other
    name = unique(identifier(source_name(node)), {*constants, *dir(nn.Module)}, separator="_")
    constants[name] = value.resolve_conj().resolve_neg().contiguous().clone()
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        placeholder = gm.graph.placeholder(name)
    meta(placeholder)["constant"] = name
    meta(placeholder)["val"] = like(constants[name])
    return placeholder


def _first_call(gm: fx.GraphModule) -> fx.Node:
    return next(n for n in gm.graph.nodes if n.op != "placeholder")


def simplify_constants(gm: fx.GraphModule, constants: dict[str, torch.Tensor]) -> None:
    """Simplify ``x & True``, ``x | False``, ``where(True, a, b)`` and ``where(False, a, b)``: all elements of the constant are equal.

    A ``where`` stays if its other branch needs a gradient: zeros, with which the optimizer updates a parameter.
    """
    gradient: dict[fx.Node, bool] = {}
    for node in gm.graph.nodes:
        gradient[node] = has_gradient(node, gradient.__getitem__)

    def uniform(argument: Any) -> bool | None:
        while isinstance(argument, fx.Node) and argument.target is aten.expand.default:
            argument = args_of(argument)[0]
        name = meta(argument).get("constant") if isinstance(argument, fx.Node) else None
        if name is None or constants[name].dtype != torch.bool:
            return None
        value = constants[name]
        return True if bool(value.all()) else False if not bool(value.any()) else None

    neutral: dict[str, bool] = {
        "aten.bitwise_and": True,
        "aten.logical_and": True,
        "aten.bitwise_or": False,
        "aten.logical_or": False,
    }
    for node in calls(gm):
        name, result = op_name(node), None
        if name in neutral and dtype_of(node) == torch.bool:
            for constant, other in (args_of(node)[:2], args_of(node)[1::-1]):
                if uniform(constant) is neutral[name] and isinstance(other, fx.Node):
                    result = other
        elif name == "aten.where" and len(node.args) == 3 and (condition := uniform(args_of(node)[0])) is not None:
            result, dropped = args_of(node)[1:] if condition else args_of(node)[:0:-1]
            if isinstance(dropped, fx.Node) and gradient.get(dropped, True):
                continue
        if isinstance(result, fx.Node) and dtype_of(result) == dtype_of(node):
            shape = shape_of(node)
            if shape_of(result) != shape:
                result = add(node, aten.expand.default, (result, list(shape)))
            replace(node, result)


def used_constants(gm: fx.GraphModule, constants: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the constants that ``gm`` still has placeholders for."""
    names = {meta(n)["constant"] for n in gm.graph.nodes if n.op == "placeholder" and "constant" in meta(n)}
    return {name: value for name, value in constants.items() if name in names}
