"""Loops over data in a forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_capture_models import assert_equals_eager
from torch import Tensor, nn

from autopar.capture import capture, loops
from autopar.errors import CaptureError


class Recurrence(nn.Module):
    """A state that every position changes, in a function called for each of some chunks."""

    def __init__(self, chunks: int = 1) -> None:
        super().__init__()
        self.decay, self.chunks = nn.Parameter(torch.rand(4)), chunks

    def scan(self, x: Tensor, state: Tensor) -> Tensor:
        for t in range(x.shape[1]):
            state = state * self.decay.sigmoid() + x[:, t]
        return state

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for chunk in x.chunk(self.chunks, 1):
            state = self.scan(chunk, state)
        return state


class Model(nn.Module):
    def __init__(self, chunks: int = 1) -> None:
        super().__init__()
        self.up, self.recurrence = nn.Linear(4, 4), Recurrence(chunks)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrence(self.up(x))


@pytest.fixture
def few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "MAX_ITERATIONS", 12)


def batch(device: str = "cpu", length: int = 16) -> tuple[Any, ...]:
    return tuple(torch.randn(*shape, device=device, dtype=torch.float64) for shape in ((2, length, 4), (2, 4)))


def test_a_module_with_a_long_loop_runs_as_one_opaque_op(few_turns: None) -> None:
    graph = assert_equals_eager(Model(), batch(), nn.functional.mse_loss)
    (note,) = [text for text in graph.notes if "runs more than 12 times in one call of scan" in text]
    assert "recurrence" in note
    assert (
        len([n for cls in graph.classes.values() for n in cls.graph.graph.nodes]) < 16
    )  # no turn of the loop is there


def test_a_loop_in_every_call_of_a_function_is_short(few_turns: None) -> None:
    """Two calls of eight turns; the loop over the calls has two."""
    assert not assert_equals_eager(Model(chunks=2), batch(), nn.functional.mse_loss).notes


def test_a_model_without_values_is_refused_at_once(few_turns: None) -> None:
    with torch.device("meta"):
        model = Model().double()
    with pytest.raises(
        CaptureError, match=r"test_capture_loops.py:\d+ runs more than 12 times in one call of scan"
    ) as caught:
        capture(model, batch("meta"), nn.functional.mse_loss, precision="float64")
    assert "autopar.opaque" in (caught.value.hint or "")
