"""Where the halves of a microbatch take turns, and which collectives overlap. Passes create ``Turns``; the cost model reads it.

Turns cut a layer into pieces. The halves A and B run the pieces in the order A1, A2, B1, A3, B2, ...
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.types import SpmdType

Types = tuple[SpmdType, ...]

Read = tuple[str, Types]
"""A value's name and the types that its reader needs."""


def overlapped_pieces(issued: int, awaited: int) -> tuple[range, range]:
    """Return the pieces of half B that overlap a collective of half A, and the pieces of A that overlap one of B. The collective is issued
    at the end of piece ``issued`` and awaited before piece ``awaited``."""
    return range(issued - 1, awaited - 1), range(issued + 2, awaited + 2)


@dataclass(frozen=True, slots=True)
class Turns:
    """Where the halves of a layer take turns. All positions are those of ``ops``; ``len(ops)`` is the layer's end.

    ``starts``: the positions of the ops before which there is a turn. ``flights``: the conversions in flight across a turn, with the
    position of the first reader, and the turn before which the collective is issued (``None``: after the value is computed). ``producers``:
    the positions of the ops that compute the converted values (-1: an argument). ``experts``: the positions of mixtures of experts with
    all-to-alls, whose kernels take a turn before the experts' arithmetic and one after it. ``shared``: the conversions of parameters, which
    run once for both halves. ``uneven_reason``: the refusal reason if a device's rows can't be halved.
    """

    ops: tuple[str, ...]
    starts: tuple[int, ...]
    flights: dict[Read, tuple[int, int | None]]
    producers: dict[Read, int]
    experts: tuple[int, ...]
    shared: frozenset[Read]
    uneven_reason: str

    @property
    def count(self) -> int:
        """The number of turns."""
        return len(self.starts) + 2 * len(self.experts)

    def piece(self, position: int) -> int:
        """Return the index of the piece that an op belongs to."""
        in_kernels = sum((expert < position) + (expert <= position) for expert in self.experts)
        return sum(start <= position for start in self.starts) + in_kernels

    def span(self, read: Read) -> tuple[int, int]:
        """Return the piece that issues a conversion, and the piece that awaits it."""
        reader, turn = self.flights[read]
        producer = self.producers[read]
        issued = self.piece(max(producer, 0)) + (producer in self.experts) if turn is None else self.piece(turn) - 1
        return issued, self.piece(reader)

    def exchanges(self, op: str) -> tuple[tuple[int, int], ...]:
        """Return the spans of a mixture's two all-to-alls, to the experts' devices and back; none for other ops."""
        middle = next((self.piece(expert) for expert in self.experts if self.ops[expert] == op), None)
        return () if middle is None else ((middle - 1, middle), (middle, middle + 1))
