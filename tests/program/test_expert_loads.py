"""``train.py --record-expert-loads FILE`` records the choices of the eager model's routers, whatever the plan; plans are priced by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import expert_models
import pytest
import torch
from tiers import in_short
from torch import Tensor
from workers import WorkerPool

import autopar
from autopar.cli.load import SizeOptions, load_model
from autopar.devices import parse
from autopar.errors import UsageError
from autopar.expert_loads import ExpertLoads, expert_loads
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.planning import plan_model
from autopar.price import Pricer
from autopar.search import SearchOptions, filled_plan, reprice
from autopar.workload import Workload

STEPS = 2
AS_ONE = ("model.layers.2", "model.layers.3")
PLANS: dict[str, dict[str, Any]] = {
    "expert": {"expert": 2},
    "expert in halves": {"expert": 2, "overlap": "halves"},
    "halves with ZeRO 3": {"expert": 2, "zero": 3, "overlap": "halves"},
    "recomputed in two stages": {"pipeline": 2, "microbatches": 2, "activations": "full"},
    "segments beside layers": {
        "expert": 2,
        "pin": {"model.layers.0-1.activations": "full", "model.layers.2-3.activations": "full:2"},
    },
}


def choices(model: torch.nn.Module, batch: dict[str, Tensor]) -> dict[str, list[int]]:
    """How often each router of the eager model chooses each expert."""
    found: dict[str, list[int]] = {}

    def count(name: str, result: tuple[Tensor, Tensor, Tensor]) -> None:
        found[name] = torch.bincount(result[-1].flatten(), minlength=4).tolist()

    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _a, result, name=f"model.layers.{i}": count(name, result))
        for i, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        model(**batch)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", in_short(PLANS, *(name for name in PLANS if name != "expert in halves")))
def test_recorded_loads_are_the_routers_choices(name: str, workers2: WorkerPool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch, _ = expert_models.mixtral()
    model = model.double()
    pins = {"time_limit_s": 1, "capture_check": False, "type_check": False}
    pins["capture_check"] = name == "expert"  # whose program evaluates
    program = autopar.compile(model, 2, batch, **pins, **PLANS[name])
    folder, file, data = program.emit(tmp_path / "program"), tmp_path / "loads.json", tmp_path / "data.pt"
    inputs = program._inputs(batch)
    torch.save({key: torch.cat([value] * STEPS) for key, value in inputs.items()}, data)
    options = ["--steps", str(STEPS), "--dataset", str(data), "--lr", "0", "--record-expert-loads", str(file)]
    if name == "expert":  # the loads of held-out rows are not counted
        torch.save({key: value.roll(1, -1).contiguous() for key, value in inputs.items()}, tmp_path / "held_out.pt")
        options += ["--eval-data", str(tmp_path / "held_out.pt"), "--eval-every", "1"]
    losses, talk = workers2.run("programs:ran", str(folder), *options)[0]
    assert len(losses) == STEPS, talk
    layers = json.loads(file.read_text())["layers"]
    wanted = choices(model, batch)
    assert layers.keys() == wanted.keys()
    for layer, (steps,) in layers.items():
        times = 2 if name == "segments beside layers" and layer in AS_ONE else 1  # the recomputation counts again
        assert steps == [[times * n for n in wanted[layer]]] * STEPS, layer
    loads = expert_loads(file)
    assert loads is not None
    graph = Workload(model, batch, expert_loads=loads).capture()
    (cls,) = {layer.cls for layer in graph.layers if layer.name in wanted}
    halves = [max(sum(counts[:2]), sum(counts[2:])) / (sum(counts) / 2) for counts in wanted.values()]
    assert graph.classes[cls].loads.imbalance(0, 2) == pytest.approx(sum(halves) / len(halves))
    assert graph.classes[cls].loads.imbalance(0, 1) == 1.0


def test_padded_experts_have_no_loads(tmp_path: Path) -> None:
    """A program with 4 experts on 3 devices has 6; the busiest device has 13 of 18 rows."""
    (tmp_path / "loads.json").write_text(record({"model.layers.0": [[[8, 5, 3, 2, 0, 0]]]}))
    model, batch, _ = expert_models.mixtral(num_hidden_layers=1)
    graph = Workload(model, batch, expert_loads=expert_loads(tmp_path / "loads.json")).capture()
    (cls,) = (cls for cls in graph.classes.values() if cls.experts)
    assert cls.loads.imbalance(0, 3) == pytest.approx(13 / 18 * 3)
    assert cls.loads.imbalance(0, 4) == pytest.approx(8 / 18 * 4)


def planned(loads: ExpertLoads | None = None, **pins: int | str) -> tuple[Graph, Plan]:
    model, batch, _ = expert_models.mixtral(hidden_size=256, intermediate_size=512)
    workload = Workload(model, batch, expert_loads=loads)
    return plan_model(workload, parse("4xH100"), SearchOptions(time_limit_s=2, **pins), capture_check=False)


def test_the_price_is_that_of_the_busiest_device() -> None:
    """Its rows lengthen its mixtures, their exchanges, and what they save inside; everything else stays."""
    graph = load_model("mixtral-8x7b", SizeOptions(4096, 8)).capture()
    plan = filled_plan(graph, 8, {"expert": 8, "activations": "keep"})
    cluster, priced = parse("8xH100"), []
    for imbalance in (1.0, 2.0, 3.0):
        uneven = ExpertLoads("a test", assumed=imbalance).on(graph)
        priced.append(reprice(uneven, cluster, Pricer(uneven, cluster, plan.precision), plan, plan.precision))
    assert (
        priced[0].prediction
        == reprice(graph, cluster, Pricer(graph, cluster, plan.precision), plan, plan.precision).prediction
    )
    for part in ("compute_s", "communication_s"):
        even, twice, thrice = (getattr(one.prediction, part) for one in priced)
        assert thrice - twice == pytest.approx(twice - even, rel=1e-3) and even < twice < 2 * even
    even, twice, thrice = (one.stages[0].memory for one in priced)
    assert thrice.activations - twice.activations == pytest.approx(twice.activations - even.activations, rel=1e-3)
    assert even.activations < twice.activations < 2 * even.activations
    assert even.optimizer == twice.optimizer and even.parameters == twice.parameters


def test_uneven_loads_change_the_plan_and_its_notes() -> None:
    _, plan = planned(expert=4)
    assert any("got 1.2 times the mean number of tokens, that would add" in note for note in plan.notes)
    _, plan = planned(ExpertLoads("loads.json", assumed=3.0), expert=4)
    assert any("the busiest device gets 3 times the mean (loads.json)" in note for note in plan.notes)
    assert any(note.startswith("the uneven loads of experts add ") for note in plan.notes)
    assert not any("number of tokens" in note for note in plan.notes)


def record(layers: object, version: object = 1) -> str:
    return json.dumps({"format": version, "layers": layers})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not JSON", "is not JSON"),
        ("[]", "no record of experts' loads"),
        (record({"a": [[[1]]]}, 2), "no record of experts' loads"),
        (record({}), "no record of experts' loads"),
        (record({"a": [[[1, 2], [3]]]}), "steps x experts"),
        (record({"a": [[[0, 0]]]}), "steps x experts"),
        (record({"a": [[[1, -1]]]}), "steps x experts"),
        (record({"a": [[[1.5, 1]]]}), "steps x experts"),
        (record({"a": 3}), "steps x experts"),
        (record({"a": []}), "has no loads for model.layers.0"),
        (record({"model.layers.0": [[[1, 2]]]}), "loads of 2 experts for model.layers.0, and the model has 4 there"),
    ],
)
def test_a_file_that_is_no_record_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "loads.json").write_text(text)
    with pytest.raises(UsageError, match=says) as error:
        planned(expert_loads(tmp_path / "loads.json"))
    assert error.value.hint


@pytest.mark.parametrize(
    ("given", "says"),
    [(0.9, "impossible"), ("-1", "impossible"), ("inf", "impossible"), ([1.2], "neither"), ("a\0b", "no path")],
)
def test_an_impossible_imbalance_is_refused(given: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        expert_loads(given)


def test_loads_of_a_model_without_experts_are_refused() -> None:
    model, batch = torch.nn.Linear(4, 4), torch.randn(8, 4)
    with pytest.raises(UsageError, match="has no experts"):
        Workload(model, batch, lambda y: y.sum(), expert_loads=expert_loads(1.2)).capture()
