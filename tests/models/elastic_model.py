"""A model in float64 for trainings whose number of devices changes: 12 rows go on 4, 3, 2 and 1 of them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.cli.app import cli
from autopar.cli.options import PlanRequest
from autopar.run.elastic import Elastic

STEPS, LR = 400, 1e-3


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x + self.inner(x)), labels)


def model() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(12, 6, dtype=torch.float64), "labels": torch.randint(0, 5, (12,))}
    return Tiny().double(), batch


def straight() -> list[float]:
    """The losses of eager PyTorch on one device, with the optimizer of ``autopar run``."""
    module, batch = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = module(**batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def asked(folder: Path, ranks: int = 1, devices: str = "1") -> Elastic:
    """As ``autopar run --elastic`` asks for the training of this model, with ``devices`` of each node."""
    words = ["elastic_model:model", "--devices", devices, "--precision", "float64", "--time-limit", "600"]
    request = PlanRequest.taken_from(cli.commands["run"].make_context("run", words).params)
    options = ("--device", "cpu", "--steps", str(STEPS), "--lr", str(LR), "--checkpoint", str(folder / "saved"))
    options += ("--every", "10", "--lost-after", "6", "--resume")
    return Elastic(asdict(request), ranks, 0, str(folder / "programs"), options)
