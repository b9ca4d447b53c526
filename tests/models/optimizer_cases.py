"""Ten optimizers with groups by name and by number of dims, warm-up and cosine, and clipping: in a program, and in a plain loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from plain_loop import plain_loop
from resumed import batch_of, eager
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from autopar.run.folder import import_runtime, program_modules

STEPS, NORM = 10, 0.1
DECAY = 0.1
Named = Iterable[tuple[str, nn.Parameter]]


def _groups(named_parameters: Named, lr: float) -> list[dict[str, Any]]:
    """Matrices decay; embeddings, by name, do not, and have half the learning rate; vectors do not."""
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": DECAY},
        {"params": [], "weight_decay": 0.0, "lr": lr / 2},
        {"params": [], "weight_decay": 0.0},
    ]
    for name, p in named_parameters:
        groups[1 if _is_embedding(name) else 0 if p.ndim >= 2 else 2]["params"].append(p)
    return groups


def _is_embedding(name: str) -> bool:
    return any(part in name for part in ("wte", "wpe", "embed"))


def _made(kind: Callable[..., optim.Optimizer], lr: float, **options: Any) -> Callable[[Named], optim.Optimizer]:
    def make(named_parameters: Named) -> optim.Optimizer:
        return kind(_groups(named_parameters, lr), lr=lr, **options)

    return make


def muon(named_parameters: Named) -> list[optim.Optimizer]:
    """For the layers' matrices, in two groups by name; AdamW for embeddings, vectors, and experts, which are stacked."""
    named = list(named_parameters)
    layers = {name: p for name, p in named if p.ndim == 2 and not _is_embedding(name)}
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in layers.items() if "attn" in name], "weight_decay": DECAY},
        {"params": [p for name, p in layers.items() if "attn" not in name], "weight_decay": 0.0, "lr": 0.01},
    ]
    others = [(name, p) for name, p in named if name not in layers]
    return [optim.Muon(groups, lr=0.02), optim.AdamW(_groups(others, 3e-3), lr=3e-3)]


OPTIMIZERS: dict[str, Callable[[Named], Any]] = {
    "SGD": _made(optim.SGD, 0.05, momentum=0.9, nesterov=True),
    "Adam": _made(optim.Adam, 3e-3),
    "AdamW": _made(optim.AdamW, 3e-3, amsgrad=True),
    "NAdam": _made(optim.NAdam, 3e-3),
    "RAdam": _made(optim.RAdam, 3e-3),
    "Adagrad": _made(optim.Adagrad, 0.01),
    "RMSprop": _made(optim.RMSprop, 1e-3, momentum=0.9, centered=True),
    "ASGD": _made(optim.ASGD, 0.05, t0=3),
    "Adafactor": _made(optim.Adafactor, 0.01),
    "Muon": muon,
}


def warm_cosine(optimizer: optim.Optimizer) -> lr_scheduler.LRScheduler:
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    down = lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 3)
    return lr_scheduler.SequentialLR(optimizer, [warm, down], [3])


def trained(
    folder: str, state: dict[str, Tensor], batches: list[dict[str, Tensor]], names: list[str]
) -> dict[str, dict[str, Any]]:
    """In a worker: the losses, the values at the end, and the elements that this rank's optimizer updates, by optimizer."""
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        world = runtime.start(program)
        found = {}
        for name in names:
            trainer = runtime.Trainer(
                program, world, optimizer=OPTIMIZERS[name], scheduler=warm_cosine, state=state, max_norm=NORM
            )
            losses = [trainer.step(batch) for batch in batches]
            tensors = {id(p): p for group in trainer.optimizer.param_groups for p in group["params"]}
            elements = sum(p.numel() for p in tensors.values())
            found[name] = {"losses": losses, "state": trainer.state_dict(), "elements": elements}
        return found


@functools.cache
def plain(model: str, name: str, noise: float = 0.0) -> tuple[list[float], dict[str, Tensor], float]:
    """On one device: the losses, the values at the end, and the norm of the first gradient.

    ``noise``: every element of every gradient is changed by about this part of itself.
    """
    module, loss_of = eager(model)
    first = torch.autograd.grad(loss_of(batch_of(model, 0)), list(module.parameters()), allow_unused=True)
    norm = float(nn.utils.get_total_norm([grad for grad in first if grad is not None]))
    generator = torch.Generator().manual_seed(0)
    for p in module.parameters() if noise else ():
        p.register_hook(
            lambda grad: grad * (1 + noise * torch.randn(grad.shape, dtype=grad.dtype, generator=generator))
        )
    losses = [functools.partial(loss_of, batch_of(model, step)) for step in range(STEPS)]
    values = plain_loop(module, losses, OPTIMIZERS[name], warm_cosine, NORM)
    return values, {key: tensor.detach() for key, tensor in module.state_dict().items()}, norm
