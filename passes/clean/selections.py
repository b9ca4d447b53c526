"""Replaces rows that a boolean mask selects: ``loss[mask].mean()`` becomes a sum over all rows, divided by a count.

The number of selected rows depends on the data, so the pass computes all rows instead. A row that is not selected is replaced by a
constant, adds zero to every sum, and gets no gradient.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.ops.facts import OpKind, facts, op_name
from autopar.ops.meta import meta
from autopar.ops.operands import args_of, argument, arguments, dtype_of, operands, shape_of, val
from autopar.rules import is_row_wise
from passes.clean.nodes import add, aten, calls, cast_like, replace

_NONE, _MEAN = 0, 1  # torch's reductions
_CLASS_LOSSES = frozenset(("aten.cross_entropy_loss", "aten.nll_loss", "aten.nll_loss_nd"))
_ARITHMETIC = frozenset(("aten.add", "aten.sub", "aten.mul", "aten.div"))
_NARROW = (torch.bfloat16, torch.float16)
_IGNORED = -100  # torch's default
_KEEP_POSITIONS = frozenset(("aten.squeeze", "aten.select", "_operator.getitem", "aten.view", "aten.reshape"))
_RESHAPES = frozenset(("aten.view", "aten.reshape"))
_WRITES = frozenset(
    f"aten.{name}" for name in ("index_put", "index_put_", "index_copy", "index_copy_", "index_add", "index_add_")
)


def selections_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """``mean(index(x, [mask]))`` becomes ``sum(where(mask, x, 0)) / sum(mask)``. The pass also handles losses, sizes, row-wise ops between
    the two, and writes of the rows back to their positions. A graph that uses selected rows in any other way stays as it is."""
    if any(map(_is_symbolic, calls(gm))):
        _Selections(gm).replace()
    return gm


class _UnsupportedError(Exception):
    """Selected rows go into an op without an equivalent on all rows."""


def _is_symbolic(node: fx.Node) -> bool:
    value = meta(node).get("val")
    tensors = value if isinstance(value, tuple | list) else [value]
    return any(type(size) is not int for each in tensors if isinstance(each, torch.Tensor) for size in each.shape)


def _is_number(node: fx.Node) -> bool:
    return isinstance(meta(node).get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)


class _Selections:
    """Adds the equivalent on all rows to the graph, and replaces the original by it if every op has an equivalent.

    ``dense`` maps every node on selected rows to the node on all rows, and ``mask`` maps that node to its mask, with one dim. ``constant``
    has the dense nodes that are constant where the mask is false, ``positions`` the nodes that list positions of selected rows; ``counts``
    maps every size that depends on the data to the node that counts the rows.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.dense: dict[fx.Node, fx.Node] = {}
        self.mask: dict[fx.Node, fx.Node] = {}
        self.constant: set[fx.Node] = set()
        self.positions: set[fx.Node] = set()
        self.counts: dict[fx.Node, fx.Node] = {}
        self.results: list[tuple[fx.Node, fx.Node]] = []
        self.flat: dict[fx.Node, fx.Node] = {}

    def replace(self) -> None:
        before = set(self.gm.graph.nodes)
        try:
            for node in calls(self.gm):
                if node not in self.dense:
                    self._visit(node)
            if any(node in self.dense or _is_number(node) for node in self.gm.graph.output_node().all_input_nodes):
                raise _UnsupportedError
        except _UnsupportedError:
            for node in [n for n in reversed(self.gm.graph.nodes) if n not in before]:
                self.gm.graph.erase_node(node)
            return
        for node, new in self.results:
            replace(node, new)
        for node in reversed(list(self.gm.graph.nodes)):
            if node in self.dense or _is_number(node) or op_name(node) == "aten._assert_scalar":
                self.gm.graph.erase_node(node)

    def _visit(self, node: fx.Node) -> None:
        name, selected = op_name(node), [n for n in node.all_input_nodes if n in self.dense]
        if (
            node.target is aten.index.Tensor
            and node.args[0] not in self.dense
            and self._selects(argument(node, 1, "indices"))
        ):
            self._select(node)
        elif name in ("aten.nonzero", "aten.where") and len(node.args) == 1:
            self._list_positions(node)
        elif name in _WRITES and node.args[0] not in self.dense and selected:
            self._write(node, selected)
        elif name == "aten.sym_size" and selected and argument(node, 1, "dim") == 0:
            self.counts[node] = add(node, aten.sum.default, (self._common_mask(selected),))
        elif selected:
            self._compute(node, selected)
        elif name in _ARITHMETIC and any(n in self.counts for n in node.all_input_nodes):
            self.results.append((node, cast_like(node, self._with_count(node))))
        elif _is_symbolic(node) or (any(map(_is_number, node.all_input_nodes)) and not _is_check(node)):
            raise _UnsupportedError

    def _add(self, node: fx.Node, args: Any, **changed: Any) -> fx.Node:
        """Add the same op on all rows, and return it; ``changed`` overrides arguments."""
        given: dict[str, Any] = {**node.kwargs}
        if changed:
            args, given = tuple((arguments(node) | changed).values()), {}
        args, given = map_arg((args, given), lambda n: self.counts.get(n, self.dense.get(n, n)))
        try:
            new = add(node, node.target, args, given)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:  # an argument depends on the number of rows
            raise _UnsupportedError from error
        if any(_is_number(each) for each in new.all_input_nodes):
            raise _UnsupportedError
        return new

    def _with_count(self, node: fx.Node) -> fx.Node:
        """Return arithmetic with a number of rows; of 16-bit values in float32, because a large number would be rounded, or infinite."""

        def wide(operand: fx.Node) -> fx.Node:
            if _is_number(operand) and operand not in self.counts:
                raise _UnsupportedError
            found = self.counts.get(operand, self.dense.get(operand, operand))
            new = add(node, aten.to.dtype, (found, torch.float32))
            if found in self.mask:
                self.mask[new] = self.mask[found]
            if found in self.constant:
                self.constant.add(new)
            return new

        return self._add(node, map_arg(node.args, wide) if dtype_of(node) in _NARROW else node.args)

    def _record(self, node: fx.Node, new: fx.Node, mask: fx.Node, *, constant: bool = False) -> None:
        self.dense[node], self.mask[new] = new, mask
        if constant:
            self.constant.add(new)

    def _common_mask(self, selected: Iterable[fx.Node]) -> fx.Node:
        """Return the mask that selects the rows of all these nodes."""
        found = {self.mask[self.dense[node]] for node in selected}
        if len(found) != 1:
            raise _UnsupportedError
        return found.pop()

    def _flat(self, mask: fx.Node, anchor: fx.Node) -> fx.Node:
        """Return the mask, flattened to one dim."""
        if mask not in self.flat:
            sizes = shape_of(mask)
            one = [math.prod(sizes)]
            self.flat[mask] = mask if len(sizes) == 1 else add(anchor, aten.reshape.default, (mask, one))
        return self.flat[mask]

    # -- from all rows to selected ones, and back -----------------------------------------------------------------------

    def _selects(self, indices: Any) -> bool:
        """Return whether the indices are a mask, or the positions where one is true."""
        first, *rest = indices
        is_mask = isinstance(first, fx.Node) and (first in self.positions or dtype_of(first) == torch.bool)
        return is_mask and all(index is None for index in rest)

    def _mask_of(self, index: fx.Node) -> fx.Node:
        if index in self.dense and index not in self.positions:
            raise _UnsupportedError
        return self.mask[self.dense[index]] if index in self.positions else index

    def _select(self, node: fx.Node) -> None:
        """Replace ``x[mask]`` by ``x`` with ones (for integers, zeros) in the rows that are not selected."""
        source: Any = node.args[0]
        mask = self._mask_of(argument(node, 1, "indices")[0])
        lead, sizes = len(shape_of(mask)), shape_of(source)
        new = _where_selected(node, mask, source, 1)
        if lead > 1:
            new = add(node, aten.reshape.default, (new, [math.prod(sizes[:lead]), *sizes[lead:]]))
        self._record(node, new, self._flat(mask, node), constant=True)

    def _list_positions(self, node: fx.Node) -> None:
        """Replace ``nonzero(mask)`` and ``where(mask)`` by the positions of all rows."""
        mask: Any = node.args[0]
        if mask in self.dense or len(shape_of(mask)) != 1 or dtype_of(mask) != torch.bool:
            raise _UnsupportedError
        new = add(node, aten.arange.default, shape_of(mask))
        if op_name(node) == "aten.nonzero":
            new = add(node, aten.unsqueeze.default, (new, 1))
        self._record(node, new, mask, constant=True)
        self.positions.add(node)

    def _write(self, node: fx.Node, selected: list[fx.Node]) -> None:
        """Replace an op that writes selected rows to their positions or adds them there, or an ``index_add`` with a selected index."""
        kind = op_name(node).removeprefix("aten.").removesuffix("_")
        base: Any = node.args[0]
        index: Any
        value: Any
        index, value = (node.args[1][0], node.args[2]) if kind == "index_put" else node.args[2:4]  # type: ignore[index]
        put = kind == "index_put"
        if (len(node.args) > (3 if put else 4)) or node.kwargs or (put and not self._selects(node.args[1])):
            raise _UnsupportedError
        if (not put and node.args[1] != 0) or value not in self.dense:
            raise _UnsupportedError
        own = put or index in self.positions
        mask = self._mask_of(index) if own else self._common_mask(selected)
        if self._common_mask([value]) is not self._flat(mask, node) or (kind == "index_copy" and not own):
            raise _UnsupportedError
        rows = self.dense[value]
        if len(shape_of(mask)) > 1:
            rows = add(node, aten.reshape.default, (rows, list(shape_of(base))))
        if kind == "index_add":
            rows = _where_selected(node, mask, rows, 0)
            new = (
                add(node, aten.add.Tensor, (base, rows))
                if own
                else add(node, aten.index_add.default, (base, 0, self.dense[index], rows))
            )
        else:
            new = add(node, aten.where.self, (_wide(node, mask, rows), rows, base))
        if op_name(node).endswith("_"):
            new = add(node, aten.copy_.default, (base, new))
        self.results.append((node, new))

    # -- ops on selected rows -------------------------------------------------------------------------------------------

    def _compute(self, node: fx.Node, selected: list[fx.Node]) -> None:
        name, mask = op_name(node), self._common_mask(selected)
        first = self.dense[selected[0]]
        result: fx.Node | None = None
        if name == "aten._assert_tensor_metadata" or (node.target is operator.getitem and _is_tensor(first)):
            result = first  # a check without a result, or an item of ``where(mask)``
        elif name == "aten.broadcast_tensors":
            self._broadcast(node, mask)
        elif name in _CLASS_LOSSES and not dtype_of(args_of(node)[1]).is_floating_point:
            self._class_loss(node, mask)
        elif facts(node).kind is OpKind.LOSS and not _is_symbolic(node):
            terms = self._row_wise(node, self._add(node, (), reduction=_NONE), mask)
            self._total(node, terms, mask, mean=arguments(node)["reduction"] == _MEAN)
        elif name in ("aten.sum", "aten.mean") and not _is_symbolic(node):
            self._total(node, first, mask, mean=name == "aten.mean")
        elif name in _RESHAPES:
            sizes = val(node).shape
            if not sizes or str(sizes[0]) != str(val(selected[0]).shape[0]):
                raise _UnsupportedError
            result = self._add(node, (first, [shape_of(first)[0], *sizes[1:]]))
        elif name in _ARITHMETIC and any(n in self.counts for n in node.all_input_nodes):
            result = cast_like(node, self._row_wise(node, self._with_count(node), mask))
        else:
            result = self._row_wise(node, self._add(node, node.args), mask)
        if result is not None:
            self._record(node, result, mask)
            if selected[0] in self.positions and name in _KEEP_POSITIONS:
                self.positions.add(node)

    def _row_wise(self, node: fx.Node, new: fx.Node, mask: fx.Node) -> fx.Node:
        """Return ``new``, or raise ``_UnsupportedError`` if it is not row-wise.

        If ``new`` has an operand that all rows share (a weight), rows that are not selected must add nothing to its gradient. So these rows
        of the other operands are set to ones, which are finite, and these rows of the result to a constant, which has no gradient.
        """
        if any(operand not in self.mask for operand in operands(new)):
            for operand in [n for n in operands(new) if n in self.mask and n not in self.constant]:
                new.replace_input_with(operand, self._constant(new, operand, mask))
            if not is_row_wise(new, set(self.mask)):
                raise _UnsupportedError
            return self._constant(node, new, mask)
        if not is_row_wise(new, set(self.mask)):
            raise _UnsupportedError
        return new

    def _constant(self, anchor: fx.Node, new: fx.Node, mask: fx.Node) -> fx.Node:
        """Return ``new`` with ones (for integers, zeros) in the rows that are not selected."""
        if not _is_tensor(new):
            raise _UnsupportedError
        found = _where_selected(anchor, mask, new, 1)
        self.mask[found] = mask
        self.constant.add(found)
        return found

    def _broadcast(self, node: fx.Node, mask: fx.Node) -> None:
        """Replace ``broadcast_tensors`` of tensors of equal shape by the tensors themselves."""
        given = [self.dense.get(each, each) for each in args_of(node)[0]]
        if len({shape_of(each) for each in given}) != 1:
            raise _UnsupportedError
        for user in list(node.users):
            self._record(user, given[args_of(user)[1]], mask, constant=given[args_of(user)[1]] in self.constant)
        self._record(node, given[0], mask)

    def _class_loss(self, node: fx.Node, mask: fx.Node) -> None:
        """Let a loss with class labels ignore the labels of the rows that are not selected."""
        ignored = argument(node, 4, "ignore_index", _IGNORED)
        target = _where_selected(node, mask, self.dense.get(args_of(node)[1], args_of(node)[1]), ignored)
        new = self._add(node, (), target=target)
        if _is_symbolic(node):
            self._record(node, new, mask)
        else:
            self.results.append((node, new))

    def _total(self, node: fx.Node, terms: fx.Node, mask: fx.Node, *, mean: bool) -> None:
        """Replace ``node`` by the sum of the terms of the selected rows; with ``mean``, divided by their number."""
        sizes = shape_of(terms)
        dims = argument(node, 1, "dim") if op_name(node) in ("aten.sum", "aten.mean") else None
        if node.kwargs and facts(node).kind is not OpKind.LOSS:
            raise _UnsupportedError
        summed = {dim % len(sizes) for dim in dims} if dims else set(range(len(sizes)))
        zeros = _where_selected(node, mask, terms, 0)
        rest = (list(summed), argument(node, 2, "keepdim", False)) if dims else ()
        wide = torch.promote_types(dtype_of(terms), torch.float32) if mean else dtype_of(node)
        kwargs = {} if wide == dtype_of(node) else {"dtype": wide}  # 16 bits would round the number of rows
        new = add(node, aten.sum.dim_IntList if dims else aten.sum.default, (zeros, *rest), kwargs)
        if mean:
            count = add(node, aten.to.dtype, (add(node, aten.sum.default, (mask,)), wide))
            meta(count)["scalar_name"] = "selected_rows"
            each = math.prod(sizes[dim] for dim in summed - {0})
            new = add(node, aten.div.Tensor, (new, add(node, aten.mul.Tensor, (count, each)) if each != 1 else count))
        self.results.append((node, cast_like(node, new)))


def _is_tensor(node: fx.Node) -> bool:
    """Return whether the node's value is one tensor."""
    return isinstance(meta(node)["val"], torch.Tensor)


def _is_check(node: fx.Node) -> bool:
    """Return whether the node only compares sizes."""
    return _is_number(node) or op_name(node) == "aten._assert_scalar"


def _wide(anchor: fx.Node, mask: fx.Node, like: fx.Node) -> fx.Node:
    """Return the mask with dims of size 1 appended, so that it broadcasts to ``like``."""
    more = len(shape_of(like)) - len(shape_of(mask))
    return add(anchor, aten.reshape.default, (mask, [*shape_of(mask), *[1] * more])) if more else mask


def _where_selected(anchor: fx.Node, mask: fx.Node, value: fx.Node, other: int) -> fx.Node:
    """Return ``value`` where the mask is true, and ``other`` elsewhere (0 instead of 1 for integers, which may be indices)."""
    dtype = dtype_of(value)
    number: Any = float(other) if dtype.is_floating_point or dtype.is_complex else other if other != 1 else 0
    return add(
        anchor,
        aten.where.ScalarOther,
        (_wide(anchor, mask, value), value, bool(number) if dtype == torch.bool else number),
    )
