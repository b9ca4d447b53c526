"""A backward in two: which part of it makes gradients of parameters alone, and what is kept until that runs."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from price_models import Builder, aten, gpt_block, mlp, mlp_types, price_layer, replicated

from autopar.devices import parse
from autopar.graph import LayerClass
from autopar.layer_price import LayerPrice
from autopar.plan import Axis, Role, Strategy
from autopar.price.state import precision
from autopar.price.table import build
from autopar.program import weight_gradients
from autopar.sharding import Sharding
from passes.defer_weights import defer_weights_pass

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
    assert none.weight_s == none.deferred_bytes == 0 < none.backward_s


def test_a_bias_alone_may_be_trained():
    """Nothing but the bias of the first product requires a gradient: no product computes one."""
    g = Builder()
    x = g.border("inputs", "x", B, SEQ, H)
    weight, bias = g.border("parameters", "weight", F, H), g.border("parameters", "bias", F)
    cls = frozen(g.done("first", g.call(aten.linear.default, x, weight, bias)), "weight")
    cls = dataclasses.replace(cls, inputs=tuple(dataclasses.replace(v, requires_grad=False) for v in cls.inputs))
    table = build(cls, precision("bfloat16"))[0]
    assert table.weight_share.tolist() == table.product_share.tolist() == [0.0]


def test_only_products_have_a_second_part():
    found = shares(gpt_block(B, SEQ, H, 16))
    assert {name for name, share in found.items() if share} == {name for name in found if "linear" in name}
    assert set(found.values()) == {0.0, 0.5}


def test_the_gradients_of_other_parameters_belong_to_the_first_part():
    g = Builder()
    tokens = g.border("inputs", "tokens", B, SEQ, dtype=torch.int64)
    table, scale = g.border("parameters", "table", 1000, H), g.border("parameters", "scale", H)
    found = price(g.done("embed", g.call(aten.mul.Tensor, g.call(aten.embedding.default, table, tokens), scale)))
    assert found.weight_s == found.deferred_bytes == 0 < found.backward_s


def test_inputs_and_gradients_of_products_wait_whatever_is_recomputed():
    cls = mlp(B, SEQ, H, F)
    plain, again = price(cls), price(cls, Strategy((), activations="full"))
    assert plain.deferred_bytes == 2 * B * SEQ * (2 * F + 2 * H)
    assert again.deferred_bytes == plain.deferred_bytes
    assert again.weight_s == pytest.approx(plain.weight_s) and again.backward_s > plain.backward_s


@pytest.mark.parametrize("cls", [mlp(2, 8, 16, 64, torch.float32), gpt_block(2, 8, 16, 4, torch.float32)])
def test_what_waits_is_in_memory_between_the_parts(cls: LayerClass):
    """The storages that the products of a backward pass keep."""
    graph = copy.deepcopy(cls.graph)
    parameters = [node for node in graph.graph.nodes if node.op == "placeholder"][-len(cls.parameters) :]
    defer_weights_pass(graph, parameters).recompile()
    x = torch.randn(2, 8, 16, requires_grad=True)
    weights = [torch.nn.Parameter(torch.randn(p.shape)) for p in cls.parameters]
    with weight_gradients.deferred() as products:
        (output,) = graph(x, *weights)
        output.backward(torch.randn_like(output))
    tensors = [tensor for product in products for tensor in (product.input, product.gradient)]
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert sum(kept.values()) == price(cls, PLAIN, precision="float32").deferred_bytes
    late = {id(product.weight) for product in products}
    assert len(late) == len(products) == sum(share > 0 for share in shares(cls).values())
    assert all((weight.grad is None) == (id(weight) in late) for weight in weights)


def test_axes_divide_it_and_collectives_are_not_of_it():
    cls, mesh = mlp(4 * B, SEQ, H, F), Axis("tensor", 4, 1)
    one, four = price(cls), price(cls, Strategy((Role.TENSOR,)), mesh)
    assert one.weight_s / 5 < four.weight_s < one.weight_s / 3
    assert four.backward_s - four.weight_s > (one.backward_s - one.weight_s) / 4 + four.communication_s / 3
    assert four.deferred_bytes == 8 * B * SEQ * (2 * (F // 4) + 2 * H)
