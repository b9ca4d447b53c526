"""Solves for the cheapest types of a layer class in a role: by elimination if the tables fit, else as a mixed-integer program."""

from __future__ import annotations

from autopar.flow import output_nodes
from autopar.graph import LayerClass, cached_for_graphs
from autopar.ops.operands import is_tensor, shape_of
from autopar.plan import Role
from autopar.rules import candidates
from autopar.rules.padding import padding, round_up
from autopar.rules.table import TABLE
from autopar.shard.eliminate import TableTooLargeError, eliminate
from autopar.shard.milp import solve_milp
from autopar.shard.problem import Problem, boundary, update_type
from autopar.sharding import AxisTypes
from autopar.types import SpmdType


def solve(cls: LayerClass, role: Role, size: int = 2, fixed: tuple[tuple[str, SpmdType], ...] = ()) -> AxisTypes | None:
    """Return the cheapest types for ``cls`` on axes in ``role`` whose sizes multiply to ``size``; ``None`` if infeasible.

    ``fixed`` pins the types of parameters, each by its placeholder's name (a tied weight has one layout in all layers).
    """
    for value in (*cls.activations, *cls.outputs):
        t = boundary(cls, role, value)
        if value.shape and (t is None or (t.dim is not None and value.shape[t.dim] % size)):
            return None
    rules = hash(tuple(TABLE.items()))
    alike = (d for d in range(2, size) if size % d == 0 and _size_key(cls, d, rules) == _size_key(cls, size, rules))
    return _solve(cls, role, next(alike, size), fixed, rules)


@cached_for_graphs(maxsize=4096)
def _size_key(cls: LayerClass, size: int, rules: int) -> tuple[float, ...]:
    """Return the properties of an axis's size on which a ``Problem`` depends: which dims it divides, and how much padding enlarges others.

    Axis sizes with equal results have the same solution, because costs are compared at a reference size.
    """
    groups = padding(cls).counts
    return (*(extent % size == 0 for extent in _extents(cls, rules)), *(round_up(n, size) / n for n in groups))


@cached_for_graphs(maxsize=1024)
def _extents(cls: LayerClass, rules: int) -> tuple[int, ...]:
    """Return the sizes of all dims of the layer's values, and of all letters of its ops."""
    nodes = [node for node in cls.graph.graph.nodes if node.op != "output"]
    dims = {extent for node in nodes if is_tensor(node) for extent in shape_of(node)}
    letters = {c.extent for node in nodes if node.op != "placeholder" for c in candidates(node) if c.letter is not None}
    return tuple(sorted(dims | letters))


@cached_for_graphs(maxsize=4096)
def _solve(
    cls: LayerClass, role: Role, size: int, fixed: tuple[tuple[str, SpmdType], ...], rules: int
) -> AxisTypes | None:
    """Solve. ``rules`` is a hash of the table of rules: the cache must not return solutions from before a rule was registered."""
    if role is Role.DATA:  # these are also the types on the microbatch axis: prefer options that are legal there
        found = _optimum(Problem(cls, role, size, dict(fixed), over_microbatches=True))
        if found is not None:
            return found
    data = solve(cls, Role.DATA, 1) if role.dense in (Role.ULYSSES, Role.RING) else None
    return _optimum(Problem(cls, role, size, dict(fixed), data.produced if data is not None else None))


def _optimum(problem: Problem) -> AxisTypes | None:
    if not problem.feasible:
        return None
    try:
        chosen = eliminate(problem)
    except TableTooLargeError:
        chosen = solve_milp(problem)
    return None if chosen is None else _solution(problem, chosen)


def _solution(problem: Problem, chosen: dict[str, int]) -> AxisTypes:
    cls, role = problem.cls, problem.role
    options = {name: problem.options[name][index] for name, index in chosen.items()}
    loss = {node.name: next(iter(problem.demands[node.name]), options[node.name].result) for node in output_nodes(cls)}
    outputs = tuple(
        boundary(cls, role, value) if value.shape else loss[node.name]
        for node, value in zip(output_nodes(cls), cls.outputs, strict=True)
    )
    return AxisTypes(
        role=role,
        produced={name: option.result for name, option in options.items()},
        needed={name: option.operands for name, option in options.items()},
        outputs=(*(t for t in outputs if t is not None), *(update_type(role) for _ in cls.updates)),
        letter={name: option.letter for name, option in options.items() if option.letter is not None},
        kernel={name: option.kernel for name, option in options.items() if option.kernel is not None},
        cost_s=problem.objective(chosen) * problem.max_cost_s,
    )
