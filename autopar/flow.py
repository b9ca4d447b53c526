"""Where gradients flow in a layer's graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from autopar.graph import LayerClass
from autopar.ops.cost import tensors
from autopar.ops.facts import OpKind, facts
from autopar.ops.meta import meta


def placeholders(cls: LayerClass) -> list[fx.Node]:
    """Return the graph's placeholders: activations, inputs, constants, scalars, parameters."""
    return [node for node in cls.graph.graph.nodes if node.op == "placeholder"]


def parameter_nodes(cls: LayerClass) -> list[fx.Node]:
    """Return the placeholders of the layer's parameters, in order."""
    nodes = placeholders(cls)
    return nodes[len(nodes) - len(cls.parameters) :]


def output_nodes(cls: LayerClass) -> tuple[fx.Node, ...]:
    """Return the nodes of the layer's outputs, in order."""
    return returned_nodes(cls)[: len(cls.outputs)]


def returned_nodes(cls: LayerClass) -> tuple[fx.Node, ...]:
    """Return the nodes of the layer's outputs, then of its buffers' new values."""
    output = cls.graph.graph.output_node()
    returned = output.args[0]
    assert isinstance(returned, (tuple, list)), returned
    nodes = tuple(node for node in returned if isinstance(node, fx.Node))
    assert len(nodes) == len(cls.outputs) + len(cls.updates), (cls.name, returned)
    return nodes


def gradient_flow(cls: LayerClass) -> dict[str, bool]:
    """Return for every node whether a gradient flows back through its value."""
    borders = (*cls.activations, *cls.inputs, *cls.constants, *cls.scalars, *cls.parameters)
    flow: dict[str, bool] = {}
    for node, value in zip(placeholders(cls), borders, strict=True):
        flow[node.name] = value.requires_grad
    for node in cls.graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        flow[node.name] = carries_gradient(node, lambda operand: flow[operand.name])
    return flow


def carries_gradient(call: fx.Node, known: Callable[[fx.Node], bool]) -> bool:
    """Return whether a gradient flows back through a call; ``known`` says whether one flows through an operand."""
    floating = any(t.is_floating_point() or t.is_complex() for t in tensors(meta(call).get("val")))
    return floating and facts(call).kind is not OpKind.DETACH and any(map(known, call.all_input_nodes))


def run_again(nodes: Sequence[fx.Node], flows: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Return the ops that selective recomputation may run again: ``nodes``, in graph order, up to the last op whose operands or result
    autograd may save.

    ``flows`` says whether a gradient flows back through a node's value. A matrix product saves only its operands, so a product at the end
    isn't recomputed. (The price of full recomputation has all ops of the forward.)
    """
    ops = [node for node in nodes if node.op == "call_function"]
    while ops and (facts(ops[-1]).saves_nothing or not flows(ops[-1])):
        ops.pop()
    if ops and facts(ops[-1]).is_expensive and not facts(ops[-1]).is_attention:
        ops.pop()
    return ops
