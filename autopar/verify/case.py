"""One plan of one model, verified: emit its program, type-check it, run it on real processes, compare with one device."""

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
    """The largest error over the loss, every gradient and every buffer after a step, and the number of stages that type-check (0: the
    check was not requested). ``attacked`` is the error of the loss and the gradients of another batch, if one was given."""

    error: Error
    stages_typed: int
    attacked: Error | None = None


RUNNING_S = 60
"""Seconds after which a program that has not answered is taken to hang."""
COMPILING_S = 600
"""The same for a program whose layers ``torch.compile`` compiles first: on a CPU, a C++ compiler runs for every kernel."""


def check_plan(
    subject: Subject, plan: Plan, pool: WorkerPool, *, typed: bool = True, attack: Subject | None = None
) -> PlanOutcome:
    """Emit, type-check and run the plan's program, and compare it with the subject, then with ``attack``, the graph with another batch.

    Raises:
        UsageError: the model does not admit the plan.
        ProgramError: the program differs from the priced one, or does not type-check.
        LaunchError: a rank raised, died or hung.
    """
    assert plan.device_count == pool.count, (plan.device_count, pool.count)
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as folder:
        program, plan = (
            Path(folder) / "program",
            replace(plan, nvme_path=folder),
        )  # of the drives that it is for, none are here
        check_collectives(emit(subject.graph, plan, program))
        stages = check_program(program) if typed else 0
        state = Path(folder) / "initial.pt"
        torch.save(subject.state, state)
        files = (str(program), str(state))
        limit_s = COMPILING_S if any(layer.strategy.options.compiled for layer in plan.layers) else RUNNING_S
        if attack is None:
            answers = pool.run("autopar.verify.remote:gradients", *files, subject.batch, timeout_s=limit_s)
            return PlanOutcome(compare_step(subject, *answers[0]), stages)
        both = (subject.batch, attack.batch)
        first, second = pool.run("autopar.verify.remote:gradients_twice", *files, *both, timeout_s=limit_s)[0]
    loss, gradients = second
    return PlanOutcome(compare_step(subject, *first), stages, _compare(attack, loss, gradients))


def compare_step(subject: Subject, loss: float, gradients: dict[str, Tensor], after: dict[str, Tensor]) -> Error:
    """The largest error of a step: the loss, every gradient, every buffer, and the update of every parameter.

    The update is of plain SGD, so it gives the gradient again, after the optimizer and ZeRO's sharding and gathering.
    """
    error = _compare(subject, loss, gradients)
    moved = {n: _update(subject.state[n], after[n], g) for n, g in subject.gradients.items() if n in after}
    update = _compare(subject, loss, moved)
    written = compare(loss, {n: after[n] for n in subject.buffers}, loss, subject.buffers)
    errors = (error, Error(update.value, f"the update of {update.where}"), written)
    return next((e for e in errors if not e.value <= EXACT), max(errors, key=lambda e: e.value))


def _compare(subject: Subject, loss: float, gradients: dict[str, Tensor]) -> Error:
    return compare(loss, gradients, subject.loss, subject.gradients, rounding=subject.rounding)


def _update(before: Tensor, after: Tensor, gradient: Tensor) -> Tensor:
    """The gradient, computed from the update; ``gradient`` itself if the two differ by less than the last digit of the parameter, which
    an update cannot show: a loss near zero has gradients of 1e-20."""
    found = (before - after) / UPDATE_LR
    digit = torch.maximum(before.abs(), after.abs()).double() * torch.finfo(torch.float64).eps / UPDATE_LR
    return torch.where((found - gradient).abs() <= digit, gradient, found)
