"""What was measured of a device and of the ways between devices, as curves by size.

A specification gives one figure for all sizes; a measurement knows that small products, short messages and strided reads are
slower. Everything here answers the questions that a price asks (``Gpu.seconds``, ``Gpu.update_s``, ``Wires.seconds``), so that a price
never has to know where its figures come from.
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

PRODUCT, ATTENTION, POINTWISE, VIEW = "product", "attention", "pointwise", "view"
"""Kinds of op by what bounds them; every other kind is an op's own name, and is ``POINTWISE`` where that was not measured."""


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
        """The curve through ``points``; of equal ``x`` the geometric mean. ``rising``: no ``y`` is below an earlier one."""
        found: dict[float, list[float]] = {}
        for x, y in sorted(points):
            found.setdefault(x, []).append(y)
        means = [float(np.exp(np.mean(np.log(values)))) for values in found.values()]
        if rising:
            means = list(itertools.accumulate(means, max))
        return Curve(tuple(found), tuple(means))

    def at(self, x: Any) -> Any:
        """The value at ``x`` (a number or an array), that of the nearest end beyond the ends."""
        return np.exp(np.interp(np.log(np.maximum(x, 1e-30)), np.log(self.x), np.log(self.y)))

    def beyond(self, x: float) -> float:
        """The same for a time by size: beyond the last size it grows in proportion."""
        return float(self.at(x)) * max(1.0, x / self.x[-1])


@dataclass(frozen=True, slots=True)
class Ops:
    """Seconds of ops on one device while all others are busy too.

    ``products`` are FLOP/s by FLOPs per byte, of each dtype, forward and backward; ``attention`` the same by FLOPs; ``moves`` bytes
    per second by bytes, of each kind of op, forward and backward; ``update`` seconds of the optimizer by the bytes that it moves for
    one tensor.
    """

    products: Mapping[tuple[str, bool], Curve]
    attention: Mapping[tuple[str, bool], Curve]
    moves: Mapping[tuple[str, bool], Curve]
    update: Curve

    def seconds(self, kinds: NDArray[np.str_], flops: Floats, moved: Floats, dtype: str, backward: bool) -> Floats:
        """Seconds of every op beyond its start."""
        found = np.zeros_like(flops)
        for kind in np.unique(kinds):
            here = kinds == kind
            if kind == PRODUCT:
                rate = self._of(self.products, dtype, backward).at(flops[here] / np.maximum(moved[here], 1.0))
                found[here] = flops[here] / rate
            elif kind == ATTENTION:
                found[here] = flops[here] / self._of(self.attention, dtype, backward).at(flops[here])
            else:
                name = str(kind) if (str(kind), backward) in self.moves else POINTWISE
                found[here] = moved[here] / self.moves[name, backward].at(moved[here])
        return found

    @staticmethod
    def _of(curves: Mapping[tuple[str, bool], Curve], dtype: str, backward: bool) -> Curve:
        # what was not measured runs as the nearest that was: 16-bit formats alike
        for name in (dtype, "bfloat16" if dtype in ("float16", "float8") else dtype, "float32"):
            if (name, backward) in curves:
                return curves[name, backward]
        return next(iter(curves.values()))


@dataclass(frozen=True, slots=True)
class Wires:
    """Seconds of collectives by name and group size, by the bytes of the tensor that the group makes whole.

    Names are ``Collective``'s values, ``"p2p"`` by the bytes sent, and ``"sharded all_gather"`` and ``"sharded reduce_scatter"``: what
    they cost with the copies into and out of a layer's flat buffers, as FSDP runs them. ``waits`` is, by group size, what meeting for a
    collective costs after arithmetic of one second, in seconds: no two devices take equally long.
    """

    curves: Mapping[tuple[str, int], Curve]
    waits: Mapping[int, float] = field(default_factory=dict)

    def seconds(self, name: str, members: int, size: float) -> float | None:
        """``None`` where nothing of the kind was measured."""
        curve = self.curves.get((name, members))
        return None if curve is None else curve.beyond(size)

    def wait_s(self, meetings: Sequence[int], compute_s: float) -> float:
        """What groups of these sizes wait for their slowest member, meeting after equal parts of ``compute_s``.

        Delays add up independently, so that the spread of a part's time, and with it how far its slowest member is behind the mean
        (order statistics of the normal distribution), grows with the square root of the part's length.
        """
        if not meetings:
            return 0.0
        return sum(self.waits.get(n, 0.0) for n in meetings) * math.sqrt(compute_s / len(meetings))
