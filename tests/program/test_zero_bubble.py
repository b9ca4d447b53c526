"""Zero-bubble schedules: backward passes in two parts, exact under every ZeRO stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_overlap import Blocks, program
from torch import Tensor, nn
from workers import WorkerPool

from autopar.run.folder import import_runtime, program_modules

SPLIT = {"zero-bubble": 1, "zbv": 2, "dualpipev": 2}  # by name: stages of each pipeline rank
MICROBATCHES = 8
Fault = tuple[str, str, str]


def stepped(folder: str, state: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Any]:
    """Two steps: the second one's gradients, and the second parts of backward passes that ran on this rank."""
    with program_modules(folder):
        runtime = import_runtime(folder)
        opened = runtime.load(folder)
        trainer = runtime.Trainer(opened, runtime.start(opened, device="cpu"), state=state)
        losses = [trainer.forward_backward(batch) for _ in range(2)]
        return {"losses": losses, "gradients": trainer.gradients()}


def emitted(folder: Path, *faults: Fault, **options: Any) -> tuple[str, nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Blocks().double()
    x, y = torch.randn(2, 16, 16, dtype=torch.float64)
    nn.functional.mse_loss(model(x), y).backward()
    schedule = options["schedule"]
    options |= {"chunks": SPLIT[schedule], "microbatches": MICROBATCHES}
    return program(folder, faults=faults, model=model, batch=(x, y), **options), model, {"x": x, "targets": y}


def is_right(found: list[dict[str, Any]], model: nn.Module) -> bool:
    wanted = {name: p.grad for name, p in model.named_parameters()}
    return all((found[0]["gradients"][name] - grad).abs().max() < 1e-12 for name, grad in wanted.items())


@pytest.mark.parametrize("schedule", SPLIT)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_pipeline_alone(schedule: str, recompute: str, workers2: WorkerPool, tmp_path: Path) -> None:
    folder, model, batch = emitted(tmp_path, schedule=schedule, pipeline=2, recompute=recompute)
    assert is_right(workers2.run("test_zero_bubble:stepped", folder, model.state_dict(), batch), model)


@pytest.mark.parametrize("schedule", SPLIT)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_with_data_parallelism(schedule: str, zero: int, workers4: WorkerPool, tmp_path: Path) -> None:
    recompute = "full" if zero == 3 else "none"
    folder, model, batch = emitted(tmp_path, schedule=schedule, pipeline=2, data=2, zero=zero, recompute=recompute)
    assert is_right(workers4.run("test_zero_bubble:stepped", folder, model.state_dict(), batch), model)
