"""Localisation of one node: the call that a rank makes on its local shapes.

Views contain global sizes, a mean divides by the global count, and a few calls that are right on shards but that the type checker refuses
become kernels (``autopar.program.kernels``). All other calls stay unchanged. ``verify`` runs the call on the meta device, and compares the
result with the expected local shape: ``expand`` with a wrong size broadcasts without an error.
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
"""For every dim of the result: the axis that shards it, several axes outermost first, or ``None``."""

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], float | None]
"""The target, its arguments (nodes in place of the tensors), keyword arguments, and a factor for the result (``None``: one)."""

_TO_THE_END = 2**63 - 1


def localised(
    node: fx.Node, operand_shapes: Sequence[Shape], result_shape: Shape, partition: Partition | None = None
) -> Call:
    """The call that replaces ``node`` on one rank.

    ``operand_shapes`` are the local shapes of ``operands(node)``, ``result_shape`` that of the (first) result. With the result's
    ``partition``, calls that ``typecheck(local=False)`` refuses although they are right become kernels with the partition as an argument;
    without it the call uses torch's ops alone. The factor is 1/count for a mean over a sharded dim, whose call becomes a sum.
    """
    op = facts(node)
    name, kind = op.name, op.kind
    shards = partition is not None and any(partition)
    target: Any = node.target
    args, kwargs = node.args, dict(node.kwargs)
    if kind is OpKind.RESHAPE:
        if shards and _beyond_checker(operand_shapes[0], result_shape, name):
            return kernels.reshape, (args[0], list(result_shape), partition), {}, None
        if name == "aten.flatten":
            return target, args, kwargs, None
        return with_sizes(name), (args[0], list(result_shape)), {}, None
    if kind is OpKind.EXPANSION:
        if shards and (
            len(operand_shapes[0]) < len(result_shape) or _grows_where_sharded(operand_shapes[0], partition)
        ):
            return kernels.expand, (args[0], list(result_shape), partition), {}, None
        return torch.ops.aten.expand.default, (args[0], list(result_shape)), {}, None
    if name == "aten.mean":
        return _mean(node, operand_shapes)
    if kind is OpKind.LOSS and arguments(node)["reduction"] == 1 and _is_sharded(node, operand_shapes):
        given = arguments(node) | {"reduction": 2}
        split = list(given).index("reduction") + 1  # some of the arguments that follow are keyword-only
        rest = dict(list(given.items())[split:])
        return target, tuple(given.values())[:split], rest, 1.0 / prod(shape_of(operands(node)[0]))
    if name in ("aten.slice", "aten.narrow"):
        return _slice(node, operand_shapes[0], result_shape)
    if name == "aten.matmul" and shards and _broadcasts_where_sharded(node, partition):
        return kernels.broadcast_matmul, (*args, partition), kwargs, None
    if op.added_operand is not None and len(operand_shapes) == 3:
        summed = 0 if name == "aten.linear" else 1  # the operand whose last dim is summed over
        if operand_shapes[summed][-1] != shape_of(operands(node)[summed])[-1]:
            return _partial_product(node, name)
    if op.is_attention and shards:
        given = arguments(node)
        one_head = shape_of(given["query"])[:-2] != shape_of(given["key"])[:-2]  # for all queries
        if given["enable_gqa"] or one_head or not isinstance(given["attn_mask"], fx.Node):
            return kernels.attention, args, kwargs, None
    if (
        kind is OpKind.CONVOLUTION
        and partition is not None
        and arguments(node)["groups"] == 1
        and tuple(operand_shapes[1]) != shape_of(operands(node)[1])  # the channels are sharded
    ):
        return kernels.convolution, args, kwargs, None
    return target, args, kwargs, None


def with_sizes(name: str) -> Any:
    """The op to which new sizes are passed for a reshape of that name: ``reshape`` if it may have to copy."""
    copies = name in ("aten.reshape", "aten.flatten", "aten.unflatten", "aten.reshape_as")
    return torch.ops.aten.reshape.default if copies else torch.ops.aten.view.default


def verify(node: fx.Node, call: Call, operand_shapes: Sequence[Shape], result_shape: Shape) -> None:
    """Assert that the call gives ``result_shape`` from operands of ``operand_shapes``, on the meta device.

    A node whose shapes are all global does not run: it is unchanged, and ops whose shapes depend on data cannot run there.
    """
    if not _is_sharded(node, operand_shapes) and tuple(result_shape) == shape_of(node):
        return
    if any(isinstance(meta(operand)["val"], tuple | list) for operand in operands(node)):
        return
    tensors = [
        torch.empty(shape, dtype=first_tensor(operand).dtype, device="meta")
        for operand, shape in zip(operands(node), operand_shapes, strict=True)
    ]
    # a meta tensor cannot be moved to the device that a cast may name, and keeps its shape
    casts = facts(node).kind is OpKind.CAST
    shape = tuple(operand_shapes[0]) if casts else tuple(cost.tensors(apply(call, node, tensors))[0].shape)
    assert shape == tuple(result_shape), (
        f"{node.format_node()}: local shapes {list(map(tuple, operand_shapes))} give {shape}, not {tuple(result_shape)}"
    )


def apply(call: Call, node: fx.Node, tensors: Sequence[Any]) -> Any:
    """Make the call with ``tensors`` in place of ``operands(node)``. If a node is an operand twice, each of its tensors is used in turn,
    provided that the call has both operands."""
    target, args, kwargs, factor = call
    queues: dict[fx.Node, list[torch.Tensor]] = {}
    for operand, tensor in zip(operands(node), tensors, strict=True):
        queues.setdefault(operand, []).append(tensor)

    def place(operand: fx.Node) -> torch.Tensor:
        queue = queues[operand]
        return queue.pop(0) if len(queue) > 1 else queue[0]

    result = target(*fx.map_arg(args, place), **fx.map_arg(kwargs, place))
    return result if factor is None else result * factor


def _is_sharded(node: fx.Node, operand_shapes: Sequence[Shape]) -> bool:
    return any(tuple(shape) != shape_of(operand) for operand, shape in zip(operands(node), operand_shapes, strict=True))


def _beyond_checker(before: Shape, after: Shape, name: str) -> bool:
    """Whether a reshape needs the kernel: the checker follows only pure merges of dims, and not those of local size one."""
    if name == "aten.unflatten" or 1 in before or 1 in after:
        return True
    ends = {prod(before[:i]) for i in range(len(before) + 1)}
    return not all(prod(after[:i]) in ends for i in range(len(after) + 1))


def _grows_where_sharded(before: Shape, partition: Partition | None) -> bool:
    assert partition is not None
    return any(axis is not None and size == 1 for axis, size in zip(partition, before, strict=True))


def _broadcasts_where_sharded(node: fx.Node, partition: Partition | None) -> bool:
    """Whether a product's batch dims are sharded where one of its operands lacks the dim, or has it with size one. The checker accepts a
    single matrix on the right, and vectors."""
    assert partition is not None
    left, right = (shape_of(operand) for operand in operands(node))
    if len(left) < 2 or len(right) < 3:
        return False
    rank = len(partition) - 2
    sizes = [(1,) * (rank + 2 - len(shape)) + shape[:-2] for shape in (left, right)]
    return any(axis is not None and x != y for axis, x, y in zip(partition[:-2], *sizes, strict=True))


def _mean(node: fx.Node, operand_shapes: Sequence[Shape]) -> Call:
    """A mean over a sharded dim: the sum over it, times one over the global count."""
    given = arguments(node)
    whole, local = shape_of(operands(node)[0]), operand_shapes[0]
    dims = given.get("dim")
    reduced = [d % len(whole) for d in dims] if dims else list(range(len(whole)))
    if all(whole[d] == local[d] for d in reduced):
        return node.target, node.args, dict(node.kwargs), None  # type: ignore[return-value]
    dtype = {"dtype": given["dtype"]} if given.get("dtype") is not None else {}
    factor = 1.0 / prod(whole[d] for d in reduced)
    return torch.ops.aten.sum.dim_IntList, (node.args[0], reduced, bool(given.get("keepdim", False))), dtype, factor


def _slice(node: fx.Node, before: Shape, after: Shape) -> Call:
    """A slice of a sharded dim, which always covers the whole dim; other slices stay unchanged."""
    dim = int(arguments(node)["dim"]) % len(before)
    if shape_of(operands(node)[0])[dim] == before[dim]:
        return node.target, node.args, dict(node.kwargs), None  # type: ignore[return-value]
    assert before[dim] == after[dim], f"{node.format_node()} slices the sharded dim {dim}"
    return torch.ops.aten.slice.Tensor, (node.args[0], dim, 0, _TO_THE_END), {}, None


def _partial_product(node: fx.Node, name: str) -> Call:
    """A product summed over a sharded dim, with an added operand that is a term of the sum."""
    given = arguments(node)
    if name == "aten.linear":
        return kernels.linear_partial_bias, (given["input"], given["weight"], given["bias"]), {}, None
    scales = {key: given[key] for key in ("beta", "alpha") if given.get(key, 1) != 1}
    return kernels.addmm_partial_bias, (given["self"], node.args[1], node.args[2]), scales, None
