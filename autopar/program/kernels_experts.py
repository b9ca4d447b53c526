"""Mixtures of experts: every token's row is dispatched to the experts that the router chose, and their results are combined.

``experts`` is a mixture-of-experts layer without its router; its ``body`` (what an expert computes on a row) is the model's code. The
body calls ``grouped_linear`` and ``of_rows``, which take the number of rows of each expert. There are three ways to distribute the work,
and each mesh axis may use a different one:

* each rank has different tokens, and all experts: nothing is exchanged;
* each rank has the same tokens, and different experts (or a slice of each): it computes their terms of the result (P);
* each rank has different tokens, and different experts: rows are sent to the owners of their experts and back by two all-to-alls, with
  sizes that the router decides (dropless, as in Gale et al. 2022, arXiv:2211.15841; expert parallelism: Lepikhin et al. 2020,
  arXiv:2006.16668). Several such axes are flattened into one;
* the same in two hops, if some of these axes are slower than others: a token's row is sent once to each coordinate on the slow axes that
  has any of its experts, and its rank there (the relay) sends it to their owners over the fast axes, adds up what they return, and sends
  one row back (node-limited dispatch: DeepSeek-V3, arXiv:2412.19437, section 3.2.2).

With ``dispatch`` rows are sent to the owners of their experts in a narrower format, and so are the gradients of the experts' results in
the backward pass. Both combines, of results and of the rows' gradients, stay in the model's dtype (DeepSeek-V3, arXiv:2412.19437, section
3.3.3). Relays round a gradient once more after they have multiplied it by the router's weight.

Only the device knows how many rows each rank and expert has. The host waits for these numbers once in each forward pass of a layer (twice
for two hops), and not at all if every rank has all experts, and the body calls neither ``looped_linear`` nor ``of_rows``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own convention
from spmd_types import P, V
from torch import Tensor

from . import expert_loads
from .collectives import Formats, RowFormat
from .kernels import _as_partial, _declare, _require, _sharding, _size, _slice_start
from .mesh_axes import Axis, group_of
from .spmd import spmd

Send = Callable[[Tensor, Sequence[Axis], list[int], list[int], Formats], Callable[[], Tensor]]
"""``send(rows, axes, sent, received, formats)`` starts to send the next ``sent[i]`` rows to rank ``i`` of the axes, and to receive
``received[i]`` rows from it; returns a function that waits for the received rows and returns them."""

Body = Callable[..., Tensor]
"""``body(rows, counts, *parameters)`` runs the experts on ``rows [n, h]``, sorted by expert; expert ``i`` has the next ``counts[i]`` of
the rows. It returns ``[n, h]``."""


# -- building blocks of bodies ---------------------------------------------------------------------------------------


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply each of ``rows [n, k]`` by its expert's transposed weight in ``weight [e, m, k]``: ``[n, m]``. The first ``counts[0]`` rows
    are expert 0's, and so on. On a GPU, ``k`` and ``m`` must be multiples of 8 in bfloat16 (``looped_linear`` takes any)."""
    if _has_grouped_product(rows, weight):
        product: Tensor = GroupedProduct.apply(rows, weight, counts)
        return product
    return looped_linear(rows, weight, counts)


def _has_grouped_product(rows: Tensor, weight: Tensor) -> bool:
    """Return whether torch's grouped matmul takes these operands, and is one kernel on a GPU. On a CPU it is faster than a loop in Python;
    there the widths decide here, for only bfloat16's are checked before (``ops.experts.misaligned_products``)."""
    if not hasattr(F, "grouped_mm"):
        return False
    if rows.is_cuda:
        return rows.dtype == torch.bfloat16
    aligned = all(width * rows.itemsize % 16 == 0 for width in weight.shape[1:])
    return rows.is_cpu and rows.dtype in (torch.float32, torch.bfloat16) and aligned


def looped_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Compute ``grouped_linear`` expert by expert, for widths that CUDA's grouped product refuses (rows must be a multiple of 16 bytes)."""
    parts = rows.split(sizes(counts, rows.shape[0]))
    return torch.cat([F.linear(part, own) for part, own in zip(parts, weight.unbind(0), strict=True)])


class GroupedProduct(torch.autograd.Function):
    """Computes ``grouped_linear`` by torch's grouped matmul.

    The weight gradient of an expert without rows is zero. On Blackwell (compute capability 10 and up) torch's product leaves other values
    there, even NaN (pytorch #172439, #193633), so they are overwritten. The products accept only gradients with contiguous rows.
    """

    @staticmethod
    def forward(ctx, rows, weight, counts):  # type: ignore[no-untyped-def]
        ends = counts.cumsum(0, dtype=torch.int32)
        ctx.save_for_backward(rows, weight, counts, ends)
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        rows, weight, counts, ends = ctx.saved_tensors
        grad = grad.contiguous()
        of_rows = F.grouped_mm(grad, weight, offs=ends) if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = F.grouped_mm(grad.t(), rows, offs=ends)
            if fills_empty_groups(rows.device):
                of_weight.masked_fill_((counts == 0).view(-1, 1, 1), 0)
        return of_rows, of_weight, None


spmd.register_local_autograd_function(GroupedProduct)


def fills_empty_groups(device: torch.device) -> bool:
    """Return whether the device's grouped product may write values other than zero for groups without rows."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10


def of_rows(values: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """Return for each row its expert's entry in ``values [e, ...]``, such as a bias: ``[len(rows), ...]``."""
    several = sizes(counts, len(rows))
    return torch.cat([own.expand(n, *own.shape) for n, own in zip(several, values.unbind(0), strict=True)])


def sizes(counts: Tensor, total: int) -> list[int]:
    """Return ``counts`` as Python numbers; the host waits for them once. On the meta device, return about equal shares of ``total``."""
    if counts.is_meta:
        base, rest = divmod(total, len(counts))
        return [base + (i < rest) for i in range(len(counts))]
    known: list[int] | None = getattr(counts, "on_host", None)
    return _cache_on_host(counts, counts.tolist()) if known is None else known


def _cache_on_host(counts: Tensor, numbers: list[int]) -> list[int]:
    """Cache the values of ``counts`` (the tensor is never written again), so that the host doesn't wait for them a second time."""
    counts.on_host = numbers  # type: ignore[attr-defined]
    return numbers


# -- the mixture -----------------------------------------------------------------------------------------------------


@torch.compiler.disable  # the numbers of tokens depend on the batch
def experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    parameters: Sequence[Tensor],
    body: Body,
    count: int,
    owners: Sequence[Axis] = (),
    exchange: Sequence[Axis] = (),
    relay: Sequence[Axis] = (),
    partial_axes: Sequence[Axis] = (),
    weights_first: bool = False,
    dispatch: RowFormat | None = None,
    send: Send | None = None,
) -> Tensor:
    """Return ``sum_j weights[..., j] * expert[index[..., j]](x)`` for ``x [..., h]`` and ``index``, ``weights`` ``[..., k]``: ``[..., h]``.
    With ``weights_first`` the rows are weighted before their experts: ``sum_j expert[index[..., j]](weights[..., j] * x)``.

    ``parameters`` have the experts as dim 0, ``count`` of them globally. ``owners`` are the axes that shard the experts, outermost first.
    ``exchange`` and ``relay`` are those ``owners`` along which ranks have different tokens: rows are exchanged over them, over ``relay`` in
    a hop of its own. ``partial_axes`` are the axes on which the result is a partial sum (P): the other ``owners``, and the axes that shard
    another dim of the parameters. ``dispatch`` is the format in which rows, and gradients of results, are sent to the experts' owners.
    ``send`` exchanges the rows; by default the exchange is synchronous. If there are relays, it exchanges rows with them alone: the
    exchange between a relay and the experts, over fast links, is synchronous, so that under each exchange with relays the other pass
    of a pair has one long piece of work.
    """
    axes = {"owners": owners, "exchange": exchange, "relay": relay, "partial_axes": partial_axes}
    send = send or _send_and_wait
    inner = _send_and_wait if any(_size(axis) > 1 for axis in relay) else send
    steps = in_steps(send, (x, index, weights), parameters, body, count, weights_first, dispatch, inner, **axes)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Tensor = end.value
            return result


@torch.compiler.disable
def in_steps(
    send: Send,
    tokens: tuple[Tensor, Tensor, Tensor],
    parameters: Sequence[Tensor],
    body: Body,
    count: int,
    weights_first: bool = False,
    dispatch: RowFormat | None = None,
    inner: Send | None = None,
    **axes: Sequence[Axis],
) -> Generator[None, None, Tensor]:
    """Run ``experts`` as a generator that yields while an all-to-all is in flight, so that the caller can compute something else.
    ``tokens`` (``x``, ``index``, ``weights``) and ``axes`` (by keyword) are arguments of ``experts``; ``send`` exchanges the rows, and
    ``inner``, by default ``send``, those between a relay and the experts."""
    x, index, weights = tokens
    owners, exchange, relay, partial_axes = (
        axes.get(name, ()) for name in ("owners", "exchange", "relay", "partial_axes")
    )
    if spmd.is_type_checking():
        if send is not _send_and_wait:  # at a yield, the caller's ops would be checked under ``spmd.local``
            options: dict[str, Any] = {"weights_first": weights_first, "dispatch": dispatch, **axes}
            return experts(x, index, weights, parameters, body, count, **options)
        sharding = _check(x, index, weights, parameters, owners)
    owners = [axis for axis in owners if _size(axis) > 1]
    exchange = [axis for axis in exchange if _size(axis) > 1]
    relay = [axis for axis in relay if _size(axis) > 1]
    with spmd.local():
        expert_loads.count(index, count, parameters[0])
        if relay:
            place = _coordinates(count, owners, exchange, relay, ids_on=index.device)
            (x, index, weights), sent_back = yield from _send_to_relays(tokens, place, relay, send, dispatch)
        choices = index.shape[-1]
        ids = index.reshape(-1)
        ids, counts = _local_expert_ids(ids, count, owners, exchange)
        order = ids.argsort(stable=True)
        row_counts = _exchange_counts(counts, exchange, len(order)) if exchange else None
        if len(owners) > len(exchange):
            order = order[: sum(row_counts.sent if row_counts else sizes(counts, len(order)))]
        rows = _Gather.apply(x.reshape(-1, x.shape[-1]), order, choices)
        if weights_first:
            rows = (rows * _Gather.apply(weights.reshape(-1, 1), order, 1)).to(x.dtype)
        parameters = [_as_varying(parameter) for parameter in parameters]
        if row_counts is None:
            rows = body(rows, counts, *parameters)
        else:
            own = inner or send
            rows = yield from _dispatch_and_combine(rows, row_counts, body, parameters, exchange, own, dispatch)
        rows = _Restore.apply(rows, order, len(ids)).view(*index.shape, x.shape[-1])
        out = (rows.sum(-2) if weights_first else _weighted_sum(rows, weights)).to(x.dtype)
        if relay:
            out = yield from sent_back(out)
        out = _as_partial(out, [axis for axis in partial_axes if _size(axis) > 1])
    return _declare(out, sharding) if spmd.is_type_checking() else out


def _check(
    x: Tensor, index: Tensor, weights: Tensor, parameters: Sequence[Tensor], owners: Sequence[Axis]
) -> list[tuple[object, ...]]:
    """Check the operands' types, and return the axes that shard each dim of ``x``, and so of the result."""
    sharding = _sharding(x)
    _require(not sharding[-1], f"experts: the last dim of the tokens is sharded over {sharding[-1]}")
    for name, choice in (("index", index), ("weights", weights)):
        _require(
            _sharding(choice) == sharding,
            f"experts: tokens are sharded as {sharding}, their {name} as {_sharding(choice)}",
        )
    split = len([axis for axis in owners if _size(axis) > 1])
    for parameter in parameters:
        _require(
            len(_sharding(parameter)[0]) == split,
            f"experts: dim 0 of a parameter is sharded over {_sharding(parameter)[0]}, not {owners}",
        )
    return sharding


def _as_varying(parameter: Tensor) -> Tensor:
    """Declare a parameter of type P, such as a bias, as varying (V): the body adds a rank's term of it to the rank's partial product."""
    if not spmd.is_type_checking() or P not in spmd.get_local_type(parameter).values():
        return parameter
    types: dict[Any, Any] = {axis: V if t is P else t for axis, t in spmd.get_local_type(parameter).items()}
    with spmd.no_typecheck():
        own = parameter.view_as(parameter)
    spmd.assert_local_type(own, types)
    return own


def _local_expert_ids(
    ids: Tensor, count: int, owners: Sequence[Axis], exchange: Sequence[Axis]
) -> tuple[Tensor, Tensor]:
    """Return the expert of each (token, choice) pair, and the number of rows of each expert. Only the experts that this rank sends rows to
    (or computes) are numbered, from 0; pairs of all other experts get the number ``count``, which is not counted.

    If the experts are sharded over several axes, an expert's owner has a coordinate on each; this rank sends rows to (or computes) the
    experts with owners at its coordinate on every axis that rows are not exchanged over.
    """
    counts = torch.zeros(count, dtype=torch.long, device=ids.device).index_add(0, ids, torch.ones_like(ids))
    several = [_size(axis) for axis in owners]
    counts = counts.view(*several, -1)
    expert = torch.arange(count, device=ids.device).view(counts.shape)
    for dim, axis in enumerate(owners):
        if axis not in exchange:
            place = _slice_start([axis], 1, ids.device)
            counts, expert = counts.index_select(dim, place), expert.index_select(dim, place)
    if len(owners) == len(exchange):
        return ids, counts.flatten()
    number = torch.full((count,), count, dtype=torch.long, device=ids.device)
    mine = torch.arange(expert.numel(), device=ids.device)
    return number.index_copy(0, expert.flatten(), mine)[ids], counts.flatten()


def _coordinates(
    count: int, owners: Sequence[Axis], exchange: Sequence[Axis], relay: Sequence[Axis], ids_on: torch.device
) -> Tensor:
    """Return the coordinate of each expert's owner on the axes ``relay`` (flattened); their size for experts that this rank sends no rows
    to, because it has another coordinate on an axis that rows are not exchanged over."""
    several = [_size(axis) for axis in owners]
    place = torch.zeros([1] * len(owners), dtype=torch.long, device=ids_on)
    ours = torch.ones_like(place, dtype=torch.bool)
    for dim, axis in enumerate(owners):
        here = torch.arange(several[dim], device=ids_on).view([-1 if d == dim else 1 for d in range(len(owners))])
        if axis in relay:
            place = place * several[dim] + here
        elif axis not in exchange:
            ours = ours & (here == _slice_start([axis], 1, ids_on))
    place = torch.where(ours, place, prod(_size(axis) for axis in relay))
    return place.unsqueeze(-1).expand(*several, count // prod(several)).flatten()


def _send_to_relays(
    tokens: tuple[Tensor, Tensor, Tensor],
    place: Tensor,
    relay: Sequence[Axis],
    send: Send,
    dispatch: RowFormat | None,
) -> Generator[None, None, tuple[tuple[Tensor, Tensor, Tensor], Callable[[Tensor], Generator[None, None, Tensor]]]]:
    """Send each token once to every rank of ``relay`` that has any of its experts (``place [count]``, their ranks).

    Return the rows, choices and weights that arrived, and a generator that sends the relays' results back and adds up each token's.

    A group runs its collectives in their order. So choices and weights are exchanged before the rows, and the weights' gradients before
    those of the rows: behind them, they would wait for the rows of another pass, which should be in flight during the experts' work.
    """
    shape, n = tokens[0].shape, prod(_size(axis) for axis in relay)
    x, index, weights = (t.reshape(-1, t.shape[-1]) for t in tokens)
    reached = index.new_zeros(len(index), n + 1).scatter(1, place[index], 1)[:, :n].t()
    sent, received, _, _ = _exchange_counts(reached.sum(1), relay, len(index) * min(n, index.shape[1]))
    order = reached.flatten().argsort(descending=True, stable=True)[: sum(sent)]  # by rank, then by token
    token = order % len(index)
    index, chosen = _RowExchange.apply(index[token], relay, sent, received), weights[token]
    weights = _RowExchange.apply(chosen.detach(), relay, sent, received)
    arrived = send(x[token], relay, sent, received, (dispatch, None))
    yield
    x_here = arrived()
    weights = _RowExchange.apply(chosen, relay, sent, received, (None, None), weights)

    def sent_back(rows: Tensor) -> Generator[None, None, Tensor]:
        returned = send(rows, relay, received, sent, (None, dispatch))
        yield
        return _Restore.apply(returned(), order, n * len(x)).view(n, *shape).sum(0)

    return (x_here, index, weights), sent_back


class RowCounts(NamedTuple):
    """The numbers of rows that this rank sends to and receives from every rank. ``received_per_expert [ranks, e]`` are those received from
    each rank for each expert of this rank, and ``counts [e]`` their sums."""

    sent: list[int]
    received: list[int]
    received_per_expert: Tensor
    counts: Tensor


def _exchange_counts(counts: Tensor, exchange: Sequence[Axis], total: int) -> RowCounts:
    """Return the numbers of rows to exchange. ``counts`` has this rank's rows for each expert; ``total`` (for meta tensors) is its sum."""
    n = prod(_size(axis) for axis in exchange)
    theirs = counts.view(n, -1)  # for each rank, the number of rows for each of its experts
    by_expert = _RowExchange.apply(theirs, exchange, [1] * n, [1] * n)  # from each rank, rows for each of our experts
    own = by_expert.sum(0)
    if counts.is_meta:
        return RowCounts(sizes(theirs.sum(1), total), sizes(by_expert.sum(1), total), by_expert, own)
    numbers = torch.cat([theirs.sum(1), by_expert.flatten()]).tolist()
    per_rank = [numbers[i : i + by_expert.shape[1]] for i in range(n, len(numbers), by_expert.shape[1])]
    _cache_on_host(own, [sum(each) for each in zip(*per_rank, strict=True)])
    return RowCounts(numbers[:n], [sum(each) for each in per_rank], by_expert, own)


def _dispatch_and_combine(
    rows: Tensor,
    row_counts: RowCounts,
    body: Body,
    parameters: Sequence[Tensor],
    exchange: Sequence[Axis],
    send: Send,
    dispatch: RowFormat | None,
) -> Generator[None, None, Tensor]:
    """Send ``rows``, sorted by expert, to the experts' owners, and return the body's results for them; yield while rows are in flight."""
    sent, received, by_expert, counts = row_counts
    arrived = send(rows, exchange, sent, received, (dispatch, None))
    yield
    here = arrived()
    expert = torch.arange(by_expert.shape[1], device=rows.device).repeat(len(by_expert))
    order = expert.repeat_interleave(by_expert.flatten(), output_size=len(here)).argsort(stable=True)
    done = body(_Gather.apply(here, order, 1), counts, *parameters)
    returned = send(_Restore.apply(done, order, len(here)), exchange, received, sent, (None, dispatch))
    yield
    return returned()


def _send_and_wait(
    rows: Tensor, axes: Sequence[Axis], sent: list[int], received: list[int], formats: Formats
) -> Callable[[], Tensor]:
    here: Tensor = _RowExchange.apply(rows, axes, sent, received, formats)
    return lambda: here


class _RowExchange(torch.autograd.Function):
    """Sends rows to every rank of the axes (flattened, if there are several), in order; the backward sends their gradients back. If they
    have ``arrived`` by an earlier exchange, only the gradients are sent, at this place: autograd runs nodes in reverse order."""

    @staticmethod
    def forward(ctx, rows, axes, sent, received, formats=(None, None), arrived=None):  # type: ignore[no-untyped-def]
        # looked up here: on a GPU the backward runs in a thread that has no current mesh
        group = None if rows.is_meta else group_of(*axes)
        ctx.group, ctx.sent, ctx.received, ctx.format = group, sent, received, formats[1]
        return _all_to_all(rows, group, sent, received, formats[0]) if arrived is None else arrived.view_as(arrived)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return _all_to_all(grad, ctx.group, ctx.received, ctx.sent, ctx.format), None, None, None, None, None


spmd.register_local_autograd_function(_RowExchange)


def _all_to_all(
    rows: Tensor, group: dist.ProcessGroup | None, sent: list[int], received: list[int], sent_as: RowFormat | None
) -> Tensor:
    if group is None:  # the meta device has no group
        return rows.new_empty(sum(received), *rows.shape[1:])
    packed = rows.contiguous() if sent_as is None else sent_as.pack(rows)
    out = packed.new_empty(sum(received), *packed.shape[1:])
    dist.all_to_all_single(out, packed, received, sent, group=group)
    return out if sent_as is None else sent_as.unpack(out, rows.shape[-1], rows.dtype)


def _weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """Return ``sum_j weights[..., j] * rows[..., j, :]``; on a CPU by one product, which writes no weighted rows."""
    if rows.is_cpu and rows.dtype == weights.dtype:
        return (weights.unsqueeze(-2) @ rows).squeeze(-2)
    return (rows * weights.unsqueeze(-1)).sum(-2)


class _Gather(torch.autograd.Function):
    """Returns row ``i // copies`` of ``rows`` for each ``i`` in ``order``, which has no number twice. Without in-place accumulation, the
    backward is as fast as the forward, and reproducible on a GPU: gradients are gathered by the inverse of ``order``, and copies added
    up."""

    @staticmethod
    def forward(ctx, rows, order, copies):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(order)
        ctx.rows, ctx.copies = len(rows), copies
        return rows.index_select(0, order // copies if copies > 1 else order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (order,) = ctx.saved_tensors
        grad = _restored(grad, order, ctx.rows * ctx.copies)
        return (grad.unflatten(0, (ctx.rows, ctx.copies)).sum(1) if ctx.copies > 1 else grad), None, None


class _Restore(torch.autograd.Function):
    """Returns ``total`` rows: ``rows[i]`` at ``order[i]``, zeros elsewhere; the inverse of ``_Gather`` without copies."""

    @staticmethod
    def forward(ctx, rows, order, total):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(order)
        return _restored(rows, order, total)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (order,) = ctx.saved_tensors
        return grad.index_select(0, order), None, None


spmd.register_local_autograd_function(_Gather)
spmd.register_local_autograd_function(_Restore)


def _restored(rows: Tensor, order: Tensor, total: int) -> Tensor:
    if len(rows) < total:
        rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
    inverse = torch.full((total,), len(rows) - 1, dtype=torch.long, device=rows.device)
    inverse.index_copy_(0, order, torch.arange(len(order), device=rows.device))
    return rows.index_select(0, inverse)
