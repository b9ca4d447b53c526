"""Why a layer does not admit a role, in words."""

from __future__ import annotations

from autopar.graph import Graph
from autopar.plan import Role
from autopar.rules.operands import op_name
from autopar.shard.problem import Problem, boundary


def refusal(graph: Graph, layer: int, role: Role, size: int) -> str:
    """The reason why layer ``layer`` (an index) has no solution in ``role`` on ``size`` devices."""
    name = graph.layers[layer].name
    cls = graph.classes[graph.layers[layer].cls]
    for value in (*cls.activations, *cls.outputs):
        t = boundary(cls, role, value)
        if value.shape and t is None:
            return f"{name}: the activation {value.name} {list(value.shape)} has no dim for {role.value} to cut"
        if t is not None and t.dim is not None and value.shape[t.dim] % size:
            return (
                f"{name}: dim {t.dim} of the activation {value.name} {list(value.shape)} does not divide by {size} "
                f"for {role.value}"
            )
    problem = Problem(cls, role, size, {})
    for node, options in problem.options.items():
        if not options:
            found = problem.nodes[node]
            shape = list(getattr(found.meta.get("val"), "shape", ()))
            what = op_name(found.target) if found.op == "call_function" else "the value"
            return f"{name}: {what} {node} {shape} has no types for {role.value} on {size} devices"
    return f"{name}: no types of its ops go together for {role.value} on {size} devices"
