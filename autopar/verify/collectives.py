"""``autopar verify --collectives``: checks without a GPU whether a model's programs can hang or send wrong bytes under NCCL.

It records every rank of every kind of plan (``autopar.verify.recording``) and checks the traces under NCCL's rules
(``autopar.checks.nccl``). A user's plan is recorded at its own sizes and without values; if it has many devices, only a sample of ranks is
recorded, which represent all others (``checks.nccl.distinct``).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autopar.checks.nccl.distinct import Grid, check
from autopar.checks.nccl.findings import FAILED, CollectiveFinding, unaligned
from autopar.checks.nccl.graph import MODES
from autopar.emit import emit
from autopar.errors import AutoparError, UsageError
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.verify.kinds import kinds
from autopar.verify.mixtures import describe
from autopar.verify.recording import Recorded, Workers, record, record_sizes
from autopar.verify.run import MICROBATCHES, Progress
from autopar.verify.subject import make_subject
from autopar.workload import Workload

ALL_RANKS = 16
"""Maximum number of devices of a plan whose ranks are all recorded."""


@dataclass(frozen=True, slots=True)
class RecordedPlan:
    """One plan: its recorded ranks, the number of their operations, the wall time of recording and checks, and the findings."""

    kind: str
    plan: str
    devices: int
    ranks: tuple[int, ...]
    operations: int
    seconds: float
    findings: tuple[CollectiveFinding, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CollectivesReport:
    """The recorded plans; ``skipped`` has the reasons why kinds are invalid for the model, ``modes`` is the number of NCCL modes tried."""

    model: str
    plans: tuple[RecordedPlan, ...]
    skipped: dict[str, str] = field(default_factory=dict)
    modes: int = len(MODES)

    @property
    def clean(self) -> bool:
        """Whether something was recorded and there are no findings."""
        return bool(self.plans) and not any(plan.findings for plan in self.plans)

    def to_json(self) -> dict[str, Any]:
        return {"clean": self.clean, **asdict(self)}


def verify_collectives(
    workload: Workload, devices: int, *, allow: Collection[str] = (), progress: Progress | None = None
) -> CollectivesReport:
    """Record all ranks of a plan of every kind that is valid for the model, with values in float64.

    Raises:
        UsageError: the model has no values.
        CaptureError: the model can't be exported.
    """
    tell = progress or (lambda what, done, total: None)
    tell("capture", 0, 1)
    count = MICROBATCHES if "microbatch_statistics" in allow else 1
    subject = make_subject(workload.model, workload.batch, workload.loss_fn, name=workload.name, microbatches=count)
    plans, skipped, tried = [], dict[str, str](), kinds(devices)
    with Workers() as workers:
        for done, kind in enumerate(tried):
            tell(kind.name, done, len(tried))
            start_s = time.perf_counter()
            try:
                plan = kind.plan(subject.graph)
            except UsageError as error:
                skipped[kind.name] = error.message
                continue
            try:
                recorded = record(subject.graph, plan, subject.state, subject.batch, workers)
            except AutoparError as error:
                finding = CollectiveFinding(FAILED, error.message, ())
                plans.append(RecordedPlan(kind.name, describe(plan), devices, (), 0, _since(start_s), (finding,)))
                continue
            plans.append(_recorded(kind.name, plan, recorded, recorded.findings(), recorded.notes(), start_s))
    tell("", len(tried), len(tried))
    return CollectivesReport(subject.graph.name, tuple(plans), skipped)


def verify_plan_collectives(graph: Graph, plan: Plan, progress: Progress | None = None) -> CollectivesReport:
    """Record a plan at its real sizes: all ranks if they are at most ``ALL_RANKS``, otherwise a sample that represents all ranks. ``graph``
    is the captured model of the plan.

    Without values, a recording can't show that a result is read before it arrives; the recordings of ``verify_collectives`` can.
    """
    tell = progress or (lambda what, done, total: None)
    start_s = time.perf_counter()
    grid = Grid(plan.pipeline, tuple((axis.name, axis.size) for axis in plan.mesh))
    ranks = list(range(plan.device_count)) if plan.device_count <= ALL_RANKS else grid.samples()
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as folder, Workers() as workers:
        tell("emit", 0, 1)
        emit(graph, plan, folder)
        tell(f"{len(ranks)} ranks", 0, 1)
        shapes = {value.name: (tuple(value.shape), value.dtype) for value in graph.inputs}
        recorded = record_sizes(Path(folder), shapes, ranks, workers)
    complete = len(ranks) == plan.device_count
    findings = recorded.findings() if complete or recorded.failures else tuple(check(recorded.late, grid))
    notes = (
        "recorded without values: whether a result is read too early was not checked",
        *(() if complete else (f"{len(ranks)} of {plan.device_count:,} ranks stand for the others",)),
        *map(str, unaligned(recorded.late)),
    )
    tell("", 1, 1)
    return CollectivesReport(graph.name, (_recorded("the given plan", plan, recorded, findings, notes, start_s),))


def _recorded(
    kind: str,
    plan: Plan,
    recorded: Recorded,
    findings: tuple[CollectiveFinding, ...],
    notes: tuple[str, ...],
    start_s: float,
) -> RecordedPlan:
    operations = sum(len(trace.operations) for trace in recorded.late.values())
    ranks = tuple(sorted(recorded.late))
    return RecordedPlan(kind, describe(plan), plan.device_count, ranks, operations, _since(start_s), findings, notes)


def _since(start_s: float) -> float:
    return round(time.perf_counter() - start_s, 2)
