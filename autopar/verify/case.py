"""One plan of one model, verified: emit its program, type-check it, run it on real processes, compare with one device."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from autopar.check import check_program
from autopar.emit import emit
from autopar.measure import Error, compare
from autopar.plan import Plan
from autopar.run.pool import WorkerPool
from autopar.structure import check_structure
from autopar.verify.subject import Subject


@dataclass(frozen=True, slots=True)
class Outcome:
    """The largest error over the loss, every gradient and every buffer after a step, and the number of stages that type-check (0: not
    asked for)."""

    error: Error
    stages_typed: int


def check_plan(subject: Subject, plan: Plan, pool: WorkerPool, *, typed: bool = True) -> Outcome:
    """Emit, type-check and run the plan's program, and compare it with the subject.

    Raises:
        UsageError: the model does not admit the plan.
        ProgramError: the program is not what was priced, or does not type-check.
        LaunchError: a rank raised, died or hung.
    """
    assert plan.device_count == pool.count, (plan.device_count, pool.count)
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as folder:
        program = Path(folder) / "program"
        check_structure(emit(subject.graph, plan, program))
        stages = check_program(program) if typed else 0
        state = Path(folder) / "initial.pt"
        torch.save(subject.state, state)
        answers = pool.run("autopar.verify.remote:gradients", str(program), str(state), subject.batch)
    loss, gradients, state_after = answers[0]
    error = compare(loss, gradients, subject.loss, subject.gradients)
    written = compare(loss, {name: state_after[name] for name in subject.buffers}, loss, subject.buffers)
    return Outcome(max(error, written, key=lambda one: one.value), stages)
