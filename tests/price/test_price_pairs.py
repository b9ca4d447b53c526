"""What a pair of passes saves: no more than a simulation of the two passes in turns."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
from exactness import subject

from autopar.devices import Cluster, parse
from autopar.layer_price import LayerPrice
from autopar.plan import Role, Strategy
from autopar.price import Pricer
from autopar.price.order import overlapped_in_pairs
from autopar.search import SearchOptions, search
from autopar.search.manual import make_mesh

MESH, RELAYED = make_mesh(("expert", 4)), make_mesh(("relay", 2), ("expert", 2))
NODES = parse("2x2xH100-80GB")
SLOW = dataclasses.replace(
    NODES, host_s=0.0, gpu=dataclasses.replace(NODES.gpu, op_floor_s=0.0)
)  # its host never delays it


def in_turns(passes: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    """The seconds of two passes (pieces, all-to-alls between them) in turns, the first of which begins."""
    clock, running, at, flying = 0.0, 0, [0, 0], [0.0, 0.0]
    while any(k < len(pieces) for k, (pieces, _) in zip(at, passes, strict=True)):
        pieces, sent = passes[running]
        clock = max(clock, flying[running]) + pieces[at[running]]
        if at[running] < len(sent):
            flying[running] = clock + sent[at[running]]
        at[running] += 1
        if at[1 - running] < len(passes[1 - running][0]):
            running = 1 - running
    return clock


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("exchanges", [2, 4])
def test_a_pair_of_passes_saves_at_least_what_is_priced(layers: int, exchanges: int) -> None:
    """Of one mixture with relays or of two without."""
    rng = random.Random(f"{layers} {exchanges // 2}")
    for long in (0.3, 1.0, 3.0) * 20:
        forward, backward = ([rng.random() for _ in range(exchanges + 1)] for _ in range(2))
        sent, back = ([long * rng.random() for _ in range(exchanges)] for _ in range(2))
        spans = list(overlapped_in_pairs(forward, sent, backward, back))
        assert sorted(w for w, _ in spans) == sorted([*sent, *back])
        saved = sum(min(span) for span in spans)

        def joined(pieces: list[float], flights: list[float]) -> tuple[list[float], list[float]]:
            ends = [pieces[0], *pieces[1:-1], *([pieces[-1] + pieces[0], *pieces[1:-1]] * (layers - 1)), pieces[-1]]
            return ends, flights * layers

        passes = joined(backward, back), joined(forward, sent)
        alone = sum(sum(pieces) + sum(flights) for pieces, flights in passes)
        assert alone - in_turns(passes) >= layers * saved * (1 - 1e-12)
        if long < 1 and layers == 1 and all(w <= u for w, u in spans):
            assert in_turns(passes) == pytest.approx(sum(sum(pieces) for pieces, _ in passes))


def price(cluster: Cluster, roles: tuple[Role, ...] = (Role.EXPERT,), **options: str) -> LayerPrice:
    graph = subject("mixtral").graph
    pricer = Pricer(graph, cluster, "float32")
    layer = next(layer for layer in graph.layers if graph.classes[layer.cls].experts)
    found = pricer.layer(layer.cls, MESH if len(roles) == 1 else RELAYED, Strategy(roles, **options), 1)
    assert found is not None
    return found


def test_a_mixture_saves_communication_in_pairs_and_nothing_else_changes() -> None:
    pairs, none = price(SLOW, overlap="pairs"), price(SLOW, overlap="none")
    assert 0 < pairs.paired_s <= pairs.communication_s and none.paired_s == 0
    assert pairs.in_turns and not none.in_turns
    assert dataclasses.replace(pairs, paired_s=0.0, in_turns=0) == none


def test_all_to_alls_with_relays_are_hidden_and_those_with_experts_are_not() -> None:
    slow = dataclasses.replace(SLOW, gpu=dataclasses.replace(SLOW.gpu, matmul_efficiency=1e-6, memory_efficiency=1e-3))
    links = {name: dataclasses.replace(getattr(slow, name), latency_s=0.0) for name in ("intra", "inter")}
    slow = dataclasses.replace(slow, overlap_slowdown=0.0, collective_s=0.0, **links)
    relays = price(slow, (Role.EXPERT_RELAYED, Role.EXPERT), overlap="pairs")
    assert 0.4 * relays.communication_s < relays.paired_s < 0.6 * relays.communication_s
    direct = price(slow, overlap="pairs")
    assert 0.9 * direct.communication_s < direct.paired_s < direct.communication_s


def test_what_hides_at_full_cost_saves_nothing() -> None:
    assert price(dataclasses.replace(SLOW, overlap_slowdown=1.0), overlap="pairs").paired_s == 0


def test_what_waits_for_the_host_saves_nothing() -> None:
    """Launches of these small ops take longer than all that the device does."""
    assert price(NODES, overlap="pairs").paired_s == 0


def test_a_search_chooses_pairs_and_predicts_a_shorter_step() -> None:
    graph = subject("mixtral").graph
    pins = {"pipeline": 2, "microbatches": 4, "expert": 2, "schedule": "dualpipev"}
    steps: dict[str, float] = {}
    for value in ("pairs", "none"):
        own = {} if value == "pairs" else {"overlap": value}
        pricer = Pricer(graph, SLOW, "float32")
        plan = search(graph, SLOW, pricer, SearchOptions(precision="float32", pin={**pins, **own}))
        assert {layer.strategy.options.by_name["overlap"] for layer in plan.layers} == {value}
        assert plan.bound_s <= plan.prediction.step_time_s
        step = plan.prediction
        parts = step.compute_s + step.communication_s + step.bubble_s + step.optimizer_s
        assert parts == pytest.approx(step.step_time_s)
        steps[value] = step.step_time_s
    assert steps["pairs"] < steps["none"]
