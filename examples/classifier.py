"""A small transformer classifier as users write one: the model of the guide (``docs/guide``)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Classifier(nn.Module):
    """Tokens in, the mean of the encoder's outputs to a linear head, cross entropy out."""

    def __init__(self, vocabulary: int = 1000, width: int = 64, depth: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.encoder(self.embedding(tokens)).mean(1)
        return F.cross_entropy(self.head(x), labels)


def model() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and an example of one global batch, as the command line takes them."""
    torch.manual_seed(0)
    batch = {"tokens": torch.randint(0, 1000, (16, 32)), "labels": torch.randint(0, 10, (16,))}
    return Classifier(), batch
