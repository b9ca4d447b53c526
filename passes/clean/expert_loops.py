"""Lowers loops over the experts of a mixture to grouped products: ``for e in range(experts): token, choice = where(chosen_by[e]) ...``.

Each iteration picks the rows of the tokens that chose its expert, computes the expert, weights the results, and adds them to the
tokens. The number of rows depends on the data. In sum, the iterations compute a row for each of the router's choices. So the pass sorts
all choices by expert, and computes all experts at once (``expert_builder``). ``experts_pass`` then recognises the mixture.

A chain of ``index_add_`` is lowered if its masks are one expert's part of ``one_hot(choices)`` each, for every expert once (so that each
choice belongs to one iteration), if the experts are equal up to their parameters and row-wise, and if nothing else reads the picked rows.

In a loop over the experts that tokens chose, capture marks the begin and the end. Eager PyTorch skips iterations there: the pass proves
that their masks are empty, and that no part of the loop is left.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.ops.facts import OpKind, facts, op_name
from autopar.ops.operands import args_of, dtype_of, shape_of, val
from passes.clean.expert_builder import (
    RESHAPES,
    ExpertBuilder,
    UnsupportedError,
    descendants,
    entry_of,
    is_check,
    is_mutable,
    memory_of,
)
from passes.clean.expert_flow import chosen_among
from passes.clean.nodes import aten, calls

ENTER, LEAVE = "enter_loop", "leave_loop"
"""The names of the ops that mark the begin and the end of a loop over the positions of true values; their operand is the condition."""
BRANCH = "branch_on_mask"
"""The name of the op that marks a branch on whether a mask has true values; its operands are the mask and the line."""

_SELECTIONS = (aten.where.default, aten.nonzero_numpy.default)


@dataclass(frozen=True, slots=True)
class _Choices:
    """The router's choices ``index``, ``[tokens * choices]`` in any shape. ``one_hot`` encodes them, with a last dim for the experts,
    and is zero where a choice is dropped; ``None`` if none is."""

    index: fx.Node
    one_hot: fx.Node | None
    tokens: int
    choices: int
    experts: int


@dataclass(frozen=True, slots=True)
class _Iteration:
    """One expert's part: ``write`` adds ``value`` to the tokens. ``mask`` has an entry for each expert, choice and token; or it has the
    choices ``[tokens, choices]``, with which the expert's number is compared."""

    expert: int
    write: fx.Node
    mask: fx.Node
    selection: fx.Node
    token: fx.Node
    choice: fx.Node | None
    value: fx.Node

    def is_guarded_by(self, branch: fx.Node) -> bool:
        """Return whether a branch before the addition is on the iteration's mask, or on the same comparison of the same choices."""
        own, mask = args_of(self.selection)[0], args_of(branch)[0]
        same = own.target is aten.eq.Scalar and (own.target, own.args) == (mask.target, mask.args)
        return branch < self.write and (mask is own or same)


@dataclass(slots=True)
class LoweredLoops:
    """``skippable``: the parameters that get no gradient in eager PyTorch if no token chooses their expert. ``refused``: the first markers
    of marked loops that can't be lowered, and the markers of branches elsewhere. ``unread``: the lines of lowered loops in which an
    iteration didn't read its position's value, or is in a branch. ``branched``: by the number of the expert, the additions of iterations
    that have a branch on their mask, each with the sum before.
    """

    skippable: dict[fx.Node, None] = field(default_factory=dict)
    refused: list[fx.Node] = field(default_factory=list)
    unread: dict[str, None] = field(default_factory=dict)
    branched: dict[int, dict[fx.Node, fx.Node]] = field(default_factory=dict)


def lower_expert_loops(gm: fx.GraphModule, parameters: set[fx.Node]) -> LoweredLoops:
    """Lower the loops over experts whose parameters are among the placeholders ``parameters``, and erase the markers of those loops."""
    use_index_add(gm)
    (spans, unfinished), lowered = _spans(gm), LoweredLoops()
    elsewhere = dict.fromkeys(branches(gm))
    for chain in _chains(gm):
        span = next((s for s in spans if any(i.write in s.body for i in chain)), None)
        if span is not None and not span.contains(chain):
            continue
        loop, unread = _Loop(chain, parameters), args_of(span.leave)[1] if span is not None else ""
        branched = {each: (i, args_of(i.write)[0]) for i in chain for each in elsewhere if i.is_guarded_by(each)}
        if not loop.replace():
            continue
        if span is not None and span.erase():
            spans.remove(span)
            lowered.skippable |= loop.stacked
            lowered.unread |= dict.fromkeys([unread] if unread else ())
        for branch, (iteration, before) in branched.items():
            del elsewhere[branch]
            lowered.skippable |= loop.stacked
            lowered.unread[args_of(branch)[1]] = None
            lowered.branched.setdefault(iteration.expert, {})[iteration.write] = before
    lowered.refused = [*(span.enter for span in spans), *unfinished, *elsewhere]
    return lowered


def branches(gm: fx.GraphModule) -> list[fx.Node]:
    """Return the markers of branches on whether a mask has true values, in all graphs of the module."""
    parts = (part for part in gm.modules() if isinstance(part, fx.GraphModule))
    return [node for part in parts for node in part.graph.nodes if op_name(node) == f"autopar.{BRANCH}"]


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
            if node.users or is_mutable(node):
                return False
            graph.erase_node(node)
        for node in (self.enter, self.leave):
            graph.erase_node(node)
        for node in [user for user in condition.users if user.target is aten.nonzero.default]:
            _erase_unread(node)
        return True


def _spans(gm: fx.GraphModule) -> tuple[list[_Span], list[fx.Node]]:
    """Return the marked loops, and the first markers of those without an end, which a ``break`` or ``return`` leaves."""
    spans, unfinished, enter, body = list[_Span](), list[fx.Node](), None, dict[fx.Node, None]()
    for node in gm.graph.nodes:
        if op_name(node) == f"autopar.{ENTER}":
            unfinished += [enter] if enter is not None else []
            enter, body = node, {}
        elif op_name(node) == f"autopar.{LEAVE}":
            assert enter is not None
            spans.append(_Span(enter, node, body))
            enter = None
        elif enter is not None:
            body[node] = None
    return spans, unfinished + ([enter] if enter is not None else [])


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


# -- sums that are written back ----------------------------------------------------------------------------------------


def use_index_add(gm: fx.GraphModule) -> None:
    """Replace ``out[token] += value`` by ``out.index_add_(0, token, value)`` if the tokens are those of one expert in a top-k: no token
    has an expert twice, so that the sum that is written back has all terms."""
    for write in calls(gm, aten.index_put_.default):
        base, indices, total = args_of(write)[:3]
        token = indices[0] if len(indices) == 1 else None
        if len(write.args) > 3 or write.kwargs or not isinstance(token, fx.Node) or not _is_unique(token):
            continue
        if total.target is not aten.add_.Tensor or total.kwargs or list(total.users) != [write]:
            continue
        before, value = args_of(total)[:2]
        if before.target is not aten.index.Tensor or list(args_of(before)[1]) != [token]:
            continue
        # nothing else reads or changes ``out`` meanwhile
        alone = args_of(before)[0] is base and set(base.users) == {before, write} and list(before.users) == [total]
        if not alone or not isinstance(value, fx.Node) or not _is_alike(val(value), val(before)):
            continue
        with gm.graph.inserting_before(write):
            new = gm.graph.call_function(aten.index_add_.default, (base, 0, token, value))
        new.meta = dict(write.meta)
        write.replace_all_uses_with(new)
        for node in (write, total, before):
            gm.graph.erase_node(node)


def _is_alike(one: Any, other: Any) -> bool:
    """Return whether two tensors have the same shape and dtype."""
    return bool(one.shape == other.shape) and one.dtype == other.dtype


def _is_unique(token: fx.Node) -> bool:
    """Return whether ``token`` has the rows of a top-k's choices that equal one number."""
    if token.target is not operator.getitem or args_of(token)[1] != 0:
        return False
    selection: Any = args_of(token)[0]
    equal = args_of(selection)[0] if selection.target in _SELECTIONS else None
    if not isinstance(equal, fx.Node) or equal.target is not aten.eq.Scalar:
        return False
    return len(shape_of(equal)) == 2 and chosen_among(args_of(equal)[0]) is not None


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
    choices = [(chain, _choices(chain[0].mask)) for chain in chains]
    return [c for c, found in choices if found and sorted(i.expert for i in c) == list(range(found.experts))]


def _iteration(write: fx.Node) -> _Iteration | None:
    base, dim, token, value = args_of(write)[:4]
    if dim != 0 or len(write.args) > 4 or write.kwargs or len(shape_of(base)) != 2:
        return None
    if not isinstance(token, fx.Node) or token.target is not operator.getitem or not isinstance(value, fx.Node):
        return None
    selection, number = args_of(token)[:2]
    if selection.target not in _SELECTIONS or len(shape_of(args_of(selection)[0])) != 2:
        return None
    selected: Any = args_of(selection)[0]
    compared = selected.target is aten.eq.Scalar
    mask, expert = args_of(selected)[:2] if compared else entry_of(selected)
    tokens_dim = 0 if compared else 1
    if mask is None or number != tokens_dim or shape_of(selected)[tokens_dim] != shape_of(base)[0]:
        return None
    if len(shape_of(mask)) != (2 if compared else 3) or not isinstance(expert, int):
        return None
    others = (user for user in selection.users if user.target is operator.getitem)
    choice = next((user for user in others if args_of(user)[1] == 1 - tokens_dim), None)
    return _Iteration(expert, write, mask, selection, token, choice, value)


def _choices(mask: fx.Node) -> _Choices | None:
    """Return the choices ``mask [tokens, choices]`` of a top-k, or those of which ``mask [experts, choices, tokens]`` is the one-hot
    encoding, permuted."""
    if len(shape_of(mask)) == 2:
        tokens, choices = shape_of(mask)
        among = chosen_among(mask)
        return None if among is None else _Choices(mask, None, tokens, choices, among)
    if mask.target is not aten.permute.default or list(args_of(mask)[1]) != [2, 1, 0]:
        return None
    experts, choices, tokens = shape_of(mask)
    one_hot: Any = args_of(mask)[0]
    while one_hot.target in RESHAPES and shape_of(args_of(one_hot)[0])[-1:] == (experts,):
        one_hot = args_of(one_hot)[0]
    plain, dropping = one_hot, None
    if one_hot.target is aten.mul.Tensor:
        plain, kept = args_of(one_hot)[:2]
        if not isinstance(kept, fx.Node) or dtype_of(kept) != torch.bool or shape_of(plain) != shape_of(one_hot):
            return None
        dropping = one_hot
    if not isinstance(plain, fx.Node) or plain.target is not aten.one_hot.default or args_of(plain)[1] != experts:
        return None
    return _Choices(args_of(plain)[0], dropping, tokens, choices, experts)


# -- lowering ------------------------------------------------------------------------------------------------------------


class _Loop(ExpertBuilder):
    """Replaces the iterations of a loop by one computation for all experts."""

    def __init__(self, chain: list[_Iteration], parameters: set[fx.Node]) -> None:
        super().__init__(chain[-1].write, parameters)
        self.base = args_of(chain[0].write)[0]
        self.chain = sorted(chain, key=lambda iteration: iteration.expert)
        self.replaced |= {node for i in chain for node in (i.write, i.token, i.choice, i.selection) if node is not None}

    def replace(self) -> bool:
        """Lower the loop; return false, and change nothing, if that isn't possible."""
        found = _choices(self.chain[0].mask)
        try:
            if found is None:
                raise UnsupportedError
            self._sort(found)
            value = self.build(tuple(iteration.value for iteration in self.chain))
            if value not in self.row_nodes or (found.one_hot is not None and not self._weights_last):
                raise UnsupportedError
            if not self.reads_only_replaced([iteration.selection for iteration in self.chain], self.base):
                raise UnsupportedError
            if memory_of(self.base) in self.memory or self._is_used_meanwhile():
                raise UnsupportedError
        except UnsupportedError:
            self.undo()
            return False
        new = self.add(aten.index_add_.default, self.base, 0, self.token, value)
        self.anchor.replace_all_uses_with(new)
        self.erase_replaced()
        return True

    def _is_used_meanwhile(self) -> bool:
        """Return whether anything else reads or changes the sum, perhaps through a view, before the last expert is added."""
        memory, writes, seen = memory_of(self.base), {iteration.write for iteration in self.chain}, False
        for node in self.anchor.graph.nodes:
            seen = seen or node in writes
            if node is self.anchor:
                break
            if seen and node not in self.replaced and any(memory_of(each) is memory for each in node.all_input_nodes):
                return True
        return False

    def _sort(self, found: _Choices) -> None:
        """Add the choices, sorted by expert: their order and tokens."""
        self.found, rows = found, found.tokens * found.choices
        self.read.add(found.index)
        index = self.add(aten.reshape.default, found.index, [found.tokens, found.choices])
        self.flat = self.add(aten.reshape.default, index, [rows])
        self.order = self.add(aten.argsort.stable, self.flat, stable=True)
        self.token = self.add(aten.floor_divide.default, self.order, found.choices)
        numbers = self.add(aten.to.dtype, self.flat, torch.float32)
        self.counts = self.add(aten.histc.default, numbers, found.experts, 0, found.experts)

    def ends(self) -> fx.Node:
        return self.add(aten.cumsum.default, self.counts, 0, dtype=torch.int32)

    def experts(self) -> fx.Node:
        return self.add(aten.index.Tensor, self.flat, [self.order])

    def leaf(self, nodes: tuple[fx.Node, ...]) -> fx.Node | None:
        """Return the rows of all choices' tokens, or their weights, if ``nodes`` are those of each expert's tokens; else ``None``."""
        found = [_pick(node, iteration) for node, iteration in zip(nodes, self.chain, strict=True)]
        first = found[0]
        if first is None or any(each != first for each in found):
            return None
        source, is_weight = first
        tokens, choices = self.found.tokens, self.found.choices
        if shape_of(source)[: 2 if is_weight else 1] != ((tokens, choices) if is_weight else (tokens,)):
            return None
        self.replaced.update(nodes)
        self.replaced.update(args_of(node)[0] for node in nodes if node.target in RESHAPES)
        if not is_weight:
            return self.add(aten.index.Tensor, source, [self.token])
        weights = source
        if self.found.one_hot is not None:
            kept = self.add(aten.sum.dim_IntList, self.found.one_hot, [-1])
            kept = self.add(aten.to.dtype, self.add(aten.reshape.default, kept, [tokens, choices]), dtype_of(source))
            weights = self.add(aten.mul.Tensor, weights, kept)
        flat = self.add(aten.reshape.default, weights, [tokens * choices])
        return self.add(aten.unsqueeze.default, self.add(aten.index.Tensor, flat, [self.order]), 1)

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
    picked = args_of(node)[0] if node.target in RESHAPES else node
    if not isinstance(picked, fx.Node) or picked.target is not aten.index.Tensor:
        return None
    source, indices = args_of(picked)[:2]
    sizes = val(node).shape
    if list(indices) == [iteration.token, iteration.choice]:
        one = (
            len(sizes) == 2 and sizes[1] == 1 and len(shape_of(source)) in (2, 3) and shape_of(source)[2:] in ((), (1,))
        )
        while source.target in RESHAPES and len(shape_of(source)) == 3:
            source = args_of(source)[0]
        return (source, True) if one and len(shape_of(source)) == 2 else None
    if list(indices) == [None, iteration.token] and shape_of(source)[:1] == (1,) and source.target in RESHAPES:
        source = args_of(source)[0]
    elif list(indices) != [iteration.token] or picked is not node:
        return None
    whole = len(shape_of(source)) == 2 and len(sizes) == 2 and sizes[1] == shape_of(source)[1]
    return (source, False) if whole else None


def _erase_unread(node: fx.Node) -> None:
    """Erase a node that only checks read, and the checks."""
    readers = set(descendants(node, node))
    if all(map(is_check, readers)):
        for each in reversed([n for n in node.graph.nodes if n is node or n in readers]):
            node.graph.erase_node(each)
