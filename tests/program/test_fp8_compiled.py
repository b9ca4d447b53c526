"""Products in 8 bits in compiled layers: Inductor compiles the roundings, and the products of tensor cores are called as they are."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiers import slow
from torch import Tensor, fx

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


def test_rounding_needs_few_compiled_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo falls back to eager code when a function has eight. Layers that are not compiled call the same functions as experts do, also
    with few tokens or none."""
    variants: Counter[str] = Counter()

    @functools.cache
    def fused(function: Callable[..., Any]) -> Callable[..., Any]:
        def backend(graph: fx.GraphModule, example: list[Any]) -> fx.GraphModule:
            variants[function.__name__] += 1
            return graph

        return torch.compile(function, dynamic=True, backend=backend)

    monkeypatch.setattr(kernels_fp8, "fused", fused)
    monkeypatch.setattr(kernels_fp8, "_fuses", lambda x: min(x.shape) > 1)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for counts in ([70, 30, 5, 23], [40, 88, 1, 128], [128, 128], [3, 0, 0], [1, 0, 0], [0, 0, 0]):
            for width, inner in ((512, 256), (256, 512)):
                rows = random(sum(counts), width, seed=0).requires_grad_()
                weight = random(len(counts), inner, width, seed=1).requires_grad_()
                kernels_fp8.grouped_linear(rows, weight, torch.tensor(counts)).sum().backward()
                for scaling in ("tensorwise", "blockwise"):
                    dense, own = random(2, 35 + sum(counts), width, seed=2).requires_grad_(), weight.detach()[0]
                    kernels_fp8.linear(dense, own.requires_grad_(), scaling).sum().backward()
            for width in (256, 300):
                packed = kernels_fp8.TILED_ROWS.pack(random(sum(counts), width, seed=3))
                kernels_fp8.TILED_ROWS.unpack(packed, width, torch.bfloat16)
    assert variants and max(variants.values()) <= 7, variants
