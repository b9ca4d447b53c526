r"""The forward and the backward pass of a layer's microbatch: when collectives run, and how much of their time is exposed.

A layer waits for its collectives, except for those that a kernel overlaps with its own arithmetic, and except under three options:

**Early collectives** (``passes.overlap``): the input gradient of a column-parallel product is reduced while weight gradients are computed.

**Parts** (``passes.rewrite.turns_of``): the microbatch is computed in parts that take turns (``passes.turns``). Each part has an equal
share of the rows: its ops and collectives are priced at these smaller shapes, kernel launches included, and run once per part. The turns
cut the layer's ops into pieces, as many in the forward as in the backward. A collective of one part overlaps pieces of other parts, *u*
seconds in all; the seconds of a piece that several collectives overlap are divided among them. A collective of *w* seconds adds

    w - min(u, w) + slowdown min(u, w)

to the layer (``TrainerModel.exposed_early_s``). Back-to-back layers without a synchronisation point are priced in their steady state: the
last piece is followed by the next layer's first piece. If something runs before or after a whole layer (recomputation, FSDP's gathers,
copies to the host), all parts wait at the layer's ends: no piece follows there, and collectives there are exposed. The batch is then also
split and joined at these ends, which copies the layer's input gradient and its result.

**Pairs** (``program.pairs``): if a forward and a backward of the layer run as a pair, the all-to-alls of experts in each overlap the
arithmetic of the other; ``Passes.paired_s`` is what the pair saves. The other pass is assumed to run layers of the same class and strategy.

A parameter is gathered, or converted otherwise, once for all parts, and this collective counts as exposed. Each part has gradients of all
parameters, which are added up: until those of the next part are added, at most one more gradient of every parameter is live.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from autopar.devices.measured import Floats
from autopar.ops.operands import operands
from autopar.plan import Strategy
from autopar.price.collective_pairs import CollectivePair
from autopar.price.layer import BoundClass, SizedClass
from autopar.price.microbatch import Pass, Passes, PeakMemory
from autopar.price.trace import OUTPUT
from autopar.price.trainer import TrainerModel
from autopar.techniques import Options
from autopar.types import Collective
from passes.rewrite import turns_of
from passes.turns import Turns, overlapped_pieces

Span = tuple[int, int, float]
"""A collective: the piece that issues it, the piece that awaits it, and its seconds."""

Part = Callable[[], SizedClass | None]
"""Returns a part of a microbatch; ``None`` if the microbatch can't be divided into equal parts."""


def passes(sized: SizedClass, strategy: Strategy, part: Part, trainer: TrainerModel) -> Passes:
    """Return the passes of a microbatch under ``strategy``. A layer that isn't computed in parts may have early collectives."""
    if (parts := strategy.options.parts) > 1:
        found = _part_and_turns(sized.bound, part, strategy.options)
        if not isinstance(found, str):
            return _in_turn(plain(sized), parts, *found, strategy.uninterrupted, trainer)
    if trainer.starts_early and strategy.options.overlaps_pairs:
        exchanges = any(pair.router or pair.routing for pair in sized.bound.pairs)
        return dataclasses.replace(plain(sized), paired_s=paired_s(sized, trainer), in_turns=exchanges)
    return _early(sized, trainer) if trainer.starts_early and strategy.options.early_collectives else plain(sized)


def not_splittable_reason(bound: BoundClass, part: Part, options: Options) -> str:
    """Return why the microbatches of a layer can't be computed in parts, or an empty string."""
    found = _part_and_turns(bound, part, options)
    return found if isinstance(found, str) else ""


def plain(sized: SizedClass) -> Passes:
    """Return the passes of a layer that waits for all collectives except those that kernels overlap with their own arithmetic."""
    if "plain" not in sized.cache:
        bound = sized.bound
        weight_s = float(sized.backward_s @ bound.table.weight_share)
        both = sized.pass_of("forward", bound.pairs), sized.pass_of("backward", bound.pairs)
        sized.cache["plain"] = Passes(*both, weight_s, sized.peaks, sized)
    return sized.cache["plain"]


# -- early collectives -------------------------------------------------------------------------------------------------


def _early(sized: SizedClass, trainer: TrainerModel) -> Passes:
    """Return the passes in which some backward collectives overlap weight gradients."""
    if "early" not in sized.cache:
        sized.cache["early"] = _compute_early_passes(sized, trainer)
    return sized.cache["early"]


def _compute_early_passes(sized: SizedClass, trainer: TrainerModel) -> Passes:
    found, table = plain(sized), sized.bound.table
    pairs = [pair for pair in sized.bound.pairs if pair.overlapped_products]
    if not pairs:
        return found
    weight_s = sized.backward_s * table.product_share
    spans = [
        (sum(weight_s[table.index[op]] for op in pair.overlapped_products), sized.seconds_of(pair, "backward"))
        for pair in pairs
    ]
    backward = dataclasses.replace(
        found.backward,
        wire_s=found.backward.wire_s - sum(wire_s for _, wire_s in spans),
        exposed_s=found.backward.exposed_s
        + sum(trainer.exposed_early_s(wire_s, float(compute_s), sized.cluster) for compute_s, wire_s in spans),
    )
    return dataclasses.replace(found, backward=backward, find_peaks=lambda: _early_peaks(sized, found.peaks))


def _early_peaks(sized: SizedClass, peaks: PeakMemory) -> PeakMemory:
    """Return the peaks of live memory if products that share an input compute their weight gradients while the input's gradient is reduced.
    Until then the gradients of all their results stay live, but there is one input gradient instead of one for each product."""
    table = sized.bound.table
    # a trainer that gathers the input again in the backward pass has another pair with the same products
    joined = {pair.overlapped_products for pair in sized.bound.pairs if len(pair.overlapped_products) > 1}
    if not joined or not table.ops:
        return peaks
    gradients = sized.local(table.live.gradient, "slot")

    def of_ops(operand: int) -> Floats:
        chosen = np.where(np.array(table.slot_operand) == operand, gradients, 0.0)
        return np.bincount(table.slot_op, weights=chosen, minlength=len(table.ops)).astype(np.float64)

    of_results, of_inputs = of_ops(OUTPUT), of_ops(0)
    live = np.zeros(len(table.ops))
    for products in joined:
        first, *others = (table.index[name] for name in products)
        for i in others:
            live[first:i] += of_results[i]
        live[first : max(others) + 1] -= of_inputs[first]
    return sized.peaks(live)


# -- pairs -------------------------------------------------------------------------------------------------------------


def paired_s(sized: SizedClass, trainer: TrainerModel) -> float:
    """Return the seconds by which a forward and a backward of the layer are shorter as a pair."""
    if "paired_s" not in sized.cache:
        mixtures = _mixtures(sized)
        forward, backward = (list(_pieces_between(sized, side, mixtures)) for side in ("forward", "backward"))
        sent = [sized.seconds_of(pair, "forward") for mixture in mixtures for pair in mixture.sent]
        sent_back = [sized.seconds_of(pair, "backward") for mixture in reversed(mixtures) for pair in mixture.sent]
        spans = overlapped_in_pairs(forward, sent, backward[::-1], sent_back)
        sized.cache["paired_s"] = sum(w - trainer.exposed_early_s(w, u, sized.cluster) for w, u in spans)
    return float(sized.cache["paired_s"])


@dataclasses.dataclass(frozen=True)
class _Mixture:
    """A mixture's op, the all-to-alls of rows under which the other pass computes (to experts or relays, and back), and those that the pass
    itself waits for: with relays, those between them and the experts. The backward sends gradients of results as the forward sends rows."""

    op: int
    sent: tuple[CollectivePair, ...]
    awaited: tuple[CollectivePair, ...]

    def awaited_in_node(self, sized: SizedClass) -> Iterator[CollectivePair]:
        """Yield the awaited all-to-alls that can run beside those in flight: on the links of a node, while those use the network."""
        nodes = {pair: sized.pair_sizes[pair.axes, pair.sharded].members.nodes for pair in (*self.sent, *self.awaited)}
        if all(nodes[pair] > 1 for pair in self.sent):
            yield from (pair for pair in self.awaited if nodes[pair] == 1)


def _mixtures(sized: SizedClass) -> list[_Mixture]:
    """Return the mixtures whose rows are sent to other ranks, in the order in which they run."""
    table, found = sized.bound.table, dict[str, list[CollectivePair]]()
    for pair in sized.bound.pairs:
        # relays also send choices and weights, which the program waits for
        tokens = operands(table.ops[table.index[pair.op]])[0].name if pair.routing else ""
        if (pair.router or pair.value == tokens) and sized.pair_sizes[pair.axes, pair.sharded].group_size > 1:
            found.setdefault(pair.op, []).append(pair)
    mixtures = []
    for op, rows in found.items():
        relayed, direct = (tuple(pair for pair in rows if bool(pair.routing) == relays) for relays in (True, False))
        mixtures.append(_Mixture(table.index[op], relayed or direct, direct if relayed else ()))
    return sorted(mixtures, key=lambda mixture: mixture.op)


def _pieces_between(sized: SizedClass, side: str, mixtures: Sequence[_Mixture]) -> Iterator[float]:
    """Yield the seconds of a pass before, between and after the all-to-alls under which the other pass computes."""
    arithmetic_s, start = getattr(sized, f"{side}_s"), 0
    for mixture in mixtures:
        yield float(arithmetic_s[start : mixture.op].sum())
        awaited_s = sum(sized.seconds_of(pair, side) for pair in mixture.awaited_in_node(sized))
        yield float(arithmetic_s[mixture.op]) + awaited_s
        start = mixture.op + 1
    yield float(arithmetic_s[start:].sum())


def overlapped_in_pairs(
    forward: Sequence[float], sent: Sequence[float], backward: Sequence[float], sent_back: Sequence[float]
) -> Iterator[tuple[float, float]]:
    """Yield the seconds of each all-to-all of a pair, with the seconds of the other pass's piece that overlaps it.

    ``forward`` and ``backward`` are the seconds of each pass's pieces, ``sent`` and ``sent_back`` of the all-to-alls between them, in the
    order in which they run. The passes take turns, and the backward begins: B0 F0 B1 F1 ..., each followed by an all-to-all until the last.
    """
    yield from zip(sent_back, forward, strict=False)
    yield from zip(sent, backward[1:], strict=True)


# -- parts -------------------------------------------------------------------------------------------------------------


def _part_and_turns(bound: BoundClass, part: Part, options: Options) -> tuple[SizedClass, Turns] | str:
    """Return a part of a microbatch and where the parts take turns; or why the microbatch can't be computed in parts."""
    if "turns" not in bound.cache:
        bound.cache["turns"] = turns_of(bound.table.cls, bound.types, options)
    turns = bound.cache["turns"]
    if isinstance(turns, str):
        return turns
    found = part()
    return turns.uneven_reason if found is None else (found, turns)


def _in_turn(whole: Passes, parts: int, part: SizedClass, turns: Turns, chained: bool, trainer: TrainerModel) -> Passes:
    """Return the passes of ``parts`` that take turns; if ``chained``, they continue into the next layer without a wait."""
    bound, gpu, one_part = part.bound, part.cluster.gpu, plain(part)
    shared = tuple(pair for pair in bound.pairs if (pair.value, pair.target) in turns.shared)
    exposed = []
    for side, arithmetic_s in (("forward", part.forward_s), ("backward", part.backward_s)):
        spans = [(*span, part.seconds_of(pair, side)) for pair, span in _spans(bound, turns)]
        pieces = _pieces(turns, [node.name for node in bound.table.ops], arithmetic_s, chained)
        added_s = exposed_s(pieces, spans, chained, lambda w, u: trainer.exposed_early_s(w, u, part.cluster))
        awaited_s = parts * sum(wire_s for _, _, wire_s in spans)
        repeated_s = (parts - 1) * sum(part.seconds_of(pair, side) for pair in shared)
        exposed.append(added_s - awaited_s - repeated_s)
    gradient_bytes = (parts - 1) * part.trainable * bound.table.width
    byte_s = 0.0 if chained else 2.0 / gpu.bytes_per_s  # to copy a byte: a read and a write
    added = (
        Pass(compute_s=byte_s * whole.part.output_bytes, wire_s=exposed[0]),
        Pass(compute_s=byte_s * whole.part.input_bytes + 3 * gradient_bytes / gpu.bytes_per_s, wire_s=exposed[1]),
    )
    backward_peaks = ("backward", "one_gradient", "all_gradients")
    return Passes(
        forward=one_part.forward * parts + added[0],
        backward=one_part.backward * parts + added[1],
        weight_s=parts * one_part.weight_s,
        find_peaks=lambda: dataclasses.replace(
            whole.peaks, **{n: getattr(whole.peaks, n) + gradient_bytes for n in backward_peaks}
        ),
        part=part,
        parts=parts,
        shared=shared,
    )


def _spans(bound: BoundClass, turns: Turns) -> Iterator[tuple[CollectivePair, tuple[int, int]]]:
    """Yield the collectives in flight across a turn, each with the piece that issues it and the piece that awaits it."""
    exchanges: dict[str, Iterator[tuple[int, int]]] = {}
    for pair in bound.pairs:
        read = pair.value, pair.target
        if read in turns.flights and read not in turns.shared:
            yield pair, turns.span(read)
        elif pair.op and pair.backward is not Collective.NONE and (both := turns.exchanges(pair.op)):
            yield pair, next(exchanges.setdefault(pair.op, iter(both)))


def _pieces(turns: Turns, names: Sequence[str], seconds: Floats, chained: bool) -> list[float]:
    """Return the seconds of each piece; in a chained layer the ops after the last turn belong to the first piece."""
    position = {name: i for i, name in enumerate(turns.ops)}
    found = [0.0] * (turns.count + 1)
    for name, op_s in zip(names, seconds.tolist(), strict=True):
        found[turns.piece(position[name])] += op_s
    if chained:
        found[0] += found.pop()
    return found


def exposed_s(
    pieces: Sequence[float], spans: Iterable[Span], chained: bool, added_s: Callable[[float, float], float]
) -> float:
    """Return the seconds that the collectives of all parts add to the layer. ``added_s(w, u)`` are the seconds that a collective of ``w``
    seconds adds if it overlaps ``u`` seconds of arithmetic. If layers are ``chained``, the first piece follows the last."""
    found = [
        (wire_s, [(part, k % len(pieces)) for k in run if chained or 0 <= k < len(pieces)])
        for issued, awaited, wire_s in spans
        if wire_s
        for part, run in enumerate(overlapped_pieces(issued, awaited))
    ]
    sharing = Counter(place for _, places in found for place in places)
    return sum(added_s(wire_s, sum(pieces[k] / sharing[part, k] for part, k in places)) for wire_s, places in found)
