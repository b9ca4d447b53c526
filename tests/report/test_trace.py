"""``autopar report --trace``: the predicted step as a trace, and what programs write of the steps that they run."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from places import ROOT
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import capture
from autopar.cli.app import cli
from autopar.emit import emit
from autopar.errors import UsageError
from autopar.plan import Plan
from autopar.program.tracing import COMMUNICATION, COMPUTATION, PAIRED, PAIRED_KEY, WORDS, action_name, measured
from autopar.report.step import Action
from autopar.report.trace import compare_actions, read_trace
from autopar.run.folder import import_runtime, program_modules
from autopar.schedules.orders import device_order
from autopar.search import manual_plan
from autopar.shard import annotate

MLP = f"{ROOT}/examples/mlp.py:model"


def spans(events: list[dict[str, Any]], track: int) -> dict[int, list[dict[str, Any]]]:
    """The spans of a track by process, in order of time."""
    mine = sorted((e for e in events if e["ph"] == "X" and e["tid"] == track), key=lambda e: (e["pid"], e["ts"]))
    return {pid: list(own) for pid, own in itertools.groupby(mine, key=lambda e: int(e["pid"]))}


def invoke(*arguments: str) -> str:
    return CliRunner().invoke(cli, arguments, catch_exceptions=False).stdout


def test_the_predicted_trace_has_every_action_and_every_send(tmp_path: Path):
    file, out, request = tmp_path / "plan.json", tmp_path / "trace.json", ["--devices", "8xH100-80GB"]
    split = ("--pipeline", "2", "--schedule", "zero-bubble", "--microbatches", "4")
    file.write_text(invoke("price", MLP, *request, *split, "--json"))
    with pytest.raises(UsageError, match="does not name its model"):
        invoke("report", str(file), "--trace", str(out))
    assert invoke("report", str(file), "--model", MLP, *request, "--trace", str(out)) == f"{out}\n"
    events = json.loads(out.read_text())["traceEvents"]
    plan = Plan.from_json(json.loads(file.read_text()))
    actions, sends = spans(events, COMPUTATION), spans(events, COMMUNICATION)
    names = [[e["name"] for e in own] for own in actions.values()]
    assert names == [[*(action_name(*a) for a in device_order(plan.sized_schedule, d)), "once a step"] for d in (0, 1)]
    assert [len(own) for own in sends.values()] == [4, 4]  # outputs of one stage, gradients of the other
    for own in (*actions.values(), *sends.values()):
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.01 for a, b in itertools.pairwise(own))
    assert all(e["args"]["bytes"] > 0 and e["args"]["seconds"] > 0 for own in sends.values() for e in own)
    end_s = max(e["ts"] + e["dur"] for own in actions.values() for e in own) / 1e6
    assert end_s == pytest.approx(plan.prediction.step_time_s, abs=1e-8)
    memory = [sum(e["args"].values()) for e in events if e["ph"] == "C"]
    assert max(memory) == max(stage.memory.total for stage in plan.stages)
    with pytest.raises(UsageError, match="holds no trace of a program"):
        read_trace(out)  # a predicted one is none


def ran(folders: list[str], state: dict[str, Tensor], batch: dict[str, Tensor], out: str) -> list[float]:
    """In a worker: the loss of one traced step of each program."""
    losses = []
    for i, folder in enumerate(folders):
        with program_modules(folder):
            runtime = import_runtime(folder)
            program = runtime.load(folder)
            trainer = runtime.Trainer(program, runtime.start(program, device="cpu"), state=state)
            losses.append(trainer.trace(batch, f"{out}/{i}.json"))
            trainer.trace(batch, f"{out}/second-{i}.json")  # the profiler starts again
    return losses


PLANS: tuple[dict[str, Any], ...] = (
    {"data": 2, "microbatches": 2},
    {"data": 2, "microbatches": 2, "zero": 1},  # leaves collectives behind for the next step
    {"pipeline": 2, "microbatches": 4, "schedule": "1f1b"},
    {"pipeline": 2, "microbatches": 4, "schedule": "zero-bubble"},
    {"pipeline": 2, "microbatches": 4, "schedule": "chimera"},
)


def test_a_step_writes_what_it_did(workers2: WorkerPool, tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).double()
    x, y = torch.randn(2, 16, 16, dtype=torch.float64)
    graph = annotate(capture(model, (x, y), nn.functional.mse_loss))
    plans = [manual_plan(graph, **options) for options in PLANS]
    folders = [str(tmp_path / f"program{i}") for i in range(len(plans))]
    for plan, folder in zip(plans, folders, strict=True):
        emit(graph, plan, folder)
    names = [value.name for value in graph.inputs]
    batch = dict(zip(names, (x, y), strict=True))
    losses = workers2.run("test_trace:ran", folders, model.state_dict(), batch, str(tmp_path))
    wanted = nn.functional.mse_loss(model(x), y).item()
    assert losses[0] == losses[1] == pytest.approx([wanted] * len(plans), rel=1e-12)
    for i, plan in enumerate(plans):
        events = read_trace(tmp_path / f"{i}.json")
        actions, sends = spans(events, COMPUTATION), spans(events, COMMUNICATION)
        assert [*actions] == [1, 2] and [*sends] == [1, 2]
        for rank, own in enumerate(actions.values()):
            pipeline_rank = rank if plan.pipeline > 1 else 0
            order = [action_name(*a) for a in device_order(plan.sized_schedule, pipeline_rank)]
            assert [e["name"] for e in own] == order
            title = next(e["args"]["name"] for e in events if e["name"] == "process_name" and e["pid"] == rank + 1)
            assert title == f"rank {rank} of pipeline rank {pipeline_rank}, measured"
        assert all(e["name"].startswith("gloo:") and e["dur"] >= 0 for own in sends.values() for e in own)
    # above each other: a plan's prediction and its program's step
    file, out = tmp_path / "plan.json", tmp_path / "both.json"
    file.write_text(plans[3].dumps())
    factory = tmp_path / "factory.py"
    factory.write_text(
        "import torch\nfrom torch import nn\n\n\ndef model():\n"
        "    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).double()\n"
        "    return model, torch.zeros(2, 16, 16, dtype=torch.float64).unbind(), nn.functional.mse_loss\n"
    )
    again = ["--model", f"{factory}:model", "--devices", "2"]
    printed = invoke("report", str(file), *again, "--measured", str(tmp_path / "3.json"), "--trace", str(out))
    assert {f"{WORDS[kind]}, stage {stage}" for kind in "FIW" for stage in (0, 1)} <= {
        line.split("  ")[0] for line in printed.splitlines()
    }
    both = json.loads(out.read_text())["traceEvents"]
    order = sorted((e["args"]["sort_index"], e["pid"]) for e in both if e["name"] == "process_sort_index")
    assert [pid for _, pid in order] == [1_000_000, 1, 1_000_001, 2]


def test_spans_of_a_gpu_win_over_those_of_launches():
    name = action_name("F", 0, 3)
    found = measured(
        [
            ("step", 100.0, 900.0, False),
            (name, 110.0, 120.0, False),
            (name, 150.0, 350.0, True),
            ("nccl:all_reduce", 200.0, 201.0, False),
            ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 200.0, 260.0, True),
            ("aten::mm", 300.0, 310.0, False),
        ],
        rank=2, pipeline_rank=1,
    )  # fmt: skip
    kept = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in found if e["ph"] == "X"]
    assert kept == [(0, name, 50.0, 200.0), (1, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 100.0, 60.0)]


def test_paired_passes_have_their_own_track_and_are_not_compared():
    f, g, b, c = (action_name(kind, 1, i) for kind, i in (("F", 0), ("F", 1), ("B", 0), ("B", 1)))
    found = measured(
        [
            ("step", 0.0, 20e6, False),
            (f, 0.0, 2e6, False),
            (b, 3e6, 8e6, False),  # paired with ``g``
            (g, 4e6, 9e6, False),
            (c, 10e6, 13e6, False),
        ],
        rank=0, pipeline_rank=0,
    )  # fmt: skip
    tracks = {e["name"]: (e["tid"], PAIRED_KEY in e["args"]) for e in found if e["ph"] == "X"}
    assert tracks == {f: (COMPUTATION, False), b: (PAIRED, True), g: (COMPUTATION, True), c: (COMPUTATION, False)}
    assert [e["tid"] for e in found if e["name"] == "thread_name"] == [COMPUTATION, COMMUNICATION, PAIRED]
    spans = (("F", 0, 0.0, 2.0), ("F", 1, 2.0, 4.0), ("B", 0, 4.0, 6.0), ("B", 1, 6.0, 9.0))  # the pair saves 1 s
    actions = tuple(Action(kind, 1, i, start, stop, None, None) for kind, i, start, stop in spans)  # type: ignore[arg-type]
    rows = compare_actions(SimpleNamespace(actions=(actions,)), found)  # type: ignore[arg-type]
    assert [(row.name, row.predicted_s, row.measured_s) for row in rows] == [
        ("backward, stage 1", 3.0, 3.0),
        ("forward, stage 1", 2.0, 2.0),
    ]
