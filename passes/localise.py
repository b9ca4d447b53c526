"""Chooses the call that one rank makes in place of a node, on local shapes.

A view gets local sizes, a mean divides by the global count, and a few calls that are right on shards but that the type checker refuses
become kernels (``autopar.program.kernels``). All other calls stay unchanged. ``verify`` runs the call on the meta device, and compares the
result with the expected local shape, because ``expand`` to a wrong size broadcasts without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from autopar.ops import cost
from autopar.ops.facts import OpKind, facts
from autopar.ops.meta import meta
from autopar.ops.operands import arguments, first_tensor, operands, shape_of
from autopar.program import kernels

Shape = tuple[int, ...]
Partition = tuple[str | tuple[str, ...] | None, ...]
"""For each dim of the result, the axis that shards it, a tuple of axes (outermost first), or ``None``."""

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], float | None]
"""The target, its arguments (nodes in place of the tensors), keyword arguments, and a factor for the result (``None``: one)."""

SLICE_END = 2**63 - 1


def local_call(
    node: fx.Node, operand_shapes: Sequence[Shape], result_shape: Shape, partition: Partition | None = None
) -> Call:
    """Return the call that replaces ``node`` on one rank.

    ``operand_shapes`` are the local shapes of ``operands(node)``, ``result_shape`` that of the (first) result. Given the result's
    ``partition``, correct calls that ``typecheck(local=False)`` refuses become kernels, some of which take the partition. Without it, only
    a biased product that contracts a sharded dim becomes one. A mean over a sharded dim becomes a sum with the factor 1/count.
    """
    op = facts(node)
    name, kind = op.name, op.kind
    shards = partition is not None and any(partition)
    target: Any = node.target
    args, kwargs = node.args, dict(node.kwargs)
    if kind is OpKind.RESHAPE:
        if shards and _reshape_needs_kernel(operand_shapes[0], result_shape, name):
            return kernels.reshape, (args[0], list(result_shape), partition), {}, None
        if name == "aten.flatten":
            return target, args, kwargs, None
        return reshape_op(name), (args[0], list(result_shape)), {}, None
    if kind is OpKind.EXPANSION:
        if shards and (
            len(operand_shapes[0]) < len(result_shape) or _expands_sharded_dim(operand_shapes[0], partition)
        ):
            return kernels.expand, (args[0], list(result_shape), partition), {}, None
        return torch.ops.aten.expand.default, (args[0], list(result_shape)), {}, None
    if name == "aten.mean":
        return _mean(node, operand_shapes)
    if kind is OpKind.LOSS and arguments(node)["reduction"] == 1 and _is_sharded(node, operand_shapes):
        named = arguments(node) | {"reduction": 2}
        count = list(named).index("reduction") + 1  # some of the later arguments are keyword-only
        keywords = dict(list(named.items())[count:])
        return target, tuple(named.values())[:count], keywords, 1.0 / prod(shape_of(operands(node)[0]))
    if name in ("aten.slice", "aten.narrow"):
        return _slice(node, operand_shapes[0], result_shape)
    if name == "aten.matmul" and shards and _broadcasts_sharded_dim(node, partition):
        return kernels.broadcast_matmul, (*args, partition), kwargs, None
    if op.added_operand is not None and len(operand_shapes) == 3:
        summed = 0 if name == "aten.linear" else 1  # the index of the operand whose last dim is summed over
        if operand_shapes[summed][-1] != shape_of(operands(node)[summed])[-1]:
            return _partial_product(node, name)
    if op.is_attention and shards:
        named = arguments(node)
        one_key_head = shape_of(named["query"])[:-2] != shape_of(named["key"])[:-2]  # it broadcasts to all query heads
        if named["enable_gqa"] or one_key_head or not isinstance(named["attn_mask"], fx.Node):
            return kernels.attention, args, kwargs, None
    if (
        kind is OpKind.CONVOLUTION
        and partition is not None
        and arguments(node)["groups"] == 1
        and tuple(operand_shapes[1]) != shape_of(operands(node)[1])  # the channels are sharded
    ):
        return kernels.convolution, args, kwargs, None
    return target, args, kwargs, None


def reshape_op(name: str) -> Any:
    """Return the op that takes new sizes in place of the op ``name``: ``reshape`` if that op may copy, else ``view``."""
    copies = name in ("aten.reshape", "aten.flatten", "aten.unflatten", "aten.reshape_as")
    return torch.ops.aten.reshape.default if copies else torch.ops.aten.view.default


def verify(node: fx.Node, call: Call, operand_shapes: Sequence[Shape], result_shape: Shape) -> None:
    """Assert that the call gives ``result_shape`` from operands of ``operand_shapes``, on the meta device.

    A call on global shapes is not run: it is unchanged, and an op whose shapes depend on data could not run on meta.
    """
    if not _is_sharded(node, operand_shapes) and tuple(result_shape) == shape_of(node):
        return
    if any(isinstance(meta(operand)["val"], tuple | list) for operand in operands(node)):
        return
    tensors = [
        torch.empty(shape, dtype=first_tensor(operand).dtype, device="meta")
        for operand, shape in zip(operands(node), operand_shapes, strict=True)
    ]
    # a cast keeps the shape, and may name a device to which a meta tensor cannot be moved
    is_cast = facts(node).kind is OpKind.CAST
    shape = tuple(operand_shapes[0]) if is_cast else tuple(cost.tensors(apply(call, node, tensors))[0].shape)
    assert shape == tuple(result_shape), (
        f"{node.format_node()}: local shapes {list(map(tuple, operand_shapes))} give {shape}, not {tuple(result_shape)}"
    )


def apply(call: Call, node: fx.Node, tensors: Sequence[Any]) -> Any:
    """Make the call with ``tensors`` in place of ``operands(node)``. If the call has a node as an operand twice, the node's
    tensors are used in order."""
    target, args, kwargs, factor = call
    queues: dict[fx.Node, list[torch.Tensor]] = {}
    for operand, tensor in zip(operands(node), tensors, strict=True):
        queues.setdefault(operand, []).append(tensor)

    def tensor_of(operand: fx.Node) -> torch.Tensor:
        queue = queues[operand]
        return queue.pop(0) if len(queue) > 1 else queue[0]

    result = target(*fx.map_arg(args, tensor_of), **fx.map_arg(kwargs, tensor_of))
    return result if factor is None else result * factor


def _is_sharded(node: fx.Node, operand_shapes: Sequence[Shape]) -> bool:
    return any(tuple(shape) != shape_of(operand) for operand, shape in zip(operands(node), operand_shapes, strict=True))


def _reshape_needs_kernel(before: Shape, after: Shape, name: str) -> bool:
    """Return whether a reshape must be a kernel: the type checker follows only reshapes that merge dims, none of local size one."""
    if name == "aten.unflatten" or 1 in before or 1 in after:
        return True
    ends = {prod(before[:i]) for i in range(len(before) + 1)}
    return not all(prod(after[:i]) in ends for i in range(len(after) + 1))


def _expands_sharded_dim(before: Shape, partition: Partition | None) -> bool:
    assert partition is not None
    return any(axis is not None and size == 1 for axis, size in zip(partition, before, strict=True))


def _broadcasts_sharded_dim(node: fx.Node, partition: Partition | None) -> bool:
    """Return whether a matmul shards a batch dim that one operand lacks or broadcasts from size one, and the type checker refuses it. It
    accepts vectors, and a single matrix on the right."""
    assert partition is not None
    left, right = (shape_of(operand) for operand in operands(node))
    if len(left) < 2 or len(right) < 3:
        return False
    rank = len(partition) - 2
    sizes = [(1,) * (rank + 2 - len(shape)) + shape[:-2] for shape in (left, right)]
    return any(axis is not None and x != y for axis, x, y in zip(partition[:-2], *sizes, strict=True))


def _mean(node: fx.Node, operand_shapes: Sequence[Shape]) -> Call:
    """Return the call of a mean. If it reduces a sharded dim, this is the sum, times one over the global count."""
    named = arguments(node)
    global_shape, local_shape = shape_of(operands(node)[0]), operand_shapes[0]
    rank, dims = len(global_shape), named.get("dim")
    reduced = [d % rank for d in dims] if dims else list(range(rank))
    if all(global_shape[d] == local_shape[d] for d in reduced):
        return node.target, node.args, dict(node.kwargs), None  # type: ignore[return-value]
    dtype = {"dtype": named["dtype"]} if named.get("dtype") is not None else {}
    factor = 1.0 / prod(global_shape[d] for d in reduced)
    return torch.ops.aten.sum.dim_IntList, (node.args[0], reduced, bool(named.get("keepdim", False))), dtype, factor


def _slice(node: fx.Node, before: Shape, after: Shape) -> Call:
    """Return the call of a slice. A slice of a sharded dim always takes the full dim, and so the full local dim; others don't change."""
    dim = int(arguments(node)["dim"]) % len(before)
    if shape_of(operands(node)[0])[dim] == before[dim]:
        return node.target, node.args, dict(node.kwargs), None  # type: ignore[return-value]
    assert before[dim] == after[dim], f"{node.format_node()} slices the sharded dim {dim}"
    return torch.ops.aten.slice.Tensor, (node.args[0], dim, 0, SLICE_END), {}, None


def _partial_product(node: fx.Node, name: str) -> Call:
    """Return the call of a product that contracts a sharded dim: each rank computes a term of the sum (P), and adds a bias of type P."""
    named = arguments(node)
    if name == "aten.linear":
        return kernels.linear_partial_bias, (named["input"], named["weight"], named["bias"]), {}, None
    scales = {key: named[key] for key in ("beta", "alpha") if named.get(key, 1) != 1}
    return kernels.addmm_partial_bias, (named["self"], node.args[1], node.args[2]), scales, None
