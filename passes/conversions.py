"""How a value of one type on every axis becomes another: an ordered list of one-axis conversions.

Several axes may shard one dim; its slices are then nested, outermost axis first. A conversion on an axis that touches a
dim which an inner axis holds would interleave the slices, so inner axes let go of a dim before outer ones change it, and
outer axes take hold of it first.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.types import I, R, SpmdType, conversion


@dataclass(frozen=True, slots=True)
class Step:
    """One conversion on one axis (by its index in the mesh)."""

    axis: int
    source: SpmdType
    target: SpmdType


def conversion_steps(source: tuple[SpmdType, ...], target: tuple[SpmdType, ...]) -> tuple[Step, ...]:
    """The conversions, in order, from ``source[axis]`` to ``target[axis]`` on every axis (outer to inner)."""
    assert len(source) == len(target), (source, target)
    current = list(source)
    steps: list[Step] = []

    def apply(axis: int, to: SpmdType) -> None:
        assert conversion(current[axis], to) is not None, (source, target, axis)
        steps.append(Step(axis, current[axis], to))
        current[axis] = to

    while current != list(target):
        pending = [axis for axis in range(len(current)) if current[axis] != target[axis]]
        # Letting go goes inner to outer, taking hold outer to inner: gathers and reductions first, from the inside.
        order = sorted(pending, key=lambda axis: (target[axis].sharded, axis if target[axis].sharded else -axis))
        ready = next(
            (axis for axis in order if not _holders(axis, current, target) and not _waits(axis, current, target)), None
        )
        if ready is not None:
            apply(ready, target[ready])
            continue
        stuck = next(axis for axis in order if not _waits(axis, current, target))
        for axis in _holders(stuck, current, target):
            apply(axis, I if target[axis] == I else R)
        apply(stuck, target[stuck])
    return tuple(steps)


def _holders(axis: int, current: list[SpmdType], target: tuple[SpmdType, ...]) -> list[int]:
    """The inner axes, innermost first, that hold a dim which the axis's conversion touches."""
    touched = {t.dim for t in (current[axis], target[axis]) if t.dim is not None}
    return [other for other in reversed(range(axis + 1, len(current))) if current[other].dim in touched]


def _waits(axis: int, current: list[SpmdType], target: tuple[SpmdType, ...]) -> bool:
    """Whether an outer axis has still to take hold of the dim that this axis wants."""
    wanted = target[axis].dim
    return wanted is not None and any(target[o].dim == wanted and current[o].dim != wanted for o in range(axis))
