"""What a pipeline receives into: as many buffers as microbatches are in flight, whatever a stage passes on as it came."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from workers import WorkerPool

from autopar.emit import emit
from autopar.plan import Plan
from autopar.program.pipeline import _ReceiveBuffers
from autopar.run.folder import import_runtime, program_modules
from autopar.search.manual import manual_plan
from autopar.verify import kind
from autopar.verify.case import check_plan
from autopar.verify.subject import Subject, make_subject


class Skip(nn.Module):
    """The first layer's result is read again behind all blocks: stages between pass a view of it on, and a view of its gradient back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        x = y = self.first(x)
        for i, block in enumerate(self.blocks):
            y = y + torch.tanh(block(y))
            x = x.unsqueeze(-1) if i % 2 == 0 else x.squeeze(-1)
        return self.last(y * x)


SCHEDULES: list[dict[str, Any]] = [
    {"pipeline": 4, "microbatches": 8, "schedule": "1f1b"},
    {"pipeline": 4, "microbatches": 8, "schedule": "gpipe"},
    {"pipeline": 2, "chunks": 3, "microbatches": 16, "schedule": "interleaved-1f1b"},
    {"pipeline": 2, "chunks": 3, "microbatches": 16, "schedule": "zero-bubble"},
    {"pipeline": 2, "chunks": 2, "microbatches": 16, "schedule": "zbv"},
    {"pipeline": 2, "chunks": 2, "microbatches": 16, "schedule": "dualpipev"},
]


def of_skip(schedule: dict[str, Any]) -> tuple[Subject, Plan]:
    torch.manual_seed(0)
    batch = (torch.randn(16, 8, dtype=torch.float64), torch.randn(16, 8, dtype=torch.float64))
    subject = make_subject(Skip(), batch, nn.functional.mse_loss)
    return subject, kind("a pipeline", **schedule).plan(subject.graph)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule["schedule"])
def test_more_microbatches_than_buffers(schedule: dict[str, Any], request: pytest.FixtureRequest) -> None:
    subject, plan = of_skip(schedule)
    workers = request.getfixturevalue(f"workers{schedule['pipeline']}")
    assert check_plan(subject, plan, workers, typed=False).error.value <= 1e-9


def sent(folder: str, batch: dict[str, Tensor]) -> dict[str, int]:
    """In a worker: of two steps, how many gradients were passed on as they came, how many left as views of a receive buffer, the largest
    number of a stage's gradients that were being sent, and the sends that were left."""
    seen = {"passed on": 0, "views": 0, "sending": 0, "left": 0}
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        trainer = runtime.Trainer(program, runtime.start(program, device="cpu", timeout_s=60))

    def watch(stage: Any) -> None:
        outside, started = stage._outside_buffers, stage._started

        def outside_buffers(microbatch: int, gradient: Any) -> Any:
            left = outside(microbatch, gradient)
            buffers = [info.buffer for infos in stage.grad_recv_info.values() for info in infos]
            addresses = {buffer.untyped_storage().data_ptr() for buffer in buffers if isinstance(buffer, Tensor)}
            seen["passed on"] += left is not gradient
            seen["views"] += isinstance(left, Tensor) and left.untyped_storage().data_ptr() in addresses
            return left

        def started_and_counted(*args: Any) -> Any:
            result = started(*args)
            seen["sending"] = max(seen["sending"], sum(kind == "B" for kind, _ in stage._sending))
            return result

        stage._outside_buffers, stage._started = outside_buffers, started_and_counted

    stages = trainer._schedule._stages
    for stage in stages:
        watch(stage)
    for _ in range(2):
        trainer.step(batch)
    seen["left"] = sum(len(stage._sending) for stage in stages)
    return seen


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule["schedule"])
def test_nothing_is_sent_from_a_receive_buffer(
    schedule: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    subject, plan = of_skip(schedule)
    emit(subject.graph, plan, tmp_path, state=subject.state)
    workers = request.getfixturevalue(f"workers{schedule['pipeline']}")
    ranks = workers.run("test_run_pipeline:sent", str(tmp_path), subject.batch)
    later = schedule["microbatches"] - 1  # the first one has buffers of its own
    assert sum(rank["passed on"] for rank in ranks) >= 2 * later
    assert all(rank["views"] == rank["left"] == 0 and rank["sending"] <= 2 for rank in ranks), ranks


def test_what_is_received_takes_the_place_of_a_microbatch_that_is_done() -> None:
    received = _ReceiveBuffers(2)
    for microbatch in range(5):
        received[microbatch] = f"made for {microbatch}"
    assert [received[i] for i in range(5)] == [f"made for {i % 2}" for i in range(5)]


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.linear(x).tanh()


class _CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Counting() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return x


def test_a_stage_may_read_a_buffer_that_another_writes(workers2: WorkerPool) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64))
    subject = make_subject(_CalledTwice().double(), batch, nn.functional.mse_loss)
    for cuts in range(1, len(subject.graph.layers)):
        plan = manual_plan(subject.graph, pipeline=2, cuts=(cuts,), schedule="gpipe")
        assert check_plan(subject, plan, workers2).error.exact


def test_an_update_below_the_last_digit_of_a_parameter_is_no_error(workers2: WorkerPool) -> None:
    """Gradients of 1e-20 are compared by themselves; in the new values of parameters of about 1 they do not show."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    batch = (torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64))
    subject = make_subject(model, batch, lambda out, target: 1e-20 * nn.functional.mse_loss(out, target))
    assert check_plan(subject, manual_plan(subject.graph, data=2), workers2).error.exact
