"""Replaces each mixture of experts by one op, whose body consists of the model's nodes.

``expert_flow`` recognises the flow of data around the experts; all nodes between the picked rows and the weighted rows are the body.
Grouped products that remain afterwards (because the body is not row-wise) become autopar's function, which a program can include.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from torch import fx, nn
from torch.fx.node import map_arg

from autopar.graph import Parameter
from autopar.ops.experts import Experts
from autopar.ops.facts import OpKind, facts, is_pointwise, op_name
from autopar.ops.meta import meta
from autopar.ops.operands import args_of, shape_of
from autopar.program.kernels_experts import grouped_linear, of_rows
from autopar.rules import is_row_wise
from passes.clean.expert_flow import ENDS, Region, counts_behind, find_region, put_in_place
from passes.clean.linear import part, pieces, splittable
from passes.clean.nodes import add, aten, calls, copy_origin, note, replace
from passes.clean.stacked import not_stackable_reason, stacked_parameters


def experts_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace every mixture by a call of an ``Experts``; see the module's docstring."""
    for node in calls(gm, *ENDS):
        region = find_region(node)
        body = None if region is None else _Body(region).build()
        if region is None or body is None:
            continue
        _note_replicated(gm, list(body[1]))
        graph, parameters = _split_fused(*body)
        op = Experts(
            fx.GraphModule(nn.Module(), graph, class_name="Body"), region.experts, weights_first=region.weights_first
        )
        index, weights = (_per_token(node, each, region.x) for each in (region.index, region.weights))
        put_in_place(node, add(node, op, (region.x, index, weights, *parameters)))
    for node in calls(gm):
        if facts(node).kind is OpKind.GROUPED_PRODUCT and _is_three_dimensional(node) and node.users:
            _replace_grouped_product(node)
    return gm


def _per_token(anchor: fx.Node, choices: fx.Node, x: fx.Node) -> fx.Node:
    """Return the choices, or their weights, as ``[tokens, choices]``."""
    sizes, tokens = shape_of(choices), shape_of(x)[0]
    if len(sizes) == 2 and sizes[0] == tokens:
        return choices
    return add(anchor, aten.reshape.default, (choices, [tokens, prod(sizes) // tokens]))


def _is_three_dimensional(node: fx.Node) -> bool:
    return len(shape_of(args_of(node)[0])) == 2 and len(shape_of(args_of(node)[1])) == 3


class _Body:
    """Copies the nodes between the picked rows and their results into a graph of ``(rows, counts, *parameters)``."""

    def __init__(self, region: Region) -> None:
        self.region, self.graph = region, fx.Graph()
        self.rows = self._placeholder("rows", next(iter(region.rows)))
        self.counts = self._placeholder("counts", region.counts[0])
        meta(self.counts)["val"] = meta(region.counts[0])["val"].long()
        self.made: dict[fx.Node, fx.Node] = dict.fromkeys(region.rows, self.rows)
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
        stops = self.region.rows | self.region.ids
        found: set[fx.Node] = set()
        stack = [self.region.result]
        while stack:
            node = stack.pop()
            if node in found or node in stops:
                continue
            found.add(node)
            if _stored(node) is None:
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
        taken = [n.target for n in self.graph.nodes if n.op == "placeholder"]
        node = self.graph.placeholder(name if name not in taken else f"{name}_{len(taken)}")
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
        experts = self.region.experts
        stored = _stored(node)
        if stored is not None:
            if shape_of(node)[:1] != (experts,):
                return None
            # the parameter's name in the model, for a stacked one with the module's, which distinguishes the parameters of an expert
            words = stored.name.rsplit(".", 2)[-1 if node.op == "placeholder" and not stored.stacked else -2 :]
            name = "_".join(word for word in words if not word.isdigit())
            self.parameters[node] = self._placeholder(name, node)
            return self.parameters[node]
        if facts(node).kind is OpKind.GROUPED_PRODUCT:
            if counts_behind(args_of(node)[2]) not in self.region.counts:
                return None
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
        if node.target is aten.index.Tensor and args_of(node)[1][0] in self.region.ids:
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


def _stored(node: fx.Node) -> Parameter | None:
    """Return the parameter that the node is, or the first one if the node stacks a parameter of each expert; else ``None``."""
    parts = stacked_parameters(node) or (node,)
    return meta(parts[0]).get("parameter")


def _note_replicated(gm: fx.GraphModule, operands: list[fx.Node]) -> None:
    """Note that all devices have the parameters of all experts, if they are stacked in forward, and why."""
    stacks = [node for node in operands if stacked_parameters(node)]
    if stacks:
        note(
            gm,
            f"under expert parallelism every device has the parameters of all {shape_of(stacks[0])[0]} experts, because "
            f"{not_stackable_reason(stacks[0])}",
        )


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
        if not splittable(outer):
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
