"""Why a plan is what it is: families, prices of more, alternatives, and what makes an infeasible request feasible."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from search_models import TransformerPricer, chain
from tiers import slow
from torch import nn

from autopar.devices import Cluster, parse
from autopar.errors import BatchError, InfeasibleError
from autopar.explain import Study, explain, nearby_batch, suggest
from autopar.explain.alternatives import alternatives
from autopar.explain.changes import _offload, _other_devices, feasible, grown, larger_counts, spec_of
from autopar.explain.families import satisfies
from autopar.explain.limits import bindings, faster_clusters, prices
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.planning import plan_model
from autopar.search import SearchOptions
from autopar.summary import describe
from autopar.units import seconds
from autopar.workload import Workload, resize_batch, sequence_length, without_inference


def model(batch: int) -> Graph:
    return chain(["embed", *["block"] * 6, "head"], batch, seq=TransformerPricer.seq)


def study(devices: str = "1x8xH100-80GB", batch: int = 8, **options: Any) -> Study:
    def recapture(*, seq: int | None = None, global_batch: int | None = None, precision: str | None = None) -> Graph:
        if seq or precision:
            raise BatchError("prices for one sequence")
        return model(global_batch or batch)

    return Study(
        model(batch),
        parse(devices),
        SearchOptions(**options),
        lambda graph, cluster: TransformerPricer(graph),
        recapture,
    )


@pytest.fixture(scope="module")
def found() -> Any:
    request = dataclasses.replace(
        study("1x4xH100-80GB"), limit_s=2.0
    )  # a few pipelines take longer, and change no more
    best = request.solve()
    steps: list[str] = []
    explanation = explain(request, best, best, steps.append)
    assert len(steps) == len(set(steps)), "each step is reported once"
    for searched in (*(price.change for price in explanation.prices[2:]), *(f.title for f in explanation.families)):
        assert f"the best plan with {searched}" in steps
    for plan in explanation.alternatives.plans[1:]:
        sizes = f"pipeline={plan.pipeline}, microbatches={plan.microbatches}, chunks={plan.chunks}"
        assert plan is best or any(sizes in step for step in steps)
    return request, explanation


class TestExplanation:
    def test_a_family_is_the_optimum_under_its_pins(self, found: Any) -> None:
        request, explanation = found
        step, compared = explanation.best.prediction.step_time_s, 0
        assert len(explanation.families) >= 9
        for family in explanation.families:
            pins = dict(family.pins)
            if family.step_time_s is None:
                assert family.reason and feasible(request, **pins) is None, family.name
                continue
            assert family.bound_s <= family.step_time_s * (1 + 1e-9)
            assert family.step_time_s >= step * 0.99  # no family that runs can beat the best plan by more than the gap
            if family.bound_s < family.step_time_s * 0.99:
                continue  # its search ended at the time limit: another may find another plan
            again, compared = request.solve(**pins), compared + 1
            assert family.step_time_s == pytest.approx(again.prediction.step_time_s, rel=0.011), family.name
            assert satisfies(again, pins), family.name
        assert compared >= 6
        assert any(f.chosen for f in explanation.families) and any(not f.chosen for f in explanation.families)

    def test_prices_are_differences_of_solves(self, found: Any) -> None:
        request, explanation = found
        base = explanation.best.prediction.step_time_s
        by_name = {price.name: price for price in explanation.prices}
        more = by_name["more_memory"]
        best = request.solve(memory_limit_bytes=request.limit_bytes + 8_000_000_000)
        assert more.saving == pytest.approx(max(0.0, 1 - best.prediction.step_time_s / base), abs=0.011)
        assert 0 <= more.saving <= more.at_most
        assert by_name["node_links"].saving == 0  # these prices know no links
        assert by_name["batch"].step_time_s == pytest.approx(
            request.solve(graph=model(16)).prediction.step_time_s / 2, rel=0.011
        )

    def test_alternatives_are_distinct_and_sorted(self, found: Any) -> None:
        request, explanation = found
        plans = explanation.alternatives.plans
        assert explanation.alternatives.complete and 5 <= len(plans) <= 10
        outer = [(p.pipeline, p.microbatches, p.schedule) for p in plans]
        assert len(set(outer)) == len(outer)
        times = [p.prediction.step_time_s for p in plans]
        assert times == sorted(times)
        proved = [p for p in plans if p.gap <= 0.02]  # the others' searches ended at their time limits
        for plan in proved:
            best = request.solve(pipeline=plan.pipeline, microbatches=plan.microbatches, schedule=plan.schedule)
            assert best.gap > 0.02 or plan.prediction.step_time_s == pytest.approx(
                best.prediction.step_time_s, rel=0.021
            )
        assert len(proved) >= 3

    def test_json(self, found: Any) -> None:
        _, explanation = found
        data = json.loads(json.dumps(explanation.to_json(), allow_nan=False))
        assert {"binding", "shadow_prices", "families", "alternatives", "step_time_s", "summary"} <= set(data)
        assert data["alternatives"][0]["slower"] == pytest.approx(0, abs=0.011)

    def test_memory_binds_where_it_does(self) -> None:
        tight = study(batch=16, memory_limit_bytes=41_000_000_000)
        best = tight.solve()
        worth = prices(tight, best)
        memory = next(b for b in bindings(tight, best, worth) if b.name == "memory")
        assert memory.saving == pytest.approx(0.019, abs=0.01)
        assert (
            "memory of stage 0: 36.5 of 41 GB" in memory.text
            and "used; 8 GB more memory per device would save 1.9%" in memory.text
        )
        assert all(price.text.startswith((price.change, "with")) for price in worth)

    def test_few_alternatives_are_all_there_are(self) -> None:
        request = study("1x1xH200-141GB", batch=1)
        small = dataclasses.replace(request, graph=chain(["block"], 1, seq=TransformerPricer.seq))
        best = small.solve()
        found = alternatives(small, best)
        assert len(found.plans) == 1 and found.complete

    def test_alternatives_are_incomplete_if_time_runs_out_while_they_are_priced(self, found: Any) -> None:
        """Nothing is known of configurations without a price, even if all others were searched."""
        request, explanation = found
        late = alternatives(request, explanation.best, limit_s=0.0)
        assert late.plans == (explanation.best,) and late.total == 0 and not late.complete


MIXED = """
[[group]]
nodes = 1
gpu = "A100-40GB-SXM"
[[group]]
nodes = 1
gpu = "H100-80GB"
"""


def test_devices_of_several_kinds_keep_memory_limits_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(MIXED)
    mixed = dataclasses.replace(study(), cluster=parse(str(tmp_path / "cluster.toml")))
    limits = [part.memory_limit_bytes for part in mixed.cluster.parts]
    assert limits[1] > 1.5 * limits[0] == 1.5 * mixed.limit_bytes
    changed = mixed.with_memory(-(10**9))["cluster"]
    assert [stage.memory_limit_bytes for stage in changed.stages(2)] == [limit - 10**9 for limit in limits]
    assert changed.stages(1)[0].memory_limit_bytes == limits[0] - 10**9
    one = dataclasses.replace(mixed, options=SearchOptions(memory_limit_bytes=10**10))
    assert one.with_memory(10**9) == {"memory_limit_bytes": 11 * 10**9}


def test_a_search_without_time_does_not_say_that_more_memory_or_bandwidth_fits_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tight = dataclasses.replace(study("2x8xH100-80GB", batch=16), recapture=None)
    best = tight.solve(target_gap=ANY)

    def late(*arguments: Any, **changes: Any) -> Plan:
        raise InfeasibleError("time ran out before a plan was found")

    monkeypatch.setattr(Study, "solve", late)
    found = {price.name: price for price in prices(tight, best)}
    for name in ("more_memory", "network", "node_links", "arithmetic", "memory_bandwidth"):
        assert found[name].saving == pytest.approx(0, abs=1e-9) and found[name].at_most == 1, found[name]
    less = found["less_memory"]
    assert less.saving in (0, None) and "no plan would fit" not in less.text


def test_more_of_everything_is_a_cluster_of_its_own() -> None:
    base = parse("2x8xH100-80GB")
    changed = {name: cluster for name, _, cluster in faster_clusters(base)}
    assert changed["network"].inter.bytes_per_s == 2 * base.inter.bytes_per_s
    assert changed["network"].intra == base.intra
    assert changed["arithmetic"].gpu.peak_flops["bfloat16"] == pytest.approx(1.1 * base.gpu.peak_flops["bfloat16"])
    assert set(changed) == {"network", "node_links", "arithmetic", "memory_bandwidth"}
    assert [name for name, _, _ in faster_clusters(parse("1x1xH100-80GB"))] == ["arithmetic", "memory_bandwidth"]


ANY = 1.0
"""The gap of a search that ends with the first plan that fits."""
INFEASIBLE = [
    ("1x1xH100-80GB", 8, {}),
    ("1x2xA100-40GB-SXM", 8, {}),
    slow("1x8xH100-80GB", 8, {"pipeline": 1, "tensor": 1, "zero": 0}),
    ("1x8xH100-80GB", 8, {"zero": 0, "tensor": 1, "pipeline": 1, "recompute": False}),
    slow("1x8xH100-80GB", 64, {"microbatches": 1, "recompute": False}),
    ("1x8xH100-80GB", 16, {"memory_limit_bytes": 9_000_000_000}),
    ("2x8xA100-40GB-SXM", 512, {"microbatches": 1, "recompute": False}),
    ("1x4xH100-80GB", 4, {"data": 4, "zero": 0}),
]


@pytest.mark.parametrize(("devices", "batch", "options"), INFEASIBLE)
def test_what_is_suggested_makes_it_feasible(devices: str, batch: int, options: dict[str, Any]) -> None:
    request = study(devices, batch, **options)
    with pytest.raises(InfeasibleError) as caught:
        request.solve()
    error = suggest(request, caught.value)
    assert error.changes and error.message == caught.value.message
    for change in error.changes:
        wanted = dict(change.request)
        again = dataclasses.replace(
            request,
            graph=model(wanted.get("global_batch", batch)),
            cluster=parse(wanted["devices"]) if "devices" in wanted else request.cluster,
            options=dataclasses.replace(request.options, **dict.fromkeys(change.free), target_gap=ANY),
        )
        plan = again.solve()
        assert all(stage.memory.total <= stage.memory_limit_bytes for stage in plan.stages), change.text
        assert change.text in str(error)
        json.dumps(change.to_json(), allow_nan=False)
        if change.kind == "devices":  # and it is the smallest: one step less does not fit
            count = again.cluster.count
            smaller = [n for n in larger_counts(request.cluster) if n < count]
            assert not smaller or feasible(request, cluster=grown(request.cluster, smaller[-1])) is None
        if change.kind == "batch":
            assert feasible(request, graph=model(wanted["global_batch"] + 1)) is None


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.up, self.down = nn.Linear(32, 256), nn.Linear(256, 64)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.down(torch.relu(self.up(self.table(tokens))))
        return nn.functional.cross_entropy(hidden.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("limit", "options"), [slow(600_000, {"microbatches": 1}), (500_000, {"zero": 0, "tensor": 1, "pipeline": 1})]
)
def test_a_real_model_is_told_what_fits(limit: int, options: dict[str, Any]) -> None:
    batch = (torch.zeros(8, 64, dtype=torch.long), torch.zeros(8, 64, dtype=torch.long))
    cluster = parse("1x2xH100-80GB", memory_limit_bytes=limit)
    with pytest.raises(InfeasibleError) as caught:
        plan_model(Workload(Wide(), batch), cluster, SearchOptions(**options))
    assert caught.value.changes
    for change in caught.value.changes:
        wanted: Mapping[str, Any] = dict(change.request)
        resized = resize_batch(batch, wanted.get("seq"), wanted.get("global_batch"))
        precision = wanted.get("precision")
        there = parse(wanted["devices"], memory_limit_bytes=limit) if "devices" in wanted else cluster
        free = {name: value for name, value in options.items() if name not in change.free}
        free |= {name: wanted[name] for name in ("offload", "states") if name in wanted}
        _, plan = plan_model(
            Workload(Wide(), resized, precision=precision), there, SearchOptions(target_gap=ANY, **free)
        )
        assert all(stage.memory.total <= limit for stage in plan.stages), change.text
    kinds = {change.kind for change in caught.value.changes}
    assert kinds & {"pin", "batch", "sequence"} and ("offload" in kinds) == ("zero" in options), kinds


class Pair(NamedTuple):
    x: torch.Tensor
    labels: Any


def test_batches_are_cut_and_repeated() -> None:
    batch = {"tokens": torch.arange(12).view(3, 4), "image": torch.rand(3, 4, 2), "flag": None}
    cut = resize_batch(batch, 2, 5)
    assert cut["tokens"].tolist() == [[0, 1], [4, 5], [8, 9], [0, 1], [4, 5]]
    assert cut["image"].shape == (5, 2, 2) and cut["flag"] is None
    with pytest.raises(BatchError, match="no single sequence dim"):
        resize_batch({"image": torch.rand(2, 3)}, 2, None)


def test_named_tuples_stay_named_tuples() -> None:
    batch = Pair(torch.zeros(2, 3), (torch.zeros(2), [torch.zeros(2), None]))
    wider = resize_batch(batch, None, 5)
    assert isinstance(wider, Pair) and wider.x.shape == (5, 3)
    assert type(wider.labels) is tuple and len(wider.labels[1][0]) == 5 and wider.labels[1][1] is None
    with torch.inference_mode():
        inference = Pair(torch.zeros(2, 3), None)
    assert without_inference(batch) is batch and not without_inference(inference).x.is_inference()


def test_larger_clusters() -> None:
    assert larger_counts(parse("1x6xH100-80GB"))[:4] == [7, 8, 16, 24]
    assert larger_counts(parse("2x4xH100-80GB"))[:2] == [12, 16]
    assert larger_counts(parse("2xGB200"))[:4] == [3, 4, 8, 12] and larger_counts(parse("4xGB200"))[:2] == [8, 12]
    assert larger_counts(parse(["cpu", "cpu"]))[:2] == [3, 4]
    for cluster in (parse("1x6xH100-80GB"), parse("2x4xH100-80GB", memory_limit_bytes=5), parse("2xGB200")):
        for count in larger_counts(cluster)[:4]:
            larger = grown(cluster, count)
            assert larger.count == count and larger.memory_override_bytes == cluster.memory_override_bytes
            spec = spec_of(larger)
            assert spec is not None and same(parse(spec), larger), (spec, larger)


@pytest.mark.parametrize(
    ("options", "tried"),
    [
        ({}, [{"states": "host"}, {"offload": "activations"}, {"states": "host", "offload": "activations"}]),
        ({"recompute": False}, [{"states": "host"}]),
        ({"states": "device"}, [{"offload": "activations"}]),
    ],
)
def test_a_pin_leaves_other_techniques_to_the_host(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], tried: list[dict[str, Any]]
) -> None:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr("autopar.explain.changes.feasible", lambda study, deadline, **pins: found.append(pins))
    assert not list(_offload(study(**options), math.inf))
    assert {frozenset(pins.items()) for pins in found} == {frozenset(pins.items()) for pins in tried}


@pytest.mark.parametrize(("devices", "spec"), [("1x8xH100-80GB", "2x4xGB200"), ("1x6xH100-80GB", "1x6xMI300X")])
def test_other_devices_come_in_nodes_that_they_have(monkeypatch: pytest.MonkeyPatch, devices: str, spec: str) -> None:
    """Of more than 180 GB: GB200, whose nodes have 4, and then MI300X, whose nodes have 8."""
    plan = study().solve(pipeline=2, tensor=2, microbatches=4, zero=1, recompute=True, chunks=1)
    b200 = parse("1xB200").gpu
    monkeypatch.setattr(
        "autopar.explain.changes.feasible",
        lambda study, deadline, cluster: plan if cluster.gpu.memory_bytes > b200.memory_bytes else None,
    )
    (change,) = _other_devices(study(devices), math.inf)
    assert dict(change.request) == {"devices": spec}


def same(a: Cluster, b: Cluster) -> bool:
    return dataclasses.replace(a, name="", memory_override_bytes=None) == dataclasses.replace(
        b, name="", memory_override_bytes=None
    )


def test_a_plan_in_one_line() -> None:
    plan = study().solve(pipeline=2, tensor=2, microbatches=4, zero=1, recompute=True, chunks=1)
    line = describe(plan)
    assert line.startswith("pipeline 2 (1f1b), data 2, tensor 2, ZeRO ") and "4 microbatches" in line
    assert isinstance(plan, Plan) and seconds(plan.prediction.step_time_s)


def test_sequences_are_told_from_other_sizes() -> None:
    assert sequence_length(model(4)) == TransformerPricer.seq


class TestNearbyBatch:
    def test_a_batch_that_devices_do_not_divide_is_held_against_those_next_to_it(self) -> None:
        request = study(batch=126)
        found = request.solve()
        hint = nearby_batch(request, found)
        both = {n: study(batch=n).solve().prediction.step_time_s / n for n in (120, 128)}
        best = min(both, key=lambda n: both[n])
        gain = found.prediction.step_time_s / 126 / both[best] - 1
        assert gain > 0.01, "a batch that devices divide is worth more here"
        assert f"a global batch of {best} instead of 126 would be {gain:.0%} faster per row" in hint
        assert f"{seconds(both[best] * best)} a step" in hint and "126 by 2 of them" in hint

    def test_nothing_is_said_where_nothing_is_gained(self) -> None:
        request = study(batch=128)
        assert not nearby_batch(request, request.solve())  # all devices divide it
        request = study(batch=12)
        assert not nearby_batch(request, request.solve())  # 8 and 16 are no batches nearby
        pinned = study(batch=126, data=2, tensor=4)
        assert not nearby_batch(pinned, pinned.solve())  # the best plan is no faster per row
