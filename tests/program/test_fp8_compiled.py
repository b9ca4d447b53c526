"""Products in 8 bits in compiled layers: Inductor compiles the roundings, and the products of tensor cores are called as they are."""

from __future__ import annotations

import pytest
import torch
from tiers import slow
from torch import Tensor

from autopar.program import kernels_fp8
from autopar.program.compiled import OPTIONS

SCALINGS = [slow("tensorwise"), "blockwise", slow("mx")]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def layer(x: Tensor, weight: Tensor, scaling: str) -> Tensor:
    return kernels_fp8.linear(x, weight, scaling)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_compiled_layer_multiplies_the_same_numbers(scaling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor cores' product is replaced by one that records its operands."""
    operands: list[Tensor] = []

    def product(
        a: Tensor, b: Tensor, unit: Tensor, _: object, unit_of_b: Tensor, *rest: object, **dtype: object
    ) -> Tensor:
        operands.extend((a.float(), b.t().float(), unit.float(), unit_of_b.float()))
        return a.bfloat16() @ b.bfloat16()

    monkeypatch.setattr(kernels_fp8, "_has_products", lambda device, length: True)
    monkeypatch.setattr(kernels_fp8.F, "scaled_mm", product)
    found = []
    for run in (layer, torch.compile(layer, fullgraph=True, dynamic=False, options=OPTIONS)):
        operands.clear()
        x, weight = random(64, 256, seed=0).requires_grad_(), random(384, 256, seed=1).requires_grad_()
        result = run(x, weight, scaling)
        result.backward(random(64, 384, seed=2))
        found.append([result.detach(), x.grad, weight.grad, *operands])
    eager, compiled = found
    assert len(eager) == len(compiled) == 3 + 3 * 4  # three products
    assert all(torch.equal(a, b) for a, b in zip(eager[:3], compiled[:3], strict=True))
    # the products of a backward pass may come in any order
    for each in eager[3:]:
        assert any(each.shape == other.shape and torch.equal(each, other) for other in compiled[3:])
