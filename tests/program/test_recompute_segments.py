"""Layers that are recomputed as one: which they are, what they hold, the search for them, and the text that does it."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from exactness import subject
from price_models import chain, mlp, solve_mlp
from search_models import Devices, RandomPricer, brute_force
from search_models import chain as synthetic
from torch import nn

from autopar.devices import parse
from autopar.emit.program import model_source
from autopar.errors import InfeasibleError, UsageError
from autopar.layer_price import LayerPrice
from autopar.plan import Plan, Role, Strategy
from autopar.price import Pricer
from autopar.program.recomputing import as_one
from autopar.schedules import Schedule
from autopar.search import SearchOptions, evaluate, make_mesh, manual_plan, search
from autopar.search.options import pins_by_layer
from autopar.search.strategies import candidates, context_of
from autopar.search.timeline import kept
from autopar.segments import segments, shortened
from autopar.shard import plan_shardings
from autopar.techniques.activations import ACTIVATIONS, full
from passes.stages import cut_stages

LAYERS, BATCH = 10, 8
GRAPH = chain(mlp(BATCH, 128, 256, 1024), LAYERS)
CLUSTER = parse("2xH100-80GB")
PRICER = Pricer(GRAPH, CLUSTER, "bfloat16", solve_mlp)
MESH = make_mesh(("data", 1))


def recomputed(segment: int) -> Strategy:
    return Strategy((Role.DATA,), activations=full(segment))


def priced(segment: int, schedule: str = "gpipe") -> Plan:
    return evaluate(
        GRAPH, CLUSTER, PRICER, mesh=MESH, stage_bounds=(0, 3, LAYERS), strategies=[recomputed(segment)] * LAYERS,
        schedule=Schedule(schedule, 2, 4), precision="bfloat16",
    )  # fmt: skip


class TestWhichLayers:
    def test_a_run_is_cut_from_its_first_layer_on_and_ends_with_its_stage_or_strategy(self) -> None:
        ways = [recomputed(2)] * 5 + [recomputed(3)] * 4 + [Strategy((Role.DATA,))]
        groups = segments(GRAPH, ways, (0, 3, LAYERS))
        assert [list(group) for group in groups] == [[0, 1], [2], [3, 4], [5, 6, 7], [8], [9]]

    def test_a_segment_is_no_longer_than_its_run(self) -> None:
        told = shortened(GRAPH, [recomputed(4)] * LAYERS, (0, 3, LAYERS))
        assert [way.options.segment_layers for way in told] == [3] * 3 + [4] * 7

    def test_embeddings_and_heads_are_alone(self) -> None:
        graph = subject("llama").graph
        plan = manual_plan(graph, segment=3)
        assert [layer.strategy.options[ACTIVATIONS] for layer in plan.layers] == ["full", *["full:3"] * 4, "full"]
        assert Plan.from_json(plan.to_json()) == plan

    def test_layers_that_read_more_than_the_layer_before_are_never_one(self) -> None:
        classes = ["a", "a", "a", "b"]
        assert synthetic(classes, 4).chains == {"a": 3, "b": 1}
        assert synthetic(classes, 4, skips=((0, 2),)).chains["a"] == 1
        assert synthetic(classes, 4, tied=(0, 1)).chains["a"] == 1
        assert synthetic(["a", "b", "a", "a"], 4).chains == {"a": 2, "b": 1}


class TestMemory:
    def test_a_stage_keeps_the_first_inputs_of_its_segments(self) -> None:
        alone = PRICER.layer(GRAPH.layers[1].cls, MESH, recomputed(1), 4)
        plain = PRICER.layer(GRAPH.layers[1].cls, MESH, Strategy((Role.DATA,)), 4)
        assert alone is not None and plain is not None
        for segment in (2, 3, 4):
            price = PRICER.layer(GRAPH.layers[1].cls, MESH, recomputed(segment), 4)
            assert price is not None and price.segment_saved_bytes == alone.saved_bytes
            assert price.saved_bytes == alone.saved_bytes // segment
            assert price.forward_s == alone.forward_s and price.backward_s == alone.backward_s
            more = (segment - 1) * plain.saved_bytes
            assert price.transient_bytes == pytest.approx(alone.transient_bytes + more, abs=2)
            held = priced(segment).stages
            for stage in held:
                inputs = -(-(stage.stop - stage.start) // min(segment, stage.stop - stage.start))
                assert stage.memory.activations == 4 * inputs * alone.saved_bytes
        assert sum(kept([alone] * 5)) == 5 * alone.saved_bytes

    def test_shares_are_a_lower_bound_of_what_is_kept(self) -> None:
        first, second = (LayerPrice(0, 0, 0, 0, 0, 0, 0, 7, 0, 0, segment=3, segment_saved_bytes=21) for _ in range(2))
        assert kept([first] * 7) == [21, 0, 0, 21, 0, 0, 21]
        assert kept([first, first, second, second]) == [21, 0, 21, 0]  # of another class, however alike
        for number in range(1, 9):
            assert sum(kept([first] * number)) >= sum(p.saved_bytes for p in [first] * number)

    def test_zero_3_gathers_once_more_but_for_the_last_layer(self) -> None:
        mesh, cluster = make_mesh(("data", 2)), parse("2x1xH100-80GB")
        cluster = replace(
            cluster, gpu=replace(cluster.gpu, op_floor_s=0.0), host_s=0.0
        )  # a slow host would hide copies
        pricer = Pricer(chain(mlp(2, 1, 1024, 4096), 4), cluster, "bfloat16", solve_mlp)  # little to hide gathers under
        name = GRAPH.layers[1].cls

        def backward_s(segment: int) -> float:
            price = pricer.layer(name, mesh, replace(recomputed(segment), zero=3), 1)
            assert price is not None
            return price.backward_s

        once = 2 * (backward_s(2) - backward_s(1))
        assert once > 0
        assert backward_s(4) - backward_s(1) == pytest.approx(3 / 4 * once)


class TestText:
    def test_each_segment_is_one_call_of_its_stage(self) -> None:
        graph = subject("llama").graph
        plan = manual_plan(graph, tensor=2, segment=3)
        text = model_source(cut_stages(graph, plan, plan_shardings(graph, plan)))
        assert re.search("from runtime import .*recomputing", text) and text.count("recomputing.as_one(") == 2
        assert 'recomputing.as_one((self.model_layers["3"],), hidden' in text
        assert text.count("checkpoint(self.compute") == 2  # embedding and head

    def test_the_arguments_alone_are_kept_until_the_backward(self) -> None:
        layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()).double()
        x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        runs: list[int] = []
        layers[0].register_forward_hook(lambda *_: runs.append(1))
        expected = torch.autograd.grad(layers(x).sum(), [x, *layers.parameters()])
        stored: list[torch.Tensor] = []
        runs.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: stored.append(t) or t, lambda t: t):
            out = as_one(tuple(layers), x)
        assert len(runs) == 1 and [t is x for t in stored] == [True]
        found = torch.autograd.grad(out.sum(), [x, *layers.parameters()])
        assert len(runs) == 2
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class TestPins:
    def test_several_layers_mean_full_recomputation(self) -> None:
        pinned = pins_by_layer(GRAPH, SearchOptions(pin={"layers.0-3.segment": 2}))
        context = context_of(SearchOptions(), chain=8)
        assert ACTIVATIONS.allowed(pinned[0].of, context) == ("full:2",)
        assert ACTIVATIONS.allowed(pinned[4].of, context) == ("keep", "selective", "full")
        plan = search(GRAPH, CLUSTER, PRICER, SearchOptions(segment=2, precision="bfloat16"))
        runs = [layer.strategy for layer in plan.layers]
        assert all(way.options[ACTIVATIONS] == "full:2" for way in runs)
        free = search(GRAPH, CLUSTER, PRICER, SearchOptions(pin={"segment": 1}, precision="bfloat16"))
        assert not any(layer.strategy.options[ACTIVATIONS] == "full" for layer in free.layers)

    @pytest.mark.parametrize("how", ["none", "selective"])
    def test_other_recomputation_contradicts_it(self, how: str) -> None:
        with pytest.raises(UsageError, match=f"pinned to recompute={how} and segment=2, which contradict"):
            pins_by_layer(GRAPH, SearchOptions(recompute=how, pin={"layers.3.segment": 2}))
        with pytest.raises(UsageError, match="must be a whole number from 1"):
            SearchOptions(pin={"segment": 0})

    @pytest.mark.parametrize(("own", "segment"), [("full:2", 4), ("full:4", 2), ("full:2", 1)])
    def test_another_number_of_layers_contradicts_it(self, own: str, segment: int) -> None:
        words = f"pinned to activations={own} and segment={segment}, which contradict"
        with pytest.raises(UsageError, match=words):
            pins_by_layer(GRAPH, SearchOptions(activations=own, segment=segment))
        with pytest.raises(UsageError, match=words):
            manual_plan(GRAPH, activations=own, segment=segment)
        for number in (2, 4):
            assert tried(SearchOptions(activations=f"full:{number}", segment=number), 4, True) == (f"full:{number}",)
            assert tried(SearchOptions(activations="full", segment=number), 4, True) == (f"full:{number}",)

    def test_what_it_keeps_stays_on_the_device(self) -> None:
        with pytest.raises(UsageError, match="pinned to segment=2 and offload=activations, which contradict"):
            pins_by_layer(GRAPH, SearchOptions(segment=2, offload="activations"))
        for options in ({"recompute": "none"}, {"recompute": "selective"}, {"offload": "activations"}):
            with pytest.raises(UsageError, match="every layer is pinned to .*, which contradict each other"):
                manual_plan(GRAPH, segment=2, **options)  # type: ignore[arg-type]
        tried = candidates(MESH, BATCH, 8, SearchOptions(segment=2, offload="any")).every
        assert not any(way.options.saved_in for way in tried)

    def test_sizes_end_at_twice_the_square_root(self) -> None:
        options = SearchOptions()
        segmented = tuple(full(n) for n in (1, 2, 3, 4, 6, 8))
        assert tried(options, 32, True) == ("keep", "selective", *segmented)
        assert tried(options, 32, False) == ("keep", "selective", "full")
        assert tried(SearchOptions(segment=4), 1, True) == ("full",)
        assert tried(SearchOptions(segment=5), 32, False) == ("full:5",)
        assert tried(SearchOptions(activations="full:5"), 32, True) == ("full:5",)
        assert tried(SearchOptions(activations="full"), 32, True) == segmented


def tried(options: SearchOptions, chain: int, segments: bool) -> tuple[str, ...]:
    return ACTIVATIONS.allowed(options.common.of, context_of(options, chain=chain, segments=segments))


class KeepingPricer(RandomPricer):
    """Random prices of layers that save much and weigh little."""

    def layer(self, cls: str, mesh: Any, strategy: Strategy, microbatches: int) -> LayerPrice | None:
        drawn = super().layer(cls, mesh, strategy, microbatches)
        if drawn is None:
            return None
        rng, segment = self._rng("kept", cls, mesh, strategy, microbatches), strategy.options.segment_layers
        saved = rng.randint(20, 50) if strategy.options.recomputes == "all" else rng.randint(50, 120)
        return replace(
            drawn, parameters_bytes=drawn.parameters_bytes // 4, gradients_bytes=drawn.gradients_bytes // 4,
            optimizer_bytes=drawn.optimizer_bytes // 8, saved_bytes=saved // segment, segment_saved_bytes=saved * (segment > 1),
            transient_bytes=rng.randint(1, 30) + (segment - 1) * rng.randint(1, 15),
        )  # fmt: skip


PINS: list[dict[str, Any]] = [
    {},
    {},
    {},
    {},
    {},
    {"segment": 2},
    {"segment": 3},
    {"segment": 1},
    {"a.segment": 2},
    {"schedule": "gpipe"},
]


def problem(seed: int) -> tuple[Any, Devices, KeepingPricer, SearchOptions]:
    rng = random.Random(f"segments {seed}")
    count = rng.choice([3, 3, 4])
    classes = sorted(rng.choice(rng.choice([["a"], ["a", "b"]])) for _ in range(count))
    graph = synthetic(classes, rng.choice([1, 2, 4]), (0, count - 1) if rng.random() < 0.15 else ())
    limits = [rng.choice([90, 120, 150, 180, 220, 260]) for _ in range(2)]
    kinds = tuple((rng.choice([1.0, 2.0]), limit) for limit in limits) if rng.random() < 0.2 else ()
    options = SearchOptions(target_gap=0.0, time_limit_s=60, pin=rng.choice(PINS))
    pricer = KeepingPricer(graph, seed, 0.5, rng.choice([0.0, 0.3, 2.0]))
    return graph, Devices(rng.choice([1, 2, 2]), min(limits), kinds=kinds), pricer, options


@pytest.mark.slow
def test_same_optimum_and_same_infeasible_set_as_brute_force() -> None:
    pinned = found = nothing = 0
    for seed in range(60):
        graph, cluster, pricer, options = problem(seed)
        best = brute_force(graph, cluster, pricer, options)
        try:
            plan = search(graph, cluster, pricer, options)
        except InfeasibleError:
            assert best is None, seed
            nothing += 1
            continue
        assert best is not None and plan.prediction.step_time_s == pytest.approx(best, rel=1e-9), seed
        assert plan.gap <= 1e-6, seed
        if any(layer.strategy.options.segment_layers > 1 for layer in plan.layers):
            pinned += "segment" in str(options.pins)
            found += "segment" not in str(options.pins)
    assert pinned > 3 and found > 3 and nothing > 3


def test_what_fits_in_segments_alone_is_found() -> None:
    """Less memory than full recomputation layer by layer takes: the search goes on to segments, and says their size."""
    options = SearchOptions(pipeline=2, schedule="gpipe", data=1, memory_limit_bytes=1, precision="bfloat16")
    with pytest.raises(InfeasibleError, match="no plan fits") as error:
        search(GRAPH, CLUSTER, PRICER, replace(options, segment=1))
    need = int(re.search(r"\((\d+) bytes\)", error.value.hint or "")[1])  # type: ignore[index]
    found = search(GRAPH, CLUSTER, PRICER, replace(options, memory_limit_bytes=need - 1))
    assert all(stage.memory.total < need for stage in found.stages)
    assert any(layer.strategy.options.segment_layers > 1 for layer in found.layers)
    enough = search(GRAPH, CLUSTER, PRICER, replace(options, memory_limit_bytes=need))
    assert not any(
        layer.strategy.options.segment_layers > 1 for layer in enough.layers
    )  # what fits without does without
