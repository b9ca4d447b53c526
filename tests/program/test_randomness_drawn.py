"""What a model draws by itself (stochastic depth, dropout of channels, noise): seeded like dropout, or refused."""

from __future__ import annotations

import functools
import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from test_capture_models import assert_equals_eager
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import capture
from autopar.capture.reference import run as run_graph
from autopar.checks.types import check_program
from autopar.emit import emit
from autopar.errors import CaptureError
from autopar.graph import Graph
from autopar.run.folder import import_runtime, program_modules
from autopar.search.manual import manual_plan
from autopar.shard import annotate


def timm_drop_path(x: Tensor, p: float) -> Tensor:
    kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - p)
    return x * kept.div_(1 - p)


def transformers_drop_path(x: Tensor, p: float) -> Tensor:
    kept = (1 - p) + torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), dtype=x.dtype, device=x.device)
    return x.div(1 - p) * kept.floor_()


class Block(nn.Module):
    def __init__(self, drop_path: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.drop, self.drop_path = nn.Dropout2d(0.3), drop_path

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(F.relu(self.up(x)))
        return x + self.drop_path(self.down(y), 0.25)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(timm_drop_path), Block(transformers_drop_path)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.1 * torch.randn_like(x)
        for block in self.blocks:
            x = block(x)
        return x


@functools.cache
def net() -> tuple[Graph, dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Net().double().train()
    x, y = (torch.randn(128, 4, 3, 3, dtype=torch.float64) for _ in range(2))  # few rows would have equal masks
    graph = annotate(capture(model, (x, y), F.mse_loss, precision="float64"))
    return graph, {name: value.detach().clone() for name, value in model.state_dict().items()}, {"x": x, "targets": y}


def steps(folder: str, state: dict[str, Tensor], batch: dict[str, Tensor], seeds: list[int]) -> list[Any]:
    """In a worker: for every seed the loss, what was drawn, and the gradients (on rank 0)."""
    with program_modules(folder):
        runtime, kernels = import_runtime(folder), importlib.import_module("runtime.kernels_random")
        program = runtime.load(folder)
        world = runtime.start(program, device="cpu", timeout_s=60)
        drawn: list[list[Any]] = []

        def spied(draw: Any) -> Any:
            def spy(*args: Any, **kwargs: Any) -> Tensor:
                out: Tensor = draw(*args, **kwargs)
                drawn.append(out.tolist())
                return out

            return spy

        kernels.uniform, kernels.bernoulli = spied(kernels.uniform), spied(kernels.bernoulli)
        answers = []
        for seed in seeds:
            drawn.clear()
            optimizer = functools.partial(torch.optim.SGD, lr=0.0)
            trainer = runtime.Trainer(program, world, optimizer=optimizer, state=state, seed=seed)
            loss = trainer.step(batch)
            answers.append((loss, list(drawn), trainer.gradients()))
        return answers


def run(pool: WorkerPool, folder: Path, seeds: list[int], **plan: Any) -> Any:
    graph, state, batch = net()
    emit(graph, manual_plan(graph, **plan), folder)
    assert check_program(folder) == 1
    return pool.run("test_randomness_drawn:steps", str(folder), state, batch, seeds)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_is_a_function_of_its_seed(workers2: WorkerPool, tmp_path: Path) -> None:
    ranks = run(workers2, tmp_path, [1, 1, 2], data=2, zero=2, microbatches=2)
    (first, again, other), (second, _, _) = ranks
    assert first[0] == again[0] != other[0]
    assert first[1] == again[1] != other[1] and same(first[2], again[2])
    everything = [str(each) for each in (*first[1], *second[1])]  # 2 ranks x 2 microbatches x 4 masks
    assert len(everything) == len(set(everything)) == 16


def test_recomputation_draws_the_same(workers2: WorkerPool, tmp_path: Path) -> None:
    kept = run(workers2, tmp_path / "kept", [1], data=2)[0][0]
    again = run(workers2, tmp_path / "again", [1], data=2, recompute=True)[0][0]
    assert len(again[1]) == 2 * len(kept[1]) and again[0] == kept[0]
    for name, gradient in kept[2].items():
        torch.testing.assert_close(again[2][name], gradient, rtol=1e-12, atol=1e-14)


def test_ranks_agree_where_they_hold_the_same(workers2: WorkerPool, tmp_path: Path) -> None:
    (first,), (second,) = run(workers2, tmp_path, [1], tensor=2)
    agreeing = [a == b for a, b in zip(first[1], second[1], strict=True)]
    assert agreeing == [len(a[0]) != 4 for a in first[1]]  # channels are cut: 4 of 8 here, other 4 there
    assert first[0] == second[0]


def test_noise_is_what_eager_draws() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            out = transformers_drop_path(self.linear(x + torch.randn_like(x)), 0.4)
            return out, F.mse_loss(out, y)

    x, y = (torch.randn(6, 4, dtype=torch.float64) for _ in range(2))
    assert_equals_eager(Noisy().double(), (x, y), seed=3)


DRAWS = {
    # what draws (64, 512) numbers, their mean and standard deviation
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(0.2), 0.2, 0.4),
    "bernoulli of chances": (lambda x: torch.bernoulli(torch.full_like(x, 0.2)), 0.2, 0.4),
    "dropout of channels": (lambda x: F.dropout2d(torch.ones_like(x)[:, :, None, None], 0.2)[..., 0, 0], 1.0, 0.5),
    "randint": (lambda x: torch.randint(10, 20, x.shape).to(x.dtype), 14.5, math.sqrt(99 / 12)),
    "normal_": (lambda x: torch.empty_like(x).normal_(3.0, 0.5), 3.0, 0.5),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.5),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-2.0, 0.0), -1.0, 2 / math.sqrt(12)),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_distributions_are_the_ops_own(draw: str) -> None:
    function, mean, spread = DRAWS[draw]

    class Drawn(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * function(x)).sum()

    graph = capture(Drawn(512, 64, bias=False), (torch.ones(64, 512),), lambda loss: loss, precision="float64")
    weight = torch.zeros(64, 512, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(0)
    run_graph(graph, {"weight": weight}, {name.name: torch.ones(64, 512).double() for name in graph.inputs}).backward()
    assert weight.grad is not None
    assert float(weight.grad.mean()) == pytest.approx(mean, abs=0.03 * spread)  # five standard errors
    assert float(weight.grad.std()) == pytest.approx(spread, rel=0.03)


ROUNDED = {
    # what draws in 16 bits, what is counted, how often: a 16-bit uniform number is zero in one of 256
    "exponential_": (lambda x: torch.empty_like(x).exponential_(), lambda drawn: drawn < 2**-24, 0.0),
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(0.001), lambda drawn: drawn == 1, 0.001),
    "dropout of channels": (
        lambda x: F.dropout2d(torch.ones_like(x)[:, :, None, None], 0.999)[..., 0, 0],
        lambda drawn: drawn != 0,
        0.001,
    ),
}


@pytest.mark.parametrize("draw", ROUNDED)
def test_chances_are_not_rounded_to_16_bits(draw: str) -> None:
    function, counted, share = ROUNDED[draw]

    class Drawn(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * function(x)).sum()

    graph = capture(Drawn(512, 64, bias=False), (torch.ones(64, 512),), lambda loss: loss, precision="bfloat16")
    weight = torch.zeros(64, 512, dtype=torch.bfloat16, requires_grad=True)
    torch.manual_seed(0)
    batch = {name.name: torch.ones(64, 512).bfloat16() for name in graph.inputs}
    run_graph(graph, {"weight": weight}, batch).backward()
    assert weight.grad is not None
    assert float(counted(weight.grad).double().mean()) == pytest.approx(share, abs=0.001)


def test_numbers_that_no_seed_reaches_are_refused() -> None:
    class Shuffled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[torch.randperm(len(x))])

    with pytest.raises(CaptureError, match="randperm draws random numbers(.|\n)*randperm\\(len") as caught:
        capture(Shuffled(4, 4), (torch.randn(6, 4), torch.randn(6, 4)), F.mse_loss)
    assert "torch.rand" in str(caught.value.hint)
