"""The collectives that a layer's types imply: they are priced, and the program must run them (``autopar.checks.collectives``)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import fx

from autopar.flow import returned_nodes
from autopar.graph import LayerClass, cached_for_graphs
from autopar.ops.cost import tensors
from autopar.ops.operands import operands, shape_of
from autopar.rules.traffic import kernel_traffic
from autopar.sharding import AxisTypes
from autopar.types import Collective, SpmdType, conversion
from passes.conversions import conversion_steps
from passes.rewrite import products_of


@dataclass(frozen=True, slots=True)
class Move:
    """One collective over ``axes`` on a value of ``bytes`` globally; ``sharded`` are the other axes that shard the value.

    With ``per_rank`` the bytes are those that each rank contributes to a gather. ``value`` is the value's name. ``beside`` is the op
    whose arithmetic overlaps the collective, as with a ring's rotations; empty if the layer waits for it. ``op`` is the op whose kernel
    runs the collective; empty for a conversion between ops. ``under`` are the products whose weights' gradients are computed while the
    backward collective runs, if the strategy overlaps it; empty for others. ``target`` are the types in which the value
    is read, if this is the last collective on the way there.
    """

    value: str
    bytes: float
    axes: tuple[int, ...]
    sharded: tuple[int, ...]
    forward: Collective
    backward: Collective
    per_rank: bool = False
    beside: str = ""
    op: str = ""
    under: tuple[str, ...] = ()
    target: tuple[SpmdType, ...] = ()


def wire(
    value: str, value_bytes: float, source: tuple[SpmdType, ...], target: tuple[SpmdType, ...], gradient: bool
) -> list[Move]:
    """The collectives from ``source`` to ``target``; equal conversions are one collective on the flattened axis."""
    silent = (Collective.NONE, Collective.LOCAL)
    moves = []
    for axes, others, forward, backward in _steps(source, target):
        back = backward if gradient else Collective.NONE
        if forward not in silent or back not in silent:
            moves.append(Move(value, value_bytes, axes, others, forward, back))
    return moves


Step = tuple[tuple[int, ...], tuple[int, ...], Collective, Collective]


@functools.lru_cache(maxsize=65536)
def _steps(source: tuple[SpmdType, ...], target: tuple[SpmdType, ...]) -> tuple[Step, ...]:
    """The steps of a conversion, each with its axes, the other axes that shard the value at that point, and the two collectives (forward
    and backward)."""
    current = list(source)
    steps = []
    for step in conversion_steps(source, target):
        pair = conversion(step.source, step.target)
        assert pair is not None, step
        others = tuple(i for i, t in enumerate(current) if t.sharded and i not in step.axes)
        steps.append((step.axes, others, *pair))
        for axis in step.axes:
            current[axis] = step.target
    return tuple(steps)


@cached_for_graphs(maxsize=256)
def _reads(graph: fx.GraphModule) -> tuple[tuple[fx.Node, ...], tuple[tuple[str, int, str], ...]]:
    """The graph's ops, and every read by an op: the op's name, the operand's index, the operand's name."""
    ops = tuple(n for n in graph.graph.nodes if n.op == "call_function" and tensors(n.meta.get("val")))
    return ops, tuple((node.name, i, operand.name) for node in ops for i, operand in enumerate(operands(node)))


def layer_moves(
    cls: LayerClass,
    types: tuple[AxisTypes, ...],
    value_bytes: Mapping[str, float],
    gradient: Mapping[str, bool],
    converted: Callable[[list[Move], bool], list[Move]] = lambda moves, gradient: moves,
) -> tuple[Move, ...]:
    """Every collective of the layer. A value is converted once per target type, however many operands read it in that type.

    ``value_bytes`` are the bytes of whole values by name; ``gradient`` tells which values a gradient flows back through. ``converted``
    may change the collectives of one conversion (``Trainer.conversions``).
    """
    ops, reads = _reads(cls.graph)
    needed = [t.needed for t in types]
    wanted: dict[tuple[str, tuple[SpmdType, ...]], None] = {}
    for reader, i, name in reads:
        wanted[name, tuple([one[reader][i] for one in needed])] = None
    for i, node in enumerate(returned_nodes(cls)):
        wanted[node.name, tuple(t.outputs[i] for t in types)] = None
    moves: list[Move] = []
    joined = products_of(cls, types, gradient)
    for value, target in wanted:
        source = tuple(t.produced[value] for t in types)
        if source != target:
            own = wire(value, value_bytes[value], source, target, gradient[value])
            if own:
                products = joined.get((value, target), ())
                own[-1] = replace(own[-1], under=tuple(product.name for product in products), target=target)
            moves += converted(own, gradient[value])
    return (*moves, *_kernel_moves(ops, types, value_bytes))


def _kernel_moves(
    ops: tuple[fx.Node, ...], types: tuple[AxisTypes, ...], value_bytes: Mapping[str, float]
) -> list[Move]:
    """The collectives that kernels run, over the axes that the kernels get."""
    moves = []
    run = {name for t in types for name in t.kernel}
    for node in ops if run else ():
        kernels = {i: t.kernel[node.name] for i, t in enumerate(types) if node.name in t.kernel}
        for kernel in dict.fromkeys(kernels.values()):
            axes = tuple(i for i, name in kernels.items() if name == kernel)
            for one in kernel_traffic(kernel, node):
                found = _types_at(one.value, node, types)
                others = tuple(i for i, t in enumerate(found) if t.sharded and i not in axes)
                name = one.value.name
                whole = one.bytes(value_bytes[name] / max(1, math.prod(shape_of(one.value))))
                beside = node.name if one.overlapped else ""
                moves.append(
                    Move(name, whole, axes, others, one.forward, one.backward, one.per_rank, beside, node.name)
                )
    return moves


def _types_at(value: fx.Node, node: fx.Node, types: tuple[AxisTypes, ...]) -> tuple[SpmdType, ...]:
    """The types in which ``node`` reads ``value``, or those of its result."""
    if value is node:
        return tuple(t.produced[node.name] for t in types)
    index = operands(node).index(value)
    return tuple(t.needed[node.name][index] for t in types)
