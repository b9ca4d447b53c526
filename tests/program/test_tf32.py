"""``allow={"tf32"}``: float32 products with TF32, where the GPU has a rate for it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from workers import WorkerPool

from autopar.devices import parse
from autopar.emit import emit
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.planning import plan_model
from autopar.precision import TF32
from autopar.search import SearchOptions
from autopar.search.manual import manual_plan
from autopar.summary import describe
from autopar.verify import remote
from autopar.workload import Workload

OPTIONS = SearchOptions(time_limit_s=60, allow=(TF32,))


def planned(devices: str, options: SearchOptions = OPTIONS, precision: str = "float32") -> tuple[Graph, Plan]:
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False, device="meta") for _ in range(4)))
    batch = (torch.zeros(4096, 4096, device="meta"), torch.zeros(4096, 4096, device="meta"))
    workload = Workload(model, batch, nn.functional.mse_loss, precision=precision)
    return plan_model(workload, parse(devices), options, capture_check=False)


def test_tf32_is_used_where_the_gpu_has_a_rate_and_it_is_allowed() -> None:
    exact, (graph, plan) = planned("1xA100-80GB", SearchOptions(time_limit_s=60))[1], planned("1xA100-80GB")
    assert plan.allow == graph.allow == (TF32,) and exact.allow == ()
    # the ratio of the rates in the data sheet is 8; the optimizer's update is as long as before
    assert 1 / 8 < plan.prediction.step_time_s / exact.prediction.step_time_s < 0.3
    assert plan.prediction.mfu < 1 and exact.prediction.mfu < 1
    assert any("not exact, as tf32 allows" in note for note in plan.notes) and "tf32 (not exact)" in describe(plan)
    assert Plan.from_json(json.loads(plan.dumps())) == plan
    assert planned("1xV100-32GB")[1].allow == ()  # no TF32
    assert planned("1xA100-80GB", precision="bfloat16")[1].allow == ()


def setting(folder: str, before: str) -> tuple[str, bool]:
    """In a worker: how it multiplies numbers of float32 once it has opened the program, and whether cuDNN rounds them."""
    try:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = True  # torch's default
        remote.open_trainer(folder, f"{folder}/initial.pt")
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(("allow", "wanted"), [((TF32,), ("high", True)), ((), ("highest", False))])
def test_the_program_of_a_plan_multiplies_as_the_plan_says(
    allow: tuple[str, ...], wanted: tuple[str, bool], workers1: WorkerPool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    workload = Workload(model, (torch.randn(8, 4), torch.randn(8, 2)), nn.functional.mse_loss)
    given = dataclasses.replace(manual_plan(workload.capture(), precision="float32"), allow=allow)
    graph, plan = plan_model(workload, parse(1), SearchOptions(), plan=given, capture_check=False)
    assert plan.allow == allow
    emit(graph, plan, tmp_path)
    torch.save(model.state_dict(), tmp_path / "initial.pt")
    for before in ("highest", "high"):
        assert workers1.run("test_tf32:setting", str(tmp_path), before) == [wanted]
