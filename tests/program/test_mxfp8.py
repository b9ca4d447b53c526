"""``allow={"mxfp8"}``: products of operands in MXFP8, whose tiles no plan moves."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from expert_models import mixtral
from test_fp8 import captured, gradients, planned, tokens
from test_fp8_blockwise import mixture, random
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own convention
from workers import WorkerPool

from autopar.bench.models import DecoderBlock, Stack, token_loss
from autopar.capture import capture, flatten_batch, in_float8
from autopar.checks.collectives import check_collectives
from autopar.checks.types import check_program
from autopar.devices import constants, parse
from autopar.emit import emit
from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.ops.experts import FIRST_PARAMETER, Experts
from autopar.ops.float8 import recipe_of, scale_bytes, shard_multiples
from autopar.plan import Plan
from autopar.precision import FP8, FP8_BLOCKWISE, FP8_RECIPES, MXFP8, Fp8Recipe
from autopar.price import Pricer
from autopar.price.op_costs import op_costs
from autopar.price.trace import OUTPUT, trace
from autopar.program import kernels_fp8
from autopar.program.kernels_fp8 import FORWARD, MX_TILE, SCALINGS, tiled
from autopar.search.manual import manual_plan
from autopar.shard import annotate
from autopar.summary import describe

# -- the format, by its specification ----------------------------------------------------------------------------------------


def _element(code: int) -> float:
    """The value of an e4m3 number (OCP 8-bit floating point, table 1): bias 7, no infinity."""
    exponent, mantissa = code >> 3, code & 7
    return (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9


ELEMENTS = torch.tensor([_element(code) for code in range(127)], dtype=torch.float64)  # 127 is NaN
LARGEST = float(ELEMENTS[-1])


def to_nearest(x: Tensor) -> Tensor:
    """The nearest e4m3 numbers of ``x`` in float64, of two equally near ones that with an even mantissa."""
    above = torch.searchsorted(ELEMENTS, x.abs().contiguous()).clamp(max=len(ELEMENTS) - 1)
    below = (above - 1).clamp(min=0)
    down, up = x.abs() - ELEMENTS[below], ELEMENTS[above] - x.abs()
    chosen = torch.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
    return ELEMENTS[chosen] * x.sign()


def mx(x: Tensor, up: bool = True) -> Tensor:
    """``x [m, k]`` in MXFP8 along ``k``, in float64: the exponent of a scale is ``ceil(log2(largest / 448))`` (arXiv:2506.08027), or that
    of the OCP Microscaling specification, section 6.3: ``floor(log2(largest)) - 8``, with numbers out of range clamped."""
    parts = []
    for block in x.double().split(32, 1):
        most = block.abs().amax(1, keepdim=True).tolist()
        if up:  # the least exponent that leaves all numbers in range
            exponents = [min(e for e in range(-127, 128) if row[0] <= LARGEST * 2.0**e) for row in most]
        else:
            exponents = [max(-127, math.frexp(row[0])[1] - 1 - 8) for row in most]
        unit = torch.tensor([[2.0**e] for e in exponents], dtype=torch.float64)
        parts.append(to_nearest((block / unit).clamp(-LARGEST, LARGEST)) * unit)
    return torch.cat(parts, 1)


def uneven(*shape: int, seed: int = 0) -> Tensor:
    """Numbers whose magnitudes differ so much within a tile that the rounding of many depends on the tile."""
    return random(*shape, seed=seed) * torch.exp2(random(*shape, size=8, seed=seed + 100).float()).bfloat16()


def test_operands_are_those_of_the_specification() -> None:
    """Rows of very different magnitudes, down to the smallest bfloat16 number, zeros, and numbers at the ends of e4m3's range."""
    x = random(64, 100) * torch.logspace(-37, 37, 64).unsqueeze(1).bfloat16()
    x[1], x[2, :32], x[3, 0] = 0, 2.0**-133, 3.3e38
    x[4, :4], x[5, :4] = (torch.tensor(v).bfloat16() for v in ([448.0, 1, 3, -0.01], [450.0, 1, 3, -0.01]))
    found = SCALINGS["mx"].rows(x, kernels_fp8.ACTIVATION)
    assert found.values.dtype == FORWARD and found.values.is_contiguous()
    assert found.units.dtype == torch.float8_e8m0fnu and found.units.shape == (64, 4)
    values = found.dequantized(torch.float64)
    assert torch.equal(values[:, :100], mx(x)) and not values[:, 100:].any()
    assert values[4, 0] == 448 and found.units[4, 0].float() == 1 and found.units[5, 0].float() == 2
    assert torch.equal(found.dequantized(torch.bfloat16)[6:].double(), values[6:])
    assert not torch.equal(mx(x, up=False), mx(x)) and mx(x, up=False)[5, 0] == 448  # it clamps


def test_a_weight_is_rounded_along_the_dim_that_each_product_contracts() -> None:
    weight, scaling = uneven(64, 96), SCALINGS["mx"]
    forward, backward = scaling.rows(weight, kernels_fp8.WEIGHT), scaling.columns(weight, kernels_fp8.WEIGHT)
    assert (forward.units.shape, backward.units.shape) == ((64, 3), (96, 2))
    assert torch.equal(forward.dequantized(torch.float64), mx(weight))
    assert torch.equal(backward.dequantized(torch.float64), mx(weight.t()))
    assert not torch.equal(mx(weight), mx(weight.t()).t())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_not_hidden(value: float) -> None:
    x, weight = torch.ones(16, 64).bfloat16(), torch.ones(32, 64).bfloat16()
    x[3, 5] = value
    result = kernels_fp8.linear(x, weight, "mx")
    assert not result[3].isfinite().any() and (result[torch.arange(16) != 3] == 64).all()
    assert (kernels_fp8.linear(torch.zeros_like(x), weight, "mx") == 0).all()


def test_recipes_and_formats_agree() -> None:
    assert {recipe.scaling for recipe in FP8_RECIPES.values()} == set(SCALINGS)
    assert MXFP8.tile == MX_TILE and MXFP8.multiple % kernels_fp8.MULTIPLE == 0
    assert FP8.multiple == FP8_BLOCKWISE.multiple == kernels_fp8.MULTIPLE
    # per number: a byte for 32 numbers of every operand; four for 128 of an activation, and for 128 x 128 of a weight
    assert scale_bytes(MXFP8) == (1 / 32, 1 / 32, 1 / 32) and scale_bytes(FP8) == (0, 0, 0)
    assert scale_bytes(FP8_BLOCKWISE) == (4 / 128, 4 / 128**2, 4 / 128)


# -- products --------------------------------------------------------------------------------------------------------------


def products(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    """The operands of the result, of the input's gradient and of the weight's, each ``a @ b.t()``."""
    return (x, weight), (gradient, weight.t()), (gradient.t(), x.t())


def error(x: Tensor) -> Tensor:
    """How far numbers of e4m3 may be from ``x`` along its last dim: half a unit in the last place of three bits of mantissa, or of the
    smallest normal number ``2**-6`` where the largest of 32 numbers is above 224."""
    largest = torch.cat([part.abs().amax(1, keepdim=True).expand_as(part) for part in x.split(32, 1)], 1)
    return 2.0**-4 * torch.maximum(x.abs(), largest / 224 * 2.0**-6)


@pytest.mark.parametrize(("rows", "n", "k"), [(128, 128, 256), (70, 224, 96), (1, 32, 32)])
def test_products_and_gradients_are_those_of_rounded_operands(rows: int, n: int, k: int) -> None:
    """Equal to the products of the rounded operands but for sums in float32 and one rounding to bfloat16, and as near to those of the
    operands as the format allows."""
    x, weight, gradient = random(2, rows, k), random(n, k, seed=1), random(2, rows, n, size=1e-4, seed=2)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    result = kernels_fp8.linear(x, weight, "mx")
    result.backward(gradient)
    assert x.grad is not None and weight.grad is not None
    given = products(x.detach().flatten(0, 1), weight.detach(), gradient.flatten(0, 1))
    results = result.detach().flatten(0, 1), x.grad.flatten(0, 1), weight.grad
    for found, (a, b) in zip(results, given, strict=True):
        wanted, (a, b) = mx(a) @ mx(b).t(), (a.double(), b.double())
        assert found.dtype == torch.bfloat16
        assert ((found.double() - wanted).abs() <= 2**-8 * wanted.abs() + 1e-5 * wanted.abs().max()).all()
        exact, (error_a, error_b) = a @ b.t(), (error(a), error(b))
        bound = a.abs() @ error_b.t() + error_a @ (b.abs() + error_b).t() + 2**-8 * wanted.abs()
        assert ((found.double() - exact).abs() <= bound + 1e-5 * exact.abs().max()).all()
        assert (found.double() - exact).norm() > 0.01 * exact.norm()


def test_shards_compute_what_whole_tensors_do() -> None:
    """Shards that end with a tile have the tiles of the whole tensor, along every dim."""
    x, weight = uneven(64, 128), uneven(64, 128, seed=1)
    whole = kernels_fp8.linear(x, weight, "mx")
    columns = [kernels_fp8.linear(x, part, "mx") for part in weight.split(32)]
    assert torch.equal(torch.cat(columns, 1), whole)
    for value in (x, weight, x.t()):
        shards = [SCALINGS["mx"].rows(part, kernels_fp8.ACTIVATION) for part in value.split(32, 1)]
        parts = [part.dequantized(torch.float32) for part in shards]
        assert torch.equal(torch.cat(parts, 1), tiled(value, 1, MX_TILE).dequantized(torch.float32))
    moved = torch.cat([tiled(part, 1, MX_TILE).dequantized(torch.float32)[:, :16] for part in x.split(16, 1)], 1)
    assert not torch.equal(moved, tiled(x, 1, MX_TILE).dequantized(torch.float32))


@pytest.mark.parametrize("counts", [[5, 0, 70, 33], [0, 0, 0, 0], [32, 32, 32, 32]])
def test_grouped_products_are_those_of_each_expert(counts: list[int]) -> None:
    rows, weight = random(sum(counts), 96).requires_grad_(), random(4, 64, 96, seed=1).requires_grad_()
    gradient = random(sum(counts), 64, seed=2)
    result = kernels_fp8.grouped_linear(rows, weight, torch.tensor(counts), "mx")
    result.backward(gradient)
    assert rows.grad is not None and weight.grad is not None
    found = zip(result.detach().split(counts), rows.grad.split(counts), weight.grad.unbind(0), strict=True)
    given = zip(rows.detach().split(counts), weight.detach().unbind(0), gradient.split(counts), strict=True)
    for n, each, own in zip(counts, found, given, strict=True):
        if n == 0:
            assert not each[2].any()
        for one, (a, b) in zip(each, products(*own), strict=True) if n else ():
            wanted = mx(a) @ mx(b).t()
            assert ((one.double() - wanted).abs() <= 2**-8 * wanted.abs() + 1e-5 * wanted.abs().max()).all()


def scales_at(units: Tensor, rows: int, tiles: int) -> Tensor:
    """The scales of cuBLAS's layout, by the offset that its documentation gives for the scale of a row and a tile."""
    across = -(-tiles // 4)
    assert (
        units.dtype == torch.float8_e8m0fnu
        and units.is_contiguous()
        and units.numel() == 512 * across * -(-rows // 128)
    )
    flat = units.flatten().double()

    def offset(row: int, tile: int) -> int:
        part = row // 128 * across + tile // 4
        return part * 512 + row % 32 * 16 + row % 128 // 32 * 4 + tile % 4

    return torch.stack([flat[[offset(row, tile) for tile in range(tiles)]] for row in range(rows)])


def blackwell_product(
    a: Tensor, b: Tensor, scale_a: Tensor, kind_a: Any, scale_b: Tensor, kind_b: Any, *swizzles: Any, output_dtype: Any
) -> Tensor:
    """``F.scaled_mm`` on a CPU, with what torch 2.13 and cuBLAS require of operands in MXFP8 (``_scaled_mxfp8_mxfp8``)."""
    (m, k), n = a.shape, b.shape[1]
    assert a.is_contiguous() and b.t().is_contiguous() and k % 32 == n % 16 == 0 and min(m, n, k) > 0
    assert kind_a is kind_b is F.ScalingType.BlockWise1x32
    assert swizzles == (F.SwizzleType.SWIZZLE_32_4_4,) * 2
    units = scales_at(scale_a, m, k // 32), scales_at(scale_b, n, k // 32)
    whole = [v.double() * s.repeat_interleave(32, 1) for v, s in zip((a, b.t()), units, strict=True)]
    return (whole[0] @ whole[1].t()).to(output_dtype)


@pytest.mark.parametrize(("rows", "n", "k"), [(160, 160, 160), (70, 32, 288), (1, 32, 32)])
def test_calls_of_the_blackwell_product_have_the_layout_that_it_requires(
    rows: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def results() -> list[Tensor]:
        x, weights = random(rows, k).requires_grad_(), random(2, n, k, seed=1).requires_grad_()
        dense = kernels_fp8.linear(x, weights[0], "mx")
        grouped = kernels_fp8.grouped_linear(x, weights, torch.tensor([rows, 0]), "mx")
        (dense + grouped).backward(random(rows, n, seed=2))
        assert x.grad is not None and weights.grad is not None
        return [dense.detach(), grouped.detach(), x.grad, weights.grad]

    wanted = results()
    monkeypatch.setattr(kernels_fp8, "_has_products", lambda device, length: True)
    monkeypatch.setattr(kernels_fp8.F, "scaled_mm", blackwell_product)
    for found, each in zip(results(), wanted, strict=True):
        assert ((found - each).abs().double() <= 2**-6 * each.abs() + 1e-3 * each.abs().max()).all()


def test_emulation_is_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    kernels_fp8._find_products.cache_clear()
    for scaling in ("mx", "mx", "blockwise"):
        kernels_fp8.linear(random(4, 32), random(32, 32), scaling)
    assert capsys.readouterr().err.count("MXFP8 is emulated: cpu devices") == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the products of GPUs")
@pytest.mark.parametrize(("rows", "n", "k"), [(256, 256, 512), (70, 224, 288), (0, 128, 128)])
def test_a_gpu_multiplies_the_same_numbers(rows: int, n: int, k: int) -> None:
    scaling = SCALINGS["mx"]
    a, b = (scaling.rows(t.cuda(), kernels_fp8.ACTIVATION) for t in (random(rows, k), random(n, k, seed=1)))
    wanted = a.dequantized(torch.float64) @ b.dequantized(torch.float64).t()
    found = scaling.product(a, b).double()
    assert ((found - wanted).abs() <= 2**-8 * wanted.abs() + 1e-4 * wanted.abs().max()).all()


# -- programs --------------------------------------------------------------------------------------------------------------


def uneven_decoder(inner: int) -> Stack:
    """A decoder whose products add terms of similar size, of factors that differ by up to 2 ** 24: how a tile rounds many of them depends
    on the tile's other numbers."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 96, bias=False))
    model = Stack(nn.Embedding(96, 64), [DecoderBlock(64, 16, inner)], head)
    generator = torch.Generator().manual_seed(2)

    def factors(count: int) -> Tensor:
        return torch.exp2(torch.randint(-12, 13, (count,), generator=generator).float())

    with torch.no_grad():
        for block in model.blocks:
            for norm, readers in (
                (block.attention_norm, (block.attention.q, block.attention.k, block.attention.v)),
                (block.mlp_norm, (block.mlp.gate, block.mlp.up)),
            ):
                wide = factors(64)
                norm.weight *= wide
                for reader in readers:
                    reader.weight /= wide
            wide = factors(inner)
            block.mlp.up.weight *= wide.unsqueeze(1)
            block.mlp.down.weight /= wide
    return model


def furthest(
    recipe: Fp8Recipe | None, inner: int, how: dict[str, Any], pools: tuple[WorkerPool, WorkerPool], folder: Path
) -> float:
    """The largest difference of a gradient between the program on two devices and that on one, as a fraction of the gradient's norm. Each
    element is multiplied by its parameter, whose factor it then has not."""
    model = uneven_decoder(inner)
    plain = annotate(capture(copy.deepcopy(model), tokens(), token_loss, precision="bfloat16", name="decoder"))
    graph = plain if recipe is None else in_float8(plain, recipe)
    found = []
    for pool, plan, name in zip(pools, ({}, how), ("one", "two"), strict=True):
        check_collectives(emit(graph, manual_plan(graph, precision="bfloat16", **plan), folder / name))
        assert check_program(folder / name) == plan.get("pipeline", 1)
        found.append(gradients(folder / name, pool, graph, model)[1])
    one, two = ({name: each[name] * p.detach() for name, p in model.named_parameters()} for each in found)
    return max(float((two[name] - one[name]).norm() / one[name].norm()) for name in one)


@pytest.mark.parametrize("how", [{"data": 2, "zero": 3}, {"pipeline": 2, "microbatches": 2}], ids=str)
def test_programs_round_as_one_device_does(
    how: dict[str, Any], workers1: WorkerPool, workers2: WorkerPool, tmp_path: Path
) -> None:
    """These programs compute the same numbers, and round sums of weight gradients to bfloat16 elsewhere: by at most half a unit in the last
    place of eight bits."""
    assert furthest(MXFP8, 128, how, (workers1, workers2), tmp_path) < 2**-8


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallelism_moves_no_tile(
    sequence: bool, workers1: WorkerPool, workers2: WorkerPool, tmp_path: Path
) -> None:
    """Partial sums in bfloat16 are rounded before they are added, which moves operands near a boundary of e4m3 to the next number. Tiles
    that end elsewhere, as if the shards' widths did not matter, change far more."""
    pools, how = (workers1, workers2), {"tensor": 2, "sequence": sequence}
    assert furthest(MXFP8, 128, how, pools, tmp_path) < 2**-4
    if not sequence:
        loose = dataclasses.replace(MXFP8, tile=0)
        with mock.patch.dict(FP8_RECIPES, {MXFP8.name: loose}):
            assert furthest(loose, 96, how, pools, tmp_path / "moved") > 2**-3


def test_experts_round_as_on_one_device(workers1: WorkerPool, workers2: WorkerPool, tmp_path: Path) -> None:
    """Under expert parallelism each expert gets the rows of all tokens, in the order of one device: the same tiles, and equal gradients."""
    graph = in_float8(mixture(), MXFP8)
    torch.manual_seed(0)
    model, batch, _ = mixtral(hidden_size=64, intermediate_size=128, vocab_size=96, num_hidden_layers=1)
    flat, state = flatten_batch(graph.structure, batch), tmp_path / "state.pt"  # type: ignore[arg-type]
    torch.save({name: value.detach() for name, value in model.state_dict().items()}, state)
    found = []
    for pool, how in ((workers1, {}), (workers2, {"expert": 2})):
        folder = tmp_path / str(len(how))
        emit(graph, manual_plan(graph, precision="bfloat16", **how), folder)
        found.append(pool.run("autopar.verify.remote:gradients", str(folder), str(state), flat)[0][1])
    one, two = found
    names = [name for name in one if "experts" in name]
    assert len(names) == 2 and all(torch.equal(one[name], two[name]) and one[name].any() for name in names)
    for name in one:
        assert (two[name] - one[name]).norm() <= 2**-8 * one[name].norm()


def narrow(inner: int, length: int = 16) -> Graph:
    """A decoder of that inner width in MXFP8, whose rows have ``length`` tokens."""
    ids = torch.zeros(8, length, dtype=torch.int64)
    model = uneven_decoder(inner)
    return in_float8(annotate(capture(model, (ids, ids), token_loss, precision="bfloat16", name="decoder")), MXFP8)


@pytest.mark.parametrize(
    ("inner", "length", "how", "message"),
    [
        (
            96,
            16,
            {"tensor": 2},
            r"of 96, does not divide by tensor 2 into multiples of 32, so that a tile of 32 .* mxfp8",
        ),
        (128, 12, {"data": 4}, r"dim 0 of .*, of 8, does not divide by data 4 into multiples of 8,"),
        (128, 16, {"data": 4, "microbatches": 2}, r"dim 0 of .*, of 8, does not divide by microbatch 2 and data 4"),
    ],
)
def test_axes_that_would_divide_a_tile_are_refused(
    inner: int, length: int, how: dict[str, int], message: str, tmp_path: Path
) -> None:
    graph, cluster = narrow(inner, length), parse(f"{math.prod(how.get(k, 1) for k in ('data', 'tensor'))}xB200-180GB")
    plan = manual_plan(graph, precision="bfloat16", **how)
    with pytest.raises(UsageError, match=message):
        emit(graph, plan, tmp_path)
    (block,) = (layer for layer in plan.layers if layer.name == "blocks.0")
    for one, priced in ((graph, False), (narrow(128, 32), True)):
        (name,) = (layer.cls for layer in one.layers if layer.name == "blocks.0")
        price = Pricer(one, cluster, "bfloat16").layer(name, plan.mesh, block.strategy, plan.microbatches)
        assert (price is not None) == priced


def test_shares_of_tokens_end_with_a_tile() -> None:
    """``linear`` flattens tokens: a share of a dim is a multiple of what makes its tokens a multiple of 32, and a dim that is not sharded
    is of any size."""

    def multiples(*shape: int) -> dict[tuple[int, int], int]:
        gm = torch.fx.Graph()
        x, weight = (gm.placeholder(name) for name in ("x", "weight"))
        x.meta["val"], weight.meta["val"] = (
            torch.empty(*shape, device="meta"),
            torch.empty(64, shape[-1], device="meta"),
        )
        product = gm.call_function(kernels_fp8.linear, (x, weight), {"scaling": "mx"})
        product.meta["val"] = torch.empty(*shape[:-1], 64, device="meta")
        assert recipe_of(product) is MXFP8
        found = shard_multiples(product)
        product.kwargs = {"scaling": "blockwise"}
        assert recipe_of(product) is FP8_BLOCKWISE and not shard_multiples(product)
        return found

    weights = {(1, 0): 32, (1, 1): 32}
    assert multiples(7, 128) == {(0, 0): 32, (0, 1): 32} | weights
    assert multiples(8, 4096, 128) == {(0, 0): 1, (0, 1): 32, (0, 2): 32} | weights
    assert multiples(8, 12, 128) == {(0, 0): 8, (0, 1): 32, (0, 2): 32} | weights
    assert multiples(4, 5, 16, 128) == {(0, 0): 2, (0, 1): 2, (0, 2): 32, (0, 3): 32} | weights


# -- plans -----------------------------------------------------------------------------------------------------------------


def test_mxfp8_is_used_on_blackwell_where_it_gains_and_is_allowed() -> None:
    name = MXFP8.name
    graph, plan = planned("B200-180GB", 8192, allow=(name,))
    tensorwise, exact = (planned("B200-180GB", 8192, allow=allow)[1] for allow in ((FP8.name,), ()))
    assert plan.allow == graph.allow == (name,)
    # one more rounding of every gradient than with one scale for the tensor
    assert tensorwise.prediction.step_time_s < plan.prediction.step_time_s < 0.95 * exact.prediction.step_time_s
    assert any(
        f"as {name} allows" in note and "1 x 32" in note and "that 32 does not divide" in note for note in plan.notes
    )
    assert "mxfp8 (not exact)" in describe(plan)
    assert Plan.from_json(json.loads(plan.dumps())) == plan
    assert planned("B200-180GB", 256, allow=(name,))[1].allow == ()  # rounding takes longer than it saves
    for kind in ("H100-80GB", "A100-80GB"):  # without the hardware
        plan = planned(kind, 8192, allow=(name,))[1]
        assert plan.allow == () and any(f"{name} is allowed, but not used: on {kind}" in note for note in plan.notes)
    assert not any("not used" in note for note in planned("B200-180GB", 256, allow=(name,))[1].notes)


def test_products_are_priced_with_both_roundings_and_their_scales() -> None:
    """In bytes: rounding moves 9 per number (``FP8_ROUNDING`` of 2), a pass in 8 bits 1 + 1/32."""
    graph = in_float8(captured(), MXFP8)
    (cls,) = (c for c in graph.classes.values() if sum(recipe_of(n) is not None for n in c.graph.graph.nodes) == 7)
    nodes = [node for node in cls.graph.graph.nodes if node.op == "call_function"]
    costs = op_costs(nodes, trace(cls), lambda tensor: tensor.nbytes)
    op = max(
        i for i, node in enumerate(costs.nodes) if recipe_of(node) is MXFP8
    )  # the last one, whose input no other op reads
    x, weight, result = (slot for slot in costs.slots if slot.op == op)
    assert costs.kinds[op] == MXFP8.precision and costs.forward_kernels[op] == constants.FP8_KERNELS.value
    assert (x.operand, weight.operand, result.operand) == (0, 1, OUTPUT)
    rounding, narrow_bytes = 2 * constants.FP8_ROUNDING.value, 1 + 1 / 32
    for slot in (x, weight):
        assert slot.bytes == 2 * slot.numel and slot.forward == slot.numel * (rounding + narrow_bytes)
        # rounded along the other dim, written and read in 8 bits; the operand's gradient is written in 16
        assert slot.backward == slot.numel * (rounding + 3 * narrow_bytes + 2)
    assert result.backward == result.bytes / 2 * (2 * rounding + 4 * narrow_bytes)


def test_experts_are_in_mxfp8_and_priced_at_its_rate(tmp_path: Path) -> None:
    graph = in_float8(mixture(), MXFP8)
    emit(graph, manual_plan(graph, precision="bfloat16"), tmp_path)
    text = (tmp_path / "model.py").read_text()
    assert text.count('scaling="mx")') == 7 and text.count("kernels_fp8.grouped_linear(") == 3
    (node,) = (n for c in graph.classes.values() for n in c.graph.graph.nodes if isinstance(n.target, Experts))
    assert recipe_of(node) is MXFP8
    parameters = range(FIRST_PARAMETER, FIRST_PARAMETER + 3)
    assert shard_multiples(node) == {(i, dim): 32 for i in parameters for dim in (1, 2)}
