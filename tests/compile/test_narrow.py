"""``allow={"bfloat16_gradients", "bfloat16_moments"}``: gradients and Adam's moments in 16 bits, where that gains."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import MODELS
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from workers import WorkerPool

from autopar.capture import capture, flatten_batch
from autopar.devices import parse
from autopar.emit import emit
from autopar.errors import InfeasibleError
from autopar.graph import Graph
from autopar.plan import NARROW, NARROW_GRADIENTS, NARROW_MOMENTS, Plan
from autopar.planning import plan_model
from autopar.price.state import ALIGNMENT_BYTES, precision, state_bytes
from autopar.program.parameters import aligned
from autopar.run import remote
from autopar.search import SearchOptions, manual_plan
from autopar.shard import annotate
from autopar.summary import describe
from autopar.workload import Workload

WIDTH = 512


def planned(
    allow: tuple[str, ...] = (), limit: int | None = None, dtype: str = "bfloat16", rows: int = 8, **pins: Any
) -> tuple[Graph, Plan]:
    """Four wide layers on two devices with whole copies, so that a step's reduction of gradients counts."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    batch = (torch.zeros(rows, WIDTH), torch.zeros(rows, WIDTH))
    cluster = parse("2x1xH100-80GB", memory_limit_bytes=limit)
    options = SearchOptions(time_limit_s=8, data=2, zero=0, microbatches=1, allow=allow, **pins)
    return plan_model(Workload(model, batch, nn.functional.mse_loss, precision=dtype), cluster, options)


@pytest.fixture(scope="module")
def wide() -> Plan:
    return planned()[1]


def test_what_gains_is_used_and_said(wide: Plan) -> None:
    graph, plan = planned(NARROW)
    assert wide.allow == () and plan.allow == graph.allow and NARROW_GRADIENTS in plan.allow
    assert plan.prediction.step_time_s < 0.99 * wide.prediction.step_time_s
    saved = [a.memory.gradients - b.memory.gradients for a, b in zip(wide.stages, plan.stages, strict=True)]
    assert saved == [2 * 4 * WIDTH**2]
    assert any("not exact, as bfloat16_gradients allows" in note for note in plan.notes)
    assert "bfloat16 gradients (not exact)" in describe(plan)
    assert Plan.from_json(json.loads(plan.dumps())) == plan


def test_what_gains_nothing_is_not_used() -> None:
    """Where there is room, moments of 16 bits only make the update longer, because it converts them. Parameters of 32 bits have nothing to
    give up."""
    plan = planned((NARROW_MOMENTS,), rows=1 << 17)[1]
    assert plan.allow == () and "not exact" not in " ".join((describe(plan), *plan.notes))
    assert planned(NARROW, dtype="float32")[1].allow == ()


def kept(folder: str, batch: dict[str, Tensor]) -> int:
    """Bytes of parameters, gradients and optimizer state that this rank holds after a step."""
    options = {"optimizer": None, "lr": 1e-3, "seed": 0, "max_norm": None, "state": None}
    trainer = remote.open_trainer(folder, options, device="cpu", timeout_s=60)
    trainer.step(batch)
    masters = [master.tensor for group in trainer._groups for master in group.masters]
    found = [*masters, *(m.grad for m in masters), *(getattr(group, "_grads", None) for group in trainer._groups)]
    found += [parameter for stage in trainer.stages.values() for parameter in stage.parameters()]
    found += [state for each in trainer.optimizer.state.values() for state in each.values() if state.dim()]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in found if t is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
    return sum(storages.values())


@functools.cache
def llama() -> tuple[Graph, Any]:
    torch.manual_seed(0)
    model, batch, _ = MODELS["llama"]()
    return annotate(capture(model.train(), batch, precision="bfloat16", name="llama")), batch


@pytest.mark.parametrize("allow", [(), NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_price_counts_what_a_program_of_16_bits_keeps(
    zero: int, allow: tuple[str, ...], workers2: WorkerPool, tmp_path: Path
) -> None:
    graph, batch = llama()
    graph = replace(graph, narrow=allow)
    plan = manual_plan(graph, data=2, zero=zero, precision="bfloat16")
    emit(graph, plan, tmp_path)
    ranks = workers2.run("test_narrow:kept", str(tmp_path), flatten_batch(graph.structure, batch))
    numel = sum(p.value.numel for p in graph.parameters.values())
    priced = sum(state_bytes(numel, numel, 2, zero, precision("bfloat16", allow)))
    # parts that two devices do not divide are padded; what ZeRO 2 gathers is gone when the step ends; in flat buffers (values, gradients,
    # masters), of which each layer has one, parameters and a device's pieces begin at multiples of 128 bytes
    unit, pieces = ALIGNMENT_BYTES // 2, 2 if zero == 1 else 1
    sizes = [[math.prod(graph.parameters[name].shape) for name in layer.parameters] for layer in graph.layers]
    between = sum(aligned(sum(aligned(n, unit) for n in layer), pieces * unit) for layer in sizes) - sum(
        map(sum, sizes)
    )
    flat = {0: 2 + 4 + 4, 1: 2 + 4 + 4 // 2}.get(zero, 0) * between - (2 * between if allow and zero < 2 else 0)
    assert max(ranks) == pytest.approx(priced + flat - (2 * numel if zero == 2 else 0), rel=2e-3)


def test_what_fits_with_them_alone_is_planned_with_them(wide: Plan) -> None:
    limit = wide.stages[0].memory.total - 4 * 4 * WIDTH**2  # as much as moments in 16 bits save
    pins = {"tensor": 1, "pipeline": 1, "recompute": "full"}
    with pytest.raises(InfeasibleError):
        planned(limit=limit, **pins)
    plan = planned(NARROW, limit=limit, **pins)[1]
    assert NARROW_MOMENTS in plan.allow and plan.stages[0].memory.total <= limit


def test_a_program_is_written_and_the_plan_says_so(tmp_path: Path) -> None:
    graph, plan = planned((NARROW_GRADIENTS,))
    assert plan.allow == (NARROW_GRADIENTS,) and not any("price" in note for note in plan.notes)
    emit(graph, plan, tmp_path)
    assert "chunked_updates=chunked_updates.ChunkedUpdates" in (tmp_path / "model.py").read_text()
    assert (tmp_path / "runtime" / "chunked_updates.py").exists()
