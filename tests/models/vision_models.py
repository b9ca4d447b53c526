"""Small vision, diffusion and recurrent models of the exactness matrix, written as people write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own convention
from torch import Tensor, nn

from autopar.zoo.modules import DiT

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


def dit() -> tuple[nn.Module, Any, Any]:
    batch = {
        "latents": _normal(ROWS, 4, 8, 8),
        "noise": _normal(ROWS, 4, 8, 8, seed=7),
        "steps": _classes(1000, ROWS),
        "labels": _classes(11, ROWS),
    }
    return DiT(32, 4, 4, image_size=8, patch_size=2, num_labels=10), batch, None


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
