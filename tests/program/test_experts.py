"""Mixtures of experts: what is recognised as one, and the kernels on real processes against the whole op."""

from __future__ import annotations

import itertools
import operator
from pathlib import Path
from typing import Any
from unittest import mock

import expert_models
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exactness import subject
from test_passes_clean import Build, apply, ops
from torch import Tensor, fx
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture import Float64Everywhere
from autopar.checks.sample_experts import gated_experts, plain_experts
from autopar.devices import parse
from autopar.emit import emit
from autopar.ops.experts import WIDTH_MULTIPLE, Experts
from autopar.planning import plan_model
from autopar.program import kernels_experts
from autopar.program.mesh_axes import on_mesh
from autopar.run.folder import import_runtime, program_modules
from autopar.search import SearchOptions
from autopar.search.manual import filled_plan
from autopar.workload import Workload
from passes import clean

aten = torch.ops.aten
TOKENS, WIDTH, COUNT, CHOICES = 7, 4, 5, 2


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape
    assert float((a - b).detach().abs().max()) <= 1e-12 * max(1.0, float(b.detach().abs().max()))


# -- capture ----------------------------------------------------------------------------------------------------------


def mixture(change: str = "") -> tuple[Build, fx.GraphModule]:
    """transformers' grouped flow with one product per expert; ``change`` spoils one step of it."""
    import transformers.integrations.moe  # noqa: F401  registers the op

    b = Build()
    x, weight = b.input("x", TOKENS, WIDTH), b.parameter("weight", COUNT, WIDTH, WIDTH)
    index, weights = b.input("index", TOKENS, CHOICES, dtype=torch.int64), b.input("weights", TOKENS, CHOICES)
    chosen = TOKENS * CHOICES
    sort = b.call(aten.sort.default, b.call(aten.reshape.default, index, [chosen]))
    ids, perm = (b.call(operator.getitem, sort, i) for i in range(2))
    token = b.call(aten.floor_divide.default, perm, CHOICES + (change == "tokens"))
    rows = b.call(aten.index.Tensor, x, [token])
    flat = b.call(aten.reshape.default, weights, [chosen])
    own = flat if change == "weights" else b.call(aten.index.Tensor, flat, [perm])
    counts = b.call(aten.histc.default, b.call(aten.to.dtype, ids, torch.float32), COUNT, 0, COUNT - 1)
    offsets = b.call(aten.cumsum.default, counts, 0, dtype=torch.int32)
    swapped = b.call(aten.transpose.int, weight, 1, 2)
    done = b.call(torch.ops.transformers.grouped_mm_fallback.default, rows, swapped, offsets)
    if change == "body":
        done = b.call(aten.cumsum.default, done, 0)
    product = b.call(aten.mul.Tensor, done, b.call(aten.unsqueeze.default, own, -1))
    places = b.call(aten.arange.start, int(change == "order"), chosen + (change == "order"))
    places = b.call(aten.clamp_max.default, places, chosen - 1) if change == "order" else places
    inverse = b.call(aten.index_put.default, b.call(aten.zeros_like.default, perm), [perm], places)
    back = b.call(aten.index.Tensor, product, [inverse])
    apart = b.call(aten.reshape.default, back, [TOKENS, CHOICES, WIDTH])
    return b, b.module(b.call(aten.sum.dim_IntList, apart, [0] if change == "sum" else [1]))


def mixtures(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if isinstance(node.target, Experts)]


def test_a_mixture_is_one_op() -> None:
    b, gm = mixture()
    (node,) = mixtures(apply(b, gm, clean.experts_pass, exact=False))
    assert [operand.name for operand in node.args] == ["x", "index", "weights", "weight"]
    body = [n.target for n in node.target.body.graph.nodes if n.op == "call_function"]
    assert node.target.count == COUNT and body == [kernels_experts.grouped_linear]


@pytest.mark.parametrize("change", ["tokens", "weights", "body", "order", "sum"])
def test_another_flow_of_data_is_no_mixture(change: str) -> None:
    """It stays what it was, its grouped product as a function that a program can carry."""
    b, gm = mixture(change)
    gm = apply(b, gm, clean.experts_pass, exact=False)
    assert not mixtures(gm) and "grouped_linear" in ops(gm)


def summed_by_token(end: str, change: str = "") -> tuple[Build, fx.GraphModule]:
    """torchtitan's flow: results are added to their tokens, or restored and multiplied by the weights; ``change`` spoils one step."""
    b = Build()
    x, weight = b.input("x", TOKENS, WIDTH), b.parameter("weight", COUNT, WIDTH, WIDTH)
    index, weights = b.input("index", TOKENS, CHOICES, dtype=torch.int64), b.input("weights", TOKENS, CHOICES)
    chosen = TOKENS * CHOICES
    flat = b.call(aten.reshape.default, index, [chosen])
    descending = {"descending": True} if change == "descending" else {}
    perm = b.call(aten.argsort.stable, flat, stable=True, **descending)
    token = b.call(aten.floor_divide.default, perm, CHOICES)
    places = b.call(aten.expand.default, b.call(aten.reshape.default, token, [-1, 1]), [chosen, WIDTH])
    rows = b.call(aten.gather.default, x, 0, places)
    own = b.call(aten.index.Tensor, b.call(aten.reshape.default, weights, [chosen]), [perm])
    own = b.call(aten.reshape.default, own, [-1, 1])
    rows = b.call(aten.mul.Tensor, rows, own) if end == "weights first" else rows
    counts = b.call(aten.histc.default, b.call(aten.to.dtype, flat, torch.float64), COUNT, 0, COUNT)
    counts = b.call(aten.flip.default, counts, [0]) if change == "counts" else counts
    offsets = b.call(aten.cumsum.default, counts, 0, dtype=torch.int32)
    swapped = b.call(aten.transpose.int, weight, -2, -1)
    done = b.call(torch.ops.autopar.grouped_product.default, rows, swapped, offsets)
    if end == "restored":
        back = b.call(aten.index_put.default, b.call(aten.zeros_like.default, done), [perm], done)
        apart = b.call(aten.reshape.default, back, [-1, CHOICES, WIDTH])
        return b, b.module(b.call(aten.bmm.default, b.call(aten.reshape.default, weights, [-1, 1, CHOICES]), apart))
    done = b.call(aten.mul.Tensor, done, own) if end == "added" else done
    places = b.call(aten.flip.default, places, [0]) if change == "places" else places
    return b, b.module(b.call(aten.scatter_add.default, b.input("shared", TOKENS, WIDTH), 0, places, done))


@pytest.mark.parametrize("end", ["added", "weights first", "restored"])
def test_results_that_are_summed_by_token_are_a_mixture(end: str) -> None:
    b, gm = summed_by_token(end)
    (node,) = mixtures(apply(b, gm, clean.experts_pass, exact=False))
    assert [operand.name for operand in node.args] == ["x", "index", "weights", "weight"]
    assert node.target.count == COUNT and node.target.weights_first is (end == "weights first")


@pytest.mark.parametrize("change", ["counts", "places", "descending"])
def test_another_sum_by_token_is_no_mixture(change: str) -> None:
    b, gm = summed_by_token("added", change)
    assert not mixtures(clean.experts_pass(gm))


def test_float64_has_grouped_products() -> None:
    """torch's own takes at most float32."""
    rows, weight = values(9, 4).requires_grad_(), values(4, 4, 3, seed=1).requires_grad_()
    offsets = torch.tensor([5, 5, 6, 9], dtype=torch.int32)
    with Float64Everywhere():
        out = torch._grouped_mm(rows, weight, offs=offsets)
    expected = torch.cat([rows[:5] @ weight[0], rows[5:6] @ weight[2], rows[6:] @ weight[3]])
    close(out, expected)
    g = values(9, 3, seed=2)
    found = (torch.autograd.grad(each, (rows, weight), g) for each in (out, expected))
    for mine, theirs in zip(*found, strict=True):
        close(mine, theirs)


def router(op: Any, *args: Any, cast: bool = False) -> tuple[Build, fx.GraphModule]:
    """``op`` between a product on flattened rows and what restores batch and sequence; ``cast``: by a converted weight."""
    b = Build()
    flat = b.call(aten.reshape.default, b.input("x", 2, 3, WIDTH), [6, WIDTH])
    weight = b.parameter("gate", COUNT, WIDTH)
    weight = b.call(aten.to.dtype, b.call(aten.neg.default, weight), torch.float64) if cast else weight
    scores = b.call(op, b.call(aten.linear.default, flat, weight), *args)
    return b, b.module(b.call(aten.reshape.default, scores, [2, 3, COUNT]))


@pytest.mark.parametrize("cast", [False, True])
def test_rows_stay_batch_and_sequence(cast: bool) -> None:
    """DeepSeek's router multiplies by its weight in float32."""
    b, gm = router(aten.softmax.int, -1, cast=cast)
    gm = apply(b, gm, clean.rows_pass, exact=False)
    sizes = {n.target: tuple(n.meta["val"].shape) for n in gm.graph.nodes if n.op == "call_function"}
    assert sizes[aten.linear.default] == sizes[aten.softmax.int] == (2, 3, COUNT)


def test_copies_of_all_rows_for_experts_are_a_dim_of_their_own() -> None:
    """As in Llama 4, whose experts all get every token, times its score: rows stay batch and sequence until the product."""
    b = Build()
    x, scores, weight = b.input("x", 6, WIDTH), b.input("scores", 6, COUNT), b.parameter("w", COUNT, WIDTH, WIDTH)
    copies = b.call(aten.repeat.default, x, [COUNT, 1])
    own = b.call(aten.reshape.default, b.call(aten.transpose.int, scores, 0, 1), [-1, 1])
    rows = b.call(aten.reshape.default, b.call(aten.mul.Tensor, copies, own), [COUNT, -1, WIDTH])
    done = b.call(aten.reshape.default, b.call(aten.bmm.default, rows, weight), [-1, WIDTH])
    total = b.call(aten.sum.dim_IntList, b.call(aten.reshape.default, done, [COUNT, -1, WIDTH]), [0])
    steps = (clean.rows_pass, clean.reshapes_pass, clean.dead_code_pass)
    gm = apply(b, b.module(total), *steps, exact=False)
    assert COUNT * 6 not in {n.meta["val"].shape[0] for n in gm.graph.nodes if n.op == "call_function"}


@pytest.mark.parametrize("op", [aten.softmax.int, aten.cumsum.default])
def test_what_mixes_rows_keeps_them_in_one_dim(op: Any) -> None:
    b, gm = router(op, 0)
    gm = apply(b, gm, clean.rows_pass, exact=False)
    assert next(n for n in gm.graph.nodes if n.target is op).meta["val"].shape == (6, COUNT)


# -- kernels ----------------------------------------------------------------------------------------------------------


def test_grouped_linear_is_a_loop_over_experts() -> None:
    rows, weight = values(9, 4).requires_grad_(), values(4, 3, 4, seed=1).requires_grad_()
    counts = torch.tensor([5, 0, 1, 3])  # the second gets nothing
    out = kernels_experts.grouped_linear(rows, weight, counts)
    expert = [0] * 5 + [2] + [3] * 3
    expected = torch.stack([F.linear(rows[i], weight[e]) for i, e in enumerate(expert)])
    close(out, expected)
    g = values(9, 3, seed=2)
    for mine, theirs in zip(
        torch.autograd.grad(out, (rows, weight), g), torch.autograd.grad(expected, (rows, weight), g), strict=True
    ):
        close(mine, theirs)
    assert not torch.autograd.grad(kernels_experts.grouped_linear(rows, weight, counts).sum(), weight)[0][1].any()


class Syncs(TorchDispatchMode):
    """Counts the calls for which the host would wait for a GPU: values as Python numbers, and results whose shapes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        name = function.overloadpacket.__name__
        shaped = name == "repeat_interleave" and given.get("output_size") is None
        masked = name in ("index", "index_put") and any(t is not None and t.dtype == torch.bool for t in args[1])
        self.count += shaped or masked or name in ("_local_scalar_dense", "nonzero", "masked_select", "unique")
        return function(*args, **given)

    def __enter__(self) -> Syncs:
        self._tolist = mock.patch.object(Tensor, "tolist", self._counted(Tensor.tolist))
        self._tolist.start()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._tolist.stop()
        super().__exit__(*raised)

    def _counted(self, tolist: Any) -> Any:
        def counted(tensor: Tensor) -> Any:
            self.count += 1
            with torch._C._DisableTorchDispatch():
                return tolist(tensor)

        return counted


def test_a_mixture_whose_rows_stay_waits_once_for_all_its_products() -> None:
    op = plain_experts(24, 8, 4, inner=6)
    x, index, weights = values(12, 8), torch.arange(24).view(12, 2) % 3, values(12, 2)
    parameters = [values(*shape, seed=i) for i, shape in enumerate([(4, 6, 8), (4, 6), (4, 6, 8), (4, 8)])]
    with Syncs() as syncs:
        op(x, index, weights, *parameters)
    assert syncs.count == 1  # of the loop over experts, which stands for the grouped product of GPUs


def wrong_for_empty_groups(product: Any) -> Any:
    """torch's grouped product, which leaves NaN in matrices of groups without rows, as on Blackwell."""

    def grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        result = product(a, b, offs=offs)
        if result.dim() == 3:
            result[torch.diff(offs, prepend=offs.new_zeros(1)) == 0] = torch.nan
        return result

    return grouped_mm


@pytest.mark.parametrize("fills", [True, False])
def test_experts_without_rows_have_gradients_of_zero(fills: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device whose grouped product leaves NaN there."""
    monkeypatch.setattr(F, "grouped_mm", wrong_for_empty_groups(F.grouped_mm))
    monkeypatch.setattr(kernels_experts, "fills_empty_groups", lambda _: fills)
    rows, weight = (values(*shape, seed=i).bfloat16() for i, shape in enumerate([(9, 8), (4, 16, 8)]))
    counts, g = torch.tensor([5, 0, 1, 3]), values(1, 1, seed=2).bfloat16().expand(9, 16)
    found = []
    for product in (kernels_experts.GroupedProduct.apply, kernels_experts.looped_linear):
        own = [t.clone().requires_grad_() for t in (rows, weight)]
        out = product(*own, counts)
        found.append((out, *torch.autograd.grad(out, own, g)))
    if not fills:
        assert found[0][2][1].isnan().all()
        return
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=2**-7)
    assert not found[0][2][1].any()


@pytest.mark.parametrize(("inner", "grouped"), [(8, True), (6, False)])
def test_a_cpu_has_a_grouped_product_for_aligned_widths(
    inner: int, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 rows of 16 bytes' multiples; float64 has none."""
    called = []
    product = kernels_experts.GroupedProduct.apply
    monkeypatch.setattr(
        kernels_experts.GroupedProduct, "apply", lambda *args: called.append(1) or product(*args), raising=False
    )
    rows, weight = (values(*shape, seed=i).float() for i, shape in enumerate([(9, 8), (4, inner, 8)]))
    counts, g = torch.tensor([5, 0, 1, 3]), values(9, inner, seed=2).float()
    found = []
    for multiply in (kernels_experts.grouped_linear, kernels_experts.looped_linear):
        own = [t.clone().requires_grad_() for t in (rows, weight)]
        out = multiply(*own, counts)
        found.append((out, *torch.autograd.grad(out, own, g)))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert bool(called) == grouped
    kernels_experts.grouped_linear(rows.double(), weight.double(), counts)
    assert len(called) == grouped


def shared_out(exchange: bool, first: bool) -> None:
    """Half the experts per rank, with other tokens or the same ones, against one process that has all; expert 1 gets nothing, and
    rank 0 owns nearly every row. With ``first``, rows are weighted before their experts."""
    op = gated_experts(24, 8, inner=6, count=4, weights_first=first)
    x, weights = values(4, 3, 8), values(4, 3, 2, seed=1)
    index = torch.tensor([[0, 2], [2, 0], [0, 2]]).repeat(4, 1).view(4, 3, 2)
    index[3, :, 1] = 3
    index[0] = 0  # twice the same
    parameters = [values(*shape, seed=2 + i) for i, shape in enumerate([(4, 6, 8), (4, 6, 8), (4, 8, 6)])]
    whole = [t.clone().requires_grad_() for t in (x, weights, *parameters)]
    expected = op(whole[0], index, *whole[1:])
    rows = zip(x.flatten(0, 1), index.flatten(0, 1).tolist(), weights.flatten(0, 1), strict=True)
    each = [sum(_weighted(w, row, parameters, e, first) for w, e in zip(ws, es, strict=True)) for row, es, ws in rows]
    close(expected, torch.stack(each).view(4, 3, 8))
    g = values(4, 3, 8, seed=9)
    gradients = torch.autograd.grad(expected, whole, g)
    rank = dist.get_rank()

    def mine(t: Tensor) -> Tensor:
        return t.chunk(2)[rank].contiguous()

    own = [t.detach().clone() for t in whole]
    own = [*(map(mine, own[:2]) if exchange else own[:2]), *map(mine, own[2:])]
    own = [t.requires_grad_() for t in own]
    index, g = (mine(index), mine(g)) if exchange else (index, g)
    axes: dict[str, Any] = {"owners": ("e",), **({"exchange": ("e",)} if exchange else {"partial_axes": ("e",)})}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("e",))
    with on_mesh(mesh):
        with Syncs() as forward:
            out = op(own[0], index, *own[1:], **axes)
        with Syncs() as backward:
            found = list(torch.autograd.grad(out, own, g))
    assert (forward.count, backward.count) == (1, 0)
    total = out.detach().clone()
    if exchange:
        close(total, mine(expected.detach()))
    else:  # terms of a sum: of the result, and of the gradients of what both ranks have
        for term in (total, *found[:2]):
            dist.all_reduce(term)
        close(total, expected.detach())
    for i, (a, b) in enumerate(zip(found, gradients, strict=True)):
        close(a, mine(b) if exchange or i >= 2 else b)


def _weighted(weight: Tensor, row: Tensor, parameters: list[Tensor], e: int, first: bool) -> Tensor:
    return _expert(weight * row, parameters, e) if first else weight * _expert(row, parameters, e)


def _expert(row: Tensor, parameters: list[Tensor], e: int) -> Tensor:
    gate, up, down = (p[e] for p in parameters)
    return down @ (F.silu(gate @ row) * (up @ row))


@pytest.mark.parametrize("first", [False, True], ids=["weights last", "weights first"])
@pytest.mark.parametrize("exchange", [False, True], ids=["share", "exchange"])
def test_experts_on_two_ranks(workers2: Any, exchange: bool, first: bool) -> None:
    workers2.run("test_experts:shared_out", exchange, first)


# -- widths that grouped products refuse ------------------------------------------------------------------------------


def test_the_widths_that_grouped_products_take_are_those_of_torch() -> None:
    """On meta torch checks what CUDA needs: here for all products of both passes."""
    for k, m in itertools.product((4, 8, 12, 20, 24, 44), repeat=2):
        rows, weight = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((30, k), (4, m, k)))
        own = [t.requires_grad_() for t in (rows, weight)]
        try:
            out = kernels_experts.GroupedProduct.apply(*own, torch.empty(4, dtype=torch.int64, device="meta"))
            torch.autograd.grad(out, own, torch.empty_like(out))
            fits = True
        except RuntimeError as error:
            assert "16 bytes" in str(error)
            fits = False
        assert fits == (not k % WIDTH_MULTIPLE and not m % WIDTH_MULTIPLE), (k, m)


@pytest.mark.parametrize(
    ("precision", "tensor", "odd"), [("bfloat16", 4, True), ("bfloat16", 2, False), ("float32", 4, False)]
)
def test_experts_of_odd_local_widths_are_computed_one_after_the_other(
    precision: str, tensor: int, odd: bool, tmp_path: Path
) -> None:
    """48 columns are 12 on each of 4 devices, and 24 on each of 2; 3 experts are on all of them."""
    model, batch, loss = expert_models.mixtral(num_local_experts=3, num_hidden_layers=1)
    workload = Workload(model, batch, loss, precision=precision)
    options = SearchOptions(tensor=tensor, microbatches=1)
    graph, plan = plan_model(workload, parse(f"{tensor}xH100"), options, capture_check=False)
    emit(graph, plan, tmp_path)
    text = (tmp_path / "model.py").read_text()
    assert ("experts.looped_linear(" in text, "experts.grouped_linear(" in text) == (odd, not odd)
    assert any("multiples of 8" in note and "has widths 32 and 12" in note for note in plan.notes) == odd


@pytest.mark.parametrize(("replicate", "zero"), [(1, 3), (2, 0)])
def test_fsdp_shards_experts_over_the_data_axes_that_do_not_distribute_them(
    replicate: int, zero: int, tmp_path: Path
) -> None:
    """With two copies of the shards no axis is left to shard experts over."""
    graph = subject("mixtral").graph
    emit(graph, filled_plan(graph, 4, {"expert": 2, "zero": 3, "replicate": replicate}), tmp_path)
    with program_modules(tmp_path):
        program = import_runtime(tmp_path).load(tmp_path)
        places = {layout.original: program.placement(layout) for layout in program.layouts}
    experts, query = (places[f"model.layers.0.{name}"] for name in ("mlp.experts.down_proj", "self_attn.q_proj.weight"))
    assert (experts.zero, experts.axes, query.zero, query.axes) == (zero, ("data",), 3, ("data", "expert"))
    assert query.shards == (("data", "expert") if replicate == 1 else ("expert",))


class SharedExperts(torch.nn.Module):
    """A layer that sends its tokens twice to the same experts, by two routers."""

    def __init__(self) -> None:
        super().__init__()
        block = expert_models.mixtral(num_hidden_layers=1)[0].model.layers[0].mlp
        again = expert_models.mixtral(num_hidden_layers=1)[0].model.layers[0].mlp
        again.experts = block.experts
        self.first, self.second = block, again

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x))


def test_fused_experts_that_two_mixtures_share_stay_whole() -> None:
    """Their gate and up projection is one parameter, which is not split for two readers."""
    torch.manual_seed(0)
    model, x = SharedExperts().double(), values(2, 8, 32)
    graph = Workload(model, x, lambda y: y.square().mean()).capture()
    assert sum(len(cls.mixtures) for cls in graph.classes.values()) == 2
    assert {name for name in graph.parameters if "gate_up" in name} == {"first.experts.gate_up_proj"}
