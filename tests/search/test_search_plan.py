"""What the search hands on: meshes, notes, errors, hand-written and evaluated plans; the schedule's time; full-size problems."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import re
from typing import Any

import numpy as np
import pytest
from search_models import Devices, RandomPricer, TransformerPricer, chain, random_problem, transformer
from tiers import slow

from autopar.errors import BatchError, InfeasibleError, UsageError
from autopar.graph import Graph
from autopar.layer_price import LayerPrice
from autopar.plan import Axis, Plan, Role, Strategy
from autopar.schedules import Schedule
from autopar.schedules.orders import Action, device_order
from autopar.schedules.step_time import (
    longest_paths,
    lower_bound,
    simulate,
    textbook_paths,
    timeline,
)
from autopar.search import SearchOptions, driver, evaluate, manual_plan, search
from autopar.search.evaluation import coalesce
from autopar.search.manual import make_mesh
from autopar.search.problem import meshes
from autopar.search.strategies import candidates, for_sequence

D, T, TS, IDLE = Role.DATA, Role.TENSOR, Role.TENSOR_SEQUENCE, Role.IDLE


def by_definition(schedule: Schedule, forward_s: list[float], backward_s: list[float]) -> float:
    """The last end, if each action starts at the ends of the one before it on its device and of the one whose result it takes."""
    orders = [list(device_order(schedule, rank)) for rank in range(schedule.pipeline)]
    before = {action: order[k - 1] if k else None for order in orders for k, action in enumerate(order)}

    @functools.cache
    def end_s(action: Action) -> float:
        kind, stage, i = action
        source = (kind, stage - 1 if kind == "F" else stage + 1, i)
        waits = [one for one in (before[action], source if source in before else None) if one is not None]
        return max(map(end_s, waits), default=0.0) + (forward_s if kind == "F" else backward_s)[stage]

    return max(end_s(order[-1]) for order in orders)


class TestSchedule:
    def test_equal_stages_have_the_closed_form(self) -> None:
        for stages, m in [(2, 2), (4, 4), (4, 9), (3, 1)]:
            f, b = [1.0] * stages, [2.0] * stages
            for name in ("gpipe", "1f1b"):
                schedule = Schedule(name, stages, m)
                assert simulate(schedule, f, b) == pytest.approx((m + stages - 1) * 3.0)
                assert lower_bound(schedule, f, b) == pytest.approx((m + stages - 1) * 3.0)

    def test_gpipe_bubble(self) -> None:
        stages, m = 4, 12
        step = simulate(Schedule("gpipe", stages, m), [1.0] * stages, [2.0] * stages)
        assert 1 - m * 3.0 / step == pytest.approx((stages - 1) / (m + stages - 1))

    def test_one_stage_accumulates(self) -> None:
        assert simulate(Schedule("none", 1, 5), [1.0], [2.0]) == 15.0

    def test_an_uneven_pipeline_is_faster_than_the_textbook_says(self) -> None:
        f, b, m = [1.0, 0.01], [1.0, 0.01], 8
        step = simulate(Schedule("1f1b", 2, m), f, b)
        assert step == pytest.approx(m * 2.0)
        assert sum(f) + sum(b) + (m - 1) * 2.0 > step

    def test_bounds_paths_timeline_and_order_of_schedules_on_random_stages(self) -> None:
        rng = random.Random(0)
        for _ in range(400):
            stages, m = rng.randint(2, 5), rng.randint(1, 9)
            f = [rng.choice([0.01, rng.random()]) for _ in range(stages)]
            b = [rng.choice([0.01, rng.random()]) for _ in range(stages)]
            gpipe, one_f_one_b = schedules = [Schedule(name, stages, m) for name in ("gpipe", "1f1b")]
            for schedule in schedules:
                step, bound = simulate(schedule, f, b), lower_bound(schedule, f, b)
                assert step == pytest.approx(max(span.stop_s for span in timeline(schedule, f, b)))
                assert step == pytest.approx(by_definition(schedule, f, b))
                assert bound <= step * (1 + 1e-12)
                longest = np.einsum("pis,ps->i", textbook_paths(schedule), [f, b]).max()
                assert longest <= bound * (1 + 1e-12) and (schedule is gpipe or longest == pytest.approx(bound))
            assert simulate(one_f_one_b, f, b) <= simulate(gpipe, f, b) * (1 + 1e-12)


class TestMeshes:
    def test_powers_of_two_have_one_mesh(self) -> None:
        (mesh,) = meshes(8)
        assert [axis.size for axis in mesh] == [2, 2, 2] and [axis.stride for axis in mesh] == [4, 2, 1]

    def test_six_devices_offer_both_orders(self) -> None:
        assert sorted(tuple(axis.size for axis in mesh) for mesh in meshes(6)) == [(2, 3), (3, 2)]

    def test_a_plan_names_the_orders_of_axes_that_were_not_searched(self) -> None:
        graph = chain(["block"] * 4, 24)
        notes = {
            (devices, tensor): [
                note for note in self.planned(graph, devices, tensor).notes if "orders of a mesh" in note
            ]
            for devices, tensor in ((8, None), (6, None), (12, None), (12, 6))
        }
        assert [key for key, some in notes.items() if some] == [(12, None)]

    @staticmethod
    def planned(graph: Graph, devices: int, tensor: int | None) -> Plan:
        return search(
            graph,
            Devices(devices, int(72e9)),
            RandomPricer(graph, 0, 1.0, 0.0),
            SearchOptions(tensor=tensor, pipeline=1),
        )

    def test_data_is_a_prefix_and_tensor_a_suffix(self) -> None:
        (mesh,) = meshes(16)
        for strategy in candidates(mesh, 4, 8, SearchOptions()).every:
            order = [(D, IDLE, T, TS).index(role) for role in strategy.roles]
            assert order == sorted(order)
            assert strategy.degree(mesh, D) <= 4 and (strategy.zero == 0 or strategy.degree(mesh, D) > 1)

    def test_sequence_roles_are_tried_where_asked_for_and_where_the_sequence_is_long(self) -> None:
        (mesh,) = meshes(16)

        def used(options: SearchOptions) -> set[Role]:
            return {role for strategy in candidates(mesh, 4, 8, options).every for role in strategy.roles}

        short, long = (for_sequence(SearchOptions(), n) for n in (8192, 131072))
        assert used(short) == {D, IDLE, T, TS} and used(long) == {D, IDLE, T, TS, Role.ULYSSES, Role.RING}
        pinned = candidates(mesh, 4, 8, SearchOptions(ulysses=2, ring=4)).every
        assert pinned and all(s.degree(mesh, Role.ULYSSES) == 2 and s.degree(mesh, Role.RING) == 4 for s in pinned)
        assert {s.degree(mesh, T, TS) for s in pinned} == {1, 2}

    def test_hybrid_sharding_is_tried_where_data_parallelism_leaves_the_node(self) -> None:
        def copies(devices: int, **pins: int) -> set[tuple[int, int]]:
            (mesh,) = meshes(devices)
            found = candidates(mesh, 64, 8, SearchOptions(**pins)).every
            return {(s.zero, s.replicate) for s in found if s.degree(mesh, D) == devices}

        whole = {(zero, 1) for zero in range(4)}
        assert copies(8) == whole
        assert copies(32) == whole | {(zero, n) for zero in (1, 2, 3) for n in (2, 4)}
        assert copies(32, replicate=2) == {(zero, 2) for zero in (1, 2, 3)}
        assert copies(32, replicate=2, zero=3) == {(3, 2)}
        assert copies(32, replicate=3) == copies(32, replicate=32) == set()
        assert copies(32, replicate=1) == whole

    def test_axes_of_copies_and_of_shards_stay_apart(self) -> None:
        mesh = make_mesh(("a", 2), ("b", 2), ("c", 2))
        merged, ways = coalesce(mesh, [Strategy((D, D, D), 3, replicate=4), Strategy((D, D, D), 1, replicate=4)])
        assert merged == (Axis("data0", 4, 2), Axis("data1", 2, 1))
        assert all(way.data_axes(merged) == (merged[:1], merged[1:]) for way in ways)

    def test_coalesced_axes_are_named_after_their_use(self) -> None:
        mesh = make_mesh(("a", 2), ("b", 2), ("c", 2), ("d", 2))
        merged, ways = coalesce(mesh, [Strategy((D, D, T, T), 1), Strategy((D, D, TS, TS), 2)])
        assert merged == (Axis("data", 4, 4), Axis("tensor", 4, 1))
        assert [s.roles for s in ways] == [(D, T), (D, TS)] and [s.zero for s in ways] == [1, 2]

    def test_axes_that_layers_use_differently_stay_apart(self) -> None:
        mesh = make_mesh(("a", 2), ("b", 2), ("c", 2))
        merged, _ = coalesce(mesh, [Strategy((D, D, T)), Strategy((D, T, T))])
        assert [(axis.name, axis.size, axis.stride) for axis in merged] == [
            ("data", 2, 4),
            ("inner0", 2, 2),
            ("tensor", 2, 1),
        ]
        several, _ = coalesce(mesh, [Strategy((D, T, T)), Strategy((T, D, T))])
        assert [axis.name for axis in several] == ["inner0", "inner1", "tensor"]


class TestPlans:
    def test_json_round_trip_and_sums(self) -> None:
        for seed in range(12):
            graph, cluster, pricer = random_problem(seed)
            try:
                plan = search(graph, cluster, pricer)
            except InfeasibleError:
                continue
            assert Plan.from_json(plan.to_json()) == plan
            p = plan.prediction
            assert plan.device_count == cluster.count
            assert all(stage.memory.total <= stage.memory_limit_bytes for stage in plan.stages)
            parts = p.compute_s + p.communication_s + p.bubble_s + p.optimizer_s
            assert parts == pytest.approx(p.step_time_s)
            assert p.tokens_per_s_per_device == pytest.approx(graph.tokens / p.step_time_s / cluster.count)

    def test_tied_layers_agree(self) -> None:
        graph = chain(["a", "b", "b", "c"], 4, tied=(0, 3))
        free = chain(["a", "b", "b", "c"], 4)
        cluster, dearer = Devices(4, 400), 0
        for seed in range(3):
            plan = search(graph, cluster, RandomPricer(graph, seed, 0.5, 0.1), SearchOptions(target_gap=0.0))
            first, last = plan.layers[0].strategy, plan.layers[3].strategy
            assert (first.roles, first.zero) == (last.roles, last.zero)
            assert any("shared" in note for note in plan.notes)
            loose = search(free, cluster, RandomPricer(free, seed, 0.5, 0.1), SearchOptions(target_gap=0.0))
            assert loose.prediction.step_time_s <= plan.prediction.step_time_s * (1 + 1e-9)
            dearer += loose.prediction.step_time_s < plan.prediction.step_time_s * (1 - 1e-9)
        assert dearer > 0

    def test_more_devices_than_samples_are_idle_and_said_so(self) -> None:
        graph = chain(["a"], 1)
        plan = search(graph, Devices(3, 10_000), RandomPricer(graph, 0, 1.0, 0.0), SearchOptions(roles=()))
        assert plan.layers[0].strategy.roles == (IDLE,) and plan.mesh[0].name == "idle"
        assert any("cannot use every device" in note for note in plan.notes)

    def test_a_graph_that_cannot_be_split_in_time_gets_one_microbatch(self) -> None:
        graph = chain(["a", "a"], 4, why="the router's loss is over the whole batch")
        pricer = RandomPricer(graph, 1, 1.0, 0.0)
        plan = search(graph, Devices(2, 10_000), pricer)
        assert plan.microbatches == 1 and any("router" in note for note in plan.notes)
        with pytest.raises(UsageError, match="router"):
            search(graph, Devices(2, 10_000), pricer, SearchOptions(microbatches=2))

    def test_pins_hold(self) -> None:
        graph = chain(["a", "b", "b", "a"], 8)
        options = SearchOptions(pipeline=2, microbatches=4, schedule="gpipe", tensor=2, zero=1, recompute=True)
        plan = search(graph, Devices(8, 10_000), RandomPricer(graph, 3, 1.0, 0.1), options)
        assert (plan.pipeline, plan.microbatches, plan.schedule) == (2, 4, "gpipe")
        for layer in plan.layers:
            strategy = layer.strategy
            assert strategy.degree(plan.mesh, T, TS) == 2 and strategy.degree(plan.mesh, D) == 2
            assert strategy.zero == 1 and strategy.options.recomputes == "all"

    def test_1f1b_has_a_microbatch_for_every_stage(self) -> None:
        graph, cluster = chain(["a", "b", "b", "a"], 8), Devices(4, 10_000)
        pricer = RandomPricer(graph, 3, 1.0, 0.0)
        few = search(graph, cluster, pricer, SearchOptions(pipeline=4, microbatches=2, chunks=1))
        assert few.schedule == "gpipe"
        pinned = search(graph, cluster, pricer, SearchOptions(pipeline=4, schedule="1f1b"))
        assert pinned.schedule == "1f1b" and pinned.microbatches >= 4
        with pytest.raises(UsageError, match="4 stages, at most 2 microbatches"):
            search(graph, cluster, pricer, SearchOptions(pipeline=4, microbatches=2, schedule="1f1b"))

    def test_progress_is_told(self) -> None:
        told: list[str] = []
        graph = chain(["a", "a"], 2)
        search(graph, Devices(2, 10_000), RandomPricer(graph, 0, 1.0, 0.0), SearchOptions(progress=told.append))
        assert len(told) >= 2


class TestInfeasible:
    def test_the_limit_in_the_hint_would_do_and_less_would_not(self) -> None:
        checked = 0
        for seed in range(20):
            graph, cluster, pricer = random_problem(seed)
            try:
                search(graph, cluster, pricer, SearchOptions(memory_limit_bytes=20))
            except InfeasibleError as error:
                if error.hint is None or "bytes)" not in error.hint:
                    continue
                assert re.search(r"on stage \d \(layers? layers\.\d.*its largest layer is layers\.\d", error.message)
                need = int(error.hint.split("(")[1].split(" ")[0])
                search(graph, cluster, pricer, SearchOptions(memory_limit_bytes=need))
                with pytest.raises(InfeasibleError):
                    search(graph, cluster, pricer, SearchOptions(memory_limit_bytes=need - 1))
                checked += 1
        assert checked > 7

    def test_a_search_without_time_does_not_say_that_nothing_fits(self) -> None:
        graph = chain(["a", "b", "a"], 8)
        pricer = RandomPricer(graph, 0, 1.0, 0.0)

        def error(seconds: float) -> InfeasibleError:
            with pytest.raises(InfeasibleError) as found:
                search(graph, Devices(8, 20), pricer, SearchOptions(memory_limit_bytes=1, time_limit_s=seconds))
            return found.value

        assert error(60).message.startswith("no plan fits")
        late = error(1e-9)
        assert re.match(
            r"time ran out before a plan was found that fits .*: \d+ configurations were not priced", late.message
        )
        assert "--time-limit" in str(late.hint)

    def test_a_layer_without_any_way_is_named(self) -> None:
        graph = chain(["a", "b"], 2)
        with pytest.raises(InfeasibleError, match=r"layers\.0 \(a\).*tensor 2"):
            search(graph, Devices(2, 100), RandomPricer(graph, 0, 0.0, 0.0), SearchOptions(tensor=2))

    def test_pins_that_do_not_divide(self) -> None:
        graph = chain(["a", "b"], 6)
        pricer = RandomPricer(graph, 0, 1.0, 0.0)
        with pytest.raises(UsageError, match="pipeline of 4 stages"):
            search(graph, Devices(4, 100), pricer, SearchOptions(pipeline=4))
        with pytest.raises(UsageError, match="4 microbatches"):
            search(graph, Devices(4, 100), pricer, SearchOptions(microbatches=4))
        with pytest.raises(UsageError, match=r"a stage \(2\) do not divide into groups for data 2, tensor 2"):
            search(graph, Devices(4, 100), pricer, SearchOptions(pipeline=2, data=2, tensor=2))
        with pytest.raises(UsageError, match="tensor is 0"):
            SearchOptions(tensor=0)


class TestByHand:
    def test_mesh_and_cuts(self) -> None:
        graph = chain(["a", "b", "b", "b", "c"], 8)
        plan = manual_plan(graph, pipeline=2, data=2, tensor=2, sequence=True, zero=3, recompute=True, microbatches=2)
        assert plan.mesh == (Axis("data", 2, 2), Axis("tensor", 2, 1)) and plan.schedule == "1f1b"
        assert [(s.start, s.stop, s.devices) for s in plan.stages] == [(0, 3, (0, 4)), (3, 5, (4, 4))]
        assert plan.layers[0].strategy == Strategy((D, TS), 3, activations="full")
        assert Plan.from_json(plan.to_json()) == plan
        assert manual_plan(graph, pipeline=2, cuts=(1,), zero=2).mesh == (Axis("data", 1, 1),)

    def test_layers_of_different_degrees(self) -> None:
        graph = chain(["a", "b"], 4)
        plan = manual_plan(graph, mesh=make_mesh(("data", 2), ("inner", 2)), strategies={1: Strategy((D, T))})
        assert plan.layers[0].strategy.roles == (D, D) and plan.layers[1].strategy.roles == (D, T)

    def test_what_does_not_divide_is_refused(self) -> None:
        graph = chain(["a", "b"], 4)
        with pytest.raises(BatchError, match="multiple of 8"):
            manual_plan(graph, data=4, microbatches=2)
        with pytest.raises(UsageError, match="cuts"):
            manual_plan(graph, pipeline=2, cuts=(2,))
        with pytest.raises(UsageError, match="3 pipeline stages"):
            manual_plan(graph, pipeline=3)
        with pytest.raises(UsageError, match="layers"):
            manual_plan(graph, strategies={7: Strategy((D,))})

    @pytest.mark.parametrize("zero", [None, 0])
    def test_copies_of_shards_need_shards(self, zero: int | None) -> None:
        with pytest.raises(UsageError, match="replicate=2 copies the state that ZeRO shards, and ZeRO is 0"):
            manual_plan(chain(["a", "b"], 4), mesh=make_mesh(("data", 2), ("inner", 2)), zero=zero, replicate=2)

    def test_evaluate_agrees_with_the_search(self) -> None:
        graph = chain(["a", "b", "b"], 2)
        cluster, pricer = Devices(1, 10_000), RandomPricer(graph, 5, 1.0, 0.0)
        plan = search(graph, cluster, pricer)
        again = evaluate(
            graph,
            cluster,
            pricer,
            mesh=make_mesh(("axis0", 1)),
            stage_bounds=(0, 3),
            strategies=[layer.strategy for layer in plan.layers],
            schedule=plan.sized_schedule,
            precision=plan.precision,
        )
        assert (again.bound_s, again.gap, again.solver) == (0.0, 1.0, "given")
        assert again.layers == plan.layers and again.stages[0].memory == plan.stages[0].memory


class TestFullSize:
    def test_82_layers_on_1024_devices(self) -> None:
        graph, devices = transformer(), Devices(1024, int(72e9))
        plan = search(graph, devices, TransformerPricer(graph), SearchOptions(chunks=1))
        assert plan.gap <= 0.01 and plan.wall_time_s < 15
        assert 0.3 < plan.prediction.mfu < 0.55
        assert [axis.name for axis in plan.mesh][-1] == "tensor"
        every = search(graph, devices, TransformerPricer(graph))
        assert every.prediction.step_time_s <= plan.prediction.step_time_s
        assert every.gap <= 0.03  # the bound is of interleaved schedules, too

    def test_a_forced_pipeline_is_feasible_and_its_gap_small(self) -> None:
        graph = transformer()
        options = SearchOptions(pipeline=4, microbatches=64, target_gap=0.06)
        plan = search(graph, Devices(256, int(72e9)), TransformerPricer(graph), options)
        assert plan.pipeline == 4 and plan.gap <= 0.06
        assert all(stage.memory.total <= 72e9 for stage in plan.stages)

    def test_a_pipeline_that_waits_is_tried_with_several_stages_on_each_device(self) -> None:
        graph, cluster = (
            chain(["embed", *["block"] * 30, "head"], 1024, seq=TransformerPricer.seq),
            Devices(64, int(72e9)),
        )
        one, more, again = (
            search(graph, cluster, TransformerPricer(graph), SearchOptions(pipeline=8, microbatches=16, chunks=chunks))
            for chunks in (1, None, None)
        )
        assert (one.chunks, one.schedule) == (1, "1f1b")
        assert more.schedule == "interleaved-1f1b" and more.chunks > 1 and more.gap <= 0.05
        assert not any("gpipe" in note for note in one.notes)
        tried = "schedules searched: 1f1b, gpipe and interleaved-1f1b"
        assert any(note.startswith(tried) for note in more.notes)  # no other one: layers are compiled
        assert more.prediction.step_time_s < 0.95 * one.prediction.step_time_s
        assert (again.stages, again.layers, again.bound_s) == (more.stages, more.layers, more.bound_s)


class FlatPricer(RandomPricer):
    """Recomputation and ZeRO save bytes and cost nothing: only readers can tell the optima apart."""

    def layer(self, cls: str, mesh: tuple[Axis, ...], strategy: Strategy, microbatches: int) -> LayerPrice | None:
        saved = 5 if strategy.options.recomputes == "all" else 10
        return LayerPrice(1.0, 2.0, 0.0, 0.5, 10 - strategy.zero, 10, 20, saved, 1, 1e12)


def test_of_equal_optima_the_simplest_is_told() -> None:
    graph = chain(["a", "b", "a"], 4)
    plan = search(graph, Devices(2, 10_000), FlatPricer(graph, 0, 1.0, 0.0))
    assert {(layer.strategy.zero, layer.strategy.options.recomputes) for layer in plan.layers} == {(0, "")}
    tight = search(graph, Devices(2, 10_000), FlatPricer(graph, 0, 1.0, 0.0), SearchOptions(recompute=True, zero=3))
    assert all(layer.strategy.options.recomputes == "all" for layer in tight.layers)


class PeakPricer(FlatPricer):
    """Recomputation saves memory and costs a quarter of a layer's time; in the head it lowers the peak of transient memory alone."""

    def layer(self, cls: str, mesh: tuple[Axis, ...], strategy: Strategy, microbatches: int) -> LayerPrice | None:
        again = strategy.options.recomputes == "all"
        transient = 100 if cls == "head" and not again else 1
        saved = 10 if cls == "head" or not again else 5
        return LayerPrice(1.0, 2.75 if again else 2.0, 0.0, 0.5, 10, 10, 20, saved, transient, 1e12)


def test_a_slower_layer_that_lowers_the_peak_of_transient_memory_is_chosen() -> None:
    kinds = ["embed", *(f"block{i}" for i in range(4)), "head"]
    graph = chain([*kinds[:1], *(kind for kind in kinds[1:-1] for _ in range(8)), *kinds[-1:]], 1)
    limit = 34 * 50 + 1 + 2  # every layer keeps its activations, beside the lower peak
    plan = search(graph, Devices(1, limit), PeakPricer(graph, 0, 1.0, 0.0))
    assert [layer.name for layer in plan.layers if layer.strategy.options.recomputes] == [graph.layers[-1].name]
    assert plan.gap <= 0.01


def test_sequence_parallelism_that_comes_last_is_searched_only_to_close_a_gap() -> None:
    graph, cluster = chain(["a", "b"] * 9, 2), Devices(2, 10_000)
    plans = {}
    for gap in (0.9, 1e-6):
        options = SearchOptions(target_gap=gap, sequences=(("ulysses", 2),), sequences_last=True, time_limit_s=60)
        plans[gap] = search(graph, cluster, RandomPricer(graph, 3, 1.0, 1.0), options)
    named = {
        gap: any("ring attention and Ulysses were not" in note for note in plan.notes) for gap, plan in plans.items()
    }
    assert named == {0.9: True, 1e-6: False}
    assert plans[1e-6].prediction.step_time_s <= plans[0.9].prediction.step_time_s


class HeavyEndsPricer(FlatPricer):
    """The first and the last layer take as long as three others."""

    def layer(self, cls: str, mesh: tuple[Axis, ...], strategy: Strategy, microbatches: int) -> LayerPrice | None:
        times = 1 if cls == "block" else 3
        return LayerPrice(1.0 * times, 2.0 * times, 0.0, 0.5, 10, 10, 20, 1, 1, 1e12)


def test_the_first_and_the_last_of_many_stages_have_fewer_layers_if_their_own_take_long() -> None:
    graph, cluster = chain(["embed", *["block"] * 32, "head"], 2), Devices(2, 10_000)
    pricer = HeavyEndsPricer(graph, 0, 1.0, 0.0)
    options = SearchOptions(pipeline=2, microbatches=2, schedule="interleaved-1f1b", chunks=4, target_gap=0.0)
    plan = search(graph, cluster, pricer, options)
    bounds = tuple(itertools.accumulate((2, 5, 5, 5, 5, 5, 5, 2), initial=0))
    strategies = [plan.layers[0].strategy] * 34
    even = evaluate(
        graph, cluster, pricer, mesh=plan.mesh, stage_bounds=bounds, strategies=strategies,
        schedule=plan.sized_schedule, precision="bfloat16",
    )  # fmt: skip
    assert plan.prediction.step_time_s <= even.prediction.step_time_s * (1 + 1e-9)


class TestMixedDevices:
    """Stages on devices of different speed and memory."""

    def test_the_faster_half_gets_more_layers_and_the_smaller_memory_holds(self) -> None:
        graph = chain(["a"] * 12, 8)
        pricer = FlatPricer(graph, 0, 1.0, 0.0)
        options = SearchOptions(pipeline=2, microbatches=8, schedule="1f1b", target_gap=0.0)
        even = search(graph, Devices(2, 10_000), pricer, options)
        mixed = search(graph, Devices(2, 10_000, kinds=((1.0, 10_000), (2.0, 10_000))), SlowPricer(graph), options)
        assert [stage.stop - stage.start for stage in even.stages] == [6, 6]
        assert [stage.stop - stage.start for stage in mixed.stages] == [8, 4]
        tight = Devices(2, 10_000, kinds=((1.0, 300), (2.0, 10_000)))
        plan = search(graph, tight, SlowPricer(graph), options)
        assert plan.stages[0].memory.total <= plan.stages[0].memory_limit_bytes == 300
        assert plan.stages[0].stop < 8 and plan.prediction.step_time_s > mixed.prediction.step_time_s

    def test_evaluate_agrees(self) -> None:
        graph, cluster = chain(["a"] * 6, 4), Devices(2, 10_000, kinds=((1.0, 10_000), (2.0, 10_000)))
        plan = search(graph, cluster, SlowPricer(graph), SearchOptions(pipeline=2, microbatches=4, schedule="1f1b"))
        again = evaluate(
            graph, cluster, SlowPricer(graph), mesh=plan.mesh, stage_bounds=(0, plan.stages[0].stop, 6),
            strategies=[layer.strategy for layer in plan.layers], schedule=plan.sized_schedule, precision="bfloat16",
        )  # fmt: skip
        assert again.prediction.step_time_s == pytest.approx(plan.prediction.step_time_s)


class SlowPricer(FlatPricer):
    """Every layer alike, and slower where the devices are."""

    def __init__(self, graph: Graph, slower: float = 1.0) -> None:
        super().__init__(graph, 0, 1.0, 0.0, slower)

    def on(self, cluster: Devices) -> SlowPricer:
        return SlowPricer(self.graph, cluster.slower)

    def layer(self, cls: str, mesh: tuple[Axis, ...], strategy: Strategy, microbatches: int) -> LayerPrice | None:
        return LayerPrice(self.slower, 2 * self.slower, 0.0, 0.0, 10, 10, 20, 1, 1, 1e12)


def test_a_path_through_the_schedule_is_as_long_as_the_step_and_bounds_others() -> None:
    rng = random.Random(1)
    for _ in range(60):
        stages, m = rng.randint(2, 5), rng.randint(1, 9)
        for schedule in (Schedule("gpipe", stages, m), Schedule("1f1b", stages, m)):
            own, other = ([[rng.random() for _ in range(stages)] for _ in range(2)] for _ in range(2))
            step, paths = simulate(schedule, *own), longest_paths(schedule, np.array(own), 0.0)
            assert max((path * own).sum() for path in paths) == pytest.approx(step)
            assert all((path * other).sum() <= simulate(schedule, *other) * (1 + 1e-12) for path in paths)
            assert all((path * own).sum() > 0.9 * step for path in longest_paths(schedule, np.array(own), 0.9 * step))


@pytest.mark.parametrize(
    ("blocks", "count", "rows", "pipelines"),
    [(30, 64, 32, (2,)), slow(80, 128, 64, (2,)), slow(80, 128, 64, (4, 8)), slow(80, 128, 128, (2, 4, 8))],
)
def test_no_pinned_pipeline_is_faster_interleaved_than_the_plan(
    blocks: int, count: int, rows: int, pipelines: tuple[int, ...]
) -> None:
    """Every pipeline is searched under every schedule, also where the best plan under 1F1B and GPipe has none whose devices could wait."""
    graph = chain(["embed", *["block"] * blocks, "head"], rows, seq=TransformerPricer.seq)
    devices = Devices(count, int(72e9))
    state = driver.explore(graph, devices, TransformerPricer(graph), SearchOptions(chunks=1))
    assert state.best is not None and state.best[0].schedule.pipeline == 1
    plan = search(graph, devices, TransformerPricer(graph))
    for pipeline in pipelines:
        options = SearchOptions(schedule="interleaved-1f1b", pipeline=pipeline)
        step_s = search(graph, devices, TransformerPricer(graph), options).prediction.step_time_s
        assert plan.prediction.step_time_s <= step_s * 1.01 and plan.bound_s <= step_s * (1 + 1e-9)


def test_no_number_of_microbatches_is_faster_than_the_plan() -> None:
    """A choice whose first cuts are little slower than the best plan has its layers moved, too."""
    graph = chain(["embed", *["block"] * 40, "head"], 256, seq=TransformerPricer.seq)
    options = SearchOptions(schedule="chimera", pipeline=4)
    cluster, pricer = Devices(64, int(72e9)), TransformerPricer(graph)
    free = search(graph, cluster, pricer, options).prediction.step_time_s
    for microbatches in (32, 64):
        pinned = search(graph, cluster, pricer, dataclasses.replace(options, microbatches=microbatches))
        assert free <= pinned.prediction.step_time_s * 1.001, microbatches


def test_without_time_the_bound_is_the_arithmetic_at_peak() -> None:
    graph = transformer(64)
    cluster = Devices(64, int(72e9))
    plan = search(graph, cluster, TransformerPricer(graph), SearchOptions(time_limit_s=0.0))
    assert 0 < plan.bound_s == pytest.approx(plan.prediction.mfu * plan.prediction.step_time_s)
    assert any("bounded by FLOPs only" in note for note in plan.notes)


def test_configurations_without_prices_keep_the_bounds_that_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time ends when every configuration is opened, and none has a plan."""

    def late(graph: Graph, cluster: Devices, state: Any, opened: Any) -> list[Any]:
        state.deadline = 0.0
        return []

    monkeypatch.setattr(driver, "_further", late)
    graph = transformer(64)
    plan = search(graph, Devices(64, int(72e9)), TransformerPricer(graph))
    assert plan.bound_s > 0 and plan.gap < 1
    assert not any("bounded by FLOPs only" in note for note in plan.notes)


@pytest.mark.parametrize(("devices", "pipeline", "named"), [(8, None, True), (8, 1, False), (1, None, False)])
def test_schedules_are_named_as_left_out_only_where_a_pipeline_is_possible(
    devices: int, pipeline: int | None, named: bool
) -> None:
    graph = chain(["a"] * 8, 8)
    options = SearchOptions(time_limit_s=0.0, pipeline=pipeline)
    plan = search(graph, Devices(devices, 10_000), RandomPricer(graph, 0, 1.0, 0.0), options)
    assert any("schedules other than 1f1b" in note for note in plan.notes) == named


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_pinned_schedule_has_a_pipeline(schedule: str) -> None:
    graph = chain(["a"] * 4, 8)
    pricer, options = RandomPricer(graph, 0, 1.0, 0.0), SearchOptions(schedule=schedule)
    plan = search(graph, Devices(4, 10_000), pricer, options)
    assert (plan.schedule, plan.pipeline > 1) == (schedule, True)
    for devices, pipeline in ((1, None), (4, 1)):
        with pytest.raises(UsageError, match=f"schedule={schedule} orders the microbatches of a pipeline"):
            search(graph, Devices(devices, 10_000), pricer, dataclasses.replace(options, pipeline=pipeline))


def test_no_roles_are_data_parallelism_alone() -> None:
    (mesh,) = meshes(8)
    found = candidates(mesh, 8, 8, SearchOptions(roles=())).every
    assert {role for strategy in found for role in strategy.roles} == {D}


class ReducingPricer(FlatPricer):
    """Copies of a layer reduce their gradients once per step, in this many seconds."""

    reduction_s = 0.0

    def layer(self, cls: str, mesh: tuple[Axis, ...], strategy: Strategy, microbatches: int) -> LayerPrice | None:
        copies = strategy.degree(mesh, D)
        return LayerPrice(1 / copies, 2 / copies, 0.0, self.reduction_s * (copies > 1), 10, 10, 20, 1, 1, 1e12)


def test_a_smaller_data_degree_is_named_as_left_out_where_it_may_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain(["a"] * 2, 8)
    for reduction_s, pins, named in ((0.0, {}, False), (100.0, {}, True), (100.0, {"data": 8}, False)):
        monkeypatch.setattr(ReducingPricer, "reduction_s", reduction_s)
        options = SearchOptions(pipeline=1, microbatches=1, roles=(), pin=pins)
        plan = search(graph, Devices(8, 10_000), ReducingPricer(graph, 0, 1.0, 0.0), options)
        assert plan.layers[0].strategy.degree(plan.mesh, D) == 8
        assert any("smaller degrees of data parallelism" in note for note in plan.notes) == named
