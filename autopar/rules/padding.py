"""Finds the dims of a layer that may be padded, so that an axis can shard them although its size doesn't divide them.

A dim that only parameters bring into a layer (a vocabulary, heads, a hidden width) need not be divisible: its parameters are stored with
zeros after their end, and the local size is rounded up, if no later result changes. Dims with the same letter in rules grow together and
form a **group**. Its ``count`` is the number of units that every dim of the group is a multiple of (5 for five heads of width 8, although
the projection's dim is 40); padding adds units.

A group may be padded if every op on it gives the same results with padding; ``carried`` decides that for each op. The analysis tracks
whether elements beyond the end are zero or merely finite. A product summed over the group needs one factor that is zero there. Then the
elements before the end are those of the model, forward and backward. Gradients of a parameter's padding need not be zero (``sigmoid(0)``
isn't), so the program zeroes them before anything reads them.

Batches and sequences are never padded, and neither is a dim with a softmax, a norm or an unknown op on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import fx

from autopar.graph import LayerClass, cached_for_graphs
from autopar.ops.facts import OpKind, aten_names, facts, op_name
from autopar.ops.meta import meta
from autopar.ops.operands import operands, shape_of
from autopar.ops.own import own_op
from autopar.plan import Axis
from autopar.rules.candidates import ShapedLine, bind, line_of, operand_shapes
from autopar.rules.notation import Dim
from autopar.sharding import AxisTypes

_KEEP = frozenset(
    aten_names("""
    view reshape _unsafe_view view_copy flatten unflatten squeeze unsqueeze permute transpose t movedim select slice narrow
    unbind split split_with_sizes chunk cat stack clone contiguous detach alias to _to_copy type_as dropout neg sum
    abs sign square sin sinh tan tanh asin atan erf expm1 log1p round floor ceil trunc
    gelu silu mish elu selu relu relu6 leaky_relu hardswish hardtanh hardshrink softshrink
""")
) | {"_operator.getitem"}
"""Ops that map zero to zero, with a finite derivative there."""
_BOUNDED = frozenset(aten_names("expand expand_as broadcast_to sigmoid hardsigmoid cos cosh softplus log_sigmoid erfc"))
"""Ops that map finite values to finite values."""

Place = tuple[str, int]
"""A dim of a value: the node's name and the dim."""


@dataclass(frozen=True)
class Padding:
    """The groups of a layer class that may be padded, by dim, and each group's ``count``. ``reads`` maps nodes to their tensor operands."""

    groups: dict[Place, int]
    counts: tuple[int, ...]
    reads: dict[str, tuple[str, ...]]

    def multiples(self, axes: Sequence[Axis], types: Sequence[AxisTypes]) -> tuple[int, ...]:
        """Return for every group the product of the sizes of the axes that shard one of its dims."""
        found = [1] * len(self.counts)
        for axis, solution in zip(axes, types, strict=True):
            for group in self.sharded(solution) if axis.size > 1 else ():
                found[group] *= axis.size
        return tuple(found)

    def sharded(self, solution: AxisTypes) -> frozenset[int]:
        """Return the groups with a dim that these types shard."""
        places = [(name, t) for name, t in solution.produced.items()]
        for name, types in solution.needed.items():
            places += zip(self.reads[name], types, strict=True)
        found = {self.groups.get((name, t.dim)) for name, t in places if t.dim is not None}
        return frozenset(group for group in found if group is not None)

    def grows(self, multiples: Sequence[int]) -> bool:
        """Whether anything is padded."""
        return any(count % multiple for count, multiple in zip(self.counts, multiples, strict=True))

    def shape(self, name: str, shape: Iterable[int], multiples: Sequence[int]) -> tuple[int, ...]:
        """The padded shape of the value ``name``."""
        groups = [self.groups.get((name, dim)) for dim, _ in enumerate(shape)]
        return tuple(
            size if g is None else size // self.counts[g] * padded(self.counts[g], multiples[g])
            for g, size in zip(groups, shape, strict=True)
        )


def padded(count: int, multiple: int) -> int:
    """Round ``count`` up to a multiple."""
    return -(-count // multiple) * multiple


@cached_for_graphs(maxsize=1024)
def padding(cls: LayerClass) -> Padding:
    """The groups of ``cls`` that may be padded."""
    return _Analysis(cls).result()


class _Analysis:
    """Groups dims, then removes groups that some op doesn't allow to be padded."""

    def __init__(self, cls: LayerClass) -> None:
        self.cls = cls
        self.parent: dict[Place, Place] = {}
        self.size: dict[Place, int] = {}
        self.fixed: set[Place] = set()
        self.bounds: dict[str, ShapedLine] = {}
        self.nodes = [node for node in cls.graph.graph.nodes if node.op != "output"]
        self.zero: dict[Place, bool] = {}  # whether the elements beyond the end are zero

    def result(self) -> Padding:
        for node in self.nodes:
            value = meta(node).get("val")
            if value is not None and (hasattr(value, "shape") or isinstance(value, tuple | list)):
                for dim, size in enumerate(shape_of(node)):
                    self.parent[node.name, dim] = (node.name, dim)
                    self.size[node.name, dim] = size
        self._borders()
        for node in self.nodes:
            if node.op == "call_function":
                self._tie(node)
        for node in self.nodes:
            if node.op == "call_function":
                self._carry(node)
        members: dict[Place, list[Place]] = {}
        for place in self.parent:
            members.setdefault(self._find(place), []).append(place)
        broken = {self._find(place) for place in self.fixed}
        found = {root: gcd(*(self.size[p] for p in places)) for root, places in members.items() if root not in broken}
        roots = [root for root, count in found.items() if count > 1]
        groups = {place: index for index, root in enumerate(roots) for place in members[root]}
        reads = {n.name: tuple(o.name for o in operands(n)) for n in self.nodes if n.op == "call_function"}
        reads |= {n.name: () for n in self.nodes if n.op != "call_function"}
        return Padding(groups, tuple(found[root] for root in roots), reads)

    def _find(self, place: Place) -> Place:
        while self.parent[place] != place:
            self.parent[place] = self.parent[self.parent[place]]
            place = self.parent[place]
        return place

    def _fix(self, node: fx.Node) -> None:
        self.fixed |= {(node.name, dim) for dim in range(len(shape_of(node)))}

    def _borders(self) -> None:
        """Fix the sizes of values that don't come from parameters, and of values that leave the layer."""
        inputs = [node for node in self.nodes if node.op == "placeholder"]
        weights = inputs[len(inputs) - len(self.cls.parameters) :]
        output = self.cls.graph.graph.output_node()
        for node in (*inputs[: len(inputs) - len(self.cls.parameters)], *output.all_input_nodes):
            self._fix(node)
        for node in weights:
            self.zero |= {(node.name, dim): True for dim in range(len(shape_of(node)))}

    def _tie(self, node: fx.Node) -> None:
        """Group dims with the same outermost letter, and fix those whose letter is an inner one anywhere."""
        line = line_of(node)
        if not operands(node) or line is None:
            for value in (node, *operands(node)):
                if (value.name, 0) in self.parent:
                    self._fix(value)
            return
        bound = bind(line, operand_shapes(node), shape_of(node), op_name(node))
        self.bounds[node.name] = bound
        first: dict[str, Place] = {}
        inner: set[str] = set()
        for value, dims in (*zip(operands(node), bound.operands, strict=True), (node, bound.result)):
            for dim, letters in enumerate(dims):
                place = (value.name, dim)
                named = _letters(bound, letters)
                if not named:
                    if self.size[place] > 1:
                        self.fixed.add(place)
                    continue
                inner |= set(named[1:])
                self.parent[self._find(place)] = self._find(first.setdefault(named[0], place))
        self.fixed |= {place for letter, place in first.items() if letter in inner or letter in bound.fixed}

    def _carry(self, node: fx.Node) -> None:
        """Check whether the node allows padding of each letter, and record whether the result is zero beyond its end."""
        bound = self.bounds.get(node.name)
        if bound is None:
            return
        given = operands(node)
        for letter in bound.extents:
            at = [_dim(bound, dims, letter) for dims in bound.operands]
            target = _dim(bound, bound.result, letter)
            given_zero = [
                None if dim is None else self.zero.get((v.name, dim), False) for v, dim in zip(given, at, strict=True)
            ]
            after = carried(node, given_zero, target is not None)
            if after is None:
                self.fixed |= {(v.name, dim) for v, dim in zip(given, at, strict=True) if dim is not None}
                self.fixed |= {(node.name, target)} if target is not None else set()
            elif target is not None:
                self.zero[node.name, target] = after


def carried(node: fx.Node, beyond: Sequence[bool | None], in_result: bool) -> bool | None:
    """Whether the result is zero beyond its end (``False``: finite); ``None`` if the node doesn't allow padding.

    ``beyond``: whether each operand is zero beyond its end, or ``None`` if it lacks the dim. For an op that sums over the dim, ``True``
    and ``False`` mean the same.
    """
    op = facts(node)
    name, kind = op.name, op.kind
    zeros = [zero for zero in beyond if zero is not None]
    everywhere = all(zeros) and len(zeros) == len(beyond)
    if kind is OpKind.PRODUCT or name == "aten.dot":
        added = op.added_operand
        factors = [zero for i, zero in enumerate(beyond) if i != added or len(beyond) < 3]
        product = any(zero for zero in factors if zero is not None)
        terms = beyond[added] if added is not None and len(beyond) == 3 else True
        return product and bool(terms) if in_result else (True if product else None)
    if kind is OpKind.LOOKUP:
        return (None if beyond[0] is None else beyond[0]) if in_result else True
    if kind is OpKind.CLASS_LOSS:
        return True if beyond[1] is None else None
    if (own := own_op(node)) is not None:
        return own.beyond(beyond)
    if op.is_attention:
        masked = len(beyond) > 3 and beyond[3] is not None and meta(operands(node)[3])["val"].dtype == torch.bool
        return bool(beyond[2]) if in_result and not masked else None
    if name in _KEEP:
        return everywhere if in_result or everywhere else None
    if not in_result:
        return None
    if name == "aten.pow":
        exponent = node.args[1]
        return everywhere if isinstance(exponent, int | float) and exponent >= 1 else None
    if name in _BOUNDED:
        return False
    if name == "aten.mul":
        return any(zeros)
    if kind is OpKind.ADDITION:
        return everywhere and len(beyond) == 2
    if name == "aten.div" and beyond[0] is not None and not any(zero is not None for zero in beyond[1:]):
        return beyond[0] if isinstance(node.args[0], fx.Node) else None
    return None


def _letters(bound: ShapedLine, dim: Dim) -> list[str]:
    """Return the letters of a dim with sizes above one, outermost first."""
    return [atom.letter for atom in dim if bound.extents[atom.letter] > 1]


def _dim(bound: ShapedLine, dims: tuple[Dim, ...], letter: str) -> int | None:
    """The dim whose outermost letter is ``letter``."""
    return next((i for i, dim in enumerate(dims) if _letters(bound, dim)[:1] == [letter]), None)
