"""Ring attention: the sequence is sharded over an axis, and keys and values are passed around its ring of ranks.

Every rank keeps its queries. Keys and values pass from rank to rank, each step's attention is folded into a running softmax, and the
next block is in flight while the current one is computed (Liu, Zaharia and Abbeel 2023). The backward pass sends keys and values around
again, followed by their gradients, which end at the ranks that have these keys and values. Saved for the backward pass are query, key,
value, result and the logsumexp of each row, but no scores.

A step's attention is one call of the device's flash attention if that supports the operands (``has_kernel``); the results of the steps
are merged by their logsumexps. Otherwise, scores are in memory for some rows at a time.

Under a causal mask a rank with late queries has more work than one with early queries. The sequence is then cut into *2n* chunks and
rank *r* computes chunks *r* and *2n - 1 - r*, so that every step costs every rank the same. That order exists only inside
the kernel: operands and results are exchanged on entry and on exit, and the rest of the program is unaffected. If the local length is odd,
the original order is kept.

Several axes (outermost first) form one ring: blocks go around the inner axis before they move along the outer one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own convention
from torch import Tensor

from .kernels import Axes, _declare, _nontrivial, _require, _sharding
from .kernels_random import Seed
from .mesh_axes import group_of
from .spmd import spmd

SCORES = 2**26
"""The maximum number of scores in memory at once: queries are processed in runs of rows that have at most this many scores."""


@torch.compiler.disable  # its sends and receives overlap its own arithmetic
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    axis: Axes,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    seed: Seed | None = None,
) -> Tensor:
    """Return ``scaled_dot_product_attention`` of ``[..., heads, length / n, size]``, where ``axis`` (or axes, outermost first) shards the
    length of all three operands; other axes may shard batch and heads, in the same way for all three.

    ``attn_mask`` is ``[..., length / n, length]`` (or broadcasts to it): its rows are sharded like the queries, its columns unsharded.
    Key and value have as many heads as the query or, with ``enable_gqa``, fewer. Dropout is a function of ``seed``; there is none if it
    is ``None``, as in evaluation mode. Ranks along ``axis`` must pass different seeds. Accumulates in float32 or wider.
    """
    axes = _nontrivial(axis)
    if seed is None:
        dropout_p = 0.0
    if spmd.is_type_checking():
        _check(query, key, value, attn_mask, axes)
    with spmd.local():
        if query.device.type == "meta" or not axes:
            mask = attn_mask if attn_mask is None else attn_mask[..., : key.shape[-2]]
            out = F.scaled_dot_product_attention(
                query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        else:
            ring = Ring(tuple(group_of(one) for one in axes))
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            out = _RingAttention.apply(query, key, value, attn_mask, ring, is_causal, scale, dropout_p, seed)
    return _declare(out, _sharding(query)) if spmd.is_type_checking() else out


def _check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, axes: Sequence[Any]) -> None:
    """Raise ``SpmdTypeError`` unless the operands are sharded as the ring requires."""
    q, k, v = _sharding(query), _sharding(key), _sharding(value)
    _require(q == k == v and not q[-1], f"ring_attention: operands are sharded as {q}, {k} and {v}")
    _require(len(q[-2]) == len(axes), f"ring_attention: lengths are sharded over {q[-2]}, the ring is {axes}")
    if mask is not None:
        for size, has, wants in zip(mask.shape, _sharding(mask), [*q[:-1], ()][-mask.ndim :], strict=True):
            _require(
                has == wants or (size == 1 and not has), f"ring_attention: the mask is sharded as {has}, not {wants}"
            )


# -- the ring ---------------------------------------------------------------------------------------------------------

Arrival = tuple[list[Tensor], list[dist.Work]]
"""Tensors that are being received, and the transfers to wait for."""


@dataclass(frozen=True)
class Ring:
    """The ranks of one or several axes as one ring: the last axis varies fastest."""

    groups: tuple[dist.ProcessGroup, ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(dist.get_world_size(group) for group in self.groups)

    @cached_property
    def coordinates(self) -> tuple[int, ...]:
        """Return this rank's coordinate on every axis."""
        return tuple(dist.get_rank(group) for group in self.groups)

    @property
    def size(self) -> int:
        return prod(self.sizes)

    def index(self, coordinates: Sequence[int]) -> int:
        """Return a rank's position in the ring."""
        at = 0
        for coordinate, size in zip(coordinates, self.sizes, strict=True):
            at = at * size + coordinate
        return at

    def at(self, index: int) -> tuple[int, ...]:
        """Return the coordinates of the rank at a position in the ring: the inverse of ``index``."""
        coordinates = []
        for size in reversed(self.sizes):
            index, coordinate = divmod(index, size)
            coordinates.append(coordinate)
        return tuple(reversed(coordinates))

    def shift_axis(self, step: int) -> int:
        """Return the axis along which blocks move before step ``step`` (1 and up)."""
        axis, turns = len(self.sizes) - 1, self.sizes[-1]
        while step % turns == 0:
            axis -= 1
            turns *= self.sizes[axis]
        return axis

    def origins(self) -> Iterator[tuple[int, ...]]:
        """Yield for every step the coordinates of the rank whose block this rank has."""
        coordinates = list(self.coordinates)
        yield tuple(coordinates)
        for step in range(1, self.size):
            axis = self.shift_axis(step)
            coordinates[axis] = (coordinates[axis] - 1) % self.sizes[axis]
            yield tuple(coordinates)

    def shift(self, tensors: Sequence[Tensor], axis: int, distance: int = 1) -> Arrival:
        """Start sending ``tensors`` to the rank ``distance`` ahead on an axis, and receiving those of the rank ``distance`` behind."""
        group, n, here = self.groups[axis], self.sizes[axis], self.coordinates[axis]
        arriving = [torch.empty_like(tensor) for tensor in tensors]
        operations = []
        for tensor, into in zip(tensors, arriving, strict=True):
            operations.append(dist.P2POp(dist.isend, tensor, group=group, group_peer=(here + distance) % n))
            operations.append(dist.P2POp(dist.irecv, into, group=group, group_peer=(here - distance) % n))
        return arriving, dist.batch_isend_irecv(operations)

    def rearrange(
        self, parts: Sequence[Tensor], held: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """Exchange parts of equal shapes: rank i of the ring has the parts ``held[i]``, in that order, and gets the parts ``wanted[i]``.

        The parts move along one axis after the other, by an all-to-all in which every rank of a group takes part: in a batch of
        point-to-point transfers NCCL would also wait for ranks without any.
        """
        me = self.index(self.coordinates)
        mine = dict(zip(held[me], parts, strict=True))
        where = {part: self.at(i) for i, numbers in enumerate(held) for part in numbers}
        goal = {part: self.at(i) for i, numbers in enumerate(wanted) for part in numbers}
        for axis, group in enumerate(self.groups):
            moves: dict[int, tuple[int, int]] = {}  # by part: the group's ranks that it moves from and to
            for part, source in where.items():
                where[part] = (*source[:axis], goal[part][axis], *source[axis + 1 :])
                if self._in_same_group(source, axis) and source != where[part]:
                    moves[part] = source[axis], goal[part][axis]
            here = self.coordinates[axis]
            leaving = sorted(
                (part for part, (start, _) in moves.items() if start == here), key=lambda p: (moves[p][1], p)
            )
            coming = sorted((part for part, (_, end) in moves.items() if end == here), key=lambda p: (moves[p][0], p))
            if not moves:
                continue
            sent = (
                torch.stack([mine.pop(part) for part in leaving]) if leaving else parts[0].new_empty(0, *parts[0].shape)
            )
            got = sent.new_empty(len(coming), *parts[0].shape)
            ranks = range(self.sizes[axis])
            dist.all_to_all_single(
                got,
                sent,
                [sum(moves[part][0] == rank for part in coming) for rank in ranks],
                [sum(moves[part][1] == rank for part in leaving) for rank in ranks],
                group=group,
            )
            mine |= dict(zip(coming, got.unbind(), strict=True))
        return [mine[part] for part in wanted[me]]

    def _in_same_group(self, coordinates: Sequence[int], axis: int) -> bool:
        """Return whether a rank is in this rank's group on an axis."""
        return all(a == b for i, (a, b) in enumerate(zip(coordinates, self.coordinates, strict=True)) if i != axis)


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _received(arrival: Arrival) -> list[Tensor]:
    _wait(arrival[1])
    return arrival[0]


# -- distribution of work ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ChunkOrder:
    """The chunks of the sequence that each rank of the ring has inside the kernel, in ascending order."""

    ring: Ring
    chunks: tuple[tuple[int, ...], ...]
    balanced: bool

    @staticmethod
    def of(ring: Ring, length: int, causal: bool) -> _ChunkOrder:
        n = ring.size
        if causal and length % 2 == 0:
            return _ChunkOrder(ring, tuple((i, 2 * n - 1 - i) for i in range(n)), balanced=True)
        return _ChunkOrder(ring, tuple((i,) for i in range(n)), balanced=False)

    def enter(self, x: Tensor) -> Tensor:
        """Reorder from the program's order, in which rank i has chunks 2i and 2i + 1, to this order."""
        return self._exchange(x, forward=True)

    def leave(self, x: Tensor) -> Tensor:
        """Reorder from this order to the program's: the inverse of ``enter``."""
        return self._exchange(x, forward=False)

    def _exchange(self, x: Tensor, *, forward: bool) -> Tensor:
        if not self.balanced:
            return x.contiguous()
        natural = tuple((2 * i, 2 * i + 1) for i in range(self.ring.size))
        held, wanted = (natural, self.chunks) if forward else (self.chunks, natural)
        return torch.cat(self.ring.rearrange(x.chunk(2, -2), held, wanted), -2)


@dataclass(frozen=True)
class _Tile:
    """Query rows ``start`` to ``stop``, and the keys that they read: the first ``keys`` keys of one rank's block.
    ``offset`` is the number of these keys before the first row's position; ``None`` if every row reads all of them."""

    start: int
    stop: int
    keys: int
    offset: int | None


def _tiles(order: _ChunkOrder, origin: int, causal: bool, length: int, batch_heads: int) -> Iterator[_Tile]:
    """Yield this rank's work on the block of the ``origin``-th rank of the ring, in runs of at most ``SCORES`` scores."""
    mine, theirs = order.chunks[order.ring.index(order.ring.coordinates)], order.chunks[origin]
    chunk = length // len(mine)
    for i, number in enumerate(mine):
        seen = [other for other in theirs if other <= number] if causal else theirs
        if not seen:
            continue
        keys = chunk * len(seen)
        run = max(1, SCORES // (keys * batch_heads))
        for row in range(0, chunk, run):
            stop = min(row + run, chunk)
            offset = keys - chunk + row if causal and seen[-1] == number else None
            yield _Tile(i * chunk + row, i * chunk + stop, keys, offset)


# -- arithmetic -------------------------------------------------------------------------------------------------------


def _product(a: Tensor, b: Tensor, dtype: torch.dtype, wide: torch.dtype) -> Tensor:
    """Return ``a @ b`` in ``wide``. On a GPU the factors are first rounded to ``dtype`` for speed, as in fused kernels."""
    if dtype == wide or a.device.type != "cuda":
        return a.to(wide) @ b.to(wide)
    lead = a.shape[:-2]
    product = torch.bmm(a.to(dtype).flatten(0, -3), b.to(dtype).flatten(0, -3), out_dtype=wide)
    return product.unflatten(0, lead)


def _grouped(x: Tensor, heads: int) -> Tensor:
    """Reshape ``[..., h, l, e]`` to ``[..., heads, h / heads * l, e]``, which joins the queries that read the same key head."""
    return x.reshape(*x.shape[:-3], heads, -1, x.shape[-1])


@dataclass(frozen=True)
class _Scores:
    """Computes scores and dropout masks, in the forward and the backward pass."""

    mask: Tensor | None
    scale: float
    dropout_p: float
    generator: torch.Generator | None
    dtype: torch.dtype
    wide: torch.dtype

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return _product(a, b, self.dtype, self.wide)

    def of(self, query: Tensor, key: Tensor, tile: _Tile, column: int) -> Tensor:
        """Return a tile's masked scores ``[..., h, rows, keys]``; ``column`` is the position of its first key in the global sequence."""
        heads = key.shape[-3]
        rows = _grouped(query[..., tile.start : tile.stop, :], heads)
        scores = self.product(rows, key[..., : tile.keys, :].mT).mul_(self.scale)
        scores = scores.reshape(*query.shape[:-2], tile.stop - tile.start, tile.keys)
        if tile.offset is not None:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_(tile.offset)
            scores.masked_fill_(~seen, float("-inf"))
        if self.mask is not None:
            mask = self.window(self.mask, tile, column)
            scores = scores.masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else scores.add_(mask)
        return scores

    def window(self, mask: Tensor, tile: _Tile, column: int) -> Tensor:
        """Return the rows and columns of a mask that a tile reads."""
        rows = mask if mask.shape[-2] == 1 else mask[..., tile.start : tile.stop, :]
        return rows if mask.shape[-1] == 1 else rows[..., column : column + tile.keys]

    def dropout_mask(self, scores: Tensor) -> Tensor | None:
        """Draw the next dropout mask, scaled; ``None`` without dropout. Forward and backward must draw masks in the same order."""
        if self.generator is None:
            return None
        keep = torch.empty_like(scores).bernoulli_(1.0 - self.dropout_p, generator=self.generator)
        return keep if self.dropout_p == 1.0 else keep.div_(1.0 - self.dropout_p)


# -- the device's kernel ----------------------------------------------------------------------------------------------


def has_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, causal: bool) -> bool:
    """Return whether the device's flash attention can compute the steps: without mask and dropout, for equal head sizes; on GPUs if torch
    would choose it, on CPUs in float32 and float64 (in 16 bits the CPU's kernel rounds the softmax, which stays in float32 here)."""
    if mask is not None or dropout_p or query.shape[-1] != value.shape[-1]:
        return False
    if query.device.type == "cuda":
        if query.shape[-1] % 8:
            return False  # scaled_dot_product_attention pads such heads before it calls the kernel
        q, k, v = (_heads(x, query) for x in (query, key, value))
        return torch.backends.cuda.can_use_flash_attention(
            torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, False)
        )
    return query.device.type == "cpu" and query.dtype in (torch.float32, torch.float64)


def _heads(x: Tensor, query: Tensor) -> Tensor:
    """Reshape ``x`` to ``[batch, heads, length, size]``, and repeat each key head for every query head that reads it."""
    x = x if x.shape[-3] == query.shape[-3] else x.repeat_interleave(query.shape[-3] // x.shape[-3], -3)
    return x.reshape(-1, *x.shape[-3:])


def _attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return the result, and the logsumexp of every row, by the device's kernel."""
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _attention_backward(given: tuple[Tensor, ...], causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return a step's terms of the gradients of query, key and value. ``given`` has the result's gradient, query, the step's keys and
    values, and the result and the logsumexp over all keys."""
    aten = torch.ops.aten
    if given[0].device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal, scale=scale)
    else:
        lengths = given[1].shape[-2], given[2].shape[-2]
        random = torch.zeros(2, dtype=torch.int64, device=given[0].device)  # the generator's state, for dropout
        found = aten._scaled_dot_product_flash_attention_backward(
            *given, None, None, *lengths, 0.0, causal, random, random[0], scale=scale
        )
    of_query, of_key, of_value = found
    return of_query, of_key, of_value


class _Part(NamedTuple):
    """The query rows of a step, the keys that they read, and whether the kernel applies a causal mask."""

    rows: slice
    keys: slice
    causal: bool


def _parts(order: _ChunkOrder, origin: int, causal: bool, length: int) -> Iterator[_Part]:
    """Yield this rank's work on the block of the ``origin``-th rank of the ring: one part, or none."""
    me = order.ring.index(order.ring.coordinates)
    mine, theirs = order.chunks[me], order.chunks[origin]
    if not causal or origin == me:  # positions in a block are ascending, so the kernel's causal mask fits
        yield _Part(slice(0, length), slice(0, length), causal)
        return
    chunk = length // len(mine)
    seen = [sum(other < number for other in theirs) for number in mine]
    for count in sorted({n for n in seen if n}):
        rows = [i for i, n in enumerate(seen) if n == count]
        yield _Part(slice(rows[0] * chunk, (rows[-1] + 1) * chunk), slice(0, count * chunk), False)


def _kernel_forward(
    order: _ChunkOrder, causal: bool, scale: float, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``_forward`` by the device's kernel."""
    wide = torch.promote_types(query.dtype, torch.float32)
    q = _heads(query, query)
    lse = q.new_full(q.shape[:-1], float("-inf"), dtype=wide)
    out = torch.zeros_like(q, dtype=wide)
    for _, origin, block in _rotation(order, [key, value]):
        for rows, keys, is_causal in _parts(order, origin, causal, query.shape[-2]):
            k, v = (_heads(x[..., keys, :], query) for x in block)
            term, own = _attention(q[..., rows, :], k, v, is_causal, scale)
            total = torch.logaddexp(lse[..., rows], own)
            rescale = (lse[..., rows] - total).exp_().unsqueeze(-1)
            out[..., rows, :] = out[..., rows, :] * rescale + term * (own - total).exp_().unsqueeze(-1)
            lse[..., rows] = total
    return out.to(query.dtype).view(query.shape), lse.view(query.shape[:-1])


def _kernel_backward(
    order: _ChunkOrder, causal: bool, scale: float, saved: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``_backward`` by the device's kernel."""
    query, key, value, out, lse = saved
    q, result, g = _heads(query, query), _heads(out, query), _heads(grad.contiguous(), query)
    lse = lse.reshape(q.shape[:-1])
    grad_query = torch.zeros_like(q, dtype=lse.dtype)

    def terms(origin: int, block: Sequence[Tensor]) -> list[Tensor]:
        found = [torch.zeros_like(x, dtype=lse.dtype) for x in block]
        for rows, keys, is_causal in _parts(order, origin, causal, query.shape[-2]):
            k, v = (_heads(x[..., keys, :], query) for x in block)
            row_lse = lse[..., rows].contiguous()
            given = g[..., rows, :], q[..., rows, :], k, v, result[..., rows, :], row_lse
            of_query, *rest = _attention_backward(given, is_causal, scale)
            grad_query[..., rows, :] += of_query
            for total, term in zip(found, rest, strict=True):
                several = term.to(lse.dtype).view(-1, total.shape[-3], q.shape[-3] // total.shape[-3], *term.shape[-2:])
                total[..., keys, :] += several.sum(2).view(total[..., keys, :].shape)
        return found

    grads = _ring_reduce(order, [key, value], terms)
    return grad_query.view(query.shape), grads[0], grads[1]


class _RingAttention(torch.autograd.Function):
    """Runs the forward and the backward pass. All tensors except the result and the gradients are in the ring's order."""

    @staticmethod
    def forward(ctx, query, key, value, mask, ring, causal, scale, dropout_p, seed):  # type: ignore[no-untyped-def]
        order = _ChunkOrder.of(ring, query.shape[-2], causal)
        query, key, value = order.enter(query), order.enter(key), order.enter(value)
        generator = _generator(query, dropout_p, seed)
        wide = torch.promote_types(query.dtype, torch.float32)
        ctx.kernel = has_kernel(query, key, value, mask, dropout_p, causal)
        if ctx.kernel:
            out, lse = _kernel_forward(order, causal, scale, query, key, value)
        else:
            scores = _Scores(mask, scale, dropout_p, generator, query.dtype, wide)
            out, lse = _forward(order, causal, scores, query, key, value)
        ctx.save_for_backward(query, key, value, out, lse, mask)
        ctx.order, ctx.causal, ctx.scale, ctx.dropout_p, ctx.seed = order, causal, scale, dropout_p, seed
        return order.leave(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        query, key, value, out, lse, mask = ctx.saved_tensors
        order, saved = ctx.order, (query, key, value, out, lse)
        grad_mask = torch.zeros_like(mask, dtype=lse.dtype) if ctx.needs_input_grad[3] else None
        if ctx.kernel:
            grads = _kernel_backward(order, ctx.causal, ctx.scale, saved, order.enter(grad))
        else:
            generator = _generator(query, ctx.dropout_p, ctx.seed)
            scores = _Scores(mask, ctx.scale, ctx.dropout_p, generator, query.dtype, lse.dtype)
            grads = _backward(order, ctx.causal, scores, saved, order.enter(grad), grad_mask)
        given = [order.leave(g.to(query.dtype)) for g in grads]
        return *given, None if grad_mask is None else grad_mask.to(mask.dtype), None, None, None, None, None


spmd.register_local_autograd_function(_RingAttention)


def _generator(like: Tensor, dropout_p: float, seed: Seed | None) -> torch.Generator | None:
    if not dropout_p:
        return None
    assert seed is not None, "without a seed there is no dropout"
    generator = torch.Generator(like.device)
    generator.manual_seed(int(seed))
    return generator


def _rotation(order: _ChunkOrder, tensors: list[Tensor]) -> Iterator[tuple[int, int, list[Tensor]]]:
    """Yield for every step its number, the ring position of the rank whose block is here, and the block; the next is already in flight."""
    ring = order.ring
    for step, origin in enumerate(ring.origins()):
        last = step + 1 == ring.size
        arrival: Arrival = ([], []) if last else ring.shift(tensors, ring.shift_axis(step + 1))
        yield step, ring.index(origin), tensors
        tensors = _received(arrival)


def _batch_heads(query: Tensor) -> int:
    return prod(query.shape[:-2])


def _forward(
    order: _ChunkOrder, causal: bool, scores: _Scores, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the result and the logsumexp of every row. A row that reads no key has the result zero and the logsumexp infinity."""
    wide, length = scores.wide, query.shape[-2]
    running_max = query.new_full(query.shape[:-1], float("-inf"), dtype=wide)
    running_sum = torch.zeros_like(running_max)
    out = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=wide)
    for _, origin, (k, v) in _rotation(order, [key, value]):
        for tile in _tiles(order, origin, causal, length, _batch_heads(query)):
            rows = (..., slice(tile.start, tile.stop))
            s = scores.of(query, k, tile, origin * length)
            new_max = torch.maximum(running_max[rows], s.amax(-1))
            base = new_max.masked_fill(new_max == float("-inf"), 0.0)
            rescale = (running_max[rows] - base).exp_()
            p = s.sub_(base.unsqueeze(-1)).exp_()
            running_sum[rows] = running_sum[rows] * rescale + p.sum(-1)
            keep = scores.dropout_mask(p)
            p = p if keep is None else p.mul_(keep)
            o = scores.product(_grouped(p, k.shape[-3]), v[..., : tile.keys, :])
            where = (*rows, slice(None))
            out[where] = out[where] * rescale.unsqueeze(-1) + o.reshape(out[where].shape)
            running_max[rows] = new_max
    empty = running_sum == 0
    out = out.div_(running_sum.masked_fill(empty, 1.0).unsqueeze(-1))
    lse = (running_max + running_sum.log()).masked_fill(empty, float("inf"))
    return out.to(query.dtype), lse


def _backward(
    order: _ChunkOrder, causal: bool, scores: _Scores, saved: tuple[Tensor, ...], grad: Tensor, grad_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value in ``scores.wide``, and add the mask's gradient to ``grad_mask``."""
    query, key, value, out, lse = saved
    wide, length = scores.wide, query.shape[-2]
    delta = (grad.to(wide) * out.to(wide)).sum(-1)
    grad_query = torch.zeros_like(query, dtype=wide)

    def terms(origin: int, block: Sequence[Tensor]) -> list[Tensor]:
        k, v = block
        grads = [torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)]
        for tile in _tiles(order, origin, causal, length, _batch_heads(query)):
            rows, heads = (..., slice(tile.start, tile.stop), slice(None)), k.shape[-3]
            keys = (..., slice(0, tile.keys), slice(None))
            s = scores.of(query, k, tile, origin * length)
            p = s.sub_(lse[rows[:-1]].unsqueeze(-1)).exp_()
            keep = scores.dropout_mask(p)
            dropped = p if keep is None else p * keep
            g, q = _grouped(grad[rows], heads), _grouped(query[rows], heads)
            grads[1][keys] += scores.product(_grouped(dropped, heads).mT, g)
            dp = scores.product(g, v[keys].mT).reshape(p.shape)
            dp = dp if keep is None else dp.mul_(keep)
            ds = dp.sub_(delta[rows[:-1]].unsqueeze(-1)).mul_(p)
            if grad_mask is not None:
                window = scores.window(grad_mask, tile, origin * length)
                window += ds.sum_to_size(window.shape)
            ds = _grouped(ds.mul_(scores.scale), heads)
            grad_query[rows] += scores.product(ds, k[keys]).reshape(grad_query[rows].shape)
            grads[0][keys] += scores.product(ds.mT, q)
        return grads

    grads = _ring_reduce(order, [key, value], terms)
    return grad_query, grads[0], grads[1]


def _ring_reduce(
    order: _ChunkOrder, block: list[Tensor], terms: Callable[[int, Sequence[Tensor]], list[Tensor]]
) -> list[Tensor]:
    """Return the gradients of this rank's ``block``: the sums of all ranks' ``terms`` for it. The blocks go around the ring, and their
    gradients follow them."""
    ring = order.ring
    in_flight: Arrival = ([], [])
    hops = [0] * len(ring.sizes)
    grads: list[Tensor] = []
    for step, origin, here in _rotation(order, block):
        grads = terms(origin, here)
        grads = [mine + before for mine, before in zip(grads, _received(in_flight), strict=True)] if step else grads
        if step + 1 < ring.size:
            axis = ring.shift_axis(step + 1)
            hops[axis] += 1
            in_flight = ring.shift(grads, axis)
    for axis, (count, n) in enumerate(zip(hops, ring.sizes, strict=True)):
        if count % n:
            grads = _received(ring.shift(grads, axis, n - count % n))
    return grads
