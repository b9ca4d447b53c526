"""Compiled layers: the programs compute what eager ones do, one compilation serves all layers of a class, and prices know."""

from __future__ import annotations

import functools
import gc
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from exactness import MODELS, subject
from price_models import chain, llama_block
from test_randomness import dropping, gpt2
from tiers import slow
from torch import Tensor, nn
from torch._dynamo.utils import counters
from workers import WorkerPool

from autopar.capture import capture
from autopar.checks.collectives import check_collectives
from autopar.checks.types import check_program
from autopar.devices import parse
from autopar.emit import emit
from autopar.emit.pieces import COMPILED
from autopar.measure import EXACT
from autopar.ops.compilation import stays_eager
from autopar.plan import Axis, Plan, Role, Strategy
from autopar.planning import find_plan
from autopar.price import Pricer
from autopar.program.spec import layers_of
from autopar.run import remote as run_remote
from autopar.search import SearchOptions, search
from autopar.search.manual import manual_plan
from autopar.shard import annotate
from autopar.verify import remote
from autopar.verify.case import compare_step

BACKEND = "aot_eager_decomp_partition"
"""Everything of torch's default backend but the code that it writes and compiles: its tracing, its operators, its cut between forward and
backward. That code takes a C++ compiler a minute for each program; the exactness matrix has such cases."""


def gradients(folder: str, state: str, batch: dict[str, Tensor]) -> tuple[Any, int, int]:
    """In a worker: the step that verification compares, and how many graphs and frames were compiled for it."""
    torch._dynamo.reset()
    counters.clear()
    with mock.patch("torch.compile", functools.partial(torch.compile, backend=BACKEND)):
        found = remote.gradients(folder, state, batch)
    return found, counters["stats"]["unique_graphs"], counters["frames"]["ok"]


def compiled(model: str, pool: WorkerPool, folder: Path, **pins: Any) -> tuple[int, int]:
    """Run a compiled program, hold it against the model on one device, and return the numbers of compiled graphs and frames."""
    given = subject(model)
    program = folder / "program"
    check_collectives(emit(given.graph, manual_plan(given.graph, compile="layers", **pins), program))
    check_program(program)
    torch.save(given.state, folder / "initial.pt")
    answers = pool.run("test_compiled:gradients", str(program), str(folder / "initial.pt"), given.batch, timeout_s=300)
    found, graphs, frames = answers[0]
    error = compare_step(given, *found)
    assert error.value <= EXACT, error
    return graphs, frames


@pytest.mark.parametrize(
    "pins",
    [
        slow({"data": 2, "zero": 3, "recompute": True, "microbatches": 2}),
        slow({"tensor": 2, "sequence": True}),
        slow({"tensor": 2, "overlap": "none", "recompute": True}),
        slow({"tensor": 2, "sequence": True, "microbatches": 2, "recompute": "selective"}),
        slow({"tensor": 2, "sequence": True, "overlap": "halves"}),
        slow({"data": 2, "zero": 3, "recompute": "selective"}),
        slow({"data": 2, "offload": "activations"}),
        {"pipeline": 2, "microbatches": 4, "schedule": "1f1b"},
        slow({"data": 2, "zero": 2, "segment": 2}),
        slow({"ring": 2}),
        slow({"ulysses": 2, "zero": 3}),
        slow({"ulysses": 2, "zero": 3, "recompute": "selective"}),
    ],
    ids=str,
)
def test_compiled_programs_are_exact(pins: dict[str, Any], workers2: WorkerPool, tmp_path: Path) -> None:
    graphs, _ = compiled("llama", workers2, tmp_path, **pins)
    assert graphs > 0


def test_a_compiled_part_between_two_collectives_is_exact(workers2: WorkerPool, tmp_path: Path) -> None:
    """In short, with blocks of two products: all-gathers and reduce-scatters around each compiled part."""
    graphs, _ = compiled("pairs", workers2, tmp_path, tensor=2, sequence=True)
    assert graphs > 0


def test_experts_stay_eager_inside_of_compiled_layers(workers2: WorkerPool, tmp_path: Path) -> None:
    graphs, _ = compiled("mixtral", workers2, tmp_path, expert=2, zero=1)
    assert graphs > 0


@pytest.mark.parametrize(
    ("model", "recompute"),
    [
        slow("gpt2", "none"),
        slow("bert", "none"),
        slow("mlp", "none"),
        slow("dit", "none"),
        slow("mlp", "selective"),
        ("bert", "selective"),
    ],
)
def test_compiled_models_are_exact_on_one_device(
    model: str, recompute: str, workers1: WorkerPool, tmp_path: Path
) -> None:
    graphs, _ = compiled(model, workers1, tmp_path, recompute=recompute)
    assert graphs > 0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """With ``counts`` the head writes buffers: the statistics of its batch norm."""

    def __init__(self, layers: int, counts: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.BatchNorm1d(16) if counts else nn.Identity(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def blocks(layers: int, counts: bool = False) -> Any:
    torch.manual_seed(0)
    x, y = torch.randn(8, 16, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    return annotate(capture(Blocks(layers, counts).double(), (x, y), nn.functional.mse_loss, precision="float64"))


def steps(folder: str, batch: dict[str, Tensor], backend: str) -> tuple[list[float], int, int]:
    """In a worker: the losses of three steps, and how many graphs were compiled in the first and in all of them."""
    torch._dynamo.reset()
    counters.clear()
    options = {"optimizer": None, "lr": 1e-2, "seed": 0, "max_norm": 1.0, "state": None}
    with mock.patch("torch.compile", functools.partial(torch.compile, backend=backend)):
        trainer = run_remote.open_trainer(folder, options, device="cpu", timeout_s=60)
        losses = [trainer.step(batch)]
        first = counters["stats"]["unique_graphs"]
        losses += [trainer.step(batch) for _ in range(2)]
    return losses, first, counters["stats"]["unique_graphs"]


def test_one_compilation_serves_every_layer_of_a_class_and_every_step(workers1: WorkerPool, tmp_path: Path) -> None:
    found = {}
    for layers in (2, 5):
        folder = tmp_path / str(layers)
        emit(graph := blocks(layers), manual_plan(graph, compile="layers", microbatches=2), folder)
        batch = dict(
            zip((v.name for v in graph.inputs), (torch.randn(8, 16).double(), torch.randn(8, 4).double()), strict=True)
        )
        found[layers] = workers1.run("test_compiled:steps", str(folder), batch, BACKEND, timeout_s=300)[0]
    assert found[2][1:] == found[5][1:]  # the number of layers does not matter
    assert found[2][1] == found[2][2] > 0  # nothing is compiled after the first step


def test_the_default_backend_computes_the_same(workers1: WorkerPool, tmp_path: Path) -> None:
    """With the code that torch's own backend writes and compiles."""
    graph = blocks(2)
    batch = dict(
        zip((v.name for v in graph.inputs), (torch.randn(8, 16).double(), torch.randn(8, 4).double()), strict=True)
    )
    losses = []
    for compile in ("none", "layers"):
        emit(graph, manual_plan(graph, compile=compile), tmp_path / compile)
        losses.append(workers1.run("test_compiled:steps", str(tmp_path / compile), batch, "inductor", timeout_s=300)[0])
    assert losses[0][1] == 0 < losses[1][1]
    assert losses[1][0] == pytest.approx(losses[0][0], rel=1e-12)
    assert losses[0][0][-1] < losses[0][0][0]


def transposed_error() -> float:
    """In a worker: the error of the gradients of a residual connection and a layer norm at a transposed input."""
    from autopar.program.compiled import OPTIONS  # changes the worker's ``spmd``

    torch._dynamo.reset()
    torch.manual_seed(0)
    shapes = (32, 32), (128, 32), (32, 128), (8, 1, 32), (8, 1, 32)
    weights = [(torch.randn(shape, dtype=torch.float64) * 0.2).requires_grad_() for shape in shapes]
    x = torch.randn(8, 32, 16, dtype=torch.float64).transpose(1, 2).requires_grad_()
    grad = torch.randn(8, 16, 32, dtype=torch.float64)

    def block(x: Tensor, a: Tensor, b: Tensor, c: Tensor, gate: Tensor, scale: Tensor) -> Tensor:
        hidden = x + gate * nn.functional.linear(x, a)
        normed = nn.functional.layer_norm(hidden, [32]) * (scale + 1)
        return hidden + nn.functional.linear(nn.functional.linear(normed, b), c)

    def gradients(function: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(x, *weights), (x, *weights), grad)

    found = gradients(torch.compile(block, dynamic=False, options=OPTIONS))
    return max(float((a - b).abs().max()) for a, b in zip(found, gradients(block), strict=True))


def test_the_default_backend_computes_gradients_of_transposed_inputs(workers1: WorkerPool) -> None:
    """With the default options of torch 2.13 gradients are off by more than one."""
    assert workers1.run("test_compiled:transposed_error", timeout_s=300)[0] < 1e-12


# -- random numbers ---------------------------------------------------------------------------------------------------

ONE = {"microbatches": 2}
STAGES = {"pipeline": 2, "microbatches": 2, "schedule": "1f1b"}


@pytest.mark.parametrize(
    ("drops", "pins"),
    [
        ((0.25, 0.25), ONE | {"recompute": True}),
        slow((0.25, 0.25), ONE | {"recompute": "selective"}),
        slow((0.25, 0.25), STAGES),
        slow((0.25, 0.0), ONE | {"tensor": 2}),
        slow((0.25, 0.0), ONE | {"tensor": 2, "recompute": "selective"}),
    ],
    ids=str,
)
def test_dropout_in_compiled_layers_is_that_of_one_eager_device(
    drops: tuple[float, float], pins: dict[str, Any], workers1: WorkerPool, workers2: WorkerPool, tmp_path: Path
) -> None:
    """Three steps of training: another mask, forward or backward, would change the second loss. New seeds make no new graphs."""
    graph, _, batch = dropping(*drops)
    emit(graph, manual_plan(graph, **ONE), tmp_path / "eager")
    emit(graph, manual_plan(graph, compile="layers", **pins), tmp_path / "compiled")
    assert not any(stays_eager(cls) for cls in graph.classes.values())
    expected, none, _ = workers1.run("test_compiled:steps", str(tmp_path / "eager"), batch, BACKEND)[0]
    pool = workers2 if {"pipeline", "tensor"} & pins.keys() else workers1
    answers = pool.run("test_compiled:steps", str(tmp_path / "compiled"), batch, BACKEND, timeout_s=300)
    assert none == 0
    for losses, first, graphs in answers:
        assert losses == pytest.approx(expected, rel=EXACT)
        assert graphs == first > 0


class Noisy(nn.Module):
    """Noise, and blocks that are left out at random, example by example."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.1 * torch.randn_like(x)
        for block in self.blocks:
            x = x + block(x) * torch.rand_like(x)
            x = x + block(x) * (0.75 + torch.rand(x.shape[0], 1, dtype=x.dtype)).floor() / 0.75
        return x


def test_noise_and_stochastic_depth_in_compiled_layers(workers1: WorkerPool, tmp_path: Path) -> None:
    x, y = torch.randn(8, 16, dtype=torch.float64), torch.randn(8, 16, dtype=torch.float64)
    graph = annotate(capture(Noisy().double(), (x, y), nn.functional.mse_loss, precision="float64"))
    batch = dict(zip((v.name for v in graph.inputs), (x, y), strict=True))
    found = []
    for compile in ("none", "layers"):
        emit(graph, manual_plan(graph, compile=compile), tmp_path / compile)
        found.append(workers1.run("test_compiled:steps", str(tmp_path / compile), batch, BACKEND, timeout_s=300)[0])
    (expected, none, _), (losses, first, graphs) = found
    assert none == 0 and graphs == first > 0
    assert losses == pytest.approx(expected, rel=EXACT)


# -- which layers -----------------------------------------------------------------------------------------------------


def test_only_layers_that_admit_it_are_compiled(tmp_path: Path) -> None:
    graph = blocks(3, counts=True)
    reasons = {name: stays_eager(cls) for name, cls in graph.classes.items()}
    assert [reason for reason in reasons.values() if reason] == ["writes buffers"]
    emit(graph, manual_plan(graph, compile="layers"), tmp_path)
    text = (tmp_path / "model.py").read_text()
    eager = [each for each in text.split("\nclass ") if "(Layer):" in each and COMPILED not in each]
    assert len(eager) == 1 and "register_buffer" in eager[0]  # layers of one code share a class
    assert text.count(COMPILED) == text.count("(Layer):") - 1 > 0
    assert "from runtime.compiled import OPTIONS, spmd" in text and (tmp_path / "runtime" / "compiled.py").is_file()
    emit(graph, manual_plan(graph), tmp_path)  # an eager program in the same folder
    assert "compile" not in (tmp_path / "model.py").read_text() and not (tmp_path / "runtime" / "compiled.py").exists()
    assert "import spmd_types as spmd" in (tmp_path / "model.py").read_text()


def test_only_layers_that_stay_eager_defer_weight_gradients(tmp_path: Path) -> None:
    """Under a schedule that splits the backward pass; their prices say the same."""
    graph = blocks(3, counts=True)
    pins = {"pipeline": 2, "schedule": "zero-bubble"}  # statistics of the whole batch need a single microbatch
    texts = []
    for how in ("none", "layers"):
        plan = manual_plan(graph, compile=how, **pins)
        emit(graph, plan, tmp_path / how)
        texts += (tmp_path / how / "model.py").read_text().split("\nclass ")
        pricer = Pricer(graph, parse("2xH100-80GB"), "float32")
        for layer in plan.layers:
            price = pricer.layer(layer.cls, plan.mesh, layer.strategy, 1)
            assert price is not None and 0 <= price.weight_s < price.backward_s
            eager = how == "none" or bool(stays_eager(graph.classes[layer.cls]))
            assert eager == (price.weight_s > 0) == (price.deferred_bytes > 0), (how, layer.name)
    layers = [text for text in texts if "(Layer):" in text]
    assert {(COMPILED in text, "weight_gradients.linear(" in text) for text in layers} == {(True, False), (False, True)}


def test_a_plan_keeps_what_is_compiled() -> None:
    graph = blocks(2)
    plan = manual_plan(graph, compile="layers")
    assert all(layer.strategy.options.compiled for layer in Plan.from_json(json.loads(plan.dumps())).layers)


# -- prices -----------------------------------------------------------------------------------------------------------


def test_a_compiled_layer_is_faster_and_saves_less() -> None:
    cluster, mesh = parse("1x1xH100-80GB"), (Axis("data", 1, 1),)
    pricer = Pricer(chain(llama_block(4, 512, 1024, 8, 8, 2816), 3), cluster, "bfloat16")
    for again in ("keep", "full", "selective"):
        eager, fused = (
            pricer.layer("block", mesh, Strategy((Role.DATA,), activations=again, compile=compiled), 1)
            for compiled in ("none", "layers")
        )
        assert eager is not None and fused is not None
        assert fused.forward_s < eager.forward_s and fused.backward_s < eager.backward_s
        assert fused.flops == eager.flops and fused.parameters_bytes == eager.parameters_bytes
        assert fused.saved_bytes < eager.saved_bytes if again == "keep" else fused.saved_bytes == eager.saved_bytes


def test_layers_that_stay_eager_are_priced_so() -> None:
    graph = blocks(2, counts=True)
    pricer = Pricer(graph, parse("1x1xH100-80GB"), "float32")
    mesh = (Axis("data", 1, 1),)
    for name, cls in graph.classes.items():
        eager, fused = (pricer.layer(name, mesh, Strategy((Role.DATA,), compile=how), 1) for how in ("none", "layers"))
        assert (eager == fused) == bool(stays_eager(cls)), name


def saved(folder: str, batch: dict[str, Tensor]) -> dict[str, int]:
    """In a worker: the bytes that each layer saves for its backward pass, besides parameters and tensors of the batch."""
    torch._dynamo.reset()
    options = {"optimizer": None, "lr": 1e-2, "seed": 0, "max_norm": None, "state": None}
    found: dict[str, int] = {}
    with mock.patch("torch.compile", functools.partial(torch.compile, backend=BACKEND)):
        trainer = run_remote.open_trainer(folder, options, device="cpu", timeout_s=60)
        (stage,) = trainer.stages.values()
        others = {t.untyped_storage().data_ptr() for t in (*stage.parameters(), *stage.buffers())}
        for name, layer in layers_of(stage).items():
            layer.forward = functools.partial(_counted, layer.forward, others, found, name)
        trainer.forward_backward(batch)
    return found


def _counted(forward: Any, others: set[int], found: dict[str, int], name: str, *args: Any) -> Any:
    """``forward``; the bytes that it saves in other storages than ``others``, each once, go to ``found``."""
    storages: dict[int, int] = {}

    @torch.compiler.disable
    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in others:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward(*args)
    found[name] = sum(storages.values())
    return result


@pytest.mark.parametrize("model", [slow("llama"), "mixtral"])
def test_the_price_knows_what_a_compiled_layer_saves(model: str, workers1: WorkerPool, tmp_path: Path) -> None:
    """torch's partitioner cuts the joint graph where the least is saved; the price is its sum within 0.2 %."""
    built, batch, _ = MODELS[model]()
    graph = annotate(capture(built, batch))
    plan = manual_plan(graph, compile="layers", precision="float32")
    emit(graph, plan, tmp_path)
    measured = workers1.run("test_compiled:saved", str(tmp_path), batch, timeout_s=300)[0]
    pricer = Pricer(graph, parse("1"), "float32")
    eager = plan.layers[0].strategy.with_options(compile="none")
    for layer, size in zip(graph.layers[1:-1], list(measured.values())[1:-1], strict=True):
        price, without = (pricer.layer(layer.cls, plan.mesh, s, 1) for s in (plan.layers[0].strategy, eager))
        assert price is not None and without is not None
        assert price.saved_bytes == pytest.approx(size, rel=0.002), layer.name
        assert price.saved_bytes < without.saved_bytes


def test_a_compiled_part_that_a_collective_ends_saves_no_more_than_it_must(
    workers2: WorkerPool, tmp_path: Path
) -> None:
    """A name that is deleted after a collective would be a result of the part before: a norm's input again, in float32."""
    built, batch, _ = MODELS["llama"]()
    graph = annotate(capture(built.bfloat16(), batch))
    plan = manual_plan(graph, compile="layers", precision="bfloat16", tensor=2)
    emit(graph, plan, tmp_path)
    measured = workers2.run("test_compiled:saved", str(tmp_path), batch, timeout_s=300)[0]
    pricer = Pricer(graph, parse("2"), "bfloat16")
    for layer, size in zip(graph.layers[1:-1], list(measured.values())[1:-1], strict=True):
        price = pricer.layer(layer.cls, plan.mesh, plan.layers[0].strategy, 1)
        assert price is not None and price.saved_bytes == pytest.approx(size, rel=0.002), layer.name


def dropout() -> tuple[Any, dict[str, Tensor]]:
    batch = dropping(0.25, 0.0)[2]
    return annotate(capture(gpt2(hidden=0.25).float(), batch)), batch


def noise() -> tuple[Any, dict[str, Tensor]]:
    pair = torch.randn(8, 16), torch.randn(8, 16)
    graph = annotate(capture(Noisy(), pair, nn.functional.mse_loss))
    return graph, dict(zip((v.name for v in graph.inputs), pair, strict=True))


@pytest.mark.parametrize("model", [dropout, slow(noise)])
def test_the_price_knows_the_random_numbers_that_a_layer_saves(
    model: Any, workers1: WorkerPool, tmp_path: Path
) -> None:
    """A dropout's mask takes a byte for each number. Neither it nor other random numbers are drawn again."""
    graph, batch = model()
    plan = manual_plan(graph, compile="layers", precision="float32")
    emit(graph, plan, tmp_path)
    measured = workers1.run("test_compiled:saved", str(tmp_path), batch, timeout_s=300)[0]
    pricer = Pricer(graph, parse("1"), "float32")
    for layer, size in zip(graph.layers[1:-1], list(measured.values())[1:-1], strict=True):
        price = pricer.layer(layer.cls, plan.mesh, plan.layers[0].strategy, 1)
        assert price is not None and price.saved_bytes == pytest.approx(size, rel=0.01), layer.name


def left(folder: str, batch: dict[str, Tensor]) -> dict[str, int]:
    """In a worker: the bytes that each layer's forward pass leaves allocated besides its result, and those of the hidden values that it
    reads. What selective recomputation keeps is not among the tensors that autograd saves."""
    torch._dynamo.reset()
    options = {"optimizer": None, "lr": 1e-2, "seed": 0, "max_norm": None, "state": None}
    found: dict[str, int] = {}
    with mock.patch("torch.compile", functools.partial(torch.compile, backend=BACKEND)):
        trainer = run_remote.open_trainer(folder, options, device="cpu", timeout_s=60)
        trainer.forward_backward(batch)  # compiles
        (stage,) = trainer.stages.values()
        for name, layer in layers_of(stage).items():
            layer.forward = functools.partial(_allocated, layer.forward, found, name)
        trainer.forward_backward(batch)
    return found


def _allocated(forward: Any, found: dict[str, int], name: str, *args: Any) -> Any:
    gc.collect()
    with torch.autograd.profiler.profile(profile_memory=True) as profiled:
        result = forward(*args)
        gc.collect()
    net = sum(event.self_cpu_memory_usage for event in profiled.function_events)
    read = sum(t.untyped_storage().nbytes() for t in args if isinstance(t, Tensor) and t.requires_grad)
    found[name] = net - result.untyped_storage().nbytes() + read
    return result


@pytest.mark.parametrize(
    ("compile", "pins"),
    [
        slow("none", {"recompute": "selective"}),
        ("layers", {"recompute": "selective"}),
        slow("layers", {"offload": "activations"}),
    ],
    ids=str,
)
def test_a_forward_pass_leaves_the_bytes_of_the_plan(
    compile: str, pins: dict[str, Any], workers1: WorkerPool, tmp_path: Path
) -> None:
    """On a CPU the host's memory is the device's: there what is offloaded counts like what is saved."""
    built, batch, _ = MODELS["llama"]()
    graph = annotate(capture(built, batch))
    plan = manual_plan(graph, compile=compile, precision="float32", **pins)
    emit(graph, plan, tmp_path)
    measured = workers1.run("test_compiled:left", str(tmp_path), batch, timeout_s=300)[0]
    pricer = Pricer(graph, parse("1"), "float32")
    strategy = plan.layers[0].strategy
    strategy = strategy.with_options(activations="keep") if strategy.options.saved_in else strategy
    # a layer's offloaded tensors stay on the device until the next layer ends, so the first block leaves them twice
    for layer, size in zip(graph.layers[2:-1], list(measured.values())[2:-1], strict=True):
        price = pricer.layer(layer.cls, plan.mesh, strategy, 1)
        assert price is not None and price.saved_bytes == pytest.approx(size, rel=0.01), layer.name


def test_plans_for_gpus_compile_layers_unless_a_pin_says_no() -> None:
    graph = chain(llama_block(8, 512, 1024, 8, 8, 2816), 4)
    cluster = parse("1x4xH100-80GB")
    pricer = Pricer(graph, cluster, "bfloat16")
    eager, fused = (search(graph, cluster, pricer, SearchOptions(compile=how)) for how in ("none", None))
    assert not any(layer.strategy.options.compiled for layer in eager.layers)
    assert all(layer.strategy.options.compiled for layer in fused.layers)
    assert fused.prediction.step_time_s < eager.prediction.step_time_s


def test_a_plan_says_which_layers_stay_eager() -> None:
    graph, cluster = blocks(3, counts=True), parse("1x1xH100-80GB")
    plan = find_plan(graph, cluster, SearchOptions(compile="layers", recompute=False))
    assert "1 of 4 layers are not compiled: head writes buffers" in " ".join(plan.notes)
    assert "not compiled" not in " ".join(
        find_plan(graph, cluster, SearchOptions(compile="none", recompute=False)).notes
    )
    assert not any(layer.strategy.options.compiled for layer in find_plan(graph, parse("1"), SearchOptions()).layers)
