"""Evaluates constant nodes, which depend on neither inputs nor parameters, on the CPU at full size.

Equal rows along dim 0 become one row with stride 0, as in the result of ``expand``, and pointwise and row-wise ops compute it once: a table
that 1,024 rows of a batch share is computed as one row. Rows are compared bit by bit, and dim 0 need not have the batch's size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ops.facts import is_pointwise, is_random, op_name
from autopar.ops.meta import graph_meta, meta
from autopar.ops.operands import argument, shape_of, val
from passes.clean.nodes import aten, note

BUDGET_BYTES = 2**28
"""Maximum bytes of the result that an op computes; dims of stride 0 that it computes once count as one element."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TooLargeError(Exception):
    """A value or an intermediate result takes more than ``BUDGET_BYTES``."""


class Evaluator:
    """Evaluates constant nodes of ``gm``.

    ``values`` has the values of buffers by name. A floating buffer on meta gets increasing placeholder values, so that its rows don't seem
    equal; other dtypes get zeros. ``graph_meta(gm)["valueless"]`` names these buffers.
    """

    def __init__(self, gm: fx.GraphModule, values: Mapping[str, Tensor]) -> None:
        self.gm = gm
        self.values = values
        self.constant = constant_nodes(gm)
        self._memo: dict[fx.Node, Tensor | None] = {}

    def __call__(self, node: fx.Node) -> Tensor:
        """Return the node's value at full shape. Raises ``TooLargeError``."""
        for member in self.ancestors(node):
            if member not in self._memo:
                self._memo[member] = self._evaluate(member)
        value = self._memo[node]
        if value is None:
            raise TooLargeError(node.name)
        return value

    def ancestors(self, node: fx.Node) -> list[fx.Node]:
        """Return ``node`` and the nodes that it depends on, without those evaluated before, in topological order."""
        ordered: dict[fx.Node, None] = {}
        stack = [(node, False)]
        while stack:
            current, done = stack.pop()
            if done:
                ordered[current] = None
            elif current not in ordered and current not in self._memo:
                stack.append((current, True))
                stack.extend((operand, False) for operand in current.all_input_nodes if operand not in ordered)
        return list(ordered)

    def has_values(self, node: fx.Node) -> bool:
        """Return whether every buffer that the constant node depends on has values."""
        seen, stack = {node}, [node]
        while stack:
            current = stack.pop()
            if current.op == "placeholder" and meta(current)["buffer"] not in self.values:
                return False
            stack += [operand for operand in current.all_input_nodes if operand not in seen]
            seen.update(current.all_input_nodes)
        return True

    def _evaluate(self, node: fx.Node) -> Tensor | None:
        """Return the node's value, or ``None`` if it or an operand is too large."""
        if node.op == "get_attr":
            return _with_shared_rows(getattr(self.gm, str(node.target)))
        if node.op == "placeholder":
            return _with_shared_rows(self._buffer(node))
        if any(self._memo[operand] is None for operand in node.all_input_nodes):
            return None

        def evaluated(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return self._memo[value]
            if isinstance(value, tuple | list):
                return type(value)(evaluated(item) for item in value)
            return value

        args = evaluated(tuple(node.args))
        kwargs = {key: evaluated(value) for key, value in node.kwargs.items()}
        sizes = needed = shape_of(node)
        if node.target is aten.full.default:  # one element, whatever the size
            return aten.full.default([1] * len(sizes), *args[1:], **kwargs).expand(sizes)
        operands = [self._memo[operand] for operand in node.all_input_nodes]
        if (elementwise := elementwise_operands(node)) is not None:
            strip = {id(self._memo[operand]): stripped(self._memo[operand]) for operand in elementwise}
            args = _substitute(args, strip)
            needed = torch.broadcast_shapes(*(tensor.shape for tensor in strip.values())) if strip else sizes
        elif operands and by_rows(node) and all(value is not None and value.stride(0) == 0 for value in operands):
            args = _substitute(args, {id(value): value[:1] for value in operands if value is not None})
            needed = (1, *sizes[1:])
        elif op_name(node) == "aten.expand":  # a view, whatever the size
            needed = shape_of(node.all_input_nodes[0])
        if math.prod(needed) * val(node).dtype.itemsize > BUDGET_BYTES:
            return None
        target: Any = node.target
        with torch.no_grad():
            return _with_shared_rows(target(*args, **kwargs).expand(sizes))

    def _buffer(self, node: fx.Node) -> Tensor:
        name = meta(node)["buffer"]
        if name in self.values:
            return self.values[name]
        note(self.gm, f"buffer {name} has no values (the model is on meta): no program can be written from this graph")
        graph_meta(self.gm).setdefault("valueless", {})[name] = None
        made = val(node)
        if not made.is_floating_point():
            return torch.zeros(made.shape, dtype=made.dtype)
        return torch.linspace(0.5, 1.0, max(made.numel(), 1), dtype=torch.float64).to(made.dtype).view(made.shape)


def constant_nodes(gm: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes that depend on no input, parameter, written buffer or random number."""
    constant: set[fx.Node] = set()
    for node in gm.graph.nodes:
        leaf = node.op == "get_attr" or (
            node.op == "placeholder" and "buffer" in meta(node) and "state" not in meta(node)
        )
        call = node.op == "call_function" and not is_random(node) and isinstance(meta(node).get("val"), Tensor)
        if leaf or (call and all(n in constant for n in node.all_input_nodes)):
            constant.add(node)
    return constant


def elementwise_operands(node: fx.Node) -> list[fx.Node] | None:
    """Return the operands that broadcast to the node's shape if the op is elementwise, else ``None``.

    ``index`` with an integer tensor for each dim of its source counts as elementwise in the indices.
    """
    if is_pointwise(node):
        return node.all_input_nodes
    if op_name(node) == "aten.index" and isinstance(node.args[0], fx.Node):
        indices: Any = node.args[1]
        whole = len(indices) == len(shape_of(node.args[0])) and all(isinstance(index, fx.Node) for index in indices)
        if whole and not any(val(index).dtype in (torch.bool, torch.uint8) for index in indices):
            return list(dict.fromkeys(indices))
    return None


_DIM_ARGUMENTS = {
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "softmax", "log_softmax", "cat"), ("dim", 1, 0)),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "any", "all", "argmax", "argmin", "flip"), ("dim", 1, None)),
    "diff": ("dim", 2, -1),
}
"""Op -> the name, position and default (``None``: all dims) of the argument that selects the dims along which the op works."""


def by_rows(node: fx.Node) -> bool:
    """Return whether the op acts on each row along dim 0 independently; ``False`` for pointwise and unknown ops."""
    name, sizes = op_name(node).removeprefix("aten."), shape_of(node)
    shapes = [shape_of(operand) for operand in node.all_input_nodes]
    if not sizes or any(own[:1] != sizes[:1] for own in shapes):
        return False
    if name in ("matmul", "bmm"):
        return all(len(own) == len(sizes) >= 3 for own in shapes)
    if name not in _DIM_ARGUMENTS:
        return False
    key, position, default = _DIM_ARGUMENTS[name]
    dims = argument(node, position, key, default)
    if dims is None:
        return False
    rank = len(shapes[0])
    return all(dim % rank != 0 for dim in (dims if isinstance(dims, list | tuple) else [dims]))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of equal dtype and shape have equal bits: 0.0 and -0.0 differ, a NaN equals itself."""
    return torch.equal(_as_integers(one), _as_integers(other))


def _as_integers(value: Tensor) -> Tensor:
    value = value.resolve_conj().resolve_neg()
    if value.is_complex():
        value = torch.view_as_real(value)
    return value.view(_INTEGERS[value.dtype.itemsize]) if value.is_floating_point() else value


def _with_shared_rows(value: Tensor) -> Tensor:
    """Return ``value``, with stride 0 along dim 0 if its rows are equal."""
    value = value.detach()
    if value.dim() == 0 or value.shape[0] < 2 or value.stride(0) == 0:
        return value
    bare = stripped(value)
    first = bare[:1]
    return first.expand(value.shape) if same_bits(bare[1:], first.expand(bare[1:].shape)) else value


def stripped(value: Tensor | None) -> Tensor:
    """Return ``value`` with each dim of stride 0 narrowed to one element."""
    assert value is not None
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        if stride == 0 and size > 1:
            value = value.narrow(dim, 0, 1)
    return value


def _substitute(value: Any, by_identity: Mapping[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return by_identity.get(id(value), value)
    if isinstance(value, tuple | list):
        return type(value)(_substitute(item, by_identity) for item in value)
    return value
