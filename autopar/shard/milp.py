"""Solves ``problem.Problem`` as a mixed-integer program: for graphs whose treewidth is too large for ``eliminate``, and in its tests.

Option c of node v is chosen if x[v,c] = 1; y[v,s,t] = 1 if the value of v is converted from type s to type t::

    choose[v]:      sum_c x[v,c] = 1                                    one option per node
    convert[v,t,e]: sum_s y[v,s,t] >= sum_{c: c needs t at e} x[e,c]    every reader e of v gets the type it needs
    demand[v,t]:    sum_s y[v,s,t] >= 1                                 outputs get their type at the layer's border
    source[v,s,t]:  y[v,s,t] <= sum_{c: c produces s} x[v,c]            conversions start from the type that is produced
    x binary, 0 <= y <= 1
"""

from __future__ import annotations

import math

from ortools.linear_solver import pywraplp

from autopar.shard.problem import Problem
from autopar.types import SpmdType


def solve_milp(problem: Problem) -> dict[str, int] | None:
    """Return the index of each node's option in an optimum that SCIP has proved; ``None`` if the problem is infeasible."""
    solver = pywraplp.Solver.CreateSolver("SCIP")
    assert solver is not None
    objective = solver.Objective()
    objective.SetMinimization()
    x: dict[str, list[pywraplp.Variable]] = {}
    y: dict[tuple[str, SpmdType, SpmdType], pywraplp.Variable] = {}
    for name, options in problem.options.items():
        x[name] = [solver.IntVar(0, 1, f"{name}[{i}]") for i in range(len(options))]
        choose = solver.Constraint(1, 1, f"choose[{name}]")
        for variable, cost in zip(x[name], problem.cost(name), strict=True):
            choose.SetCoefficient(variable, 1)
            objective.SetCoefficient(variable, cost)

    def require(name: str, target: SpmdType, wanted: list[pywraplp.Variable]) -> None:
        row = solver.Constraint(0 if wanted else 1, solver.infinity(), f"convert[{name},{target}]")
        for variable in wanted:
            row.SetCoefficient(variable, -1)
        for source in dict.fromkeys(option.result for option in problem.options[name]):
            cost = problem.conversion_cost(name, source, target)
            if math.isinf(cost):
                continue
            if (name, source, target) not in y:
                made = y[name, source, target] = solver.NumVar(0, 1, f"{name}:{source}->{target}")
                objective.SetCoefficient(made, cost)
                limit = solver.Constraint(-solver.infinity(), 0, f"source[{name},{source},{target}]")
                limit.SetCoefficient(made, 1)
                for option, variable in zip(problem.options[name], x[name], strict=True):
                    if option.result == source:
                        limit.SetCoefficient(variable, -1)
            row.SetCoefficient(y[name, source, target], 1)

    for name, reads in problem.reads.items():
        for reader, index in reads:
            wanted: dict[SpmdType, list[pywraplp.Variable]] = {}
            for option, variable in zip(problem.options[reader], x[reader], strict=True):
                wanted.setdefault(option.operands[index], []).append(variable)
            for target, variables in wanted.items():
                require(name, target, variables)
        for target in problem.demands[name]:
            require(name, target, [])
    parameters = pywraplp.MPSolverParameters()
    # by default, the solver accepts a solution one ten-thousandth above the optimum as optimal
    parameters.SetDoubleParam(pywraplp.MPSolverParameters.RELATIVE_MIP_GAP, 0.0)
    status = solver.Solve(parameters)
    if status == pywraplp.Solver.INFEASIBLE:
        return None
    assert status == pywraplp.Solver.OPTIMAL, f"SCIP ended with status {status}"
    return {name: max(range(len(xs)), key=lambda i: xs[i].solution_value()) for name, xs in x.items()}
