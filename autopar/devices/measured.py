"""Measured speeds of devices and links, as curves over the size of the op or message.

A specification has one figure for all sizes, but small products, short messages and strided reads are slower. ``Gpu.seconds`` and
``Gpu.update_s`` use the curves if a device has them, and otherwise the specification.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.precision import FP8_PRECISIONS

Floats = NDArray[np.float64]

PRODUCT, ATTENTION, POINTWISE = "product", "attention", "pointwise"
GROUPED = "grouped_product"
CLASS_LOSS = "cross_entropy_loss"
"""Kinds of ops with separate curves. The kind of a product in 8 bits is its precision (``FP8_PRECISIONS``). Any other kind is the name of
an op; an op that wasn't measured uses the curve of ``POINTWISE``."""


@dataclass(frozen=True, slots=True)
class Curve:
    """``y`` at measured ``x`` (ascending, positive), with log-log interpolation."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.x) == len(self.y) > 0 and min(*self.x, *self.y, 1.0) > 0, self
        assert all(a < b for a, b in zip(self.x, self.x[1:], strict=False)), self

    @staticmethod
    def through(points: Iterable[tuple[float, float]], rising: bool = False) -> Curve:
        """Return the curve through ``points``, with the geometric mean of points at equal ``x``. ``rising`` makes ``y`` nondecreasing."""
        found: dict[float, list[float]] = {}
        for x, y in sorted(points):
            found.setdefault(x, []).append(y)
        means = [float(np.exp(np.mean(np.log(values)))) for values in found.values()]
        if rising:
            means = list(itertools.accumulate(means, max))
        return Curve(tuple(found), tuple(means))

    def at(self, x: Any) -> Any:
        """Return the value at ``x`` (a number or an array), constant beyond the ends."""
        return np.exp(np.interp(np.log(np.maximum(x, 1e-30)), np.log(self.x), np.log(self.y)))

    def beyond(self, x: float) -> float:
        """Return the seconds at size ``x``; beyond the last measured size they grow in proportion to ``x``."""
        return float(self.at(x)) * max(1.0, x / self.x[-1])

    def higher(self, factor: float) -> Curve:
        return Curve(self.x, tuple(factor * y for y in self.y))

    def wider(self, factor: float) -> Curve:
        """Return the seconds with ``factor`` times the bandwidth: those of larger sizes, since latencies stay."""
        return Curve(tuple(factor * x for x in self.x), self.y)


@dataclass(frozen=True, slots=True)
class Ops:
    """Measured speeds of ops on a device while all other devices are busy, too.

    Keys are (dtype or kind of op, whether backward). The curves of ``products`` map FLOPs per byte to FLOP/s, those of ``attention`` FLOPs
    to FLOP/s, those of ``moves`` bytes to bytes per second. ``update`` maps the bytes that the optimizer moves per tensor to seconds.
    """

    products: Mapping[tuple[str, bool], Curve]
    attention: Mapping[tuple[str, bool], Curve]
    moves: Mapping[tuple[str, bool], Curve]
    update: Curve

    def seconds(self, kinds: NDArray[np.str_], flops: Floats, moved: Floats, dtype: str, backward: bool) -> Floats:
        """Return the seconds of each op, without its launch (see ``Gpu.seconds``)."""
        found = np.zeros_like(flops)
        for kind in np.unique(kinds):
            mask = kinds == kind
            if kind in (PRODUCT, GROUPED, *FP8_PRECISIONS):
                precision = str(kind) if kind in FP8_PRECISIONS else dtype
                rate = self._curve(self.products, precision, backward).at(flops[mask] / np.maximum(moved[mask], 1.0))
                found[mask] = flops[mask] / rate
            elif kind == ATTENTION:
                found[mask] = flops[mask] / self._curve(self.attention, dtype, backward).at(flops[mask])
            else:
                name = str(kind) if (str(kind), backward) in self.moves else POINTWISE
                found[mask] = moved[mask] / self.moves[name, backward].at(moved[mask])
        return found

    def fastest_flops_per_s(self, dtype: str) -> float:
        """Return the highest FLOP/s with which ``seconds`` prices products and attention in ``dtype``."""
        curves = [
            self._curve(kind, dtype, b) for kind in (self.products, self.attention) if kind for b in (False, True)
        ]
        return max((max(curve.y) for curve in curves), default=0.0)

    @staticmethod
    def _curve(curves: Mapping[tuple[str, bool], Curve], dtype: str, backward: bool) -> Curve:
        # a dtype that wasn't measured uses the curve of a similar one, such as the other 16-bit format
        for name in (dtype, "bfloat16" if dtype in ("float16", *FP8_PRECISIONS) else dtype, "float32"):
            if (name, backward) in curves:
                return curves[name, backward]
        return next(iter(curves.values()))

    def faster(self, arithmetic: float = 1.0, memory: float = 1.0) -> Ops:
        """Return the speeds of a device with these multiples of its arithmetic and its memory bandwidth."""
        products, attention = (
            {key: curve.higher(arithmetic) for key, curve in curves.items()}
            for curves in (self.products, self.attention)
        )
        moves = {key: curve.higher(memory) for key, curve in self.moves.items()}
        return Ops(products, attention, moves, self.update.wider(memory))


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """Seconds of collectives: ``curves`` over the bytes of the full tensor (see ``price.collectives``), by (name, group size).

    A name is a value of ``Collective``, or ``"p2p"`` (over the bytes sent), or ``"flat reduce_scatter"`` (of ZeRO-1's flat buffers), or
    ``"sharded all_gather"`` or ``"sharded reduce_scatter"`` (FSDP's, with the copies into and out of a layer's flat buffers). ``waits``
    maps a group size to the seconds for which a collective waits for the group's slowest rank after one second of compute.
    """

    curves: Mapping[tuple[str, int], Curve]
    waits: Mapping[int, float] = field(default_factory=dict)

    def seconds(self, name: str, members: int, size: float) -> float | None:
        """Return the seconds of a collective over ``members`` ranks on ``size`` bytes; ``None`` if this group size wasn't measured."""
        curve = self.curves.get((name, members))
        return None if curve is None else curve.beyond(size)

    def wider(self, factor: float) -> CollectiveTimes:
        """Return the times on links with ``factor`` times the bandwidth."""
        return CollectiveTimes({key: curve.wider(factor) for key, curve in self.curves.items()}, self.waits)

    def wait_s(self, group_sizes: Sequence[int], compute_s: float) -> float:
        """Return the total seconds for which collectives over groups of these sizes wait for the slowest ranks, if the collectives divide
        ``compute_s`` into equal parts.

        Delays are assumed to be independent. The standard deviation of a part's time, and with it the expected delay of the slowest rank
        (an order statistic of the normal distribution), then grows with the square root of the part's length.
        """
        if not group_sizes:
            return 0.0
        return sum(self.waits.get(n, 0.0) for n in group_sizes) * math.sqrt(compute_s / len(group_sizes))
