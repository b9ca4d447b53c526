"""A custom op between two matmuls: without a sharding rule it is replicated, with one it is sharded like the matmuls.

python examples/custom_op.py
"""

from __future__ import annotations

import torch
from eager import compared, train_on_one_device
from soft_cap import soft_cap
from torch import Tensor, nn
from torch.nn import functional as F

import autopar


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gain = nn.Parameter(torch.ones(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(soft_cap(self.up(x), self.gain))


class Capped(nn.Module):
    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, targets)


def build() -> Capped:
    torch.manual_seed(0)
    return Capped().double()


def main() -> tuple[list[float], list[float], tuple[int, int]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 8, 32, generator=generator, dtype=torch.float64)
    batches = [{"x": x, "targets": x.roll(1, dims=2).tanh()}] * 10

    with autopar.compile(build(), 2, batches[0], tensor=2) as program:
        before = program.folder.joinpath("model.py").read_text().count("spmd.all_gather(")
    report = autopar.register_rule("examples::soft_cap", "* d, d -> * d")  # dim d of both operands and of the result
    with autopar.compile(build(), 2, batches[0], tensor=2, lr=1e-2) as program:
        after = program.folder.joinpath("model.py").read_text().count("spmd.all_gather(")
        losses = program.train(batches)
    alone = train_on_one_device(build(), batches, 1e-2)
    assert report.difference < 1e-12  # of the shards' results and gradients, as the registration measured them
    print(f"all-gathers in model.py: {before} without the rule, {after} with it; {compared(losses, alone)}")
    return losses, alone, (before, after)


if __name__ == "__main__":
    main()
