"""What the rules know of a captured model and a plan should say: ops that stay replicated, layers that couple the batch."""

from __future__ import annotations

import dataclasses

from autopar.flow import gradient_flow
from autopar.graph import Graph, LayerClass
from autopar.plan import Role
from autopar.rules import has_rule
from autopar.rules.operands import op_name
from autopar.rules.traffic import OF_MICROBATCHES
from autopar.shard.conversions import conversions
from autopar.shard.plan import role_types
from autopar.types import legal_in_time


def annotate(graph: Graph) -> Graph:
    """The graph with ``replicated`` (ops that no rule covers, with the layers they are in) and ``unmicrobatchable`` filled."""
    replicated: dict[str, str] = {}
    couples = graph.unmicrobatchable
    seen: set[str] = set()
    for index, layer in enumerate(graph.layers):
        if layer.cls in seen:
            continue
        seen.add(layer.cls)
        cls = graph.classes[layer.cls]
        for node in cls.graph.graph.nodes:
            if node.op == "call_function" and not has_rule(node):
                replicated.setdefault(op_name(node.target), layer.name)
        couples = couples or _couples_batch(graph, index, cls)
    named = tuple(f"{op} (in {layer})" for op, layer in replicated.items())
    return dataclasses.replace(graph, replicated=named, unmicrobatchable=couples)


def _couples_batch(graph: Graph, index: int, cls: LayerClass) -> str:
    """Why the batch cannot be split in time at this layer; empty when it can."""
    name = graph.layers[index].name
    types = role_types(graph, index, Role.DATA, 1)
    if types is None:
        return f"{name} has no way to compute on a part of the batch"
    for value, kernel in types.kernel.items():
        if kernel in OF_MICROBATCHES:
            continue
        return f"{name} needs the whole batch for {value} ({kernel})"
    flow = gradient_flow(cls)
    for value, source, target in conversions(cls, types):
        if not legal_in_time(source, target, flow[value]):
            return f"{name} needs the whole batch's {value} ({source} to {target})"
    return ""
