"""Decides where the two halves of a layer's microbatch take turns, and marks it in the layer's local graph.

``refusal`` says why a layer cannot be halved, ``turns_of`` where its halves take turns and which conversions are on their way meanwhile:
the pass and the price (``autopar.price.halves``) read both decisions here. ``autopar.program.halves`` runs the halves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.flow import gradient_flow, placeholders, returned_nodes
from autopar.graph import LayerClass
from autopar.ops.cost import executed_flops
from autopar.ops.experts import Experts
from autopar.ops.facts import facts, is_random
from autopar.ops.meta import meta
from autopar.ops.operands import is_tensor, operands, shape_of
from autopar.plan import Axis, Strategy
from autopar.sharding import AxisTypes, Sharding
from autopar.types import Collective, I, R, S, SpmdType, conversion
from passes.collectives import MICROBATCH, convert
from passes.conversions import effective_steps

Types = tuple[SpmdType, ...]
Read = tuple[str, Types]
"""A value's name and the types in which it is read."""

_SILENT = (Collective.NONE, Collective.LOCAL)
_APART = frozenset(
    ("PI", "PR", "IR", "SR", "SI", "PS", "SS")
)  # the conversions that program.halves issues and awaits apart


ODD = "has an odd number of rows on each device in a microbatch"
"""Why a layer is not halved whose rows a device cannot halve: often it has one."""

# -- which layers ------------------------------------------------------------------------------------------------------


def refusal(cls: LayerClass, types: Sequence[AxisTypes], gradient: Mapping[str, bool]) -> str:
    """Why the layer's microbatch cannot be halved, or gains nothing, as the end of a sentence about the layer; empty if it can.

    ``types`` are those of the microbatch axis, then of the mesh's axes (or runs of axes with equal types). The rows of a microbatch
    are independent if no value changes its type along the microbatch axis: what makes it legal to cut a batch into microbatches.
    """
    if cls.gives_loss:
        return "computes the loss"
    if cls.updates:
        return "writes buffers"
    if len(cls.outputs) != 1:
        return f"has {len(cls.outputs)} results, and halves of one are joined"
    time = types[0]
    nodes = [node for node in cls.graph.graph.nodes if node.op != "output"]
    if mixed := next((node for node in nodes if not _apart(node, time, gradient)), None):
        return f"computes {mixed.name} from several rows of the batch"
    if drawn := next((node for node in nodes if node.op == "call_function" and is_random(node)), None):
        return f"draws random numbers ({drawn.name}), of which each row would need its own"
    ends = [(time.produced[name], [one.produced[name] for one in types[1:]]) for name in _borders(cls, time)]
    ends.append((time.outputs[0], [one.outputs[0] for one in types[1:]]))
    if len({tuple(t.dim == rows.dim for t in end) for rows, end in ends}) > 1:
        return "reads or gives values whose rows are on different devices"
    if not any(_is_long(node) for node in nodes):
        return "has no products to hide collectives under"
    turns = turns_of(cls, types, gradient)
    if not (set(turns.flights) - turns.once or turns.inner):
        return "has no collective to hide"
    return ""


def _apart(node: fx.Node, time: AxisTypes, gradient: Mapping[str, bool]) -> bool:
    """Whether the rows of the node's value, and of what it reads, stay apart in time."""
    if node.name in time.kernel or time.produced[node.name].kind == "P":
        return False
    if node.op == "placeholder":
        return time.produced[node.name] in (I, R, S(0))
    needed = time.needed[node.name]
    return all(
        time.produced[o.name] == t or (not gradient[o.name] and {time.produced[o.name], t} == {I, R})
        for o, t in zip(operands(node), needed, strict=True)
    )


def _borders(cls: LayerClass, time: AxisTypes) -> list[str]:
    """The placeholders that have rows."""
    return [node.name for node in placeholders(cls) if time.produced[node.name].sharded]


def rows_of(cls: LayerClass, time: AxisTypes) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """The dim of each placeholder that has the microbatch's rows (``None``: it has none), and that of each result."""
    return tuple(time.produced[node.name].dim for node in placeholders(cls)), tuple(t.dim for t in time.outputs)


def of_half(cls: LayerClass, sharding: Sharding) -> Sharding | None:
    """The sharding of one half of a microbatch; ``None`` if the rows on a device are not an even number."""
    time, *mesh = sharding.axes
    half = Sharding((Axis(MICROBATCH, 2 * time.size, 0), *mesh), sharding.types)
    for node in cls.graph.graph.nodes:
        if node.op == "output":
            continue
        reads = (
            [(o, half.needed(node.name, i)) for i, o in enumerate(operands(node))] if node.op != "placeholder" else []
        )
        for value, types in ((node, half.produced(node.name)), *reads):
            dim = types[0].dim
            if dim is None or not is_tensor(value):
                continue
            ways = math.prod(axis.size for axis, t in zip(half.axes, types, strict=True) if t.dim == dim)
            if shape_of(value)[dim] % ways:
                return None
    return half


def why_whole(cls: LayerClass, sharding: Sharding) -> str:
    """Why the microbatches of a layer of these shapes are not halved, as the end of a sentence about the layer; empty if they are."""
    reason = refusal(cls, sharding.types, gradient_flow(cls))
    return reason or ("" if of_half(cls, sharding) is not None else ODD)


def is_chained(strategy: Strategy) -> bool:
    """Whether halves go on from one layer into the next without meeting in between: nothing is done around a layer as a whole."""
    return strategy.zero < 2 and not strategy.options.around


# -- where they take turns ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turns:
    """Where the halves of a layer take turns: before the ops at the positions ``at`` among ``ops`` (their number: at the layer's end).

    ``flights`` are the conversions that are on their way across a turn: the position of the first reader, and that of the turn before
    which the collective is issued if that is not where the value is computed (``None``). ``made`` are the positions of their values
    (-1: an argument). ``inner`` are the positions of mixtures of experts whose rows travel: their kernels take a turn before the experts'
    own arithmetic, and one after it. Of the flights, one of each in ``once`` serves both halves: conversions of parameters.
    """

    ops: tuple[str, ...]
    at: tuple[int, ...]
    flights: dict[Read, tuple[int, int | None]]
    made: dict[Read, int]
    inner: tuple[int, ...]
    once: frozenset[Read]

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
        """The spans of what a mixture of experts sends to the experts' devices and back; none for other ops."""
        middle = next((self.piece(place) for place in self.inner if self.ops[place] == op), None)
        return () if middle is None else ((middle - 1, middle), (middle, middle + 1))


def turns_of(cls: LayerClass, types: Sequence[AxisTypes], gradient: Mapping[str, bool]) -> Turns:
    """Where the halves take turns.

    A turn stands before the first reader of each conversion that runs a collective, forward or backward, unless one stands between the
    value and the reader anyway; conversions of parameters make no turn. What is computed between two turns is cut once more where its FLOPs
    are halved, if it has several products: then a short piece, such as a norm, lies between long pieces of the other half.
    """
    nodes = [node for node in cls.graph.graph.nodes if node.op == "call_function"]
    position = {node.name: i for i, node in enumerate(nodes)}
    first: dict[Read, int] = {}
    for read, at in _reads(cls, nodes, types):
        rows = types[0].produced[read[0]].sharded
        if read not in first and (rows or read[0] not in position) and _travels(read, types, gradient[read[0]]):
            first[read] = at
    made = {read: position.get(read[0], -1) for read in first}
    inner = tuple(i for i, node in enumerate(nodes) if any(t.kernel.get(node.name) == "expert_exchange" for t in types))
    once = frozenset(read for read in first if not types[0].produced[read[0]].sharded)
    turns: set[int] = set()
    for read, at in sorted(first.items(), key=lambda item: item[1]):
        between = any(made[read] < turn <= at for turn in turns) or any(made[read] < place < at for place in inner)
        if read not in once and not between:
            turns.add(at)
    bounds = sorted({0, *turns, *inner, *(place + 1 for place in inner), len(nodes)})
    if turns or inner:
        turns |= {cut for a, b in itertools.pairwise(bounds) if (cut := _middle(nodes, a, b)) is not None}
    flights: dict[Read, tuple[int, int | None]] = {}
    for read, at in first.items():
        last = max((turn for turn in turns if turn <= at), default=-1)
        early = any(made[read] < turn < last for turn in (*turns, *inner))
        flights[read] = at, last if early else None
    return Turns(tuple(node.name for node in nodes), tuple(sorted(turns)), flights, made, inner, once)


def _reads(cls: LayerClass, nodes: Sequence[fx.Node], types: Sequence[AxisTypes]) -> Iterator[tuple[Read, int]]:
    for at, node in enumerate(nodes):
        for i, operand in enumerate(operands(node)):
            yield (operand.name, tuple(t.needed[node.name][i] for t in types)), at
    for i, node in enumerate(returned_nodes(cls)):
        yield (node.name, tuple(t.outputs[i] for t in types)), len(nodes)


def _travels(read: Read, types: Sequence[AxisTypes], gradient: bool) -> bool:
    """Whether the last conversion of a value runs a collective that can be issued and awaited apart."""
    source = tuple(t.produced[read[0]] for t in types)
    steps = effective_steps(source, read[1], gradient) if source != read[1] else ()
    if not steps or steps[-1].source.kind + steps[-1].target.kind not in _APART:
        return False
    pair = conversion(steps[-1].source, steps[-1].target)
    assert pair is not None, read
    return pair[0] not in _SILENT or (gradient and pair[1] not in _SILENT)


def _is_long(node: fx.Node) -> bool:
    return facts(node).is_expensive or isinstance(node.target, Experts)


def _middle(nodes: Sequence[fx.Node], start: int, stop: int) -> int | None:
    """The product before which the FLOPs of ``nodes[start:stop]`` are halved best; ``None`` if there is at most one."""
    work = {i: executed_flops(nodes[i]) for i in range(start, stop) if _is_long(nodes[i])}
    total, done, best = sum(work.values()), 0.0, (math.inf, 0)
    for i, flops in work.items():
        if done:
            best = min(best, (abs(total - 2 * done), i))
        done += flops
    return best[1] if best[0] < math.inf else None


# -- the local graph ---------------------------------------------------------------------------------------------------


def halves_pass(gm: fx.GraphModule, cls: LayerClass, sharding: Sharding) -> fx.GraphModule:
    """Marks the turns in the local graph of ``cls`` of one half (``of_half``).

    ``meta["turn"]``: the halves take turns before the node. ``meta["flies"]`` of a ``convert``: it is issued and awaited apart.
    ``meta["sends"]``: the conversions that are issued right after the node. ``meta["across"]``: a turn stands between the node and a
    reader.
    """
    graph = gm.graph
    gradient = {node.name: bool(meta(node).get("gradient")) for node in cls.graph.graph.nodes}
    turns = turns_of(cls, sharding.types, gradient)
    local = {name: node for node in graph.nodes for name in (meta(node).get("product"), node.name) if name}
    where = {node: i for i, node in enumerate(graph.nodes)}
    output = graph.output_node()
    arriving = {read: _conversion_of(local[read[0]], read[1], gradient[read[0]]) for read in turns.flights}
    starts: dict[int, fx.Node] = {}
    for at in turns.at:
        op = next((local[name] for name in turns.ops[at:] if name in local), output)
        own = [arriving[read] for read, (reader, _) in turns.flights.items() if reader == at]
        starts[at] = min((*own, op), key=lambda node: where[node])
        meta(starts[at])["turn"] = True
    for place in turns.inner:
        meta(local[turns.ops[place]])["inner"] = True
    for read, (_, before) in turns.flights.items():
        node = arriving[read]
        value = node.args[0]
        assert isinstance(value, fx.Node)
        anchor = _gathered_up(graph, local[read[0]], value)
        if before is not None:
            anchor = starts[before].prev
        meta(node)["flies"], meta(node)["once"] = True, read in turns.once and value.op == "placeholder"
        meta(anchor).setdefault("sends", []).append(node)
    _mark_across(graph)
    graph.lint()
    return gm


def _mark_across(graph: fx.Graph) -> None:
    piece: dict[fx.Node, int] = {}
    for node in graph.nodes:
        turn = meta(node).get("turn") or (node.prev in piece and meta(node.prev).get("inner"))
        piece[node] = (next(reversed(piece.values())) if piece else 0) + bool(turn)
    for node in graph.nodes:
        meta(node)["across"] = any(piece[user] > piece[node] for user in node.users)


def _conversion_of(value: fx.Node, needed: Types, gradient: bool) -> fx.Node:
    """The last of the conversions of ``value`` to ``needed``."""

    def same(types: Types) -> bool:
        return all(a == b or (not gradient and {a, b} == {I, R}) for a, b in zip(types, needed, strict=True))

    waiting = [user for user in value.users if user.target is convert]
    while waiting:
        node = waiting.pop()
        if same(meta(node)["types"]):
            return node
        waiting += [user for user in node.users if user.target is convert]
    raise AssertionError((value.name, needed))


def _gathered_up(graph: fx.Graph, value: fx.Node, last: fx.Node) -> fx.Node:
    """Move the conversions between ``value`` and ``last`` right behind ``value``; returns the last."""
    chain = []
    while last is not value:
        chain.append(last)
        last = last.args[0]  # type: ignore[assignment]
    for node in reversed(chain):
        if last.op == "placeholder":
            next(n for n in graph.nodes if n.op != "placeholder").prepend(node)
        else:
            last.append(node)
        last = node
    return last
