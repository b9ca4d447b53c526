"""Where gradients flow in a layer's graph."""

from __future__ import annotations

from torch import fx

from autopar.graph import LayerClass
from autopar.ops.facts import Kind, facts
from autopar.ops.meta import meta
from autopar.ops.operands import operands


def placeholders(cls: LayerClass) -> list[fx.Node]:
    """The graph's placeholders, in order: activations, inputs, constants, scalars, parameters."""
    return [node for node in cls.graph.graph.nodes if node.op == "placeholder"]


def output_nodes(cls: LayerClass) -> tuple[fx.Node, ...]:
    """The nodes of the layer's outputs, in order."""
    return returned_nodes(cls)[: len(cls.outputs)]


def returned_nodes(cls: LayerClass) -> tuple[fx.Node, ...]:
    """The nodes of the layer's outputs, then those of the new values of its buffers."""
    output = next(node for node in reversed(cls.graph.graph.nodes) if node.op == "output")
    returned = output.args[0]
    assert isinstance(returned, (tuple, list)), returned
    nodes = tuple(node for node in returned if isinstance(node, fx.Node))
    assert len(nodes) == len(cls.outputs) + len(cls.updates), (cls.name, returned)
    return nodes


def gradient_flow(cls: LayerClass) -> dict[str, bool]:
    """For every node, whether a gradient flows back through its value."""
    borders = (*cls.activations, *cls.inputs, *cls.constants, *cls.scalars, *cls.parameters)
    flow: dict[str, bool] = {}
    for node, value in zip(placeholders(cls), borders, strict=True):
        flow[node.name] = value.requires_grad
    for node in cls.graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        held = meta(node).get("val")
        floating = held is None or not hasattr(held, "dtype") or held.dtype.is_floating_point or held.dtype.is_complex
        floating = floating and facts(node).kind is not Kind.DETACH
        flow[node.name] = floating and any(flow[operand.name] for operand in operands(node))
    return flow
