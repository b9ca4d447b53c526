"""Recipes of a training, as users write them: optimizers with groups, several optimizers, schedules."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim import lr_scheduler

Named = Iterable[tuple[str, nn.Parameter]]
ROWS, LENGTH, VOCABULARY, WIDTH = 8, 4, 16, 8


class Reader(nn.Module):
    """Residual layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens, labels = (torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(2))
    return tokens, labels


def groups(named_parameters: Named) -> optim.Optimizer:
    """Matrices decay; vectors do not, and have a learning rate of their own."""
    decayed: dict[str, Any] = {"params": [], "weight_decay": 0.1}
    plain: dict[str, Any] = {"params": [], "weight_decay": 0.0, "lr": 1e-3}
    for _, parameter in named_parameters:
        (decayed if parameter.ndim >= 2 else plain)["params"].append(parameter)
    return optim.AdamW([decayed, plain], lr=3e-3, betas=(0.9, 0.95))


def muon(named_parameters: Named) -> list[optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the rest."""
    named = list(named_parameters)
    matrices = [parameter for name, parameter in named if name.startswith("layers.") and parameter.ndim == 2]
    chosen = {id(parameter) for parameter in matrices}
    return [optim.Muon(matrices, lr=0.02), optim.AdamW([p for _, p in named if id(p) not in chosen], lr=3e-3)]


def backwards(params: list[nn.Parameter]) -> optim.Optimizer:
    """In an order that is not the model's."""
    return optim.SGD(params[::-1], 0.05, momentum=0.9)


def warm_cosine(optimizer: optim.Optimizer) -> lr_scheduler.LRScheduler:
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    down = lr_scheduler.CosineAnnealingLR(optimizer, 7)
    return lr_scheduler.SequentialLR(optimizer, [warm, down], [3])


def one_cycle(optimizer: optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=30)


def warm_up(steps: int, step: int) -> float:
    return min(1.0, (step + 1) / steps)


def by_function(optimizer: optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LambdaLR(optimizer, functools.partial(warm_up, 4))


def by_lambda(optimizer: optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def local_class(params: list[nn.Parameter]) -> optim.Optimizer:
    class Own(optim.SGD):
        elementwise = True

    return Own(params, lr=0.1)


def changed_later(params: list[nn.Parameter]) -> optim.Optimizer:
    """With a default that its constructor did not get."""
    made = optim.SGD(params, lr=0.1)
    made.param_groups[0]["kind"] = object()
    return made


class Halving(optim.SGD):
    """Of a module of the user's."""

    elementwise = True

    def __init__(self, params: Any, rate: float = 0.2) -> None:
        super().__init__(params, lr=rate / 2)
        self.rate = rate


def own_class(params: list[nn.Parameter]) -> optim.Optimizer:
    return Halving(params, rate=0.1)
