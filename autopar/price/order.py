r"""The order in which a layer computes and communicates, and what it hides: the passes of one microbatch.

A layer waits for its collectives, except for those that a kernel runs beside its own arithmetic, with two options:

**Early collectives** (``passes.overlap``): the gradient of a column-parallel product's input is reduced while the gradients of weights are
computed.

**Halves** (``passes.rewrite.turns_of``): the microbatch is computed in two halves that take turns. A half has half of the
rows: its ops and collectives have the prices of those smaller shapes, kernels' launches included, and there are twice as many. The
layer's ops are cut into pieces *p_1 ... p_n*, whose seconds are *t_k*, forward and backward alike in number. The halves run them in the
order A1, A2, B1, A3, B2, ... A collective that one half issues at the end of its piece *i* and awaits before its piece *j* has these pieces
of the other half beside it::

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

import numpy as np

from autopar.devices.measured import Floats
from autopar.plan import Strategy
from autopar.price.layer import Bound, Sized
from autopar.price.microbatch import Alive, Pass, Passes
from autopar.price.moves import Move
from autopar.price.trace import OUTPUT
from autopar.price.trainer import TrainerModel
from autopar.techniques import Options
from autopar.types import Collective
from passes.rewrite import turns_of
from passes.turns import Turns

Span = tuple[int, int, float]
"""A collective: the piece in which it is issued, the one before which it is awaited, and its seconds."""

Half = Callable[[], Sized | None]
"""Half of a microbatch; ``None`` if its shapes are not whole."""


def passes(sized: Sized, strategy: Strategy, half: Half, trainer: TrainerModel) -> Passes:
    """The passes of a microbatch in the order that ``strategy`` asks for, or in that of early collectives where there are no halves."""
    if strategy.options.parts > 1:
        found = _half_and_turns(sized.bound, half, strategy.options)
        if not isinstance(found, str):
            return _in_halves(plain(sized), *found, strategy.uninterrupted, trainer)
    return _early(sized, trainer) if trainer.starts_early and strategy.options.early else plain(sized)


def why_whole(bound: Bound, half: Half, options: Options) -> str:
    """Why the microbatches of a layer are not computed in parts; empty if they can be."""
    found = _half_and_turns(bound, half, options)
    return found if isinstance(found, str) else ""


def plain(sized: Sized) -> Passes:
    """The passes of a layer that waits for all collectives but those that kernels run beside their own arithmetic."""
    if "plain" not in sized.known:
        bound = sized.bound
        weight_s = float(sized.backward_s @ bound.table.weight_share)
        both = sized.pass_of("forward", bound.moves), sized.pass_of("backward", bound.moves)
        sized.known["plain"] = Passes(*both, weight_s, sized.alive(), sized)
    return sized.known["plain"]


# -- early collectives -------------------------------------------------------------------------------------------------


def _early(sized: Sized, trainer: TrainerModel) -> Passes:
    """Some backward collectives run under gradients of weights."""
    if "early" not in sized.known:
        sized.known["early"] = _with_early(sized, trainer)
    return sized.known["early"]


def _with_early(sized: Sized, trainer: TrainerModel) -> Passes:
    found, table = plain(sized), sized.bound.table
    moves = [move for move in sized.bound.moves if move.under]
    if not moves:
        return found
    weight_s = sized.backward_s * table.product_share
    spans = [(sum(weight_s[table.index[name]] for name in m.under), sized.seconds_of(m, "backward")) for m in moves]
    backward = dataclasses.replace(
        found.backward,
        wire_s=found.backward.wire_s - sum(wire_s for _, wire_s in spans),
        exposed_s=found.backward.exposed_s
        + sum(trainer.exposed_early_s(wire_s, float(under_s), sized.cluster) for under_s, wire_s in spans),
    )
    return dataclasses.replace(found, backward=backward, alive=_alive_early(sized, found.alive))


def _alive_early(sized: Sized, alive: Alive) -> Alive:
    """Peaks of live memory where joined products wait for the first of them: the gradients of the others' results are live until then.
    There is one gradient of their input, to which each adds its term."""
    table, moves = sized.bound.table, [move for move in sized.bound.moves if len(move.under) > 1]
    if not moves or not table.ops:
        return alive
    gradients = sized.local(table.live.gradient, "slot")

    def of_ops(operand: int) -> Floats:
        chosen = np.where(np.array(table.slot_operand) == operand, gradients, 0.0)
        return np.bincount(table.slot_op, weights=chosen, minlength=len(table.ops)).astype(np.float64)

    of_results, of_inputs = of_ops(OUTPUT), of_ops(0)
    live = np.zeros(len(table.ops))
    for move in moves:
        first, *others = (table.index[name] for name in move.under)
        for i in others:
            live[first:i] += of_results[i]
        live[first : max(others) + 1] -= of_inputs[first]
    return sized.alive(live)


# -- halves ------------------------------------------------------------------------------------------------------------


def _half_and_turns(bound: Bound, half: Half, options: Options) -> tuple[Sized, Turns] | str:
    """A half of a microbatch and where the halves take turns; or why there are no halves."""
    if "turns" not in bound.known:
        bound.known["turns"] = turns_of(bound.table.cls, bound.types, options)
    turns = bound.known["turns"]
    if isinstance(turns, str):
        return turns
    found = half()
    return turns.uneven if found is None else (found, turns)


def _in_halves(whole: Passes, half: Sized, turns: Turns, chained: bool, trainer: TrainerModel) -> Passes:
    """``chained``: the halves go on into the next layer without meeting."""
    bound, gpu, own = half.bound, half.cluster.gpu, plain(half)
    exposed = []
    for side, arithmetic_s in (("forward", half.forward_s), ("backward", half.backward_s)):
        spans = [(*span, half.seconds_of(move, side)) for move, span in _spans(bound, turns)]
        pieces = _pieces(turns, [node.name for node in bound.table.ops], arithmetic_s, chained)
        left_s = exposed_s(pieces, spans, chained, lambda w, u: trainer.exposed_early_s(w, u, half.cluster))
        shared = [move for move in bound.moves if (move.value, move.target) in turns.once]
        twice_s = 2 * sum(wire_s for _, _, wire_s in spans)
        exposed.append(left_s - twice_s - sum(half.seconds_of(move, side) for move in shared))
    gradient_bytes = half.trainable * bound.table.width
    copied = 0.0 if chained else 2.0 / gpu.bytes_per_s
    more = (
        Pass(compute_s=copied * whole.part.output_bytes, wire_s=exposed[0]),
        Pass(compute_s=copied * whole.part.input_bytes + 3 * gradient_bytes / gpu.bytes_per_s, wire_s=exposed[1]),
    )
    back = ("backward", "one_gradient", "all_gradients")
    return Passes(
        forward=own.forward * 2 + more[0],
        backward=own.backward * 2 + more[1],
        weight_s=2 * own.weight_s,
        alive=dataclasses.replace(whole.alive, **{name: getattr(whole.alive, name) + gradient_bytes for name in back}),
        part=half,
        parts=2,
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
