"""Kernels: replacements of calls that are correct on shards, but whose result types the type checker cannot derive.

Most kernels check the types of their operands, run in a local region and declare the types of their results, so that a program typed
with ``typecheck(local=False)`` stays typed through them. An *axis* is a name on the current mesh (``mesh_axes.on_mesh``) or a
process group. A *partition* names, for every dim of the result, the axis that shards it, a tuple of axes (outermost first), or ``None``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own convention
from spmd_types import P, PartitionSpec, R, S, SpmdTypeError, V
from torch import Tensor

from .kernels_random import Seed, bernoulli_mask
from .mesh_axes import Axis
from .spmd import spmd

Axes = Axis | Sequence[Axis]
Partition = Sequence[str | tuple[str, ...] | None]


# -- types -----------------------------------------------------------------------------------------------------------


def _sharding(x: Tensor) -> list[tuple[Any, ...]]:
    """Return the axes that shard each dim of a typed tensor."""
    spec = spmd.get_partition_spec(x)
    if spec is None:
        return [()] * x.ndim
    return [() if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in spec]


def _partition_axes(partition: Partition) -> list[tuple[Any, ...]]:
    """Return a partition's axes in the checker's form, without axes of size one."""
    names = spmd.current_mesh_all_names() or {}
    entries = [() if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in partition]
    axes = [tuple(names[axis] for axis in entry) for entry in entries]
    return [tuple(axis for axis in entry if axis.size() > 1) for entry in axes]


def _declare(x: Tensor, sharding: Sequence[tuple[Any, ...]]) -> Tensor:
    """Declare which axes shard which dims of ``x``; the other axes keep the types from the local region."""
    if spmd.is_type_checking() and any(sharding):
        spec = PartitionSpec(*(entry if len(entry) > 1 else entry[0] if entry else None for entry in sharding))
        spmd.assert_type(x, spec, {})
    return x


def _as_partial(x: Tensor, axes: Sequence[Any]) -> Tensor:
    """Declare that ``x``, which varies over ``axes`` (V), is a term of a sum over them (P). No communication, forward or backward."""
    for axis in axes:
        x = spmd.reinterpret(x, axis, src=V, dst=P)
    return x


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SpmdTypeError(message)


def _size(axis: Axis) -> int:
    if not isinstance(axis, str):
        return dist.get_world_size(axis)
    names = spmd.current_mesh_all_names()
    assert names is not None, "a kernel with an axis needs spmd_types.set_current_mesh"
    return names[axis].size()


def _nontrivial(axes: Axes) -> list[Axis]:
    """Return the axes of size above one, outermost first."""
    several: Sequence[Any] = axes if isinstance(axes, list | tuple) else [axes]
    return [axis for axis in several if _size(axis) > 1]


def _slice_start(axes: Sequence[Axis], extent: int, device: torch.device) -> Tensor:
    """Return the first index of this rank's slice of ``extent`` elements, as a tensor ``[1]``: the host doesn't wait for it."""
    start = torch.zeros(1, dtype=torch.long, device=device)
    for axis in reversed(axes):
        starts = torch.arange(0, _size(axis) * extent, extent, device=device)
        start = start + spmd.convert(starts, axis, src=R, dst=S(0))
        extent *= _size(axis)
    return start


# -- shapes ----------------------------------------------------------------------------------------------------------


def reshape(x: Tensor, shape: Sequence[int], partition: Partition) -> Tensor:
    """Reshape the local ``x`` to the local ``shape``: dims are split, merged or both.

    An axis that shards dim i of ``x`` may shard dim j of the result only if the dims before j have as many elements as those before i:
    then a slice along i is a slice along j. Raises ``SpmdTypeError`` (when types are checked) for any other ``partition``.
    """
    with spmd.local():
        y = x.reshape(list(shape))
    if spmd.is_type_checking():
        sharding = _partition_axes(partition)
        before = {a: (prod(x.shape[:i]), entry) for i, entry in enumerate(_sharding(x)) for a in entry}
        after = {a: (prod(y.shape[:j]), entry) for j, entry in enumerate(sharding) for a in entry}
        _require(
            before == after,
            f"reshape: {tuple(x.shape)} sharded as {_sharding(x)} is not {tuple(shape)} sharded as {sharding}",
        )
        _declare(y, sharding)
    return y


def expand(x: Tensor, shape: Sequence[int], partition: Partition) -> Tensor:
    """Expand the local ``x`` to the local ``shape``.

    A new dim, or one that grows from size one, may be sharded in the result: each rank expands its copy of ``x`` to its slice. On that axis
    ``x`` is R, and its gradient is a partial sum over the ranks (P).
    """
    return _expand(x, shape, _partition_axes(partition) if spmd.is_type_checking() else [])


def _expand(x: Tensor, shape: Sequence[int], sharding: Sequence[tuple[Any, ...]]) -> Tensor:
    with spmd.local():
        if spmd.is_type_checking():
            kept = [() for _ in range(len(shape) - x.ndim)] + _sharding(x)
            for dim, (wanted, current) in enumerate(zip(sharding, kept, strict=True)):
                grows = dim < len(shape) - x.ndim or x.shape[dim - len(shape)] == 1
                _require(
                    wanted == current or (grows and not current),
                    f"expand: dim {dim} is sharded over {current}, which cannot become {wanted}",
                )
                for axis in set(wanted) - set(current):
                    x = spmd.reinterpret(x, axis, src=R, dst=V, expert_mode=True)
        y = x.expand(list(shape))
    return _declare(y, sharding)


def broadcast_matmul(a: Tensor, b: Tensor, partition: Partition) -> Tensor:
    """Return ``a @ b`` with broadcast batch dims, which may be sharded; ``partition`` is the result's.

    If an operand lacks a sharded batch dim, it is R on that dim's axis. The batch dims are expanded first, as in ``torch.matmul``.
    """
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    sharding = _partition_axes(partition)[:-2] if spmd.is_type_checking() else []
    a, b = (_expand(x, [*batch, *x.shape[-2:]], [*sharding, *_sharding(x)[-2:]]) for x in (a, b))
    return torch.matmul(a, b)


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad.contiguous()


spmd.register_local_autograd_function(_Dense)


def dense_gradient(x: Tensor) -> Tensor:
    """Return ``x``, and make its gradient contiguous in the backward pass: an all-reduce requires that, and the gradients of expanded or
    transposed values aren't."""
    with spmd.no_typecheck():
        y = _Dense.apply(x)
    if spmd.is_type_checking():
        spmd.assert_type(y, spmd.get_local_type(x), spmd.get_partition_spec(x))
    return y


# -- products and attention ------------------------------------------------------------------------------------------


def linear_partial_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``x @ weight.T + bias`` where the contracted dim is sharded: the result is P, and ``bias`` must be P too (zero on all ranks
    but one)."""
    return F.linear(x, weight) + bias


def linear_without_unit_dims(x: Tensor, weight: Tensor, unit_dims: Sequence[int]) -> Tensor:
    """Return ``x @ weight.T``, computed without the dims ``unit_dims`` of ``x`` (ascending, each of size one). If such a dim follows a
    sharded one, the type checker misreads its stride, and treats the product as a batched one."""
    y = F.linear(x.squeeze(list(unit_dims)), weight)
    for dim in unit_dims:
        y = y.unsqueeze(dim)
    return y


def addmm_partial_bias(bias: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return ``beta * bias + alpha * (a @ b)`` where the contracted dim is sharded: the result is P, and ``bias`` must be P too. ``a`` and
    ``b`` may be batched."""
    product = torch.matmul(a, b)
    return (product if alpha == 1 else product * alpha) + (bias if beta == 1 else bias * beta)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    seed: Seed | None = None,
) -> Tensor:
    """Return ``scaled_dot_product_attention`` of ``[batch, heads, length, size]``; the same axes shard batch and heads of all operands.

    A batch or head dim of size one of keys and values may be unsharded. Queries may also be sharded over their length if ``is_causal`` is
    false. The dropout is a function of ``seed``; there is none if it is ``None``, as in evaluation mode. Raises ``SpmdTypeError`` (when
    types are checked) for any other layout, such as keys sharded over their length (see ``ring_attention``).
    """
    if spmd.is_type_checking():
        q, k, v = _sharding(query), _sharding(key), _sharding(value)
        rows = q[-2] if not is_causal else ()
        shared = [
            () if key.shape[i] == 1 and not k[i] else entry for i, entry in enumerate(q[:-2])
        ]  # such as one key head for all queries
        _require(
            shared == k[:-2] == v[:-2], f"attention: batch and heads are sharded as {q[:-2]}, {k[:-2]} and {v[:-2]}"
        )
        _require(
            not any((*k[-2:], *v[-2:], q[-1])) and q[-2] == rows,
            f"attention: lengths or sizes are sharded: {q}, {k}, {v}",
        )
        if attn_mask is not None:
            expected = [*q[:-1], ()][-attn_mask.ndim :]
            for size, has, wants in zip(attn_mask.shape, _sharding(attn_mask), expected, strict=True):
                _require(
                    has == wants or (size == 1 and not has),
                    f"attention: the mask is sharded as {has}, not {wants}",
                )
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if seed is None or not dropout_p:
        out = _attention(query, key, value, attn_mask, **{**options, "dropout_p": 0.0})
    else:
        out = _seeded_attention(seed, query, key, value, attn_mask, **options)
    return _declare(out, _sharding(query)) if spmd.is_type_checking() else out


def _attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, **options: Any) -> Tensor:
    with spmd.local():
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)


@torch.compiler.disable  # torch.compile does not trace changes of torch's own generator
def _seeded_attention(seed: Seed, query: Tensor, *others: Any, **options: Any) -> Tensor:
    with _seeded(seed, query.device):
        return _attention(query, *others, **options)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] | str = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Tensor:
    """Return conv1d, conv2d or conv3d, by the number of dims of ``x``. The batch may be sharded; with ``groups=1``, channels too.

    If input channels are sharded, the result is P (a partial sum) on their axes; ``bias`` is added afterwards, and must be P there too.
    """
    function: Callable[..., Tensor] = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.ndim]
    rest = stride, padding, dilation, groups
    if not spmd.is_type_checking():
        return function(x, weight, bias, *rest)
    x_axes, weight_axes = _sharding(x), _sharding(weight)
    _require(not any((*x_axes[2:], *weight_axes[2:])), "convolution: spatial dims are sharded, which needs a halo")
    _require(
        x_axes[1] == weight_axes[1] and (groups == 1 or not any((*x_axes[1:2], *weight_axes))),
        f"convolution: the input channels of x and weight are sharded over {x_axes[1]} and {weight_axes[1]}",
    )
    with spmd.local():
        out = _as_partial(function(x, weight, None, *rest), x_axes[1])
    out = _declare(out, [x_axes[0], weight_axes[0], *x_axes[2:]])
    return out if bias is None else out + bias.reshape([-1] + [1] * (x.ndim - 2))


# -- dropout ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _seeded(seed: Seed | None, device: torch.device) -> Iterator[None]:
    """Draw random numbers from ``seed`` inside this context, and restore the generators afterwards."""
    if seed is None or device.type == "meta":
        yield
        return
    cuda = device.type == "cuda"
    seed = int(seed)
    with torch.random.fork_rng([device] if cuda else []):
        (torch.cuda.manual_seed if cuda else torch.default_generator.manual_seed)(seed)
        yield


def seed(key: int | None, layer: int, op: int, axes: Sequence[str] = ()) -> int | None:
    """Return the seed of one random op: a function of the microbatch's key, the layer, the op, and this rank's coordinates on ``axes``.
    In evaluation mode, in which nothing is random, key and seed are ``None``.

    ``axes`` are the axes that shard the op's operand: ranks with different slices draw different numbers, ranks with the same values draw
    the same. Axes of size one are ignored, so that a rank with the full operand draws the same numbers under every plan. A
    recomputation passes the same key and gets the same seed.
    """
    if key is None:
        return None
    with spmd.no_typecheck():
        ranges = [torch.arange(_size(axis)) for axis in _nontrivial(axes)]
        slices = [spmd.convert(r, axis, src=R, dst=S(0)) for r, axis in zip(ranges, _nontrivial(axes), strict=True)]
        numbers = [key, layer, op, *(int(own) for own in slices)]
    state = 0
    for number in numbers:  # splitmix64 (Steele, Lea and Flood 2014), one round for every number
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state >> 1


def seeds(key: int | None, layer: int, axes: Sequence[Sequence[str]]) -> tuple[Tensor | None, ...]:
    """Return the seeds of a layer's random ops as tensors on the CPU; ``axes[op]`` is the argument ``axes`` of ``seed`` for each op."""
    numbers = [seed(key, layer, op, each) for op, each in enumerate(axes)]
    with spmd.no_typecheck():
        return tuple(None if number is None else torch.tensor(number, device="cpu") for number in numbers)


def dropout(x: Tensor, p: float, seed: Seed | None) -> Tensor:
    """Return ``x`` after dropout, with a mask that is a function of ``seed`` and the local shape; ``x`` itself if the seed is ``None``.

    Ranks with the same ``x`` (I, R) must pass the same seed, and then draw the same mask; ranks with slices should pass different seeds.
    A recomputation draws the same mask again. The backward pass needs only the mask, one byte per element.
    """
    if p == 0.0 or seed is None:
        return x
    if spmd.is_type_checking():
        _require(P not in spmd.get_local_type(x).values(), "dropout: the terms of a sum would be dropped one by one")
    if p == 1.0:
        return x * 0.0  # as torch does; the scale would be infinite
    return x * bernoulli_mask(x, 1.0 - p, seed) / (1.0 - p)


# -- memory and losses ------------------------------------------------------------------------------------------------


def strided(x: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return ``as_strided`` of ``x`` made contiguous, so that the result doesn't depend on its memory layout."""
    return x.contiguous().as_strided(size, stride)


def cross_entropy_sum(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    partial_axes: Sequence[Axis] = (),
    vocabulary: int | None = None,
) -> Tensor:
    """Return the cross entropy of ``logits [..., v]`` and ``labels [...]``, summed over the labels that are not ``ignore_index``: 0-d.

    ``weight [v]`` has the classes' weights, as in torch. ``partial_axes`` are the axes that shard the leading dims: on them the result is a
    term of the sum (P). If the logits are padded, only the first ``vocabulary`` columns count. With 16-bit logits, the sum is accumulated
    and returned in float32.
    """
    with spmd.local():
        logits = logits[..., :vocabulary]
        narrow = logits.dtype.itemsize == 2
        loss = F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            labels.reshape(-1),
            weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction="none" if narrow else "sum",
        )
        return _as_partial(loss.sum(dtype=torch.float32) if narrow else loss, partial_axes)
