r"""The op-level optimum of one layer on one axis, as a mixed-integer program.

For a layer class, a role (which fixes the types at the layer's border) and an axis of size *n*::

    minimise    sum_{v,c} cost[v,c] x[v,c]  +  sum_{v,s,t} conversion[v,s,t] y[v,s,t]
    subject to  choose[v]:      sum_c x[v,c] = 1                               one candidate per op
                convert[v,t,e]: sum_s y[v,s,t] >= sum_{c: c needs t at e} x[e,c]    every operand e of v is served
                source[v,s,t]:  y[v,s,t] <= sum_{c: c produces s} x[v,c]       and only from what was produced
                x binary, 0 <= y <= 1

* ``c`` runs over ``rules.candidates``: the letter that the axis shards, or replication as I or as R;
* ``y[v,s,t]`` is paid once per value and target type however many operands want it (q, k and v share one all-reduce);
* ``cost`` is the op's compute, divided by *n* where a letter is sharded; for a stored parameter ``BYTE_HELD_S`` per byte held;
* ``conversion`` is the time on the wire, forward plus (where a gradient flows) backward.

The solution names types only, so it serves any mesh whose axes divide ``size``. Times are of a reference device: they
rank alternatives inside one layer, and the price of a plan is computed elsewhere. The LP relaxation is tried first: it was
integral in every case measured; SCIP closes the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

from ortools.linear_solver import pywraplp
from torch import fx

from autopar.graph import LayerClass, Value
from autopar.plan import Role
from autopar.price.roofline import op_cost
from autopar.rules import Candidate, candidates, operands
from autopar.shard.flow import gradient_flow, output_nodes, placeholders
from autopar.sharding import AxisTypes
from autopar.types import Collective, I, P, R, S, SpmdType, conversion

REFERENCE_FLOPS_PER_S = 4e14  # about what a matmul reaches on one H100 in bfloat16
REFERENCE_BYTES_PER_S = 2e12  # device memory, likewise
REFERENCE_LINK_BYTES_PER_S = 2e11  # NVLink all-reduce bandwidth seen on nodes of 8
REFERENCE_AXIS = 8  # the axis size for which compute and wire are weighed
# A parameter byte held costs as much as moving it over the link ten times: its gradient and optimizer state weigh seven
# bytes more, and memory, not time, is what tensor parallelism is bought for. Layouts do not change between 2 and 50 on a
# Llama block; below 2 the embedding is replicated.
BYTE_HELD_S = 10 / REFERENCE_LINK_BYTES_PER_S
# Free conversions still cost a line of program; of equal optima the one with fewer of them is taken.
CONVERSION_S = 1e-12

_WIRE_FACTOR = {
    Collective.NONE: 0.0,
    Collective.LOCAL: 0.0,
    Collective.ALL_REDUCE: 2 * (REFERENCE_AXIS - 1) / REFERENCE_AXIS,
    Collective.ALL_GATHER: (REFERENCE_AXIS - 1) / REFERENCE_AXIS,
    Collective.REDUCE_SCATTER: (REFERENCE_AXIS - 1) / REFERENCE_AXIS,
    Collective.ALL_TO_ALL: (REFERENCE_AXIS - 1) / REFERENCE_AXIS**2,
}
_BACKWARD_FACTOR = 2.0  # a matmul's backward is two matmuls

_Option = Candidate  # a placeholder's options are candidates without operands


@dataclass
class _Model:
    """The program under construction: ``options[node]`` with a variable each, and the operands that read each value."""

    options: dict[str, list[_Option]] = field(default_factory=dict)
    x: dict[str, list[pywraplp.Variable]] = field(default_factory=dict)
    y: dict[tuple[str, SpmdType, SpmdType], pywraplp.Variable] = field(default_factory=dict)


def boundary(role: Role, value: Value) -> SpmdType | None:
    """The type of an activation at a layer's border under ``role``; ``None`` when the value has no such dim.

    Dim 0 is the batch and dim 1 the sequence, which is how every captured layer hands its activations on.
    """
    if role is Role.DATA:
        return S(0) if value.shape else None
    if role is Role.TENSOR_SEQUENCE:
        return S(1) if len(value.shape) >= 3 else None
    return I


@lru_cache(maxsize=4096)
def solve(
    cls: LayerClass, role: Role, size: int = 2, fixed: tuple[tuple[str, SpmdType], ...] = ()
) -> AxisTypes | None:
    """The cheapest types for ``cls`` on axes in ``role`` whose sizes multiply to ``size``; ``None`` if there are none.

    ``fixed`` pins the types of parameters by placeholder name (a tied weight has one layout in all its layers).
    """
    borders = [boundary(role, value) for value in (*cls.activations, *cls.outputs) if value.shape]
    if any(t is None for t in borders):
        return None
    if role is not Role.IDLE and any(
        t is not None and t.dim is not None and value.shape[t.dim] % size
        for value, t in zip([v for v in (*cls.activations, *cls.outputs) if v.shape], borders, strict=True)
    ):
        return None
    flow = gradient_flow(cls)
    for backend in ("GLOP", "SCIP"):
        solver = pywraplp.Solver.CreateSolver(backend)
        assert solver is not None, backend
        model = _build(solver, cls, role, size, dict(fixed), flow, integer=backend == "SCIP")
        if model is None:
            return None
        status = solver.Solve()
        if status == pywraplp.Solver.INFEASIBLE:
            return None
        assert status == pywraplp.Solver.OPTIMAL, (cls.name, role, backend, status)
        integral = all(abs(v.solution_value() - round(v.solution_value())) < 1e-6 for xs in model.x.values() for v in xs)
        if integral:
            return _read(cls, role, model, solver.Objective().Value())
    raise AssertionError("SCIP returned a fractional solution")


def _build(
    solver: pywraplp.Solver,
    cls: LayerClass,
    role: Role,
    size: int,
    fixed: dict[str, SpmdType],
    flow: dict[str, bool],
    integer: bool,
) -> _Model | None:
    model = _Model()
    scale = 1.0 / max(1, _batch(cls))
    weights = {node.name for node in placeholders(cls)[-len(cls.parameters) :]} if cls.parameters else set()
    objective = solver.Objective()
    objective.SetMinimization()
    for node in cls.graph.graph.nodes:
        if node.op == "output":
            continue
        options = _options(cls, node, role, size, fixed)
        if not options:
            return None
        model.options[node.name] = options
        model.x[node.name] = [
            solver.IntVar(0, 1, f"{node.name}[{i}]") if integer else solver.NumVar(0, 1, f"{node.name}[{i}]")
            for i in range(len(options))
        ]
        choose = solver.Constraint(1, 1, f"choose[{node.name}]")
        for option, x in zip(options, model.x[node.name], strict=True):
            choose.SetCoefficient(x, 1)
            objective.SetCoefficient(x, _cost(node, option, node.name in weights, scale))
    for node in cls.graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        for index, operand in enumerate(operands(node)):
            wanted: dict[SpmdType, list[pywraplp.Variable]] = {}
            for option, x in zip(model.options[node.name], model.x[node.name], strict=True):
                wanted.setdefault(option.operands[index], []).append(x)
            weight = 1.0 if operand.name in weights else scale
            for target, xs in wanted.items():
                _serve(solver, model, operand, target, xs, flow[operand.name], weight)
    for node, value in zip(output_nodes(cls), cls.outputs, strict=True):
        if value.shape:
            target = boundary(role, value)
            assert target is not None
            _serve(solver, model, node, target, [], flow[node.name], scale)
        else:
            _loss(solver, model, node, role)
    return model


def _serve(
    solver: pywraplp.Solver,
    model: _Model,
    value: fx.Node,
    target: SpmdType,
    wanted: list[pywraplp.Variable],
    gradient: bool,
    weight: float,
) -> None:
    """Rows ``convert`` and ``source``: ``value`` is to be had as ``target`` if one of ``wanted`` is chosen (or always, if empty)."""
    row = solver.Constraint(0 if wanted else 1, solver.infinity(), f"convert[{value.name},{target}]")
    for x in wanted:
        row.SetCoefficient(x, -1)
    shape = tuple(value.meta["val"].shape)
    for source in {option.result for option in model.options[value.name]}:
        pair = conversion(source, target)
        if pair is None or (target.dim is not None and shape[target.dim] % 2 and shape[target.dim] == 1):
            continue
        key = (value.name, source, target)
        if key not in model.y:
            y = solver.NumVar(0, 1, f"{value.name}:{source}->{target}")
            model.y[key] = y
            source_row = solver.Constraint(-solver.infinity(), 0, f"source[{value.name},{source},{target}]")
            source_row.SetCoefficient(y, 1)
            for option, x in zip(model.options[value.name], model.x[value.name], strict=True):
                if option.result == source:
                    source_row.SetCoefficient(x, -1)
            solver.Objective().SetCoefficient(y, _wire(value, source, target, pair, gradient) * weight)
        row.SetCoefficient(model.y[key], 1)


def _loss(solver: pywraplp.Solver, model: _Model, node: fx.Node, role: Role) -> None:
    """The loss starts the backward pass with gradient 1 on every rank, which is right for P and I alone; on data (and
    microbatch) axes it must be a term of the sum."""
    allowed = {P} if role is Role.DATA else {P, I}
    row = solver.Constraint(1, 1, "loss")
    for option, x in zip(model.options[node.name], model.x[node.name], strict=True):
        if option.result in allowed:
            row.SetCoefficient(x, 1)


def _options(
    cls: LayerClass, node: fx.Node, role: Role, size: int, fixed: dict[str, SpmdType]
) -> list[_Option]:
    if node.op != "placeholder":
        return [option for option in candidates(node) if option.letter is None or option.extent % size == 0]
    return [Candidate((), t, None, None, 1) for t in _placeholder_types(cls, node, role, size, fixed)]


def _placeholder_types(
    cls: LayerClass, node: fx.Node, role: Role, size: int, fixed: dict[str, SpmdType]
) -> list[SpmdType]:
    index = placeholders(cls).index(node)
    counts = (len(cls.activations), len(cls.inputs), len(cls.constants), len(cls.scalars), len(cls.parameters))
    kind = next(k for k in range(5) if index < sum(counts[: k + 1]))
    shape = tuple(node.meta["val"].shape)
    if kind == 0:
        t = boundary(role, cls.activations[index])
        assert t is not None
        return [t]
    if kind == 1:
        return [S(0)] if role is Role.DATA and shape else [R, I]
    if kind in (2, 3):
        return [R, I]
    if node.name in fixed:
        return [fixed[node.name]]
    if role is Role.DATA:
        return [R]
    if role is Role.IDLE:
        return [I]
    return [I, *(S(d) for d, extent in enumerate(shape) if extent % size == 0 and extent > 1)]


def _batch(cls: LayerClass) -> int:
    """The global batch: dim 0 of whatever enters; 1 when nothing with dims does."""
    return next((value.shape[0] for value in (*cls.activations, *cls.inputs) if value.shape), 1)


def _bytes(node: fx.Node) -> float:
    value = node.meta["val"]
    return float(math.prod(value.shape) * value.dtype.itemsize) if hasattr(value, "shape") else 0.0


def _cost(node: fx.Node, option: _Option, weight: bool, scale: float) -> float:
    if node.op == "placeholder":
        held = 1 / REFERENCE_AXIS if option.result.sharded else 1.0
        return BYTE_HELD_S * _bytes(node) * held if weight else 0.0
    flops, traffic = op_cost(node)
    seconds = max(flops / REFERENCE_FLOPS_PER_S, traffic / REFERENCE_BYTES_PER_S) * (1 + _BACKWARD_FACTOR)
    return seconds * scale / (REFERENCE_AXIS if option.letter is not None else 1)


def _wire(
    value: fx.Node, source: SpmdType, target: SpmdType, pair: tuple[Collective, Collective], gradient: bool
) -> float:
    if source == target:
        return 0.0
    forward, backward = pair
    factor = _WIRE_FACTOR[forward] + (_WIRE_FACTOR[backward] if gradient else 0.0)
    return CONVERSION_S + factor * _bytes(value) / REFERENCE_LINK_BYTES_PER_S


def _read(cls: LayerClass, role: Role, model: _Model, cost_s: float) -> AxisTypes:
    chosen = {
        name: next(o for o, x in zip(model.options[name], xs, strict=True) if x.solution_value() > 0.5)
        for name, xs in model.x.items()
    }
    outputs = tuple(
        chosen[node.name].result if not value.shape else boundary(role, value)
        for node, value in zip(output_nodes(cls), cls.outputs, strict=True)
    )
    assert all(t is not None for t in outputs)
    return AxisTypes(
        role=role,
        produced={name: option.result for name, option in chosen.items()},
        needed={name: option.operands for name, option in chosen.items()},
        outputs=tuple(t for t in outputs if t is not None),
        letter={name: option.letter for name, option in chosen.items() if option.letter is not None},
        kernel={name: option.kernel for name, option in chosen.items() if option.kernel is not None},
        cost_s=cost_s,
    )
