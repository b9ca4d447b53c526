"""Saved activations in 8 bits (``allow={"int8_activations"}``): rounding, what is stored so, prices, the search, programs."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from workers import WorkerPool

from autopar import compile
from autopar.bench.models import DecoderBlock, Stack, token_loss
from autopar.capture import capture, flatten_batch
from autopar.checks.types import check_program
from autopar.devices import parse
from autopar.emit import emit
from autopar.errors import InfeasibleError, UsageError
from autopar.graph import Graph
from autopar.measure import compare
from autopar.plan import Plan, Role, Strategy
from autopar.planning import plan_model
from autopar.price import Pricer
from autopar.price import saved_activations as priced
from autopar.program import activation_storage
from autopar.program.spec import layers_of
from autopar.run import remote as run_remote
from autopar.search import SearchOptions, make_mesh, manual_plan
from autopar.search.options import pins_by_layer
from autopar.search.strategies import candidates
from autopar.shard import annotate
from autopar.summary import describe
from autopar.techniques.activations import ACTIVATIONS
from autopar.techniques.activations import INT8_ACTIVATIONS as INT8
from autopar.verify import verify
from autopar.workload import Workload

NARROW = ACTIVATIONS.mode("int8").quantized
assert NARROW is not None

# -- rounding --------------------------------------------------------------------------------------------------------


def stored(x: Tensor, fused: bool = False, module: ModuleType = activation_storage) -> Tensor:
    return module._Rounded(x.reshape(-1), fused).restore().view(x.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_numbers_are_within_a_254th_of_the_largest_of_their_block(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(70, 77) * torch.logspace(-3, 3, 77)).to(
        dtype
    )  # blocks lie across rows, and the last one is shorter
    found = stored(x)
    blocks = nn.functional.pad((found.double() - x.double()).abs().flatten(), (0, -x.numel() % 64)).view(-1, 64)
    largest = nn.functional.pad(x.double().abs().flatten(), (0, -x.numel() % 64)).view(-1, 64).amax(1, keepdim=True)
    bound = 1 / 254 + torch.finfo(dtype).eps + 1e-6
    assert found.dtype == dtype and (blocks <= largest * bound).all() and (blocks > largest / 300).any()


def test_pieces_of_a_tensor_are_rounded_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(50, 77)
    whole = stored(x)
    monkeypatch.setattr(activation_storage, "CHUNK", 256)
    assert torch.equal(stored(x), whole) and torch.equal(stored(x, fused=True), whole)


def test_zeros_and_what_is_not_finite() -> None:
    x = torch.randn(5, 64)
    x[0], x[1, ::2], x[2, 7], x[3, 5], x[4, 9] = 0.0, 0.0, -torch.inf, torch.inf, torch.nan
    found = stored(x)
    assert (found[:2][x[:2] == 0] == 0).all() and not (found[1] == 0).all()
    assert found[2, 7] == -torch.inf and torch.equal(found[2].isinf(), x[2].isinf())
    assert not found[3:].isfinite().any()


def test_the_price_has_the_runtimes_numbers() -> None:
    assert (NARROW.block, NARROW.min_elements, NARROW.chunk) == (
        activation_storage.BLOCK,
        activation_storage.MIN_ELEMENTS,
        activation_storage.CHUNK,
    )
    held = activation_storage._Rounded(torch.randn(1001), False)
    assert held.codes.nbytes + held.scales.nbytes == 1001 + NARROW.scale_bytes * 16


# -- what is stored ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two halves of one product's result, a value that two ops save, an argument, a mask, a number for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(128, 64)

    def compute(self, x: Tensor) -> Tensor:
        left, right = self.up(x).chunk(2, dim=-1)
        hidden = torch.tanh(left * right)
        kept = hidden.masked_fill(hidden > 0.5, 0.0)
        return self.down(kept * hidden) / (1 + x.square().mean(-1, keepdim=True))

    def forward(self, x: Tensor, module: ModuleType = activation_storage) -> Tensor:
        with module.in_8_bits(self, x):
            return self.compute(x)


def kept_by(run: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor], list[Any]]:
    """The result, the tensors that are saved as they are, and those that are rounded, of every call once."""
    as_they_are: list[Tensor] = []
    in_8_bits: dict[int, Any] = {}
    hooks = torch.autograd.graph.saved_tensors_hooks

    def watched(put: Callable[[Tensor], Any], take: Callable[[Any], Tensor]) -> Any:
        def note(tensor: Tensor) -> Any:
            kept = put(tensor)
            if isinstance(kept, Tensor):
                as_they_are.append(kept)
            else:
                in_8_bits[id(kept.stored)] = kept.stored
            return kept

        return hooks(torch.compiler.disable(note), take)

    with mock.patch.object(torch.autograd.graph, "saved_tensors_hooks", watched):
        result = run()
    return result, as_they_are, list(in_8_bits.values())


def check_block(module: ModuleType) -> None:
    """Each tensor once, of which parameters and the argument are none; gradients as far away as rounding takes them."""
    torch.manual_seed(0)
    block, x = Block().double(), torch.randn(8, 8, 64, dtype=torch.float64, requires_grad=True)
    result, whole, rounded = kept_by(lambda: block(x, module))
    plain = block.compute(x)
    assert torch.equal(result, plain)
    n = 8 * 8
    # both halves, tanh's result, the second product's input and its factor, its result
    assert sorted(r.numel for r in rounded) == sorted([128 * n, 128 * n, 128 * n, 128 * n, 128 * n, 64 * n])
    assert all(r.codes.nbytes + r.scales.nbytes == r.numel + 4 * r.numel // 64 for r in rounded)
    mine = {t.untyped_storage().data_ptr() for t in (x, *block.parameters())}
    others = [t for t in whole if t.untyped_storage().data_ptr() not in mine]
    assert {t.dtype for t in others} <= {torch.bool, torch.float64}
    assert all(t.dtype == torch.bool or t.numel() == n for t in others)
    wanted = torch.autograd.grad(plain.square().sum(), [x, *block.parameters()])
    found = torch.autograd.grad(result.square().sum(), [x, *block.parameters()])
    for a, b in zip(found, wanted, strict=True):
        assert 1e-4 < float((a - b).norm() / b.norm()) < 0.03 or torch.allclose(a, b, rtol=1e-12)
    assert not torch.allclose(found[0], wanted[0], rtol=1e-6)
    assert all(r.result is not None for r in rounded)


def test_all_but_parameters_arguments_masks_and_small_tensors_is_stored_once() -> None:
    check_block(activation_storage)


MUTATIONS = {
    "a scale is missing": ("return (codes * scales)", "return (codes * torch.ones_like(scales))"),
    "a scale of the whole tensor": ("dim=1, keepdim=True) / 127", "dim=1, keepdim=True).mean() / 127 + 0 * finite[:, :1]"),
    "parameters are rounded": ("(*layer.parameters(), *layer.buffers(), *resident)", "(*resident,)"),
    "arguments are rounded": ("(*layer.parameters(), *layer.buffers(), *resident)", "(*layer.parameters(), *layer.buffers())"),
    "a tensor is rounded twice": ("if view.key not in known or", "if True or view.key not in known or"),
    "restored for each reader": ("if self.result is None:", "if True:"),
    "small tensors are rounded": ("MIN_ELEMENTS = 1024", "MIN_ELEMENTS = 1"),
    "an address that is used again": ("or known[view.key][0].expired()", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_faults_are_found(name: str, tmp_path: Path) -> None:
    text, (before, after) = Path(activation_storage.__file__).read_text(), MUTATIONS[name]
    assert text.count(before) == 1
    (tmp_path / "mutated.py").write_text(text.replace(before, after))
    spec = importlib.util.spec_from_file_location(f"{activation_storage.__package__}.mutated", tmp_path / "mutated.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(AssertionError):
        check_block(module)
        check_addresses(module)
        check_one_restored(module)


def check_addresses(module: ModuleType) -> None:
    """Tensors that live one after another at one address are rounded each for itself."""
    x, memory, found = torch.ones(64, 64, requires_grad=True), np.empty((64, 64), dtype=np.float32), []
    with module.in_8_bits(nn.Module(), x):
        for k in range(4):
            memory[:] = k
            found.append((x * torch.from_numpy(memory)).sum())
    for k, result in enumerate(found):
        (gradient,) = torch.autograd.grad(result, x)
        assert torch.allclose(gradient, torch.full_like(x, k))


def check_one_restored(module: ModuleType) -> None:
    """Readers of one memory get views of one tensor."""
    held = module._Rounded(torch.randn(4096), False)
    assert held.restore().data_ptr() == held.restore().data_ptr()


def test_what_is_stored_is_not_mixed_up() -> None:
    check_addresses(activation_storage)
    check_one_restored(activation_storage)


# -- prices ----------------------------------------------------------------------------------------------------------


def measured(folder: str, batch: dict[str, Tensor]) -> dict[str, int]:
    """In a worker: the bytes that each layer keeps for its backward pass, besides parameters and tensors of the batch."""
    options = {"optimizer": None, "lr": 1e-2, "seed": 0, "max_norm": None, "state": None}
    trainer = run_remote.open_trainer(folder, options, device="cpu", timeout_s=60)
    (stage,) = trainer.stages.values()
    found: dict[str, int] = {}

    def counted(name: str, layer: nn.Module, forward: Callable[..., Any], *args: Any) -> Any:
        others = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *layer.buffers())}  # FSDP gathered them
        result, whole, rounded = kept_by(lambda: forward(*args))
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in whole}
        here = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor) and not t.requires_grad}
        sizes = [size for at, size in storages.items() if at not in others | here]
        found[name] = sum(sizes) + sum(r.codes.nbytes + r.scales.nbytes for r in rounded)
        return result

    for name, layer in layers_of(stage).items():
        layer.forward = functools.partial(counted, name, layer, layer.forward)
    trainer.forward_backward(batch)
    return found


def decoder() -> Stack:
    torch.manual_seed(0)
    head = nn.Sequential(nn.RMSNorm(128), nn.Linear(128, 96, bias=False))
    return Stack(nn.Embedding(96, 128), [DecoderBlock(128, 32, 256) for _ in range(3)], head)


def tokens() -> tuple[Tensor, Tensor]:
    ids = torch.randint(96, (8, 17), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@functools.cache
def captured(precision: str = "float64") -> Graph:
    return annotate(capture(decoder(), tokens(), token_loss, precision=precision, name="decoder"))


@pytest.mark.parametrize(
    ("precision", "degrees"),
    [("float32", {}), ("bfloat16", {"tensor": 2}), ("bfloat16", {"data": 2, "zero": 3})],
    ids=["one device", "tensor", "zero 3"],
)
def test_the_price_counts_the_bytes_that_are_kept(
    precision: str, degrees: dict[str, int], workers1: WorkerPool, workers2: WorkerPool, tmp_path: Path
) -> None:
    graph = captured(precision)
    plan = manual_plan(graph, precision=precision, saved="int8", allow={INT8}, **degrees)  # type: ignore[arg-type]
    emit(graph, plan, tmp_path)
    batch = flatten_batch(graph.structure, tokens())  # type: ignore[arg-type]
    found = (workers2 if degrees else workers1).run("test_int8:measured", str(tmp_path), batch, timeout_s=120)[0]
    pricer = Pricer(graph, parse(["cpu"] * plan.device_count), precision)
    blocks = 0
    for layer, record, size in zip(graph.layers, plan.layers, found.values(), strict=True):
        price = pricer.layer(layer.cls, plan.mesh, record.strategy, 1)
        exact = pricer.layer(layer.cls, plan.mesh, record.strategy.with_options(activations="keep"), 1)
        assert price is not None and exact is not None
        if layer is graph.layers[-1]:  # no hooks: it gives the loss
            assert price == exact and size == 0
            break
        assert price.saved_bytes == size, layer.name
        blocks += price.saved_bytes < 0.75 * exact.saved_bytes
    assert blocks == 3


def test_a_layer_at_work_has_its_tensors_besides_and_passes_take_time() -> None:
    graph, mesh = captured("bfloat16"), make_mesh(("data", 2))
    pricer, name = Pricer(graph, parse("2xH100-80GB"), "bfloat16"), graph.layers[1].cls
    for compiled in ("none", "layers"):
        exact, narrow = (
            pricer.layer(name, mesh, Strategy((Role.DATA,), compile=compiled, activations=kept), 1)
            for kept in ("keep", "int8")
        )
        assert exact is not None and narrow is not None
        assert 0.4 < narrow.saved_bytes / exact.saved_bytes < 0.75
        peaks = [price.saved_bytes + price.transient_bytes for price in (exact, narrow)]
        # all of them as they are, and in 8 bits; but for the arguments, which are there once
        assert 0.9 * narrow.saved_bytes < peaks[1] - peaks[0] <= exact.saved_bytes + narrow.saved_bytes
        assert narrow.forward_s > exact.forward_s and narrow.backward_s > exact.backward_s
        same = ("step_s", "parameters_bytes", "gradients_bytes", "optimizer_bytes", "boundary_bytes", "flops")
        assert all(getattr(exact, field) == getattr(narrow, field) for field in same)


def test_passes_are_priced_at_the_rate_of_the_devices_memory() -> None:
    cluster = parse("1xH100-80GB")
    numel, whole = np.array([2.0**24, 64.0, 2.0**24]), np.array([2.0**25, 128.0, 2.0**25])

    def narrow(fused: bool) -> Any:
        """Three saved tensors, of which the second is too small and the third is an argument of the layer."""
        table = SimpleNamespace(
            saved=[SimpleNamespace(dtype=torch.bfloat16)] * 3, saved_argument=np.array([False, False, True]),
            saved_numel=numel, fused=fused, cls=SimpleNamespace(gives_loss=False),
        )  # fmt: skip
        bound = SimpleNamespace(table=table, plain=(0, 1, 2))
        return priced._quantized_bytes(
            SimpleNamespace(bound=bound, cluster=cluster, saved=whole, local=lambda numbers, _: numbers), NARROW
        )  # type: ignore[arg-type]

    saved, live, storing, restoring = narrow(fused=True)
    assert (saved, live) == (2**24 + 2**20 + 128.0 + 2.0**25, 2**25)
    passes = (2**25 + 2**24 + 2**20) / cluster.gpu.bytes_per_s
    assert storing.compute_s == restoring.compute_s == pytest.approx(passes + cluster.gpu.kernel_s)
    _, with_temporaries, several, _ = narrow(fused=False)
    assert several.compute_s > 10 * storing.compute_s and with_temporaries == live + 9 * 2**22


# -- plans and the search ----------------------------------------------------------------------------------------------


def test_it_is_a_value_of_a_layer_that_only_an_allowance_gives() -> None:
    options = SearchOptions(allow={INT8})
    mesh = make_mesh(("data", 2))
    assert not any(s.options.quantized for s in candidates(mesh, 8, 8, SearchOptions()).every)
    tried = candidates(mesh, 8, 8, replace(options, offload="any")).every
    narrow = [s for s in tried if s.options.quantized]
    assert narrow and all(not s.options.recomputes and not s.options.saved_in for s in narrow)
    plain = candidates(mesh, 8, 8, SearchOptions(offload="any")).every
    assert tuple(s for s in tried if not s.options.quantized) == plain
    for pins in ({"saved": "int8"}, {"pin": {"layers.0.saved": "int8"}}):
        with pytest.raises(UsageError, match="saved=int8 is not exact"):
            SearchOptions(**pins)  # type: ignore[arg-type]
        SearchOptions(**pins, allow={INT8})  # type: ignore[arg-type]
    for against in ({"recompute": "full"}, {"segment": 2}, {"offload": "activations"}):
        with pytest.raises(UsageError, match="is pinned to"):
            pins_by_layer(captured(), SearchOptions(saved="int8", allow={INT8}, **against))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="activations=int8 is not exact"):
        manual_plan(captured(), saved="int8")
    with pytest.raises(UsageError, match="also saves the parameters that it gathers"):
        manual_plan(captured(), mesh=make_mesh(("weights", 2)), saved="int8", allow={INT8})


def planned(allow: set[str], memory: int | None = None, **pins: Any) -> Plan:
    batch = tuple(t.repeat(8, 1) for t in tokens())
    options = SearchOptions(time_limit_s=60, allow=allow, memory_limit_bytes=memory, **pins)
    workload = Workload(decoder(), batch, token_loss, precision="bfloat16", name="decoder")
    return plan_model(workload, parse("1xH100-80GB"), options, capture_check=False)[1]


def test_the_search_takes_it_where_memory_is_short_and_the_plan_says_so() -> None:
    only: dict[str, Any] = {"microbatches": 1, "recompute": "none"}
    free = planned({INT8}, **only)
    assert free.allow == () and not any(layer.strategy.options.quantized for layer in free.layers)
    most = max(stage.memory.total for stage in free.stages)
    least = max(stage.memory.total for stage in planned({INT8}, saved="int8", **only).stages)
    assert least < most
    plan = planned({INT8}, memory=(least + most) // 2, **only)
    count = sum(layer.strategy.options.quantized is not None for layer in plan.layers)
    assert plan.allow == (INT8,) and count > 0 and plan.bound_s <= plan.prediction.step_time_s
    assert any(f"not exact, as {INT8} allows: {count} of {len(plan.layers)} layers" in note for note in plan.notes)
    assert "int8 activations (not exact)" in describe(plan)
    assert Plan.from_json(json.loads(plan.dumps())) == plan
    older = plan.to_json()
    for layer in older["layers"]:
        del layer["activations"]
        layer["recomputation"] = {"kind": "none", "layers": 1}
    assert not any(layer.strategy.options.quantized for layer in Plan.from_json(older).layers)
    with pytest.raises(InfeasibleError):
        planned(set(), memory=(least + most) // 2, **only)


# -- programs --------------------------------------------------------------------------------------------------------


def gradients(folder: Path, plan: Plan, pool: WorkerPool, graph: Graph) -> tuple[float, dict[str, Tensor]]:
    emit(graph, plan, folder)
    assert check_program(folder) == len(plan.stages)
    state = folder / "state.pt"
    torch.save({name: value.detach() for name, value in decoder().double().state_dict().items()}, state)
    flat = flatten_batch(graph.structure, tokens())  # type: ignore[arg-type]
    loss, found, _ = pool.run("autopar.verify.remote:gradients", str(folder), str(state), flat)[0]
    return loss, found


class Rounded(nn.Module):
    """A block that stores what it saves as programs do."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        with activation_storage.in_8_bits(self, x):
            return self.block(x)


def eager(rounded: bool) -> tuple[float, dict[str, Tensor]]:
    model = decoder().double()
    if rounded:
        model.blocks = nn.ModuleList(Rounded(block) for block in model.blocks)
    loss = token_loss(model(tokens()[0]), tokens()[1])
    loss.backward()
    named = {name.replace(".block.", "."): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), named


CASES: dict[str, dict[str, Any]] = {
    "data, microbatches": {"data": 2, "zero": 3, "microbatches": 2},
    "tensor": {"tensor": 2},
    "tensor+sequence": {"tensor": 2, "sequence": True},
    "pipeline": {"pipeline": 2, "schedule": "1f1b", "microbatches": 4},
    "zero bubble": {"pipeline": 2, "schedule": "zero-bubble", "microbatches": 4},
}


@pytest.mark.parametrize("name", ["one device", *CASES])
def test_a_plan_rounds_as_eager_blocks_on_one_device_do(
    name: str, workers1: WorkerPool, workers2: WorkerPool, tmp_path: Path
) -> None:
    """Losses are exact; gradients are those of the same rounding on one device, and not those without."""
    graph = captured()
    plan = manual_plan(graph, saved="int8", allow={INT8}, **CASES.get(name, {}))
    loss, found = gradients(tmp_path, plan, workers2 if name in CASES else workers1, graph)
    loss0, exact = eager(rounded=False)
    assert loss == pytest.approx(loss0, rel=1e-12)
    assert 1e-4 < compare(loss, found, loss0, exact).value < 0.1
    assert compare(loss, found, *eager(rounded=True)).value <= 1e-9
    assert json.loads((tmp_path / "plan.json").read_text())["allow"] == [INT8]
    assert "int8_activations allows" in (tmp_path / "model.py").read_text()
    assert not (tmp_path / "runtime" / "recomputing.py").exists()


@pytest.mark.slow
def test_a_compiled_model_trains_and_is_near_the_exact_one() -> None:
    batch = (torch.randn(64, 64), torch.randn(64, 64))
    losses = {}
    for how, options in {
        "exact": {},
        "eager": {"saved": "int8"},
        "compiled": {"saved": "int8", "compile": "layers"},
    }.items():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(3)))
        allowed = {INT8} if options else set()
        with compile(model, ["cpu"], batch, nn.functional.mse_loss, lr=1e-2, allow=allowed, **options) as program:
            losses[how] = [program.step(batch) for _ in range(4)]
    assert losses["exact"][0] == pytest.approx(losses["eager"][0], rel=1e-6)
    assert losses["eager"] == pytest.approx(losses["compiled"], rel=1e-4)
    assert losses["eager"] == pytest.approx(losses["exact"], rel=0.02) and losses["eager"][3] < losses["eager"][0]
    assert losses["eager"][3] != losses["exact"][3]


def test_verify_compares_the_plan_without_rounding() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 8))
    batch = (torch.randn(8, 8), torch.randn(8, 8))
    graph = annotate(capture(model, batch, nn.functional.mse_loss))
    plan = manual_plan(graph, data=2, saved="int8", allow={INT8}, precision="float32")
    report = verify(model, batch, nn.functional.mse_loss, devices=2, plan=plan)
    assert not report.failures and any("a plan without int8_activations" in note for note in report.notes)
