"""Gradients that are live in a layer's backward pass, against the bytes that PyTorch's allocator gives out."""

from __future__ import annotations

import pytest
import torch
from price_models import Builder, aten, price_layer, replicated

from autopar.devices import parse
from autopar.graph import LayerClass
from autopar.plan import Axis, Strategy
from autopar.price.trainer import TrainerModel
from autopar.run.allocations import Allocations
from autopar.sharding import Sharding

SHAPE = (64, 512)


def norm_beside_residual() -> LayerClass:
    """``x + weight * (x / rms(x))``: a power, a broadcast weight, a gradient that is passed on."""
    g = Builder(torch.float32)
    x, weight = g.border("activations", "x", *SHAPE), g.border("parameters", "weight", SHAPE[1])
    mean = g.call(aten.mean.dim, g.call(aten.pow.Tensor_Scalar, x, 2), [-1], True)
    normal = g.call(aten.mul.Tensor, x, g.call(aten.rsqrt.default, g.call(aten.add.Tensor, mean, 1e-5)))
    return g.done("norm", g.call(aten.add.Tensor, x, g.call(aten.mul.Tensor, weight, normal)))


def parallel_branches() -> LayerClass:
    """``tanh(x) + (x + tanh(tanh(x)))``: three gradients of one value, and two sums that pass theirs on."""
    g = Builder(torch.float32)
    x = g.border("activations", "x", *SHAPE)
    once = g.call(aten.tanh.default, x)
    return g.done(
        "branches", g.call(aten.add.Tensor, once, g.call(aten.add.Tensor, x, g.call(aten.tanh.default, once)))
    )


def chain_of_powers() -> LayerClass:
    g = Builder(torch.float32)
    x = g.border("activations", "x", *SHAPE)
    return g.done("powers", g.call(aten.pow.Tensor_Scalar, g.call(aten.pow.Tensor_Scalar, x, 3), 2))


@pytest.mark.parametrize(
    ("make", "saves_input"), [(norm_beside_residual, True), (parallel_branches, False), (chain_of_powers, True)]
)
def test_the_peak_of_a_backward_pass_is_that_of_autograd(make, saves_input):
    cls = make()
    axes = (Axis("microbatch", 1, 0),)
    trainer = TrainerModel(cpu=True)
    found = price_layer(cls, Sharding(axes, (replicated(cls),)), Strategy(()), parse(["cpu"]), "float32", trainer)
    memory = Allocations()
    with memory.recorded():
        values = [torch.ones(v.shape, requires_grad=True) for v in (*cls.activations, *cls.parameters)]
        with memory.step():
            cls.graph(*values)[0].tanh().sum().backward()  # the gradient of the layer's result belongs to nobody else
    before = values[0].nbytes if saves_input else 0  # the input, which the price counts where it is saved
    measured = memory.peak_bytes - memory.at_rest_bytes + before
    assert found.saved_bytes + found.transient_bytes == pytest.approx(measured, rel=0.01)
