"""Lists the conversions that take a value from its types (one per axis) to others, in order, each on one axis or on several at once.

Several axes may shard one dim; its slices are then nested, outermost axis first. A conversion that changes the sharding of a
dim on an axis while an inner axis shards that dim, too, would interleave the slices. So inner axes stop sharding a dim before outer ones
change it, and outer axes start sharding it first.

Axes with the same conversion are *flattened*, outermost first, into one axis over all their ranks: one collective replaces several, and
fewer bytes are sent. The result equals that of one conversion after the other if no axis between them shards a dim that the conversion
changes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from autopar.types import Collective, I, R, SpmdType, conversion

Types = tuple[SpmdType, ...]


@dataclass(frozen=True, slots=True)
class ConversionStep:
    """One conversion on the flattened ``axes`` (indices in the mesh, outermost first), its two collectives, and the value's types
    ``after`` it. ``backward`` is ``NONE`` for a value without a gradient."""

    axes: tuple[int, ...]
    source: SpmdType
    target: SpmdType
    forward: Collective
    backward: Collective
    after: Types

    @property
    def sends(self) -> bool:
        """Whether ranks send bytes to each other, forward or backward."""
        return self.forward.sends or self.backward.sends

    @property
    def sharded(self) -> tuple[int, ...]:
        """The other axes that shard the value during the conversion."""
        return tuple([i for i, t in enumerate(self.after) if t.sharded and i not in self.axes])


@functools.lru_cache(maxsize=65536)
def conversion_steps(source: Types, target: Types, gradient: bool = True) -> tuple[ConversionStep, ...]:
    """Return the conversions, in order, from ``source`` to ``target``, which have a type for each axis, outermost first.

    Without ``gradient``, a value needs no conversion between I and R: they differ only in the gradient.
    """
    assert len(source) == len(target), (source, target)
    current, steps = list(source), []
    for axes, old, new in _ordered(_units(source, target)):
        if not gradient and {old, new} == {I, R}:
            continue
        pair = conversion(old, new)
        assert pair is not None, (source, target, axes)
        for axis in axes:
            current[axis] = new
        steps.append(ConversionStep(axes, old, new, pair[0], pair[1] if gradient else Collective.NONE, tuple(current)))
    return tuple(steps)


@dataclass
class _Unit:
    """Axes that convert together: their current type and the type that they need."""

    axes: tuple[int, ...]
    current: SpmdType
    target: SpmdType


def _ordered(units: list[_Unit]) -> list[tuple[tuple[int, ...], SpmdType, SpmdType]]:
    """Return the steps of all ``units`` in order: axes, source type, target type."""
    steps: list[tuple[tuple[int, ...], SpmdType, SpmdType]] = []

    def apply(unit: _Unit, to: SpmdType) -> None:
        if steps and steps[-1][1:] == (unit.current, to):
            # One collective on the flattened axes gives the same result: no axis between them shards the dim now (see ``_inner_shards``).
            steps[-1] = (tuple(sorted((*steps[-1][0], *unit.axes))), unit.current, to)
        else:
            steps.append((unit.axes, unit.current, to))
        unit.current = to

    while pending := [i for i, unit in enumerate(units) if unit.current != unit.target]:
        # Axes stop sharding from inner to outer, and start sharding from outer to inner: gathers and reductions first, from the inside.
        order = sorted(pending, key=lambda i: (units[i].target.sharded, i if units[i].target.sharded else -i))
        ready = next((i for i in order if not _inner_shards(i, units) and not _must_wait_for_outer(i, units)), None)
        if ready is not None:
            apply(units[ready], units[ready].target)
            continue
        stuck = next(i for i in order if not _must_wait_for_outer(i, units))
        for inner in _inner_shards(stuck, units):
            apply(units[inner], I if units[inner].target == I else R)
        apply(units[stuck], units[stuck].target)
    return steps


def _units(source: Types, target: Types) -> list[_Unit]:
    """Return the axes, joined where they make the same conversion, in the order of each unit's outermost axis."""
    units: list[_Unit] = []
    for axis, (now, wanted) in enumerate(zip(source, target, strict=True)):
        same = next((u for u in units if (u.current, u.target) == (now, wanted) and now != wanted), None)
        dims = {t.dim for t in (now, wanted) if t.dim is not None}
        if same is not None:
            between = range(same.axes[0] + 1, axis)
            others = [a for a in between if a not in same.axes]
            if not any(t.dim in dims for a in others for t in (source[a], target[a])):
                same.axes = (*same.axes, axis)
                continue
        units.append(_Unit((axis,), now, wanted))
    return units


def _inner_shards(index: int, units: list[_Unit]) -> list[int]:
    """Return the inner units, innermost first, that shard a dim that this unit's conversion changes."""
    unit = units[index]
    touched = {t.dim for t in (unit.current, unit.target) if t.dim is not None}
    return [other for other in reversed(range(index + 1, len(units))) if units[other].current.dim in touched]


def _must_wait_for_outer(index: int, units: list[_Unit]) -> bool:
    """Return whether an outer unit has yet to shard the dim that this one will shard."""
    wanted = units[index].target.dim
    return wanted is not None and any(u.target.dim == wanted and u.current.dim != wanted for u in units[:index])
