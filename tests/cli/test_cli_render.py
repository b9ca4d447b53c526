"""A plan as text says what the plan holds."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from autopar.cli.render import parallelism, plan_tables, runs
from autopar.plan import Alternative, Axis, LayerPlan, Memory, Plan, Prediction, Role, StagePlan, Strategy
from autopar.plan_schema import check_plan
from autopar.summary import abbreviations, degrees

MESH = (Axis("outer", 4, 8), Axis("inner", 8, 1))
BLOCK = Strategy((Role.DATA, Role.TENSOR_SEQUENCE), zero=1, activations="full")
EDGE = Strategy((Role.DATA, Role.DATA), zero=3)


def make_plan(stages: int = 2) -> Plan:
    layers = (
        LayerPlan("embed", "Embed", EDGE),
        *(LayerPlan(f"layers.{i}", "Block", BLOCK) for i in range(6)),
        LayerPlan("head", "Head", EDGE),
    )
    memory = Memory(10 * 10**9, 5 * 10**9, 20 * 10**9, 3 * 10**9, 2 * 10**9)
    size = 8 // stages
    return Plan(
        model="tiny",
        devices=f"{4 * stages}x8xH100-80GB",
        mesh=MESH,
        stages=tuple(StagePlan(i * size, (i + 1) * size, (i * 32, 32), memory, 76 * 10**9, 0.1) for i in range(stages)),
        schedule="1f1b",
        microbatches=16,
        global_batch=1024,
        precision="bfloat16",
        layers=layers,
        prediction=Prediction(2.0, 1.5, 0.3, 0.15, 0.05, 0.42, 12345.6),
        bound_s=1.98,
        gap=0.01,
        solver="GLOP bound, SCIP",
        notes=("the router's loss is per batch",),
        wall_time_s=3.25,
        planning_memory_bytes=1_200_000_000,
    )


def text(plan: Plan) -> str:
    console = Console(file=io.StringIO(), width=120, highlight=False)
    console.print(plan_tables(plan))
    return console.file.getvalue()


def row(rendered: str, start: str) -> list[str]:
    lines = [line for line in rendered.splitlines() if line.startswith(start)]
    assert len(lines) == 1, (start, rendered)
    return lines[0].split()


def test_head_says_model_devices_and_mesh():
    rendered = text(make_plan())
    assert "tiny on 8x8xH100-80GB (64 devices)" in rendered
    assert "outer 4 x inner 8, in each of 2 pipeline stages" in rendered
    assert "1,024 in 16 microbatches, schedule 1f1b" in rendered


def test_the_degrees_of_most_layers_are_in_megatrons_words():
    plan = make_plan()
    words = (
        "PP 2 x DP 4 x TP 8 with sequence parallelism, ZeRO 1, recomputed, microbatch size 16 (2 of 8 layers differ)"
    )
    assert parallelism(plan) == words and "parallel   PP 2 x DP 4 x TP 8 with" in text(plan)
    ring = Strategy((Role.RING, Role.TENSOR_SEQUENCE_EXPERT))
    same = replace(plan, layers=tuple(replace(layer, strategy=ring) for layer in plan.layers))
    assert parallelism(same) == "PP 2 x CP 4 x TP 8 with sequence parallelism x EP 8, ZeRO 0, microbatch size 64"
    grid = Strategy((Role.TENSOR_HIDDEN, Role.TENSOR_WEIGHTS))
    same = replace(plan, layers=tuple(replace(layer, strategy=grid) for layer in plan.layers))
    assert parallelism(same) == "PP 2 x 2D or 3D TP 32, microbatch size 8"
    one = Strategy((Role.EXPERT, Role.DATA), zero=3)
    experts = replace(make_plan(1), layers=tuple(replace(layer, strategy=one) for layer in plan.layers))
    assert parallelism(experts) == "DP 32 x EP 4, ZeRO 3, microbatch size 2"


def test_the_legend_has_the_abbreviations_of_alternatives_too():
    plan = make_plan()
    experts = Strategy((Role.EXPERT, Role.DATA), zero=3)
    other = replace(make_plan(1), layers=tuple(replace(layer, strategy=experts) for layer in plan.layers))
    plan = replace(plan, alternatives=(Alternative(degrees(other), 2.1, abbreviations(other)),))
    check_plan(data := json.loads(plan.dumps()))
    assert Plan.from_json(data).alternatives == plan.alternatives
    (line,) = (part for part in " ".join(text(plan).split()).split("legend: ")[1:])
    for name in ("PP", "DP", "TP", "EP", "ZeRO 1", "ZeRO 3"):
        assert f"{name} " in line and f" {name} " not in line.partition(f"{name} ")[2], (name, line)


def test_consecutive_layers_of_one_strategy_are_one_row():
    plan = make_plan()
    assert [(run.start, len(run.layers)) for run in runs(plan)] == [(0, 1), (1, 6), (7, 1)]
    rendered = text(plan)
    assert row(rendered, "layers.0 ... layers.5") == [
        "layers.0",
        "...",
        "layers.5",
        "6",
        "4",
        "8",
        "8",
        "1",
        "recomputed",
    ]
    assert row(rendered, "embed") == ["embed", "1", "32", "-", "-", "3", "-"]


def test_experts_have_a_column_and_zero_may_shard_over_any_axis_of_equal_parameters():
    plan = make_plan()
    experts = Strategy((Role.EXPERT, Role.ULYSSES), zero=3)
    rendered = text(replace(plan, layers=(replace(plan.layers[0], strategy=experts), *plan.layers[1:])))
    assert "count  data  tensor  expert  sequence  ZeRO" in rendered and "expert" not in text(plan)
    assert row(rendered, "embed") == ["embed", "1", "-", "-", "4", "8", "3", "-"]
    assert row(rendered, "head") == ["head", "1", "32", "-", "-", "-", "3", "-"]


def test_memory_by_part_against_the_limit():
    cells = " ".join(row(text(make_plan()), "0 ... 1"))
    assert "10.0 GB 5.00 GB 20.0 GB 3.00 GB 2.00 GB 40.0 GB 76.0 GB" in cells
    assert cells.count("█") == round(40 / 76 * 20)


def test_stages_that_differ_have_rows_of_their_own():
    plan = make_plan()
    fat = replace(plan.stages[1], memory=replace(plan.stages[1].memory, activations=30 * 10**9))
    rendered = text(replace(plan, stages=(plan.stages[0], fat)))
    assert "67.0 GB" in rendered and "40.0 GB" in rendered and "0 ... 1" not in rendered


def test_time_is_split_and_adds_up():
    rendered = text(make_plan())
    assert "one step: 2.00 s" in rendered
    assert row(rendered, "compute")[1:3] == ["1.50", "s"] and row(rendered, "compute")[-1] == "75.0%"
    assert row(rendered, "exposed communication")[-1] == "15.0%"
    assert row(rendered, "bubble")[-1] == "7.5%"
    assert row(rendered, "optimizer")[-1] == "2.5%"


def test_quality_and_notes():
    rendered = text(make_plan())
    assert "12,346 tokens/s per device, MFU 42.0%" in rendered
    assert "takes less than 1.98 s: gap 1.00%" in rendered
    assert "planned in  3.25 s, 1.20 GB of memory" in rendered
    assert "note: the router's loss is per batch" in rendered


@pytest.mark.parametrize("width", [120, 200])
def test_no_line_is_wider_than_the_console(width):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(plan_tables(make_plan()))
    assert max(len(line) for line in console.file.getvalue().splitlines()) <= width
