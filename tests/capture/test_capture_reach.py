"""Parameters that eager PyTorch gives no gradient stay as they are, decay included; a gradient of zeros is one all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiers import slow
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import capture
from autopar.emit import emit
from autopar.run.folder import import_runtime, program_modules
from autopar.search.manual import manual_plan
from autopar.shard import annotate

ROWS, WIDTH = 8, 6


class Cases(nn.Module):
    """``rest`` is always trained; the case says what ``w`` (and what is in ``case``) does."""

    def __init__(self, case: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH))
        self.rest = nn.Linear(WIDTH, WIDTH)
        self.fused = nn.Linear(WIDTH, 3 * WIDTH)
        self.case = case

    def forward(self, x: Tensor) -> Tensor:
        return self.case(self, self.rest(x)).square().mean()


def no_grad(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = self.w * 2
    return x * scale


def mixed(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = self.w * 2
    return x * scale + self.w


def chosen(self: Any, x: Tensor) -> Tensor:
    return x.gather(1, (x * self.w).argmax(1, keepdim=True))


def parts(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.fused(x).chunk(3, -1)
    return q * k.detach() + v.detach()


CASES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "no_grad": no_grad,
    "no_grad and with": mixed,
    "detached": lambda self, x: x * self.w.detach(),
    "detached later": lambda self, x: x * (self.w.exp() * 3).detach(),
    "argmax": chosen,
    "comparison": lambda self, x: torch.where(x > self.w, x, -x),
    "mask": lambda self, x: x * (x > self.w).to(x.dtype),
    "zeros_like": lambda self, x: x + torch.zeros_like(self.w),
    "shape alone": lambda self, x: x.expand_as(torch.outer(x[:, 0], self.w)),
    "index of max": lambda self, x: x.index_select(1, (x * self.w).max(1).indices[:1]),
    "value of max": lambda self, x: x * (x * self.w).max(1, keepdim=True).values,
    "floor": lambda self, x: x + self.w.floor(),
    "round": lambda self, x: x + self.w.round(),
    "sign": lambda self, x: x + self.w.sign(),
    "dead relu": lambda self, x: x + torch.relu(self.w - 100),
    "times zero": lambda self, x: x + 0 * self.w,
    "clamped away": lambda self, x: x + self.w.clamp(50, 60),
    "power of zero": lambda self, x: x + self.w**0,
    "where never": lambda self, x: torch.where(x > 1e9, self.w, x),
    "where a constant never": lambda self, x: torch.where(torch.ones(WIDTH, dtype=torch.bool), x, self.w),
    "parts": parts,
    "parts detached": lambda self, x: x + sum(self.fused(x).detach().chunk(3, -1)),
    "one part": lambda self, x: x + self.fused(x).chunk(3, -1)[1],
    "plain": lambda self, x: x * self.w,
}


def eager(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", CASES)
def test_the_parameters_with_gradients_are_eagers(case: str) -> None:
    torch.manual_seed(0)
    model, x = Cases(CASES[case]).double(), torch.randn(ROWS, WIDTH, dtype=torch.float64)
    graph = capture(model, (x,))
    wanted = set(eager(model, x))
    assert {p.original for p in graph.parameters.values() if p.trainable} == wanted
    frozen = {p.original for p in graph.parameters.values() if not p.trainable}
    assert any("get no gradient" in note for note in graph.notes) == bool(frozen)


def train(folder: str, state: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Any]:
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        make = lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.5)  # noqa: E731
        trainer = runtime.Trainer(program, runtime.start(program), state=state, optimizer=make)
        trainer.forward_backward(batch)
        gradients = trainer.gradients()
        for _ in range(3):
            trainer.step(batch)
        return {"gradients": gradients, "state": trainer.state_dict()}


TRAINED = ["no_grad", "no_grad and with", "argmax", "floor", "times zero", "parts", "parts detached", "one part"]


@pytest.mark.parametrize("options", [{"data": 2}, slow({"data": 2, "zero": 1}), {"data": 2, "zero": 3}], ids=str)
def test_the_optimizer_leaves_the_others_alone(workers2: WorkerPool, tmp_path: Any, options: dict[str, int]) -> None:
    for case in TRAINED:
        torch.manual_seed(0)
        model, x = Cases(CASES[case]).double(), torch.randn(ROWS, WIDTH, dtype=torch.float64)
        graph = annotate(capture(model, (x,)))
        emit(graph, manual_plan(graph, **options), tmp_path)
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        batch = {graph.inputs[0].name: x}
        found = workers2.run("test_capture_reach:train", str(tmp_path), state, batch)[0]
        wanted = eager(model, x)
        assert set(found["gradients"]) == set(wanted), case
        assert all((found["gradients"][name] - grad).abs().max() < 1e-12 for name, grad in wanted.items())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
        for _ in range(3):
            eager(model, x)
            optimizer.step()
        after = model.state_dict()
        assert all((value - after[name]).abs().max() < 1e-9 for name, value in found["state"].items()), case
