"""Verifies one plan of one model: emits its program, type-checks it, runs it on real processes, compares with one device."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from autopar.checks.collectives import check_collectives
from autopar.checks.types import check_program
from autopar.emit import emit
from autopar.measure import EXACT, Error, compare
from autopar.plan import Plan
from autopar.run.pool import WorkerPool
from autopar.verify.remote import UPDATE_LR
from autopar.verify.subject import Subject


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """The error of a step (``compare_step``), and the number of type-checked stages (0: not requested). ``attacked`` is the error
    of loss and gradients on the batch of an attack, if there was one."""

    error: Error
    stages_typed: int
    attacked: Error | None = None


RUNNING_S = 60
"""Timeout of a program in seconds."""
COMPILING_S = 600
"""Timeout of a program that ``torch.compile`` compiles: on a CPU, a C++ compiler runs for every kernel."""


def check_plan(
    subject: Subject, plan: Plan, pool: WorkerPool, *, typed: bool = True, attack: Subject | None = None
) -> PlanOutcome:
    """Emit, type-check and run the plan's program, and compare it with the subject, then with ``attack``, a subject of the same graph.

    Raises:
        UsageError: the plan is invalid for the model.
        ProgramError: the program's collectives are not those that were priced, or it does not type-check.
        LaunchError: a rank raised, died or hung.
    """
    assert plan.device_count == pool.count, (plan.device_count, pool.count)
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as folder:
        program, plan = (
            Path(folder) / "program",
            replace(plan, nvme_path=folder),
        )  # this machine lacks the plan's drives
        check_collectives(emit(subject.graph, plan, program))
        stages = check_program(program) if typed else 0
        state = Path(folder) / "initial.pt"
        torch.save(subject.state, state)
        files = (str(program), str(state))
        limit_s = COMPILING_S if any(layer.strategy.options.compiled for layer in plan.layers) else RUNNING_S
        if attack is None:
            results = pool.run("autopar.verify.remote:gradients", *files, subject.batch, timeout_s=limit_s)
            return PlanOutcome(compare_step(subject, *results[0]), stages)
        both = (subject.batch, attack.batch)
        first, second = pool.run("autopar.verify.remote:gradients_twice", *files, *both, timeout_s=limit_s)[0]
    loss, gradients = second
    return PlanOutcome(compare_step(subject, *first), stages, _compare(attack, loss, gradients))


def compare_step(subject: Subject, loss: float, gradients: dict[str, Tensor], after: dict[str, Tensor]) -> Error:
    """Return the error of a step: of loss, gradients, updates of parameters, buffers, and parameters without a gradient, which no update
    moves, the first inexact one, or else the largest.

    The optimizer is plain SGD, so the update shows the gradient that reached the parameter through ZeRO's sharding and gathering.
    """
    error = _compare(subject, loss, gradients)
    moved = {n: _update(subject.state[n], after[n], g) for n, g in subject.gradients.items() if n in after}
    update = _compare(subject, loss, moved)
    written = compare(0.0, {n: after[n] for n in subject.buffers}, 0.0, subject.buffers, same_nonfinite=True)
    still = _unmoved(subject)
    moved_anyway = compare(0.0, {n: after[n] for n in still if n in after}, 0.0, still, same_nonfinite=True)
    errors = (
        error,
        Error(update.value, f"the update of {update.where}"),
        written,
        Error(moved_anyway.value, f"the value of {moved_anyway.where} after the update"),
    )
    return next((e for e in errors if not e.value <= EXACT), max(errors, key=lambda e: e.value))


def _unmoved(subject: Subject) -> dict[str, Tensor]:
    """Return the values of the parameters that have no gradient, under each of their names, without those that forward writes."""
    names = [p.names for p in subject.graph.parameters.values()]
    frozen = {n for tied in names if not subject.gradients.keys() & {*tied} for n in tied}
    return {n: t for n, t in subject.state.items() if n in frozen and n not in subject.buffers}


def _compare(subject: Subject, loss: float, gradients: dict[str, Tensor]) -> Error:
    return compare(loss, gradients, subject.loss, subject.gradients, rounding=subject.rounding)


def _update(before: Tensor, after: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient that an SGD update implies, or ``gradient`` where the difference is below the parameter's rounding error: smaller
    updates are rounded off (a loss near zero has gradients of 1e-20)."""
    computed = (before - after) / UPDATE_LR
    rounding_error = torch.maximum(before.abs(), after.abs()).double() * torch.finfo(torch.float64).eps / UPDATE_LR
    return torch.where((computed - gradient).abs() <= rounding_error, gradient, computed)
