"""Hooks that multiply gradients by constants are part of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiers import in_short
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import capture, check_capture
from autopar.capture.hooks import scaled, scales
from autopar.errors import CaptureError
from autopar.search.manual import manual_plan
from autopar.verify import check_plan, make_subject
from autopar.verify.attacks import compare_with_eager

MASK = torch.arange(64, dtype=torch.float64).reshape(8, 8) % 3


class Hooked(nn.Module):
    """``act(y)`` between two linear layers."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.act = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4), act

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.act(self.b(torch.tanh(self.a(x)))))


def plain(y: Tensor) -> Tensor:
    return y.tanh()


def in_forward(y: Tensor) -> Tensor:
    if y.requires_grad:
        y.register_hook(lambda grad: -grad / 4)
    return y.tanh() * y


def twice(y: Tensor) -> Tensor:
    for factor in (2.0, 3.0):
        y.register_hook(lambda grad, factor=factor: grad * factor)
    return y.tanh()


def too_late(y: Tensor) -> Tensor:
    z = y.tanh()
    y.register_hook(lambda grad: grad * 2)
    return z


def of_weight(model: Any) -> None:
    model.b.weight.register_hook(lambda grad: grad * MASK)
    model.b.weight.register_hook(lambda grad: 0.5 * grad)


def of_module(model: Any) -> None:
    model.b.register_full_backward_hook(lambda module, before, after: tuple(2 * g for g in before))
    model.c.register_full_backward_pre_hook(lambda module, after: (after[0] * 3,))


def nothing(model: Any) -> None:
    pass


CASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Any], None]]] = {
    "in forward": (in_forward, nothing),
    "twice": (twice, nothing),
    "of a weight": (plain, of_weight),
    "of modules": (plain, of_module),
    "all": (in_forward, lambda model: (of_weight(model), of_module(model), None)[2]),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    act, hook = CASES[name]
    model = Hooked(act).double()
    hook(model)
    return model


def batch() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2, 3, 32, dtype=torch.float64).reshape(8, 4)
    return x.sin(), x.cos()


@pytest.mark.parametrize("name", in_short(CASES, "twice", "all"))
def test_equals_eager(name: str) -> None:
    assert compare_with_eager(make_subject(made(name), batch(), F.mse_loss)).exact
    model = made(name)
    assert "equals the model" in check_capture(capture(model, batch(), F.mse_loss), model, batch(), F.mse_loss).note


@pytest.mark.parametrize("options", [{"data": 2, "zero": 3}, {"tensor": 2}], ids=str)
def test_programs_are_exact(options: dict[str, int], workers2: WorkerPool) -> None:
    subject = make_subject(made("all"), batch(), F.mse_loss)
    assert check_plan(subject, manual_plan(subject.graph, **options), workers2).error.exact


def test_a_tensor_that_was_read_before_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"y.register_hook\(lambda grad: grad \* 2\)"):
        capture(Hooked(too_late).double(), batch(), F.mse_loss)


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (lambda g: g, True),
        (lambda g: g * 2, True),
        (lambda g: -(2 * g) / 3, True),
        (lambda g: g.mul(MASK).neg(), True),
        (lambda g: g * g, False),
        (lambda g: 1 / g, False),
        (lambda g: g + 1, False),
        (lambda g: g * 2 + g, False),
        (lambda g: g.clamp(-1, 1), False),
        (lambda g: None, False),
        (lambda g: g * 2 if g.sum() > 0 else g, False),
        (lambda g: torch.ones(3), False),
    ],
)
def test_a_hook_that_only_multiplies_is_told_apart(hook: Callable[[Any], Any], expected: bool) -> None:
    assert scales(hook) is expected


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 0.1), (torch.float16, 65536.0)])
def test_a_gradient_is_scaled_as_by_the_hook_in_a_low_dtype(dtype: torch.dtype, factor: float) -> None:
    values, gradient = torch.linspace(-2, 3, 64).to(dtype), torch.linspace(1e-6, 0.9, 64).to(dtype)
    y = values.clone().requires_grad_()
    result = scaled(y, lambda grad: grad * factor)
    result.backward(gradient)
    assert torch.equal(result, values)
    assert torch.equal(y.grad, gradient * factor)


def test_infinite_values_with_a_hook_stay_infinite() -> None:
    y = torch.tensor([1.0, torch.inf, -torch.inf], requires_grad=True)
    result = scaled(y, lambda grad: grad * 2)
    result.tanh().sum().backward()
    assert torch.equal(result, y)
    torch.testing.assert_close(y.grad, torch.tensor([2 * (1 - torch.tensor(1.0).tanh() ** 2), 0.0, 0.0]))


def test_no_gradient_flows_to_the_factors_of_a_hook() -> None:
    y, factor = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
    scaled(y, lambda grad: grad * (factor / 4)).sum().backward()
    assert factor.grad is None and torch.equal(y.grad, torch.full((3,), 0.5))
