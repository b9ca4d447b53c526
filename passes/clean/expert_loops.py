"""Lowers loops over the experts of a mixture to grouped products: ``for e in range(experts): token, choice = where(chosen_by[e]) ...``.

Each iteration picks the rows of the tokens that chose its expert, computes the expert, weights the results, and adds them to the tokens. The
number of rows depends on the data. In sum, the iterations compute a row for each of the router's choices, and every expert has the same
ops. So the pass sorts all choices by expert, and runs each op once for all experts, on their stacked parameters. ``experts_pass`` then
recognises the mixture.

A chain of ``index_add_`` is lowered if its masks are one expert's part of ``one_hot(choices)`` each, for every expert once (so that each
choice belongs to one iteration), if the experts are equal up to their parameters and row-wise, and if nothing else reads the picked rows.

In a loop over the experts that tokens chose, capture marks the begin and the end. Eager PyTorch skips iterations there: the pass proves
that their masks are empty, and that no part of the loop is left.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ops.facts import OpKind, facts, op_name
from autopar.ops.meta import meta
from autopar.ops.operands import args_of, dtype_of, shape_of, val
from autopar.rules import is_row_wise
from passes.clean.nodes import add, aten, calls

ENTER, LEAVE = "enter_loop", "leave_loop"
"""The names of the ops that mark the begin and the end of a loop over the positions of true values; their operand is the condition."""

_RESHAPES = (aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default)
_SELECTIONS = (aten.where.default, aten.nonzero_numpy.default)
_CHECKS = frozenset(
    ("aten._assert_scalar", "aten._assert_tensor_metadata", "aten.sym_size", "aten.sym_constrain_range_for_size")
)


@dataclass(frozen=True, slots=True)
class _Choices:
    """The router's choices ``index``, ``[tokens * choices]`` in any shape. ``one_hot`` has a last dim for the experts, ``masked``: it is
    zero where a choice is dropped."""

    index: fx.Node
    one_hot: fx.Node
    tokens: int
    choices: int
    experts: int
    masked: bool


@dataclass(frozen=True, slots=True)
class _Iteration:
    """One expert's part: ``write`` adds ``value`` to the tokens; ``mask`` has an entry for each expert, choice and token."""

    expert: int
    write: fx.Node
    mask: fx.Node
    selection: fx.Node
    token: fx.Node
    choice: fx.Node | None
    value: fx.Node


def lower_expert_loops(gm: fx.GraphModule, parameters: set[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Lower the loops over experts whose parameters are among the placeholders ``parameters``.

    Return the parameters that get no gradient in eager PyTorch if no token chooses their expert, and the markers of loops that capture
    marked and that can't be lowered; the others are erased.
    """
    spans = _spans(gm)
    skippable: dict[fx.Node, None] = {}
    done: set[fx.Node] = set()
    for chain in _chains(gm):
        span = next((s for s in spans if any(i.write in s.body for i in chain)), None)
        if span is not None and not span.contains(chain):
            continue
        lowered = _Lowering(chain, parameters).replace()
        if lowered is None:
            continue
        if span is not None and span.erase():
            done.add(span.enter)
            skippable.update(dict.fromkeys(lowered.stacked))
    return list(skippable), [span.enter for span in spans if span.enter not in done]


# -- loops that eager PyTorch partly skips -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Span:
    """A loop over the positions where the operand of the markers ``enter`` and ``leave`` is true."""

    enter: fx.Node
    leave: fx.Node
    body: dict[fx.Node, None]

    def contains(self, chain: list[_Iteration]) -> bool:
        """Return whether the loop has all iterations of ``chain``, and the masks of those that eager PyTorch skips are empty."""
        inside = all(i.write in self.body for i in chain)
        return inside and _is_true_for_nonempty(args_of(self.enter)[0], chain[0].mask)

    def erase(self) -> bool:
        """Erase what is left of the traced loop; return whether that is possible: nothing reads it, and it has no side effects."""
        graph, condition = self.enter.graph, args_of(self.enter)[0]
        nodes = set(graph.nodes)
        for node in [n for n in reversed(self.body) if n in nodes]:
            if node.users or _is_mutable(node):
                return False
            graph.erase_node(node)
        for node in (self.enter, self.leave):
            graph.erase_node(node)
        for node in [user for user in condition.users if user.target is aten.nonzero.default]:
            _erase_unread(node)
        return True


def _spans(gm: fx.GraphModule) -> list[_Span]:
    spans, enter, body = list[_Span](), None, dict[fx.Node, None]()
    for node in gm.graph.nodes:
        if op_name(node) == f"autopar.{ENTER}":
            enter, body = node, {}
        elif op_name(node) == f"autopar.{LEAVE}":
            assert enter is not None
            spans.append(_Span(enter, node, body))
            enter = None
        elif enter is not None:
            body[node] = None
    return spans


def _is_mutable(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _is_true_for_nonempty(condition: fx.Node, mask: fx.Node) -> bool:
    """Return whether ``condition`` is true for each expert for which ``mask``, which has no negative entries, has one that isn't zero."""
    if op_name(condition) in ("aten.gt", "aten.greater", "aten.ne", "aten.not_equal"):
        if args_of(condition)[1] != 0 or isinstance(args_of(condition)[1], fx.Node):
            return False
        condition = args_of(condition)[0]
    if op_name(condition) not in ("aten.sum", "aten.any") or len(condition.args) < 2:
        return False
    source, dims = args_of(condition)[:2]
    dims = [dims] if isinstance(dims, int) else dims
    return source is mask and {d % len(shape_of(mask)) for d in dims or ()} == {1, 2} and len(shape_of(condition)) == 1


# -- finding loops -------------------------------------------------------------------------------------------------------


def _chains(gm: fx.GraphModule) -> list[list[_Iteration]]:
    """Return the chains of additions to the same tensor, one for each expert."""
    found = {}
    for node in calls(gm, aten.index_add_.default):
        iteration = _iteration(node)
        if iteration is not None:
            found[node] = iteration
    chains: list[list[_Iteration]] = []
    for node, iteration in found.items():
        before = args_of(node)[0]
        last = chains[-1] if chains else []
        if last and last[-1].write is before and list(before.users) == [node] and last[0].mask is iteration.mask:
            last.append(iteration)
        else:
            chains.append([iteration])
    return [c for c in chains if sorted(i.expert for i in c) == list(range(shape_of(c[0].mask)[0]))]


def _iteration(write: fx.Node) -> _Iteration | None:
    base, dim, token, value = args_of(write)[:4]
    if dim != 0 or len(write.args) > 4 or write.kwargs or len(shape_of(base)) != 2:
        return None
    if not isinstance(token, fx.Node) or token.target is not operator.getitem or not isinstance(value, fx.Node):
        return None
    selection, number = args_of(token)[:2]
    if selection.target not in _SELECTIONS or number != 1 or len(shape_of(args_of(selection)[0])) != 2:
        return None
    mask, expert = _one_of(args_of(selection)[0])
    if mask is None or len(shape_of(mask)) != 3 or shape_of(mask)[2] != shape_of(base)[0]:
        return None
    choice = next((user for user in selection.users if user.target is operator.getitem and args_of(user)[1] == 0), None)
    return _Iteration(expert, write, mask, selection, token, choice, value)


def _one_of(node: fx.Node) -> tuple[fx.Node | None, int]:
    """Return the tensor and the position if ``node`` is its entry at a position of dim 0; else ``None``."""
    sizes = shape_of(node)
    while node.target in _RESHAPES and shape_of(args_of(node)[0])[-2:] == sizes:
        node = args_of(node)[0]
    if node.target is aten.select.int and args_of(node)[1] == 0:
        return args_of(node)[0], args_of(node)[2]
    if node.target is not aten.index.Tensor or len(args_of(node)[1]) != 1:
        return None, 0
    index = args_of(node)[1][0]
    while isinstance(index, fx.Node) and (index.target in _RESHAPES or index.target is aten.select.int):
        index = args_of(index)[0]
    constant = isinstance(index, fx.Node) and op_name(index) == "aten.full" and len(shape_of(index)) < 2
    return (args_of(node)[0], args_of(index)[1]) if constant else (None, 0)


def _choices(mask: fx.Node) -> _Choices | None:
    """Return the choices of which ``mask [experts, choices, tokens]`` is the one-hot encoding, permuted."""
    if mask.target is not aten.permute.default or list(args_of(mask)[1]) != [2, 1, 0]:
        return None
    experts, choices, tokens = shape_of(mask)
    one_hot: Any = args_of(mask)[0]
    while one_hot.target in _RESHAPES and shape_of(args_of(one_hot)[0])[-1:] == (experts,):
        one_hot = args_of(one_hot)[0]
    plain, masked = one_hot, False
    if one_hot.target is aten.mul.Tensor:
        plain, kept = args_of(one_hot)[:2]
        if not isinstance(kept, fx.Node) or dtype_of(kept) != torch.bool or shape_of(plain) != shape_of(one_hot):
            return None
        masked = True
    if not isinstance(plain, fx.Node) or plain.target is not aten.one_hot.default or args_of(plain)[1] != experts:
        return None
    return _Choices(args_of(plain)[0], one_hot, tokens, choices, experts, masked)


# -- lowering ------------------------------------------------------------------------------------------------------------


class _UnsupportedError(Exception):
    """The iterations aren't equal up to parameters, or not row-wise."""


class _Lowering:
    """Replaces the iterations of a loop by one computation for all experts. ``added`` are the new nodes, ``stacked`` the parameters."""

    def __init__(self, chain: list[_Iteration], parameters: set[fx.Node]) -> None:
        self.chain = sorted(chain, key=lambda iteration: iteration.expert)
        self.last = chain[-1].write
        self.parameters = parameters
        self.added: set[fx.Node] = set()
        self.stacked: dict[fx.Node, None] = {}
        self.replaced: set[fx.Node] = {node for i in chain for node in (i.write, i.token, i.selection)}
        self.made: dict[tuple[fx.Node, ...], fx.Node] = {}
        self.row_nodes: set[fx.Node] = set()

    def replace(self) -> _Lowering | None:
        """Lower the loop; return ``None``, and change nothing, if that isn't possible."""
        graph = self.last.graph
        found = _choices(self.chain[0].mask)
        try:
            if found is None:
                raise _UnsupportedError
            self._sort(found)
            value = self._build(tuple(iteration.value for iteration in self.chain))
            if value not in self.row_nodes or found.masked and not self._weights_last:
                raise _UnsupportedError
            self.replaced.update(i.choice for i in self.chain if i.choice is not None)
            read = {node for iteration in self.chain for node in _descendants(iteration.selection, self.last)}
            if not all(node in self.replaced or _is_check(node) for node in read):
                raise _UnsupportedError
        except _UnsupportedError:
            for node in reversed([n for n in graph.nodes if n in self.added]):
                graph.erase_node(node)
            return None
        new = self._add(aten.index_add_.default, args_of(self.chain_start)[0], 0, self.token, value)
        self.last.replace_all_uses_with(new)
        for node in reversed([n for n in graph.nodes if n in self.replaced or n in read]):
            graph.erase_node(node)
        return self

    @property
    def chain_start(self) -> fx.Node:
        writes = {iteration.write for iteration in self.chain}
        return next(write for write in writes if args_of(write)[0] not in writes)

    def _add(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = add(self.last, target, args, kwargs)
        self.added.add(node)
        return node

    def _sort(self, found: _Choices) -> None:
        """Add the choices, sorted by expert: their order, tokens, experts, and the ends of each expert's rows."""
        self.found, rows = found, found.tokens * found.choices
        index = self._add(aten.reshape.default, found.index, [found.tokens, found.choices])
        flat = self._add(aten.reshape.default, index, [rows])
        self.order = self._add(aten.argsort.stable, flat, stable=True)
        self.token = self._add(aten.floor_divide.default, self.order, found.choices)
        self.expert = self._add(aten.index.Tensor, flat, [self.order])
        numbers = self._add(aten.to.dtype, flat, torch.float32)
        counts = self._add(aten.histc.default, numbers, found.experts, 0, found.experts)
        self.ends = self._add(aten.cumsum.default, counts, 0, dtype=torch.int32)

    def _build(self, nodes: tuple[fx.Node, ...]) -> fx.Node:
        """Return the node for all experts that corresponds to ``nodes``, one of each expert."""
        if nodes not in self.made:
            self.made[nodes] = self._made(nodes)
        return self.made[nodes]

    def _made(self, nodes: tuple[fx.Node, ...]) -> fx.Node:
        if all(node in self.parameters for node in nodes):
            if len({(shape_of(node), dtype_of(node)) for node in nodes}) != 1:
                raise _UnsupportedError
            self.stacked.update(dict.fromkeys(nodes))
            return self._add(aten.stack.default, list(nodes))
        picked = self._picked(nodes)
        if picked is None:
            new = self._computed(nodes)
            self.replaced.update(nodes)
        else:
            new = picked
        self.row_nodes.add(new)
        return new

    def _computed(self, nodes: tuple[fx.Node, ...]) -> fx.Node:
        first = nodes[0]
        if first.op != "call_function" or _is_mutable(first) or any(node.target is not first.target for node in nodes):
            raise _UnsupportedError
        if any(node in self.replaced for node in nodes):
            raise _UnsupportedError  # an iteration reads another one's rows
        args = self._parallel([node.args for node in nodes])
        kwargs = self._parallel([dict(node.kwargs) for node in nodes])
        if first.target is aten.linear.default:
            return self._linear(*args)
        if first.target in _RESHAPES:
            return self._reshaped(first, args[0])
        new = self._add(first.target, *args, **kwargs)
        if not is_row_wise(new, self.row_nodes):
            raise _UnsupportedError
        return new

    def _parallel(self, values: list[Any]) -> Any:
        """Return an argument for all experts, from that of each expert."""
        first = values[0]
        if all(isinstance(value, fx.Node) for value in values):
            return self._build(tuple(values))
        if any(type(value) is not type(first) for value in values):
            raise _UnsupportedError
        if isinstance(first, dict):
            if any(value.keys() != first.keys() for value in values):
                raise _UnsupportedError
            return {key: self._parallel([value[key] for value in values]) for key in first}
        if isinstance(first, tuple | list):
            if any(len(value) != len(first) for value in values):
                raise _UnsupportedError
            return type(first)(self._parallel(list(items)) for items in zip(*values, strict=True))
        if any(value != first for value in values):
            raise _UnsupportedError
        return first

    def _linear(self, rows: fx.Node, weight: fx.Node, bias: fx.Node | None = None) -> fx.Node:
        if rows not in self.row_nodes or len(shape_of(rows)) != 2 or weight in self.row_nodes:
            raise _UnsupportedError
        swapped = self._add(aten.transpose.int, weight, 1, 2)
        product = self._add(torch.ops.autopar.grouped_product.default, rows, swapped, self.ends)
        if bias is None:
            return product
        return self._add(aten.add.Tensor, product, self._add(aten.index.Tensor, bias, [self.expert]))

    def _reshaped(self, node: fx.Node, rows: fx.Node) -> fx.Node:
        """Return ``rows`` with the other dims of ``node``, if dim 0 remains that of the rows."""
        count, *sizes = val(node).shape
        if str(count) != str(val(args_of(node)[0]).shape[0]) or not all(type(size) is int for size in sizes):
            raise _UnsupportedError
        return self._add(aten.reshape.default, rows, [shape_of(rows)[0], *sizes])

    def _picked(self, nodes: tuple[fx.Node, ...]) -> fx.Node | None:
        """Return the rows of all choices' tokens, or their weights, if ``nodes`` are those of each expert's tokens; else ``None``."""
        found = [_pick(node, iteration) for node, iteration in zip(nodes, self.chain, strict=True)]
        first = found[0]
        if first is None or any(each != first for each in found):
            return None
        source, is_weight = first
        self.replaced.update(nodes)
        self.replaced.update(args_of(node)[0] for node in nodes if node.target in _RESHAPES)
        tokens, choices = self.found.tokens, self.found.choices
        if not is_weight:
            return self._add(aten.index.Tensor, source, [self.token]) if shape_of(source)[0] == tokens else None
        if shape_of(source)[:2] != (tokens, choices):
            return None
        weights = self._add(aten.reshape.default, source, [tokens, choices])
        if self.found.masked:
            kept = self._add(aten.sum.dim_IntList, self.found.one_hot, [-1])
            kept = self._add(aten.to.dtype, self._add(aten.reshape.default, kept, [tokens, choices]), dtype_of(source))
            weights = self._add(aten.mul.Tensor, weights, kept)
        flat = self._add(aten.reshape.default, weights, [tokens * choices])
        picked = self._add(aten.index.Tensor, flat, [self.order])
        return self._add(aten.reshape.default, picked, [tokens * choices, *shape_of(nodes[0])[1:]])

    @property
    def _weights_last(self) -> bool:
        """Return whether the last op, except for casts, multiplies the rows by the choices' weights."""
        product: Any = self.chain[0].value
        while facts(product).kind is OpKind.CAST:
            product = args_of(product)[0]
        if product.target is not aten.mul.Tensor:
            return False
        factors = [n for n in args_of(product)[:2] if isinstance(n, fx.Node)]
        return any(found is not None and found[1] for found in (_pick(n, self.chain[0]) for n in factors))


def _pick(node: fx.Node, iteration: _Iteration) -> tuple[fx.Node, bool] | None:
    """Return ``x`` and false if ``node`` is ``x[token]``, ``weights`` and true if it is ``weights[token, choice]``; else ``None``."""
    picked = args_of(node)[0] if node.target in _RESHAPES else node
    if not isinstance(picked, fx.Node) or picked.target is not aten.index.Tensor:
        return None
    source, indices = args_of(picked)[:2]
    sizes = val(node).shape
    if list(indices) == [iteration.token, iteration.choice]:
        one = len(sizes) == 2 and sizes[1] == 1 and len(shape_of(source)) in (2, 3) and shape_of(source)[2:] in ((), (1,))
        while source.target in _RESHAPES and len(shape_of(source)) == 3:
            source = args_of(source)[0]
        return (source, True) if one and len(shape_of(source)) == 2 else None
    if list(indices) == [None, iteration.token] and shape_of(source)[:1] == (1,) and source.target in _RESHAPES:
        source = args_of(source)[0]
    elif list(indices) != [iteration.token] or picked is not node:
        return None
    whole = len(shape_of(source)) == 2 and len(sizes) == 2 and sizes[1] == shape_of(source)[1]
    return (source, False) if whole else None


def _descendants(node: fx.Node, last: fx.Node) -> Iterable[fx.Node]:
    """Yield the nodes that depend on ``node``, up to ``last``."""
    found, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            if user not in found:
                found.add(user)
                yield user
                if user is not last:
                    waiting.append(user)


def _is_check(node: fx.Node) -> bool:
    """Return whether the node only checks sizes or types."""
    value = meta(node).get("val")
    return op_name(node) in _CHECKS or isinstance(value, torch.SymInt | torch.SymBool) or type(value) is bool


def _erase_unread(node: fx.Node) -> None:
    """Erase a node that only checks read, and the checks."""
    readers = list(_descendants(node, node))
    if all(map(_is_check, readers)):
        for each in reversed([n for n in node.graph.nodes if n in {node, *readers}]):
            node.graph.erase_node(each)
