"""The benchmark's models: each is an embedding, blocks and a head, which are easy to cut and shard by hand.

They are small enough for a laptop's CPU. One is dominated by compute, one by parameters, one by activations, one by its vocabulary; one is
deep.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model with its data: ``build()`` makes the module (with values from torch's generator), ``batch(seed)`` a global batch (inputs,
    targets) of ``rows`` rows and ``tokens`` tokens. ``blocks`` is the number of blocks."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    rows: int
    tokens: int
    blocks: int


class Stack(nn.Module):
    """Computes ``head(blocks(embedding(x)))``."""

    def __init__(self, embedding: nn.Module, blocks: list[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.blocks = nn.ModuleList(blocks)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Attention(nn.Module):
    """Causal self-attention with rotary positions. The number of heads follows from the size of ``q``, so that heads may be sharded."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, length = x.shape[0], x.shape[1]
        q, k, v = (p(x).view(rows, length, -1, self.head).transpose(1, 2) for p in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True)
        return self.o(out.transpose(1, 2).reshape(rows, length, -1))


def _rotate(x: Tensor) -> Tensor:
    """Return ``x`` with rotary positions (Su et al. 2021, eq. 34; dim i is paired with dim i + half). Angles are in float32, the result in
    the dtype of ``x``."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32).unsqueeze(1) * rates
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1).to(x.dtype)


class GatedMLP(nn.Module):
    """Computes ``down(silu(gate(x)) * up(x))`` (Shazeer 2020)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class DecoderBlock(nn.Module):
    """A Llama block."""

    def __init__(self, width: int, head: int, inner: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = Attention(width, head), GatedMLP(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class WideBlock(nn.Module):
    """Two wide layers with a residual, as in the dense part of a recommender."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class GPTBlock(nn.Module):
    """A block as in GPT-2: layer norms, and biases in the MLP; positions are rotary."""

    def __init__(self, width: int, head: int, inner: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, head)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy over all tokens; ``logits`` is (b, s, vocabulary), ``labels`` (b, s)."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _decoder(
    name: str, width: int, layers: int, length: int, rows: int, vocabulary: int = 2048, gpt: bool = False
) -> BenchModel:
    def block() -> nn.Module:
        return GPTBlock(width, 64, 4 * width) if gpt else DecoderBlock(width, 64, width * 8 // 3 // 64 * 64)

    def build() -> Stack:
        blocks = [block() for _ in range(layers)]
        norm = nn.LayerNorm(width) if gpt else nn.RMSNorm(width)
        head = nn.Sequential(norm, nn.Linear(width, vocabulary, bias=False))
        return Stack(nn.Embedding(vocabulary, width), blocks, head)

    def batch(seed: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, vocabulary, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return BenchModel(name, build, batch, token_loss, rows, rows * length, layers)


def _wide(name: str, width: int, inner: int, layers: int, rows: int) -> BenchModel:
    def build() -> Stack:
        blocks: list[nn.Module] = [WideBlock(width, inner) for _ in range(layers)]
        return Stack(nn.Linear(64, width), blocks, nn.Linear(width, 16))

    def batch(seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(rows, 64, generator=generator), torch.randn(rows, 16, generator=generator)

    return BenchModel(name, build, batch, F.mse_loss, rows, rows, layers)


MODELS: dict[str, BenchModel] = {
    subject.name: subject
    for subject in (
        _decoder("llama", width=256, layers=6, length=128, rows=8),
        _wide("wide-mlp", width=512, inner=8192, layers=4, rows=32),
        _decoder("long-sequence", width=128, layers=4, length=2048, rows=4),
        _decoder("deep-gpt", width=192, layers=12, length=128, rows=8, gpt=True),
        _decoder("large-vocabulary", width=128, layers=4, length=64, rows=8, vocabulary=16384),
    )
}
"""The models of ``autopar bench``, by name."""

LARGE: dict[str, BenchModel] = {
    subject.name: subject
    for subject in (
        _decoder("gpt2-0.12b", width=768, layers=12, length=1024, rows=16, vocabulary=50304, gpt=True),
        _decoder("llama-0.4b", width=1536, layers=12, length=2048, rows=8, vocabulary=32768),
        _decoder("llama-0.9b", width=2048, layers=16, length=2048, rows=6, vocabulary=32768),
    )
}
"""Models of 0.1 to 1 billion parameters, for one GPU."""


def subject(name: str) -> BenchModel:
    """Return the model ``name`` of ``MODELS`` or ``LARGE``, or the one that ``"module:attribute"`` names."""
    module, _, attribute = name.partition(":")
    if attribute:
        found: BenchModel = getattr(importlib.import_module(module), attribute)
        return found
    return MODELS[name] if name in MODELS else LARGE[name]
