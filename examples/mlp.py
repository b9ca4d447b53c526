"""The smallest example: ``python examples/mlp.py`` trains a perceptron on two processes of this machine.

It is also a factory for the command line: ``autopar plan examples/mlp.py:model --devices 2``.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar


def model(global_batch: int = 64) -> tuple[nn.Module, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    inputs = torch.randn(global_batch, 32)
    targets = inputs[:, :10].argmax(dim=1)
    return module, (inputs, targets), F.cross_entropy


if __name__ == "__main__":
    module, batch, loss_fn = model()
    with autopar.compile(module, 2, batch, loss_fn) as program:
        losses = program.train([batch], steps=30)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
