"""``allow={"fp8_blockwise"}``: products in 8 bits with scales for tiles of 1 x 128 and blocks of 128 x 128."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_models import mixtral
from test_fp8 import captured, decoder, eager, gradients, planned
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  torch's own convention
from workers import WorkerPool

from autopar.capture import capture, in_float8
from autopar.checks.collectives import check_collectives
from autopar.checks.types import check_program
from autopar.data_files import MalformedFileError
from autopar.devices import constants
from autopar.devices.measured import PRODUCT
from autopar.emit import emit
from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.ops.experts import Experts
from autopar.ops.facts import facts
from autopar.plan import Plan
from autopar.plan_schema import check_plan
from autopar.precision import FP8, FP8_BLOCKWISE
from autopar.price.op_costs import op_costs
from autopar.price.trace import trace
from autopar.program import kernels_experts, kernels_fp8
from autopar.program.kernels_fp8 import FORWARD, TILE, scaled, tiled
from autopar.search import SearchOptions
from autopar.search.manual import manual_plan
from autopar.search.numerics import Numerics
from autopar.shard import annotate
from autopar.summary import describe

# -- tiles -----------------------------------------------------------------------------------------------------------------

E4M3 = torch.finfo(FORWARD)


def largest_scale(values: Tensor) -> float:
    """The largest power of two that leaves the values in range, found by trying."""
    scale, most = 2.0**60, float(values.abs().max())
    while most * scale > E4M3.max:
        scale /= 2
    return scale


def rounded(x: Tensor, height: int) -> Tensor:
    """``x [m, k]`` in float64, with each tile rounded in a loop of its own."""
    result = torch.empty_like(x, dtype=torch.float64)
    for i in range(0, x.shape[0], height):
        for j in range(0, x.shape[1], TILE):
            tile = x[i : i + height, j : j + TILE].double()
            scale = largest_scale(tile)
            result[i : i + height, j : j + TILE] = (tile * scale).to(FORWARD).double() / scale
    return result


def random(*shape: int, size: float = 1.0, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size).bfloat16()


@pytest.mark.parametrize("height", [1, TILE])
@pytest.mark.parametrize(("rows", "columns"), [(256, 384), (200, 304), (16, 48)])
def test_each_tile_has_the_largest_scale_of_its_own(height: int, rows: int, columns: int) -> None:
    """The last tile of a dim may be smaller. The error of a value is at most half a unit in the last place of its rounded value."""
    x = random(rows, columns) * torch.logspace(-6, 6, rows).unsqueeze(1).bfloat16()
    found = tiled(x, height)
    assert found.values.dtype == FORWARD and found.values.is_contiguous() and found.units.dtype == torch.float32
    assert (torch.frexp(found.units)[0] == 0.5).all()
    values = found.dequantized(torch.float32)
    assert torch.equal(values[:, :columns].double(), rounded(x, height)) and not values[:, columns:].any()
    assert torch.equal(found.dequantized(torch.bfloat16).float(), values)
    units = found.units.repeat_interleave(height, 0)[:rows].repeat_interleave(TILE, 1)[:, :columns].double()
    error = (values[:, :columns].double() - x.double()).abs()
    assert (error <= E4M3.eps / 2 * x.double().abs().clamp(min=E4M3.smallest_normal * units)).all() and error.max() > 0


@pytest.mark.parametrize("height", [1, TILE])
def test_an_outlier_costs_precision_in_its_own_tile_only(height: int) -> None:
    """One scale for the whole tensor turns small values elsewhere into zeros."""
    x = random(256, 384, size=1e-3)
    outlier = x.clone()
    outlier[5, 200] = 3e4
    before, after = (tiled(t, height).dequantized(torch.float32) for t in (x, outlier))
    same = torch.ones_like(x, dtype=torch.bool)
    same[5 if height == 1 else slice(0, TILE), TILE : 2 * TILE] = False
    assert torch.equal(before[same], after[same])
    assert (after[same] - x.float()[same]).norm() < 0.03 * x.float()[same].norm()
    whole = scaled(outlier, FORWARD)
    values = whole.values.float() * whole.unit
    assert (values[same] - x.float()[same]).norm() > 0.9 * x.float()[same].norm()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_not_hidden(value: float) -> None:
    x, weight = torch.ones(16, 256).bfloat16(), torch.ones(32, 256).bfloat16()
    x[3, 5] = value
    result = kernels_fp8.linear(x, weight, "blockwise")
    assert not result[3].isfinite().any() and (result[torch.arange(16) != 3] == 256).all()
    assert (kernels_fp8.linear(torch.zeros_like(x), weight, "blockwise") == 0).all()


# -- products --------------------------------------------------------------------------------------------------------------


def products(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The result and both gradients by their formulas, in float64: each operand is rounded in tiles along the dim that is summed."""
    return (
        rounded(x, 1) @ rounded(weight, TILE).t(),
        rounded(gradient, 1) @ rounded(weight.t(), TILE).t(),
        rounded(gradient.t(), 1) @ rounded(x.t(), 1).t(),
    )


def assert_equal(found: Tensor | None, wanted: Tensor) -> None:
    """Equal but for sums in float32 and one rounding to bfloat16."""
    assert found is not None and found.dtype == torch.bfloat16
    assert ((found.double() - wanted).abs() <= 2**-8 * wanted.abs() + 1e-5 * wanted.abs().max()).all()


@pytest.mark.parametrize(("rows", "n", "k"), [(128, 128, 256), (70, 208, 304), (1, 16, 16)])
def test_products_and_gradients_are_those_of_rounded_operands(rows: int, n: int, k: int) -> None:
    x, weight, gradient = random(2, rows, k), random(n, k, seed=1), random(2, rows, n, size=1e-4, seed=2)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    result = kernels_fp8.linear(x, weight, "blockwise")
    result.backward(gradient)
    wanted = products(x.detach().flatten(0, 1), weight.detach(), gradient.flatten(0, 1))
    assert x.grad is not None
    for found, exact in zip((result.detach().flatten(0, 1), x.grad.flatten(0, 1), weight.grad), wanted, strict=True):
        assert_equal(found, exact)


def test_shards_compute_what_whole_tensors_do() -> None:
    """Where shards end with a tile, each rank has the tiles of the whole tensor: shards of a weight's columns give columns of the result,
    and shards of the summed dim give terms of it, which ranks round to bfloat16 and add."""
    x, weight = random(64, 512), random(256, 512, seed=1)
    whole = kernels_fp8.linear(x, weight, "blockwise")
    columns = [kernels_fp8.linear(x, part, "blockwise") for part in weight.split(128)]
    assert torch.equal(torch.cat(columns, 1), whole)
    for value, height in ((x, 1), (weight, TILE)):
        shards = [tiled(part, height).dequantized(torch.float32) for part in value.split(256, 1)]
        assert torch.equal(torch.cat(shards, 1), tiled(value, height).dequantized(torch.float32))
    pairs = zip(x.split(256, 1), weight.split(256, 1), strict=True)
    first, second = (kernels_fp8.linear(*pair, "blockwise").double() for pair in pairs)
    error = (first + second - whole.double()).abs()
    assert (error <= 2**-8 * (first.abs() + second.abs() + whole.abs()) + 1e-5 * whole.abs().max()).all()


@pytest.mark.parametrize("counts", [[5, 0, 200, 130], [0, 0, 0, 0], [128, 128, 128, 128]])
def test_grouped_products_are_those_of_each_expert(counts: list[int]) -> None:
    rows, weight = random(sum(counts), 304).requires_grad_(), random(4, 208, 304, seed=1).requires_grad_()
    gradient = random(sum(counts), 208, seed=2)
    result = kernels_fp8.grouped_linear(rows, weight, torch.tensor(counts))
    result.backward(gradient)
    assert rows.grad is not None and weight.grad is not None
    found = zip(result.detach().split(counts), rows.grad.split(counts), weight.grad.unbind(0), strict=True)
    given = zip(rows.detach().split(counts), weight.detach().unbind(0), gradient.split(counts), strict=True)
    for n, each, (x, w, g) in zip(counts, found, given, strict=True):
        if n == 0:
            assert not each[2].any()
        for one, wanted in zip(each, products(x, w, g), strict=True) if n else ():
            assert_equal(one, wanted)


def test_what_is_not_in_8_bits_is_a_plain_product() -> None:
    counts = torch.tensor([2, 4])
    for dtype, width in ((torch.float32, 64), (torch.bfloat16, 60), (torch.float16, 64)):
        rows, weight = torch.randn(6, width).to(dtype), torch.randn(2, 32, width).to(dtype)
        assert torch.equal(kernels_fp8.linear(rows, weight[0], "blockwise"), F.linear(rows, weight[0]))
        plain = kernels_experts.grouped_linear(rows, weight, counts)
        assert torch.equal(kernels_fp8.grouped_linear(rows, weight, counts), plain)


def hopper_product(
    a: Tensor, b: Tensor, scale_a: Tensor, kind_a: Any, scale_b: Tensor, kind_b: Any, output_dtype: torch.dtype
) -> Tensor:
    """``F.scaled_mm`` on a CPU, with what torch 2.13 and cuBLAS require of shapes and strides (``_scaled_block1x128_block128x128``)."""
    (m, k), n = a.shape, b.shape[1]
    assert a.is_contiguous() and b.t().is_contiguous() and m % 4 == k % TILE == n % 16 == 0 and min(m, n, k) > 0
    tiles, padded = k // TILE, -(-k // TILE // 4) * 4
    assert kind_a is F.ScalingType.BlockWise1x128
    assert (tuple(scale_a.shape), scale_a.stride()) == ((m, tiles), (1, m))
    if kind_b is F.ScalingType.BlockWise1x128:
        assert (tuple(scale_b.shape), scale_b.stride()) == ((n, tiles), (1, n))
        of_b = scale_b
    else:
        assert kind_b is F.ScalingType.BlockWise128x128
        assert (tuple(scale_b.shape), scale_b.stride()) == ((padded, -(-n // TILE)), (1, padded))
        of_b = scale_b[:tiles].t().repeat_interleave(TILE, 0)[:n]
    whole = [v.double() * s.repeat_interleave(TILE, 1) for v, s in ((a, scale_a), (b.t(), of_b))]
    return (whole[0] @ whole[1].t()).to(output_dtype)


@pytest.mark.parametrize(("rows", "n", "k"), [(128, 256, 512), (70, 208, 304), (1, 16, 16)])
def test_calls_of_the_hopper_product_have_the_layout_that_it_requires(
    rows: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def results() -> list[Tensor]:
        x, weights = random(rows, k).requires_grad_(), random(2, n, k, seed=1).requires_grad_()
        dense = kernels_fp8.linear(x, weights[0], "blockwise")
        grouped = kernels_fp8.grouped_linear(x, weights, torch.tensor([rows, 0]))
        (dense + grouped).backward(random(rows, n, seed=2))
        assert x.grad is not None and weights.grad is not None
        return [dense.detach(), grouped.detach(), x.grad, weights.grad]

    wanted = results()
    monkeypatch.setattr(kernels_fp8, "_has_products", lambda device, length: True)
    monkeypatch.setattr(kernels_fp8.F, "scaled_mm", hopper_product)
    for found, each in zip(results(), wanted, strict=True):
        assert ((found - each).abs().double() <= 2**-6 * each.abs() + 1e-3 * each.abs().max()).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the products of GPUs")
@pytest.mark.parametrize(("rows", "n", "k"), [(256, 256, 512), (70, 208, 304), (0, 128, 128)])
def test_a_gpu_multiplies_the_same_numbers(rows: int, n: int, k: int) -> None:
    a, weight, other = random(rows, k).cuda(), random(n, k, seed=1).cuda(), random(n, k, seed=2).cuda()
    for b, height in ((weight, TILE), (other, 1)):
        found = kernels_fp8.tiled_product(tiled(a, 1), tiled(b, height))
        wanted = tiled(a, 1).dequantized(torch.float64) @ tiled(b, height).dequantized(torch.float64).t()
        assert ((found.double() - wanted).abs() <= 2**-8 * wanted.abs() + 1e-4 * wanted.abs().max()).all()


# -- programs --------------------------------------------------------------------------------------------------------------


def mixture() -> Graph:
    torch.manual_seed(0)
    model, batch, loss_fn = mixtral(hidden_size=64, intermediate_size=128, vocab_size=96, num_hidden_layers=1)
    return annotate(capture(model, batch, loss_fn, precision="bfloat16", name="mixture"))


def test_experts_are_in_8_bits_and_routers_are_not(tmp_path: Path) -> None:
    graph = in_float8(mixture(), FP8_BLOCKWISE)
    assert graph.allow == (FP8_BLOCKWISE.name,)
    emit(graph, manual_plan(graph, precision="bfloat16"), tmp_path)
    text = (tmp_path / "model.py").read_text()
    assert text.count('scaling="blockwise")') == 7 and text.count("kernels_fp8.grouped_linear(") == 3
    assert "kernels_experts.grouped_linear(" not in text
    assert json.loads((tmp_path / "plan.json").read_text())["allow"] == [FP8_BLOCKWISE.name]
    bodies = [
        node.target.body
        for cls in in_float8(mixture(), FP8).classes.values()
        for node in cls.graph.graph.nodes
        if isinstance(node.target, Experts)
    ]
    assert bodies and not any(facts(node).in_float8 for body in bodies for node in body.graph.nodes)


@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}, {"data": 2, "zero": 3}], ids=str)
def test_programs_stay_near_float32(sizes: dict[str, Any], workers2: WorkerPool, tmp_path: Path) -> None:
    graph = in_float8(captured(), FP8_BLOCKWISE)
    plan = manual_plan(graph, precision="bfloat16", **(sizes or {"data": 2}))
    check_collectives(emit(graph, plan, tmp_path))
    assert check_program(tmp_path) == len(plan.stages)
    loss, found = gradients(tmp_path, workers2, graph)
    loss0, wanted = eager(decoder())
    assert loss == pytest.approx(loss0, rel=0.02)
    for name in wanted:
        assert F.cosine_similarity(found[name].flatten(), wanted[name].flatten(), 0) > 0.97


# -- plans -----------------------------------------------------------------------------------------------------------------


def test_blocks_are_used_where_they_gain_and_are_allowed() -> None:
    name = FP8_BLOCKWISE.name
    graph, plan = planned("H100-80GB", 8192, allow=(name,))
    tensorwise, exact = (planned("H100-80GB", 8192, allow=allow)[1] for allow in ((FP8.name,), ()))
    assert plan.allow == graph.allow == (name,)
    # one more rounding of every gradient
    assert tensorwise.prediction.step_time_s < plan.prediction.step_time_s < 0.95 * exact.prediction.step_time_s
    assert any(f"as {name} allows" in note and "128 x 128" in note and "experts" not in note for note in plan.notes)
    assert "fp8 blockwise (not exact)" in describe(plan)
    assert Plan.from_json(json.loads(plan.dumps())) == plan
    assert planned("H100-80GB", 256, allow=(name,))[1].allow == ()  # rounding takes longer than it saves
    assert planned("B200-180GB", 8192, allow=(name,))[1].allow == ()  # cuBLAS has no such product for it


def test_one_recipe_is_allowed() -> None:
    both = (FP8.name, FP8_BLOCKWISE.name)
    with pytest.raises(UsageError, match="fp8 and fp8_blockwise"):
        SearchOptions(allow=both)
    plan = dataclasses.replace(manual_plan(captured(), precision="bfloat16"), allow=both)
    with pytest.raises(UsageError, match="fp8 and fp8_blockwise"):
        Numerics.of(plan)
    with pytest.raises(MalformedFileError, match="fp8 and fp8_blockwise"):
        check_plan(json.loads(plan.dumps()))


def test_experts_are_priced_at_the_rate_of_blocks_with_their_rounding() -> None:
    def mixture_costs(graph: Graph) -> tuple[str, float, float, float]:
        (cls,) = (c for c in graph.classes.values() if c.mixtures)
        nodes = [node for node in cls.graph.graph.nodes if node.op == "call_function"]
        costs = op_costs(nodes, trace(cls), lambda tensor: tensor.nbytes)
        (op,) = (i for i, node in enumerate(costs.nodes) if isinstance(node.target, Experts))
        moved = [(slot.forward, slot.backward) for slot in costs.slots if slot.op == op]
        return costs.kinds[op], costs.forward_kernels[op], *map(sum, zip(*moved, strict=True))

    kind, kernels, forward, backward = mixture_costs(in_float8(mixture(), FP8_BLOCKWISE))
    plain = mixture_costs(in_float8(mixture(), FP8))
    assert (kind, kernels) == (FP8_BLOCKWISE.precision, 3 * constants.FP8_KERNELS.value) and plain[:2] == (PRODUCT, 1)
    assert forward > 2 * plain[2] and backward > 2 * plain[3]
