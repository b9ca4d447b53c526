"""Mixed precision: bfloat16 programs under tensor and data parallelism type-check, run, and stay near float32."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from exactness import KINDS, MODELS
from workers import WorkerPool

from autopar.capture import capture, flatten_batch
from autopar.check import check_program
from autopar.emit import emit
from autopar.measure import compare

# bfloat16 has 8 bits: each rounding is 2^-9 = 0.2 %, and a gradient passes some tens of them that partly cancel.
NEAR = 0.05


@pytest.mark.parametrize("name", ["tensor 4", "data 2 x tensor+sequence 2, zero 1", "mixed: tensor 1, 2 and 4"])
def test_programs_stay_near_float32(name: str, workers4: WorkerPool, tmp_path: Path) -> None:
    kind = next(kind for kind in KINDS if kind.name == name)
    torch.manual_seed(0)
    model, batch, _ = MODELS["llama"]()
    model.train()
    graph = capture(model, batch, precision="bfloat16", name="llama")
    plan = dataclasses.replace(kind.plan(graph), precision="bfloat16")
    emit(graph, plan, tmp_path)
    assert check_program(tmp_path) == plan.pipeline
    loss0 = model(**batch).loss
    loss0.backward()
    gradients0 = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    torch.save({n: t.detach() for n, t in model.state_dict().items()}, tmp_path / "initial.pt")
    flat = flatten_batch(graph.structure, batch)  # type: ignore[arg-type]
    loss, gradients, _ = workers4.run(
        "autopar.verify.remote:gradients", str(tmp_path), str(tmp_path / "initial.pt"), flat
    )[0]
    error = compare(loss, gradients, float(loss0.detach()), gradients0)
    assert 1e-6 < error.value < NEAR, error
