"""Mixed precision: programs in 16 bits under tensor and data parallelism type-check, run, and stay near float32."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from exactness import KINDS, MODELS
from tiers import slow
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import capture, flatten_batch
from autopar.checks.collectives import check_collectives
from autopar.checks.types import check_program
from autopar.emit import emit
from autopar.measure import compare
from autopar.search.manual import manual_plan
from autopar.shard import annotate

# bfloat16 has 8 bits: each rounding is 2^-9 = 0.2 %, and a gradient passes some tens of them that partly cancel. float16 has 11 bits: each
# rounding is 2^-12, an eighth of that. The least error shows that a program computes in 16 bits at all.
NEAR = 0.05
BETWEEN = {"bfloat16": (1e-6, NEAR), "float16": (1e-7, 0.01)}


@pytest.mark.parametrize(
    ("precision", "name"),
    [
        slow("bfloat16", "tensor 4"),
        ("bfloat16", "data 2 x tensor+sequence 2, zero 1"),
        ("bfloat16", "mixed: tensor 1, 2 and 4"),
        slow("bfloat16", "pipeline 2, zero bubble x data 2, zero 1, recompute"),
        ("bfloat16", "pipeline 2, ZBV x data 2, zero 3"),
        slow("float16", "data 2 x tensor+sequence 2, zero 1"),
        ("float16", "pipeline 2, ZBV x data 2, zero 3"),
    ],
)
def test_programs_stay_near_float32(precision: str, name: str, workers4: WorkerPool, tmp_path: Path) -> None:
    kind = next(kind for kind in KINDS if kind.name == name)
    torch.manual_seed(0)
    model, batch, _ = MODELS["llama"]()
    model.train()
    graph = capture(model, batch, precision=precision, name="llama")
    plan = dataclasses.replace(kind.plan(graph), precision=precision)
    emit(graph, plan, tmp_path)
    assert check_program(tmp_path) == len(plan.stages)
    loss0 = model(**batch).loss
    loss0.backward()
    gradients0 = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    torch.save({n: t.detach() for n, t in model.state_dict().items()}, tmp_path / "initial.pt")
    flat = flatten_batch(graph.structure, batch)  # type: ignore[arg-type]
    loss, gradients, _ = workers4.run(
        "autopar.verify.remote:gradients", str(tmp_path), str(tmp_path / "initial.pt"), flat
    )[0]
    error = compare(loss, gradients, float(loss0.detach()), gradients0)
    least, most = BETWEEN[precision]
    assert least < error.value < most, error


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) * 0.5 + logits.square().mean()


def sum_loss(logits: Tensor, target: Tensor) -> Tensor:
    return (logits - target).square().sum()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross entropy and a penalty": token_loss,
    "mse": nn.functional.mse_loss,
    "huber": nn.functional.huber_loss,
    "sum": sum_loss,
}


@pytest.mark.parametrize("options", [{"data": 2}, {"tensor": 2}, {"data": 2, "microbatches": 2}], ids=str)
def test_losses_are_not_rounded(options: dict[str, int], workers2: WorkerPool, tmp_path: Path) -> None:
    """Each token's loss has 8 bits, what they add up to has 24, and gradients are those that eager bfloat16 has."""
    for name, loss_fn in LOSSES.items():
        torch.manual_seed(0)
        model, ids = Tokens(), torch.randint(32, (8, 16))
        target = torch.randint(32, (8, 16)) if loss_fn is token_loss else torch.randn(8, 16, 32)
        graph = annotate(capture(model, (ids, target), loss_fn, precision="bfloat16"))
        plan = dataclasses.replace(manual_plan(graph, **options), precision="bfloat16")
        check_collectives(emit(graph, plan, tmp_path))
        assert check_program(tmp_path) == 1
        state = tmp_path / "state.pt"
        torch.save({n: t.detach() for n, t in model.state_dict().items()}, state)
        flat = flatten_batch(graph.structure, (ids, target))  # type: ignore[arg-type]
        loss, gradients, _ = workers2.run("autopar.verify.remote:gradients", str(tmp_path), str(state), flat)[0]
        wanted = loss_fn(model(ids), target)
        assert loss == pytest.approx(wanted.item(), rel=5e-3), name
        assert loss != float(torch.tensor(loss, dtype=torch.bfloat16)), name
        low = copy.deepcopy(model).bfloat16()
        loss_fn(low(ids), target.to(torch.bfloat16) if target.is_floating_point() else target).backward()
        eager = {n: p.grad.float() for n, p in low.named_parameters() if p.grad is not None}
        assert compare(loss, gradients, loss, eager).value < NEAR, name


def test_wider_losses_are_left_as_they_are() -> None:
    model, ids, target = Tokens(), torch.randint(32, (8, 16)), torch.randn(8, 16, 32)
    for precision in ("float32", "float64"):
        graph = capture(model, (ids, target), nn.functional.mse_loss, precision=precision)
        nodes = [node for cls in graph.classes.values() for node in cls.graph.graph.nodes]
        assert not any("dtype" in node.kwargs for node in nodes)
        assert any(node.target is torch.ops.aten.mse_loss.default for node in nodes)
