"""Mixtures of experts as ops: the body that a model gives its experts, as a graph, and the letters that may be sharded in it.

An ``Experts`` is the target of a graph's node, as ``aten.linear`` is of another: the node's operands are the tokens ``[..., h]``, the
router's choices ``[..., k]`` and their weights ``[..., k]``, and the experts' parameters, each with the experts as dim 0. The body is a
graph of ``(rows, counts, *parameters)`` over all chosen rows, sorted by expert; it treats rows alike, which is what lets tokens be sharded,
permuted and sent to other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from autopar.program import kernels_experts
from autopar.rules.operands import op_name, operands, shape_of
from autopar.types import P, R, S, SpmdType


class Experts:
    """A mixture's op. Two are equal if their bodies are the same graph at the same shapes."""

    def __init__(self, body: fx.GraphModule, count: int) -> None:
        self.__name__ = self.__qualname__ = "experts"  # what fx calls the node, and the table the op
        self.__module__ = kernels_experts.__name__
        self.body, self.count = body, count
        self._text = tuple(_described(body))

    def __call__(self, x: Tensor, index: Tensor, weights: Tensor, *parameters: Tensor, **axes: Any) -> Tensor:
        return kernels_experts.experts(x, index, weights, parameters, self.body, self.count, **axes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Experts) and (self.count, self._text) == (other.count, other._text)

    def __hash__(self) -> int:
        return hash((self.count, self._text))

    def __deepcopy__(self, memo: Any) -> Experts:
        return self  # nothing changes it

    def __repr__(self) -> str:
        return f"experts({self.count}, {', '.join(op_name(n.target) for n in self.body.graph.nodes if n.op == 'call_function')})"

    @property
    def parameters(self) -> list[fx.Node]:
        """The body's placeholders for the experts' parameters."""
        return [node for node in self.body.graph.nodes if node.op == "placeholder"][2:]


def _described(body: fx.GraphModule) -> Iterator[tuple[Any, ...]]:
    """The body's nodes: what equal bodies have equal."""
    for node in body.graph.nodes:
        value = node.meta.get("val")
        shape = (tuple(value.shape), str(value.dtype)) if isinstance(value, Tensor) else None
        yield node.op, str(node.target), str(node.args), str(node.kwargs), shape


def line(node: fx.Node) -> str:
    """The rule of a mixture: tokens, experts, tokens and experts together, and every letter that the body lets pass."""
    op = node.target
    assert isinstance(op, Experts)
    words = [["e", *("1" * (len(shape_of(p)) - 1))] for p in op.parameters]
    added: set[int] = set()
    for number, types in enumerate(slices(op)):
        for i, t in enumerate(types):
            if t.dim is not None:
                words[i][t.dim] = f"f{number}"
            elif t == P:
                added.add(i)
    given = [("+" if i in added else "") + " ".join(dims) for i, dims in enumerate(words)]
    lead = " ".join(f"t{i}" for i in range(len(shape_of(node)) - 1))
    text = ", ".join([f"{lead} h!", f"{lead} k!", f"{lead} k!", *given])
    joint = " ".join(f"; t{i}+e = expert_exchange" for i in range(len(shape_of(node)) - 1))
    return f"{text} -> {lead} h! ; e = expert_share {joint}"


def slices(op: Experts) -> list[tuple[SpmdType, ...]]:
    """The ways to slice the experts themselves: types of the parameters, none sharded in dim 0, for which the body's result is a term of a
    sum while its rows are whole. Each dim is in one way at most.

    The body's own rules are asked, with no conversion in between: what a slice cannot do alone is no way.
    """
    from autopar.rules.candidates import candidates  # which asks this module for the rule of a mixture

    result = next(node for node in op.body.graph.nodes if node.op == "output").args[0]
    order: dict[fx.Node, None] = {}  # every operand right before its first reader, so that a wrong start ends early
    for node in op.body.graph.nodes:
        if node.op == "call_function":
            order.update(dict.fromkeys((*operands(node), node)))
    options = {node: candidates(node) for node in order if node.op == "call_function"}

    def complete(rest: list[fx.Node], types: dict[Any, SpmdType]) -> Iterator[dict[Any, SpmdType]]:
        if not rest:
            yield types
            return
        node = rest[0]
        if node in options:
            given = tuple(types[operand] for operand in operands(node))
            chosen = [c.result for c in options[node] if c.operands == given]
        else:
            own = [*(S(d) for d in range(1, len(shape_of(node)))), P] if node in op.parameters else []
            chosen = [*own, R]
        for t in dict.fromkeys(chosen):
            yield from complete(rest[1:], types | {node: t})

    found: list[tuple[SpmdType, ...]] = []
    taken: set[tuple[int, int]] = set()
    for types in complete(list(order), {}):
        way = tuple(types.get(parameter, R) for parameter in op.parameters)
        dims = {(i, t.dim) for i, t in enumerate(way) if t.dim is not None}
        terms = [i for i, t in enumerate(way) if t == P]
        agree = not found or terms == [i for i, t in enumerate(found[0]) if t == P]
        if types[result] == P and dims and agree and not dims & taken:
            found.append(way)
            taken |= dims
    return found


def is_row_wise(node: fx.Node, rows: set[fx.Node]) -> bool:
    """Whether the call treats rows alike and names no number of them: it may run on any of the rows, in any order. ``rows`` are the
    nodes before it that have a dim of rows, their first."""
    from autopar.rules.candidates import candidates

    if node.target in (kernels_experts.grouped_linear, kernels_experts.of_rows):
        return True
    if op_name(node.target) in _SIZED:
        return False
    wanted = tuple(S(0) if operand in rows else R for operand in operands(node))
    return any(c.operands == wanted and c.result == S(0) for c in candidates(node))


_SIZED = frozenset(
    f"aten.{name}" for name in ("view", "reshape", "expand", "_unsafe_view", "new_zeros", "new_ones", "repeat")
)
