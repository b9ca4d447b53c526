"""``as_strided`` reads memory: a program's values lie in another order than the model's, and it must read the same elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.search.manual import manual_plan
from autopar.verify import check_plan, make_subject
from autopar.verify.attacks import compare_with_eager

Windows = Callable[[Tensor], Tensor]


class Windowed(nn.Module):
    def __init__(self, windows: Windows) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)
        self.windows = windows

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.windows(self.a(x)).sin().sum(1)).square().mean()


def batch() -> Tensor:
    return torch.linspace(-3, 2, 4 * 6 * 4).reshape(4, 6, 4).sin()


def model(windows: Windows) -> nn.Module:
    torch.manual_seed(0)
    return Windowed(windows)


def overlapping(h: Tensor) -> Tensor:
    return h.as_strided((4, 3, 2, 8), (48, 8, 16, 1)).flatten(1, 2)


def moved(h: Tensor) -> Tensor:
    """The features are in front, and the memory is as it was."""
    return h.permute(2, 0, 1).as_strided((4, 3, 2, 8), (48, 16, 8, 1)).flatten(1, 2)


@pytest.mark.parametrize("windows", [overlapping, moved])
def test_reads_the_same_elements(windows: Windows, workers2: WorkerPool) -> None:
    subject = make_subject(model(windows), batch())
    assert compare_with_eager(subject).exact
    for options in ({"data": 2}, {"tensor": 2}, {"tensor": 2, "sequence": True}):
        outcome = check_plan(subject, manual_plan(subject.graph, **options), workers2)
        assert outcome.error.exact, (options, outcome.error)


REFUSED: dict[str, Windows] = {
    "not dense": lambda h: h[:, ::2].as_strided((4, 3, 8), (48, 16, 1)),
    "with a storage_offset": lambda h: h.as_strided((4, 3, 8), (48, 16, 1), 8),
    "beyond": lambda h: h[:3].as_strided((4, 3, 8), (48, 16, 1)),
}


@pytest.mark.parametrize("words", REFUSED)
def test_other_memory_is_refused(words: str) -> None:
    with pytest.raises(CaptureError, match=words) as error:
        capture(model(REFUSED[words]), batch())
    assert "unfold" in str(error.value.hint) and "test_strided.py" in error.value.message


class Transposed(nn.Module):
    """A block whose input is not contiguous in a single device's memory, and merges dims of it that are neighbours there alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = x.transpose(1, 2).contiguous().transpose(1, 2).clamp(min=-0.5)
        h = (h.transpose(1, 2).reshape(h.shape[0], -1) * 2.0).view(h.shape[0], 8, -1).transpose(1, 2)
        return h + self.up(h).transpose(1, 2).contiguous().transpose(1, 2)


def test_views_of_an_activation_that_another_stage_sends(workers2: WorkerPool) -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(nn.Linear(4, 8), Transposed(), Transposed(), nn.Linear(8, 4))
    subject = make_subject(blocks, (batch(), batch()), nn.functional.mse_loss)
    strides = [v.stride() for layer in subject.graph.classes.values() for v in _placeholders(layer.graph)]
    assert any(stride != tuple(sorted(stride, reverse=True)) for stride in strides), "no activation is transposed"
    for cut in range(1, len(subject.graph.layers)):
        plan = manual_plan(subject.graph, pipeline=2, cuts=(cut,), microbatches=2)
        assert check_plan(subject, plan, workers2).error.exact


class Convolved(nn.Module):
    """Attention in two heads between the pixels of convolutions' results, as in CvT: on meta these have other strides than at run time."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 3, padding=1, groups=4)
        self.value = nn.Conv2d(4, 8, 1)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        image = x.transpose(1, 2).unflatten(2, (3, 2))
        q, k, v = (t.reshape(len(x) * 2, 4, 6) for t in (self.query(image), self.key(image), self.value(image)))
        mixed = (q.transpose(1, 2) @ k).softmax(-1) @ v.transpose(1, 2)
        return nn.functional.mse_loss(self.out(mixed.transpose(1, 2).reshape(len(x), 8, 6).mean(2)), y)


@pytest.mark.parametrize("options", [{"data": 2}, {"tensor": 2}], ids=str)
def test_reshapes_of_what_convolutions_give(options: dict[str, int], workers2: WorkerPool) -> None:
    torch.manual_seed(0)
    subject = make_subject(Convolved(), {"x": batch(), "y": torch.randn(4, 4)})
    assert check_plan(subject, manual_plan(subject.graph, **options), workers2).error.exact


def _placeholders(graph: torch.fx.GraphModule) -> list[Tensor]:
    return [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
