"""Overlaps a layer's collectives with its arithmetic: ``rewrite_local`` rewrites the local graph for a value of ``overlap``.

**Early collectives** (``tensor``). ``products_of`` decides which products are joined with the conversion of their input, so that the
input gradient is reduced while the weight gradients are computed. The program calls ``autopar.program.kernels_overlap``.

**Pairs** (``pairs``). The program runs the all-to-alls of experts by ``autopar.program.pairs``.

**Halves** (``halves``). The two halves of a microbatch take turns: ``refusal`` says why a layer cannot be halved, ``turns_of`` where its
halves take turns and which collectives are in flight meanwhile. ``autopar.program.halves`` runs the halves.

The cost model (``autopar.price.order``) and the check of the emitted collectives read both decisions here.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.flow import gradient_flow, parameter_nodes, placeholders
from autopar.graph import LayerClass, cached_for_graphs
from autopar.ops.cost import executed_flops
from autopar.ops.experts import Experts
from autopar.ops.facts import facts, is_random, op_name
from autopar.ops.meta import meta
from autopar.ops.operands import operands, shape_of
from autopar.plan import Axis
from autopar.program import kernels_overlap
from autopar.rules.traffic import DISPATCHES
from autopar.sharding import AxisTypes, Sharding
from autopar.techniques.overlap import HALVES, IN_PAIRS, TENSOR
from autopar.types import I, R, S
from passes.collectives import MICROBATCH, convert
from passes.communication import Conversion, conversions, typed_values
from passes.conversions import Types, conversion_steps
from passes.turns import Read, Turns


def rewrite_local(gm: fx.GraphModule, cls: LayerClass, sharding: Sharding, value: str) -> fx.GraphModule:
    """Rewrite the local graph of ``cls`` for a value of ``overlap``; see ``passes.rewrite.LocalRewrite``."""
    if value == TENSOR:
        return _join_products(gm, cls, sharding)
    if value == IN_PAIRS:
        return _mark_exchanges(gm, sharding)
    return _mark_turns(gm, cls, sharding) if value == HALVES else gm


def _mark_exchanges(gm: fx.GraphModule, sharding: Sharding) -> fx.GraphModule:
    """Mark the mixtures of experts whose all-to-alls overlap the other pass of a pair."""
    for node in gm.graph.nodes:
        if isinstance(node.target, Experts) and _dispatches(node, sharding.types):
            meta(node)["kernel_send"] = "pairs.send"
    return gm


def _dispatches(node: fx.Node, types: Sequence[AxisTypes]) -> bool:
    """Return whether a mixture of experts exchanges rows on some axis."""
    return any(t.kernel.get(node.name) in DISPATCHES for t in types)


# -- early collectives -------------------------------------------------------------------------------------------------

_JOINED = (kernels_overlap.linear, kernels_overlap.linears)
_LINEAR = torch.ops.aten.linear.default


def products_of(
    cls: LayerClass, types: Sequence[AxisTypes], gradient: Mapping[str, bool]
) -> dict[tuple[str, Types], tuple[fx.Node, ...]]:
    """Return the products that are joined, in order, keyed by the value that they read and the types that they need.

    ``types`` are those of the microbatch axis, then of the mesh's axes (or runs of axes with equal types); ``gradient`` says through which
    values a gradient flows. The value's last conversion must have a reduction as its backward (I or S(d) to R), and the weights must be
    trainable parameters that no collective has to gather first. A product after an expensive op that depends on a product of the group is
    not joined: its result, and later its gradient, would be live while that op runs.
    """
    groups: dict[tuple[str, Types], list[fx.Node]] = {}
    for node, reads in _parameter_products(cls.graph, _trainable(cls)):
        value = operands(node)[0].name
        source, needed = tuple(t.produced[value] for t in types), tuple(t.needed[node.name][0] for t in types)
        if source == needed or not gradient[value] or not all(_needs_no_collective(read, types) for read in reads):
            continue
        last = conversion_steps(source, needed)[-1]
        if last.target == R and last.source.kind in ("I", "S") and 0 not in last.axes:  # 0 is the microbatch axis
            groups.setdefault((value, needed), []).append(node)
    return {key: _before_expensive(cls.graph.graph.nodes, group) for key, group in groups.items()}


_OperandRead = tuple[str, int, str]
"""An op's read of a value: the op's name, the operand's index, the value's name."""


def _trainable(cls: LayerClass) -> frozenset[str]:
    return frozenset(
        node.name for node, value in zip(parameter_nodes(cls), cls.parameters, strict=True) if value.requires_grad
    )


@cached_for_graphs(maxsize=256)
def _parameter_products(
    graph: fx.GraphModule, trainable: frozenset[str]
) -> tuple[tuple[fx.Node, tuple[_OperandRead, ...]], ...]:
    """Return the products whose weight is a trainable parameter or a view of one, with the reads from the product back to the parameter.

    Products whose input has dims of size one are left out: the program calls a kernel for them (``passes.kernel_calls``).
    """
    found = []
    for node in graph.graph.nodes:
        if op_name(node) != "aten.linear" or len(operands(node)) != 2 or 1 in shape_of(operands(node)[0])[:-1]:
            continue
        reads = [(node, 1, operands(node)[1])]
        while facts(reads[-1][2]).is_view and len(operands(reads[-1][2])) == 1:
            reads.append((reads[-1][2], 0, operands(reads[-1][2])[0]))
        if reads[-1][2].name in trainable:
            found.append((node, tuple((reader.name, i, read.name) for reader, i, read in reads)))
    return tuple(found)


def _needs_no_collective(read: _OperandRead, types: Sequence[AxisTypes]) -> bool:
    """Return whether no collective runs forward between a value and its reader."""
    reader, index, value = read
    source, needed = tuple(t.produced[value] for t in types), tuple(t.needed[reader][index] for t in types)
    return not any(step.forward.sends for step in conversion_steps(source, needed))


def _before_expensive(nodes: Iterable[fx.Node], group: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """Return the leading products of ``group`` before the first expensive op that depends on one of them."""
    kept: list[fx.Node] = []
    reached: set[fx.Node] = set()
    for node in nodes:
        if node in group:
            kept.append(node)
            reached.add(node)
        elif not reached.isdisjoint(node.all_input_nodes):
            if facts(node).is_expensive:
                break
            reached.add(node)
    return tuple(kept)


def _join_products(gm: fx.GraphModule, cls: LayerClass, sharding: Sharding) -> fx.GraphModule:
    """Replace a conversion and the products that read it by one call of ``kernels_overlap``::

        x_r = convert(x, ("tensor",), "I", "R")        products = linears(x, [w, v], axis="tensor", src="I")
        a = linear(x_r, w)                       ->    a = products[0]
        b = linear(x_r, v)                             b = products[1]

    One product becomes ``linear``; other readers of ``x_r`` read the last result of ``linears(..., return_input=True)``. Runs on the local
    graph of ``cls``, after ``passes.fuse_bias`` and ``passes.selective``. Programs whose schedule splits the backward pass do not
    need it: they compute weight gradients in a later action.
    """
    gradient = {node.name: bool(meta(node).get("gradient")) for node in cls.graph.graph.nodes}
    local = {meta(node).get("product", node.name): node for node in gm.graph.nodes}
    for products in products_of(cls, sharding.types, gradient).values():
        linears = [local[product.name] for product in products]
        if not all(product.target is _LINEAR for product in linears):
            continue  # they are joined already
        if linears := [each for each in linears if len(each.args) < 3 or _is_movable(each.args[0], each.args[2])]:
            _join(gm.graph, linears)
    gm.graph.lint()
    return gm


def _join(graph: fx.Graph, products: list[fx.Node]) -> None:
    converted = products[0].args[0]
    assert isinstance(converted, fx.Node) and converted.target is convert, products[0].format_node()
    assert all(p.target is _LINEAR and p.args[0] is converted for p in products), [p.format_node() for p in products]
    value, axes, source, _ = converted.args
    assert isinstance(axes, tuple)
    weights = [product.args[1] for product in products]
    biases = [product.args[2] if len(product.args) > 2 else None for product in products]
    _move_before(converted, [node for node in (*weights, *biases) if isinstance(node, fx.Node)])
    return_input = not set(converted.users) <= set(products)
    one = len(products) == 1 and not return_input
    args: tuple[Any, ...] = (value, weights[0] if one else weights)
    if any(bias is not None for bias in biases):
        args = (*args, biases[0] if one else biases)
    more = {"return_input": True} if return_input else {}
    options = {"axis": axes[0] if len(axes) == 1 else axes, "src": source, **more}
    with graph.inserting_before(converted):
        call = graph.call_function(_JOINED[not one], args, options)
        results = [call] if one else [graph.call_function(operator.getitem, (call, i)) for i in range(len(products))]
        if return_input:
            results.append(graph.call_function(operator.getitem, (call, len(products))))
    replaced = [*products, converted] if return_input else products
    call.meta = _common_meta(products)
    for old, new in zip(replaced, results, strict=True):
        new.meta = {key: entry for key, entry in old.meta.items() if new is call or key != "caller"}
        old.replace_all_uses_with(new)
    meta(call)["joined"] = True
    for old in (*products, converted):
        name = old.name
        graph.erase_node(old)
        if old in replaced:
            results[replaced.index(old)].name = name


def _is_movable(place: Any, node: Any) -> bool:
    """Return whether ``_move_before`` can move ``node``: a bias that is computed from a parameter stays where it is."""
    if not isinstance(node, fx.Node) or node.op == "placeholder" or node < place:
        return True
    return (node.target is convert or facts(node).is_view) and all(_is_movable(place, n) for n in node.all_input_nodes)


def _move_before(place: fx.Node, nodes: Sequence[fx.Node]) -> None:
    """Move ``nodes`` and all that they read before ``place``: parameters, views of parameters, and conversions that send nothing."""
    for node in nodes:
        if node.op == "placeholder" or node < place:
            continue
        assert node.target is convert or facts(node).is_view, node.format_node()
        _move_before(place, node.all_input_nodes)
        place.prepend(node)


def _common_meta(products: Sequence[fx.Node]) -> dict[str, Any]:
    """Return the metadata of the call that replaces ``products``, with the modules and the function that all of them share."""
    stacks = [list((meta(product).get("nn_module_stack") or {}).items()) for product in products]
    same = 0
    while all(len(stack) > same and stack[same] == stacks[0][same] for stack in stacks):
        same += 1
    found: dict[str, Any] = {
        "val": tuple(meta(product)["val"] for product in products),
        "gradient": True,
        "nn_module_stack": dict(stacks[0][:same]),
    }
    callers = {meta(product).get("caller", "") for product in products}
    if len(callers) == 1 and all(callers):
        found["caller"] = callers.pop()
    return found


# -- halves: which layers ---------------------------------------------------------------------------------------------

# the conversions that program.halves runs as async ops
_ASYNC_CONVERSIONS = frozenset(("PI", "PR", "IR", "SR", "SI", "PS", "SS"))


ODD = "has an odd number of rows on each device in a microbatch"
"""The refusal reason of a layer with an odd number of rows, often one."""


def turns_or_reason(cls: LayerClass, types: Sequence[AxisTypes]) -> Turns | str:
    """Return where the halves of a layer take turns, or the reason why the layer can't be halved or gains nothing by it."""
    gradient = gradient_flow(cls)
    return refusal(cls, types, gradient) or turns_of(cls, types, gradient)


def refusal(cls: LayerClass, types: Sequence[AxisTypes], gradient: Mapping[str, bool]) -> str:
    """Return why the layer's microbatch can't be halved, or gains nothing by it ("has ..."), or an empty string.

    ``types`` are those of the microbatch axis, then of the mesh's axes (or runs of axes with equal types). The rows of a microbatch are
    independent if no value changes its type on the microbatch axis: the condition under which a batch may be cut into microbatches.
    """
    if cls.gives_loss:
        return "computes the loss"
    if cls.updates:
        return "writes buffers"
    if len(cls.outputs) != 1:
        return f"has {len(cls.outputs)} results, and halves of one are joined"
    microbatch = types[0]
    nodes = [node for node in cls.graph.graph.nodes if node.op != "output"]
    if mixed := next((node for node in nodes if not _rows_are_independent(node, microbatch, gradient)), None):
        return f"computes {mixed.name} from several rows of the batch"
    if drawn := next((node for node in nodes if node.op == "call_function" and is_random(node)), None):
        return f"needs separate random numbers for each row ({drawn.name})"
    ends = [
        (microbatch.produced[name], [one.produced[name] for one in types[1:]])
        for name in _inputs_with_rows(cls, microbatch)
    ]
    ends.append((microbatch.outputs[0], [one.outputs[0] for one in types[1:]]))
    if len({tuple(t.dim == rows.dim for t in end) for rows, end in ends}) > 1:
        return "reads or returns values whose batch dims are sharded on different axes"
    if not any(_is_heavy(node) for node in nodes):
        return "has no products to hide collectives under"
    turns = turns_of(cls, types, gradient)
    if not (set(turns.flights) - turns.shared or turns.experts):
        return "has no collective to hide"
    return ""


def _rows_are_independent(node: fx.Node, microbatch: AxisTypes, gradient: Mapping[str, bool]) -> bool:
    """Return whether the rows of the node's value and of its operands are independent between microbatches."""
    if node.name in microbatch.kernel or microbatch.produced[node.name].kind == "P":
        return False
    if node.op == "placeholder":
        return microbatch.produced[node.name] in (I, R, S(0))
    needed = microbatch.needed[node.name]
    return all(
        microbatch.produced[o.name] == t or (not gradient[o.name] and {microbatch.produced[o.name], t} == {I, R})
        for o, t in zip(operands(node), needed, strict=True)
    )


def _inputs_with_rows(cls: LayerClass, microbatch: AxisTypes) -> list[str]:
    """Return the names of the placeholders that have rows of the microbatch."""
    return [node.name for node in placeholders(cls) if microbatch.produced[node.name].sharded]


def part_of(cls: LayerClass, sharding: Sharding) -> Sharding | None:
    """Return the sharding of one half of a microbatch; ``None`` if a device has an odd number of rows."""
    microbatch, *mesh = sharding.axes
    half = Sharding((Axis(MICROBATCH, 2 * microbatch.size, 0), *mesh), sharding.types)
    for value, types in typed_values(cls.graph, half):
        dim = types[0].dim
        parts = math.prod(axis.size for axis, t in zip(half.axes, types, strict=True) if t.dim == dim)
        if dim is not None and shape_of(value)[dim] % parts:
            return None
    return half


def not_splittable_reason(cls: LayerClass, sharding: Sharding) -> str:
    """Return why the microbatches of a layer of these shapes can't be halved, or an empty string."""
    reason = refusal(cls, sharding.types, gradient_flow(cls))
    return reason or ("" if part_of(cls, sharding) is not None else ODD)


# -- where they take turns ---------------------------------------------------------------------------------------------


def turns_of(cls: LayerClass, types: Sequence[AxisTypes], gradient: Mapping[str, bool]) -> Turns:
    """Return where the halves take turns.

    There is a turn before the first reader of each conversion that runs a collective, forward or backward, unless there is one already
    between the value and the reader; conversions of parameters make no turn. A piece with several products is cut once more, where its
    FLOPs are halved, so that a short piece, such as a norm, lies between long pieces of the other half.
    """
    nodes = [node for node in cls.graph.graph.nodes if node.op == "call_function"]
    position = {node.name: i for i, node in enumerate(nodes)}
    first: dict[Read, int] = {}
    for one in conversions(cls.graph, types, gradient):
        rows = types[0].produced[one.value].sharded
        if (rows or one.value not in position) and _is_async(one):
            first[one.value, one.target] = position.get(one.readers[0][0], len(nodes))
    producers = {read: position.get(read[0], -1) for read in first}
    experts = tuple(i for i, n in enumerate(nodes) if _dispatches(n, types))
    shared = frozenset(read for read in first if not types[0].produced[read[0]].sharded)
    turns: set[int] = set()
    for read, at in sorted(first.items(), key=lambda item: item[1]):
        producer = producers[read]
        between = any(producer < turn <= at for turn in turns) or any(producer < expert < at for expert in experts)
        if read not in shared and not between:
            turns.add(at)
    bounds = sorted({0, *turns, *experts, *(expert + 1 for expert in experts), len(nodes)})
    if turns or experts:
        turns |= {cut for a, b in itertools.pairwise(bounds) if (cut := _best_cut(nodes, a, b)) is not None}
    flights: dict[Read, tuple[int, int | None]] = {}
    for read, at in first.items():
        last = max((turn for turn in turns if turn <= at), default=-1)
        early = any(producers[read] < turn < last for turn in (*turns, *experts))
        flights[read] = at, last if early else None
    return Turns(tuple(node.name for node in nodes), tuple(sorted(turns)), flights, producers, experts, shared, ODD)


def _is_async(conversion: Conversion) -> bool:
    """Return whether the last step of a conversion runs a collective that can be an async op."""
    last = conversion.steps[-1] if conversion.steps else None
    return last is not None and last.source.kind + last.target.kind in _ASYNC_CONVERSIONS and last.sends


def _is_heavy(node: fx.Node) -> bool:
    return facts(node).is_expensive or isinstance(node.target, Experts)


def _best_cut(nodes: Sequence[fx.Node], start: int, stop: int) -> int | None:
    """Return the index of the product before which a cut halves the FLOPs of ``nodes[start:stop]`` best; ``None`` for at most one
    product."""
    work = {i: executed_flops(nodes[i]) for i in range(start, stop) if _is_heavy(nodes[i])}
    total, done, best = sum(work.values()), 0.0, (math.inf, 0)
    for i, flops in work.items():
        if done:
            best = min(best, (abs(total - 2 * done), i))
        done += flops
    return best[1] if best[0] < math.inf else None


# -- the local graph ---------------------------------------------------------------------------------------------------


def _mark_turns(gm: fx.GraphModule, cls: LayerClass, sharding: Sharding) -> fx.GraphModule:
    """Mark the turns in the local graph of ``cls`` for one half (``part_of``).

    ``ops.meta`` describes the keys: ``other_half_before``, ``kernel_async_op`` (of a mixture of experts), ``async_op`` and ``shared_async``
    (of a ``convert``; the latter of a parameter), ``issued_after``, ``other_half_between``.
    """
    graph = gm.graph
    gradient = {node.name: bool(meta(node).get("gradient")) for node in cls.graph.graph.nodes}
    turns = turns_of(cls, sharding.types, gradient)
    local = {name: node for node in graph.nodes for name in (meta(node).get("product"), node.name) if name}
    where = {node: i for i, node in enumerate(graph.nodes)}
    output = graph.output_node()
    arriving = {read: _conversion_of(local[read[0]], read[1], gradient[read[0]]) for read in turns.flights}
    starts: dict[int, fx.Node] = {}
    for at in turns.starts:
        op = next((local[name] for name in turns.ops[at:] if name in local), output)
        awaited = [arriving[read] for read, (reader, _) in turns.flights.items() if reader == at]
        starts[at] = min((*awaited, op), key=lambda node: where[node])
        meta(starts[at])["other_half_before"] = True
    for expert in turns.experts:
        meta(local[turns.ops[expert]])["kernel_async_op"] = "halves.send"
    for read, (_, before) in turns.flights.items():
        node = arriving[read]
        value = node.args[0]
        assert isinstance(value, fx.Node)
        anchor = _moved_to_producer(graph, local[read[0]], value)
        if before is not None:
            anchor = starts[before].prev
        meta(node)["async_op"] = "halves.start"
        meta(node)["shared_async"] = read in turns.shared and value.op == "placeholder"
        meta(anchor).setdefault("issued_after", []).append(node)
    _mark_other_half_between(graph)
    graph.lint()
    return gm


def _mark_other_half_between(graph: fx.Graph) -> None:
    piece: dict[fx.Node, int] = {}
    for node in graph.nodes:
        turn = meta(node).get("other_half_before") or (node.prev in piece and meta(node.prev).get("kernel_async_op"))
        piece[node] = (next(reversed(piece.values())) if piece else 0) + bool(turn)
    for node in graph.nodes:
        meta(node)["other_half_between"] = any(piece[user] > piece[node] for user in node.users)


def _conversion_of(value: fx.Node, needed: Types, gradient: bool) -> fx.Node:
    """Return the last of the conversions of ``value`` to ``needed``."""

    def same(types: Types) -> bool:
        return all(a == b or (not gradient and {a, b} == {I, R}) for a, b in zip(types, needed, strict=True))

    waiting = [user for user in value.users if user.target is convert]
    while waiting:
        node = waiting.pop()
        if same(meta(node)["types"]):
            return node
        waiting += [user for user in node.users if user.target is convert]
    raise AssertionError((value.name, needed))


def _moved_to_producer(graph: fx.Graph, value: fx.Node, last: fx.Node) -> fx.Node:
    """Move the conversions from ``value`` to ``last`` right after the op that produces ``value``; return the last of them."""
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
