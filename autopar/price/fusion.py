"""Which ops run as one kernel when chains of pointwise ops are fused, as hand-written kernels and ``torch.compile`` do.

Every op gets a *depth*: the number of heavy ops (products, attention, lookups, cross entropies, random draws) on the longest path before
it. Connected pointwise ops and reductions of equal depth form one kernel: no path between two of them has a heavy op, so the kernels can be
ordered. A kernel reads each input once and writes what other kernels read. For the backward pass it saves values that it read or wrote,
instead of those that its ops would save. Its backward kernel recomputes the rest from these and from dropout masks, which are drawn once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.ops import cost
from autopar.ops.facts import OpKind, facts
from autopar.ops.operands import operands
from autopar.price.op_costs import OpCosts, OpSlot
from autopar.price.trace import INTERNAL, OUTPUT, Saved, Trace


@dataclass(frozen=True)
class Fusion:
    """The kernels of a layer. ``group[name]`` is the number of a pointwise op's kernel; ``source[name]`` is the op (or placeholder) whose
    storage a view uses; ``written`` are the fused ops whose result leaves their kernel; ``saved``: what the backward needs."""

    group: dict[str, int]
    source: dict[str, fx.Node]
    written: frozenset[str]
    saved: tuple[Saved, ...]


def merge(costs: OpCosts) -> None:
    """Charge a fused kernel for one launch and for the values that it reads and writes, but not for the values inside it."""
    ops, run, slots = costs.nodes, costs.trace, costs.slots
    forward, backward = costs.forward_kernels, costs.backward_kernels
    fused = fuse(ops, run, costs.saved)
    started: set[int] = set()
    read: dict[tuple[int, str], OpSlot] = {}
    counted: set[tuple[int, str]] = set()
    saved = {entry.storage for entry in fused.saved}
    for i, node in enumerate(ops):
        if (group := fused.group.get(node.name)) is not None:
            if group in started:
                forward[i] = backward[i] = 0.0
            started.add(group)
    for slot in slots:
        node = ops[slot.op]
        group = fused.group.get(node.name)
        if node.name in run.views:
            slot.forward = slot.backward = 0.0
        if group is None:
            continue
        value = fused.source.get(slot.value)
        producer = value.name if value is not None else slot.value
        if slot.operand == OUTPUT:
            if node.name not in fused.written:
                slot.forward = slot.backward = slot.gradient = 0.0
        elif fused.group.get(producer) == group or (group, slot.value) in counted:
            slot.forward = slot.backward = slot.gradient = 0.0
        else:
            counted.add((group, slot.value))
            storage = run.storage.get(producer, -1)
            backward_moves = (storage in saved or storage in run.excluded) + run.requires_grad[slot.value]
            slot.backward = slot.bytes * backward_moves if slot.backward else 0.0
            first = read.setdefault((group, producer), slot)
            if first is not slot:  # another view of a value that the kernel already reads completely
                elements = run.extent[storage][0] if storage in run.extent else 0
                if elements and first.numel >= elements:
                    slot.forward = slot.backward = slot.gradient = 0.0
    for slot in slots:
        slot.materialised = slot.gradient > 0
    costs.saved = fused.saved


def fuse(ops: Sequence[fx.Node], run: Trace, saved: Sequence[Saved]) -> Fusion:
    """Group the pointwise ops of a traced layer."""
    source: dict[str, fx.Node] = {}
    depth: dict[str, int] = {}
    parent: dict[str, str] = {}

    def find(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    def origin(node: fx.Node) -> fx.Node:
        return source.get(node.name, node)

    for node in ops:
        read = [origin(o) for o in operands(node)]
        before = max((depth.get(o.name, 0) for o in read), default=0)
        if node.name in run.views and read:
            source[node.name], depth[node.name] = read[0], depth.get(read[0].name, 0)
        elif heavy(node):
            depth[node.name] = before + 1
        else:
            depth[node.name], parent[node.name] = before, node.name
            for o in read:
                if o.name in parent and depth[o.name] == before:
                    parent[find(o.name)] = find(node.name)
    roots = {name: find(name) for name in parent}
    numbers = {root: i for i, root in enumerate(dict.fromkeys(roots.values()))}
    group = {name: numbers[root] for name, root in roots.items()}
    written = _written(ops, group, origin)
    return Fusion(group, source, written, _saved(ops, run, saved, group, origin, written))


def heavy(node: fx.Node) -> bool:
    """Return whether the op is a separate kernel."""
    op = facts(node)
    return op.is_cross_entropy or op.looks_up or op.kind is OpKind.RANDOM or cost.model_flops(node) > 0


def _reduces(node: fx.Node) -> bool:
    """Return whether the op's result is smaller than an operand, as in a mean."""
    made = sum(t.numel() for t in cost.tensors(node.meta["val"]))
    return any(sum(t.numel() for t in cost.tensors(o.meta["val"])) > made for o in operands(node))


def _written(ops: Sequence[fx.Node], group: dict[str, int], origin: Callable[[fx.Node], fx.Node]) -> frozenset[str]:
    """Return the names of the fused ops whose results other kernels or later layers read."""
    written = set()
    for node in ops:
        reads = node.name in group or origin(node) is node  # a view of a value is not a read
        for producer in (origin(o).name for o in operands(node)):
            if producer in group and reads and group.get(node.name) != group[producer]:
                written.add(producer)
    graph = ops[0].graph if ops else None
    for node in graph.nodes if graph is not None else ():
        if node.op == "output":
            written |= {origin(o).name for o in node.all_input_nodes if origin(o).name in group}
    return frozenset(written)


def _saved(
    ops: Sequence[fx.Node],
    run: Trace,
    saved: Sequence[Saved],
    group: dict[str, int],
    origin: Callable[[fx.Node], fx.Node],
    written: frozenset[str],
) -> tuple[Saved, ...]:
    """Return the entries that the backward kernels need."""
    producers = {}
    for node in ops:
        if node.name not in run.views:
            producers[run.storage[node.name]] = node
    found: list[Saved] = []
    seen: set[tuple[int, str]] = set()

    def save(node: fx.Node, reader: fx.Node, operand: int) -> None:
        storage = run.storage.get(node.name)
        # values without a gradient are recomputed from tensors that are in memory anyway, except for random numbers
        drawn = facts(node).kind is OpKind.RANDOM
        if storage is None or storage in run.excluded or not (drawn or run.requires_grad.get(node.name, False)):
            return
        if (storage, reader.name) not in seen:
            seen.add((storage, reader.name))
            found.append(Saved(storage, reader.name, operand, *run.extent[storage]))

    visited: set[str] = set()

    def save_inputs(node: fx.Node) -> None:
        """Save the values from which a fused op's result is recomputed; a result that leaves the kernel, or is reduced, is saved itself.

        Each op is visited once, and without recursion: a kernel may have any number of ops, and any number of paths between two of them.
        """
        todo = [(node, node, OUTPUT)]
        while todo:
            made, reader, operand = todo.pop()
            if group.get(made.name) != group[reader.name]:
                save(made, reader, operand)
            elif made.name not in visited:
                visited.add(made.name)
                if made.name in written or _reduces(made):
                    save(made, made, OUTPUT)
                else:
                    todo += [(origin(o), made, i) for i, o in enumerate(operands(made))][::-1]

    by_name = {node.name: node for node in ops}
    for entry in saved:
        node, made = by_name[entry.node], producers.get(entry.storage)
        inside = node.name in group and made is not None and group.get(made.name) == group[node.name]
        if inside and entry.operand != INTERNAL:
            assert made is not None
            save_inputs(made)
        elif (entry.storage, entry.node) not in seen:
            seen.add((entry.storage, entry.node))
            found.append(entry)
    return tuple(found)
