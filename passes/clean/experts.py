"""Replaces each mixture of experts by one op, whose body consists of the model's nodes.

transformers' grouped implementation sorts the router's choices by expert, picks each choice's row, multiplies the groups by their
experts' matrices, weights the results, restores their order and sums the results of each token. The pass recognises this data flow; all
nodes between the picked rows and the weighted rows are the body. Grouped products that remain afterwards (because the body is not
row-wise) become autopar's function, which a program can include.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx, nn
from torch.fx.node import map_arg

from autopar.ops.experts import Experts
from autopar.ops.facts import OpKind, facts, is_pointwise, op_name
from autopar.ops.meta import meta
from autopar.ops.operands import args_of, argument, dtype_of, shape_of
from autopar.program.kernels_experts import grouped_linear, of_rows
from autopar.rules import is_row_wise
from passes.clean.linear import part, pieces, splittable
from passes.clean.nodes import add, aten, calls, copy_origin, replace

_RESHAPES = (aten.reshape.default, aten.view.default, aten.unsqueeze.default)


def experts_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace every mixture by a call of an ``Experts``; see the module's docstring."""
    for node in calls(gm, aten.sum.dim_IntList):
        region = _region(node)
        body = None if region is None else _Body(region).build()
        if region is None or body is None:
            continue
        graph, parameters = _split_fused(*body)
        op = Experts(fx.GraphModule(nn.Module(), graph, class_name="Body"), shape_of(region.counts)[0])
        new = add(node, op, (region.x, region.index, region.weights, *parameters))
        users = list(node.users)
        if dtype_of(new) != dtype_of(node):  # the cast back to the tokens' dtype is part of the op
            replace(users[0], new)
        else:
            node.replace_all_uses_with(new)
    for node in calls(gm):
        if facts(node).kind is OpKind.GROUPED_PRODUCT and _is_three_dimensional(node) and node.users:
            _replace_grouped_product(node)
    return gm


@dataclass(frozen=True, slots=True)
class _Region:
    """The parts of a mixture: its tokens, the router's choices and their weights, the picked rows, the body's result, the choices sorted by
    expert, and the number of rows of each expert."""

    x: fx.Node
    index: fx.Node
    weights: fx.Node
    rows: fx.Node
    result: fx.Node
    ids: fx.Node
    counts: fx.Node  # before the cumulative sum


def _region(node: fx.Node) -> _Region | None:
    """Return the mixture that ends with ``node``: ``sum(reshape(index(body * w[perm], [inverse]), [t, k, h]), 1)``; else ``None``."""
    if list(argument(node, 1, "dim") or ()) != [1] or argument(node, 2, "keepdim", False):
        return None
    per_token = _as_call(args_of(node)[0], *_RESHAPES)
    unsorted = _as_call(per_token and per_token.args[0], aten.index.Tensor)
    if per_token is None or unsorted is None or len(shape_of(per_token)) != 3:
        return None
    weighted, inverse = args_of(unsorted)[0], _only_index(unsorted)
    written = _as_call(inverse, aten.index_put.default)
    product = _as_call(weighted, aten.mul.Tensor)
    if written is None or product is None:
        return None
    perm: fx.Node = args_of(written)[1][0]
    if not _is_arange(args_of(written)[2], shape_of(perm)[0]):
        return None
    for result, weight in (args_of(product)[:2], args_of(product)[1::-1]):
        while isinstance(weight, fx.Node) and weight.target in _RESHAPES:
            weight = args_of(weight)[0]
        weight = _as_call(weight, aten.index.Tensor)
        if weight is not None and _only_index(weight) is perm and isinstance(result, fx.Node):
            return _completed(node, per_token, perm, weight, result)
    return None


def _completed(node: fx.Node, per_token: fx.Node, perm: fx.Node, weight: fx.Node, result: fx.Node) -> _Region | None:
    """Return the region, completed from the permutation ``perm`` that sorts the choices; ``None`` if it is no mixture."""
    order = _as_call(perm, operator.getitem)
    sort = _as_call(order and order.args[0], aten.sort.default)
    flat, flat_weights = _as_call(sort and sort.args[0], *_RESHAPES), _as_call(args_of(weight)[0], *_RESHAPES)
    if order is None or sort is None or flat is None or flat_weights is None or args_of(order)[1] != 1:
        return None
    index, weights = args_of(flat)[0], args_of(flat_weights)[0]
    tokens, k, _ = shape_of(per_token)
    if shape_of(index) != (tokens, k) or shape_of(weights) != (tokens, k):
        return None
    picked = [u for n in perm.users if n.target is aten.floor_divide.default and n.args[1] == k for u in n.users]
    rows = next((n for n in picked if n.target is aten.index.Tensor and len(shape_of(n)) == 2), None)
    ids = next((n for n in sort.users if args_of(n)[1] == 0), None)
    if rows is None or ids is None:
        return None
    counted = [
        n
        for i in (ids, *(u for u in ids.users if op_name(u) == "aten.to"))
        for n in i.users
        if op_name(n) == "aten.histc"
    ]
    x = args_of(rows)[0]
    if len(counted) != 1 or not _counts_all(counted[0]) or len(shape_of(x)) != 2 or shape_of(x)[0] != tokens:
        return None
    cast = list(node.users)
    if dtype_of(node) != dtype_of(x) and not (
        len(cast) == 1 and op_name(cast[0]) == "aten.to" and dtype_of(cast[0]) == dtype_of(x)
    ):
        return None
    return _Region(x, index, weights, rows, result, ids, counted[0])


def _as_call(node: object, *targets: Callable[..., object]) -> fx.Node | None:
    return node if isinstance(node, fx.Node) and node.target in targets else None


def _only_index(node: fx.Node) -> fx.Node | None:
    """Return the index ``i`` if ``node`` is ``x[i]``; ``None`` if it has several indices."""
    indices = args_of(node)[1]
    return indices[0] if len(indices) == 1 else None


def _is_arange(node: fx.Node, extent: int) -> bool:
    """Return whether ``node`` is ``arange(extent)``, in any form of its arguments."""
    numbers = [a for a in node.args if isinstance(a, int)]
    return op_name(node) == "aten.arange" and numbers in ([extent], [0, extent], [0, extent, 1])


def _counts_all(node: fx.Node) -> bool:
    """Return whether a histogram of integers has a bin for each of 0, 1, ..., bins - 1."""
    bins, low, high = (argument(node, i + 1, name) for i, name in enumerate(("bins", "min", "max")))
    return low == 0 and high in (bins - 1, bins)


def _is_three_dimensional(node: fx.Node) -> bool:
    return len(shape_of(args_of(node)[0])) == 2 and len(shape_of(args_of(node)[1])) == 3


class _Body:
    """Copies the nodes between the picked rows and their results into a graph of ``(rows, counts, *parameters)``."""

    def __init__(self, region: _Region) -> None:
        self.region, self.graph = region, fx.Graph()
        self.rows, self.counts = self._placeholder("rows", region.rows), self._placeholder("counts", region.counts)
        meta(self.counts)["val"] = meta(region.counts)["val"].long()
        self.made: dict[fx.Node, fx.Node] = {region.rows: self.rows}
        self.parameters: dict[fx.Node, fx.Node] = {}  # from the model's placeholder to the body's
        self.row_nodes: set[fx.Node] = {self.rows}  # nodes that have a dim of rows

    def build(self) -> tuple[fx.Graph, dict[fx.Node, fx.Node]] | None:
        """Return the graph and its parameters; ``None`` if the body reads anything else, or is not row-wise."""
        for node in self._between():
            new = self._copy(node)
            if new is None:
                return None
            self.made[node] = new
        if self.made.get(self.region.result) not in self.row_nodes:
            return None
        self.graph.output(self.made[self.region.result])
        self.graph.eliminate_dead_code()  # transposes that grouped_linear does not need
        return self.graph, self.parameters

    def _between(self) -> list[fx.Node]:
        """Return, in order, the nodes that the result depends on, back to the picked rows and the sorted choices."""
        stops = {self.region.rows, self.region.ids}
        found: set[fx.Node] = set()
        stack = [self.region.result]
        while stack:
            node = stack.pop()
            if node in found or node in stops:
                continue
            found.add(node)
            stack.extend(self._read(node))
        return [node for node in self.region.result.graph.nodes if node in found]

    def _read(self, node: fx.Node) -> list[fx.Node]:
        """Return the operands, without the offsets of a grouped product."""
        return [
            n
            for n in node.all_input_nodes
            if facts(node).kind is not OpKind.GROUPED_PRODUCT or n is not args_of(node)[2]
        ]

    def _placeholder(self, name: str, source: fx.Node) -> fx.Node:
        node = self.graph.placeholder(name)
        meta(node)["val"] = meta(source)["val"]
        return node

    def _call(
        self, source: fx.Node, target: Callable[..., object], args: tuple[object, ...], *, has_rows: bool
    ) -> fx.Node:
        node = add_to(self.graph, target, args)
        copy_origin(source, node)
        if has_rows:
            self.row_nodes.add(node)
        return node

    def _copy(self, node: fx.Node) -> fx.Node | None:
        experts = shape_of(self.region.counts)[0]
        if node.op == "placeholder":
            if "parameter" not in meta(node) or shape_of(node)[:1] != (experts,):
                return None
            name = meta(node)["parameter"].name.rsplit(".", 1)[-1]
            self.parameters[node] = self._placeholder(name, node)
            return self.parameters[node]
        if facts(node).kind is OpKind.GROUPED_PRODUCT:
            weight = args_of(node)[1]
            if _swaps_last(weight):  # stored as [experts, out, in], as grouped_linear requires
                weight = self.made[args_of(weight)[0]]
            else:
                weight = self._call(node, aten.transpose.int, (self.made[weight], 1, 2), has_rows=False)
            rows = self.made[args_of(node)[0]]
            return (
                self._call(node, grouped_linear, (rows, weight, self.counts), has_rows=True)
                if rows in self.row_nodes
                else None
            )
        if node.target is aten.index.Tensor and _only_index(node) is self.region.ids:
            values = self.made[args_of(node)[0]]
            return (
                None
                if values in self.row_nodes
                else self._call(node, of_rows, (values, self.rows, self.counts), has_rows=True)
            )
        if node.op != "call_function" or not all(n in self.made for n in node.all_input_nodes):
            return None
        args, kwargs = map_arg((node.args, dict(node.kwargs)), self.made.__getitem__)
        # without the node's number in the model, so that equal bodies compare equal
        name = op_name(node).rsplit(".", 1)[-1]
        new = self.graph.create_node("call_function", node.target, args, kwargs, name=name)
        new.meta = {key: value for key, value in node.meta.items() if key != "gradient"}
        if any(n in self.row_nodes for n in new.all_input_nodes):
            allowed = is_row_wise(new, self.row_nodes)
            self.row_nodes.add(new)
        else:
            allowed = is_pointwise(new) or _swaps_last(new)
        return new if allowed else None


def add_to(graph: fx.Graph, target: Callable[..., object], args: tuple[object, ...]) -> fx.Node:
    """Return a new call at the end of ``graph``, with its ``meta["val"]``."""
    anchor = graph.call_function(lambda: None)  # `add` puts a node before it
    node = add(anchor, target, args)
    graph.erase_node(anchor)
    return node


def _swaps_last(node: fx.Node) -> bool:
    rank = len(shape_of(node))
    return op_name(node) == "aten.transpose" and {d % rank for d in args_of(node)[1:3]} == {1, 2} and rank == 3


def _split_fused(graph: fx.Graph, parameters: dict[fx.Node, fx.Node]) -> tuple[fx.Graph, list[fx.Node]]:
    """Split a product whose readers take slices that cover it into one product per slice, like ``fused_projections_pass``.

    Return the graph, and the model's placeholders for its parameters, in the graph's order.
    """
    outside = {inner: outer for outer, inner in parameters.items()}
    for node in [n for n in graph.nodes if n.target is grouped_linear]:
        found, weight = pieces(node), args_of(node)[1]
        transposed = weight.op == "call_function"
        stored = args_of(weight)[0] if transposed else weight
        users = weight if transposed else node
        if found is None or stored not in outside or list(stored.users) != [users] or len(weight.users) != 1:
            continue
        outer = outside[stored]
        if not splittable(outer, *outer.users):
            continue
        for number, ((start, end), slices) in enumerate(found.items()):
            outer_part = part(outer, number, 2 if transposed else 1, start, end)
            with graph.inserting_before(stored):
                inner = graph.placeholder(f"{stored.name}_part{number}")
            meta(inner)["val"] = meta(outer_part)["val"]
            outside[inner] = outer_part
            operand = add(node, aten.transpose.int, (inner, 1, 2)) if transposed else inner
            new = add(node, grouped_linear, (args_of(node)[0], operand, args_of(node)[2]))
            for piece in slices:
                replace(piece, new)
        for dead in (node, weight, stored) if transposed else (node, stored):
            graph.erase_node(dead)
        del outside[stored]
    return graph, [outside[n] for n in graph.nodes if n.op == "placeholder" and n in outside]


def _replace_grouped_product(node: fx.Node) -> None:
    """Replace a grouped product outside of a mixture by autopar's ``grouped_linear``, whose row counts follow from the offsets."""
    rows, weight, offsets = args_of(node)[:3]
    start = add(node, aten.slice.Tensor, (offsets, 0, 0, shape_of(offsets)[0] - 1))
    start = add(node, aten.constant_pad_nd.default, (start, [1, 0]))
    counts = add(node, aten.sub.Tensor, (offsets, start))
    swapped = add(node, aten.transpose.int, (weight, 1, 2))
    replace(node, add(node, grouped_linear, (rows, swapped, counts)))
