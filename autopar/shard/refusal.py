"""Explains why a role is infeasible for a layer."""

from __future__ import annotations

from torch import fx

from autopar.graph import Graph
from autopar.ops.facts import facts, op_name
from autopar.ops.meta import meta
from autopar.ops.operands import operands, shape_of
from autopar.plan import Role
from autopar.shard.problem import Problem, boundary


def refusal(graph: Graph, layer: int, role: Role, size: int) -> str:
    """Return why layer ``layer`` (an index) has no solution in ``role`` on ``size`` devices."""
    name = graph.layers[layer].name
    cls = graph.classes[graph.layers[layer].cls]
    for value in (*cls.activations, *cls.outputs):
        t = boundary(cls, role, value)
        if value.shape and t is None:
            return f"{name}: the activation {value.name} {list(value.shape)} has no dim that {role.value} can shard"
        if t is not None and t.dim is not None and value.shape[t.dim] % size:
            return (
                f"{name}: dim {t.dim} of the activation {value.name} {list(value.shape)} does not divide by {size} "
                f"for {role.value}"
            )
    for node in cls.graph.graph.nodes:
        reason = _attention(node, role, size)
        if reason:
            return f"{name}: {reason}"
    problem = Problem(cls, role, size, {})
    for node, options in problem.options.items():
        if not options:
            found = problem.nodes[node]
            shape = list(getattr(meta(found).get("val"), "shape", ()))
            what = op_name(found) or "the value"
            return f"{name}: {what} {node} {shape} has no types for {role.value} on {size} devices"
    return f"{name}: no consistent sharding of its ops exists for {role.value} on {size} devices"


def _attention(node: fx.Node, role: Role, size: int) -> str:
    """Return why an attention op doesn't support a role that shards the sequence, or an empty string."""
    if not facts(node).is_attention:
        return ""
    query, key = (shape_of(operand) for operand in operands(node)[:2])
    if role.dense is Role.ULYSSES:
        for what, heads in (("heads", query[-3]), ("heads of keys", key[-3])):
            if heads % size:
                return f"attention has {heads} {what}, which do not divide by {size} for {role.value}"
    if role.dense is Role.RING and query[-2] != key[-2]:
        return f"attention has {query[-2]} queries and {key[-2]} keys, and ring attention needs equal numbers of both"
    return ""
