"""Pads a layer class: if the axes that shard a dim don't divide its number of pieces (heads, for example), pieces of zeros are appended.

The result is an ordinary layer class with padded shapes that its axes divide, so that later passes need not know about padding.
``autopar.rules.padding`` says which dims may grow, and why the results stay those of the model.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from autopar.flow import parameter_nodes
from autopar.graph import LayerClass
from autopar.ops.experts import FIRST_PARAMETER, Experts
from autopar.ops.facts import OpKind, facts, op_name
from autopar.ops.fused import fused_op
from autopar.ops.meta import meta
from autopar.ops.operands import arguments, operands, shape_of
from autopar.rules.padding import padding
from autopar.sharding import Sharding
from passes.localise import SLICE_END, reshape_op


def pad_class(cls: LayerClass, sharding: Sharding) -> LayerClass:
    """Return ``cls`` with padded shapes; ``cls`` itself if the axes divide every dim that they shard."""
    found = padding(cls)
    multiples = found.multiples(sharding.axes, sharding.types)
    if not found.is_needed(multiples):
        return cls
    shapes: dict[str, tuple[int, ...]] = {}

    def padded(node: fx.Node, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(padded(node, part) for part in value)
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty(found.shape(node.name, value.shape, multiples), dtype=value.dtype, device="meta")

    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in cls.graph.graph.nodes:
        new = made[node] = graph.node_copy(node, made.__getitem__)
        new.meta = dict(node.meta)
        if node.op == "output":
            continue
        meta(new)["val"] = padded(node, meta(node).get("val"))
        if node.op == "call_function":
            _resize(new, node)
        elif meta(new)["val"] is not None:
            shapes[node.name] = tuple(meta(new)["val"].shape)
    module = fx.GraphModule(cls.graph, graph)
    module.meta.update(cls.graph.meta)
    parameters = tuple(
        dataclasses.replace(value, shape=shapes[node.name])
        for node, value in zip(parameter_nodes(cls), cls.parameters, strict=True)
    )
    return dataclasses.replace(cls, graph=module, parameters=parameters)


def _resize(new: fx.Node, old: fx.Node) -> None:
    """Update the arguments that are sizes: a view gets the new sizes, a slice that takes all of a dim takes all of the padded dim, a loss
    gets the true vocabulary size, a mixture the padded number of experts."""
    name, kind = op_name(old), facts(old).kind
    if kind is OpKind.CLASS_LOSS:
        classes = shape_of(operands(old)[0])[-1]
        if shape_of(operands(new)[0])[-1] != classes:
            new.kwargs = {**new.kwargs, "vocabulary": classes}
    elif isinstance(old.target, Experts):
        new.target = old.target.padded(shape_of(operands(new)[FIRST_PARAMETER])[0])
    elif (fused := fused_op(old)) is not None:
        fused.resize(new, old)
    elif isinstance(meta(new)["val"], torch.Tensor) and shape_of(new) != shape_of(old):
        if kind in (OpKind.RESHAPE, OpKind.EXPANSION):
            target = reshape_op(name) if kind is OpKind.RESHAPE else torch.ops.aten.expand.default
            new.target, new.args, new.kwargs = target, (new.args[0], list(shape_of(new))), {}
        elif name == "aten.slice":
            dim = int(arguments(old)["dim"]) % len(shape_of(old))
            if shape_of(new)[dim] != shape_of(old)[dim]:
                new.target, new.args, new.kwargs = torch.ops.aten.slice.Tensor, (new.args[0], dim, 0, SLICE_END), {}
