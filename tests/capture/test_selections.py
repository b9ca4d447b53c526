"""Rows that a boolean mask selects, in a loss or in the model: computed on all rows, exactly, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import capture
from autopar.capture.reference import run as run_graph
from autopar.errors import CaptureError
from autopar.ops.facts import op_name
from autopar.ops.operands import dtype_of, operands
from autopar.search.manual import manual_plan
from autopar.verify import check_plan, make_subject
from autopar.verify.attacks import compare_with_eager

Act = Callable[[Any, Tensor, Tensor], Tensor]


class Selecting(nn.Module):
    """``act(self, h, t)`` gives the loss, from hidden values and targets."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.act = act

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.act(self, self.c(torch.tanh(self.b(torch.tanh(self.a(x))))), t)


def batch() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2, 3, 32, dtype=torch.float64).reshape(8, 4).sin()
    t = torch.linspace(0, 5, 32, dtype=torch.float64).reshape(8, 4).cos()
    return x, torch.where(torch.arange(32).reshape(8, 4) % 5 == 0, torch.nan, t)


def mean(m: Any, h: Tensor, t: Tensor) -> Tensor:
    return (h - t.nan_to_num()).square()[~t.isnan()].mean()


def both(m: Any, h: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(h[~t.isnan()], t[~t.isnan()])


def chosen(m: Any, h: Tensor, t: Tensor) -> Tensor:
    return F.smooth_l1_loss(h.masked_select(t > 0), t.masked_select(t > 0), reduction="sum") / (t > 0).sum()


def size(m: Any, h: Tensor, t: Tensor) -> Tensor:
    kept = h[t > 0]
    return kept.square().sum() / kept.numel()


def rows(m: Any, h: Tensor, t: Tensor) -> Tensor:
    labels = torch.where(t[:, 1] > 0.5, -1, (t[:, 2] > 0) + 2 * (t[:, 3] > 0))
    return F.cross_entropy(h[labels != -1], labels[labels != -1])


def listed(m: Any, h: Tensor, t: Tensor) -> Tensor:
    places = (t[:, 1] > 0).nonzero().squeeze(1)
    return F.cross_entropy(h[places] * m.scale, t[places].argmax(1), reduction="sum")


def head(m: Any, h: Tensor, t: Tensor) -> Tensor:
    """What is not selected has no logarithm, and the selected rows share parameters."""
    logarithm = h[h > 0].log() * m.scale[0]
    return logarithm.square().mean() + F.layer_norm(h[t[:, 1] > 0], [4], m.scale).exp().sum(0).mean()


def written(m: Any, h: Tensor, t: Tensor) -> Tensor:
    rows = t[:, 1] > 0
    out = h * 1
    out[rows] = F.linear(h[rows], m.scale.diag()).tanh() * 2
    places = rows.nonzero().squeeze(1)
    return out.index_copy(0, places, out[places].exp()).index_add(0, places, h[places]).square().mean()


def neighbours(m: Any, h: Tensor, t: Tensor) -> Tensor:
    """Edges of a graph without those from a node to itself."""
    start, end = (t[:, 1] * 4).round().long().abs() % 8, (t[:, 2] * 4).round().long().abs() % 8
    start, end = start[start != end], end[start != end]
    return torch.zeros_like(h).index_add(0, end, h[start]).exp().mean()


CASES = [mean, both, chosen, size, rows, listed, head, written, neighbours]


@pytest.mark.parametrize("act", CASES, ids=lambda act: act.__name__)
def test_equals_eager(act: Act) -> None:
    torch.manual_seed(0)
    subject = make_subject(Selecting(act).double(), batch())
    assert compare_with_eager(subject).exact
    assert not subject.graph.opaque


def test_losses_of_rows_leave_the_batch_divisible() -> None:
    torch.manual_seed(0)
    for act in (mean, both, rows, listed):
        assert not capture(Selecting(act).double(), batch()).unmicrobatchable


@pytest.mark.parametrize(
    "options", [{"data": 2, "zero": 3}, {"tensor": 2}, {"pipeline": 2, "microbatches": 2}], ids=str
)
@pytest.mark.parametrize("act", [both, rows], ids=lambda act: act.__name__)
def test_programs_are_exact(act: Act, options: dict[str, Any], workers2: WorkerPool) -> None:
    torch.manual_seed(0)
    subject = make_subject(Selecting(act).double(), batch())
    assert check_plan(subject, manual_plan(subject.graph, **options), workers2).error.exact


def counted(m: Any, h: Tensor, t: Tensor) -> Tensor:
    kept = h[t > 0]
    return kept.square().sum() / kept.shape[0]


def shared(m: Any, h: Tensor, t: Tensor) -> Tensor:
    kept = h[t > 0]
    return (kept.square() / kept.shape[0]).sum()


@pytest.mark.parametrize("act", [counted, shared, lambda m, h, t: F.mse_loss(h[t > 0], t[t > 0] - 1)])
def test_float16_has_no_number_for_the_rows(act: Act) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return act(self, x * self.scale, t)

    batch = {"x": torch.full((70_000,), 0.5), "t": torch.ones(70_000)}
    graph = capture(Scaled(), batch, precision="float16")
    scale = torch.ones((), dtype=torch.float16, requires_grad=True)
    loss = run_graph(graph, {"scale": scale}, {name: value.half() for name, value in batch.items()})
    loss.backward()
    quotients = [n for c in graph.classes.values() for n in c.graph.graph.nodes if op_name(n) == "aten.div"]
    assert quotients and all(dtype_of(n) == torch.float32 for node in quotients for n in operands(node))
    assert loss.dtype == torch.float32 or act is shared
    assert float(loss.detach()) == pytest.approx(0.25, rel=0.01) and float(scale.grad) == pytest.approx(0.5, rel=0.01)


def products(m: Any, h: Tensor, t: Tensor) -> Tensor:
    kept = h[t[:, 1] > 0]
    return (kept @ kept.T).exp().mean()


def numbered(m: Any, h: Tensor, t: Tensor) -> Tensor:
    kept = h[t[:, 1] > 0]
    return (kept * torch.arange(kept.shape[0])[:, None]).mean()


def shifted(m: Any, h: Tensor, t: Tensor) -> Tensor:
    kept = h[t[:, 1] > 0]
    return (kept[1:] - kept[:-1]).square().mean()


def largest(m: Any, h: Tensor, t: Tensor) -> Tensor:
    return h[t > 0].max()


def normed(m: Any, h: Tensor, t: Tensor) -> Tensor:
    return F.batch_norm(h[t[:, 1] > 0], None, None, training=True).square().mean()


def different(m: Any, h: Tensor, t: Tensor) -> Tensor:
    rows = t[:, 1] > 0
    kept, other = h[rows], h[rows.logical_not()]
    return kept.exp().sum() * other.softmax(0).mean()


@pytest.mark.parametrize("act", [products, numbered, shifted, largest, normed, different], ids=lambda a: a.__name__)
def test_rows_that_meet_stay_refused(act: Act) -> None:
    with pytest.raises(CaptureError, match="depends on the data"):
        capture(Selecting(act).double(), batch())


def test_a_mask_that_was_written_to_is_another_mask() -> None:
    def act(m: Any, h: Tensor, t: Tensor) -> Tensor:
        one = t > 0
        first = t[one].sum()
        one &= t < 0.5
        return first * h.mean() + h[one].sum() + 2 * h[t > 0].sum()

    torch.manual_seed(0)
    assert compare_with_eager(make_subject(Selecting(act).double(), batch())).exact


def test_a_part_of_a_mask_is_not_a_part_of_an_equal_mask() -> None:
    def act(m: Any, h: Tensor, t: Tensor) -> Tensor:
        one, other = t > 0, t > 0
        other[:, 0] |= True
        return (h * one).sum() + 2 * (h * other).sum()

    torch.manual_seed(0)
    assert compare_with_eager(make_subject(Selecting(act).double(), batch())).exact
