"""One suite over the registry: what every technique must do, whatever it does."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
from typing import Any

import pytest
from exactness import subject

from autopar.errors import UsageError
from autopar.pins import OWNERS, PINS, LayerPins, PlanPins
from autopar.plan import ALLOWED, Plan, Role, Strategy, deviations
from autopar.plan_schema import check_plan
from autopar.report.figures import _strategy as figures_of
from autopar.schedules import PAIRED, SCHEDULES, SPLIT
from autopar.search import SearchOptions, manual_plan
from autopar.search.manual import make_mesh
from autopar.search.numerics import allowed_numerics
from autopar.search.options import pins_by_layer
from autopar.search.strategies import candidates, context_of
from autopar.summary import describe
from autopar.techniques import (
    ALL,
    BY_NAME,
    DEFAULTS,
    DEVIATIONS,
    LAYER,
    LAYER_DEVIATIONS,
    Options,
    cases_of,
    conflict,
    conflicts_of,
)
from autopar.techniques.technique import ANY, PERMISSIVE, Technique
from autopar.verify.kinds import kinds

every = pytest.mark.parametrize("technique", LAYER, ids=lambda technique: technique.name)


def samples(technique: Technique) -> list[str]:
    """Every value, and one with a number."""
    plain = [mode.name for mode in technique.modes if technique.known(mode.name)]
    return [*plain, *(f"{mode.name}:3" for mode in technique.modes if mode.counted)]


def having(technique: Technique, value: str) -> Strategy:
    roles = next(r for r in ((Role.DATA,), (Role.EXPERT,)) if not technique.refused_roles(value, r))
    return Strategy(roles, technique.mode(value).min_zero, options=Options(**{technique.name: value}))


@pytest.mark.parametrize("technique", ALL, ids=lambda technique: technique.name)
def test_its_words_and_values_are_well_formed(technique: Technique) -> None:
    assert technique.name.isidentifier() and len(set(technique.values)) == len(technique.values) >= 2
    assert technique.subject and technique.meaning[0].islower() and not technique.meaning.endswith(".")
    assert not technique.phrase(technique.default), "the default needs no words"
    key, _, value = technique.example.partition("=")
    assert key == technique.name and technique.known(value)
    assert technique.default_if_missing in ("", *technique.values) and technique.under_split in ("", *technique.values)
    for mode in technique.modes:
        assert bool(mode.deviation) == bool(mode.inexact) and (not mode.deviation or mode.deviation in ALLOWED)
    for wrong in ("", "nothing", 3, None, True, f"{technique.values[1]}:1", f"{technique.default}:2"):
        assert not technique.known(wrong)
    for conflict_ in conflicts_of(technique):
        others = BY_NAME[conflict_.other].values if conflict_.other in BY_NAME else SCHEDULES
        assert set(conflict_.values) <= set(technique.values) and set(conflict_.others) <= set(others)


@every
def test_a_strategy_and_a_plan_file_hold_every_value(technique: Technique) -> None:
    graph = subject("mlp").graph
    paired = {"pipeline": 2, "chunks": 2, "schedule": PAIRED[0], "microbatches": 4}
    for value in samples(technique):
        more = paired if technique.mode(value).overlaps_pairs else {"microbatches": 2}
        plan = manual_plan(graph, data=2, zero=3, **more)
        strategy = having(technique, value)
        assert strategy.options[technique] == value and strategy.options is having(technique, value).options
        assert pickle.loads(pickle.dumps(strategy)) == strategy
        layers = tuple(
            dataclasses.replace(
                layer, strategy=dataclasses.replace(layer.strategy, roles=strategy.roles, options=strategy.options)
            )
            for layer in plan.layers
        )
        written = dataclasses.replace(plan, layers=layers, allow=deviations("all-reduce", (x.strategy for x in layers)))
        data = json.loads(written.dumps())
        check_plan(data)
        assert Plan.from_json(data) == written and {layer[technique.name] for layer in data["layers"]} == {value}
        words = technique.phrase(value)
        assert not words or words in describe(written)
        if value != technique.default:
            assert figures_of(written, written.layers[0])[technique.name] == (words or value)
        data["layers"][0][technique.name] = "nothing"
        with pytest.raises(Exception, match=f"{technique.name} is 'nothing', not one of"):
            check_plan(data)


@every
def test_a_pin_leaves_its_value_alone(technique: Technique) -> None:
    """Of pinned values, and of those of before, a search tries what they say; without one, the default is among its candidates."""
    mesh = manual_plan(subject("mlp").graph, data=2).mesh
    free = candidates(
        mesh, 8, 8, SearchOptions(), context=context_of(SearchOptions(), several_microbatches=True, chain=8)
    ).every
    assert technique.default in {s.options[technique] for s in free}
    for value in samples(technique):
        expert = 2 if Role.EXPERT in having(technique, value).roles else None
        options = SearchOptions(**{technique.name: value}, allow=DEVIATIONS, expert=expert)
        known = context_of(options, several_microbatches=True, chain=8)
        found = {
            s.options[technique] for s in candidates(mesh, 8, 8, options, experts=8, context=known).every if s.zero == 3
        }
        assert found and all(technique.admits(v, {technique.name: value}.get) for v in found), (value, found)
        assert value in found
    for pin in technique.former_pins:
        for value in (v for v in (*pin.values, *(() if pin.values else (2,))) if v != ANY):
            found = technique.allowed({pin.name: value}.get, PERMISSIVE)
            assert found and all(technique.admits(v, {pin.name: value}.get) for v in found), (pin.name, value)


@pytest.mark.parametrize("name", DEVIATIONS)
def test_a_deviation_must_be_allowed(name: str) -> None:
    technique, mode = next((t, mode) for t in ALL for mode in t.modes if mode.deviation == name)
    value = f"{mode.name}:{mode.counted}" if mode.counted else mode.name
    with pytest.raises(UsageError, match=f"{technique.name}={value} is not exact: {mode.inexact}"):
        SearchOptions(**{technique.name: value})
    assert list(SearchOptions(**{technique.name: value}, allow={name}).deviations) == [name]
    assert value not in technique.allowed({}.get, context_of(SearchOptions()))


def test_only_what_layers_give_up_is_searched_with_and_without() -> None:
    """Whether replicas are averaged is the user's decision: a search without the pin has nothing to compare."""
    graph = subject("mlp").graph
    assert [each.narrow for each in allowed_numerics(graph, SearchOptions(allow={"local_steps"}))] == [()]
    pinned = SearchOptions(sync="local-steps:2", allow={"local_steps"})
    assert [each.narrow for each in allowed_numerics(graph, pinned)] == [()]
    both = SearchOptions(allow=DEVIATIONS)
    found = [some for n in range(len(LAYER_DEVIATIONS) + 1) for some in itertools.combinations(LAYER_DEVIATIONS, n)]
    assert [each.narrow for each in allowed_numerics(graph, both)] == found


def test_values_that_exclude_each_other_are_never_together() -> None:
    """In no strategy, no candidate and no layer's pins; the sentence names both, and why."""
    for a, b in itertools.permutations(LAYER, 2):
        for x, y in itertools.product(samples(a), samples(b)):
            found = conflict(a, x, DEFAULTS.by_name | {a.name: x, b.name: y})
            if found is None:
                continue
            with pytest.raises(AssertionError):
                Options(**{a.name: x, b.name: y})
            with pytest.raises(UsageError, match=f"{a.name}={x} cannot be combined with {b.name}=.*\n?.*{found.why}"):
                LayerPins(**{a.name: x, b.name: y}).check("layers.0", PlanPins())


@every
@pytest.mark.parametrize("schedule", SPLIT)
def test_a_pin_that_a_split_schedule_would_overwrite_is_refused(technique: Technique, schedule: str) -> None:
    """With the schedule pinned, too, for a search and for a plan by hand; what is not pinned takes the value that the schedule leaves."""
    graph, pipeline = subject("mlp").graph, {"pipeline": 2, "microbatches": 4, "chunks": 2, "schedule": schedule}
    for value in samples(technique) if technique.under_split else ():
        pins = pipeline | {technique.name: value}
        if value == technique.under_split or (technique.mode(value).overlaps_pairs and schedule in PAIRED):
            pins_by_layer(graph, SearchOptions(**pins))
            continue
        words = (
            f"{technique.name}={value} cannot be combined with schedule={schedule}.*\n?.*run with {technique.name}=none"
        )
        for plan in (lambda pins: pins_by_layer(graph, SearchOptions(**pins)), lambda pins: manual_plan(graph, **pins)):
            with pytest.raises(UsageError, match=words):
                plan(pins)
    plan = manual_plan(graph, **pipeline, compiled=True)
    for layer in plan.layers:
        paired = [mode.name for mode in technique.modes if mode.overlaps_pairs and schedule in PAIRED]
        simplest = technique.simplest({}.get, context_of(SearchOptions(compiled=True)))
        assert [layer.strategy.options[technique]] == (paired or [technique.under_split or simplest])


def test_every_technique_has_pins_and_cases() -> None:
    assert set(BY_NAME) <= set(PINS) and all(OWNERS[t.name] is t for t in ALL)
    for n in (2, 4):
        named: dict[str, Any] = {kind.name: kind.options for kind in kinds(n)}
        for technique in ALL:
            for name, pins in cases_of(technique, n):
                pins = pins | {"mesh": make_mesh(*pins["mesh"])} if "mesh" in pins else pins
                assert named[name] == pins and technique.name in pins
