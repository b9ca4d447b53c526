"""A decoder whose blocks are of several kinds, for ``autopar plan tests/models/kinds.py:kinds``: it imports nothing of these tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from torch import Tensor, nn


class Block(nn.Module):
    """A pre-norm transformer block, each kind with an inner width of its own."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, width))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Kinds(nn.Module):
    """A decoder of ``layers`` blocks of ``kinds`` kinds, which take turns."""

    def __init__(self, layers: int, kinds: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, (2 + i % kinds) * width) for i in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def kinds(seq: int = 4096, global_batch: int = 4096) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """About 290 B parameters, on meta."""
    with torch.device("meta"):
        model = Kinds(128, 8, 12288, 96, 51200).bfloat16()
        return model, (
            torch.zeros(global_batch, seq, dtype=torch.long),
            torch.zeros(global_batch, seq, dtype=torch.long),
        )
