"""A plain GPT learns Python's own sources through ``program.loader``: each process reads its own rows of every shuffled batch.

python examples/gpt.py
"""

from __future__ import annotations

import torch
from eager import compared, library_bytes, train_on_one_device
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DistributedSampler

import autopar

ROWS, BATCH, LENGTH, STEPS, LR = 48, 8, 32, 12, 1e-3


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (each.view(b, t, self.heads, -1).transpose(1, 2) for each in self.qkv(self.norm1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 256, width: int = 64, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def build() -> GPT:
    torch.manual_seed(0)
    return GPT().double()


def main() -> tuple[list[float], list[float]]:
    text = library_bytes(ROWS * LENGTH + 1)
    data = {"tokens": text[:-1].view(ROWS, LENGTH), "labels": text[1:].view(ROWS, LENGTH)}
    batch = {name: tensor[:BATCH] for name, tensor in data.items()}
    with autopar.compile(build(), 2, batch, lr=LR) as program:
        losses = program.train(program.loader(data, shuffle=True, seed=1), steps=STEPS)

    order = DistributedSampler(range(ROWS), num_replicas=1, rank=0, seed=1)  # type: ignore[arg-type, var-annotated]
    batches = []
    for epoch in range(STEPS * BATCH // ROWS):
        order.set_epoch(epoch)
        batches += [{n: t[rows] for n, t in data.items()} for rows in torch.tensor(list(order)).split(BATCH)]
    alone = train_on_one_device(build(), batches, LR)
    print(compared(losses, alone))
    return losses, alone


if __name__ == "__main__":
    main()
