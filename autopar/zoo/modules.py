"""The zoo's plain PyTorch modules: published models that transformers doesn't have, as their authors describe them.

Every module takes a batch with its labels or targets, and returns the loss. ``MODULES`` maps a configuration's ``"module"`` to the class
and to the function that makes its batch; the configuration's other entries are the class's arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from torch import Tensor, nn

from autopar.errors import BatchError

# -- U-Net ------------------------------------------------------------------------------------------------------------


class DoubleConv(nn.Sequential):
    """Two 3 x 3 convolutions, each with batch norm and ReLU."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        )


class Down(nn.Module):
    """Halves the resolution, and doubles the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2)
        self.conv = DoubleConv(channels, 2 * channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.pool(x))


class Up(nn.Module):
    """Doubles the resolution, halves the channels, and concatenates the skip connection from the same level of the downward path."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, channels // 2, kernel_size=2, stride=2)
        self.conv = DoubleConv(channels, channels // 2)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.conv(torch.cat([skip, self.up(x)], dim=1))


class UNet(nn.Module):
    """The U-Net of Ronneberger, Fischer and Brox (arXiv:1505.04597, figure 1), but with padded convolutions and batch norm. A skip
    connection leads from each level of the downward path to the same level of the upward path. ``pixel_values`` is (b, 3, h, w),
    ``labels`` (b, h, w) has a class per pixel."""

    def __init__(self, channels: int, depth: int, num_labels: int, image_size: int) -> None:
        super().__init__()
        assert image_size % 2**depth == 0, (image_size, depth)
        self.first = DoubleConv(3, channels)
        self.down = nn.ModuleList(Down(channels * 2**level) for level in range(depth))
        self.up = nn.ModuleList(Up(channels * 2**level) for level in range(depth, 0, -1))
        self.last = nn.Conv2d(channels, num_labels, kernel_size=1)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        x = self.first(pixel_values)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(x)
        for up in self.up:
            x = up(x, skips.pop())
        return F.cross_entropy(self.last(x), labels)


# -- diffusion transformer --------------------------------------------------------------------------------------------


class TimestepEmbedder(nn.Module):
    """Embeds diffusion steps (b,) as (b, width): an MLP of their sines and cosines."""

    def __init__(self, width: int, frequencies: int = 256) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.mlp = nn.Sequential(nn.Linear(frequencies, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        half, dtype = self.frequencies // 2, next(self.mlp.parameters()).dtype
        wide = torch.promote_types(dtype, torch.float32)  # 16 bits are too few for angles
        rates = torch.exp(-math.log(10000) * torch.arange(half, device=t.device, dtype=wide) / half)
        angles = t[:, None] * rates[None]
        return self.mlp(torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1).to(dtype))


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiTBlock(nn.Module):
    """A block with adaLN: ``condition`` (b, width) determines shift, scale and gate of attention and of the MLP; ``x`` is (b, n, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attn = SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift1, scale1))
        return x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))


class DiT(nn.Module):
    """Peebles and Xie's diffusion transformer (arXiv:2212.09748) without the learned variance: it predicts the ``noise``.

    ``latents`` and ``noise`` are (b, 4, size, size), ``steps`` and ``labels`` (b,). The noise schedule is linear in beta, with 1,000 steps.
    """

    signal: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_hidden_layers: int,
        num_attention_heads: int,
        image_size: int,
        patch_size: int,
        num_labels: int,
    ) -> None:
        super().__init__()
        self.patch, self.side = patch_size, image_size // patch_size
        self.embed = nn.Conv2d(4, hidden_size, patch_size, stride=patch_size)
        self.position = nn.Parameter(torch.empty(1, self.side**2, hidden_size), requires_grad=False)
        self.step = TimestepEmbedder(hidden_size)
        self.label = nn.Embedding(num_labels + 1, hidden_size)  # the last row stands for no label, for guidance
        self.blocks = nn.ModuleList(DiTBlock(hidden_size, num_attention_heads) for _ in range(num_hidden_layers))
        self.norm = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))
        self.last = nn.Linear(hidden_size, 4 * patch_size**2)
        self.register_buffer("signal", torch.cumprod(1 - torch.linspace(1e-4, 0.02, STEPS), dim=0), persistent=False)
        nn.init.normal_(self.position, std=0.02)

    def forward(self, latents: Tensor, noise: Tensor, steps: Tensor, labels: Tensor) -> Tensor:
        signal = self.signal[steps].view(-1, 1, 1, 1)
        noisy = signal.sqrt() * latents + (1 - signal).sqrt() * noise
        x = self.embed(noisy.to(latents.dtype)).flatten(2).transpose(1, 2) + self.position
        condition = self.step(steps) + self.label(labels)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition).chunk(2, dim=1)
        x = self.last(modulate(self.norm(x), shift, scale))
        return F.mse_loss(self._to_places(x), noise)

    def _to_places(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, self.side, self.side, self.patch, self.patch, 4)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(-1, 4, self.side * self.patch, self.side * self.patch)


# -- language models on torch.nn's own layers -------------------------------------------------------------------------


class EncoderLM(nn.Module):
    """A causal language model on ``nn.TransformerEncoder``: ``input_ids`` and ``labels`` are (b, s); labels are the next tokens."""

    def __init__(
        self,
        hidden_size: int,
        num_hidden_layers: int,
        num_attention_heads: int,
        intermediate_size: int,
        vocab_size: int,
        positions: int,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Embedding(positions, hidden_size)
        layer = nn.TransformerEncoderLayer(
            hidden_size, num_attention_heads, intermediate_size, dropout=0.0, batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(hidden_size)
        self.encoder = nn.TransformerEncoder(layer, num_hidden_layers, norm, enable_nested_tensor=False)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        length = input_ids.shape[1]
        x = self.tokens(input_ids) + self.positions(torch.arange(length, device=input_ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=input_ids.device, dtype=x.dtype)
        return F.cross_entropy(self.head(self.encoder(x, mask=mask)).flatten(0, 1), labels.flatten())


class LSTMLM(nn.Module):
    """A language model on ``nn.LSTM``: ``input_ids`` and ``labels`` are (b, s); labels are the next tokens."""

    def __init__(self, hidden_size: int, num_layers: int, vocab_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.rnn = nn.LSTM(hidden_size, hidden_size, num_layers, batch_first=True)
        self.head = nn.Linear(hidden_size, vocab_size)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, _ = self.rnn(self.tokens(input_ids))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


# -- two towers -------------------------------------------------------------------------------------------------------


class TwoTower(nn.Module):
    """A retrieval model with a tower for ``users`` and one for ``items``, both (b,). The loss is the binary cross entropy of the click
    ``labels`` (b,) plus the cross entropy of finding each user's item among the batch's items (in-batch negatives). ``forward`` returns
    the loss and its first term, detached."""

    def __init__(self, num_embeddings: int, embedding_size: int, layer_sizes: list[int]) -> None:
        super().__init__()
        self.user, self.item = (_tower(num_embeddings, embedding_size, layer_sizes) for _ in range(2))

    def forward(self, users: Tensor, items: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        user, item = self.user(users), self.item(items)
        clicked = F.binary_cross_entropy_with_logits((user * item).sum(-1), labels)
        found = F.cross_entropy(user @ item.T, torch.arange(len(users), device=users.device))
        return clicked + found, clicked.detach()


def _tower(num_embeddings: int, width: int, layer_sizes: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Embedding(num_embeddings, width)]
    for before, after in zip([width, *layer_sizes], layer_sizes, strict=False):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers)


# -- batches for modules ----------------------------------------------------------------------------------------------

STEPS = 1000  # the number of DiT's diffusion steps


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes random tensors with ``rows`` rows: ``integers`` below ``high``, on the CPU; ``normal`` normal numbers, on meta if ``meta``."""

    config: dict[str, Any]
    rows: int
    seq: int
    dtype: torch.dtype
    meta: bool
    generator: torch.Generator

    def normal(self, *sizes: int) -> Tensor:
        if self.meta:  # a batch of a few thousand images is gigabytes: planning reads only its shape
            return torch.empty((self.rows, *sizes), dtype=self.dtype, device="meta")
        return torch.randn((self.rows, *sizes), generator=self.generator).to(self.dtype)

    def integers(self, high: int, *sizes: int) -> Tensor:
        return torch.randint(high, (self.rows, *sizes), generator=self.generator)


Batch = dict[str, Tensor]


def _unet_batch(make: _Maker) -> Batch:
    size = make.config["image_size"]
    return {"pixel_values": make.normal(3, size, size), "labels": make.integers(make.config["num_labels"], size, size)}


def _dit_batch(make: _Maker) -> Batch:
    size = make.config["image_size"]
    return {
        "latents": make.normal(4, size, size),
        "noise": make.normal(4, size, size),
        "steps": make.integers(STEPS),
        "labels": make.integers(make.config["num_labels"]),
    }


def _text_batch(make: _Maker) -> Batch:
    if make.seq < 1:
        raise BatchError(f"a sequence of {make.seq} tokens has no next token to learn", "--seq must be at least 1")
    tokens = make.integers(make.config["vocab_size"], make.seq + 1)
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def _pairs_batch(make: _Maker) -> Batch:
    many = make.config["num_embeddings"]
    return {"users": make.integers(many), "items": make.integers(many), "labels": make.integers(2).to(make.dtype)}


MODULES: dict[str, tuple[Callable[..., nn.Module], Callable[[_Maker], Batch]]] = {
    "UNet": (UNet, _unet_batch),
    "DiT": (DiT, _dit_batch),
    "EncoderLM": (EncoderLM, _text_batch),
    "LSTMLM": (LSTMLM, _text_batch),
    "TwoTower": (TwoTower, _pairs_batch),
}


def module_and_batch(
    config: dict[str, Any], seq: int, global_batch: int, dtype: torch.dtype, device: str
) -> tuple[nn.Module, Batch]:
    """Return the module of a configuration, on the CPU in float32, and its batch on ``device`` with floating-point tensors in ``dtype``.

    ``seq`` is the sequence length in tokens; modules without sequences ignore it.
    """
    arguments = {key: value for key, value in config.items() if key != "module"}
    build, batch = MODULES[config["module"]]
    maker = _Maker(config, global_batch, seq, dtype, device == "meta", torch.Generator().manual_seed(0))
    return build(**arguments), {name: tensor.to(device) for name, tensor in batch(maker).items()}
