"""The table of facts about ops: every name is an op's, stands once, and the facts that passes and prices rely on hold."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import fx

from autopar.ops.facts import Kind, facts, is_pointwise, is_random, op_of
from autopar.program import kernels, kernels_experts, kernels_fp8, kernels_logits, kernels_random, kernels_vocab
from passes.collectives import convert
from passes.localise_layer import scale

aten = torch.ops.aten
MODULES = {
    "kernels": kernels,
    "kernels_experts": kernels_experts,
    "kernels_fp8": kernels_fp8,
    "kernels_logits": kernels_logits,
    "kernels_random": kernels_random,
    "kernels_vocab": kernels_vocab,
}
NAMES = [name for kind in Kind for name in kind.value]


def call(target, *args, **kwargs) -> fx.Node:
    return fx.Graph().call_function(target, args, kwargs)


def test_every_name_is_of_one_kind() -> None:
    assert [name for name, count in Counter(NAMES).items() if count > 1] == []


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("transformers.")])
def test_every_name_is_an_op(name: str) -> None:
    room, _, short = name.partition(".")
    if room == "aten":
        packet = getattr(aten, short)
        target = getattr(packet, packet.overloads()[0])
    else:
        target = getattr(MODULES[room], short)
    assert op_of(target).name == name and op_of(target).short == short


def test_what_selective_recomputation_keeps() -> None:
    expensive = (aten.linear.default, aten.einsum.default, aten.conv2d.default, kernels.attention)
    assert all(op_of(target).is_expensive and op_of(target).may_be_summed for target in expensive)
    assert op_of(aten.embedding.default).may_be_summed and not op_of(aten.embedding.default).is_expensive
    assert not op_of(aten.softmax.int).may_be_summed


def test_autograd_saves_nothing_for_linear_ops() -> None:
    linear = (aten.add.Tensor, aten.view.default, aten.sum.default, kernels.reshape, convert, scale)
    assert all(op_of(target).saves_nothing for target in linear)
    assert not any(op_of(target).saves_nothing for target in (aten.mul.Tensor, aten.linear.default, aten.exp.default))


def test_dropout_is_random_where_it_drops() -> None:
    x = fx.Graph().placeholder("x")
    assert is_random(call(aten.dropout.default, x, 0.1, True)) and not is_random(
        call(aten.dropout.default, x, 0.1, False)
    )
    attention = aten.scaled_dot_product_attention.default
    assert is_random(call(attention, x, x, x, dropout_p=0.1)) and not is_random(call(attention, x, x, x))
    assert is_random(call(kernels_random.uniform, x)) and not is_random(call(aten.add.Tensor, x, x))
    assert is_pointwise(call(aten.where.self, x, x, x)) and not is_pointwise(call(aten.dropout.default, x, 0.1, True))


def test_a_node_that_is_no_call_has_no_facts() -> None:
    node = fx.Graph().placeholder("x")
    assert facts(node).name == "" and facts(node).kind is Kind.OTHER and not is_random(node)
