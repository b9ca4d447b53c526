"""Small vision, diffusion and recurrent models of the exactness matrix, written as people write them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from torch import Tensor, nn

ROWS = 8


def _normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _classes(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(2))


# -- ResNet -----------------------------------------------------------------------------------------------------------


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, inplanes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    expansion = 2

    def __init__(self, inplanes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        width = planes * self.expansion
        self.conv1 = nn.Conv2d(inplanes, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, groups=2, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inplanes != width:
            self.downsample = nn.Sequential(nn.Conv2d(inplanes, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """torchvision's, at a tenth of the width: stem, two stages, average pool, classifier."""

    def __init__(self, block: type[BasicBlock] | type[Bottleneck], layers: tuple[int, ...], classes: int = 6) -> None:
        super().__init__()
        self.inplanes = 8
        self.conv1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._make_layer(block, 8, layers[0], 1)
        self.layer2 = self._make_layer(block, 16, layers[1], 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16 * block.expansion, classes)

    def _make_layer(self, block: Any, planes: int, count: int, stride: int) -> nn.Sequential:
        blocks = [block(self.inplanes, planes, stride)]
        self.inplanes = planes * block.expansion
        return nn.Sequential(*blocks, *(block(self.inplanes, planes) for _ in range(count - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet() -> tuple[nn.Module, Any, Any]:
    return ResNet(BasicBlock, (2, 2)), (_normal(ROWS, 3, 12, 12), _classes(6, ROWS)), nn.CrossEntropyLoss()


def resnet_bottleneck() -> tuple[nn.Module, Any, Any]:
    return ResNet(Bottleneck, (1, 2)), (_normal(ROWS, 3, 10, 10), _classes(6, ROWS)), F.cross_entropy


# -- U-Net ------------------------------------------------------------------------------------------------------------


class DoubleConv(nn.Module):
    def __init__(self, before: int, after: int, norm: str) -> None:
        super().__init__()

        def make() -> nn.Module:
            return nn.BatchNorm2d(after) if norm == "batch" else nn.GroupNorm(2, after)

        self.double_conv = nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            make(),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            make(),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.double_conv(x)


class Up(nn.Module):
    """Doubles the places, pads to the skip's size, and puts the skip beside."""

    def __init__(self, before: int, after: int, norm: str, bilinear: bool) -> None:
        super().__init__()
        if bilinear:
            self.up: nn.Module = nn.Sequential(
                nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), nn.Conv2d(before, before // 2, 1)
            )
        else:
            self.up = nn.ConvTranspose2d(before, before // 2, kernel_size=2, stride=2)
        self.conv = DoubleConv(before, after, norm)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        x1 = self.up(x1)
        rows, columns = x2.size(2) - x1.size(2), x2.size(3) - x1.size(3)
        x1 = F.pad(x1, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class UNet(nn.Module):
    """Ronneberger's, with three levels: long skips from the way down to the way up."""

    def __init__(self, norm: str, bilinear: bool) -> None:
        super().__init__()
        self.inc = DoubleConv(3, 4, norm)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(4, 8, norm))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(8, 16, norm))
        self.up1 = Up(16, 8, norm, bilinear)
        self.up2 = Up(8, 4, norm, bilinear)
        self.outc = nn.Conv2d(4, 3, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x = self.up1(x3, x2)
        x = self.up2(x, x1)
        return self.outc(x)


def unet() -> tuple[nn.Module, Any, Any]:
    return UNet("batch", bilinear=False), (_normal(ROWS, 3, 10, 12), _classes(3, ROWS, 10, 12)), F.cross_entropy


def unet_group_norm() -> tuple[nn.Module, Any, Any]:
    return UNet("group", bilinear=True), (_normal(ROWS, 3, 12, 9), _normal(ROWS, 3, 12, 9, seed=3)), F.mse_loss


# -- autoencoder ------------------------------------------------------------------------------------------------------


def autoencoder() -> tuple[nn.Module, Any, Any]:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.InstanceNorm2d(16, affine=True),
        nn.SiLU(),
        nn.AvgPool2d(2),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(16, 32, 1),
        nn.PixelShuffle(2),
        nn.Hardswish(),
        nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1),
        nn.Sigmoid(),
    )
    x = _normal(ROWS, 1, 16, 16).sigmoid()
    return model, (x, x.clone()), nn.BCELoss()


# -- transformers -----------------------------------------------------------------------------------------------------


def vit() -> tuple[nn.Module, Any, Any]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=12,
        patch_size=4,
        num_labels=6,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return (
        ViTForImageClassification(config),
        {"pixel_values": _normal(ROWS, 3, 12, 12), "labels": _classes(6, ROWS)},
        None,
    )


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class TimestepEmbedder(nn.Module):
    def __init__(self, width: int, frequencies: int = 16) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(frequencies, width), nn.SiLU(), nn.Linear(width, width))
        self.frequencies = frequencies

    def forward(self, t: Tensor) -> Tensor:
        half = self.frequencies // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(0, half, dtype=torch.float32) / half).to(t.device)
        args = t[:, None].float() * freqs[None]
        embedding = torch.cat([torch.cos(args), torch.sin(args)], dim=-1)
        return self.mlp(embedding.to(self.mlp[0].weight.dtype))


class DiTAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


class DiTBlock(nn.Module):
    """adaLN-zero: shift, scale and gate from the conditioning."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attn = DiTAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(approximate="tanh"), nn.Linear(2 * width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate_msa.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_msa, scale_msa))
        return x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))


class DiT(nn.Module):
    """Peebles and Xie's diffusion transformer (arXiv:2212.09748); the noise comes in, the loss is its prediction's error."""

    def __init__(self, size: int = 8, patch: int = 2, width: int = 32, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.patch, self.channels = patch, 4
        self.x_embedder = nn.Conv2d(4, width, patch, stride=patch)
        self.t_embedder = TimestepEmbedder(width)
        self.y_embedder = nn.Embedding(11, width)
        self.register_buffer("pos_embed", _normal(1, (size // patch) ** 2, width, seed=5))
        self.register_buffer("alphas", torch.linspace(0.99, 0.05, 100, dtype=torch.float64))
        self.blocks = nn.ModuleList([DiTBlock(width, heads) for _ in range(depth)])
        self.norm_final = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.linear = nn.Linear(width, patch * patch * 4)

    def unpatchify(self, x: Tensor) -> Tensor:
        side = int(x.shape[1] ** 0.5)
        x = x.reshape(x.shape[0], side, side, self.patch, self.patch, self.channels)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(
            x.shape[0], self.channels, side * self.patch, side * self.patch
        )

    def forward(self, x: Tensor, t: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        alpha = self.alphas[t].view(-1, 1, 1, 1)
        noisy = alpha.sqrt() * x + (1 - alpha).sqrt() * noise
        hidden = self.x_embedder(noisy).flatten(2).transpose(1, 2) + self.pos_embed
        c = self.t_embedder(t) + self.y_embedder(y)
        for block in self.blocks:
            hidden = block(hidden, c)
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        hidden = self.linear(modulate(self.norm_final(hidden), shift, scale))
        return F.mse_loss(self.unpatchify(hidden), noise)


def dit() -> tuple[nn.Module, Any, Any]:
    batch = {
        "x": _normal(ROWS, 4, 8, 8),
        "t": _classes(100, ROWS),
        "y": _classes(11, ROWS),
        "noise": _normal(ROWS, 4, 8, 8, seed=7),
    }
    return DiT(), batch, None


# -- recurrent --------------------------------------------------------------------------------------------------------


class LSTMModel(nn.Module):
    """A language model on a two-layer LSTM that returns its states too."""

    def __init__(self, vocabulary: int = 30, width: int = 12, hidden: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Embedding(vocabulary, width)
        self.rnn = nn.LSTM(width, hidden, num_layers=2, batch_first=True)
        self.decoder = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Any]:
        out, states = self.rnn(self.encoder(tokens))
        logits = self.decoder(out)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
        return {"loss": loss, "logits": logits, "states": states}


def lstm() -> tuple[nn.Module, Any, Any]:
    tokens = _classes(30, ROWS, 7)
    labels = tokens.roll(-1, 1)
    labels[2, 3:] = -100
    return LSTMModel(), {"tokens": tokens, "labels": labels}, None


class Recurrent(nn.Module):
    """A bidirectional GRU under a plain RNN, on sequences given time first; the last state is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(5, 8, bidirectional=True)
        self.rnn = nn.RNN(16, 8, nonlinearity="relu")
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.gru(x.transpose(0, 1))
        _, state = self.rnn(out)
        return self.fc(state[-1])


def recurrent() -> tuple[nn.Module, Any, Any]:
    return Recurrent(), (_normal(ROWS, 6, 5), _classes(4, ROWS)), F.cross_entropy


MODELS = {
    "resnet": resnet,
    "resnet-bottleneck": resnet_bottleneck,
    "unet": unet,
    "unet-group-norm": unet_group_norm,
    "autoencoder": autoencoder,
    "vit": vit,
    "dit": dit,
    "lstm": lstm,
    "recurrent": recurrent,
}
