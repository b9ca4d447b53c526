"""The runtime against one process, on a program written by hand: float64 loss, gradients, updates, state dicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from programs import Shape, mlp_batch, mlp_model, write_mlp
from torch import Tensor
from workers import WorkerPool

from autopar.run.folder import import_runtime, program_modules


def adamw(params: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def gradients(folder: str, state: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Any]:
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        trainer = runtime.Trainer(program, runtime.start(program), state=state)
        trainer.forward_backward(batch)
        loss = trainer.forward_backward(batch)  # twice: nothing is left over from the step before
        return {"loss": loss, "gradients": trainer.gradients(), "state": trainer.state_dict()}


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest deviation, relative to each gradient's largest element or to a millionth of the largest of all."""
    assert set(found) == set(wanted)
    floor = 1e-6 * max(float(grad.abs().max()) for grad in wanted.values())
    return max(float((found[n] - wanted[n]).abs().max()) / max(float(wanted[n].abs().max()), floor) for n in wanted)


def reference(batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    model = mlp_model()
    loss = model(**batch)
    loss.backward()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, state


def check_exact(pool: WorkerPool, folder: Path, shape: Shape) -> None:
    batch = mlp_batch()
    loss, grads, state = reference(batch)
    results = pool.run("test_run_runtime:gradients", str(write_mlp(folder, shape)), state, batch)
    assert all(abs(r["loss"] - loss) <= 1e-12 * abs(loss) for r in results)
    assert error(results[0]["gradients"], grads) <= 1e-12
    assert all(not r["gradients"] and not r["state"] for r in results[1:])
    assert set(results[0]["state"]) == set(state)
    assert all(torch.equal(results[0]["state"][name], state[name]) for name in state)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(data=2, zero=(0, 0)),
        Shape(data=2, zero=(1, 1), microbatches=2),
        Shape(data=2, zero=(2, 2), microbatches=4),
        Shape(data=2, zero=(3, 3), microbatches=2),
        Shape(data=2, zero=(1, 3), microbatches=2),
        Shape(tensor=2),
        Shape(tensor=2, zero=(3, 2), microbatches=4),
        Shape(pipeline=2),
        Shape(pipeline=2, microbatches=4),
        Shape(pipeline=2, microbatches=4, schedule="1f1b"),
    ],
    ids=str,
)
def test_two_processes_equal_one(workers2: WorkerPool, tmp_path: Path, shape: Shape) -> None:
    check_exact(workers2, tmp_path, shape)


FOUR = [
    *(Shape(data=2, tensor=2, zero=(z, z), microbatches=m) for z in range(4) for m in (1, 2, 4)),
    *(Shape(pipeline=2, tensor=2, microbatches=m, schedule=s) for m in (1, 2, 4) for s in ("gpipe", "1f1b")),
    *(
        Shape(pipeline=2, data=2, zero=zero, microbatches=m, schedule=s)
        for zero in ((0, 0), (1, 1), (2, 2), (3, 3), (0, 3), (3, 1))
        for m in (1, 2, 4)
        for s in ("gpipe", "1f1b")
    ),
]


@pytest.mark.parametrize("shape", FOUR, ids=str)
def test_four_processes_equal_one(workers4: WorkerPool, tmp_path: Path, shape: Shape) -> None:
    check_exact(workers4, tmp_path, shape)
