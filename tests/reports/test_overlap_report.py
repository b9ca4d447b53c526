"""The report of overlap: its page, its spans, and that each patch takes its overlap out and changes nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import overlap_page
import pytest
import torch
from overlap import How, cases, check_losses
from overlap_cases import FEATURES, MATCHES, Feature
from overlap_trace import common, communication_share, hidden_share, length_s, merged, spans
from torch import nn
from torch.distributed.fsdp import FSDPModule
from workers import WorkerPool

from autopar.bench.contest import BenchmarkSession
from autopar.capture import capture
from autopar.emit import emit
from autopar.errors import ProgramError
from autopar.run.folder import import_runtime, program_modules
from autopar.search.manual import manual_plan
from autopar.shard import annotate

pytestmark = pytest.mark.slow  # a report is no part of the product


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(2, 8, 8, dtype=torch.float64)
    return x, y


def trained(folder: str) -> dict[str, Any]:
    """In a worker: losses and gradients of two steps, and whether the program has each kind of overlap."""
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        trainer = runtime.Trainer(program, runtime.start(program, device="cpu"))
        inputs = dict(zip(("x", "targets"), batch(), strict=True))
        return {
            "losses": [trainer.step(inputs) for _ in range(2)],
            "gradients": trainer.gradients(),
            "early": len(trainer._reductions._early),
            "roots": sum(isinstance(stage, FSDPModule) for stage in trainer.stages.values()),
            "overlapped": (Path(folder) / "runtime" / "kernels_overlap.py").is_file(),
            "halved": (Path(folder) / "runtime" / "halves.py").is_file(),
            "schedule": type(getattr(trainer._schedule, "_schedule", None)).__name__,
        }


OVERLAPS: dict[str, tuple[str, Any, Any]] = {  # what of ``trained`` tells, with and without
    "zero0": ("early", 4, 0),
    "zero1": ("early", 4, 0),
    "zero3": ("roots", 1, 0),
    "tensor": ("overlapped", True, False),
    "halves": ("halved", True, False),
    "1f1b": ("schedule", "Schedule1F1B", "Waiting"),
    "zero-bubble": ("schedule", "ScheduleInterleavedZeroBubble", "Schedule1F1B"),
}


@pytest.mark.parametrize("feature", [f for f in FEATURES if f.nodes == 2], ids=lambda feature: feature.kind)
def test_a_patch_takes_the_overlap_out_and_no_bit_changes(feature: Feature, workers2: WorkerPool, tmp_path: Path):
    torch.manual_seed(0)
    graph = annotate(capture(Steps().double(), batch(), nn.functional.mse_loss))
    emit(graph, manual_plan(graph, **feature.pins), tmp_path / "with")
    emit(graph, manual_plan(graph, **{**feature.pins, **feature.pins_without}), tmp_path / "without")
    feature.change(tmp_path / "without")
    some, others = (workers2.run("test_overlap_report:trained", str(tmp_path / name)) for name in ("with", "without"))
    what, has, has_not = OVERLAPS[feature.kind]
    for one, other in zip(some, others, strict=True):
        assert (one[what], other[what]) == (has, has_not)
        assert one["losses"][0] > one["losses"][1]
        if feature.kind == "halves":  # which add up the gradients of two halves
            torch.testing.assert_close(one["losses"], other["losses"], rtol=1e-12, atol=0)
            torch.testing.assert_close(one["gradients"], other["gradients"], rtol=1e-9, atol=1e-15)
            continue
        assert one["losses"] == other["losses"]
        for name, gradient in one["gradients"].items():
            assert torch.equal(gradient, other["gradients"][name]), name


def test_losses_that_differ_in_a_bit_are_not_compared():
    session = object.__new__(BenchmarkSession)
    session.losses = {"with": [1.0, 0.5], "without": [1.0, 0.5], "ddp 2": [1.0, 0.6]}
    found = check_losses(session, "ddp 2", in_bits=True)
    assert found == {"steps": 2, "without_difference": 0, "by_hand_difference": pytest.approx(0.1 / 0.6)}
    session.losses["without"][1] += 2**-53
    with pytest.raises(ProgramError, match="step 1"):
        check_losses(session, "ddp 2", in_bits=True)
    assert check_losses(session, "ddp 2", in_bits=False)["without_difference"] == pytest.approx(2**-52)
    session.losses["without"][1] += 1e-4
    with pytest.raises(ProgramError, match="step 1"):
        check_losses(session, "ddp 2", in_bits=False)


def test_spans_of_a_step():
    """Between the barriers: ops with Python between them are one span; a barrier and a receive are no communication."""
    found = spans(
        [
            ("gloo:barrier", 0.0, 1.0),
            ("aten::mm", 0.9, 1.5),
            ("aten::add", 1.50005, 2.0),
            ("aten::mm", 3.0, 4.0),
            ("gloo:all_reduce", 1.75, 2.5),
            ("gloo:send", 2.25, 2.75),
            ("gloo:recv", 1.0, 5.0),
            ("c10d::allreduce_", 1.75, 1.8),
            ("gloo:barrier", 5.0, 6.0),
        ]
    )
    assert found == {"step": [(0.0, 4.0)], "computation": [(0.0, 1.0), (2.0, 3.0)], "communication": [(0.75, 1.75)]}
    assert communication_share([found, found]) == 0.25 and hidden_share([found]) == 0.25


def test_unions_and_intersections():
    assert merged([(2, 3), (0, 1), (0.5, 1.5)]) == [(0, 1.5), (2, 3)]
    assert merged([(0, 1), (1.5, 2)], 0.5) == [(0, 2)]
    assert common([(0, 2), (3, 5)], [(1, 4)]) == [(1, 2), (3, 4)]
    assert length_s([(0, 1), (3, 5)]) == 3


def test_every_case_comes_after_its_link_and_has_programs_to_compare_with():
    found = cases(How(1, 1, 0))
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    assert all(names.index(case.link) < i for i, case in enumerate(found) if case.link)
    for match in MATCHES:
        kinds = {(r.data, r.tensor, r.pipeline) for r in match.choices}
        n = match.nodes
        assert {(n, 1, 1), (1, 1, n)} <= kinds <= {(n, 1, 1), (1, n, 1), (1, 1, n)}
        assert {("1f1b", 1), ("zero-bubble", 1)} <= {(r.schedule, r.chunks) for r in match.choices}
        assert {r.bucket_mb for r in match.choices if r.sharding == "ddp" and r.data == n} == {4, 25}


def test_the_page_is_what_was_measured():
    assert overlap_page.PAGE.read_text() == overlap_page.page(overlap_page.read())
