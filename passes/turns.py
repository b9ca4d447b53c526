"""Where the parts of a microbatch take turns in a layer, and what overlaps then: a dataclass that passes make and prices read.

A layer is cut into pieces. Two halves run them in the order A1, A2, B1, A3, B2, ...: the second is one piece behind the first.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.types import SpmdType

Types = tuple[SpmdType, ...]

Read = tuple[str, Types]
"""A value's name and the types in which it is read."""


def overlapped_pieces(issued: int, awaited: int) -> tuple[range, range]:
    """Return the other half's pieces that overlap a collective which is issued at the end of one piece and awaited before another: for a
    collective of the first half, and for one of the second."""
    return range(issued - 1, awaited - 1), range(issued + 2, awaited + 2)


@dataclass(frozen=True, slots=True)
class Turns:
    """Where the halves of a layer take turns: before the ops at the positions ``at`` among ``ops`` (their number: at the layer's end).

    ``flights`` are the conversions in flight across a turn: the position of the first reader, and that of the turn before which the
    collective is issued (``None``: it is issued where the value is computed). ``made`` are the positions of their values (-1: an argument).
    ``inner`` are the positions of mixtures of experts whose tokens are exchanged: their kernels take a turn before the experts' arithmetic,
    and one after it. The flights in ``once``, conversions of parameters, run once for both halves. ``uneven`` is the refusal reason of a
    layer whose rows on a device can't be divided.
    """

    ops: tuple[str, ...]
    at: tuple[int, ...]
    flights: dict[Read, tuple[int, int | None]]
    made: dict[Read, int]
    inner: tuple[int, ...]
    once: frozenset[Read]
    uneven: str

    @property
    def count(self) -> int:
        """The number of turns."""
        return len(self.at) + 2 * len(self.inner)

    def piece(self, position: int) -> int:
        """The number of the piece between two turns that an op belongs to."""
        passed = sum((place < position) + (place <= position) for place in self.inner)
        return sum(turn <= position for turn in self.at) + passed

    def span(self, read: Read) -> tuple[int, int]:
        """The piece in which a conversion is issued, and the one that begins with its result."""
        arrives, before = self.flights[read]
        made = self.made[read]
        issued = self.piece(max(made, 0)) + (made in self.inner) if before is None else self.piece(before) - 1
        return issued, self.piece(arrives)

    def exchanges(self, op: str) -> tuple[tuple[int, int], ...]:
        """The spans of a mixture's two all-to-alls, to the experts' devices and back; none for other ops."""
        middle = next((self.piece(place) for place in self.inner if self.ops[place] == op), None)
        return () if middle is None else ((middle - 1, middle), (middle, middle + 1))
