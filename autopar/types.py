"""SPMD types: how a tensor is distributed on one axis of the mesh, and the conversions between types.

======== ======== =================================================================
forward  gradient meaning
======== ======== =================================================================
``I``    ``I``    same value everywhere, same gradient everywhere
``R``    ``P``    same value everywhere, each rank's gradient is a partial sum
``S(d)`` ``S(d)`` a slice of dim ``d``
``P``    ``R``    a partial sum; the gradient is the same everywhere
======== ======== =================================================================

Emitted programs use the same types, and the collectives that convert them, through ``spmd_types``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True, order=True)
class SpmdType:
    """One of ``I``, ``R``, ``P`` or ``S(dim)``; only ``S`` has a ``dim``, which is non-negative."""

    kind: str
    dim: int | None = None

    def __post_init__(self) -> None:
        assert self.kind in ("I", "R", "S", "P"), self.kind
        assert (self.dim is not None) == (self.kind == "S") and (self.dim is None or self.dim >= 0), self

    def __str__(self) -> str:
        return f"S({self.dim})" if self.kind == "S" else self.kind

    @property
    def dual(self) -> SpmdType:
        """The type of the gradient."""
        return {"I": I, "R": P, "P": R}.get(self.kind, self)

    @property
    def sharded(self) -> bool:
        return self.kind == "S"

    @staticmethod
    def parse(text: str) -> SpmdType:
        """Parse the text that ``str`` returns: ``"I"``, ``"R"``, ``"P"``, ``"S(0)"``."""
        if text.startswith("S(") and text.endswith(")"):
            return S(int(text[2:-1]))
        return SpmdType(text)


I = SpmdType("I")  # noqa: E741  the type system's own name
R = SpmdType("R")
P = SpmdType("P")


def S(dim: int) -> SpmdType:  # noqa: N802  the type system's own name
    """Return the type that is sharded on dim ``dim``."""
    return SpmdType("S", dim)


class Collective(Enum):
    """The collective of a type conversion or a kernel; ``NONE`` and ``LOCAL`` (slice, zero, pad) communicate nothing.

    ``ROTATE`` and ``SHIFT`` are point to point: every rank's slice goes around a ring of all ranks, or to one other rank. Only parameter
    servers use ``REDUCE`` and ``BROADCAST``.
    """

    NONE = "none"
    LOCAL = "local"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    ROTATE = "rotate"
    SHIFT = "shift"

    @property
    def sends(self) -> bool:
        """Whether ranks send bytes to each other."""
        return self not in (Collective.NONE, Collective.LOCAL)


_CONVERSIONS: dict[str, tuple[Collective, Collective]] = {
    # source kind + target kind: (forward, backward)
    "IR": (Collective.NONE, Collective.ALL_REDUCE),
    "RI": (Collective.NONE, Collective.LOCAL),
    "PI": (Collective.ALL_REDUCE, Collective.NONE),
    "PR": (Collective.ALL_REDUCE, Collective.ALL_REDUCE),
    "PS": (Collective.REDUCE_SCATTER, Collective.ALL_GATHER),
    "SR": (Collective.ALL_GATHER, Collective.REDUCE_SCATTER),
    "SI": (Collective.ALL_GATHER, Collective.LOCAL),
    "IS": (Collective.LOCAL, Collective.ALL_GATHER),
    "RS": (Collective.LOCAL, Collective.LOCAL),
    "SS": (Collective.ALL_TO_ALL, Collective.ALL_TO_ALL),
    "RP": (Collective.LOCAL, Collective.LOCAL),
    "IP": (Collective.LOCAL, Collective.NONE),
}


def conversion(source: SpmdType, target: SpmdType) -> tuple[Collective, Collective] | None:
    """Return the collectives (forward, backward) that convert ``source`` to ``target``; ``None`` if there is no conversion.

    Equal types need no collective: the result is ``(NONE, NONE)``.
    """
    if source == target:
        return Collective.NONE, Collective.NONE
    return _CONVERSIONS.get(source.kind + target.kind)


def legal_over_microbatches(source: SpmdType, target: SpmdType, gradient: bool) -> bool:
    """Return whether a conversion is possible on the microbatch axis, where nothing communicates because microbatches run in sequence.

    For a value without ``gradient``, I and R are the same. A value that is equal in every microbatch (a weight penalty) becomes a partial
    sum by division by the number of microbatches, but only from type R: from type I, its gradient would not be divided.
    """
    if source == target:
        return True
    if not gradient:
        return source in (I, R) and target in (I, R, P)
    return source == R and target == P
