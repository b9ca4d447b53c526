"""Joins products with the conversion of their input, so that the input's gradient is reduced while the weights' gradients are computed.

``products_of`` decides which products are joined: the pass, the price (``autopar.price.moves``) and the check of the emitted collectives
read the decision here. ``autopar.program.kernels_overlap`` is the call that the program makes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.flow import placeholders
from autopar.graph import LayerClass, cached_for_graphs
from autopar.ops.facts import facts, op_name
from autopar.ops.meta import meta
from autopar.ops.operands import operands, shape_of
from autopar.program import kernels_overlap
from autopar.sharding import AxisTypes, Sharding
from autopar.types import Collective, R, SpmdType, conversion
from passes.collectives import convert
from passes.conversions import conversion_steps

Types = tuple[SpmdType, ...]
JOINED = (kernels_overlap.linear, kernels_overlap.linears)
_SILENT = (Collective.NONE, Collective.LOCAL)
_LINEAR = torch.ops.aten.linear.default


def products_of(
    cls: LayerClass, types: Sequence[AxisTypes], gradient: Mapping[str, bool]
) -> dict[tuple[str, Types], tuple[fx.Node, ...]]:
    """The products that are joined, in order, by the value that they read and the types in which they read it.

    ``types`` are those of the microbatch axis, then of the mesh's axes (or runs of axes with equal types); ``gradient`` tells the
    values that a gradient flows back through. The value's last conversion must have a reduction as its backward (I or S(d) to R), and the
    weights must be trainable parameters that no collective has to gather first. A product behind an expensive op that depends on
    a product of the group stays alone: its result, and later its gradient, would be live for that op's time.
    """
    groups: dict[tuple[str, Types], list[fx.Node]] = {}
    for node, way in _on_parameters(cls.graph, _trainable(cls)):
        value = operands(node)[0].name
        source, needed = tuple(t.produced[value] for t in types), tuple(t.needed[node.name][0] for t in types)
        if source == needed or not gradient[value] or not all(_is_silent(read, types) for read in way):
            continue
        last = conversion_steps(source, needed)[-1]
        if last.target == R and last.source.kind in ("I", "S") and 0 not in last.axes:  # 0 is the microbatch axis
            groups.setdefault((value, needed), []).append(node)
    return {key: _before_expensive(cls.graph.graph.nodes, group) for key, group in groups.items()}


_Read = tuple[str, int, str]
"""An op's read of a value: the op's name, the operand's index, the value's name."""


def _trainable(cls: LayerClass) -> frozenset[str]:
    nodes = placeholders(cls)[len(placeholders(cls)) - len(cls.parameters) :]
    return frozenset(node.name for node, value in zip(nodes, cls.parameters, strict=True) if value.requires_grad)


@cached_for_graphs(maxsize=256)
def _on_parameters(graph: fx.GraphModule, trainable: frozenset[str]) -> tuple[tuple[fx.Node, tuple[_Read, ...]], ...]:
    """The products with trainable parameters, or with views of such, with the reads from the product back to the parameter.

    The program calls a kernel in place of a product whose input has dims of size one (``passes.kernel_calls``): it is left out.
    """
    found = []
    for node in graph.graph.nodes:
        if op_name(node) != "aten.linear" or len(operands(node)) != 2 or 1 in shape_of(operands(node)[0])[:-1]:
            continue
        way = [(node, 1, operands(node)[1])]
        while facts(way[-1][2]).is_view and len(operands(way[-1][2])) == 1:
            way.append((way[-1][2], 0, operands(way[-1][2])[0]))
        if way[-1][2].name in trainable:
            found.append((node, tuple((reader.name, i, read.name) for reader, i, read in way)))
    return tuple(found)


def _is_silent(read: _Read, types: Sequence[AxisTypes]) -> bool:
    """Whether no collective runs forward between a value and its reader."""
    reader, index, value = read
    source, needed = tuple(t.produced[value] for t in types), tuple(t.needed[reader][index] for t in types)
    pairs = (conversion(step.source, step.target) for step in conversion_steps(source, needed))
    return all(pair is not None and pair[0] in _SILENT for pair in pairs)


def _before_expensive(nodes: Iterable[fx.Node], group: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """The leading products of ``group`` before the first expensive op that depends on one of them."""
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


def overlap_pass(gm: fx.GraphModule, cls: LayerClass, sharding: Sharding) -> fx.GraphModule:
    """Replaces a conversion and the products that read it by one call of ``kernels_overlap``::

        x_r = convert(x, ("tensor",), "I", "R")        products = linears(x, [w, v], axis="tensor", src="I")
        a = linear(x_r, w)                       ->    a = products[0]
        b = linear(x_r, v)                             b = products[1]

    ``linear`` if there is one product; other readers of ``x_r`` read the last result of ``linears(..., whole=True)``. Runs on the local
    graph of ``cls``, after ``fuse_bias`` and ``keep``. Programs whose schedule splits the backward pass do not run it: there the
    gradients of weights are computed in a later action.
    """
    gradient = {node.name: bool(meta(node).get("gradient")) for node in cls.graph.graph.nodes}
    local = {meta(node).get("product", node.name): node for node in gm.graph.nodes}
    for products in products_of(cls, sharding.types, gradient).values():
        own = [local[product.name] for product in products]
        if all(product.target is _LINEAR for product in own):  # not joined before
            _join(gm.graph, own)
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
    whole = not set(converted.users) <= set(products)
    one = len(products) == 1 and not whole
    args: tuple[Any, ...] = (value, weights[0] if one else weights)
    if any(bias is not None for bias in biases):
        args = (*args, biases[0] if one else biases)
    more = {"whole": True} if whole else {}
    options = {"axis": axes[0] if len(axes) == 1 else axes, "src": source, **more}
    with graph.inserting_before(converted):
        call = graph.call_function(JOINED[not one], args, options)
        results = [call] if one else [graph.call_function(operator.getitem, (call, i)) for i in range(len(products))]
        if whole:
            results.append(graph.call_function(operator.getitem, (call, len(products))))
    replaced = [*products, converted] if whole else products
    call.meta = _common_meta(products)
    for old, new in zip(replaced, results, strict=True):
        new.meta = {key: entry for key, entry in old.meta.items() if new is call or key != "kept"}
        old.replace_all_uses_with(new)
    for old in (*products, converted):
        name = old.name
        graph.erase_node(old)
        if old in replaced:
            results[replaced.index(old)].name = name


def _move_before(place: fx.Node, nodes: Sequence[fx.Node]) -> None:
    """Move ``nodes``, which are parameters, views of them or conversions that send nothing, and all that they read before ``place``."""
    for node in nodes:
        if node.op == "placeholder" or node < place:
            continue
        assert node.target is convert or facts(node).is_view, node.format_node()
        _move_before(place, node.all_input_nodes)
        place.prepend(node)


def _common_meta(products: Sequence[fx.Node]) -> dict[str, Any]:
    """The metadata of a call in place of ``products``: the modules around all of them, and whether all results are kept."""
    stacks = [list((meta(product).get("nn_module_stack") or {}).items()) for product in products]
    same = 0
    while all(len(stack) > same and stack[same] == stacks[0][same] for stack in stacks):
        same += 1
    found: dict[str, Any] = {
        "val": tuple(meta(product)["val"] for product in products),
        "gradient": True,
        "nn_module_stack": dict(stacks[0][:same]),
    }
    if all("kept" in meta(product) for product in products):
        found["kept"] = all(meta(product)["kept"] for product in products)
    return found


# -- what a joined call holds -----------------------------------------------------------------------------------------


def converted_types(call: fx.Node) -> tuple[fx.Node, tuple[str, ...], SpmdType]:
    """The value that a joined call converts to R, the axes (outermost first), and the value's type on them before."""
    value: Any = call.args[0]
    axis: Any = call.kwargs["axis"]
    return value, (axis,) if isinstance(axis, str) else tuple(axis), SpmdType.parse(str(call.kwargs["src"]))


def weights_of(call: fx.Node) -> list[fx.Node]:
    """The weights of a joined call."""
    return [node for node in _listed(call.args[1]) if node is not None]


@dataclass(frozen=True, slots=True)
class Result:
    """A result of a joined call: the node that has it, the name of its product, the weight and the bias; none of the three for the
    converted input."""

    node: fx.Node
    product: str | None = None
    weight: fx.Node | None = None
    bias: fx.Node | None = None


def results_of(call: fx.Node) -> list[Result]:
    """The results of a joined call, in order."""
    weights = weights_of(call)
    biases = _listed(call.args[2]) if len(call.args) > 2 else [None] * len(weights)
    users = [call] if call.target is JOINED[0] else sorted(call.users, key=_index)
    found = [
        Result(node, meta(node).get("product", node.name), weight, bias)
        for node, weight, bias in zip(users, weights, biases, strict=False)
    ]
    return found + [Result(node) for node in users[len(weights) :]]


def passed_on(node: fx.Node) -> fx.Node | None:
    """The value before its conversion, if ``node`` is the converted value among the results of a joined call."""
    call = node.args[0] if node.target is operator.getitem else None
    if not isinstance(call, fx.Node) or call.target not in JOINED or _index(node) < len(weights_of(call)):
        return None
    return converted_types(call)[0]


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _index(node: fx.Node) -> int:
    """Which result of a call ``node`` takes."""
    index = node.args[1]
    assert isinstance(index, int)
    return index
