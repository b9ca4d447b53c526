"""What a pipeline receives into: as many buffers as microbatches are in flight, whatever a stage passes on as it came."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from workers import WorkerPool

from autopar.program.runtime import _Received
from autopar.verify import kind
from autopar.verify.case import check_plan
from autopar.verify.subject import make_subject


class Skip(nn.Module):
    """The first layer's result is read again behind all blocks: stages between pass it on, and its gradient back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = y = self.first(x)
        for block in self.blocks:
            y = y + torch.tanh(block(y))
        return self.last(y * x)


def test_more_microbatches_than_buffers(workers4: WorkerPool) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(16, 8, dtype=torch.float64), torch.randn(16, 8, dtype=torch.float64))
    subject = make_subject(Skip(), batch, nn.functional.mse_loss)
    plan = kind("pipeline 4", pipeline=4, microbatches=8, schedule="1f1b").plan(subject.graph)
    assert check_plan(subject, plan, workers4, typed=False).error.value <= 1e-9


def test_what_is_received_takes_the_place_of_a_microbatch_that_is_done() -> None:
    received = _Received(2)
    for microbatch in range(5):
        received[microbatch] = f"made for {microbatch}"
    assert [received[i] for i in range(5)] == [f"made for {i % 2}" for i in range(5)]
