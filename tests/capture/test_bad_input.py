"""What cannot be captured: the message names the place and the values, the hint says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.capture import capture
from autopar.errors import AutoparError, BatchError, CaptureError

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Reversed(torch.autograd.Function):
    """A gradient reversal: its backward is not that of its forward. It takes a module, which no file can hold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: nn.Module) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -grad, None


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.embed = kind, nn.Linear(8, 4), nn.Embedding(10, 8)

    def forward(self, x: Tensor) -> Any:
        if self.kind == "embedding":
            return self.linear(self.embed(x)).sum()
        y = self.linear(x)
        if self.kind == "branch" and y.sum() > 0:
            y = y * 2
        if self.kind == "item":
            y = y * x.max().item()
        if self.kind == "select":
            y = y[y > 0].cumsum(0)
        if self.kind == "reversed":
            y = Reversed.apply(y, object())
        if self.kind == "hook":
            y.register_hook(lambda grad: grad.clamp(-1, 1))
        if self.kind == "reentrant":
            y = checkpoint(torch.tanh, y, use_reentrant=True)
        return {"logits": y, "features": x, "count": 3} if self.kind == "no loss" else y.sum()


@pytest.mark.parametrize(
    ("kind", "batch", "words", "hint"),
    [
        ("branch", X, "control flow or a shape depends on values that differ", "autopar.opaque"),
        ("item", X, "x.max().item()", "autopar.opaque"),
        ("select", X, "y[y > 0]", "autopar.opaque"),
        ("reversed", X, "autograd.Function Reversed", "torch.library.custom_op"),
        ("hook", X, "y.register_hook", "register_autograd"),
        ("no loss", X, "logits: a tensor float32[4, 4], features: a tensor float32[4, 8], count: int", "loss_fn"),
        ("plain", X.long(), "x int64", "the model's dtype"),
        ("plain", X.half(), "x float16", "precision"),
        ("embedding", X, "self.embed(x)", "runs on this batch without autopar"),
        ("plain", X[:0], "no rows", "one global batch"),
        ("plain", X.numpy(), "'x' of the batch is a numpy array, float32[4, 8], not a tensor", "torch.from_numpy"),
        ("plain", {"x": {"a": X, "b": X.numpy()}}, "'x_b' of the batch is a numpy array", "torch.from_numpy"),
    ],
)
def test_refusals_say_where_and_what_to_do(kind: str, batch: Any, words: str, hint: str) -> None:
    with pytest.raises(AutoparError) as refused:
        capture(Model(kind), batch)
    assert isinstance(refused.value, CaptureError | BatchError)
    assert words in refused.value.message and hint in str(refused.value.hint)


@pytest.mark.parametrize("where", ["linear", "linear.weight", "embed"])
def test_hooks_that_do_more_than_scale_gradients_are_refused(where: str) -> None:
    model = Model("plain")
    if where == "linear":
        model.linear.register_full_backward_hook(lambda module, before, after: (2 * before[0] + after[0].sum(),))
    elif where == "embed":
        model.embed.register_full_backward_pre_hook(lambda module, after: (after[0].sign(),))
    else:
        model.linear.weight.register_hook(lambda grad: grad if grad.sum() > 0 else 2 * grad)
    with pytest.raises(CaptureError, match=f"(module|parameter) {where} has a hook"):
        capture(model, X)


def test_half_inputs_are_cast_when_a_precision_is_given() -> None:
    assert capture(Model("plain"), X.half(), precision="float32").dtype == torch.float32


def test_reentrant_checkpoints_keep_their_gradient() -> None:
    graph = capture(Model("reentrant"), X)
    assert "linear.weight" in graph.parameters


def test_one_tensor_given_twice_is_two_inputs() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.linear(x), y)

    assert [value.name for value in capture(Both(), (X, X)).inputs] == ["x", "y"]
