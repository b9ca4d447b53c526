r"""The price of a layer whose microbatch is computed in two halves that take turns (``passes.halves``, ``program.halves``).

A half is a microbatch of half the rows: its ops and collectives have the prices of those smaller shapes, kernels' launches included, and
there are twice as many. The layer's ops are cut into pieces *p_1 ... p_n*, whose seconds are *t_k*, forward and backward alike in number.
The halves run them in the order A1, A2, B1, A3, B2, ... A collective that one half issues at the end of its piece *i* and awaits before its
piece *j* has these pieces of the other half beside it::

    of the first half    t_(i-1) ... t_(j-2)          of the second half    t_(i+2) ... t_(j+1)

*u* of a collective is the sum of these seconds, each divided among the collectives that it is beside. With *w* seconds of its own, it adds

    w - min(u, w) + slowdown min(u, w)

to the layer (``price.collectives.beside_s``). Layers that follow each other without meeting in between are a cycle: the piece after the
last is the first of the next layer. Where something is done around a whole layer (recomputation, FSDP's gathers, copies to the host), the
halves meet at its ends: there are no pieces beyond, and what is sent there is awaited. There halves are cut and joined, too: copies of the
layer's input gradient and of its result.

A conversion of a parameter is made once for both halves, and counts as awaited. The gradients of parameters, one of each half, are added
up; one half's wait for the other's, at most all of the layer's.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from autopar.devices import Cluster
from autopar.devices.measured import Floats
from autopar.price.layer import Bound, Core, Sizes, op_seconds, way_s
from autopar.price.moves import Move
from autopar.price.state import Precision
from autopar.price.trainer import Trainer
from autopar.types import Collective
from passes.halves import Turns

Span = tuple[int, int, float]
"""A collective: the piece in which it is issued, the one before which it is awaited, and its seconds."""


def in_halves(
    whole: Core,
    half: Core,
    bound: Bound,
    given: Sizes,
    turns: Turns,
    chained: bool,
    setting: tuple[Cluster, Precision, Trainer],
) -> Core:
    """The core of a microbatch in halves, from that of the ``whole`` microbatch and that of ``half`` of it, whose sizes are ``given``.

    ``chained``: the halves go on into the next layer without meeting.
    """
    cluster, numbers, trainer = setting
    forward_s, backward_s = op_seconds(bound, given, cluster, numbers)
    exposed = []
    for side, arithmetic_s in (("forward", forward_s), ("backward", backward_s)):
        spans = [(*span, way_s(bound, move, side, given, cluster)) for move, span in _spans(bound, turns)]
        pieces = _pieces(turns, [node.name for node in bound.table.ops], arithmetic_s, chained)
        left_s = exposed_s(pieces, spans, chained, lambda w, u: trainer.exposed_early_s(w, u, cluster))
        shared = [move for move in bound.moves if (move.value, move.target) in turns.once]
        twice_s = 2 * sum(wire_s for _, _, wire_s in spans)
        exposed.append(left_s - twice_s - sum(way_s(bound, move, side, given, cluster) for move in shared))
    copied = 0.0 if chained else 2.0 / cluster.gpu.bytes_per_s
    gradient_bytes = half.trainable * numbers.width
    added_s = 3 * gradient_bytes / cluster.gpu.bytes_per_s
    back = ("backward", "one_gradient", "all_gradients")
    alive = dataclasses.replace(whole.alive, **{name: getattr(whole.alive, name) + gradient_bytes for name in back})
    return dataclasses.replace(
        whole,
        forward_compute_s=2 * half.forward_compute_s + copied * whole.output_bytes,
        backward_compute_s=2 * half.backward_compute_s + copied * whole.input_bytes + added_s,
        weight_compute_s=2 * half.weight_compute_s,
        forward_wire_s=2 * half.forward_wire_s + exposed[0],
        backward_wire_s=2 * half.backward_wire_s + exposed[1],
        forward_beside_s=2 * half.forward_beside_s,
        backward_beside_s=2 * half.backward_beside_s,
        forward_host_s=2 * half.forward_host_s,
        backward_host_s=2 * half.backward_host_s,
        backward_under=(),
        forward_meetings=2 * half.forward_meetings,
        backward_meetings=2 * half.backward_meetings,
        alive=alive,
        alive_under=alive,
    )


def _spans(bound: Bound, turns: Turns) -> Iterator[tuple[Move, tuple[int, int]]]:
    """The collectives that are on their way across a turn, each with the piece in which it is issued and that which awaits it."""
    exchanges: dict[str, Iterator[tuple[int, int]]] = {}
    for move in bound.moves:
        read = move.value, move.target
        if read in turns.flights and read not in turns.once:
            yield move, turns.span(read)
        elif move.op and move.backward is not Collective.NONE and (both := turns.exchanges(move.op)):
            yield move, next(exchanges.setdefault(move.op, iter(both)))


def _pieces(turns: Turns, names: Sequence[str], seconds: Floats, chained: bool) -> list[float]:
    """The seconds of each piece; of a chained layer the first has those behind the last turn, too."""
    position = {name: i for i, name in enumerate(turns.ops)}
    found = [0.0] * (turns.count + 1)
    for name, own_s in zip(names, seconds.tolist(), strict=True):
        found[turns.piece(position[name])] += own_s
    if chained:
        found[0] += found.pop()
    return found


def exposed_s(
    pieces: Sequence[float], spans: Iterable[Span], cyclic: bool, left_s: Callable[[float, float], float]
) -> float:
    """The seconds that the collectives of both halves add; ``left_s`` says what is left of a collective of so many seconds (first) beside
    so many of arithmetic."""
    found = [
        (wire_s, [(half, k % len(pieces)) for k in run if cyclic or 0 <= k < len(pieces)])
        for issued, awaited, wire_s in spans
        if wire_s
        for half, run in enumerate((range(issued - 1, awaited - 1), range(issued + 2, awaited + 2)))
    ]
    sharing = Counter(place for _, places in found for place in places)
    return sum(left_s(wire_s, sum(pieces[k] / sharing[half, k] for half, k in places)) for wire_s, places in found)
