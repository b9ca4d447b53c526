"""Measurements of a device and of the links between devices, as curves by size.

A specification has one figure for all sizes, but small products, short messages and strided reads are slower. Prices ask for times
(``Gpu.seconds``, ``Gpu.update_s``, ``Wires.seconds``) and do not depend on whether these are measured or specified.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

PRODUCT8 = "product in 8 bits"
PRODUCT, ATTENTION, POINTWISE = "product", "attention", "pointwise"
CLASS_LOSS = "cross_entropy_loss"
"""Kinds of op with curves of their own. Every other kind is an op's name, and has the curve of ``POINTWISE`` where it was not measured."""


@dataclass(frozen=True, slots=True)
class Curve:
    """``y`` at measured ``x`` (rising, positive), linear between them in the logarithms."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.x) == len(self.y) > 0 and min(*self.x, *self.y, 1.0) > 0, self
        assert all(a < b for a, b in zip(self.x, self.x[1:], strict=False)), self

    @staticmethod
    def through(points: Iterable[tuple[float, float]], rising: bool = False) -> Curve:
        """The curve through ``points``, with the geometric mean of those at equal ``x``. ``rising``: no ``y`` is below an earlier one."""
        found: dict[float, list[float]] = {}
        for x, y in sorted(points):
            found.setdefault(x, []).append(y)
        means = [float(np.exp(np.mean(np.log(values)))) for values in found.values()]
        if rising:
            means = list(itertools.accumulate(means, max))
        return Curve(tuple(found), tuple(means))

    def at(self, x: Any) -> Any:
        """The value at ``x`` (a number or an array); beyond an end, the value at that end."""
        return np.exp(np.interp(np.log(np.maximum(x, 1e-30)), np.log(self.x), np.log(self.y)))

    def beyond(self, x: float) -> float:
        """The same for a curve of time by size: beyond the last size, time grows in proportion."""
        return float(self.at(x)) * max(1.0, x / self.x[-1])


@dataclass(frozen=True, slots=True)
class Ops:
    """Times of ops on one device while all other devices are busy too.

    Keys are (dtype or kind of op, whether backward). ``products`` are FLOP/s by FLOPs per byte; ``attention`` FLOP/s by FLOPs; ``moves``
    bytes per second by bytes; ``update`` seconds of the optimizer by the bytes that it moves for one tensor.
    """

    products: Mapping[tuple[str, bool], Curve]
    attention: Mapping[tuple[str, bool], Curve]
    moves: Mapping[tuple[str, bool], Curve]
    update: Curve

    def seconds(self, kinds: NDArray[np.str_], flops: Floats, moved: Floats, dtype: str, backward: bool) -> Floats:
        """Seconds of every op without its launch."""
        found = np.zeros_like(flops)
        for kind in np.unique(kinds):
            here = kinds == kind
            if kind in (PRODUCT, PRODUCT8):
                numbers = "float8" if kind == PRODUCT8 else dtype
                rate = self._of(self.products, numbers, backward).at(flops[here] / np.maximum(moved[here], 1.0))
                found[here] = flops[here] / rate
            elif kind == ATTENTION:
                found[here] = flops[here] / self._of(self.attention, dtype, backward).at(flops[here])
            else:
                name = str(kind) if (str(kind), backward) in self.moves else POINTWISE
                found[here] = moved[here] / self.moves[name, backward].at(moved[here])
        return found

    @staticmethod
    def _of(curves: Mapping[tuple[str, bool], Curve], dtype: str, backward: bool) -> Curve:
        # a dtype that was not measured has the curve of a similar one: 16-bit formats are alike
        for name in (dtype, "bfloat16" if dtype in ("float16", "float8") else dtype, "float32"):
            if (name, backward) in curves:
                return curves[name, backward]
        return next(iter(curves.values()))


@dataclass(frozen=True, slots=True)
class Wires:
    """Seconds of collectives by name and group size, as curves by the bytes of the whole tensor (see ``price.collectives``).

    Names are the values of ``Collective``, ``"p2p"`` (by the bytes sent), ``"flat reduce_scatter"``: that of ZeRO 1's flat buffers, and
    ``"sharded all_gather"`` and ``"sharded reduce_scatter"``: FSDP's, with the copies into and out of a layer's flat buffers. ``waits``
    are, by group size, the seconds that a collective waits for the slowest member after one second of arithmetic, since no two devices take
    equally long.
    """

    curves: Mapping[tuple[str, int], Curve]
    waits: Mapping[int, float] = field(default_factory=dict)

    def seconds(self, name: str, members: int, size: float) -> float | None:
        """``None`` where that collective was not measured with that group size."""
        curve = self.curves.get((name, members))
        return None if curve is None else curve.beyond(size)

    def wait_s(self, meetings: Sequence[int], compute_s: float) -> float:
        """Seconds that groups of these sizes wait for their slowest members, when their collectives divide ``compute_s`` equally.

        Delays are independent. The spread of a part's time, and with it the delay of its slowest member against the mean (order
        statistics of the normal distribution), therefore grows with the square root of the part's length.
        """
        if not meetings:
            return 0.0
        return sum(self.waits.get(n, 0.0) for n in meetings) * math.sqrt(compute_s / len(meetings))
