"""Builds one computation for all experts of a mixture from the equal computations of each expert.

Each expert's computation is a part of the graph on that expert's rows. If the parts have the same ops and differ only in their parameters,
and each row's result depends on no other row, then running each op once on all rows, sorted by expert, gives the same results: a product
with a parameter becomes a grouped product (grouped GEMM) with the experts' stacked parameters.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from autopar.ops.facts import OpKind, facts, op_name
from autopar.ops.meta import meta
from autopar.ops.operands import args_of, argument, dtype_of, shape_of, val
from autopar.rules import is_row_wise
from passes.clean.nodes import add, aten

RESHAPES = (aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default)
_TRANSPOSES = (aten.transpose.int, aten.t.default, aten.numpy_T.default)
_CHECKS = frozenset(
    ("aten._assert_scalar", "aten._assert_tensor_metadata", "aten.sym_size", "aten.sym_constrain_range_for_size")
)


class UnsupportedError(Exception):
    """The experts' computations aren't equal up to parameters, or not row-wise."""


class ExpertBuilder(ABC):
    """Adds the computation for all experts before ``anchor``. ``parameters`` are the placeholders of the model's parameters.

    ``added`` are the new nodes, ``replaced`` those that they replace, ``stacked`` the stacked parameters, and ``row_nodes`` the new nodes
    with all rows as dim 0. A subclass provides the rows (``leaf``) and how they are distributed over the experts (``ends``, ``experts``).
    """

    def __init__(self, anchor: fx.Node, parameters: set[fx.Node]) -> None:
        self.anchor, self.parameters = anchor, parameters
        self.added: set[fx.Node] = set()
        self.replaced: set[fx.Node] = set()
        self.stacked: dict[fx.Node, None] = {}
        self.row_nodes: set[fx.Node] = set()
        self.of_experts: set[fx.Node] = (
            set()
        )  # the new nodes with one entry per expert, parameters or views of them, as dim 0
        self.read: set[fx.Node] = set()  # what the new nodes read besides what the replaced ones read
        self.memory: set[fx.Node] = set()  # the memory that the replaced nodes read
        self._made: dict[tuple[fx.Node, ...], fx.Node] = {}

    @abstractmethod
    def leaf(self, nodes: tuple[fx.Node, ...]) -> fx.Node | None:
        """Return all experts' rows if ``nodes`` are the rows of each; else ``None``."""

    @abstractmethod
    def ends(self) -> fx.Node:
        """Return the ends of each expert's rows."""

    @abstractmethod
    def experts(self) -> fx.Node:
        """Return each row's expert."""

    def add(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = add(self.anchor, target, args, kwargs)
        self.added.add(node)
        return node

    def undo(self) -> None:
        """Erase the new nodes."""
        for node in reversed([n for n in self.anchor.graph.nodes if n in self.added]):
            self.anchor.graph.erase_node(node)

    def build(self, nodes: tuple[fx.Node, ...]) -> fx.Node:
        """Return the node for all experts that corresponds to ``nodes``, one of each expert. Raises ``UnsupportedError``."""
        if nodes not in self._made:
            if not all(isinstance(meta(node).get("val"), torch.Tensor) for node in nodes):
                raise UnsupportedError
            found = self._parameter(nodes)
            self.of_experts |= set() if found is None else {found}
            self._made[nodes] = self._rows(nodes) if found is None else found
        return self._made[nodes]

    def _parameter(self, nodes: tuple[fx.Node, ...]) -> fx.Node | None:
        """Return the stacked parameter if ``nodes`` are parameters, or the parameter if they are its entries along dim 0; else ``None``."""
        if all(node in self.parameters for node in nodes):
            if len({(shape_of(node), dtype_of(node)) for node in nodes}) != 1:
                raise UnsupportedError
            self.stacked.update(dict.fromkeys(nodes))
            return self.add(aten.stack.default, list(nodes))
        entries = [entry_of(node) for node in nodes]
        whole = entries[0][0]
        if whole in self.parameters and whole is not None and shape_of(whole)[0] == len(nodes):
            return whole if entries == [(whole, expert) for expert in range(len(nodes))] else None
        if all(_swaps_dims(node) for node in nodes):
            found = self._parameter(tuple(args_of(node)[0] for node in nodes))
            return self.add(aten.transpose.int, found, 1, 2) if found is not None else None
        return None

    def _rows(self, nodes: tuple[fx.Node, ...]) -> fx.Node:
        new = self.leaf(nodes)
        if new is None:
            new = self._computed(nodes)
            self.replaced.update(nodes)
        self.row_nodes.add(new)
        return new

    def _computed(self, nodes: tuple[fx.Node, ...]) -> fx.Node:
        first = nodes[0]
        if first.op != "call_function" or is_mutable(first) or any(node.target is not first.target for node in nodes):
            raise UnsupportedError
        if any(node in self.replaced for node in nodes):
            raise UnsupportedError  # of several experts
        if first.target is operator.getitem:
            return self._part(nodes)
        args = self._parallel([node.args for node in nodes])
        kwargs = self._parallel([dict(node.kwargs) for node in nodes])
        if first.target is aten.linear.default:
            return self._linear(*args)
        if first.target is aten.matmul.default:
            return self._product(*args)
        if first.target in RESHAPES:
            return self._reshaped(first, args[0])
        assert callable(first.target)
        args = self._by_row(first, args)
        new = self.add(first.target, *args, **kwargs)
        if not is_row_wise(new, self.row_nodes):
            raise UnsupportedError
        return new

    def _part(self, nodes: tuple[fx.Node, ...]) -> fx.Node:
        """Return a part of all rows for a part of each expert's rows, which an op cuts along the last dim (``chunk(2, -1)``)."""
        cuts, number = [args_of(node)[0] for node in nodes], args_of(nodes[0])[1]
        first = cuts[0]
        same = all((n.target, n.args[1:], n.kwargs) == (first.target, first.args[1:], first.kwargs) for n in cuts)
        if first.target not in (aten.chunk.default, aten.split.Tensor) or not same:
            raise UnsupportedError
        if any(args_of(node)[1] != number for node in nodes) or argument(first, 2, "dim", 0) not in (-1, 1):
            raise UnsupportedError
        rows = self.build(tuple(args_of(node)[0] for node in cuts))
        if rows not in self.row_nodes or len(shape_of(rows)) != 2:
            raise UnsupportedError
        self.replaced.update(cuts)
        return self.add(operator.getitem, self.add(first.target, rows, *first.args[1:], **first.kwargs), number)

    def _by_row(self, node: fx.Node, args: Any) -> Any:
        """Return the operands of a pointwise op with each expert's own parameter for its rows."""
        found = list(args)
        for k, parameter in enumerate(args):
            if not isinstance(parameter, fx.Node) or parameter not in self.of_experts:
                continue
            sizes = shape_of(parameter)[1:]
            if not facts(node).pointwise or len(sizes) > 1 or len(val(node).shape) != 2:
                raise UnsupportedError
            row = self.add(aten.index.Tensor, parameter, [self.experts()])
            found[k] = row if sizes else self.add(aten.unsqueeze.default, row, 1)
            self.row_nodes.add(found[k])
        return tuple(found)

    def _parallel(self, values: list[Any]) -> Any:
        """Return an argument for all experts, from that of each expert."""
        first = values[0]
        if all(isinstance(value, fx.Node) for value in values):
            return self.build(tuple(values))
        if any(type(value) is not type(first) for value in values):
            raise UnsupportedError
        if isinstance(first, dict):
            if any(value.keys() != first.keys() for value in values):
                raise UnsupportedError
            return {key: self._parallel([value[key] for value in values]) for key in first}
        if isinstance(first, tuple | list):
            if any(len(value) != len(first) for value in values):
                raise UnsupportedError
            return type(first)(self._parallel(list(items)) for items in zip(*values, strict=True))
        if any(value != first for value in values):
            raise UnsupportedError
        return first

    def _linear(self, rows: fx.Node, weight: fx.Node, bias: fx.Node | None = None) -> fx.Node:
        turned = self.add(aten.transpose.int, weight, -2, -1)
        self.of_experts |= {turned} if weight in self.of_experts else set()
        product = self._product(rows, turned)
        if bias is None:
            return product
        if bias not in self.of_experts:
            raise UnsupportedError
        return self.add(aten.add.Tensor, product, self.add(aten.index.Tensor, bias, [self.experts()]))

    def _product(self, rows: fx.Node, weight: fx.Node) -> fx.Node:
        if rows not in self.row_nodes or weight not in self.of_experts:
            raise UnsupportedError
        if len(shape_of(rows)) != 2 or len(shape_of(weight)) != 3:
            raise UnsupportedError
        return self.add(torch.ops.autopar.grouped_product.default, rows, weight, self.ends())

    def _reshaped(self, node: fx.Node, rows: fx.Node) -> fx.Node:
        """Return ``rows`` with the other dims of ``node``, if dim 0 remains that of the rows."""
        count, *sizes = val(node).shape
        if (
            rows in self.of_experts
            or str(count) != str(val(args_of(node)[0]).shape[0])
            or not all(type(size) is int for size in sizes)
        ):
            raise UnsupportedError
        return self.add(aten.reshape.default, rows, [shape_of(rows)[0], *sizes])

    def reads_only_replaced(self, sources: list[fx.Node], written: fx.Node | None = None) -> bool:
        """Return whether only replaced nodes and checks read ``sources``, and no other node writes to what these nodes read before
        ``anchor``, the last of them; then count the checks as replaced. ``written`` is the operand that they write to."""
        last = self.anchor
        found = {node for source in sources for node in descendants(source, last)}
        if not all(node in self.replaced or is_check(node) for node in found):
            return False
        self.replaced |= found
        inputs = {operand for node in self.replaced for operand in node.all_input_nodes} - self.replaced
        inputs |= self.read
        self.memory, seen = {memory_of(node) for node in inputs if node is not written}, False
        for node in last.graph.nodes:
            seen = seen or node in inputs
            if node is last:
                break
            if seen and is_mutable(node) and node not in self.replaced and memory_of(node) in self.memory:
                return False
        return True

    def erase_replaced(self) -> None:
        for node in reversed([n for n in self.anchor.graph.nodes if n in self.replaced]):
            self.anchor.graph.erase_node(node)


def _swaps_dims(node: fx.Node) -> bool:
    """Return whether the node is a transposed matrix."""
    return (
        node.target in _TRANSPOSES
        and len(val(node).shape) == 2
        and {d % 2 for d in args_of(node)[1:]} in ({0, 1}, set())
    )


def entry_of(node: fx.Node) -> tuple[fx.Node | None, int]:
    """Return the tensor and the position if ``node`` is its entry at a position of dim 0; else ``None``."""
    sizes = val(node).shape
    while node.target in RESHAPES and val(args_of(node)[0]).shape[-len(sizes) :] == sizes:
        node = args_of(node)[0]
    if node.target is aten.select.int and args_of(node)[1] == 0:
        return args_of(node)[0], args_of(node)[2]
    if node.target is not aten.index.Tensor or len(args_of(node)[1]) != 1:
        return None, 0
    index = args_of(node)[1][0]
    while isinstance(index, fx.Node) and (index.target in RESHAPES or index.target is aten.select.int):
        index = args_of(index)[0]
    constant = isinstance(index, fx.Node) and op_name(index) == "aten.full" and len(shape_of(index)) < 2
    return (args_of(node)[0], args_of(index)[1]) if constant else (None, 0)


def is_mutable(node: fx.Node) -> bool:
    """Return whether the op writes to an operand."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def memory_of(node: fx.Node) -> fx.Node:
    """Return the node that created the memory of a node's value, which may be a view."""
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        shared = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None] if schema is not None else []
        if facts(node).kind is OpKind.DROPOUT:
            shared = [0]
        if not shared or not isinstance(node.args[shared[0]], fx.Node):
            return node
        node = args_of(node)[shared[0]]
    return node


def descendants(node: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that depend on ``node``, up to ``last``."""
    found, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            if user not in found:
                found.add(user)
                yield user
                if user is not last:
                    waiting.append(user)


def is_check(node: fx.Node) -> bool:
    """Return whether the node only checks sizes or types."""
    value = meta(node).get("val")
    return op_name(node) in _CHECKS or isinstance(value, torch.SymInt | torch.SymBool) or type(value) is bool
