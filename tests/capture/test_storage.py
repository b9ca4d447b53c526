"""Tensors that share memory without being one object, and state that forward keeps between its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_faults import ROWS, WIDTH, Small
from torch import Tensor, nn

import autopar
from autopar.capture import capture, check_capture, export, storage
from autopar.capture.eager import MOVE, copy_for_eager, update
from autopar.errors import CaptureError
from autopar.verify import attack, make_subject


def rows(count: int = ROWS) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(0))


class Two(Small):
    """A second product; ``share`` changes which memory its weight, or an attribute, has."""

    def __init__(self, share: Callable[[Any], None]) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("kept", torch.ones(WIDTH, WIDTH))
        self.held: Any = torch.ones(WIDTH, WIDTH)
        self.nested: dict[str, Any] = {"held": [torch.ones(WIDTH, WIDTH)]}
        share(self)

    def middle(self, x: Tensor) -> Tensor:
        return self.again(x).tanh() @ (self.kept + self.held + self.nested["held"][0])


def _tie(model: Any) -> None:
    model.again.weight.data = model.first.weight.data


def _part(model: Any) -> None:
    model.first.weight.data = torch.randn(2 * WIDTH, WIDTH)[WIDTH // 2 :][:WIDTH]
    model.again.weight.data = model.first.weight.data.as_strided((WIDTH, WIDTH), (WIDTH, 1), 0)


def _turned(model: Any) -> None:
    model.again.weight.data = model.first.weight.data.t()


def _frozen(model: Any) -> None:
    model.again.weight = nn.Parameter(model.first.weight.data, requires_grad=False)


def _buffer(model: Any) -> None:
    model.kept = model.first.weight.data


def _attribute(model: Any) -> None:
    model.held = model.first.weight.detach()


def _nested(model: Any) -> None:
    model.nested["held"][0] = model.first.weight.data[:, :1]


OVERLAPS = {
    _part: "the parameter again.weight [8, 8] shares memory with the parameter first.weight [8, 8] (partly)",
    _turned: "the parameter again.weight [8, 8] shares memory with the parameter first.weight [8, 8] (its elements in another shape)",
    _frozen: "the frozen parameter again.weight [8, 8] shares memory with the parameter first.weight [8, 8] (all of it)",
    _buffer: "the buffer kept [8, 8] shares memory with the parameter first.weight [8, 8] (all of it)",
    _attribute: "the attribute held [8, 8] shares memory with the parameter first.weight [8, 8] (all of it)",
    _nested: "the attribute nested['held'][0] [8, 1] shares memory with the parameter first.weight [8, 8] (a part of it)",
}


@pytest.mark.parametrize("share", OVERLAPS)
def test_what_shares_memory_with_a_parameter_is_refused_by_name(share: Callable[[Any], None]) -> None:
    for device in ("cpu",) if share is _attribute else ("cpu", "meta"):
        with torch.device(device), pytest.raises(CaptureError) as raised:
            capture(Two(share), rows())
        assert raised.value.message.startswith(OVERLAPS[share]) and "tensor.clone()" in str(raised.value.hint)


@pytest.mark.parametrize("share", [_part, _turned, _buffer, _attribute])
def test_an_update_between_two_steps_shows_what_shares_memory(
    share: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By execution alone: the copies that eager PyTorch runs share memory as the model's tensors do."""
    monkeypatch.setattr(export, "refuse_overlaps", lambda *_: None)
    model = Two(share)
    with pytest.raises(CaptureError, match="in the second step"):
        check_capture(capture(model, rows()), model, rows(), None)
    attacks = attack(model, None, make_subject(model, rows()))
    assert attacks.tried["the given batch"].exact or share is _turned
    assert not attacks.tried["two steps in a row"].exact


def test_parameters_over_the_same_memory_are_one_parameter() -> None:
    model = Two(_tie)
    graph = capture(model, rows())
    assert graph.parameters["first.weight"].tied == ("again.weight",) and "again.weight" not in graph.parameters
    assert {entry.name: entry.alias for entry in graph.state}["again.weight"] == "first.weight"
    assert any("again.weight is first.weight, in the same memory: one parameter" in note for note in graph.notes)
    assert not any("does not depend" in note for note in graph.notes)
    assert "equals the model over two steps" in check_capture(graph, model, rows(), None).note
    assert model.again.weight is not model.first.weight and model.again.weight.grad is None
    subject = make_subject(model, rows())
    assert attack(model, None, subject).tried["two steps in a row"].exact


def test_a_trained_tie_by_memory_has_its_value_under_both_names() -> None:
    model = Two(_tie)
    program = autopar.compile(model, 1, rows(), type_check=False, optimizer=torch.optim.SGD, max_norm=None)
    with program:
        program.step(rows())
        state = program.state_dict()
    first = model.first.weight.detach().clone()
    model(rows()).backward()
    with torch.no_grad():  # SGD writes to the memory once for each object
        for parameter in model.parameters():
            parameter -= 1e-3 * parameter.grad  # SGD's own rate
    for name, value in model.state_dict().items():
        assert torch.allclose(state[name], value, atol=1e-6)
    assert not torch.equal(first, state["again.weight"])


def test_disjoint_views_of_one_memory_are_parameters_of_their_own() -> None:
    def apart(model: Any) -> None:
        flat = torch.randn(WIDTH, 2 * WIDTH)
        model.first.weight.data, model.again.weight.data = flat[:, ::2], flat[:, 1::2]

    model = Two(apart)
    assert "equals the model over two steps" in check_capture(capture(model, rows()), model, rows(), None).note


def test_copies_share_memory_and_casts_keep_it() -> None:
    for share in (_tie, _part, _turned, _buffer, _attribute, _nested):
        model = Two(share)
        copied = copy_for_eager(model).model
        pairs = {name: getattr(copied, name) for name in ("kept", "held")} | {"again": copied.again.weight}
        shared = [
            name for name, tensor in pairs.items() if storage.memory(tensor) == storage.memory(copied.first.weight)
        ]
        assert bool(shared) is (share is not _nested) and copied.first.weight.dtype == torch.float64
        for (_, mine), (_, theirs) in zip(model.named_parameters(), copied.named_parameters(), strict=True):
            assert torch.equal(mine.double(), theirs) and storage.memory(mine) != storage.memory(theirs)


def test_an_update_moves_what_has_a_gradient() -> None:
    parameters = {name: torch.ones(2) for name in ("moved", "zero", "none")}
    update(parameters, {"moved": torch.tensor([1e-20, 0.0]), "zero": torch.zeros(2)})
    assert parameters["moved"].tolist() == [1 - MOVE, 1.0] and parameters["zero"].tolist() == [1.0, 1.0]
