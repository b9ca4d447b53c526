"""Makes a layer's shapes local: every call becomes the call that a rank makes on its slices, and its shape is checked against the types.

Runs after ``passes.collectives``: operands already have the types that their ops need.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from autopar.ops.meta import meta
from autopar.ops.operands import operands, shape_of
from autopar.sharding import Sharding, local_shape
from passes.collectives import convert, share
from passes.kernel_calls import kernel_call, partition
from passes.localise import local_call, verify


def scale(x: Tensor, factor: float) -> Tensor:
    """Scale a sum over a sharded dim by one over the global count, which gives the mean; the emitter writes ``x * factor``."""
    return x * factor


def random_seed(number: int, axes: tuple[str, ...]) -> int:
    """Mark the seed of the layer's ``number``-th random op, which differs along ``axes`` (those that shard its operand) and with
    the layer and the microbatch; the emitter writes ``kernels.seed(key, self.number, number, axes)``."""
    raise AssertionError("random_seed only marks a seed in graphs")


def localise_pass(gm: fx.GraphModule, sharding: Sharding) -> fx.GraphModule:
    """Return a new graph whose ``meta["val"]`` are local meta tensors and whose calls carry local sizes."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], made.__getitem__))
            continue
        shape = local_shape(shape_of(node), sharding.axes, meta(node)["types"])
        if node.op == "placeholder":
            new = graph.placeholder(node.target)
        elif node.target in (convert, share):
            new = graph.node_copy(node, made.__getitem__)
        else:
            new = _call(graph, node, shape, sharding, made)
        new.name = node.name
        new.meta = dict(node.meta)
        meta(new)["global_shape"] = shape_of(node)
        meta(new)["val"] = _local_value(node, shape, sharding)
        made[node] = new
    result = fx.GraphModule(gm, graph)
    result.meta.update(gm.meta)
    return result


def _call(
    graph: fx.Graph, node: fx.Node, shape: tuple[int, ...], sharding: Sharding, made: dict[fx.Node, fx.Node]
) -> fx.Node:
    kernel = kernel_call(node, sharding)
    if kernel is not None:
        target, args, kwargs = kernel
        if "seed" in kwargs:
            number = sum(n.target is random_seed for n in graph.nodes)
            kwargs["seed"] = graph.call_function(random_seed, (number, kwargs["seed"]))
            made[kwargs["seed"]] = kwargs["seed"]
        return graph.call_function(target, fx.map_arg(args, made.__getitem__), fx.map_arg(kwargs, made.__getitem__))
    shapes = [local_shape(shape_of(o), sharding.axes, meta(o)["types"]) for o in operands(node)]
    call = local_call(node, shapes, shape, partition(node, sharding))
    verify(node, call, shapes, shape)
    target, args, kwargs, factor = call
    new = graph.call_function(target, fx.map_arg(args, made.__getitem__), fx.map_arg(kwargs, made.__getitem__))
    if factor is None:
        return new
    new.meta = dict(node.meta)
    return graph.call_function(scale, (new, factor))


def _local_value(node: fx.Node, shape: tuple[int, ...], sharding: Sharding) -> Any:
    value = meta(node)["val"]
    if not isinstance(value, tuple | list):
        return torch.empty(shape, dtype=value.dtype, device="meta")
    found: list[Tensor | None] = []
    for item in value:  # None: a gradient that a backward op did not compute
        local = None if item is None else local_shape(tuple(item.shape), sharding.axes, meta(node)["types"])
        found.append(None if local is None else torch.empty(local, dtype=item.dtype, device="meta"))
    return tuple(found)
