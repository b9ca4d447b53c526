"""``allow={"fp8"}``: products with weights in 8 bits, where that gains."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import KINDS, ROWS
from tiers import slow
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own convention
from workers import WorkerPool

from autopar.bench.models import DecoderBlock, Stack, token_loss
from autopar.capture import capture, flatten_batch, in_float8
from autopar.checks.collectives import check_collectives
from autopar.checks.types import check_program
from autopar.devices import parse
from autopar.emit import emit
from autopar.graph import Graph
from autopar.measure import compare
from autopar.ops.experts import Experts
from autopar.plan import Plan
from autopar.planning import plan_model
from autopar.precision import FP8, name_of
from autopar.program import kernels_fp8
from autopar.program.kernels_fp8 import BACKWARD, FORWARD, scaled
from autopar.search import SearchOptions
from autopar.search.manual import manual_plan
from autopar.shard import annotate
from autopar.summary import describe
from autopar.workload import Workload
from passes.float8 import float8_pass

# -- the kernel ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FORWARD, BACKWARD], ids=name_of)
@pytest.mark.parametrize("size", [1e-20, 3e-3, 1.0, 700.0, 1e20])
def test_scales_are_the_largest_powers_of_two(dtype: torch.dtype, size: float) -> None:
    torch.manual_seed(0)
    x = (torch.randn(32, 48) * size).bfloat16()
    found = scaled(x, dtype)
    most = torch.finfo(dtype).max
    assert found.values.dtype == dtype and torch.frexp(found.unit)[0] == 0.5
    assert most / 2 * 0.9 < found.values.float().abs().max() <= most
    bits = (
        torch.finfo(dtype).eps / 2
    )  # of a rounding to the nearest; numbers near zero are rounded to a multiple of the smallest
    error = (found.values.double() * found.unit.double() - x.double()).abs()
    smallest = torch.finfo(dtype).smallest_normal * found.unit.double()
    assert (error <= bits * x.double().abs().clamp(min=smallest)).all() and error.max() > 0


def test_the_layout_is_what_the_hardware_takes() -> None:
    """Rows are contiguous, whatever the strides of the tensor."""
    x = torch.randn(32, 48).bfloat16()
    assert scaled(x.t(), FORWARD).values.is_contiguous() and scaled(x, FORWARD).transposed().values.is_contiguous()
    assert torch.equal(scaled(x.t(), FORWARD).values.float(), scaled(x, FORWARD).transposed().values.float())


def products(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The result and both gradients, with operands rounded in a loop of their own, in float64."""

    def rounded(t: Tensor, dtype: torch.dtype) -> Tensor:
        scale = 2.0
        while float(t.abs().max()) * scale > torch.finfo(dtype).max:
            scale /= 2
        while float(t.abs().max()) * scale * 2 <= torch.finfo(dtype).max:
            scale *= 2
        return (t.double() * scale).to(dtype).double() / scale

    a, b, g = rounded(x, FORWARD), rounded(weight, FORWARD), rounded(gradient, BACKWARD)
    return a @ b.t(), g @ b, g.t() @ a


@pytest.mark.parametrize("rows", [32, 21])
def test_products_are_those_of_rounded_operands(rows: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, rows, 64).bfloat16().requires_grad_(), torch.randn(48, 64).bfloat16().requires_grad_()
    gradient = (torch.randn(3, rows, 48) * 1e-3).bfloat16()
    result = kernels_fp8.linear(x, weight)
    result.backward(gradient)
    assert x.grad is not None and weight.grad is not None
    assert {t.dtype for t in (result, x.grad, weight.grad)} == {torch.bfloat16}
    flat = x.detach().flatten(0, 1), weight.detach(), gradient.flatten(0, 1)
    exact = flat[0].double() @ flat[1].double().t()
    for found, wanted in zip((result.flatten(0, 1), x.grad.flatten(0, 1), weight.grad), products(*flat), strict=True):
        # one rounding to bfloat16, and sums in float32
        assert ((found.double() - wanted).abs() <= 2**-8 * wanted.abs() + 1e-5 * wanted.abs().max()).all()
    assert (result.flatten(0, 1).double() - exact).abs().max() > 0.02 * exact.abs().max()


def test_what_is_not_in_8_bits_is_a_plain_product() -> None:
    torch.manual_seed(0)
    for x, weight in (
        (torch.randn(4, 64), torch.randn(32, 64)),
        (torch.randn(4, 60).bfloat16(), torch.randn(32, 60).bfloat16()),
        (torch.randn(4, 64).bfloat16(), torch.randn(36, 64).bfloat16()),
        (torch.randn(4, 64).half(), torch.randn(32, 64).half()),
    ):
        assert torch.equal(kernels_fp8.linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_not_hidden(value: float) -> None:
    x, weight = torch.ones(16, 16).bfloat16(), torch.ones(16, 16).bfloat16()
    x[3, 5] = value
    for scaling in kernels_fp8.SCALINGS:
        found = kernels_fp8.linear(x, weight, scaling)
        # with one scale per tensor, no row is right
        assert not (found if scaling == "tensorwise" else found[3]).isfinite().any(), scaling
        assert scaling == "tensorwise" or torch.equal(found[4:], F.linear(x, weight)[4:])
        assert not kernels_fp8.linear(weight, x, scaling)[:, 3].isfinite().any()
    assert (kernels_fp8.linear(torch.zeros_like(x), weight) == 0).all()


# -- which products --------------------------------------------------------------------------------------------------------


def decoder() -> Stack:
    torch.manual_seed(0)
    head = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 96, bias=False))
    return Stack(nn.Embedding(96, 64), [DecoderBlock(64, 16, 128) for _ in range(2)], head)


def tokens() -> tuple[Tensor, Tensor]:
    ids = torch.randint(96, (ROWS, 17), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@functools.cache
def captured(precision: str = "bfloat16") -> Graph:
    return annotate(capture(decoder(), tokens(), token_loss, precision=precision, name="decoder"))


def test_blocks_are_in_8_bits_and_the_head_is_not(tmp_path: Path) -> None:
    graph = in_float8(captured())
    assert graph.allow == (FP8.name,)
    emit(graph, manual_plan(graph, precision="bfloat16"), tmp_path)
    text = (tmp_path / "model.py").read_text()
    assert text.count("kernels_fp8.linear(") == 7 and text.count("nn.Linear(") == 1  # one class of blocks
    assert json.loads((tmp_path / "plan.json").read_text())["allow"] == [FP8.name]
    assert (tmp_path / "runtime" / "kernels_fp8.py").is_file()
    wide = captured("float32")
    assert in_float8(wide) is wide


def products_of(graph: torch.fx.Graph, parameters: list[torch.fx.Node], **options: Any) -> list[bool]:
    """Whether each product of the graph is in 8 bits, after two runs of the pass, which changes nothing the second time."""
    gm = torch.fx.GraphModule({}, graph)
    for _ in range(2):
        placeholders = [node for node in gm.graph.nodes if node.name in {p.name for p in parameters}]
        float8_pass(gm, placeholders, FP8, **options)
    products = (LINEAR, kernels_fp8.linear)
    return [node.target is kernels_fp8.linear for node in gm.graph.nodes if node.target in products]


LINEAR = torch.ops.aten.linear.default


def value(node: torch.fx.Node, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.fx.Node:
    node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
    return node


def test_routers_are_not_in_8_bits() -> None:
    graph, body = torch.fx.Graph(), torch.fx.GraphModule({}, torch.fx.Graph())
    x = value(graph.placeholder("x"), 8, 32)
    weights = [value(graph.placeholder(name), 32, 32) for name in ("before", "first", "router", "after")]
    hidden = value(graph.call_function(LINEAR, (x, weights[0])), 8, 32)
    first = value(graph.call_function(LINEAR, (hidden, weights[1])), 8, 32)
    scores = value(graph.call_function(LINEAR, (first, weights[2])), 8, 32)
    index = value(graph.call_function(torch.ops.aten.argmax.default, (scores, -1)), 8, 1, dtype=torch.int64)
    mixture = value(graph.call_function(Experts(body, 32), (hidden, index, scores)), 8, 32)
    graph.output((value(graph.call_function(LINEAR, (mixture, weights[3])), 8, 32),))
    assert products_of(graph, weights, has_head=True) == [True, False, False, False]
    assert products_of(graph, weights, has_head=False) == [True, False, False, True]


@pytest.mark.parametrize("where", ["here", "in a later layer", "nowhere"])
def test_the_last_product_before_any_choice_is_not_in_8_bits(where: str) -> None:
    """A choice that is not a mixture's: the result of the product before it decides which rows are read."""
    graph = torch.fx.Graph()
    x, table = value(graph.placeholder("x"), 8, 32), value(graph.placeholder("table"), 32, 32)
    weights = [value(graph.placeholder(name), 32, 32) for name in ("before", "scorer")]
    hidden = value(graph.call_function(LINEAR, (x, weights[0])), 8, 32)
    scores = value(graph.call_function(LINEAR, (hidden, weights[1])), 8, 32)
    halves = value(graph.call_function(torch.ops.aten.mul.Tensor, (scores, 0.5)), 8, 32)
    index = value(graph.call_function(torch.ops.aten.argmax.default, (halves, -1)), 8, dtype=torch.int64)
    rows = value(graph.call_function(torch.ops.aten.embedding.default, (table, index)), 8, 32)
    graph.output((hidden, rows if where == "here" else halves))
    if where != "here":
        for node in (rows, index):
            graph.erase_node(node)
    found = products_of(graph, weights, has_head=False, choice_outputs={1} if where == "in a later layer" else ())
    assert found == [True, where == "nowhere"]


def test_a_product_of_two_activations_is_not_in_8_bits() -> None:
    graph = torch.fx.Graph()
    x, y = value(graph.placeholder("x"), 32, 32), value(graph.placeholder("y"), 32, 32)
    weight = value(graph.placeholder("weight"), 32, 32)
    hidden = value(graph.call_function(LINEAR, (x, weight)), 32, 32)
    graph.output((value(graph.call_function(LINEAR, (hidden, y)), 32, 32),))
    assert products_of(graph, [weight], has_head=False) == [True, False]


class Picks(nn.Module):
    """Scores choose rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scorer, self.last = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.table = nn.Embedding(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scorer(torch.relu(self.first(x)))
        return self.last(torch.relu(self.table(scores.argmax(-1))) + scores)


def test_a_choice_in_a_captured_model_is_seen() -> None:
    torch.manual_seed(0)
    batch = torch.randn(8, 4, 32), torch.randn(8, 4, 32)
    graph = in_float8(annotate(capture(Picks(), batch, nn.functional.mse_loss, precision="bfloat16")))
    nodes = [node for cls in graph.classes.values() for node in cls.graph.graph.nodes]
    products = [node.target is kernels_fp8.linear for node in nodes if node.target in (LINEAR, kernels_fp8.linear)]
    assert products == [True, False, False]  # the first; the scorer; the head


# -- programs --------------------------------------------------------------------------------------------------------------


class InFloat8(nn.Linear):
    """The eager layer that an emitted product is compared with."""

    def forward(self, x: Tensor) -> Tensor:
        return kernels_fp8.linear(x, self.weight)


def gradients(
    folder: Path, pool: WorkerPool, graph: Graph, model: nn.Module | None = None
) -> tuple[float, dict[str, Tensor]]:
    state = folder / "state.pt"
    torch.save({name: value.detach() for name, value in (model or decoder()).state_dict().items()}, state)
    flat = flatten_batch(graph.structure, tokens())  # type: ignore[arg-type]
    answers = pool.run("autopar.verify.remote:gradients", str(folder), str(state), flat, timeout_s=300)
    loss, found, _ = answers[0]
    return loss, found


def eager(model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    loss = token_loss(model(tokens()[0]), tokens()[1])
    loss.backward()
    return float(loss.detach()), {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("compiled", [False, slow(True)])
def test_one_device_computes_what_eager_layers_in_8_bits_do(
    compiled: bool, workers1: WorkerPool, tmp_path: Path
) -> None:
    graph = in_float8(captured())
    emit(graph, manual_plan(graph, precision="bfloat16", compiled=compiled), tmp_path)
    assert ("@torch.compile" in (tmp_path / "model.py").read_text()) == compiled
    loss, found = gradients(tmp_path, workers1, graph)
    model = decoder().bfloat16()
    for block in model.blocks:
        for parent in (block.attention, block.mlp):
            for name, layer in list(parent.named_children()):
                setattr(parent, name, made := InFloat8(layer.in_features, layer.out_features, bias=False))
                made.weight = layer.weight
    wanted = eager(model)[1]
    if compiled:  # rounds at other places, which is no less exact
        exact = eager(decoder())[1]
        assert compare(loss, found, loss, exact).value < 1.25 * compare(loss, wanted, loss, exact).value
        return
    assert compare(loss, found, loss, wanted).value < 0.05  # as two programs in bfloat16 differ
    plain = eager(decoder().bfloat16())[1]
    assert compare(loss, found, loss, plain).value > 0.05


@pytest.mark.parametrize(
    "name",
    [
        "tensor 2",
        "tensor+sequence 2",
        "data 2, zero 3",
        "recompute in part, tensor 2",
        "pipeline 2, zero bubble",
    ],
)
def test_programs_stay_near_float32(name: str, workers2: WorkerPool, tmp_path: Path) -> None:
    how = next(each for each in KINDS if each.name == name)
    graph = in_float8(captured())
    plan = dataclasses.replace(how.plan(graph), precision="bfloat16")
    check_collectives(emit(graph, plan, tmp_path))
    assert check_program(tmp_path) == len(plan.stages)
    loss, found = gradients(tmp_path, workers2, graph)
    loss0, wanted = eager(decoder())
    assert loss == pytest.approx(loss0, rel=0.02)
    for gradient, other in ((found[name], wanted[name]) for name in wanted):
        assert F.cosine_similarity(gradient.flatten(), other.flatten(), 0) > 0.95


# -- plans -----------------------------------------------------------------------------------------------------------------


def planned(
    kind: str, width: int, allow: tuple[str, ...] = (FP8.name,), precision: str = "bfloat16"
) -> tuple[Graph, Plan]:
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, device="meta") for _ in range(4)))
    batch = (torch.zeros(width, width, device="meta"), torch.zeros(width, width, device="meta"))
    options = SearchOptions(time_limit_s=60, allow=allow)
    return plan_model(
        Workload(model, batch, nn.functional.mse_loss, precision=precision),
        parse(f"1x{kind}"),
        options,
        capture_check=False,
    )


def test_8_bits_are_used_where_they_gain_and_are_allowed() -> None:
    graph, plan = planned("H100-80GB", 8192)
    exact = planned("H100-80GB", 8192, allow=())[1]
    assert plan.allow == graph.allow == (FP8.name,) and exact.allow == ()
    assert 0.5 < plan.prediction.step_time_s / exact.prediction.step_time_s < 0.9
    assert any("not exact, as fp8 allows" in note and "the head" in note for note in plan.notes)
    assert "fp8 (not exact)" in describe(plan)
    assert Plan.from_json(json.loads(plan.dumps())) == plan
    assert planned("H100-80GB", 256)[1].allow == ()  # rounding takes longer than it saves
    assert planned("A100-80GB", 8192)[1].allow == ()  # no tensor cores of 8 bits
    assert planned("H100-80GB", 8192, precision="float16")[1].allow == ()


def test_a_plan_in_8_bits_that_is_given_is_emitted(workers1: WorkerPool, tmp_path: Path) -> None:
    graph = captured()
    given = dataclasses.replace(manual_plan(graph, precision="bfloat16"), allow=(FP8.name,))
    workload = Workload(copy.deepcopy(decoder()), tokens(), token_loss, precision="bfloat16", name="decoder")
    again, plan = plan_model(workload, parse(1), SearchOptions(), plan=given, capture_check=False)
    emit(again, plan, tmp_path)
    assert "kernels_fp8.linear(" in (tmp_path / "model.py").read_text()
