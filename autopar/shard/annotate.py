"""Annotates a captured model: its ops without a sharding rule, why it has to run in one microbatch, why classes can't be rewritten."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from torch import fx

from autopar.flow import gradient_flow
from autopar.graph import Graph, LayerClass
from autopar.ops.facts import op_name
from autopar.ops.source import user_frame
from autopar.plan import Role
from autopar.rules import has_rule
from autopar.rules.traffic import MICROBATCHABLE_KERNELS
from autopar.shard.plan import role_types
from autopar.techniques import LAYER
from autopar.torch_private import without_function_modes
from autopar.types import legal_over_microbatches
from passes.clean.nodes import module_path
from passes.communication import conversions
from passes.rewrite import rewrite_of


def annotate(graph: Graph) -> Graph:
    """Return the graph with ``replicated`` (ops without a rule, and the first layer of each), ``unmicrobatchable`` and ``refused`` set."""
    with without_function_modes():  # a mode that is active here is meant for the model's calls only
        return _annotated(graph)


def _annotated(graph: Graph) -> Graph:
    replicated: dict[str, str] = {}
    reason = graph.unmicrobatchable
    seen: set[str] = set()
    for index, layer in enumerate(graph.layers):
        if layer.cls in seen:
            continue
        seen.add(layer.cls)
        cls = graph.classes[layer.cls]
        for node in cls.graph.graph.nodes:
            if node.op == "call_function" and not has_rule(node):
                replicated.setdefault(op_name(node), layer.name)
        reason = reason or _unmicrobatchable_reason(graph, index, cls)
    named = tuple(f"{op} (in {layer})" for op, layer in replicated.items())
    return dataclasses.replace(graph, replicated=named, unmicrobatchable=reason, refused=_refused(graph))


def _refused(graph: Graph) -> dict[tuple[str, str], str]:
    """For each technique that rewrites layer classes, return why it can't rewrite a class, or an empty string, by (technique, class)."""
    found = {}
    for technique in (technique for technique in LAYER if technique.rewrite):
        for name, cls in graph.classes.items():
            changed = rewrite_of(technique.rewrite)(cls)
            found[technique.name, name] = changed if isinstance(changed, str) else ""
    return found


def _unmicrobatchable_reason(graph: Graph, index: int, cls: LayerClass) -> str:
    """Return why this layer doesn't allow microbatches, or an empty string."""
    name = graph.layers[index].name
    types = role_types(graph, index, Role.DATA, 1)
    if types is None:
        return f"{name} cannot compute on a part of the batch"
    nodes = {node.name: node for node in cls.graph.graph.nodes}
    for value, kernel in types.kernel.items():
        if kernel not in MICROBATCHABLE_KERNELS:
            return f"{name} needs the full batch for {_described(nodes[value])}"
    flow = gradient_flow(cls)
    for one in conversions(cls.graph, (types,), flow):
        if not legal_over_microbatches(one.source[0], one.target[0], flow[one.value]):
            reader = nodes[one.readers[0][0]]
            if (without := _reached_without_rule(nodes[one.value])) is not None:
                return f"{name} needs the full batch for {_described(without)}, an op without a sharding rule"
            return (
                f"{name} needs the full batch for {_described(nodes[one.value] if reader.op == 'output' else reader)}"
            )
    return ""


def _reached_without_rule(value: fx.Node) -> fx.Node | None:
    """Return the nearest op without a rule that depends on ``value``. The solver may gather its operand several ops earlier."""
    reached = [value]
    for node in reached:
        if node.op == "call_function" and not has_rule(node):
            return node
        reached.extend(user for user in node.users if user not in reached)
    return None


def _described(node: fx.Node) -> str:
    """Describe a node by its op, module and line of code. A layer's input is described as the first op that reads it."""
    if node.op == "placeholder":
        node = next((reader for reader in node.users if reader.op == "call_function"), node)
    text = op_name(node).removeprefix("aten.") if node.op == "call_function" else f"the value {node.name}"
    path = module_path(node)
    frame = user_frame(node)
    where = f"line {frame[1]} of {Path(frame[0]).name}: {frame[3]}" if frame is not None else ""
    return f"{text}{f' of {path}' if path else ''}{f' ({where})' if where else ''}"
