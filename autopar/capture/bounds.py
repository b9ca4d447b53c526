"""Evaluates a constant expression block by block: proved bounds of a block's elements, or the elements themselves.

A long sequence's mask has more elements than fit into memory, but comparing two numbers decides nearly every block: if the largest key
position is at most the smallest query position, ``key <= query`` is true throughout. ``Blocks.bounds`` computes such bounds by interval
arithmetic (Moore, Interval Analysis, 1966): it applies the node's op, in the node's dtype, to the ends of the operands' intervals, so that
bounds are rounded like elements. Ops that may have extremes inside an interval (even ``exp``, whose last digit isn't monotone) have no
bounds unless their operands are single numbers. ``Blocks.elements`` computes a block's elements.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture.evaluate import Evaluator, elementwise_operands, stripped
from autopar.ops.facts import OpKind, facts, op_name
from autopar.ops.operands import args_of, argument, shape_of, val

SMALL = 2**16
"""Nodes of up to this many elements are evaluated in full."""

Block = tuple[tuple[int, int], ...]
"""(start, stop) along each dim."""

# Monotone in each operand (with the others fixed), or linear in each: the extremes over a box are at its corners.
_AT_CORNERS = frozenset(
    f"aten.{name}"
    for name in (
        "add", "sub", "rsub", "mul", "neg", "minimum", "maximum", "clamp", "clamp_min", "clamp_max", "clip", "lt", "le", "gt", "ge",
        "to", "floor", "ceil", "round", "trunc", "sqrt", "relu",
    )
)  # fmt: skip
# monotone for booleans only
_LOGICAL = frozenset(f"aten.{kind}_{name}" for kind in ("bitwise", "logical") for name in ("and", "or", "not"))
_PERMUTATIONS = frozenset(("aten.transpose", "aten.t", "aten.permute"))


class Blocks:
    """Bounds and elements of blocks of constant nodes. Results are cached until ``clear_cache`` is called.

    Raises ``TooLargeError`` for a node that can't be evaluated by blocks and is too large to be evaluated in full.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._full_values: dict[fx.Node, Tensor] = {}
        self._bounds: dict[tuple[fx.Node, Block], tuple[Tensor, Tensor] | None] = {}
        self._elements: dict[tuple[fx.Node, Block], Tensor] = {}

    def clear_cache(self) -> None:
        """Clear the cache before the next block."""
        self._bounds.clear()
        self._elements.clear()

    def bounds(self, node: fx.Node, block: Block) -> tuple[Tensor, Tensor] | None:
        """Return a lower and an upper bound of the block's elements, as 0-d tensors; ``None`` if unknown."""
        key = (node, block)
        if key not in self._bounds:
            self._bounds[key] = self._compute_bounds(node, block)
        return self._bounds[key]

    def elements(self, node: fx.Node, block: Block) -> Tensor:
        """Return the block's elements; a dim along which they are equal may have size 1."""
        key = (node, block)
        if key not in self._elements:
            self._elements[key] = self._evaluate_block(node, block)
        return self._elements[key]

    def _compute_bounds(self, node: fx.Node, block: Block) -> tuple[Tensor, Tensor] | None:
        if self._evaluate_in_full(node):
            return _extremes(self.elements(node, block))
        if (source := _source_block(node, block)) is not None:
            return self.bounds(*source)
        name = op_name(node)
        if name == "aten.full":
            return _extremes(self.elements(node, block))
        if name in ("aten.tril", "aten.triu"):
            return self._triangular_bounds(node, block)
        if name == "aten.index" and elementwise_operands(node) is not None:
            source_node = args_of(node)[0]
            return self.bounds(source_node, tuple((0, size) for size in shape_of(source_node)))
        operands = {operand: self.bounds(operand, _broadcast_block(operand, block)) for operand in node.all_input_nodes}
        known = {operand: ends for operand, ends in operands.items() if ends is not None}
        if name == "aten.where" and len(node.args) == 3:
            return self._where_bounds(node, operands)
        if len(known) < len(operands):
            return None
        if all(torch.equal(low, high) for low, high in known.values()):
            return _extremes(_apply(node, {operand: low for operand, (low, _) in known.items()}))
        if name in ("aten.eq", "aten.ne"):
            return self._eq_bounds(node, known)
        if name == "aten.abs":
            low, high = known[node.all_input_nodes[0]]
            ends = _extremes(torch.stack((low, high)).abs())
            return ends if ends is None or bool(low > 0) or bool(high < 0) else (torch.zeros_like(low), ends[1])
        if name == "aten.floor_divide" or (name == "aten.div" and node.kwargs.get("rounding_mode") in (None, "floor")):
            divisor = args_of(node)[1]
            low, high = known[divisor] if isinstance(divisor, fx.Node) else (torch.tensor(divisor),) * 2
            return _at_corners(node, known) if bool(low > 0) or bool(high < 0) else None
        if name in _LOGICAL:
            return _at_corners(node, known) if all(ends[0].dtype == torch.bool for ends in known.values()) else None
        if name == "aten.to" and val(node).dtype == torch.bool:
            low, high = known[node.all_input_nodes[0]]
            return (torch.tensor(True),) * 2 if bool(low > 0) or bool(high < 0) else None
        return _at_corners(node, known) if name in _AT_CORNERS else None

    def _triangular_bounds(self, node: fx.Node, block: Block) -> tuple[Tensor, Tensor] | None:
        ends = self.bounds(args_of(node)[0], block)
        (top, bottom), (left, right) = block[-2:]
        diagonal = argument(node, 1, "diagonal", 0)
        lower = op_name(node) == "aten.tril"
        # the kept elements have column - row <= diagonal (tril), or >= diagonal (triu)
        least, most = left - (bottom - 1), (right - 1) - top
        if (most <= diagonal) if lower else (least >= diagonal):
            return ends
        zero = torch.zeros((), dtype=val(node).dtype)
        if (least > diagonal) if lower else (most < diagonal):
            return zero, zero
        return None if ends is None else (torch.minimum(ends[0], zero), torch.maximum(ends[1], zero))

    def _where_bounds(self, node: fx.Node, operands: dict[fx.Node, Any]) -> tuple[Tensor, Tensor] | None:
        condition, *branches = args_of(node)
        condition_ends = operands[condition]
        if condition_ends is not None and torch.equal(*condition_ends):
            branches = [branches[0] if bool(condition_ends[0]) else branches[1]]
        dtype = val(node).dtype
        found = [operands[b] if isinstance(b, fx.Node) else (torch.tensor(b, dtype=dtype),) * 2 for b in branches]
        if any(ends is None for ends in found):
            return None
        return _extremes(torch.stack([end.to(dtype) for ends in found for end in ends]))

    def _eq_bounds(self, node: fx.Node, known: dict[fx.Node, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor] | None:
        """Return the bounds of ``eq`` or ``ne`` if the operands' bounds don't overlap, else ``None``."""
        first, second = (known[a] if isinstance(a, fx.Node) else (torch.tensor(a),) * 2 for a in args_of(node)[:2])
        if not (bool(first[1] < second[0]) or bool(second[1] < first[0])):
            return None
        differ = torch.tensor(op_name(node) == "aten.ne")
        return differ, differ

    def _evaluate_block(self, node: fx.Node, block: Block) -> Tensor:
        if self._evaluate_in_full(node):
            value = self._full_values[node]
            for dim, (start, stop) in enumerate(block):
                if value.shape[dim] > 1:
                    value = value.narrow(dim, start, stop - start)
            return value
        if (source := _source_block(node, block)) is not None:
            return _apply_view(node, self.elements(*source))
        name = op_name(node)
        if name == "aten.full":
            fill = args_of(node)[1]
            return torch.full((1,) * len(block), fill, dtype=val(node).dtype)
        if name in ("aten.tril", "aten.triu"):
            source_values = self.elements(args_of(node)[0], block)
            (top, bottom), (left, right) = block[-2:]
            offset = torch.arange(left, right) - torch.arange(top, bottom)[:, None]
            diagonal = argument(node, 1, "diagonal", 0)
            kept = offset <= diagonal if name == "aten.tril" else offset >= diagonal
            return torch.where(kept, source_values, torch.zeros((), dtype=source_values.dtype))
        operands = elementwise_operands(node)
        assert operands is not None, node
        found = {operand: self.elements(operand, _broadcast_block(operand, block)) for operand in operands}
        if name == "aten.index":
            source_node = args_of(node)[0]
            found[source_node] = self.elements(source_node, tuple((0, size) for size in shape_of(source_node)))
        return _apply(node, found)

    def _evaluate_in_full(self, node: fx.Node) -> bool:
        """Evaluate the node in full if it is small, stored, or of an op that can't compute a single block; return whether it was."""
        if node not in self._full_values and (
            node.op != "call_function" or val(node).numel() <= SMALL or not _has_block_rule(node)
        ):
            self._full_values[node] = stripped(self._evaluator(node))
        return node in self._full_values


def _has_block_rule(node: fx.Node) -> bool:
    name = op_name(node)
    if name in ("aten.full", "aten.tril", "aten.triu") or elementwise_operands(node) is not None:
        return True
    return _source_block(node, tuple((0, size) for size in shape_of(node))) is not None


def _broadcast_block(operand: fx.Node, block: Block) -> Block:
    """Return the block of a broadcast operand that an elementwise op reads for ``block`` of its result."""
    sizes = shape_of(operand)
    aligned = block[len(block) - len(sizes) :]
    return tuple((0, 1) if size == 1 else ends for size, ends in zip(sizes, aligned, strict=True))


def _source_block(node: fx.Node, block: Block) -> tuple[fx.Node, Block] | None:
    """Return the operand of an op that only moves elements, and the operand's block that becomes ``block``; ``None`` for other ops."""
    name = op_name(node)
    source = args_of(node)[0] if node.args and isinstance(args_of(node)[0], fx.Node) else None
    if source is None:
        return None
    sizes = shape_of(source)
    if facts(node).kind in (OpKind.IDENTITY, OpKind.DETACH):
        return source, block
    if name == "aten.expand":
        return source, _broadcast_block(source, block)
    if name in _PERMUTATIONS:
        order = _permutation(node)
        source_block: list[tuple[int, int]] = [(0, 0)] * len(block)
        for position, dim in enumerate(order):
            source_block[dim] = block[position]
        return source, tuple(source_block)
    if name == "aten.unsqueeze":
        dim = args_of(node)[1] % len(block)
        return source, (*block[:dim], *block[dim + 1 :])
    if name == "aten.slice" and argument(node, 4, "step", 1) == 1:
        dim = argument(node, 1, "dim", 0) % len(sizes)
        first = slice(argument(node, 2, "start"), argument(node, 3, "end")).indices(sizes[dim])[0]
        start, stop = block[dim]
        return source, (*block[:dim], (start + first, stop + first), *block[dim + 1 :])
    if name == "aten.select":
        dim, index = args_of(node)[1] % len(sizes), args_of(node)[2] % sizes[args_of(node)[1] % len(sizes)]
        return source, (*block[:dim], (index, index + 1), *block[dim:])
    if name in ("aten.reshape", "aten.view") and _without_ones(sizes) == _without_ones(shape_of(node)):
        rest = iter(ends for ends, size in zip(block, shape_of(node), strict=True) if size != 1)
        return source, tuple((0, 1) if size == 1 else next(rest) for size in sizes)
    return None


def _permutation(node: fx.Node) -> list[int]:
    """Return the operand's dim for each dim of a permutation's result."""
    rank = len(shape_of(node))
    order = list(range(rank))
    if op_name(node) == "aten.permute":
        return [dim % rank for dim in args_of(node)[1]]
    first, second = (0, rank - 1) if op_name(node) == "aten.t" else (dim % rank for dim in args_of(node)[1:3])
    order[first], order[second] = order[second], order[first]
    return order


def _apply_view(node: fx.Node, elements: Tensor) -> Tensor:
    """Apply an op that only moves elements to the elements of a block of its operand."""
    name = op_name(node)
    if name in _PERMUTATIONS:
        return elements.permute(_permutation(node))
    if name == "aten.unsqueeze":
        return elements.unsqueeze(args_of(node)[1])
    if name == "aten.select":
        return elements.select(args_of(node)[1], 0)
    if name in ("aten.reshape", "aten.view"):
        kept = iter(n for n, size in zip(elements.shape, shape_of(args_of(node)[0]), strict=True) if size != 1)
        return elements.reshape([1 if size == 1 else next(kept) for size in shape_of(node)])
    if name == "aten.expand":
        return elements.reshape((1,) * (len(shape_of(node)) - elements.dim()) + tuple(elements.shape))
    return elements


def _without_ones(sizes: tuple[int, ...]) -> list[int]:
    return [size for size in sizes if size != 1]


def _at_corners(node: fx.Node, known: dict[fx.Node, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor] | None:
    """Return the op's extremes over all combinations of its operands' interval ends. 0-d operands stay 0-d for type promotion.

    Returns ``None`` if the op takes an operand twice: ``d * d`` isn't linear in ``d``.
    """
    operands: list[fx.Node] = []
    torch.fx.node.map_arg((node.args, dict(node.kwargs)), operands.append)
    if len(operands) > len(known):
        return None
    corners = list(itertools.product((0, 1), repeat=len(known)))
    values = {}
    for position, (operand, ends) in enumerate(known.items()):
        if torch.equal(*ends) and not shape_of(operand):
            values[operand] = ends[0]
        else:
            values[operand] = torch.stack([ends[corner[position]] for corner in corners])
    result = _apply(node, values)
    if not result.is_floating_point() and result.dtype != torch.bool:
        wide = _apply(node, {operand: value.double() for operand, value in values.items()}) if known else result
        limits = torch.iinfo(result.dtype)
        if op_name(node) != "aten.to" and not bool(((wide >= limits.min) & (wide <= limits.max)).all()):
            return None  # the integers overflow
        if op_name(node) == "aten.to" and not torch.equal(
            result.double(), next(iter(values.values())).double().trunc()
        ):
            return None
    return _extremes(result)


def _apply(node: fx.Node, values: dict[fx.Node, Tensor]) -> Tensor:
    target: Any = node.target
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: values[n])
    with torch.no_grad():
        return target(*args, **kwargs)


def _extremes(values: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the least and the largest element; ``None`` for an empty or complex tensor, or if there is a NaN."""
    if values.numel() == 0 or values.is_complex() or (values.is_floating_point() and bool(values.isnan().any())):
        return None
    return values.amin(), values.amax()
