"""Zero-bubble schedules: backward passes in two parts, exact under every ZeRO stage."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from pipelines import CHUNKS, MICROBATCHES, emitted, is_right, stepped
from test_compiled import BACKEND
from test_overlap import captured
from tiers import in_short, slow
from torch import Tensor
from torch._dynamo.utils import counters
from workers import WorkerPool

from autopar.emit import emit
from autopar.emit.pieces import COMPILED
from autopar.errors import LaunchError
from autopar.program.weight_gradients import deferred, linear
from autopar.search.manual import manual_plan

SPLIT = ["zero-bubble", "zbv", "dualpipev"]


@pytest.mark.parametrize("schedule", SPLIT)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_pipeline_alone(schedule: str, recompute: str, workers2: WorkerPool, tmp_path: Path) -> None:
    folder, model, batch = emitted(tmp_path, schedule=schedule, pipeline=2, recompute=recompute)
    assert is_right(workers2.run("pipelines:stepped", folder, model.state_dict(), batch), model)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_reduced_once_a_step(schedule: str, workers4: WorkerPool, tmp_path: Path) -> None:
    folder, model, batch = emitted(tmp_path, schedule=schedule, pipeline=2, data=2, zero=3, reduce="step")
    assert is_right(workers4.run("pipelines:stepped", folder, model.state_dict(), batch), model)


@pytest.mark.parametrize("schedule", SPLIT)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_with_data_parallelism(schedule: str, zero: int, workers4: WorkerPool, tmp_path: Path) -> None:
    recompute = "full" if zero == 3 else "none"
    folder, model, batch = emitted(tmp_path, schedule=schedule, pipeline=2, data=2, zero=zero, recompute=recompute)
    assert is_right(workers4.run("pipelines:stepped", folder, model.state_dict(), batch), model)


def compiled_steps(folder: str, state: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """In a worker: ``pipelines.stepped``, and the number of compiled graphs."""
    torch._dynamo.reset()
    counters.clear()
    with mock.patch("torch.compile", functools.partial(torch.compile, backend=BACKEND)):
        return stepped(folder, state, batch), counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("schedule", "pins"),
    [
        ("zbv", {"data": 2, "zero": 2}),
        slow("zero-bubble", {"data": 2, "zero": 1, "recompute": "selective"}),
        slow("zero-bubble", {"data": 2, "zero": 3, "recompute": "full"}),
        slow("zbv", {"tensor": 2}),
        slow("dualpipev", {"data": 2, "zero": 3}),
    ],
    ids=str,
)
def test_compiled_layers_beside_eager_ones(
    schedule: str, pins: dict[str, Any], workers4: WorkerPool, tmp_path: Path
) -> None:
    """A compiled layer computes its whole backward in the first part, every other layer leaves weight gradients for the second part."""
    _, model, batch = emitted(tmp_path, schedule=schedule, pipeline=2, **pins)
    graph = captured(model, (batch["x"], batch["targets"]))
    options = {"chunks": CHUNKS[schedule], "microbatches": MICROBATCHES, "schedule": schedule, "pipeline": 2}
    plan = manual_plan(graph, compile="layers", **options, **pins)
    layers = [
        replace(layer, strategy=layer.strategy.with_options(compile="none")) if number % 2 else layer
        for number, layer in enumerate(plan.layers)
    ]
    emit(graph, replace(plan, layers=tuple(layers)), tmp_path / "mixed")
    found = workers4.run(
        "test_zero_bubble:compiled_steps", str(tmp_path / "mixed"), model.state_dict(), batch, timeout_s=120
    )
    assert all(graphs > 0 for _, graphs in found)
    text = (tmp_path / "mixed" / "model.py").read_text()
    assert COMPILED in text and "weight_gradients.linear(" in text
    assert is_right([gradients for gradients, _ in found], model)


def test_the_input_of_a_product_may_be_a_vector() -> None:
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((3,), (2, 3), (2,)))
    expected = torch.autograd.grad(F.linear(x, weight, bias).square().sum(), (x, weight, bias))
    with deferred() as products:
        given = torch.autograd.grad(linear(x, weight, bias).square().sum(), (x, bias))
    assert [torch.equal(a, b) for a, b in zip(given, (expected[0], expected[2]), strict=True)] == [True, True]
    assert torch.equal(products[0].weight_gradient(), expected[1])


FAULTS = {  # by name: the schedule that shows the fault; a file of the program, a pattern, the replacement
    "a weight's gradient in both parts": (
        "zbv",
        "weight_gradients.py",
        r"product.weight_gradient\(\) if _products is None else None",
        "product.weight_gradient()",
    ),
    "the second part is left out": ("zbv", "split_pipeline.py", "        while products:", "        while False:"),
    "the last microbatch's piece takes the place of the sum": (
        "zbv",
        "fsdp_split.py",
        r"sums\[last.name\].add_\(last.piece\) if last.name in sums else last.piece",
        "last.piece",
    ),
    "a reduction is lost": (
        "zbv",
        "fsdp_split.py",
        r"        self.in_flight.finish\(\)\n        piece",
        "        piece",
    ),
    "gradients of an earlier step stay": (
        "zbv",
        "fsdp_split.py",
        r"self._pieces = \{\}\n\n",
        "pass\n\n",
    ),
    "a shard takes other rows": (
        "zbv",
        "fsdp_split.py",
        r"_dtensor_like\(param, rows\[: stop - start\]\)",
        "_dtensor_like(param, rows[: stop - start].roll(1, 0))",
    ),
    "gradients of whole passes are lost": (
        "dualpipev",
        "fsdp_split.py",
        r"shard_of\(param.grad\).add_\(rows",
        "shard_of(param.grad).copy_(rows",
    ),
    "stages are placed in turn": (
        "zbv",
        "world.py",
        r'int\(stage\["devices"\]\[0\]\) // int\(stage\["devices"\]\[1\]\) for stage in program.plan\["stages"\]',
        "i % line for i in range(stages)",
    ),
}


@pytest.mark.parametrize("fault", in_short(FAULTS, "the second part is left out"))
def test_faults_are_caught(fault: str, workers4: WorkerPool, tmp_path: Path) -> None:
    """Each fault gives a wrong gradient or an error."""
    schedule, *change = FAULTS[fault]
    folder, model, batch = emitted(tmp_path, tuple(change), schedule=schedule, pipeline=2, data=2, zero=2)
    try:
        found = workers4.run("pipelines:stepped", folder, model.state_dict(), batch)
    except LaunchError:
        return
    assert not is_right(found, model)
