"""Sizes that no axis divides: plans of 2, 3 and more devices are exact, padding stays zero, and it is priced."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import PlanKind, run_case, subject
from odd_models import ODD
from sketch import Sketch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from workers import WorkerPool

from autopar.capture import Float64Everywhere
from autopar.devices import parse
from autopar.emit import emit
from autopar.graph import LayerClass
from autopar.plan import Role, Strategy
from autopar.price import Pricer
from autopar.rules.padding import Padding, padding
from autopar.run import remote
from autopar.run.folder import import_runtime, program_modules
from autopar.search.manual import make_mesh, manual_plan
from autopar.shard import annotate, role_types
from autopar.verify import kind
from autopar.workload import Workload

aten = torch.ops.aten

CASES = [
    ("odd_gpt2", kind("tensor 2", tensor=2)),
    ("odd_llama", kind("tensor 2, recomputed", tensor=2, recompute=True, microbatches=2)),
    ("gated", kind("tensor 2", tensor=2)),
    *(("with_empty", kind(f"data 2, zero {zero}", data=2, zero=zero)) for zero in (1, 2, 3)),
    ("odd_gpt2", kind("data 3, zero 3", data=3, zero=3)),
    ("odd_gpt2", kind("tensor 3", tensor=3)),
    ("odd_llama", kind("tensor+sequence 3", tensor=3, sequence=True)),
    ("gated", kind("tensor 3", tensor=3)),
    ("odd_llama", kind("pipeline 3", pipeline=3, microbatches=3)),
]


@pytest.mark.parametrize(
    ("model", "kind"), CASES, ids=lambda value: value.name if isinstance(value, PlanKind) else value
)
def test_exact(model: str, kind: PlanKind, request: pytest.FixtureRequest) -> None:
    pool: WorkerPool = request.getfixturevalue(f"workers{kind.devices}")
    outcome = run_case(model, kind, pool)
    assert outcome.error.exact, outcome.error


# -- flat buffers -----------------------------------------------------------------------------------------------------


def starts(folder: str) -> list[int]:
    """In a worker: the bytes before every parameter, and before this rank's piece, in flat buffers of parameters and of gradients."""
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        groups = runtime.Trainer(program, runtime.start(program, device="cpu"))._groups
        buffers = [(g, buffer) for g in groups for buffer in (g._values, g._grads) if isinstance(buffer, Tensor)]
        firsts = [(buffer, first) for g, buffer in buffers for first in [*(s.start for s in g._slots), g._piece.start]]
        return [first * buffer.element_size() for buffer, first in firsts]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_parameters_begin_at_128_bytes_in_flat_buffers_and_are_priced_so(
    precision: str, workers3: WorkerPool, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    workload = Workload(model, (torch.randn(6, 5), torch.randn(6, 3)), nn.functional.mse_loss, precision=precision)
    graph = workload.capture()
    plan = manual_plan(graph, precision=precision, data=3, zero=1)
    emit(annotate(graph), plan, tmp_path)
    for found in workers3.run("test_odd_sizes:starts", str(tmp_path)):
        assert len(found) >= 8 and not any(first % 128 for first in found)
    width = {"float32": 4, "bfloat16": 2}[precision]
    unit = 128 // width
    layers = [[35, 7], [21, 3]]
    elements = [sum(-(-n // unit) * unit for n in sizes) for sizes in layers]
    elements = [-(-n // (3 * unit)) * 3 * unit for n in elements]  # three equal pieces
    pricer = Pricer(annotate(graph), parse(3), precision)
    prices = [pricer.layer(layer.cls, plan.mesh, layer.strategy, 1) for layer in plan.layers]
    assert sum(price.parameters_bytes for price in prices if price) == sum(elements) * width


# -- training ---------------------------------------------------------------------------------------------------------

LR, DECAY, STEPS, NORM = 1e-2, 0.1, 3, 0.5


def adamw(params: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, weight_decay=DECAY)


def train(folder: str, state: str, batch: dict[str, Tensor]) -> tuple[list[float], dict[str, Tensor], int, float]:
    """In a worker: losses, trained parameters, how many elements of this rank are padding, and the largest of them."""
    options = {"optimizer": adamw, "lr": LR, "seed": 0, "max_norm": NORM, "state": state}
    trainer = remote.open_trainer(folder, options, device="cpu", timeout_s=60)
    losses = [trainer.step(batch) for _ in range(STEPS)]
    trainer.finish_update()
    padding = []
    for layout in (layout for group in trainer._groups for layout in group.layouts):
        values = trainer.stages[layout.stage].get_parameter(layout.name).detach()
        values = values.full_tensor() if isinstance(values, DTensor) else values
        padding += [
            values.narrow(dim, start, length).flatten()
            for dim, start, length in layout.local_padding(trainer.world.coordinates)
        ]
    beyond = torch.cat([*padding, torch.zeros(1, dtype=torch.float64)])
    return losses, trainer.state_dict(), beyond.numel() - 1, float(beyond.abs().max())


@functools.cache
def trained(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """The same on one device."""
    torch.manual_seed(0)
    model, batch, _ = ODD[name]()
    model = model.double().train()
    optimizer = adamw(list(model.parameters()))
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with Float64Everywhere():
            output = model(**batch)
        loss = output if isinstance(output, Tensor) else output.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}


TRAINED = [
    ("gated", kind("tensor 3", tensor=3)),
    ("odd_gpt2", kind("tensor 3, two microbatches", tensor=3, microbatches=2)),
    ("gated", kind("data 2 x tensor 2, zero 3", data=2, tensor=2, zero=3)),
    ("gated", kind("data 2 x tensor 2, zero 1", data=2, tensor=2, zero=1)),
]


@pytest.mark.parametrize(
    ("model", "kind"), TRAINED, ids=lambda value: value.name if isinstance(value, PlanKind) else value
)
def test_training_leaves_padding_at_zero(
    model: str, kind: PlanKind, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """AdamW with weight decay and clipping: what a sigmoid makes of padding has a gradient, which nothing may see."""
    given = subject(model)
    emit(given.graph, kind.plan(given.graph), tmp_path / "program")
    torch.save(given.state, tmp_path / "initial.pt")
    pool: WorkerPool = request.getfixturevalue(f"workers{kind.devices}")
    ranks = pool.run("test_odd_sizes:train", str(tmp_path / "program"), str(tmp_path / "initial.pt"), given.batch)
    assert sum(count for _, _, count, _ in ranks) > 100
    assert [largest for *_, largest in ranks] == [0.0] * kind.devices
    losses, state = trained(model)
    assert ranks[0][0] == pytest.approx(losses, rel=1e-12)
    assert ranks[0][1].keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(ranks[0][1][name], tensor, rtol=1e-9, atol=1e-9)


# -- what may be padded -----------------------------------------------------------------------------------------------


def groups(cls: LayerClass) -> dict[str, int]:
    """Count of the group of each dim that may be padded, as ``name.dim``."""
    found: Padding = padding(cls)
    return {f"{name}.{dim}": found.counts[group] for (name, dim), group in found.groups.items()}


def mlp(between: Any, *arguments: Any) -> LayerClass:
    draw = Sketch()
    x, up, down = draw.activation("x", 4, 6, 8), draw.parameter("up", 10, 8), draw.parameter("down", 8, 10)
    hidden = draw.call(between, draw.call(aten.linear.default, x, up), *arguments)
    return draw.layer(draw.call(aten.linear.default, hidden, down))


@pytest.mark.parametrize(
    ("op", "arguments"), [(aten.gelu.default, ()), (aten.sigmoid.default, ()), (aten.pow.Tensor_Scalar, (3,))]
)
def test_an_inner_width_may_be_padded_behind_ops_without_a_sum(op: Any, arguments: tuple[Any, ...]) -> None:
    found = groups(mlp(op, *arguments))
    assert found["up.0"] == found["down.1"] == 10
    assert not [name for name in found if name.startswith("x.")] and "up.1" not in found and "down.0" not in found


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (aten.softmax.int, (-1,)),
        (aten.layer_norm.default, ([10],)),
        (aten.rsqrt.default, ()),  # infinite at zero
        (aten.pow.Tensor_Scalar, (-1,)),
        (aten.cumsum.default, (-1,)),
    ],
)
def test_it_may_not_behind_ops_that_see_the_end_or_blow_up_at_zero(op: Any, arguments: tuple[Any, ...]) -> None:
    assert groups(mlp(op, *arguments)) == {}


def test_a_product_of_two_values_that_are_not_zero_may_not_be_summed() -> None:
    """sigmoid(x up) @ sigmoid(w): a half times a half would be added for every column of padding."""
    draw = Sketch()
    x, up, down = draw.activation("x", 4, 6, 8), draw.parameter("up", 10, 8), draw.parameter("down", 8, 10)
    hidden = draw.call(aten.sigmoid.default, draw.call(aten.linear.default, x, up))
    cls = draw.layer(draw.call(aten.linear.default, hidden, draw.call(aten.sigmoid.default, down)))
    assert groups(cls) == {}


def test_heads_are_padded_whole() -> None:
    """A projection of 40 is five heads of 8: whole heads are added, although 40 divides by two."""
    found = padding(subject("odd_gpt2").graph.classes[subject("odd_gpt2").graph.layers[1].cls])
    assert sorted(found.counts) == [5, 51]


# -- its price --------------------------------------------------------------------------------------------------------


def test_padding_is_paid_for() -> None:
    """Five heads on three devices are computed as six: two on each, as much as six heads would cost, and more than a third of five."""
    graph = subject("odd_gpt2").graph
    pricer = Pricer(graph, parse("5xH100-80GB"), "float32")
    cls = graph.layers[1].cls

    def parameters(size: int) -> int:
        mesh = make_mesh(("tensor", size)) if size > 1 else make_mesh(("data", 1))
        role = Role.TENSOR if size > 1 else Role.DATA
        price = pricer.layer(cls, mesh, Strategy((role,)), 1)
        assert price is not None
        return price.parameters_bytes // 4

    # norms, and the biases of the two products that leave the layer, are whole everywhere; per head 4 x 35 x 7 and 3 x 7
    heads, width, whole = 4 * 35 * 7 + 3 * 7, 2 * 35 + 1, 6 * 35
    for size, share_of_heads, share_of_width in ((1, 5, 51), (2, 3, 26), (3, 2, 17), (5, 1, 11)):
        assert parameters(size) == share_of_heads * heads + share_of_width * width + whole


def test_an_axis_may_be_larger_than_what_it_shards() -> None:
    """Three groups of heads on seven devices: four devices hold padding alone, or the layer is not cut there; either is planned."""
    graph = subject("odd_llama").graph
    assert role_types(graph, 1, Role.TENSOR, 7) is not None
    price = Pricer(graph, parse("7xH100-80GB"), "float32").layer(
        graph.layers[1].cls, make_mesh(("tensor", 7)), Strategy((Role.TENSOR,)), 1
    )
    assert price is not None
