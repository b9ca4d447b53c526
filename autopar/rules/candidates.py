"""Lists a node's candidates on one mesh axis: the operand and result types that its sharding rule allows at the node's shapes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.errors import RuleError
from autopar.ops.facts import op_name
from autopar.ops.meta import meta
from autopar.ops.operands import operands, shape_of
from autopar.rules.notation import Atom, Dim, Kernel, Line, Operand, parse
from autopar.rules.table import KERNELS, TABLE, Entry
from autopar.types import I, P, R, S, SpmdType

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Operand and result types with which a node may run on one axis.

    ``operands`` has the types of ``operands(node)``, in that order; ``result`` is the type of every output. ``letter`` is the rule's letter
    that the axis shards, or ``None``; ``extent`` is the letter's global size, which the axis's size must divide (0 if nothing is sharded).
    ``kernel`` names the function of ``autopar.program`` that replaces the op, if any. ``linear``: a partial sum passes through. The op's
    compute is divided among the ranks only if ``letter`` is set.
    """

    operands: tuple[SpmdType, ...]
    result: SpmdType
    letter: str | None = None
    kernel: str | None = None
    extent: int = 0
    linear: bool = False


@dataclass(frozen=True, slots=True)
class ShapedLine:
    """A line bound to a node's shapes: the letters of every dim (stars expanded, none on dims of size one) and the letters' sizes."""

    line: Line
    operands: tuple[tuple[Dim, ...], ...]
    result: tuple[Dim, ...]
    extents: dict[str, int]
    fixed: frozenset[str]

    def place(self, dims: tuple[Dim, ...], letter: str) -> int | None:
        """Return the index of the dim that ``letter`` shards; ``None`` if the letter is absent, -1 if it may not be sharded there."""
        places = [i for i, dim in enumerate(dims) if any(atom.letter == letter for atom in dim)]
        if not places:
            return None
        outermost = next(atom for atom in dims[places[0]] if self.extents[atom.letter] != 1)
        return places[0] if len(places) == 1 and outermost.letter == letter else -1


def line_of(node: fx.Node, table: Mapping[str, Entry] = TABLE) -> Line | None:
    """Return the node's rule; ``None`` if the table has none for its op or these arguments."""
    text = _rule_text(node, table)
    return None if text is None else parse(text)


def _rule_text(node: fx.Node, table: Mapping[str, Entry]) -> str | None:
    entry = table.get(op_name(node))
    return entry if entry is None or isinstance(entry, str) else entry(node)


def has_rule(node: fx.Node) -> bool:
    """Return whether a rule covers the node; otherwise it can only be replicated."""
    return line_of(node) is not None


def candidates(node: fx.Node) -> tuple[Candidate, ...]:
    """Return the candidates of the node on an axis.

    The first two are all ``I`` and all ``R`` (without tensor operands: only ``R``); then come one for each letter that may be sharded, and
    those through which partial sums pass. Raises ``RuleError`` if the rule doesn't fit the shapes.
    """
    given = operands(node)
    if not given:
        return (Candidate((), R),)
    rules, shapes = (_rule_text(node, TABLE), _rule_text(node, KERNELS)), tuple(operand_shapes(node))
    return _candidates(*rules, len(given), shapes, shape_of(node), op_name(node))


@functools.lru_cache(maxsize=4096)
def _candidates(
    rule: str | None, kernel_rule: str | None, operands: int, shapes: tuple[Shape, ...], result: Shape, name: str
) -> tuple[Candidate, ...]:
    found = [Candidate((t,) * operands, t) for t in (I, R)]
    if rule is not None:
        bound = bind(parse(rule), shapes, result, name)
        found += sharded(bound)
        found += _linear_candidates(bound)
    if kernel_rule is not None:
        found += sharded(bind(parse(kernel_rule), shapes, result, name))
    return tuple(dict.fromkeys(found))


def operand_shapes(node: fx.Node) -> list[Shape]:
    """Return the operands' global shapes; for a ``getitem`` of a tuple, the shape of the selected element."""
    if any(isinstance(meta(operand)["val"], tuple | list) for operand in operands(node)):
        return [shape_of(node)]
    return [shape_of(operand) for operand in operands(node)]


def bind(line: Line, shapes: Sequence[Shape], result: Shape, name: str = "rule") -> ShapedLine:
    """Bind the line's letters to sizes. Raises ``RuleError`` with op, line and shapes if they don't fit."""

    def misfit(reason: str) -> RuleError:
        text = ", ".join(map(str, shapes))
        return RuleError(f"{name}: the rule {line.text!r} does not fit shapes {text} -> {result}: {reason}")

    if len(line.operands) < len(shapes):
        raise misfit(f"it has {len(line.operands)} operands")
    given = line.operands[: len(shapes)]  # optional operands come last
    pairs = [*zip(given, shapes, strict=True), (line.result, result)]
    stars = max((len(shape) - len(o.dims) for o, shape in pairs if o.star is not None), default=0)
    expanded = []
    for operand, shape in pairs:
        dims = _expand(operand, len(shape), stars)
        if dims is None:
            raise misfit(f"{shape} has {len(shape)} dims")
        expanded.append(dims)
    extents: dict[str, int] = {}
    fixed = {atom.letter for dims in expanded for dim in dims for atom in dim if atom.fixed}
    for products in (False, True):
        for dims, (_, shape) in zip(expanded, pairs, strict=True):
            for dim, size in zip(dims, shape, strict=True):
                if (len(dim) > 1) == products and not _record_sizes(dim, size, extents):
                    raise misfit(
                        f"dim {' '.join(atom.letter for atom in dim)} has size {size}, sizes so far are {extents}"
                    )
    bare = [
        tuple(() if size == 1 else dim for dim, size in zip(dims, shape, strict=True))
        for dims, (_, shape) in zip(expanded, pairs, strict=True)
    ]
    return ShapedLine(line, tuple(bare[:-1]), bare[-1], extents, frozenset(fixed))


def _expand(operand: Operand, ndim: int, stars: int) -> tuple[Dim, ...] | None:
    """Expand ``*`` in an operand's dims to letters ``*0``, ``*1``, ..., counted from the left of the longest star."""
    if operand.star is None:
        return operand.dims if len(operand.dims) == ndim else None
    count = ndim - len(operand.dims)
    if count < 0:
        return None
    leading: tuple[Dim, ...] = tuple((Atom(f"*{i}"),) for i in range(stars - count, stars))
    return operand.dims[: operand.star] + leading + operand.dims[operand.star :]


def _record_sizes(dim: Dim, size: int, extents: dict[str, int]) -> bool:
    """Record the sizes of a dim's letters; return whether they agree with the known sizes."""
    if size == 1:
        if len(dim) == 1:
            extents.setdefault(dim[0].letter, 1)
        return True
    if not dim:
        return True
    known = 1
    unknown = []
    for atom in dim:
        if atom.size is not None and extents.get(atom.letter, 1) == 1:
            extents[atom.letter] = atom.size
        if atom.letter in extents and (len(dim) > 1 or extents[atom.letter] != 1):
            known *= extents[atom.letter]
        else:
            unknown.append(atom.letter)
    if not unknown:
        return known == size
    if len(unknown) > 1 or size % known:
        return False
    extents[unknown[0]] = size // known
    return True


def sharded(bound: ShapedLine) -> list[Candidate]:
    """Return a candidate for each letter that may be sharded, and for each kernel that shards two letters."""
    found = []
    kernels = dict(bound.line.kernels)
    for letter, extent in bound.extents.items():
        places = [bound.place(dims, letter) for dims in bound.operands]
        target = bound.place(bound.result, letter)
        if extent < 2 or letter in bound.fixed or -1 in places or target == -1:
            continue
        kernel = kernels.get(letter)
        result = S(target) if target is not None else (kernel.result if kernel else P)
        types = []
        for spec, place in zip(bound.line.operands, places, strict=False):
            missing = P if spec.additive and result == P else R
            types.append(missing if place is None else S(place))
        if result == P and not any(t.sharded for t in types):
            continue
        found.append(Candidate(tuple(types), result, letter, kernel.name if kernel else None, extent))
    joint = [_two_letter_candidate(bound, letters, kernel) for letters, kernel in kernels.items()]
    return found + [candidate for candidate in joint if candidate is not None]


def _two_letter_candidate(bound: ShapedLine, letters: str, kernel: Kernel) -> Candidate | None:
    """Return the candidate of a kernel that shards two letters on one axis; each operand is sharded along the letter that it has."""
    first, plus, second = letters.partition("+")
    extents = bound.extents.get(first, 1), bound.extents.get(second, 1)
    if not plus or min(extents) < 2 or {first, second} & bound.fixed:
        return None
    types = []
    for dims in (*bound.operands, bound.result):
        places = [place for letter in (first, second) if (place := bound.place(dims, letter)) is not None]
        if len(places) > 1 or -1 in places:
            return None
        types.append(S(places[0]) if places else R)
    return Candidate(tuple(types[:-1]), types[-1], letters, kernel.name, math.gcd(*extents))


def _linear_candidates(bound: ShapedLine) -> list[Candidate]:
    """Return a candidate for each group of operands in which the op is linear: partial sums pass through it."""
    count = len(bound.operands)
    groups = [frozenset(i for i in group if i < count) for group in bound.line.linear]
    return [Candidate(tuple(P if i in group else R for i in range(count)), P, linear=True) for group in groups if group]
