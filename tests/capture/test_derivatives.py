"""Derivatives that a forward computes: ordinary nodes of the graph, exact in every plan, with gradients through them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_capture_models import assert_equals_eager
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import capture
from autopar.capture.derivative import _dependencies
from autopar.errors import CaptureError
from autopar.search.manual import manual_plan
from autopar.verify import check_plan, make_subject


class Differentiating(nn.Module):
    """``act(self, h)`` between two linear layers."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 4), nn.LayerNorm(8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self, self.a(x)))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6, 8, dtype=torch.float64), torch.randn(4, 6, 4, dtype=torch.float64)


def gradient(y: Tensor, x: Tensor, **how: Any) -> Tensor:
    return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True, **how)[0]


def penalty(model: Any, h: Tensor) -> Tensor:
    between = h.detach().requires_grad_()
    return h + gradient(torch.tanh(model.a(between)), between)


def of_activations(model: Any, h: Tensor) -> Tensor:
    return gradient(F.silu(model.a(h)).square(), h)


def twice(model: Any, h: Tensor) -> Tensor:
    first = gradient(torch.sin(model.a(h)) * h, h)
    return first + gradient(first, h)


def unconnected(model: Any, h: Tensor) -> Tensor:
    """A constant to what follows: no gradient flows through it."""
    (found,) = torch.autograd.grad(F.gelu(model.a(h)).sum(), h)
    return h * found


def by_a_weight(model: Any, h: Tensor) -> Tensor:
    """A step of an inner optimizer."""
    weight = model.a.weight
    step = gradient(F.linear(h, weight).tanh().mean(), weight)
    return F.linear(h, weight - 0.1 * step)


def unused(model: Any, h: Tensor) -> Tensor:
    other = torch.zeros_like(h).requires_grad_()
    first, second = torch.autograd.grad(model.a(h).tanh().sum(), (h, other), create_graph=True, allow_unused=True)
    return first if second is None else first * 0


def cut(model: Any, h: Tensor) -> Tensor:
    """A part of what is differentiated is held."""
    return gradient(torch.tanh(h) * model.a(h).detach() * torch.tanh(h.detach()), h)


def held(model: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = model.a(h).exp()
    return gradient((scale * h * h).tanh(), h)


def normed(model: Any, h: Tensor) -> Tensor:
    """What a layer norm hands to its backward depends on its input."""
    return gradient(model.norm(h).softmax(-1).log_softmax(-1).square(), h)


def convolved(model: Any, h: Tensor) -> Tensor:
    return gradient(F.leaky_relu(model.conv(h.transpose(1, 2)), 0.2).transpose(1, 2) * h, h)


def attended(model: Any, h: Tensor) -> Tensor:
    return gradient(F.scaled_dot_product_attention(h, model.a(h), h) ** 2, h)


def in_place(model: Any, h: Tensor) -> Tensor:
    y = model.a(h) * h
    y[:, 0] = 0.5
    y.add_(h)
    return gradient(y, h)


def several(model: Any, h: Tensor) -> Tensor:
    """Of two results, by two tensors of which one is made of the other."""
    g = torch.tanh(model.a(h))
    first, second = torch.autograd.grad([g.sum(), (g * h).sum()], [h, g], create_graph=True)
    return first * second


CASES = (
    penalty,
    of_activations,
    twice,
    unconnected,
    by_a_weight,
    unused,
    cut,
    held,
    normed,
    convolved,
    in_place,
    several,
)


@pytest.mark.parametrize("act", [*CASES, attended], ids=lambda act: act.__name__)
def test_equals_eager(act: Callable[[Any, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    attention = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with attention:  # the other kernels have no second derivative in eager
        graph = assert_equals_eager(Differentiating(act).double(), batch(), F.mse_loss)
    assert [n for n in graph.notes if "self.act(self, self.a(x))): the derivative is part of the graph" in n], (
        graph.notes
    )
    assert not graph.opaque


@pytest.mark.parametrize("options", [{"data": 2, "zero": 3}, {"tensor": 2}], ids=str)
@pytest.mark.parametrize("act", [penalty, by_a_weight, normed], ids=lambda act: act.__name__)
def test_programs_are_exact(
    act: Callable[[Any, Tensor], Tensor], options: dict[str, int], workers2: WorkerPool
) -> None:
    torch.manual_seed(0)
    subject = make_subject(Differentiating(act).double(), batch(), F.mse_loss)
    assert check_plan(subject, manual_plan(subject.graph, **options), workers2).error.exact


def dropped(model: Any, h: Tensor) -> Tensor:
    return gradient(F.dropout(model.a(h), 0.5), h)


def backward(model: Any, h: Tensor) -> Tensor:
    model.a(h).sum().backward(retain_graph=True)
    return h


def not_connected(model: Any, h: Tensor) -> Tensor:
    return gradient(model.a(h), torch.zeros_like(h).requires_grad_())


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (dropped, "which draws random numbers"),
        (backward, "backward\\(retain_graph=True\\)"),
        (not_connected, "not used"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refused(act: Callable[[Any, Tensor], Tensor], words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        capture(Differentiating(act).double(), batch(), F.mse_loss)


def test_functions_whose_ids_are_compared_stay_alive() -> None:
    class Function:  # torch 2.13 itself keeps the objects of its functions
        next_functions = ()

    output: Any = SimpleNamespace(grad_fn=Function(), output_nr=0, requires_grad=True)
    operand, held = Function(), weakref.WeakSet[Function]()
    output.grad_fn.next_functions = ((operand, 1),)
    held.update((output.grad_fn, operand))
    keys = {(id(output.grad_fn), 0), (id(operand), 1)}
    dependencies = _dependencies([output])
    del output, operand
    assert set(dependencies) == keys and len(held) == 2
