"""Views: which operand's memory an op's result shares, how a view is created again, and how a write through a view reaches its base.

An op's name does not tell whether its result is a view: ``reshape``, ``contiguous``, ``to`` or dropout in evaluation share their
operand's memory for some strides and arguments, and copy it for others. The op runs on meta tensors with the operands' strides, and the
memory of its results is compared with theirs.
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
    """One step from a tensor to a view of it: the ``call`` that creates it, which of the call's operands it views (``place`` in the order
    of the arguments), and which of the call's results it is (``None``: the only one)."""

    call: fx.Node
    place: int
    item: int | None = None

    @property
    def name(self) -> str:
        return op_name(self.call)

    @property
    def detaches(self) -> bool:
        return facts(self.call).kind is OpKind.DETACH

    @property
    def value(self) -> torch.Tensor:
        value = meta(self.call)["val"]
        return value if self.item is None else value[self.item]


def origins(call: fx.Node) -> list[tuple[fx.Node, View | None] | None]:
    """For every result of ``call``, the operand whose memory it shares, with the view that leads there; the view is ``None`` if the
    result is the operand itself. ``None`` alone for a result with its own memory."""
    value = meta(call).get("val")
    several = isinstance(value, tuple | list)
    operands = _operands(call)
    if not is_overload(call.target) or not operands or not (several or isinstance(value, torch.Tensor)):
        return []
    return [
        None
        if found is None
        else (operands[found[0]], None if found[1] else View(call, found[0], i if several else None))
        for i, found in enumerate(_sharing(call))
    ]


def views_of(value: fx.Node, base: str) -> list[fx.Node] | None:
    """The chain of nodes from a placeholder with ``meta[base]`` to ``value``, both included, each of which may share the memory of the one
    before, on any rank and with any strides; ``None`` if there is no such placeholder."""
    path = [value]
    while path[-1].op == "call_function":
        call = path[-1]
        operands, kind = _operands(call), facts(call).kind
        if facts(call).is_view or kind in (OpKind.IDENTITY, OpKind.CAST) or call.target is kernels.strided:
            path.append(operands[0])
        elif is_overload(call.target) and (found := next((each for each in origins(call) if each), None)):
            path.append(found[0])
        else:
            return None
    return path[::-1] if base in meta(path[-1]) else None


def _operands(call: fx.Node) -> list[fx.Node]:
    """The tensors among the arguments, in order, with repetitions."""
    values = flat((call.args, list(call.kwargs.values())))
    return [value for value in values if isinstance(value, fx.Node)]


# Cached results of `_sharing`, by op and described operands: deep models need the same ones again and again.
_FOUND: dict[Any, tuple[tuple[int, bool] | None, ...]] = {}
_FOUND_LIMIT = 4096


def _sharing(call: fx.Node) -> tuple[tuple[int, bool] | None, ...]:
    """For every result, the position of the operand whose memory it shares, and whether it is the same tensor."""
    key = (call.target, described(call.args), described(call.kwargs))
    if key not in _FOUND:
        if len(_FOUND) >= _FOUND_LIMIT:
            _FOUND.clear()
        _FOUND[key] = _compared(call)
    return _FOUND[key]


def _compared(call: fx.Node) -> tuple[tuple[int, bool] | None, ...]:
    given: list[torch.Tensor] = []

    def fresh(node: fx.Node) -> torch.Tensor:
        given.append(like(meta(node)["val"]))
        return given[-1]

    names = [name for name, _ in overload_schema(call.target) or ()]
    args = [_on_meta(name, value) for name, value in zip(names, call.args, strict=False)]
    kwargs = {name: _on_meta(name, value) for name, value in call.kwargs.items()}
    target: Any = call.target
    with torch.no_grad():
        results = target(*map_arg(args, fresh), **map_arg(kwargs, fresh))
    found: list[tuple[int, bool] | None] = []
    for result in results if isinstance(results, tuple | list) else (results,):
        shared = isinstance(result, torch.Tensor) and [i for i, t in enumerate(given) if memory(result) == memory(t)]
        found.append(
            (shared[0], facts(call).kind is not OpKind.DETACH and _same(result, given[shared[0]])) if shared else None
        )
    return tuple(found)


def _on_meta(name: str, value: Any) -> Any:
    return torch.device("meta") if name == "device" and value is not None else value


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors in one memory have the same elements at the same positions."""
    return (a.shape, a.stride(), a.storage_offset(), a.dtype, a.is_conj(), a.is_neg()) == (
        *(b.shape, b.stride(), b.storage_offset(), b.dtype, b.is_conj(), b.is_neg()),
    )


def pieces(call: fx.Node) -> list[tuple[int, int, int]] | None:
    """Dim, start and end of every result of ``split``, ``chunk``, ``tensor_split`` and ``unbind``; ``None`` for other ops."""
    if facts(call).kind is not OpKind.SPLIT:
        return None
    source, unbind = _operands(call)[0], op_name(call) == "aten.unbind"
    dim = argument(call, 1 if unbind else 2, "dim", 0) % len(shape_of(source))
    found, start = [], 0
    for piece in meta(call)["val"]:
        extent = 1 if unbind else piece.shape[dim]
        found.append((dim, start, start + extent))
        start += extent
    return found


def replay(view: View, value: fx.Node, anchor: fx.Node) -> fx.Node | None:
    """The view of ``value``, before ``anchor``; ``None`` for a view of raw memory, which may be in another order for ``value``."""
    call = view.call
    if view.name in ("aten.as_strided", "aten._reshape_alias"):
        return None
    if view.item is not None:
        parts = pieces(call)
        if parts is None:
            return add(anchor, operator.getitem, (_again(view, value, anchor), view.item), origin=call)
        dim, start, end = parts[view.item]
        if view.name == "aten.unbind":
            return add(anchor, aten.select.int, (value, dim, start), origin=call)
        return add(anchor, aten.slice.Tensor, (value, dim, start, end), origin=call)
    if call.target in _BY_SHAPE:
        return add(anchor, aten.reshape.default, (value, list(view.value.shape)), origin=call)
    return _again(view, value, anchor)


def _again(view: View, value: fx.Node, anchor: fx.Node) -> fx.Node:
    places = iter(range(len(_operands(view.call))))
    args, kwargs = map_arg(
        (view.call.args, dict(view.call.kwargs)), lambda node: value if next(places) == view.place else node
    )
    return add(anchor, view.call.target, args, kwargs, origin=view.call)


def scatter(view: View, source: fx.Node, new: fx.Node, anchor: fx.Node) -> fx.Node | None:
    """``source`` with the elements of ``view`` replaced by ``new``; ``None`` if these are unknown, or the view has an element twice."""
    name, call, sizes = view.name, view.call, shape_of(source)
    kind = facts(call).kind
    if view.value.dtype != meta(source)["val"].dtype or view.value.is_conj() or view.value.is_neg():
        return None
    if view.detaches:
        return new
    if kind in (
        OpKind.RESHAPE,
        OpKind.SQUEEZE,
        OpKind.EXPANSION,
    ):  # with equal numbers of elements, the elements are in the same order
        whole = view.value.numel() == meta(source)["val"].numel()
        return add(anchor, aten.reshape.default, (new, list(sizes))) if whole else None
    if name in ("aten.transpose", "aten.t"):
        return add(anchor, call.target, (new, *args_of(call)[1:]), dict(call.kwargs))
    if kind is OpKind.PERMUTATION:
        order = _order(call, len(sizes))
        return add(anchor, aten.permute.default, (new, [order.index(dim) for dim in range(len(sizes))]))
    if name in _DIAGONALS:
        return _diagonal(call, source, new, anchor)
    region = _region(view, sizes)
    if region is None:
        return None
    dim, start, end, step = region
    if name in ("aten.select", "aten.unbind"):
        new = add(anchor, aten.unsqueeze.default, (new, dim))
    if step != 1:
        start, end, new = _strided(source, new, region, anchor)
    kept = [add(anchor, aten.slice.Tensor, (source, dim, 0, start))] if start > 0 else []
    kept.append(new)
    if end < sizes[dim]:
        kept.append(add(anchor, aten.slice.Tensor, (source, dim, end, sizes[dim])))
    return add(anchor, aten.cat.default, (kept, dim)) if len(kept) > 1 else new


def _region(view: View, sizes: Sequence[int]) -> tuple[int, int, int, int] | None:
    """Dim, start, end and step of the elements that a slice, a select or a part of a split shows; ``None`` for other views."""
    call = view.call
    if view.item is not None:
        parts = pieces(call)
        return (*parts[view.item], 1) if parts is not None else None
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
    """For each dim of a permutation's result, the operand's dim; found by permuting sizes that all differ."""
    target: Any = call.target
    sizes = list(range(2, rank + 2))
    args = map_arg(call.args, lambda _: torch.empty(sizes, device="meta"))
    return [sizes.index(size) for size in target(*args, **call.kwargs).shape]


def _strided(
    source: fx.Node, new: fx.Node, region: tuple[int, int, int, int], anchor: fx.Node
) -> tuple[int, int, fx.Node]:
    """A write to every ``step``-th position as a write to all positions from the first on, where the other positions keep their
    values."""
    dim, start, _, step = region
    sizes = shape_of(source)
    end = min(start + shape_of(new)[dim] * step, sizes[dim])
    kept = add(anchor, aten.slice.Tensor, (source, dim, start, end))
    places = add(anchor, aten.remainder.Scalar, (counted(end - start, dim, len(sizes), anchor), step))
    chosen = add(anchor, aten.eq.Scalar, (places, 0))
    spread = single(new, anchor)
    if spread is None:
        repeated = add(anchor, aten.repeat_interleave.self_int, (new, step, dim))
        spread = add(anchor, aten.slice.Tensor, (repeated, dim, 0, end - start))
    return start, end, add(anchor, aten.where.self, (chosen, spread, kept))


def _diagonal(call: fx.Node, source: fx.Node, new: fx.Node, anchor: fx.Node) -> fx.Node:
    """``where`` on the diagonal, which is the last dim of ``new``: it is laid out along the rows, or below the main diagonal along the
    columns."""
    sizes, last = shape_of(source), -1 if op_name(call) == "aten.linalg_diagonal" else 1
    rank = len(sizes)
    offset = argument(call, 1, "offset", 0)
    first = argument(call, 2, "dim1", -2 if last == -1 else 0) % rank
    second = argument(call, 3, "dim2", last) % rank
    rows, columns = (counted(sizes[dim], dim, rank, anchor) for dim in (first, second))
    on = add(anchor, aten.eq.Tensor, (add(anchor, aten.add.Tensor, (rows, offset)), columns))
    placed = single(new, anchor, rank)
    if placed is None:
        along, across = (first, second) if offset >= 0 else (second, first)
        if missing := sizes[along] - shape_of(new)[-1]:
            new = add(anchor, aten.constant_pad_nd.default, (new, [0, missing]))
        rest = [dim for dim in range(rank) if dim not in (first, second)]
        order = [rest.index(dim) if dim in rest else len(rest) for dim in range(rank) if dim != across]
        if order != sorted(order):
            new = add(anchor, aten.permute.default, (new, order))
        placed = add(anchor, aten.unsqueeze.default, (new, across))
    return add(anchor, aten.where.self, (on, placed, source))


def counted(extent: int, dim: int, rank: int, anchor: fx.Node) -> fx.Node:
    """0, 1, 2, ... along ``dim``."""
    sizes = [extent if i == dim else 1 for i in range(rank)]
    return add(anchor, aten.reshape.default, (add(anchor, aten.arange.default, (extent,)), sizes))


def single(value: fx.Node, anchor: fx.Node, rank: int | None = None) -> fx.Node | None:
    """One element that broadcasts, if all elements of ``value`` are equal; else ``None``."""
    if value.target is not aten.full.default:
        return None
    sizes = [1] * (len(shape_of(value)) if rank is None else rank)
    return add(anchor, aten.full.default, (sizes, args_of(value)[1]), dict(value.kwargs))
