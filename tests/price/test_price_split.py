"""A backward in two: which part of it makes gradients of parameters alone, and what is kept until that runs."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
from price_models import Builder, aten, gpt_block, mlp, mlp_types, price_layer, replicated

from autopar.devices import parse
from autopar.graph import LayerClass
from autopar.layer_price import LayerPrice
from autopar.plan import FULL, Axis, Role, Strategy
from autopar.price.state import precision
from autopar.price.table import build
from autopar.sharding import Sharding
from autopar.torch_private import backward_in_parts

H100 = parse("8xH100-80GB")
B, SEQ, H, F = 16, 512, 1024, 4096
PLAIN = Strategy(())


def price(cls: LayerClass, strategy: Strategy = PLAIN, *axes: Axis, precision: str = "bfloat16") -> LayerPrice:
    types = [mlp_types(role) if cls.name == "mlp" else replicated(cls) for role in strategy.roles]
    time = mlp_types(Role.DATA) if cls.name == "mlp" else replicated(cls)
    found = price_layer(cls, Sharding((*axes, Axis("microbatch", 1, 0)), (*types, time)), strategy, H100, precision)
    assert found is not None
    return found


def frozen(cls: LayerClass, *names: str) -> LayerClass:
    kept = tuple(dataclasses.replace(p, requires_grad=p.name not in names) for p in cls.parameters)
    return dataclasses.replace(cls, parameters=kept)


def shares(cls: LayerClass) -> dict[str, float]:
    """By op: the share of its backward that makes parameters' gradients alone."""
    table = build(cls, precision("bfloat16"))[0]
    return {op.name: share for op, share in zip(table.ops, table.weight_share.tolist(), strict=True)}


def test_half_of_a_products_backward_is_its_weights():
    found = shares(mlp(B, SEQ, H, F))
    assert found == {"linear_default": 0.5, "gelu_default": 0.0, "linear_default_1": 0.5}
    whole = price(mlp(B, SEQ, H, F))
    assert 0.4 < whole.weight_s / whole.backward_s < 0.5  # gelu's is not


def test_frozen_parameters_have_none():
    cls = frozen(mlp(B, SEQ, H, F), "up")
    assert shares(cls) == {"linear_default": 0.0, "gelu_default": 0.0, "linear_default_1": 0.5}
    none = price(frozen(mlp(B, SEQ, H, F), "up", "down"))
    assert none.weight_s == none.waiting_bytes == 0 < none.backward_s


def test_attention_has_none_and_norms_some():
    found = shares(gpt_block(B, SEQ, H, 16))
    assert all(share == 0 for name, share in found.items() if "attention" in name or "view" in name or "split" in name)
    norms = [share for name, share in found.items() if "norm" in name]
    assert len(norms) == 2 and all(0.2 < share < 0.5 for share in norms)
    assert sum(share == 0.5 for name, share in found.items() if "linear" in name) == 4


def test_what_is_made_of_parameters_alone_is_weights_whole():
    g = Builder()
    tokens = g.border("inputs", "tokens", B, SEQ, dtype=torch.int64)
    table, scale = g.border("parameters", "table", 1000, H), g.border("parameters", "scale", H)
    found = price(g.done("embed", g.call(aten.mul.Tensor, g.call(aten.embedding.default, table, tokens), scale)))
    assert found.weight_s == pytest.approx(found.backward_s) and found.waiting_bytes == 0


def test_until_then_results_gradients_are_kept():
    """And what recomputation has made anew."""
    cls = mlp(B, SEQ, H, F)
    plain, again = price(cls), price(cls, Strategy((), recomputation=FULL))
    assert plain.waiting_bytes == 2 * B * SEQ * (F + H)
    assert again.saved_bytes + again.waiting_bytes == plain.saved_bytes + plain.waiting_bytes
    assert again.weight_s == pytest.approx(plain.weight_s) and again.backward_s > plain.backward_s


@pytest.mark.parametrize("cls", [mlp(2, 8, 16, 64, torch.float32), gpt_block(2, 8, 16, 4, torch.float32)])
def test_what_is_kept_until_then_is_what_torch_keeps(cls: LayerClass):
    """All that autograd has saved, and the gradients of the results of ops that read parameters."""
    saved: weakref.WeakSet[Saved] = weakref.WeakSet()
    x = torch.randn(2, 8, 16, requires_grad=True)
    weights = [torch.nn.Parameter(torch.randn(p.shape)) for p in cls.parameters]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: Saved(t, saved), lambda s: s.tensor):
        outputs = list(cls.graph(x, *weights))
    before = len(saved)
    parts = backward_in_parts(outputs, [x], weights)
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in next(parts)}
    assert len(saved) == before > 4
    assert sum(kept.values()) == price(cls, PLAIN, precision="float32").waiting_bytes
    assert list(parts) == [] and len(saved) < before
    assert all(w.grad is not None for w in weights)


class Saved:
    """A tensor that autograd has saved, in ``every`` as long as it is kept."""

    def __init__(self, tensor: torch.Tensor, every: weakref.WeakSet[Saved]) -> None:
        self.tensor = tensor
        every.add(self)


def test_axes_divide_it_and_collectives_are_not_of_it():
    cls, mesh = mlp(4 * B, SEQ, H, F), Axis("tensor", 4, 1)
    one, four = price(cls), price(cls, Strategy((Role.TENSOR,)), mesh)
    assert one.weight_s / 5 < four.weight_s < one.weight_s / 3
    assert four.backward_s - four.weight_s > (one.backward_s - one.weight_s) / 4 + four.communication_s / 3
    assert four.waiting_bytes == 8 * B * SEQ * (F // 4 + H)
