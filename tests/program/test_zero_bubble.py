"""Zero-bubble schedules: backward passes in two parts, exact under every ZeRO stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_overlap import Blocks, program
from torch import Tensor, nn
from workers import WorkerPool

from autopar.errors import LaunchError
from autopar.run.folder import import_runtime, program_modules

SPLIT = {"zero-bubble": 1, "zbv": 2, "dualpipev": 2}  # by name: stages of each pipeline rank
MICROBATCHES = 8
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


def emitted(folder: Path, *faults: Fault, **options: Any) -> tuple[str, nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Blocks().double()
    x, y = torch.randn(2, 16, 16, dtype=torch.float64)
    nn.functional.mse_loss(model(x), y).backward()
    schedule = options["schedule"]
    options |= {"chunks": SPLIT[schedule], "microbatches": MICROBATCHES}
    return program(folder, faults=faults, model=model, batch=(x, y), **options), model, {"x": x, "targets": y}


def is_right(found: list[dict[str, Tensor]], model: nn.Module) -> bool:
    wanted = {name: p.grad for name, p in model.named_parameters()}
    return all((found[0][name] - grad).abs().max() < 1e-12 for name, grad in wanted.items())


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


FAULTS = {  # by name: the schedule that shows the fault; a file of the program, a pattern, the replacement
    "a weight's gradient in both parts": (
        "zbv",
        "weight_gradients.py",
        r"product.weight_gradient\(\) if _products is None else None",
        "product.weight_gradient()",
    ),
    "the second part is left out": ("zbv", "weight_gradients.py", "        while products:", "        while False:"),
    "the last microbatch's piece takes the place of the sum": (
        "zbv",
        "weight_gradients.py",
        r"sums\[last.name\].add_\(last.piece\) if last.name in sums else last.piece",
        "last.piece",
    ),
    "a reduction is lost": (
        "zbv",
        "weight_gradients.py",
        r"        self._turn.finish\(\)\n        piece",
        "        piece",
    ),
    "gradients of an earlier step stay": (
        "zbv",
        "weight_gradients.py",
        r"self._pieces = \{\}\n\n",
        "pass\n\n",
    ),
    "a shard takes other rows": (
        "zbv",
        "parameters.py",
        r"_like\(param, rows\[: stop - start\]\)",
        "_like(param, rows[: stop - start].roll(1, 0))",
    ),
    "gradients of whole passes are lost": (
        "dualpipev",
        "parameters.py",
        r"_shard\(param.grad\).add_\(rows",
        "_shard(param.grad).copy_(rows",
    ),
    "stages are placed in turn": (
        "zbv",
        "world.py",
        r'int\(stage\["devices"\]\[0\]\) // int\(stage\["devices"\]\[1\]\) for stage in program.plan\["stages"\]',
        "i % line for i in range(stages)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str, workers4: WorkerPool, tmp_path: Path) -> None:
    """Each fault gives a wrong gradient or an error."""
    schedule, *change = FAULTS[fault]
    folder, model, batch = emitted(tmp_path, tuple(change), schedule=schedule, pipeline=2, data=2, zero=2)
    try:
        found = workers4.run("test_zero_bubble:stepped", folder, model.state_dict(), batch)
    except LaunchError:
        return
    assert not is_right(found, model)
