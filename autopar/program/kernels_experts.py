"""Mixtures of experts: every token's rows go to the experts that its router chose, and come back in the token's order.

``experts`` is a whole mixture except its router and its ``body``, which is the model's own code: the computation of an expert on a row. The
body is written with ``grouped_linear`` and ``of_rows``, which know the rows of each expert. There are three ways to distribute the work,
which may be combined on different axes:

* each rank has other tokens, and all experts: nothing is exchanged;
* each rank has the same tokens, and its own experts (or a slice of each): it computes their terms of the result, P;
* each rank has other tokens, and its own experts: rows travel to the owners of their experts and back, two all-to-alls whose
  sizes the router decides (dropless, as in Gale et al. 2022, arXiv:2211.15841; expert parallelism is of Lepikhin et al. 2020,
  arXiv:2006.16668). Several such axes are one, flattened.

Only the device knows how many rows each rank gets, so each mixture waits for the device once per exchange and once for the products.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from math import prod
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own convention
from spmd_types import P, V
from torch import Tensor

from autopar.program.kernels import _declare, _places, _require, _size, _start, _terms
from autopar.program.mesh_axes import Axis, group_of

Send = Callable[[Tensor, Sequence[Axis], list[int], list[int]], Callable[[], Tensor]]
"""Sends so many rows to every rank of the axes, in order, and takes so many; the call that it gives waits for these."""

Body = Callable[..., Tensor]
"""``body(rows, counts, *parameters)``: ``rows`` ``[n, h]`` sorted by expert, ``counts`` ``[e]`` rows of each expert; returns ``[n,
h]``."""


# -- building blocks of bodies ---------------------------------------------------------------------------------------


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """``rows [n, k]`` times the transpose of the ``weight [e, m, k]`` of each row's expert: ``[n, m]``. The first ``counts[0]`` rows are
    expert 0's, and so on."""
    if rows.is_cuda and rows.dtype == torch.bfloat16 and hasattr(F, "grouped_mm"):
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    parts = rows.split(sizes(counts, rows.shape[0]))
    return torch.cat([F.linear(part, own) for part, own in zip(parts, weight.unbind(0), strict=True)])


def of_rows(values: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """For each of the ``rows``, the entry of ``values [e, ...]`` (a bias) of its expert: ``[len(rows), ...]``."""
    several = sizes(counts, len(rows))
    return torch.cat([own.expand(n, *own.shape) for n, own in zip(several, values.unbind(0), strict=True)])


def sizes(counts: Tensor, total: int) -> list[int]:
    """``counts`` as Python numbers, which waits for the device; on the meta device, which has no values, even shares of ``total``."""
    if counts.is_meta:
        base, rest = divmod(total, len(counts))
        return [base + (i < rest) for i in range(len(counts))]
    return [int(n) for n in counts.tolist()]


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
    partial_axes: Sequence[Axis] = (),
) -> Tensor:
    """``sum_j weights[..., j] * expert[index[..., j]](x)`` for ``x`` ``[..., h]``, ``index`` and ``weights`` ``[..., k]``: ``[..., h]``.

    ``parameters`` have the experts as dim 0, ``count`` of them globally. ``owners`` are the axes that distribute the experts, outermost
    first, and ``exchange`` those of them whose ranks have different tokens: rows travel over these. ``partial_axes`` are the axes on
    which the result is a term of a sum (P): the other owners, and the axes that shard another dim of the parameters.
    """
    steps = in_steps(_at_once, (x, index, weights), parameters, body, count, (owners, exchange, partial_axes))
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Tensor = end.value
            return result


def in_steps(
    send: Send,
    tokens: tuple[Tensor, Tensor, Tensor],
    parameters: Sequence[Tensor],
    body: Body,
    count: int,
    axes: tuple[Sequence[Axis], Sequence[Axis], Sequence[Axis]],
) -> Generator[None, None, Tensor]:
    """``experts`` as a generator that yields while rows travel: something else may be computed then. ``tokens`` and ``axes`` are those of
    ``experts``; ``send`` exchanges the rows."""
    (x, index, weights), (owners, exchange, partial_axes) = tokens, axes
    if spmd.is_type_checking():
        places = _check(x, index, weights, parameters, owners)
    owners = [axis for axis in owners if _size(axis) > 1]
    exchange = [axis for axis in exchange if _size(axis) > 1]
    with spmd.local():
        choices = index.shape[-1]
        ids = index.reshape(-1)
        ids, counts = _own(ids, count, owners, exchange)
        order = ids.argsort(stable=True)
        order = order[: sum(sizes(counts, len(order)))] if len(owners) > len(exchange) else order
        rows = x.reshape(-1, x.shape[-1])[order // choices]
        parameters = [_as_terms(parameter) for parameter in parameters]
        rows = yield from _travel(rows, counts, body, parameters, exchange, send)
        rows = rows * weights.reshape(-1)[order].unsqueeze(-1)
        out = _restore(rows, order, len(ids)).view(*index.shape, x.shape[-1]).sum(-2).to(x.dtype)
        out = _terms(out, [axis for axis in partial_axes if _size(axis) > 1])
    return _declare(out, places) if spmd.is_type_checking() else out


def _check(
    x: Tensor, index: Tensor, weights: Tensor, parameters: Sequence[Tensor], owners: Sequence[Axis]
) -> list[tuple[object, ...]]:
    """The axes that shard each dim of the result: those of ``x``; the router's choices must be sharded like the tokens of ``x``."""
    places = _places(x)
    _require(not places[-1], f"experts: the last dim of the tokens is sharded over {places[-1]}")
    for name, choice in (("index", index), ("weights", weights)):
        _require(
            _places(choice) == places, f"experts: tokens are sharded as {places}, their {name} as {_places(choice)}"
        )
    split = len([axis for axis in owners if _size(axis) > 1])
    for parameter in parameters:
        _require(
            len(_places(parameter)[0]) == split,
            f"experts: a parameter's are distributed over {_places(parameter)[0]}, not {owners}",
        )
    return places


def _as_terms(parameter: Tensor) -> Tensor:
    """Declare a parameter that is added to a partial product as a term of a sum (P): each rank has its own term."""
    if not spmd.is_type_checking() or P not in spmd.get_local_type(parameter).values():
        return parameter
    types: dict[Any, Any] = {axis: V if t is P else t for axis, t in spmd.get_local_type(parameter).items()}
    with spmd.no_typecheck():
        own = parameter.view_as(parameter)
    spmd.assert_local_type(own, types)
    return own


def _own(ids: Tensor, count: int, owners: Sequence[Axis], exchange: Sequence[Axis]) -> tuple[Tensor, Tensor]:
    """The experts of all choices, and how many rows each expert gets. Experts that this rank does not send rows to are numbered behind
    all others, and are not counted.

    If the experts are distributed over several axes, an expert's owner has a coordinate on each; this rank sends rows to (or computes)
    the experts whose owners share its coordinate on every axis that is not exchanged over.
    """
    counts = torch.zeros(count, dtype=torch.long, device=ids.device).index_add(0, ids, torch.ones_like(ids))
    several = [_size(axis) for axis in owners]
    counts = counts.view(*several, -1)
    expert = torch.arange(count, device=ids.device).view(counts.shape)
    for dim, axis in enumerate(owners):
        if axis not in exchange:
            place = _start([axis], 1, ids.device)
            counts, expert = counts.index_select(dim, place), expert.index_select(dim, place)
    if len(owners) == len(exchange):
        return ids, counts.flatten()
    number = torch.full((count,), count, dtype=torch.long, device=ids.device)
    mine = torch.arange(expert.numel(), device=ids.device)
    return number.index_copy(0, expert.flatten(), mine)[ids], counts.flatten()


def _travel(
    rows: Tensor, counts: Tensor, body: Body, parameters: Sequence[Tensor], exchange: Sequence[Axis], send: Send
) -> Generator[None, None, Tensor]:
    """The body's result for ``rows``, sorted by expert, from the ranks that own the experts; ``counts`` cover all experts that
    ``exchange`` distributes."""
    if not exchange:
        return body(rows, counts, *parameters)
    n = prod(_size(axis) for axis in exchange)
    theirs = counts.view(n, -1)  # for each rank, the number of rows for each of its experts
    ours = _Exchange.apply(theirs, exchange, [1] * n, [1] * n)  # from each rank, the number of rows for each of ours
    sent, taken = sizes(theirs.sum(1), len(rows)), sizes(ours.sum(1), len(rows))
    arrived = send(rows, exchange, sent, taken)
    yield
    here = arrived()
    expert = torch.arange(ours.shape[1], device=rows.device).repeat(n)
    order = of_rows(expert, here, ours.flatten()).argsort(stable=True)
    done = body(here[order], ours.sum(0), *parameters)
    returned = send(_restore(done, order, len(here)), exchange, taken, sent)
    yield
    return returned()


def _at_once(rows: Tensor, axes: Sequence[Axis], sent: list[int], taken: list[int]) -> Callable[[], Tensor]:
    here: Tensor = _Exchange.apply(rows, axes, sent, taken)
    return lambda: here


class _Exchange(torch.autograd.Function):
    """Send rows to every rank of the axes (flattened, if there are several), in order; their gradients take the reverse route."""

    @staticmethod
    def forward(ctx, rows, axes, sent, taken):  # type: ignore[no-untyped-def]
        # looked up here: on a GPU the backward runs in a thread that has no current mesh
        group = None if rows.is_meta else group_of(*axes)
        ctx.group, ctx.sent, ctx.taken = group, sent, taken
        return _all_to_all(rows, group, sent, taken)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return _all_to_all(grad, ctx.group, ctx.taken, ctx.sent), None, None, None


spmd.register_local_autograd_function(_Exchange)


def _all_to_all(rows: Tensor, group: dist.ProcessGroup | None, sent: list[int], taken: list[int]) -> Tensor:
    out = rows.new_empty(sum(taken), *rows.shape[1:])
    if group is not None:  # the meta device has no group
        dist.all_to_all_single(out, rows.contiguous(), taken, sent, group=group)
    return out


def _restore(rows: Tensor, order: Tensor, total: int) -> Tensor:
    """``rows[i]`` at ``order[i]``, zero in all other rows: ``total`` rows. A gather by the inverse permutation, because in-place
    accumulation is not reproducible on a GPU."""
    if len(rows) < total:
        rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
    inverse = torch.full((total,), len(rows) - 1, dtype=torch.long, device=rows.device)
    return rows[inverse.index_copy(0, order, torch.arange(len(order), device=rows.device))]
