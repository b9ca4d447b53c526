"""``verify``: runs a model's plans, compares them with eager PyTorch on one device, and reports the differences."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from autopar.checks.types import check_program
from autopar.emit import emit
from autopar.errors import AutoparError, LaunchError, ProgramError, UsageError
from autopar.graph import Graph
from autopar.measure import Error
from autopar.plan import MICROBATCH_STATISTICS, LayerPlan, Plan
from autopar.plan_files import check_model, read_plan
from autopar.run.pool import WorkerPool
from autopar.search.options import check_allowed
from autopar.techniques import LAYER_DEVIATIONS
from autopar.techniques.sync import SYNC
from autopar.units import size
from autopar.verify.attacks import OWN_BUGS, Attacks, attack
from autopar.verify.case import check_plan
from autopar.verify.kinds import kinds
from autopar.verify.locate import Difference, locate
from autopar.verify.mixtures import describe
from autopar.verify.report import Attacked, CheckedPlan, Failure, Report
from autopar.verify.shrink import shrink_plan
from autopar.verify.subject import Subject, make_subject
from autopar.workload import Workload

MEMORY_BYTES = 8 * 10**9
"""Default memory limit of a verification: half of a laptop's memory."""

MICROBATCHES = 2
"""Number of microbatches for a model whose microbatches are treated as separate batches, unless its own plan sets it."""

Progress = Callable[[str, int, int], None]
"""Called with the name of the current check, the number of finished plans, and the number of plans."""

PlanOf = Callable[[Graph], Plan]


def verify(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[..., Any] | None = None,
    *,
    devices: int = 2,
    plan: Plan | str | Path | None = None,
    memory_limit_bytes: int = MEMORY_BYTES,
    allow: Collection[str] = (),
    progress: Progress | None = None,
) -> Report:
    """Compare the model's distributed programs with eager PyTorch on one device, in float64: the loss, every gradient, one SGD update and
    the buffers that the model writes.

    The model runs at full size in up to ``devices`` local gloo processes, with dropout off. Without ``plan``, it checks one plan of every
    kind of parallelism that is valid for the model. With ``plan``, it checks only that plan: if it is for more devices, its axes are shrunk
    to fit; if it has techniques that change the numbers, it runs without them. In both cases the original plan's program is only
    type-checked. Every program is type-checked.

    Plans with local SGD or stale gradients aren't exact: only their first step is compared with one device, as the report says.

    With ``allow={"microbatch_statistics"}``, or a plan made with it, a model that couples the examples of a batch is run in
    microbatches and compared with one device that accumulates the mean over the same microbatches.

    First, the captured graph is compared on one device, with adversarial batches derived from the user's batch and in other modes
    (``autopar.verify.attacks``); each plan also runs with one of those batches.

    Args:
        model: a module on the CPU, see ``compile``; it is copied, not changed.
        batch: one global batch, with values.
        loss_fn: see ``compile``.

    Raises:
        UsageError: the model is too large for ``memory_limit_bytes``, has no values, draws random numbers other than dropout's, or
            doesn't match ``plan``; or this process has a process group.
        CaptureError: the model can't be exported.
    """
    return verify_workload(
        Workload(model, batch, loss_fn),
        devices,
        plan=read_plan(plan) if isinstance(plan, str | Path) else plan,
        memory_limit_bytes=memory_limit_bytes,
        allow=allow,
        progress=progress,
    )


def verify_workload(
    workload: Workload,
    devices: int,
    *,
    plan: Plan | None = None,
    real: Graph | None = None,
    memory_limit_bytes: int = MEMORY_BYTES,
    allow: Collection[str] = (),
    progress: Progress | None = None,
) -> Report:
    """Run ``verify`` on a workload. If the workload is a shrunken model, ``real`` is the captured full-size model, which
    ``plan`` fits."""
    if dist.is_initialized():
        raise UsageError(
            "this process has a process group, and verification starts its own processes",
            "call it in a script that is not started by torchrun",
        )
    if devices < 1:
        raise UsageError(f"{devices} processes cannot run a program", "devices must be at least 1")
    model, batch, loss_fn = workload.model, workload.batch, workload.loss_fn
    check_size(model, devices, memory_limit_bytes)
    check_allowed(allow)
    if plan is not None and real is None:
        workload.check_plan(plan)
    tell = progress or (lambda what, done, total: None)
    tell("capture", 0, 1)
    subject = make_subject(
        model, batch, loss_fn, name=workload.name, microbatches=_accumulated_microbatches(plan, real, allow)
    )
    if plan is not None and real is None:
        check_model(plan, subject.graph)
    tell("attacks on one device", 0, 1)
    run = _Run(subject, devices, attack(model, loss_fn, subject))
    plans: list[tuple[str, PlanOf]] = [(kind.name, kind.plan) for kind in kinds(devices)]
    if plan is not None:
        small = shrink_plan(_exact(plan), subject.graph, devices)
        for name in (name for name in plan.allow if name in LAYER_DEVIATIONS):
            run.notes.append(f"numbers were compared under a plan without {name}")
        plans = [("the given plan", lambda graph: small)]
        run.reference = SYNC.compared(small.sync)
        if small is not plan:
            run.check_types(plan, real or subject.graph, small.device_count)
    with run.pools:
        for number, (kind, make) in enumerate(plans):
            tell(kind, number, len(plans))
            run.check(kind, make)
    tell("", len(plans), len(plans))
    return run.report()


def _exact(plan: Plan) -> Plan:
    """Return the plan with inexact techniques reset to their defaults."""
    if not set(plan.allow) & set(LAYER_DEVIATIONS):
        return plan

    def exact(layer: LayerPlan) -> LayerPlan:
        inexact = [t for t, value in layer.strategy.options.chosen if t.mode(value).deviation]
        return replace(layer, strategy=layer.strategy.with_options(**{t.name: t.default for t in inexact}))

    allow = tuple(name for name in plan.allow if name not in LAYER_DEVIATIONS)
    return replace(plan, layers=tuple(map(exact, plan.layers)), allow=allow)


def _accumulated_microbatches(plan: Plan | None, real: Graph | None, allow: Collection[str]) -> int:
    """Return the number of microbatches that are treated as separate batches if the model couples the examples of a batch."""
    if plan is None:
        return MICROBATCHES if MICROBATCH_STATISTICS in allow else 1
    if MICROBATCH_STATISTICS not in plan.allow:
        return 1
    return plan.microbatches if real is None else MICROBATCHES


def check_size(model: nn.Module, devices: int, memory_limit_bytes: int) -> None:
    """Raise ``UsageError`` if verifying the model takes more than ``memory_limit_bytes``.

    The estimate has parameters and gradients in float64: once for eager PyTorch, once for data sent to workers, and once for each process.
    """
    elements = sum(p.numel() for p in model.parameters())
    needed = elements * 8 * (2 + 2 + 2 * devices)
    if needed > memory_limit_bytes:
        raise UsageError(
            f"verifying {elements:,} parameters in float64 on {devices} processes takes about {size(needed)}, "
            f"and {size(memory_limit_bytes)} are allowed",
            "give a smaller model: fewer and narrower layers have the same structure; or allow more memory (--memory-limit)",
        )


@dataclass
class _Run:
    """Checks plans and collects their results."""

    subject: Subject
    devices: int
    attacks: Attacks
    pools: ExitStack = field(default_factory=ExitStack)
    reference: str = ""
    _pool: dict[int, WorkerPool] = field(default_factory=dict)
    _checked: list[CheckedPlan] = field(default_factory=list)
    _failures: list[Failure] = field(default_factory=list)
    _skipped: dict[str, str] = field(default_factory=dict)
    _typechecked: int = 0
    notes: list[str] = field(default_factory=list)

    def check(self, kind: str, make: PlanOf) -> None:
        try:
            plan = make(self.subject.graph)
        except UsageError as error:
            self._skipped[kind] = error.message
            return
        if plan.device_count not in self._pool:
            self._pool[plan.device_count] = self.pools.enter_context(WorkerPool(plan.device_count))
        pool = self._pool[plan.device_count]
        name, attacked = self._next_attack()
        try:
            outcome = check_plan(self.subject, plan, pool, attack=attacked)
        except (AutoparError, *OWN_BUGS) as error:
            # also autopar's own bugs: the report names the plan that caused them
            self._fail(kind, plan, _sentence(error), None)
            return
        self._typechecked += 1
        other = outcome.attacked or Error(0.0, "")
        self._checked.append(
            CheckedPlan(
                kind, describe(plan), outcome.error.value, outcome.error.where, outcome.stages_typed, name, other.value
            )
        )
        if not outcome.error.exact:
            message = f"{outcome.error.where} is off by {outcome.error.value:.2g}"
            self._fail(kind, plan, message, self._locate(plan, pool, outcome.error))
        elif not other.exact:
            message = f"with {name}: {other.where} is off by {other.value:.2g}"
            self._fail(kind, plan, message, self._locate(plan, pool, other, attacked))

    def _next_attack(self) -> tuple[str, Subject | None]:
        """Return the next attack's name and subject, round-robin; ``""`` and ``None`` if there is no attack that plans can run."""
        names = list(self.attacks.subjects)
        if not names:
            return "", None
        name = names[len(self._checked) % len(names)]
        return name, self.attacks.subjects[name]

    def check_types(self, plan: Plan, graph: Graph, processes: int) -> None:
        """Type-check the program of the full-size plan, and note that numbers were compared on ``processes`` processes only."""
        with tempfile.TemporaryDirectory(prefix="autopar-verify-") as folder:
            try:
                emit(graph, plan, folder)
                stages = check_program(folder)
            except ProgramError as error:
                self._fail("the plan at full size", plan, error.message, None)
                return
        self._typechecked += 1
        self.notes.append(
            f"the program for the plan's {plan.device_count} devices type-checks ({stages} stages); its numbers were compared on "
            f"{processes} processes"
        )

    def _locate(self, plan: Plan, pool: WorkerPool, error: Error, subject: Subject | None = None) -> Difference | None:
        try:
            return locate(subject or self.subject, plan, pool, error)
        except LaunchError:
            return None  # the report has the error without its location

    def _fail(self, kind: str, plan: Plan, message: str, first: Difference | None) -> None:
        self._failures.append(Failure(kind, describe(plan), message, first))

    def report(self) -> Report:
        graph = self.subject.graph
        notes = ["dropout was off, in both: it is random"] if self.subject.dropout else []
        if graph.accumulated > 1:
            notes.append(
                f"one device accumulated over {graph.accumulated} microbatches, as microbatch_statistics allows: the mean of their "
                f"losses is not the loss of the full batch ({graph.unmicrobatchable})"
            )
        return Report(
            model=graph.name,
            devices=self.devices,
            checked=tuple(self._checked),
            failures=(*self._attack_failures(), *self._failures),
            skipped=self._skipped,
            typechecked=self._typechecked,
            replicated_ops=graph.replicated,
            notes=(*notes, *self.notes),
            attacks=tuple(Attacked(name, error.value, error.where) for name, error in self.attacks.tried.items()),
            attacks_skipped=self.attacks.skipped,
            reference=self.reference,
        )

    def _attack_failures(self) -> list[Failure]:
        wrong = {
            name: f"the captured graph is not the model: {error.where} is off by {error.value:.2g}"
            for name, error in self.attacks.tried.items()
            if not error.exact
        }
        return [Failure(name, "one device", message) for name, message in (wrong | self.attacks.broken).items()]


def _sentence(error: Exception) -> str:
    if isinstance(error, AutoparError):
        return error.message
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
