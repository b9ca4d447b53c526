"""The collectives that a layer's types imply (``passes.communication``), with bytes: they are priced, and the program must run them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from autopar.graph import LayerClass
from autopar.ops.operands import shape_of
from autopar.sharding import AxisTypes
from autopar.types import Collective, SpmdType
from passes.communication import conversions, kernel_exchanges
from passes.conversions import ConversionStep
from passes.rewrite import products_of


@dataclass(frozen=True, slots=True)
class Move:
    """One collective over ``axes`` on a value of ``bytes`` globally; ``sharded`` are the other axes that shard the value.

    With ``per_rank`` the bytes are those that each rank contributes to a gather. ``value`` is the value's name. ``overlapped_op`` is the op
    whose arithmetic overlaps the collective, as with a ring's rotations; empty if the layer waits for it. ``op`` is the op whose kernel
    runs the collective; empty for a conversion between ops. ``under`` are the products whose weights' gradients are computed while the
    backward collective runs, if the strategy overlaps it; empty for others. ``target`` are the types in which the value is read, if this is
    the last collective on the way there.
    """

    value: str
    bytes: float
    axes: tuple[int, ...]
    sharded: tuple[int, ...]
    forward: Collective
    backward: Collective
    per_rank: bool = False
    overlapped_op: str = ""
    op: str = ""
    under: tuple[str, ...] = ()
    target: tuple[SpmdType, ...] = ()


def step_moves(value: str, value_bytes: float, steps: Iterable[ConversionStep]) -> list[Move]:
    """The collectives of a value's conversion."""
    return [Move(value, value_bytes, s.axes, s.sharded, s.forward, s.backward) for s in steps if s.sends]


def layer_moves(
    cls: LayerClass,
    types: tuple[AxisTypes, ...],
    value_bytes: Mapping[str, float],
    gradient: Mapping[str, bool],
    converted: Callable[[list[Move], bool], list[Move]] = lambda moves, gradient: moves,
) -> tuple[Move, ...]:
    """Every collective of the layer.

    ``value_bytes`` are the bytes of whole values by name; ``gradient`` tells which values a gradient flows back through. ``converted``
    may change the collectives of one conversion (``Trainer.conversions``).
    """
    moves: list[Move] = []
    joined = products_of(cls, types, gradient)
    for one in conversions(cls.graph, types, gradient):
        own = step_moves(one.value, value_bytes[one.value], one.steps)
        if own:
            under = tuple(product.name for product in joined.get((one.value, one.target), ()))
            own[-1] = replace(own[-1], under=under, target=one.target)
        moves += converted(own, gradient[one.value])
    for exchange in kernel_exchanges(cls.graph, types):
        wire = exchange.wire
        name = wire.value.name
        moves.append(
            Move(
                value=name,
                bytes=wire.bytes(value_bytes[name] / max(1, math.prod(shape_of(wire.value)))),
                axes=exchange.axes,
                sharded=exchange.sharded,
                forward=wire.forward,
                backward=wire.backward,
                per_rank=wire.per_rank,
                overlapped_op=exchange.op if wire.overlapped else "",
                op=exchange.op,
            )
        )
    return tuple(moves)
