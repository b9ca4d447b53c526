"""The gradient noise scale that ``train.py --noise-scale`` logs, against float64 gradients of parts of the batch on one device."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from workers import WorkerPool

from autopar.compile import emit_program
from autopar.program.noise import DECAY, NoiseError
from autopar.program.trainer import Trainer
from autopar.search.manual import manual_plan
from autopar.workload import Workload

ROWS, STEPS = 8, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(5), nn.Linear(5, 11), nn.Linear(11, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.blocks, self.last = (
            nn.Linear(5, 5),
            nn.ModuleList([Block() for _ in range(4)]),
            nn.Linear(5, 3),
        )
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.frozen(x))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.last(x), y)


def data() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(STEPS * ROWS, 5, generator=draw, dtype=torch.float64)
    return {"x": inputs, "y": (inputs.sum(1) > 0).long()}


def write(folder: Path, tied: bool = False, **plan: Any) -> Model:
    torch.manual_seed(0)
    model = Model().double()
    if tied:
        model.blocks[-1].up.weight = model.blocks[0].up.weight
    workload = Workload(model, {name: tensor[:ROWS] for name, tensor in data().items()}, precision="float64")
    graph = workload.capture()
    emit_program(graph, manual_plan(graph, precision="float64", **plan), folder, state=model.state_dict())
    return model


def train(workers: WorkerPool, tmp_path: Path) -> tuple[list[dict[str, Any]], set[str]]:
    """Return the log, and what ``train.py`` says to people."""
    torch.save(data(), tmp_path / "data.pt")
    log = tmp_path / "log"
    options = ["--dataset", str(tmp_path / "data.pt"), "--steps", str(STEPS), "--lr", "0"]
    said = workers.run(
        "programs:ran", str(tmp_path / "program"), *options, "--noise-scale", "--log-file", str(log), timeout_s=60
    )
    records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return records, {talk for _, talk in said}


@pytest.mark.parametrize(
    "plan",
    [
        {"data": 2, "zero": 0, "microbatches": 2},
        {"data": 2, "zero": 1, "microbatches": 1},
        {"data": 1, "microbatches": 4},
        {"tensor": 2, "microbatches": 4},
        {"tensor": 2, "microbatches": 4, "states": "host"},
        {"pipeline": 2, "microbatches": 4},
        {"pipeline": 2, "chunks": 2, "schedule": "interleaved-1f1b", "microbatches": 4},
    ],
    ids=str,
)
def test_the_noise_scale_is_that_of_the_gradients_of_parts(
    plan: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = write(tmp_path / "program", **plan)
    replicas, microbatches = plan.get("data", 1), plan["microbatches"]
    ranks = replicas * plan.get("tensor", 1) * plan.get("pipeline", 1)
    records, _ = train(request.getfixturevalue(f"workers{ranks}"), tmp_path)
    parts = replicas if replicas > 1 else microbatches
    signal = variance = 0.0
    for step, record in enumerate(records):
        batch = {name: tensor[step * ROWS : (step + 1) * ROWS] for name, tensor in data().items()}

        def gradient(rows: Tensor, batch: dict[str, Tensor] = batch) -> Tensor:
            loss = model(batch["x"][rows], batch["y"][rows])
            found = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
            return torch.cat([part.flatten() for part in found])

        # each microbatch is divided over the ranks
        of_parts = torch.arange(ROWS).view(microbatches, replicas, -1).transpose(0, 1).reshape(parts, -1)
        small = sum(float(gradient(rows).square().sum()) for rows in of_parts) / parts
        big = float(gradient(torch.arange(ROWS)).square().sum())
        assert record["gradient_norm"] ** 2 == pytest.approx(big, rel=1e-9)
        signal = DECAY * signal + (1 - DECAY) * (ROWS * big - ROWS / parts * small) / (ROWS - ROWS / parts)
        variance = DECAY * variance + (1 - DECAY) * (small - big) / (parts / ROWS - 1 / ROWS)
        expected = pytest.approx(variance / signal, rel=1e-9) if signal > 0 else None
        assert record.get("noise_scale") == expected
    assert len(records) == STEPS and any(record.get("noise_scale") for record in records)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"data": 2, "zero": 3}, "this plan has none"),
        ({"tensor": 2}, "this plan has none"),
        ({"data": 1}, "this plan has none"),
        ({"pipeline": 2, "chunks": 2, "schedule": "zero-bubble", "microbatches": 4}, "under the schedule zero-bubble"),
        ({"pipeline": 2, "microbatches": 4, "tied": True}, "several pipeline stages share blocks.0.up.weight"),
    ],
    ids=str,
)
def test_other_plans_are_refused(
    plan: dict[str, Any], why: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    write(tmp_path / "program", **plan)
    workers = request.getfixturevalue("workers1" if plan == {"data": 1} else "workers2")
    records, said = train(workers, tmp_path)
    sentence = f"exit NoiseError: --noise-scale compares .*{why}.*: it needs data parallelism alone"
    assert not records and all(re.search(sentence, talk) for talk in said)


@pytest.mark.parametrize(("late", "scale", "why"), [(1, None, "of an earlier step"), (None, 1, "scaled in float16")])
def test_gradients_that_are_no_gradients_of_the_step_are_refused(late: Any, scale: Any, why: str) -> None:
    trainer: Any = SimpleNamespace(_late=late, loss_scale=scale)
    with pytest.raises(NoiseError, match=why):
        Trainer.noise_scale(trainer)
