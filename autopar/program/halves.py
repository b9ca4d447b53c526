"""Runs a layer on two halves of a microbatch in turn, so that each half's collectives overlap the other half's computation.

The rows of a batch are independent of each other in such a layer, so a half is a smaller microbatch. The layer's ``compute`` is a
generator that yields while a collective is in flight: ``start`` issues it, ``AsyncConversion.wait`` returns its result. ``interleaved``
runs two such generators in turn. ``start`` and ``wait`` are two nodes of the autograd graph: in the backward pass, the node of ``wait``
issues the gradient's collective (such as the all-reduce for I to R), and the node of ``start`` waits for it. Autograd runs nodes in the
reverse order of the forward pass, so the backward passes of the halves take turns, too.

A half computes one piece between two yields. The second half is one piece behind the first: A1 A2 B1 A3 B2 A4 B3 ... So A2's collective
overlaps B1, and B1's overlaps A3. This is batch splitting as in Domino (Wang et al. 2024, arXiv:2409.15241), called
two-batch overlap or dual-batch overlap elsewhere.

On GPUs collectives overlap matrix products because they run on their own stream."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from spmd_types import I, P, R, S
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from . import flattened
from .collectives import Formats, RowFormat, Work, all_gather, reduce_scatter
from .kernels import Axes, _nontrivial, dense_gradient
from .mesh_axes import Axis, group_of
from .spmd import spmd

Result = Tensor | tuple[Tensor, ...]
Half = Generator[None, None, Result]
Finish = Callable[[], Tensor]
"""Waits for a collective, and returns its result."""


# -- two halves in turn -----------------------------------------------------------------------------------------------


def interleaved(
    compute: Callable[..., Half], args: Sequence[Any], arg_dims: Sequence[int | None], result_dims: Sequence[int]
) -> Result:
    """Run ``compute`` on both halves of its arguments ``args`` in turn, and return the concatenated results. ``arg_dims`` has each
    argument's batch dim, or ``None`` if both halves take the full argument; ``result_dims`` has each result's batch dim."""
    pairs = [_cut(value, dim) for value, dim in zip(args, arg_dims, strict=True)]
    _converted_once.clear()  # left over from an interrupted call
    running = [compute(*(pair[half] for pair in pairs)) for half in range(2)]
    halves: list[Result | None] = [None, None]
    _advance(running, halves, 0)  # the first half is a piece ahead
    while None in halves:
        for half in range(2):
            _advance(running, halves, half)
    first, second = ([result] if isinstance(result, Tensor) else list(result or ()) for result in halves)
    results = tuple(_joined(pair, dim) for *pair, dim in zip(first, second, result_dims, strict=True))
    return results[0] if len(results) == 1 else results


def in_turn(layers: Sequence[nn.Module], hidden: Tensor, *others: Any) -> Half:
    """Apply ``layers`` one after the other to a half's ``hidden``; each layer also takes the arguments ``others``."""
    for layer in layers:
        hidden = yield from layer(hidden, *others)
    return hidden


def _advance(running: Sequence[Half], results: list[Result | None], half: int) -> None:
    if results[half] is None:
        try:
            next(running[half])
        except StopIteration as end:
            results[half] = end.value


def _cut(value: Any, dim: int | None) -> tuple[Any, Any]:
    if dim is None:
        return value, value
    if spmd.is_type_checking():
        with spmd.no_typecheck():
            first, second = value.chunk(2, dim)
        return _typed_like(first, value), _typed_like(second, value)
    first, second = value.chunk(2, dim)
    return first, second


def _joined(pair: Sequence[Tensor], dim: int) -> Tensor:
    if spmd.is_type_checking():
        with spmd.no_typecheck():
            whole = torch.cat(list(pair), dim)
        return _typed_like(whole, pair[0])
    return torch.cat(list(pair), dim)


def _typed_like(x: Tensor, other: Tensor) -> Tensor:
    spmd.assert_type(x, dict(spmd.get_local_type(other)), spmd.get_partition_spec(other))
    return x


# -- collectives that are issued and awaited separately ---------------------------------------------------------------


class AsyncConversion:
    """A running conversion of a value to another type. ``forward`` issues the conversion's collective, ``backward`` the collective of its
    gradient; either may do nothing."""

    def __init__(self, forward: Callable[[Tensor], Finish], backward: Callable[[Tensor], Finish]) -> None:
        self.forward, self.backward = forward, backward
        self.readers = 1  # the calls of ``wait`` still to come
        self.sent: Tensor | None = None
        self.result: Tensor | None = None
        self.finish: Finish | None = None
        self.finish_backward: Finish | None = None

    def wait(self) -> Tensor:
        """Wait for the collective, and return the converted value."""
        result = self.result
        if result is None:
            assert self.sent is not None
            # without ``finish`` the value is converted already, for example if types are checked
            result = self.sent if self.finish is None else _Wait.apply(self.sent, self)
            self.sent = None
        self.readers -= 1
        self.result = result if self.readers else None
        return result


@torch.compiler.disable
def start(x: Tensor, axis: Axes, *, src: Any, dst: Any, once: bool = False) -> AsyncConversion:
    """Issue the collective that converts ``x`` from ``src`` to ``dst`` on ``axis`` (or axes, outermost first).

    ``once`` is for a parameter, which both halves read: the first half converts it for both, and one collective reduces the sum of
    their gradients.
    """
    if once:
        key = (id(x), str(axis), str(src), str(dst))
        known = _converted_once.pop(key, None)
        if known is None:
            known = _converted_once[key] = start(x, axis, src=src, dst=dst)
            known.readers = 2
        return known
    axes = _nontrivial(axis)
    if spmd.is_type_checking() or not axes or x.is_meta:
        conversion = AsyncConversion(_no_collective, _no_collective)
        conversion.sent = _converted(x, axis, src, dst)
        return conversion
    # the group is looked up here: on a GPU the backward runs in a thread that has no current mesh
    group = group_of(*axes)
    forward, backward = _collectives(group, src, dst, x.ndim)
    return begin(x, forward, backward)


def begin(x: Tensor, forward: Callable[[Tensor], Finish], backward: Callable[[Tensor], Finish]) -> AsyncConversion:
    """Issue ``forward`` on ``x``; the backward pass issues ``backward`` on the result's gradient."""
    conversion = AsyncConversion(forward, backward)
    conversion.sent = _Start.apply(x, conversion)
    return conversion


def _converted(x: Tensor, axis: Axes, src: Any, dst: Any) -> Tensor:
    """Convert ``x`` from ``src`` to ``dst`` by the synchronous collectives of ``spmd_types``."""
    axes: Sequence[Any] = axis if isinstance(axis, list | tuple) else [axis]
    if isinstance(src, S):
        call = flattened.all_to_all if isinstance(dst, S) else flattened.all_gather
    else:
        call = (
            flattened.convert if src is I else flattened.reduce_scatter if isinstance(dst, S) else flattened.all_reduce
        )
    narrow = {"backward_options": {"op_dtype": x.dtype}} if x.dtype.itemsize == 2 and dst is R else {}
    converted = call(x, axes, src=src, dst=dst, **narrow)
    return dense_gradient(converted) if dst is R else converted


_converted_once: dict[tuple[Any, ...], AsyncConversion] = {}
"""Conversions that the first half has started, for the second half to use."""


class _Start(torch.autograd.Function):
    """Forward issues the collective, backward awaits the gradient's."""

    @staticmethod
    def forward(ctx, x, conversion):  # type: ignore[no-untyped-def]
        ctx.conversion = conversion
        conversion.finish = conversion.forward(x)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        finish, ctx.conversion.finish_backward = ctx.conversion.finish_backward, None
        return finish(), None


class _Wait(torch.autograd.Function):
    """Forward awaits the collective, backward issues the gradient's. Backward returns a placeholder of the right shape, because the
    backward of ``_Start`` awaits the true gradient."""

    @staticmethod
    def forward(ctx, sent, conversion):  # type: ignore[no-untyped-def]
        ctx.conversion, ctx.shape = conversion, sent.shape
        finish, conversion.finish = conversion.finish, None
        return finish()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.conversion.finish_backward = ctx.conversion.backward(grad)
        return grad.new_empty(()).expand(ctx.shape), None


def _collectives(
    group: dist.ProcessGroup, src: Any, dst: Any, ndim: int
) -> tuple[Callable[[Tensor], Finish], Callable[[Tensor], Finish]]:
    """Return the functions that issue a conversion's collectives in the forward and in the backward pass."""

    def dim(t: Any) -> int:
        return int(t.dim) % ndim

    def reduced(x: Tensor) -> Finish:
        return _all_reduce(x, group)

    if isinstance(src, S) and isinstance(dst, S):
        src_dim, dst_dim = dim(src), dim(dst)
        return lambda x: _all_to_all(x, group, src_dim, dst_dim), lambda x: _all_to_all(x, group, dst_dim, src_dim)
    if isinstance(src, S):
        forward = lambda x: _all_gather(x, group, dim(src))  # noqa: E731
        return forward, (lambda x: _reduce_scatter(x, group, dim(src))) if dst is R else lambda x: _slice(
            x, group, dim(src)
        )
    if isinstance(dst, S):
        assert src is P, (src, dst)
        return lambda x: _reduce_scatter(x, group, dim(dst)), lambda x: _all_gather(x, group, dim(dst))
    return reduced if src is P else _no_collective, reduced if dst is R else _no_collective


def _no_collective(x: Tensor) -> Finish:
    return lambda: x.view_as(x)


def _slice(x: Tensor, group: dist.ProcessGroup, dim: int) -> Finish:
    return lambda: x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Finish:
    total = x.clone(memory_format=torch.contiguous_format)
    return _after(dist.all_reduce(total, group=group, async_op=True), lambda: total)


def _all_gather(x: Tensor, group: dist.ProcessGroup, dim: int) -> Finish:
    parts = x.new_empty(dist.get_world_size(group), *x.shape)
    work = all_gather(parts.view(-1), x.contiguous().view(-1), group=group, async_op=True)
    return _after(work, lambda: torch.cat(parts.unbind(), dim) if dim else parts.flatten(0, 1))


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup, dim: int) -> Finish:
    parts = torch.stack(x.chunk(dist.get_world_size(group), dim)) if dim else x.contiguous()
    own = x.new_empty(x.chunk(dist.get_world_size(group), dim)[0].shape)
    return _after(reduce_scatter(own.view(-1), parts.view(-1), group=group, async_op=True), lambda: own)


def _all_to_all(x: Tensor, group: dist.ProcessGroup, src_dim: int, dst_dim: int) -> Finish:
    """Start to convert ``x`` from S(``src_dim``) to S(``dst_dim``)."""
    parts = torch.stack(x.chunk(dist.get_world_size(group), dst_dim))
    out = torch.empty_like(parts)
    work = dist.all_to_all_single(out, parts, group=group, async_op=True)
    return _after(work, lambda: torch.cat(out.unbind(), src_dim))


def _after(work: Work | None, result: Finish) -> Finish:
    def finish() -> Tensor:
        assert work is not None
        work.wait()
        return result()

    return finish


# -- mixtures of experts ------------------------------------------------------------------------------------------------


def send(
    rows: Tensor,
    axes: Sequence[Axis],
    sent: list[int],
    received: list[int],
    formats: Formats,
    issued: Callable[[], None] = lambda: None,
    issued_backward: Callable[[], None] = lambda: None,
) -> Finish:
    """Start an all-to-all of rows in expert parallelism, while the other half computes: a ``kernels_experts.Send``. ``issued`` and
    ``issued_backward`` are called after the all-to-all of the forward or the backward pass is issued."""
    group = group_of(*axes)
    there, back = formats

    def forward(x: Tensor) -> Finish:
        finish = _exchange(x, group, sent, received, there)
        issued()
        return finish

    def backward(grad: Tensor) -> Finish:
        finish = _exchange(grad, group, received, sent, back)
        issued_backward()
        return finish

    return begin(rows, forward, backward).wait


def _exchange(
    rows: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int], sent_as: RowFormat | None
) -> Finish:
    width, dtype = rows.shape[-1], rows.dtype
    packed = rows.contiguous() if sent_as is None else sent_as.pack(rows)
    out = packed.new_empty(sum(received), *packed.shape[1:])
    work = dist.all_to_all_single(out, packed, received, sent, group=group, async_op=True)

    def finish() -> Tensor:
        assert work is not None and packed is not None  # ``packed`` must live until the wait
        work.wait()
        return out if sent_as is None else sent_as.unpack(out, width, dtype)

    return finish
