"""Programs of pipelines for tests: eight blocks, float64, the gradients of a second step against one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from test_overlap import Blocks, program
from torch import Tensor, nn

from autopar.run.folder import import_runtime, program_modules

MICROBATCHES = 4
CHUNKS = {"zero-bubble": 1, "zbv": 2, "dualpipev": 2, "chimera": 1}  # by schedule
Fault = tuple[str, str, str]


def stepped(folder: str, state: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two steps on different batches: the second one's gradients."""
    with program_modules(folder):
        runtime = import_runtime(folder)
        opened = runtime.load(folder)
        trainer = runtime.Trainer(opened, runtime.start(opened, device="cpu"), state=state)
        trainer.forward_backward({name: 2 * tensor for name, tensor in batch.items()})
        trainer.forward_backward(batch)
        return trainer.gradients()


def emitted(
    folder: Path, *faults: Fault, model: nn.Module | None = None, **options: Any
) -> tuple[str, nn.Module, dict[str, Tensor]]:
    """The folder of a program, the model with one device's gradients, the batch."""
    torch.manual_seed(0)
    model = Blocks().double() if model is None else model
    x, y = torch.randn(2, 16, 16, dtype=torch.float64)
    nn.functional.mse_loss(model(x), y).backward()
    options = {"chunks": CHUNKS.get(options["schedule"], 1), "microbatches": MICROBATCHES} | options
    return program(folder, faults=faults, model=model, batch=(x, y), **options), model, {"x": x, "targets": y}


def is_right(found: list[dict[str, Tensor]], model: nn.Module) -> bool:
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return all((found[0][name] - grad).abs().max() < 1e-12 for name, grad in wanted.items())
