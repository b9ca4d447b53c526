"""The collectives that a layer's types imply (``passes.communication``), with bytes: the cost model counts them, and programs run them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from autopar.graph import LayerClass
from autopar.ops.operands import shape_of
from autopar.ops.routing import Routing
from autopar.sharding import AxisTypes
from autopar.types import Collective, SpmdType
from passes.communication import conversions, kernel_exchanges
from passes.conversions import ConversionStep
from passes.rewrite import products_of


@dataclass(frozen=True, slots=True)
class CollectivePair:
    """A collective of the forward pass and its dual in the backward pass, over ``axes`` on ``value``, which has ``bytes`` globally;
    ``sharded`` are the other axes that shard the value.

    With ``per_rank``, ``bytes`` are each rank's contribution to a gather; with ``routing``, each row is sent to all ranks that it reaches.
    ``router`` is that of rows that are sent to their experts or back, if ``dispatched`` by kernels that send a token once to each node. A
    rank then copies each row that it received to its experts' rows, or sums these; a byte counts ``permutation_passes`` times.
    ``rounded`` values are rounded to 8 bits before they are sent.
    ``overlapped_op`` is the op whose arithmetic overlaps the collectives, as in ring attention; empty if the layer waits for it. ``op`` is
    the op whose kernel runs the collectives; empty for a conversion between ops. ``overlapped_products`` are the products whose weight
    gradients are computed while the backward collective runs, if the strategy overlaps it. ``target`` are the types that the readers need,
    if this is the conversion's last step.
    """

    value: str
    bytes: float
    axes: tuple[int, ...]
    sharded: tuple[int, ...]
    forward: Collective
    backward: Collective
    per_rank: bool = False
    routing: Routing | None = None
    router: Routing | None = None
    dispatched: bool = False
    permutation_passes: float = 0.0
    rounded: bool = False
    overlapped_op: str = ""
    op: str = ""
    overlapped_products: tuple[str, ...] = ()
    target: tuple[SpmdType, ...] = ()

    def bytes_of_group(self, parts: int, size: int) -> float:
        """Return the bytes of the value in a group of ``size`` ranks, if the other axes divide the value into ``parts``."""
        return self.routed_bytes(size) / parts * (size if self.per_rank else 1)

    def routed_bytes(self, size: int) -> float:
        """Return the bytes of the value, each row counted once for each of ``size`` ranks that it reaches."""
        return self.bytes if self.routing is None else self.bytes * self.routing.reached(size)


def pairs_of_conversion(value: str, value_bytes: float, steps: Iterable[ConversionStep]) -> list[CollectivePair]:
    """Return the collectives of a value's conversion."""
    return [CollectivePair(value, value_bytes, s.axes, s.sharded, s.forward, s.backward) for s in steps if s.sends]


def pairs_of_layer(
    cls: LayerClass,
    types: tuple[AxisTypes, ...],
    value_bytes: Mapping[str, float],
    gradient: Mapping[str, bool],
    converted: Callable[[list[CollectivePair], bool], list[CollectivePair]] = lambda pairs, gradient: pairs,
) -> tuple[CollectivePair, ...]:
    """Return every collective of the layer.

    ``value_bytes`` are the bytes of unsharded values by name; ``gradient`` says which values have a gradient. ``converted`` may change the
    collectives of one conversion (``TrainerModel.conversions``).
    """
    pairs: list[CollectivePair] = []
    joined = products_of(cls, types, gradient)
    for one in conversions(cls.graph, types, gradient):
        of_value = pairs_of_conversion(one.value, value_bytes[one.value], one.steps)
        if of_value:
            products = tuple(product.name for product in joined.get((one.value, one.target), ()))
            of_value[-1] = replace(of_value[-1], overlapped_products=products, target=one.target)
        pairs += converted(of_value, gradient[one.value])
    for exchange in kernel_exchanges(cls.graph, types):
        collective = exchange.collective
        name = collective.value.name
        pairs.append(
            CollectivePair(
                value=name,
                bytes=collective.bytes(value_bytes[name] / max(1, math.prod(shape_of(collective.value)))),
                axes=exchange.axes,
                sharded=exchange.sharded,
                forward=collective.forward,
                backward=collective.backward,
                per_rank=collective.per_rank,
                routing=collective.routing,
                router=collective.router,
                rounded=collective.rounded,
                overlapped_op=exchange.op if collective.overlapped else "",
                op=exchange.op,
            )
        )
    return tuple(pairs)
