"""Finds the dims of a layer that may be padded, so that an axis can shard them although its size doesn't divide them.

A dim that comes only from parameters (a vocabulary, heads, a hidden width) may be padded: zeros are appended to the stored parameters, and
each rank's size is rounded up. Dims with the same letter in rules are padded together and form a **group**. The dims of a group are
multiples of its ``count`` (5 for five heads of width 8, although the projection's dim is 40), and padding increases the count.

A group may be padded if padding doesn't change the results of any op on its dims, forward or backward; ``padding_after`` decides that for
each op, and tracks whether the padding is zero or only finite. In a product that contracts the group, one factor's padding must be zero.
Gradients of a parameter's padding need not be zero (``sigmoid(0)`` isn't), so the program zeroes them before anything reads them.

The experts of a mixture are a group, too: no token chooses those that are appended. Batches and sequences are never padded, and neither is
a dim that a softmax, a norm or an unknown op reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import fx

from autopar.graph import LayerClass, cached_for_graphs
from autopar.ops.experts import FIRST_PARAMETER, Experts
from autopar.ops.facts import OpKind, aten_names, facts, op_name
from autopar.ops.fused import fused_op
from autopar.ops.meta import meta
from autopar.ops.operands import arguments, operands, shape_of
from autopar.plan import Axis
from autopar.rules.candidates import ShapedLine, bind, line_of, operand_shapes
from autopar.rules.notation import Dim
from autopar.sharding import AxisTypes

_ZERO_TO_ZERO = frozenset(
    aten_names("""
    view reshape _unsafe_view view_copy flatten unflatten squeeze unsqueeze permute transpose t movedim select slice narrow
    unbind split split_with_sizes chunk cat stack clone contiguous detach alias to _to_copy type_as dropout neg sum
    abs sign square sin sinh tan tanh asin atan erf expm1 log1p round floor ceil trunc
    gelu silu mish elu selu relu relu6 leaky_relu hardswish hardshrink softshrink
""")
) | {"_operator.getitem"}
"""Ops that map zero to zero, with a finite derivative at zero."""
_FINITE = frozenset(aten_names("expand expand_as broadcast_to sigmoid hardsigmoid cos cosh softplus log_sigmoid erfc"))
"""Ops that map finite values to finite values."""

NodeDim = tuple[str, int]
"""A dim of a value: the node's name and the dim."""


@dataclass(frozen=True)
class Padding:
    """The groups of a layer class that may be padded: each dim's group (an index), each group's count, and each node's tensor operands."""

    groups: dict[NodeDim, int]
    counts: tuple[int, ...]
    operands: dict[str, tuple[str, ...]]

    def multiples(self, axes: Sequence[Axis], types: Sequence[AxisTypes]) -> tuple[int, ...]:
        """Return for each group the product of the sizes of the axes that shard it. Padding makes the group's count a multiple of it."""
        multiples = [1] * len(self.counts)
        for axis, solution in zip(axes, types, strict=True):
            for group in self.sharded(solution) if axis.size > 1 else ():
                multiples[group] *= axis.size
        return tuple(multiples)

    def sharded(self, solution: AxisTypes) -> frozenset[int]:
        """Return the groups with at least one dim that ``solution`` shards."""
        typed = list(solution.produced.items())
        for name, types in solution.needed.items():
            typed += zip(self.operands[name], types, strict=True)
        groups = {self.groups.get((name, t.dim)) for name, t in typed if t.dim is not None}
        return frozenset(group for group in groups if group is not None)

    def is_needed(self, multiples: Sequence[int]) -> bool:
        """Return whether any group's count isn't divisible by its multiple."""
        return any(count % multiple for count, multiple in zip(self.counts, multiples, strict=True))

    def shape(self, name: str, shape: Iterable[int], multiples: Sequence[int]) -> tuple[int, ...]:
        """Return the padded shape of the value ``name``."""
        groups = [self.groups.get((name, dim)) for dim, _ in enumerate(shape)]
        return tuple(
            size if g is None else size // self.counts[g] * round_up(self.counts[g], multiples[g])
            for g, size in zip(groups, shape, strict=True)
        )


def round_up(count: int, multiple: int) -> int:
    """Round ``count`` up to a multiple of ``multiple``."""
    return -(-count // multiple) * multiple


@cached_for_graphs(maxsize=1024)
def padding(cls: LayerClass) -> Padding:
    """Return the groups of ``cls`` that may be padded."""
    return _Analysis(cls).result()


class _Analysis:
    """Groups dims (by union-find), then removes groups in which an op or the layer's interface fixes the size of a dim."""

    def __init__(self, cls: LayerClass) -> None:
        self.cls = cls
        self.parent: dict[NodeDim, NodeDim] = {}
        self.size: dict[NodeDim, int] = {}
        self.fixed: set[NodeDim] = set()
        self.lines: dict[str, ShapedLine] = {}
        self.nodes = [node for node in cls.graph.graph.nodes if node.op != "output"]
        self.zero: dict[NodeDim, bool] = {}  # whether the padding is zero

    def result(self) -> Padding:
        for node in self.nodes:
            value = meta(node).get("val")
            if value is not None and (hasattr(value, "shape") or isinstance(value, tuple | list)):
                for dim, size in enumerate(shape_of(node)):
                    self.parent[node.name, dim] = (node.name, dim)
                    self.size[node.name, dim] = size
        self._fix_interface()
        for node in self.nodes:
            if node.op == "call_function":
                self._group_dims(node)
        for node in self.nodes:
            if node.op == "call_function":
                self._propagate(node)
        members: dict[NodeDim, list[NodeDim]] = {}
        for node_dim in self.parent:
            members.setdefault(self._root(node_dim), []).append(node_dim)
        fixed = {self._root(dim) for dim in self.fixed}
        counts = {root: gcd(*(self.size[d] for d in dims)) for root, dims in members.items() if root not in fixed}
        roots = [root for root, count in counts.items() if count > 1]
        groups = {dim: index for index, root in enumerate(roots) for dim in members[root]}
        names = {n.name: tuple(o.name for o in operands(n)) for n in self.nodes if n.op == "call_function"}
        names |= {n.name: () for n in self.nodes if n.op != "call_function"}
        return Padding(groups, tuple(counts[root] for root in roots), names)

    def _root(self, dim: NodeDim) -> NodeDim:
        while self.parent[dim] != dim:
            self.parent[dim] = self.parent[self.parent[dim]]
            dim = self.parent[dim]
        return dim

    def _fix(self, node: fx.Node) -> None:
        self.fixed |= {(node.name, dim) for dim in range(len(shape_of(node)))}

    def _fix_interface(self) -> None:
        """Fix the sizes of outputs and of inputs other than parameters; mark the padding of parameters as zero."""
        inputs = [node for node in self.nodes if node.op == "placeholder"]
        weights = inputs[len(inputs) - len(self.cls.parameters) :]
        output = self.cls.graph.graph.output_node()
        for node in (*inputs[: len(inputs) - len(self.cls.parameters)], *output.all_input_nodes):
            self._fix(node)
        for node in weights:
            self.zero |= {(node.name, dim): True for dim in range(len(shape_of(node)))}

    def _group_dims(self, node: fx.Node) -> None:
        """Group dims with the same outermost letter; fix a dim if its letter is an inner letter of another dim, or may not be sharded."""
        line = line_of(node)
        if not operands(node) or line is None:
            for value in (node, *operands(node)):
                if (value.name, 0) in self.parent:
                    self._fix(value)
            return
        bound = bind(line, operand_shapes(node), shape_of(node), op_name(node))
        self.lines[node.name] = bound
        first: dict[str, NodeDim] = {}
        inner: set[str] = set()
        for value, dims in (*zip(operands(node), bound.operands, strict=True), (node, bound.result)):
            for dim, letters in enumerate(dims):
                node_dim = (value.name, dim)
                named = _letters(bound, letters)
                if not named:
                    if self.size[node_dim] > 1:
                        self.fixed.add(node_dim)
                    continue
                inner |= set(named[1:])
                self.parent[self._root(node_dim)] = self._root(first.setdefault(named[0], node_dim))
        self.fixed |= {node_dim for letter, node_dim in first.items() if letter in inner or letter in bound.fixed}

    def _propagate(self, node: fx.Node) -> None:
        """Fix the dims of letters for which the node doesn't allow padding; for the others record whether the result's padding is zero."""
        line = self.lines.get(node.name)
        if line is None:
            return
        values = operands(node)
        for letter in line.extents:
            dims = [_dim(line, operand, letter) for operand in line.operands]
            target = _dim(line, line.result, letter)
            zero = [
                None if dim is None else self.zero.get((v.name, dim), False)
                for v, dim in zip(values, dims, strict=True)
            ]
            # padded experts compute nothing, for no token chooses them
            after = _are_experts(node, dims) or padding_after(node, zero, target is not None)
            if after is None:
                self.fixed |= {(v.name, dim) for v, dim in zip(values, dims, strict=True) if dim is not None}
                self.fixed |= {(node.name, target)} if target is not None else set()
            elif target is not None:
                self.zero[node.name, target] = after


def _are_experts(node: fx.Node, dims: Sequence[int | None]) -> bool:
    """Return whether the dims of a letter, one for each operand, are the experts of a mixture."""
    given = [dim for dim in dims if dim is not None]
    return isinstance(node.target, Experts) and dims[:FIRST_PARAMETER] == [None] * FIRST_PARAMETER and set(given) == {0}


def padding_after(node: fx.Node, zero: Sequence[bool | None], in_result: bool) -> bool | None:
    """Return whether the result's padding along one dim is zero (``False``: only finite); ``None`` if the node doesn't allow padding.

    ``zero`` has the same for each operand, and ``None`` for an operand that lacks the dim. ``in_result`` is ``False`` for an op that sums
    over the dim: then ``True`` and ``False`` both mean that padding is allowed.
    """
    op = facts(node)
    name, kind = op.name, op.kind
    padded = [each for each in zero if each is not None]
    all_zero = all(padded) and len(padded) == len(zero)
    if kind is OpKind.PRODUCT or name == "aten.dot":
        added = op.added_operand
        factors = [each for i, each in enumerate(zero) if i != added or len(zero) < 3]
        product = any(each for each in factors if each is not None)
        terms = zero[added] if added is not None and len(zero) == 3 else True
        return product and bool(terms) if in_result else (True if product else None)
    if kind is OpKind.LOOKUP:
        return (None if zero[0] is None else zero[0]) if in_result else True
    if kind is OpKind.CLASS_LOSS:
        return True if zero[1] is None else None
    if (fused := fused_op(node)) is not None:
        return fused.padding_after(zero)
    if op.is_attention:
        masked = len(zero) > 3 and zero[3] is not None and meta(operands(node)[3])["val"].dtype == torch.bool
        return bool(zero[2]) if in_result and not masked else None
    if name in _ZERO_TO_ZERO:
        return all_zero if in_result or all_zero else None
    if not in_result:
        return None
    if name == "aten.hardtanh":
        given = arguments(node)
        return all_zero and given["min_val"] <= 0 <= given["max_val"]
    if name == "aten.pow":
        exponent = node.args[1]
        return all_zero if isinstance(exponent, int | float) and exponent >= 1 else None
    if name in _FINITE:
        return False
    if name == "aten.mul":
        return any(padded)
    if kind is OpKind.ADDITION:
        return all_zero and len(zero) == 2
    if name == "aten.div" and zero[0] is not None and not any(each is not None for each in zero[1:]):
        return zero[0] if isinstance(node.args[0], fx.Node) else None
    return None


def _letters(line: ShapedLine, dim: Dim) -> list[str]:
    """Return the letters of a dim with sizes above one, outermost first."""
    return [atom.letter for atom in dim if line.extents[atom.letter] > 1]


def _dim(line: ShapedLine, dims: tuple[Dim, ...], letter: str) -> int | None:
    """Return the index of the dim with ``letter`` as its outermost letter, or ``None``."""
    return next((i for i, dim in enumerate(dims) if _letters(line, dim)[:1] == [letter]), None)
