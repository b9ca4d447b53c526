"""The CTC loss: exact where examples are sharded, of labels in a padded table or of what a mask leaves of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.search.manual import manual_plan
from autopar.verify import check_plan, make_subject
from autopar.verify.attacks import compare_with_eager

ROWS, TIME, CLASSES = 6, 10, 5
Loss = Callable[[Tensor, Tensor], Any]


class Speech(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.loss = loss

    def forward(self, sound: Tensor, labels: Tensor) -> Any:
        scores = self.c(torch.tanh(self.b(torch.tanh(self.a(sound))))).log_softmax(-1).transpose(0, 1)
        return self.loss(scores, labels)


def speech(loss: Loss) -> nn.Module:
    torch.manual_seed(0)
    return Speech(loss)


def batch() -> dict[str, Tensor]:
    """The second row has gaps, the third no label, and the last more of them than frames."""
    labels = torch.tensor(
        [[1, 2, 3, -100], [4, -100, 2, 1], [-100] * 4, [1, 1, 2, 2], [3, -100, -100, -100], [2, 2, 2, 2]]
    )
    return {"sound": torch.linspace(-3, 2, ROWS * TIME * 4).reshape(ROWS, TIME, 4).sin(), "labels": labels}


def frames(labels: Tensor) -> Tensor:
    return (
        torch.full((len(labels),), TIME, dtype=torch.long)
        - 3 * (labels == 4).sum(-1)
        - 4 * (labels == 2).all(-1).long()
    )


def table(scores: Tensor, labels: Tensor) -> Tensor:
    lengths = torch.full((len(labels),), 3, dtype=torch.long)
    return F.ctc_loss(scores, labels.clamp(min=1), frames(labels), lengths)


def numbers(scores: Tensor, labels: Tensor) -> Tensor:
    count = len(labels)
    return F.ctc_loss(scores, labels.clamp(min=1), (TIME,) * count, (2,) * count, blank=0, reduction="sum")


def module(scores: Tensor, labels: Tensor) -> Tensor:
    lengths = (labels > 0).sum(-1)
    return nn.CTCLoss(reduction="none", zero_infinity=True)(scores, labels.clamp(min=1), frames(labels), lengths).mean()


def selected(scores: Tensor, labels: Tensor) -> Tensor:
    mask = labels > 0
    lengths = mask.sum(-1)
    return F.ctc_loss(scores, labels.masked_select(mask), frames(labels), lengths, zero_infinity=True)


@pytest.mark.parametrize("loss", [table, numbers, module, selected])
def test_equals_eager(loss: Loss, workers2: WorkerPool) -> None:
    subject = make_subject(speech(loss), batch())
    assert compare_with_eager(subject).exact
    assert not subject.graph.opaque and not subject.graph.replicated
    for options in ({"data": 2, "zero": 3}, {"pipeline": 2, "microbatches": 2}):
        outcome = check_plan(subject, manual_plan(subject.graph, **options), workers2)
        assert outcome.error.exact, (options, outcome.error)


def read(scores: Tensor, labels: Tensor) -> Tensor:
    return scores.mean() * labels.masked_select(labels > 0).float().mean()


def added(scores: Tensor, labels: Tensor) -> Tensor:
    return scores.mean() * (labels.masked_select(labels > 0) + 1).sum()


def other_lengths(scores: Tensor, labels: Tensor) -> Tensor:
    lengths = (labels >= 0).sum(-1)
    return F.ctc_loss(scores, labels.masked_select(labels > 0), frames(labels), lengths)


def mask_that_moved(scores: Tensor, labels: Tensor) -> Tensor:
    mask = labels > 0
    lengths = mask.sum(-1)
    mask[:] = torch.ones_like(mask)
    return F.ctc_loss(scores, labels.clamp(min=1).masked_select(mask), frames(labels), lengths)


@pytest.mark.parametrize("loss", [read, added, other_lengths, mask_that_moved])
def test_what_is_selected_is_refused_elsewhere(loss: Loss) -> None:
    with pytest.raises(CaptureError, match=r"test_ctc.py:\d+ .*masked_select.*a shape depends on the data") as error:
        capture(speech(loss), batch())
    assert error.value.hint


def test_labels_in_one_row_are_refused() -> None:
    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        lengths = torch.full((ROWS,), 4)
        return F.ctc_loss(scores, labels.clamp(min=1).flatten(), frames(labels), lengths)

    with pytest.raises(CaptureError, match="takes one tensor with the labels of all examples") as error:
        capture(speech(loss), batch())
    assert "padded" in str(error.value.hint)
