"""What a pipeline receives into: as many buffers as microbatches are in flight, whatever a stage passes on as it came."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from workers import WorkerPool

from autopar.program.pipeline import _ReceiveBuffers
from autopar.search.manual import manual_plan
from autopar.verify import kind
from autopar.verify.case import check_plan
from autopar.verify.subject import make_subject


class Skip(nn.Module):
    """The first layer's result is read again behind all blocks: stages between pass it on, and its gradient back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = y = self.first(x)
        for block in self.blocks:
            y = y + torch.tanh(block(y))
        return self.last(y * x)


@pytest.mark.parametrize(
    "schedule",
    [
        {"pipeline": 4, "microbatches": 8, "schedule": "1f1b"},
        {"pipeline": 2, "microbatches": 8, "schedule": "gpipe"},
        {"pipeline": 2, "chunks": 3, "microbatches": 16, "schedule": "interleaved-1f1b"},
        {"pipeline": 2, "chunks": 3, "microbatches": 16, "schedule": "zero-bubble"},
        {"pipeline": 2, "chunks": 2, "microbatches": 16, "schedule": "zbv"},
        {"pipeline": 2, "chunks": 2, "microbatches": 16, "schedule": "dualpipev"},
    ],
    ids=lambda schedule: schedule["schedule"],
)
def test_more_microbatches_than_buffers(schedule: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """Also of a model whose stages pass an input and its gradient on as they came."""
    torch.manual_seed(0)
    batch = (torch.randn(16, 8, dtype=torch.float64), torch.randn(16, 8, dtype=torch.float64))
    subject = make_subject(Skip(), batch, nn.functional.mse_loss)
    plan = kind("a pipeline", **schedule).plan(subject.graph)
    workers = request.getfixturevalue(f"workers{schedule['pipeline']}")
    assert check_plan(subject, plan, workers, typed=False).error.value <= 1e-9


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
