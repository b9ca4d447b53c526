"""The cost of selective recomputation: the values that a layer saves, and the ops that it runs again.

Emitted programs save the values that ``passes.selective`` selects. Depending on the layer's types, a selected product is saved as it is, or
as its sum over devices. ``select_emitted`` lists both, as entries (``Saved``), and ``Selection.under`` chooses once the types are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.devices.measured import Floats
from autopar.flow import gradient_flow, run_again
from autopar.graph import LayerClass
from autopar.ops import cost
from autopar.ops.facts import facts
from autopar.ops.operands import operands
from autopar.price.collective_pairs import CollectivePair
from autopar.price.trace import INTERNAL, OUTPUT, Saved, Trace
from autopar.sharding import AxisTypes
from autopar.types import Collective

Flags = NDArray[np.bool_]
_REDUCTIONS = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)


@dataclass(frozen=True)
class Selected:
    """A selection under specific types: flags of the entries that are ``saved`` (several may have the same storage) and of the ops that run
    ``recomputed``; and the collectives that are repeated (``pairs``)."""

    saved: Flags
    recomputed: Flags
    pairs: tuple[CollectivePair, ...]


@dataclass(frozen=True)
class Selection:
    """What selective recomputation may save and run again, before the layer's types are known.

    ``may_save``, ``producer`` and ``is_reduction`` have an element for each ``Saved`` entry. Those with ``may_save`` may be saved. One with
    a ``producer`` (the index of the op that computes the value, else -1) is saved if the value is no partial sum over devices. One with
    ``is_reduction`` is the sum of a partial value, and is saved only if the value is one. ``recomputed`` has a flag for each op; ``costly``
    ops don't run again if their value is saved. The layer's ``inputs`` (storages) are saved, too. Collectives on the values ``read`` and in
    the ops that run again are repeated, except for the reductions of ``reduced_values``.
    """

    may_save: Flags
    recomputed: Flags
    producer: NDArray[np.intp]
    is_reduction: Flags
    costly: tuple[int, ...] = ()
    inputs: frozenset[int] = frozenset()
    read: frozenset[str] = frozenset()
    reduced_values: frozenset[str] = frozenset()

    def under(
        self,
        types: tuple[AxisTypes, ...],
        ops: Sequence[fx.Node],
        saved: Sequence[Saved],
        pairs: tuple[CollectivePair, ...],
    ) -> Selected:
        """Return the saved entries and the repeated ops when the axes have these types, the microbatch axis first."""
        partial = np.zeros(len(ops), dtype=bool)
        rotates = np.zeros(len(ops), dtype=bool)  # ring attention saves other tensors, so all of it runs again
        for i in {*self.costly, *self.producer[self.is_reduction]}:
            name = ops[i].name
            partial[i] = any(t.produced[name].kind == "P" for t in types[1:])
            rotates[i] = any(t.kernel.get(name) == "ring_attention" for t in types)
        may_save = self.may_save.copy()
        for k in np.flatnonzero(self.producer >= 0):
            i, entry = int(self.producer[k]), saved[int(k)]
            may_save[k] = partial[i] == self.is_reduction[k] and not rotates[i]
            # an op that reads the partial sum itself, such as an addition of partial sums, does not need the full sum
            if may_save[k] and self.is_reduction[k]:
                may_save[k] = all(t.needed[entry.node][entry.operand].kind != "P" for t in types[1:])
        recomputed = self.recomputed.copy()
        for i in self.costly:
            recomputed[i] = partial[i] or rotates[i]
        repeated_ops = {node.name for node, runs in zip(ops, recomputed, strict=True) if runs}

        def is_repeated(pair: CollectivePair) -> bool:
            if pair.op:
                return pair.op in repeated_ops
            return pair.value in self.read and not (pair.forward in _REDUCTIONS and pair.value in self.reduced_values)

        return Selected(may_save, recomputed, tuple(pair for pair in pairs if is_repeated(pair)))

    def memory(
        self,
        entries: Sequence[Saved],
        entry_bytes: Floats,
        plain: list[int],
        selected: list[int],
        saver: NDArray[np.intp],
        ops: int,
        input_bytes: float,
    ) -> tuple[float, float]:
        """Return the bytes that the layer saves, and the peak while it runs again.

        When an op runs again, memory has two kinds of entries: those that it and the ops before it save without recomputation, because they
        are saved again, and the selected ones of later ops, which haven't been used yet. ``plain`` are the indices of the entries that are
        saved without recomputation, ``selected`` those that are saved with it; ``saver`` is the op that saves each entry.
        """
        saved = float(entry_bytes[selected].sum())
        resaved = np.bincount(saver[plain], weights=entry_bytes[plain], minlength=ops).cumsum()
        unused = np.bincount(self.producer[selected], weights=entry_bytes[selected], minlength=ops)
        working = resaved + unused.sum() - unused.cumsum()
        inputs = sum(float(entry_bytes[i]) for i in plain if entries[i].storage in self.inputs)
        return saved + input_bytes, float(working.max(initial=saved)) + max(0.0, input_bytes - inputs)


def select_emitted(
    cls: LayerClass, ops: Sequence[fx.Node], run: Trace, plain: Sequence[Saved]
) -> tuple[tuple[Saved, ...], Selection]:
    """Return the entries that an emitted program may save (``plain`` and additional ones), and the selection among them."""
    flow = gradient_flow(cls)
    count = len(run_again(ops, lambda node: flow[node.name]))
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
    # attention's internal tensors, such as the log-sum-exp, may be saved: the index of their op; -1 for all other entries. A product's
    # internal tensor is a copy of an operand, and is recomputed
    inside = [
        at[e.node] if e.operand == INTERNAL and e.node in at and cost.is_attention(ops[at[e.node]]) else -1
        for e in plain
    ]
    names = [node.name for node in cls.graph.graph.nodes if node.op == "placeholder"][: len(cls.activations)]
    return (*plain, *(entry for entry, _, _ in found)), Selection(
        may_save=np.array([*(i >= 0 for i in inside), *(True for _ in found)], dtype=bool),
        recomputed=np.arange(len(ops)) < count,
        producer=np.array([*inside, *(i for _, i, _ in found)], dtype=np.intp),
        is_reduction=np.array([*(False for _ in plain), *(reduced for _, _, reduced in found)], dtype=bool),
        costly=tuple(i for i, node in made if facts(node).is_expensive),
        inputs=frozenset(run.storage[name] for name in names if name in run.storage),
        read=frozenset(o.name for node in ops[: count + 1] for o in operands(node)),
        reduced_values=frozenset(node.name for _, node in made if facts(node).may_be_summed),
    )
