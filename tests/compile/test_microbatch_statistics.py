"""``allow={"microbatch_statistics"}``: several microbatches where the loss couples the batch, each with its own statistics and loss."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from exactness import KINDS, subject
from resumed import eager
from text_models import two_towers
from tiers import slow
from torch import Tensor, nn
from vision_models import resnet
from workers import WorkerPool
from written_models import contrastive

import autopar
from autopar.cli.app import cli
from autopar.devices import parse
from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.measure import EXACT, compare
from autopar.plan import MICROBATCH_STATISTICS, Plan
from autopar.plan_files import read_plan
from autopar.planning import compared_graph, plan_graph
from autopar.search import SearchOptions
from autopar.search.manual import manual_plan
from autopar.shard import plan_shardings
from autopar.verify import check_plan, make_subject
from autopar.workload import Workload

ALLOW = {MICROBATCH_STATISTICS}
BY_NAME = {kind.name: kind for kind in KINDS}


def accumulated(model: nn.Module, parts: list[Any], loss_fn: Any) -> tuple[float, dict[str, Tensor]]:
    """What an ordinary trainer on one device does: backward of each microbatch's own mean, over their number."""
    loss = 0.0
    for x, targets in parts:
        term = loss_fn(model(*x) if isinstance(x, tuple) else model(x), targets) / len(parts)
        term.backward()
        loss += float(term.detach())
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("mixtral balanced by microbatch", "data 2, zero 3"),
        ("mixtral balanced by microbatch", "expert 2"),
        slow("mixtral balanced by microbatch", "tensor+sequence 2"),
        slow("mixtral balanced by microbatch", "pipeline 2"),
        slow("mixtral balanced by microbatch", "recompute, tensor 2"),
        ("mixtral balanced by microbatch", "pipeline 2 x data 2, zero 2"),
        ("resnet by microbatch", "data 2, zero 2"),
        slow("resnet by microbatch", "pipeline 2, gpipe"),
        ("resnet by microbatch", "pipeline 2, Chimera"),
    ],
)
def test_equal_to_one_device_that_accumulates(model: str, kind: str, request: pytest.FixtureRequest) -> None:
    """Labels are masked unevenly, so that the microbatches' own denominators count; buffers are compared too."""
    given, pool = subject(model), request.getfixturevalue(f"workers{BY_NAME[kind].devices}")
    plan = BY_NAME[kind].plan(given.graph)
    assert (given.graph.accumulated, plan.microbatches, plan.allow) == (2, 2, (MICROBATCH_STATISTICS,))
    outcome = check_plan(given, plan, pool)
    assert outcome.error.exact, outcome.error


def test_it_is_not_the_whole_batch_s_loss() -> None:
    """Otherwise nothing would be given up, and nothing compared."""
    for name in ("mixtral balanced by microbatch", "resnet by microbatch"):
        own, (model, loss_of) = subject(name), eager(name)
        loss = loss_of(own.batch)
        loss.backward()
        whole = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert compare(own.loss, own.gradients, float(loss.detach()), whole).value > 1e-3


@pytest.mark.parametrize(("model", "microbatches"), [(contrastive, 4), (two_towers, 2)])
def test_negatives_of_the_same_microbatch(model: Any, microbatches: int, workers2: WorkerPool) -> None:
    torch.manual_seed(0)
    module, batch, loss_fn = model()
    given = make_subject(module, batch, loss_fn, microbatches=microbatches)
    outcome = check_plan(given, manual_plan(given.graph, data=2, microbatches=microbatches), workers2)
    assert outcome.error.exact, outcome.error


def test_the_reference_is_a_loop_over_microbatches() -> None:
    torch.manual_seed(0)
    model, (x, y), loss_fn = resnet()
    given = make_subject(model, (x, y), loss_fn, microbatches=4)
    loss, gradients = accumulated(model.double().train(), list(zip(x.chunk(4), y.chunk(4), strict=True)), loss_fn)
    assert compare(given.loss, given.gradients, loss, gradients).value <= EXACT
    assert int(given.buffers["bn1.num_batches_tracked"]) == 1  # a step writes once


def test_a_model_that_couples_nothing_stays_exact(workers2: WorkerPool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(8, 8)
    given = make_subject(model, (x, torch.randn(8, 4)), nn.functional.mse_loss, microbatches=2)
    plan = manual_plan(given.graph, data=2, microbatches=2)
    assert given.graph.accumulated == 1 and plan.allow == ()
    assert check_plan(given, plan, workers2).error.exact


@functools.cache
def workload() -> Workload:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(3))
    batch = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    return Workload(nn.Sequential(*blocks, nn.Linear(8, 4)).double(), batch, nn.functional.mse_loss)


@functools.cache
def captured(**sizes: Any) -> Graph:
    return workload().resized(**sizes) if sizes else compared_graph(workload())


class TestPlanning:
    def planned(self, **options: Any) -> tuple[Any, Plan]:
        """As ``plan_model`` plans, with one capture for all tests."""
        plan = read_plan(options.pop("plan")) if "plan" in options else None
        return plan_graph(captured(), parse("2"), SearchOptions(time_limit_s=4, **options), captured, plan=plan)

    def test_off_by_default(self) -> None:
        graph, plan = self.planned()
        assert plan.microbatches == 1 and plan.allow == () and graph.accumulated == 1
        with pytest.raises(UsageError, match="batch norm"):
            self.planned(microbatches=2)

    def test_pinned_microbatches_are_said_and_kept(self, tmp_path: Path) -> None:
        graph, plan = self.planned(microbatches=2, pipeline=2, allow=ALLOW)
        assert (plan.microbatches, plan.pipeline, plan.global_batch) == (2, 2, 8)
        assert graph.inputs[0].shape[0] == 4 and graph.batch_size == 8
        (note,) = [note for note in plan.notes if "microbatch_statistics" in note]
        assert note.startswith("not exact") and "batch norm" in note
        assert Plan.from_json(json.loads(plan.dumps())) == plan and plan.allow == (MICROBATCH_STATISTICS,)
        (tmp_path / "plan.json").write_text(plan.dumps())
        again, same = self.planned(plan=tmp_path / "plan.json")
        assert same == plan and again.accumulated == 2

    def test_free_microbatches_cost_no_more_than_one(self) -> None:
        _, one = self.planned(pipeline=2)
        graph, best = self.planned(pipeline=2, allow=ALLOW)
        assert best.prediction.step_time_s <= one.prediction.step_time_s
        assert best.bound_s <= best.prediction.step_time_s and graph.accumulated == (
            best.microbatches if best.allow else 1
        )

    def test_another_number_than_captured_is_refused(self) -> None:
        graph = subject("resnet by microbatch").graph
        with pytest.raises(UsageError, match="captured as 2 microbatches"):
            plan_shardings(graph, manual_plan(graph, microbatches=4))

    def test_what_may_be_allowed(self) -> None:
        for allow in ({"anything"}, "microbatch_statistics"):
            with pytest.raises(UsageError, match="allow="):
                self.planned(allow=allow)


def test_the_program_trains_as_it_says(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, (x, y), loss_fn = resnet()
    model = model.double().train()
    program = autopar.compile(
        model, 2, (x, y), loss_fn, data=1, pipeline=2, microbatches=2, allow=ALLOW, folder=tmp_path, time_limit_s=4
    )
    with program:
        loss, gradients = program.gradients((x, y))
    want = accumulated(model, list(zip(x.chunk(2), y.chunk(2), strict=True)), loss_fn)
    assert compare(loss, gradients, *want).value <= EXACT
    assert json.loads((tmp_path / "plan.json").read_text())["allow"] == [MICROBATCH_STATISTICS]
    assert "each microbatch has its own statistics and loss" in (tmp_path / "model.py").read_text().lower()


def test_on_the_command_line(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text(
        "import torch\n"
        "def make():\n"
        "    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))\n"
        "    return net, (torch.randn(8, 8), torch.randn(8, 4)), torch.nn.functional.mse_loss\n"
    )

    def run(*words: str) -> dict[str, Any]:
        result = CliRunner().invoke(cli, [*words, "--json"], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    asked = ("--devices", "2", "--allow", "microbatch-statistics")
    plan = run("plan", f"{model}:make", *asked, "--microbatches", "4", "--time-limit", "2")
    assert (plan["allow"], plan["microbatches"], plan["request"]["allow"]) == (
        [MICROBATCH_STATISTICS], 4, ["microbatch-statistics"],
    )  # fmt: skip
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    checked = run("verify", f"{model}:make", "--devices", "2", "--plan", str(tmp_path / "plan.json"))
    assert checked["exact"] and any("accumulated over 4 microbatches" in note for note in checked["notes"])
    priced = run("price", f"{model}:make", "--devices", "2", "--plan", str(tmp_path / "plan.json"))
    assert priced["allow"] == plan["allow"] and priced["step_time_s"] == pytest.approx(plan["step_time_s"])
    why = run("explain", str(tmp_path / "plan.json"), "--model", f"{model}:make")
    assert "microbatch_statistics" in json.dumps(why)
