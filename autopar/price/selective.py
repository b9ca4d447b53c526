"""Selective recomputation, priced: what it keeps of a layer, and what it runs again.

The programs that autopar emits keep what ``passes.keep`` says. Whether that is a product's result or its sum over devices depends on the
types, so that a table holds both and ``select`` chooses. Published runs keep something else (``Practice.published``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.flow import gradient_flow
from autopar.graph import LayerClass
from autopar.ops import cost
from autopar.ops.facts import facts
from autopar.ops.operands import operands
from autopar.price.memory import INTERNAL, OUTPUT, Saved, Trace
from autopar.price.moves import Move
from autopar.sharding import AxisTypes
from autopar.types import Collective
from passes.keep import recomputed

Flags = NDArray[np.bool_]
_SUMS = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)


@dataclass(frozen=True)
class Selection:
    """The part that no types change, by saved entry and by op.

    ``stays`` are the entries that may be kept. An entry of a ``maker`` (an op's index, else -1) is where that op's value is no term of a
    sum over devices, with ``summed`` where it is one. ``again`` are the ops that run again, but for those of ``dear`` whose value is kept.
    ``emitted`` says that it is the programs' own way: the layer's ``inputs`` (storages) are kept besides, exchanges of what is ``read``
    and of the ops that run again happen again, sums of the values ``sums`` do not.
    """

    stays: Flags
    again: Flags
    maker: NDArray[np.intp]
    summed: Flags
    dear: tuple[int, ...] = ()
    inputs: frozenset[int] = frozenset()
    read: frozenset[str] = frozenset()
    sums: frozenset[str] = frozenset()
    emitted: bool = False


@dataclass(frozen=True)
class Selected:
    """A selection under given types: the entries that are kept, before equal ones are merged; ops and moves that run again."""

    kept: Flags
    again: Flags
    moves: tuple[Move, ...]


def emitted(
    cls: LayerClass, ops: Sequence[fx.Node], run: Trace, plain: Sequence[Saved]
) -> tuple[tuple[Saved, ...], Selection]:
    """What an emitted program may keep: ``plain`` and the entries added to it, and the selection among all of them."""
    flow = gradient_flow(cls)
    count = len(recomputed(ops, lambda node: flow[node.name]))
    made = [(i, node) for i, node in enumerate(ops[:count])]
    found: list[tuple[Saved, int, bool]] = []
    for i, node in made:
        storage = run.storage[node.name]
        if facts(node).is_expensive:
            found.append((Saved(storage, node.name, OUTPUT, *run.extent[storage]), i, False))
        if facts(node).may_be_summed:
            for reader in (user for user in node.users if user.op == "call_function"):
                place = operands(reader).index(node)
                found.append((Saved(storage, reader.name, place, *run.extent[storage]), i, True))
    at = {node.name: i for i, node in made}
    # such as the logarithms of attention's sums; what a product makes inside of itself is a copy of an operand, and runs again
    inside = [
        at[e.node] if e.operand == INTERNAL and e.node in at and cost.is_attention(ops[at[e.node]]) else -1
        for e in plain
    ]
    names = [node.name for node in cls.graph.graph.nodes if node.op == "placeholder"][: len(cls.activations)]
    return (*plain, *(entry for entry, _, _ in found)), Selection(
        stays=np.array([*(i >= 0 for i in inside), *(True for _ in found)], dtype=bool),
        again=np.arange(len(ops)) < count,
        maker=np.array([*inside, *(i for _, i, _ in found)], dtype=np.intp),
        summed=np.array([*(False for _ in plain), *(late for _, _, late in found)], dtype=bool),
        dear=tuple(i for i, node in made if facts(node).is_expensive),
        inputs=frozenset(run.storage[name] for name in names if name in run.storage),
        read=frozenset(o.name for node in ops[: count + 1] for o in operands(node)),
        sums=frozenset(node.name for _, node in made if facts(node).may_be_summed),
        emitted=True,
    )


def select(
    given: Selection,
    ops: Sequence[fx.Node],
    saved: Sequence[Saved],
    types: tuple[AxisTypes, ...],
    moves: tuple[Move, ...],
) -> Selected:
    """What is kept and what runs again when the axes have these types, the microbatch axis first."""
    if not given.emitted:
        return Selected(given.stays, given.again, ())
    partial = np.zeros(len(ops), dtype=bool)
    rotates = np.zeros(len(ops), dtype=bool)  # ring attention keeps pieces of its own: it runs again as a whole
    for i in {*given.dear, *given.maker[given.summed]}:
        name = ops[i].name
        partial[i] = any(t.produced[name].kind == "P" for t in types[1:])
        rotates[i] = any(t.kernel.get(name) == "ring_attention" for t in types)
    kept = given.stays.copy()
    for k in np.flatnonzero(given.maker >= 0):
        i, entry = int(given.maker[k]), saved[int(k)]
        kept[k] = partial[i] == given.summed[k] and not rotates[i]
        if kept[k] and given.summed[k]:  # what reads the term itself, such as a sum of terms, has no use for its sum
            kept[k] = all(t.needed[entry.node][entry.operand].kind != "P" for t in types[1:])
    again = given.again.copy()
    for i in given.dear:
        again[i] = partial[i] or rotates[i]
    running = {node.name for node, runs in zip(ops, again, strict=True) if runs}

    def happens(move: Move) -> bool:
        if move.op:
            return move.op in running
        return move.value in given.read and not (move.forward in _SUMS and move.value in given.sums)

    return Selected(kept, again, tuple(move for move in moves if happens(move)))


def published(
    ops: Sequence[fx.Node], run: Trace, plain: Sequence[Saved], flash: bool
) -> tuple[tuple[Saved, ...], Selection]:
    """Selective recomputation as published runs have it.

    Attention that keeps its scores is what it was made for (arXiv:2205.05198): its scores go, all else stays. With flash attention it is
    torchtitan's policy by op: attention and every second matrix product keep their results, the rest runs again.
    """
    attention = {node.name for node in ops if cost.is_attention(node)}
    found = list(plain)
    if attention and not flash:
        stays = [not (entry.node in attention and entry.operand == INTERNAL) for entry in plain]
        again = [node.name in attention for node in ops]
    else:
        products = [node for node in ops if cost.model_flops(node) and node.name not in attention]
        held = products[::2]
        found += [Saved(run.storage[n.name], n.name, OUTPUT, *run.extent[run.storage[n.name]]) for n in held]
        results = {run.storage[n.name] for n in (*held, *(n for n in ops if n.name in attention))}
        stays = [e.storage in results or (e.operand == INTERNAL and e.node in attention) for e in found]
        quiet = attention | {n.name for n in held}
        again = [node.name not in quiet for node in ops]
    return tuple(found), Selection(
        np.array(stays, dtype=bool),
        np.array(again, dtype=bool),
        np.full(len(found), -1, dtype=np.intp),
        np.zeros(len(found), dtype=bool),
    )
