"""Handles views: finds the operand whose memory a result shares, replays a view on another base, and turns a write through a view into a
new value of the base.

An op's name does not tell whether its result is a view: ``reshape``, ``contiguous``, ``to`` or dropout in evaluation share their
operand's memory for some strides and arguments, and copy it for others. So this module runs the op on meta tensors with the operands'
strides, and compares its results' memory with the operands' memory.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.ops.facts import OpKind, facts, op_name
from autopar.ops.meta import meta
from autopar.ops.operands import args_of, argument, shape_of
from autopar.program import kernels
from autopar.torch_private import is_overload, memory, overload_schema
from passes.clean.nodes import add, aten, described, flat, like

_BY_SHAPE = (aten.view.default, aten._unsafe_view.default, aten.view_as.default, aten.reshape_as.default)

_DIAGONALS = ("aten.diagonal", "aten.linalg_diagonal")


@dataclass(frozen=True, slots=True)
class View:
    """A view of an operand: the ``call`` that creates the view, the operand's index among the call's tensors, and the view's index among
    the call's results (``None``: the call has one result)."""

    call: fx.Node
    operand_index: int
    result_index: int | None = None

    @property
    def name(self) -> str:
        return op_name(self.call)

    @property
    def detaches(self) -> bool:
        return facts(self.call).kind is OpKind.DETACH

    @property
    def value(self) -> torch.Tensor:
        value = meta(self.call)["val"]
        return value if self.result_index is None else value[self.result_index]


def origins(call: fx.Node) -> list[tuple[fx.Node, View | None] | None]:
    """Return for each result of ``call``: ``None`` if it is in new memory, else the operand whose memory it shares, and the view (``None``
    if the result is the operand itself). The list is empty if ``call`` isn't a torch op or has no operands."""
    value = meta(call).get("val")
    several = isinstance(value, tuple | list)
    operands = _operands(call)
    if not is_overload(call.target) or not operands or not (several or isinstance(value, torch.Tensor)):
        return []
    return [
        None
        if shared is None
        else (operands[shared[0]], None if shared[1] else View(call, shared[0], i if several else None))
        for i, shared in enumerate(_shared_operands(call))
    ]


def views_of(value: fx.Node, base: str) -> list[fx.Node] | None:
    """Return the chain of nodes from a placeholder with ``meta[base]`` to ``value``, both included: each may share the memory of the one
    before, on some rank or for some strides; ``None`` if there is no such placeholder."""
    path = [value]
    while path[-1].op == "call_function":
        call = path[-1]
        operands, kind = _operands(call), facts(call).kind
        if facts(call).is_view or kind in (OpKind.IDENTITY, OpKind.CAST) or call.target is kernels.strided:
            path.append(operands[0])
        elif is_overload(call.target) and (origin := next((each for each in origins(call) if each), None)):
            path.append(origin[0])
        else:
            return None
    return path[::-1] if base in meta(path[-1]) else None


def _operands(call: fx.Node) -> list[fx.Node]:
    """Return the nodes among the arguments, in order, with repetitions."""
    values = flat((call.args, list(call.kwargs.values())))
    return [value for value in values if isinstance(value, fx.Node)]


_Shared = tuple[tuple[int, bool] | None, ...]

# Cached results of `_shared_operands`, keyed by op and described operands: the layers of a deep model repeat them.
_CACHE: dict[Any, _Shared] = {}
_CACHE_LIMIT = 4096


def _shared_operands(call: fx.Node) -> _Shared:
    """Return for each result the index of the operand whose memory it shares, and whether the result is the operand itself."""
    key = (call.target, described(call.args), described(call.kwargs))
    if key not in _CACHE:
        if len(_CACHE) >= _CACHE_LIMIT:
            _CACHE.clear()
        _CACHE[key] = _run_on_meta(call)
    return _CACHE[key]


def _run_on_meta(call: fx.Node) -> _Shared:
    operands: list[torch.Tensor] = []

    def fresh(node: fx.Node) -> torch.Tensor:
        operands.append(like(meta(node)["val"]))
        return operands[-1]

    names = [name for name, _ in overload_schema(call.target) or ()]
    args = [_as_meta_device(name, value) for name, value in zip(names, call.args, strict=False)]
    kwargs = {name: _as_meta_device(name, value) for name, value in call.kwargs.items()}
    target: Any = call.target
    with torch.no_grad():
        results = target(*map_arg(args, fresh), **map_arg(kwargs, fresh))
    shared: list[tuple[int, bool] | None] = []
    for result in results if isinstance(results, tuple | list) else (results,):
        at = isinstance(result, torch.Tensor) and [i for i, t in enumerate(operands) if memory(result) == memory(t)]
        shared.append((at[0], facts(call).kind is not OpKind.DETACH and _same(result, operands[at[0]])) if at else None)
    return tuple(shared)


def _as_meta_device(name: str, value: Any) -> Any:
    return torch.device("meta") if name == "device" and value is not None else value


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors in the same memory are equal views of it."""
    return (a.shape, a.stride(), a.storage_offset(), a.dtype, a.is_conj(), a.is_neg()) == (
        *(b.shape, b.stride(), b.storage_offset(), b.dtype, b.is_conj(), b.is_neg()),
    )


def split_ranges(call: fx.Node) -> list[tuple[int, int, int]] | None:
    """Return dim, start and end of each result of ``split``, ``chunk``, ``tensor_split`` and ``unbind``; ``None`` for other ops."""
    if facts(call).kind is not OpKind.SPLIT:
        return None
    source, unbind = _operands(call)[0], op_name(call) == "aten.unbind"
    dim = argument(call, 1 if unbind else 2, "dim", 0) % len(shape_of(source))
    ranges, start = [], 0
    places = iter(argument(call, 1, "indices") if call.target is aten.tensor_split.indices else ())
    for part in meta(call)["val"]:
        extent = 1 if unbind else part.shape[dim]
        ranges.append((dim, start, start + extent))
        # the parts of ``tensor_split(x, [5, 3])`` overlap
        start = slice(next(places, start + extent), None).indices(shape_of(source)[dim])[0]
    return ranges


def replay(view: View, value: fx.Node, anchor: fx.Node) -> fx.Node | None:
    """Create the view again, as a view of ``value``, before ``anchor``. Return ``None`` if it depends on strides, which may differ in
    ``value``."""
    call = view.call
    if view.name in ("aten.as_strided", "aten._reshape_alias"):
        return None
    if view.result_index is not None:
        ranges = split_ranges(call)
        if ranges is None:
            return add(anchor, operator.getitem, (_replay_call(view, value, anchor), view.result_index), origin=call)
        dim, start, end = ranges[view.result_index]
        if view.name == "aten.unbind":
            return add(anchor, aten.select.int, (value, dim, start), origin=call)
        return add(anchor, aten.slice.Tensor, (value, dim, start, end), origin=call)
    if call.target in _BY_SHAPE:
        return add(anchor, aten.reshape.default, (value, list(view.value.shape)), origin=call)
    return _replay_call(view, value, anchor)


def _replay_call(view: View, value: fx.Node, anchor: fx.Node) -> fx.Node:
    index = iter(range(len(_operands(view.call))))
    args, kwargs = map_arg(
        (view.call.args, dict(view.call.kwargs)), lambda node: value if next(index) == view.operand_index else node
    )
    return add(anchor, view.call.target, args, kwargs, origin=view.call)


def scatter(view: View, source: fx.Node, new: fx.Node, anchor: fx.Node) -> fx.Node | None:
    """Return ``source`` with ``new`` in the elements that ``view`` shows; ``None`` if these are unknown, overlap, or are converted (to
    another dtype, or by a lazy conjugation or negation)."""
    name, call, sizes = view.name, view.call, shape_of(source)
    kind = facts(call).kind
    if view.value.dtype != meta(source)["val"].dtype or view.value.is_conj() or view.value.is_neg():
        return None
    if view.detaches:
        return new
    if kind in (OpKind.RESHAPE, OpKind.SQUEEZE, OpKind.EXPANSION):
        same_order = view.value.numel() == meta(source)["val"].numel()
        return add(anchor, aten.reshape.default, (new, list(sizes))) if same_order else None
    if name in ("aten.transpose", "aten.t"):
        return add(anchor, call.target, (new, *args_of(call)[1:]), dict(call.kwargs))
    if kind is OpKind.PERMUTATION:
        order = _order(call, len(sizes))
        return add(anchor, aten.permute.default, (new, [order.index(dim) for dim in range(len(sizes))]))
    if name in _DIAGONALS:
        return _write_diagonal(call, source, new, anchor)
    region = _region(view, sizes)
    if region is None:
        return None
    dim, start, end, step = region
    if name in ("aten.select", "aten.unbind"):
        new = add(anchor, aten.unsqueeze.default, (new, dim))
    if step != 1:
        start, end, new = _write_strided(source, new, region, anchor)
    parts = [add(anchor, aten.slice.Tensor, (source, dim, 0, start))] if start > 0 else []
    parts.append(new)
    if end < sizes[dim]:
        parts.append(add(anchor, aten.slice.Tensor, (source, dim, end, sizes[dim])))
    return add(anchor, aten.cat.default, (parts, dim)) if len(parts) > 1 else new


def _region(view: View, sizes: Sequence[int]) -> tuple[int, int, int, int] | None:
    """Return dim, start, end and step of a view that is a slice, a select or a result of a split; ``None`` for other views."""
    call = view.call
    if view.result_index is not None:
        ranges = split_ranges(call)
        return (*ranges[view.result_index], 1) if ranges is not None else None
    if facts(call).kind is not OpKind.SLICE:
        return None
    dim = argument(call, 1, "dim", 0) % len(sizes)
    start = argument(call, 2, "index" if view.name == "aten.select" else "start")
    if view.name == "aten.slice":
        step = argument(call, 4, "step", 1)
        first, last, _ = slice(start, argument(call, 3, "end")).indices(sizes[dim])
        return dim, first, max(first, last), step
    if not isinstance(start, int):
        return None
    start %= max(sizes[dim], 1)
    return dim, start, start + (1 if view.name == "aten.select" else argument(call, 3, "length")), 1


def _order(call: fx.Node, rank: int) -> list[int]:
    """Return the operand's dim for each dim of a permutation's result, by running the op on a tensor whose sizes all differ."""
    target: Any = call.target
    sizes = list(range(2, rank + 2))
    args = map_arg(call.args, lambda _: torch.empty(sizes, device="meta"))
    return [sizes.index(size) for size in target(*args, **call.kwargs).shape]


def _write_strided(
    source: fx.Node, new: fx.Node, region: tuple[int, int, int, int], anchor: fx.Node
) -> tuple[int, int, fx.Node]:
    """Turn a write to every ``step``-th position into a write to the range from ``start`` to ``end``, which writes the old values to the
    positions between; return the range and its values."""
    dim, start, _, step = region
    sizes = shape_of(source)
    end = min(start + shape_of(new)[dim] * step, sizes[dim])
    old = add(anchor, aten.slice.Tensor, (source, dim, start, end))
    phase = add(anchor, aten.remainder.Scalar, (positions(end - start, dim, len(sizes), anchor), step))
    mask = add(anchor, aten.eq.Scalar, (phase, 0))
    values = _uniform(new, anchor)
    if values is None:
        repeated = add(anchor, aten.repeat_interleave.self_int, (new, step, dim))
        values = add(anchor, aten.slice.Tensor, (repeated, dim, 0, end - start))
    return start, end, add(anchor, aten.where.self, (mask, values, old))


def _write_diagonal(call: fx.Node, source: fx.Node, new: fx.Node, anchor: fx.Node) -> fx.Node:
    """Return ``source`` with ``new`` on a diagonal. The last dim of ``new`` runs along the rows' dim, or along the columns' dim for a
    diagonal below the main one, and broadcasts along the other dim; ``where`` selects the diagonal."""
    sizes, last = shape_of(source), -1 if op_name(call) == "aten.linalg_diagonal" else 1
    rank = len(sizes)
    offset = argument(call, 1, "offset", 0)
    first = argument(call, 2, "dim1", -2 if last == -1 else 0) % rank
    second = argument(call, 3, "dim2", last) % rank
    rows, columns = (positions(sizes[dim], dim, rank, anchor) for dim in (first, second))
    mask = add(anchor, aten.eq.Tensor, (add(anchor, aten.add.Tensor, (rows, offset)), columns))
    values = _uniform(new, anchor, rank)
    if values is None:
        along, across = (first, second) if offset >= 0 else (second, first)
        if missing := sizes[along] - shape_of(new)[-1]:
            new = add(anchor, aten.constant_pad_nd.default, (new, [0, missing]))
        rest = [dim for dim in range(rank) if dim not in (first, second)]
        order = [rest.index(dim) if dim in rest else len(rest) for dim in range(rank) if dim != across]
        if order != sorted(order):
            new = add(anchor, aten.permute.default, (new, order))
        values = add(anchor, aten.unsqueeze.default, (new, across))
    return add(anchor, aten.where.self, (mask, values, source))


def positions(extent: int, dim: int, rank: int, anchor: fx.Node) -> fx.Node:
    """Return 0, 1, 2, ... along ``dim``, with size 1 in the other dims."""
    sizes = [extent if i == dim else 1 for i in range(rank)]
    return add(anchor, aten.reshape.default, (add(anchor, aten.arange.default, (extent,)), sizes))


def _uniform(value: fx.Node, anchor: fx.Node, rank: int | None = None) -> fx.Node | None:
    """Return a one-element tensor that broadcasts to ``value`` if ``value`` is filled with one number; else ``None``."""
    if value.target is not aten.full.default:
        return None
    sizes = [1] * (len(shape_of(value)) if rank is None else rank)
    return add(anchor, aten.full.default, (sizes, args_of(value)[1]), dict(value.kwargs))
