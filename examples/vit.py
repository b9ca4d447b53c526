"""A vision transformer learns scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels, which come with the package.

python examples/vit.py
"""

from __future__ import annotations

import torch
from eager import compared, train_on_one_device
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import autopar

BATCH, STEPS, TEST, LR = 64, 100, 297, 6e-3


class ViT(nn.Module):
    """Patches of 2 x 2 pixels, an encoder, the mean of its outputs to a linear head."""

    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.positions = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.encoder(x).mean(1))


def build() -> ViT:
    torch.manual_seed(0)
    return ViT().double()


def main() -> tuple[list[float], list[float], float]:
    digits = load_digits()
    images = torch.from_numpy(digits.images).unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST], order[TEST:]
    steps = [train.roll(-i * BATCH)[:BATCH] for i in range(STEPS)]
    batches = [(images[rows], labels[rows]) for rows in steps]

    with autopar.compile(build(), 2, batches[0], F.cross_entropy, lr=LR) as program:
        losses = program.train(batches)
        trained = build()
        trained.load_state_dict(program.state_dict())
    alone = train_on_one_device(build(), batches, LR, F.cross_entropy)
    with torch.no_grad():
        right = float((trained.eval()(images[test]).argmax(1) == labels[test]).double().mean())
    print(f"{compared(losses, alone)}; {right:.1%} of {TEST} unseen digits are right")
    return losses, alone, right


if __name__ == "__main__":
    main()
