"""Parameters over one memory under plans: one parameter on every rank, whichever stages, shards and layers have its two names."""

from __future__ import annotations

import pytest
import torch
from test_parameter_views import WIDTH, Block
from torch import Tensor, nn
from torch.nn import functional as F
from workers import WorkerPool

from autopar.errors import CaptureError
from autopar.verify import check_plan, kinds, make_subject

ROWS, LENGTH, VOCABULARY = 4, 6, 12


class Language(nn.Module):
    """The head has the embedding's memory, as older code ties them, and two blocks share one product."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight.data = self.embed.weight.data
        self.blocks[2].up.weight.data = self.blocks[0].up.weight.data

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class WithTable(nn.Module):
    """A loss with a table of its own, which is the model's memory."""

    def __init__(self, model: Language) -> None:
        super().__init__()
        self.register_buffer("table", model.embed.weight.data)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return of_logits(logits, labels) + (logits @ self.table).square().mean()


def tokens() -> tuple[Tensor, Tensor]:
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) * 5 % VOCABULARY
    return ids, ids.roll(1, 1)


@pytest.mark.parametrize("name", ["data 2, zero 3", "tensor 2", "pipeline 2"])
def test_tied_memory_trains_as_one_parameter(name: str, workers2: WorkerPool) -> None:
    torch.manual_seed(0)
    subject = make_subject(Language(), tokens(), of_logits)
    assert subject.graph.parameters["embed.weight"].tied == ("head.weight",)
    assert subject.graph.parameters["blocks.0.up.weight"].tied == ("blocks.2.up.weight",)
    plan = next(kind for kind in kinds(2) if kind.name == name).plan(subject.graph)
    assert check_plan(subject, plan, workers2).error.exact


def test_a_loss_that_has_the_models_memory_is_refused() -> None:
    model = Language()
    with pytest.raises(
        CaptureError, match=r"the buffer the loss function's table .* shares memory with the parameter embed"
    ):
        make_subject(model, tokens(), WithTable(model))
