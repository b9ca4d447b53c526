"""Schedules with backwards in two parts: their time, their paths, their plans."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from brute_force import compare, problem
from price_models import chain, llama_block, mlp, solve_mlp
from search_models import Devices, TransformerPricer
from search_models import chain as blocks

from autopar.devices import parse
from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.price import Pricer
from autopar.schedules import SPLIT, Schedule, refusal
from autopar.schedules.orders import device_groups
from autopar.schedules.step_time import longest_paths, parts_of, simulate, simulate_many, textbook_paths, timeline
from autopar.search import SearchOptions, exact, search
from autopar.search.prices import Prices
from autopar.search.problem import configurations
from autopar.search.tables import Instance

EVERY = [Schedule(s, p, m, v) for s in SPLIT for p in (2, 3, 4) for v in (1, 2, 3) for m in (1, 2, 4, 6, 8, 12)]
SIZES = [schedule for schedule in EVERY if refusal(schedule) is None]


def by_passes(schedule: Schedule, f: list[float], b: list[float], w: list[float], saved: list[float]) -> float:
    """The step by going over all devices again and again until no action ends later than before."""
    line, stages = schedule.pipeline, schedule.stages
    took = {("F", s): f[s] for s in range(stages)} | {("B", s): b[s] for s in range(stages)}
    took |= {("I", s): b[s] - w[s] for s in range(stages)} | {("W", s): w[s] for s in range(stages)}
    sent: dict[tuple[str, int, int], float] = {}
    latest, before = 0.0, -1.0
    while sum(sent.values()) > before:
        before = sum(sent.values())
        for rank in range(line):
            clock = 0.0
            for group in device_groups(schedule, rank):
                ways = ["F" if kind == "F" else "B" for kind, _, _ in group]
                for way, (kind, stage, i) in zip(ways, group, strict=True):
                    clock = max(clock, kind != "W" and sent.get((way, stage - 1 if way == "F" else stage + 1, i), 0.0))
                clock += sum(took[kind, stage] for kind, stage, _ in group)
                clock -= min(saved[stage] for _, stage, _ in group) if len(group) > 1 else 0.0
                latest = max(latest, clock)
                for way, (kind, stage, i) in zip(ways, group, strict=True):
                    if kind != "W":
                        sent[way, stage, i] = clock
    return latest


def drawn(rng: random.Random, stages: int) -> tuple[list[float], list[float], list[float], list[float]]:
    """Seconds of forwards, backwards and weight gradients, and seconds that both save in pairs, less than each takes."""
    backward, forward = ([rng.random() for _ in range(stages)] for _ in range(2))
    saved = [rng.random() * min(f, b) for f, b in zip(forward, backward, strict=True)]
    return forward, backward, [rng.random() * b for b in backward], saved


@pytest.mark.parametrize("name", SPLIT)
def test_time_and_paths_on_random_stages(name: str) -> None:
    rng = random.Random(name)
    sizes = [schedule for schedule in SIZES if schedule.name == name]
    assert len(sizes) >= 5
    for schedule in sizes:
        f, b, w, saved = drawn(rng, schedule.stages)
        step = simulate(schedule, f, b, w, saved)
        assert step == pytest.approx(by_passes(schedule, f, b, w, saved), rel=1e-12), schedule
        spans = timeline(schedule, f, b, w, saved)
        assert max(span.stop_s for span in spans) == pytest.approx(step)
        groups = [group for rank in range(schedule.pipeline) for group in device_groups(schedule, rank)]
        shorter = sum(min(saved[stage] for _, stage, _ in group) for group in groups if len(group) > 1)
        assert sum(span.stop_s - span.start_s for span in spans) == pytest.approx(
            schedule.microbatches * (sum(f) + sum(b)) - shorter
        )
        parts, others = (parts_of(schedule, *drawn(rng, schedule.stages)) for _ in range(2))
        many = simulate_many(schedule, np.stack([parts, others], axis=-1))
        longest = longest_paths(schedule, parts, 0.0)
        for path in (*longest, *textbook_paths(schedule).swapaxes(0, 1)):
            assert (path * parts).sum() <= many[0] * (1 + 1e-12) and (path * others).sum() <= many[1] * (1 + 1e-12)
        assert max((path * parts).sum() for path in longest) == pytest.approx(many[0])


def test_equal_parts_leave_the_bubbles_that_the_paper_says() -> None:
    """Qi et al. 2023: where F, I and W take equal time, 1F1B's bubble is three of them for each device but one, ZB-1P's is one (F + I - W),
    and that of ZB-V, whose stages are half as long, the first forwards alone."""
    line, m = 4, 12
    once = 2 * line
    assert simulate(Schedule("1f1b", line, m), [2.0] * line, [4.0] * line) == 6 * m + 6 * (line - 1)
    assert simulate(Schedule("zero-bubble", line, m), [2.0] * line, [4.0] * line, [2.0] * line) == 6 * m + 2 * (
        line - 1
    )
    assert simulate(Schedule("zbv", line, m, 2), [1.0] * once, [2.0] * once, [1.0] * once) == 6 * m + line - 1
    # what pairs send waits for both passes
    assert simulate(Schedule("dualpipev", line, m, 2), [1.0] * once, [2.0] * once, [1.0] * once) == 6 * m + 2 * (
        line - 1
    )


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    graph, cluster = chain(mlp(32, 512, 2048, 8192), 8), parse("4xH100-80GB")
    pricer = Pricer(graph, cluster, "bfloat16", solve_mlp)
    return {
        schedule: search(graph, cluster, pricer, SearchOptions(schedule=schedule, pipeline=2, microbatches=8))
        for schedule in ("1f1b", "interleaved-1f1b", *SPLIT)
    }


def test_pinned_plans(plans: dict[str, Plan]) -> None:
    for schedule, plan in plans.items():
        assert plan.schedule == schedule and Plan.from_json(plan.to_json()) == plan
        assert plan.bound_s <= plan.prediction.step_time_s
    assert len({plan.prediction.step_time_s for plan in plans.values()}) == len(plans)


@pytest.mark.parametrize(
    ("layers", "pins", "tried"),
    [
        (8, {"compile": "none"}, "interleaved-1f1b, zero-bubble, zbv"),
        (8, {}, "interleaved-1f1b, zero-bubble, zbv"),
        (8, {"compile": "layers"}, "interleaved-1f1b, zero-bubble, zbv"),
        (8, {"overlap": "tensor"}, "interleaved-1f1b"),
        (24, {}, "interleaved-1f1b"),
        (24, {"compile": "none"}, "interleaved-1f1b, zero-bubble, zbv"),
    ],
)
def test_a_pipeline_that_waits_is_tried_with_them_where_layers_are_eager_or_few(
    layers: int, pins: dict[str, str], tried: str
) -> None:
    graph, cluster = chain(mlp(32, 512, 2048, 8192), layers), parse("4xH100-80GB")
    pricer = Pricer(graph, cluster, "bfloat16", solve_mlp)

    def best(**more: object) -> Plan:
        return search(graph, cluster, pricer, SearchOptions(pipeline=4, microbatches=4, pin=pins | more))

    plan = best()
    names = tried.split(", ")
    said = f"schedules searched: {', '.join(['1f1b', 'gpipe', *names[:-1]])} and {names[-1]};"
    assert any(note.startswith(said) for note in plan.notes)
    steps = {name: best(schedule=name).prediction.step_time_s for name in names}
    assert plan.schedule == min(names, key=steps.__getitem__)
    assert plan.bound_s <= min(steps.values()) * (1 + 1e-9)
    assert plan.prediction.step_time_s <= min(steps.values()) * 1.01
    assert not any("numbers of chunks" in note for note in best(chunks=1).notes)


@pytest.mark.parametrize("schedule", ["zero-bubble", "zbv"])
def test_each_layer_is_compiled_or_leaves_weight_gradients_for_later(schedule: str) -> None:
    """Where few microbatches leave long bubbles, some of each are faster than all of one."""
    graph, cluster = chain(llama_block(4, 4096, 4096, 32, 8, 14336), 8), parse("4xH100-80GB")
    pricer = Pricer(graph, cluster, "bfloat16")
    pins = {"schedule": schedule, "pipeline": 4, "microbatches": 4}
    mixed, layers, none = (
        search(graph, cluster, pricer, SearchOptions(**pins, compile=how)) for how in (None, "layers", "none")
    )
    for plan, values in ((mixed, {"none", "layers"}), (layers, {"layers"}), (none, {"none"})):
        assert {layer.strategy.options.by_name["compile"] for layer in plan.layers} == values
    steps = [plan.prediction.step_time_s for plan in (layers, none)]
    assert mixed.bound_s <= mixed.prediction.step_time_s < min(steps)


@pytest.mark.parametrize(("family", "seed"), [("plain", 24_110_692), ("mixed devices", 24_110_648)])
def test_every_pipeline_of_a_small_model_is_tried_with_them(family: str, seed: int) -> None:
    """The best plan under 1F1B and GPipe has no such pipeline, or one that hardly waits; one under zero bubble is faster."""
    row = compare(family, seed)
    assert row["agrees"] and row["schedule"] == "zero-bubble"


def test_bytes_are_left_out_where_they_exclude_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimum is the same with and without bytes in the labels."""
    ample, tight = 0, 0
    for seed in range(7000, 7060):
        graph, cluster, pricer, options = problem("split", seed)
        for limit in (cluster.memory_limit_bytes, 500, 1_000, 2_000):
            devices = replace(cluster, memory_limit_bytes=limit)
            for instance in instances(graph, devices, pricer, options):
                fits = exact._always_fits(instance)
                ample, tight = ample + fits, tight + (not fits)
                found = exact.solve_labels(instance, inf, inf)[0]
                with monkeypatch.context() as patch:
                    patch.setattr(exact, "_always_fits", lambda _: False)
                    assert found == pytest.approx(exact.solve_labels(instance, inf, inf)[0], rel=1e-12)
    assert ample > 10 and tight > 10


def test_a_small_model_with_ample_memory_is_solved_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cluster = blocks(["embed", *["block"] * 12, "head"], 8, seq=TransformerPricer.seq), Devices(4, 10**15)
    options = SearchOptions(schedule="zero-bubble", pipeline=4, microbatches=8, chunks=2)
    (instance,) = instances(graph, cluster, TransformerPricer(graph), options)
    monkeypatch.setattr(exact, "NODES", 20_000)  # gives up sooner
    assert np.isfinite(exact.solve_labels(instance, inf, inf)[0])
    monkeypatch.setattr(exact, "_always_fits", lambda _: False)
    with pytest.raises(exact.TooManyLabelsError):
        exact.solve_labels(instance, inf, inf)


def instances(graph: Graph, cluster: Devices, pricer: Any, options: SearchOptions) -> list[Instance]:
    """Every configuration that has a price."""
    prices = Prices(graph, cluster, pricer, options)
    try:
        found = configurations(graph, cluster.count, options, prices.pins)
    except UsageError:  # too few layers, or rows of the batch
        return []
    return [instance for config in found if (instance := prices.instance(config)) is not None]
