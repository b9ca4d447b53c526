"""Derives the rule of a mixture of experts from the rules of the ops in the experts' body."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from autopar.ops.experts import Experts
from autopar.ops.facts import op_name
from autopar.ops.operands import operands, shape_of
from autopar.program import kernels_experts
from autopar.rules.candidates import candidates
from autopar.rules.table import TABLE
from autopar.types import P, R, S, SpmdType


def line(node: fx.Node) -> str:
    """Return the rule of a mixture of experts: an axis may shard tokens, experts, both, or a dim inside every expert (``slices``)."""
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
    parameters = [("+" if i in added else "") + " ".join(dims) for i, dims in enumerate(words)]
    lead = " ".join(f"t{i}" for i in range(len(shape_of(node)) - 1))
    text = ", ".join([f"{lead} h!", f"{lead} k!", f"{lead} k!", *parameters])
    exchanges = " ".join(f"; t{i}+e = expert_exchange" for i in range(len(shape_of(node)) - 1))
    return f"{text} -> {lead} h! ; e = expert_share {exchanges}"


def slices(op: Experts) -> list[tuple[SpmdType, ...]]:
    """Return the shardings inside each expert (expert tensor parallelism), each as one type per parameter.

    Neither rows nor dim 0 of parameters (the experts) are sharded, and the body's result is a partial sum. Each dim is sharded by at most
    one of the returned shardings. The types follow from the rules of the body's ops, without conversions between ops.
    """
    result = op.body.graph.output_node().args[0]
    order: dict[fx.Node, None] = {}  # each operand right before its first reader, to reject wrong types early
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
            operand_types = tuple(types[operand] for operand in operands(node))
            possible = [c.result for c in options[node] if c.operands == operand_types]
        else:
            sliced = [*(S(d) for d in range(1, len(shape_of(node)))), P] if node in op.parameters else []
            possible = [*sliced, R]
        for t in dict.fromkeys(possible):
            yield from complete(rest[1:], types | {node: t})

    found: list[tuple[SpmdType, ...]] = []
    taken: set[tuple[int, int]] = set()
    for types in complete(list(order), {}):
        parameters = tuple(types.get(parameter, R) for parameter in op.parameters)
        dims = {(i, t.dim) for i, t in enumerate(parameters) if t.dim is not None}
        terms = [i for i, t in enumerate(parameters) if t == P]
        same_terms = not found or terms == [i for i, t in enumerate(found[0]) if t == P]
        if types[result] == P and dims and same_terms and not dims & taken:
            found.append(parameters)
            taken |= dims
    return found


def is_row_wise(node: fx.Node, rows: set[fx.Node]) -> bool:
    """Return whether the call computes each row independently and no argument states the number of rows, so that it may run on any rows in
    any order. ``rows`` has the earlier nodes with the rows as dim 0."""
    if node.target in (kernels_experts.grouped_linear, kernels_experts.of_rows):
        return True
    if op_name(node) in _WITH_SIZES:
        return False
    by_rows = tuple(S(0) if operand in rows else R for operand in operands(node))
    return any(c.operands == by_rows and c.result == S(0) and c.kernel is None for c in candidates(node))


_WITH_SIZES = frozenset(
    f"aten.{name}" for name in ("view", "reshape", "expand", "_unsafe_view", "new_zeros", "new_ones", "repeat")
)

# Not in the table's module, because deriving this rule reads the table
TABLE["kernels_experts.experts"] = line
