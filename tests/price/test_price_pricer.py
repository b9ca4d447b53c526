"""``Pricer``: the same prices kept, resharding between layers, sends between stages."""

from __future__ import annotations

import dataclasses
import math
import time

import pytest
from places import EVIDENCE
from price_models import chain, llama_block, mlp, mlp_types, price_layer, replicated, solve_mlp, time_s
from tiers import slow

from autopar.devices import parse
from autopar.devices.calibration import apply_calibration
from autopar.devices.cluster import Network
from autopar.devices.measured import CollectiveTimes
from autopar.graph import Graph, LayerClass
from autopar.layer_price import LayerPrice
from autopar.plan import Axis, Role, Strategy
from autopar.price import Pricer, trace
from autopar.price.collective_pairs import pairs_of_conversion
from autopar.price.collectives import RankGroup, group_time_s, p2p_s
from autopar.price.layer import collective_s
from autopar.price.live_memory import PrefetchContext
from autopar.price.trainer import EMITTED
from autopar.schedules import Schedule
from autopar.search import SearchOptions, evaluate, manual_plan, reprice, search
from autopar.search.manual import make_mesh
from autopar.search.strategies import candidates, context_of
from autopar.sharding import Sharding
from autopar.techniques.sync import ALL_REDUCE
from autopar.trainers.model import OtherTrainer
from autopar.types import Collective, I, P, R, S, SpmdType
from autopar.validate.models import graph_of
from autopar.validate.rows import Architecture
from passes.conversions import conversion_steps

DATA, TENSOR, SEQUENCE = Role.DATA, Role.TENSOR, Role.TENSOR_SEQUENCE
CLUSTER = parse("2x8xH100-80GB")
MESH = (Axis("a", 2, 8), Axis("b", 4, 2), Axis("c", 2, 1))
B, SEQ, H = 32, 128, 256
BYTES = 2 * B * SEQ * H


@pytest.fixture(scope="module")
def pricer() -> Pricer:
    return Pricer(chain(mlp(B, SEQ, H, 4 * H), 4), CLUSTER, "bfloat16", solve_mlp)


def test_a_pricers_layer_is_price_layers(pricer):
    cls = pricer.graph.classes["mlp"]
    for roles in ((DATA, TENSOR, TENSOR), (DATA, DATA, SEQUENCE), (TENSOR, DATA, DATA)):
        for zero, again in ((0, "keep"), (3, "full")):
            strategy = Strategy(roles, zero, activations=again)
            sharding = Sharding((*MESH, Axis("microbatch", 2, 0)), (*map(mlp_types, roles), mlp_types(DATA)))
            elements = _numel(cls) // math.prod(a.size for a, r in zip(MESH, roles, strict=True) if r.shards_parameters)
            around = (
                PrefetchContext(elements, elements, elements) if zero else PrefetchContext()
            )  # all layers are of one class
            found = price_layer(cls, sharding, strategy, CLUSTER, "bfloat16", context=around)
            assert pricer.layer("mlp", MESH, strategy, 2) == found


def _numel(cls: LayerClass) -> int:
    return sum(parameter.numel for parameter in cls.parameters)


def test_roles_that_cannot_be_played_and_sizes_that_do_not_divide_have_no_price(pricer):
    assert pricer.layer("mlp", MESH, Strategy((DATA, DATA, DATA)), 4) is None
    assert pricer.layer("mlp", MESH, Strategy((DATA, DATA, DATA)), 2) is not None
    refusing = Pricer(
        pricer.graph, CLUSTER, "bfloat16", lambda cls, role, size: None if role is TENSOR else mlp_types(role)
    )
    assert refusing.layer("mlp", MESH, Strategy((DATA, DATA, TENSOR)), 1) is None


def test_the_solver_is_asked_once_for_each_role_and_size():
    asked = []

    def solve(cls, role, size):
        asked.append((role, size))
        return mlp_types(role)

    pricer = Pricer(chain(mlp(B, SEQ, H, 4 * H), 4), CLUSTER, "bfloat16", solve)
    for microbatches in (1, 2, 4):
        for roles in ((DATA, TENSOR, TENSOR), (TENSOR, TENSOR, DATA), (DATA, DATA, DATA)):
            pricer.layer("mlp", MESH, Strategy(roles), microbatches)
    assert sorted(asked, key=str) == sorted([(DATA, 1), (TENSOR, 8)], key=str)


def test_resharding_between_layers(pricer):
    same = Strategy((DATA, DATA, TENSOR))
    assert pricer.edge(0, MESH, same, Strategy((DATA, DATA, TENSOR), 3, activations="full"), 1) == 0
    # S(0) to I on the middle axis: a gather forward, a slice backward; one microbatch of two, halved by the outer axis
    whole = BYTES / 2 / 2
    to_tensor = pricer.edge(0, MESH, same, Strategy((DATA, TENSOR, TENSOR)), 2)
    assert to_tensor == pytest.approx(time_s(Collective.ALL_GATHER, whole, 4, 2, CLUSTER))
    # I to S(0): a slice forward, a gather backward
    assert pricer.edge(0, MESH, Strategy((DATA, TENSOR, TENSOR)), same, 2) == pytest.approx(to_tensor)
    # S(0) to S(1): all-to-all both ways, on the part that the other axes leave
    moved = pricer.edge(1, MESH, Strategy((DATA, DATA, DATA)), Strategy((DATA, DATA, SEQUENCE)), 1)
    assert moved == pytest.approx(2 * time_s(Collective.ALL_TO_ALL, BYTES / 8, 2, 1, CLUSTER))


def test_neighbouring_axes_convert_as_one():
    axes = (Axis("a", 2, 4), Axis("b", 4, 1))

    def edge_s(source: tuple[SpmdType, ...], target: tuple[SpmdType, ...], gradient: bool) -> float:
        pairs = pairs_of_conversion("", BYTES, conversion_steps(source, target, gradient))
        return sum(collective_s(pair, way, axes, CLUSTER) for pair in pairs for way in (pair.forward, pair.backward))

    both = edge_s((P, P), (I, I), True)
    assert both == pytest.approx(time_s(Collective.ALL_REDUCE, BYTES, 8, 1, CLUSTER))
    assert edge_s((S(0), S(0)), (R, R), False) == pytest.approx(time_s(Collective.ALL_GATHER, BYTES, 8, 1, CLUSTER))


def test_sends_between_stages(pricer):
    strategy = Strategy((DATA, DATA, TENSOR))
    assert pricer.p2p(0, MESH, strategy, 2) == pytest.approx(p2p_s(BYTES / 2 / 8, CLUSTER, True))
    node = Pricer(pricer.graph, parse("8xH100-80GB"), "bfloat16", solve_mlp)
    assert node.p2p(0, MESH[1:], Strategy((DATA, TENSOR)), 1) == pytest.approx(p2p_s(BYTES / 4, node.cluster, False))


def test_the_found_layout_of_a_llama_block_costs_two_reductions_each_way():
    pricer = Pricer(chain(llama_block(4, 64, 256, 8, 4, 512), 2), CLUSTER, "bfloat16")
    mesh = (Axis("t", 4, 1),)
    strategies = (Strategy((role,), overlap="none") for role in (TENSOR, Role.IDLE))
    found, alone = (pricer.layer("block", mesh, strategy, 1) for strategy in strategies)
    assert found is not None and alone is not None
    reduce = time_s(Collective.ALL_REDUCE, 2 * 4 * 64 * 256, 4, 1, CLUSTER)
    assert found.communication_s == pytest.approx(4 * reduce)
    assert found.parameters_bytes < alone.parameters_bytes / 3.9 and found.flops == alone.flops


def test_equal_layers_are_priced_once():
    """A plan of 126 equal layers costs hardly more than one of 2, with a pricer that is new as with one that knows them."""
    cls = llama_block(8, 64, 256, 8, 4, 512)
    role_types = {role: replicated(cls) for role in (DATA, TENSOR)}

    def seconds(layers: int, known: bool) -> float:
        graph, best = chain(cls, layers), math.inf
        pricer = Pricer(graph, CLUSTER, "bfloat16", lambda _, role, __: role_types[role])
        for _ in range(7):
            trace._traces.clear()
            pricer = pricer if known else Pricer(graph, CLUSTER, "bfloat16", lambda _, role, __: role_types[role])
            start = time.process_time()
            evaluate(
                graph,
                CLUSTER,
                pricer,
                mesh=MESH[1:],
                stage_bounds=[0, layers // 2, layers],
                strategies=[Strategy((DATA, TENSOR))] * layers,
                schedule=Schedule("1f1b", 2, 2),
                precision="bfloat16",
            )
            best = min(best, time.process_time() - start)
        return best

    new = seconds(2, known=False)
    assert seconds(126, known=False) < 2 * new
    assert seconds(126, known=True) < new


def test_a_call_is_fast_once_a_class_is_known(pricer):
    pricer.layer("mlp", MESH, Strategy((DATA, TENSOR, SEQUENCE)), 1)
    calls, start = 0, time.process_time()
    for microbatches in (1, 2, 4, 8):
        for roles in ((DATA, TENSOR, TENSOR), (DATA, DATA, SEQUENCE), (TENSOR, DATA, DATA), (SEQUENCE,) * 3):
            for zero in range(4):
                for again in ("keep", "full"):
                    pricer.layer("mlp", MESH, Strategy(roles, zero, activations=again), microbatches)
                    calls += 1
    assert (time.process_time() - start) / calls < 1e-3


def test_layers_gathered_ahead_cost_memory_under_zero_3_and_nothing_else():
    """Chains of one class: each layer more that is gathered ahead is one more all-gather's result."""
    cls, mesh = mlp(B, SEQ, H, 4 * H), (Axis("data", 8, 1),)
    one = Pricer(chain(cls, 4), CLUSTER, "bfloat16", solve_mlp)
    gathered, smaller = 2 * _numel(cls), parse("1x4xH100-80GB")

    def ahead(n: int, pricer: Pricer = one) -> Pricer:
        return pricer.of_program(n, ALL_REDUCE)

    def prices(zero: int, again: str = "keep") -> list[LayerPrice]:
        found = (ahead(n).layer("mlp", mesh, Strategy((DATA,), zero, activations=again), 2) for n in (1, 2, 3))
        return [price for price in found if price is not None]

    for zero, again in ((3, "keep"), (3, "full"), (2, "keep")):
        first, second, third = prices(zero, again)
        assert dataclasses.replace(second, transient_bytes=first.transient_bytes) == first
        more = second.transient_bytes - first.transient_bytes
        assert more == (gathered if zero == 3 else more) >= 0
        assert third.transient_bytes >= second.transient_bytes
    for zero, again in ((0, "keep"), (1, "keep"), (3, "full:2")):
        assert len(set(prices(zero, again))) == 1
    assert ahead(1) is one and ahead(2) is ahead(2)
    node = ahead(2, one.on(smaller))
    assert node is ahead(2, one.on(smaller)) and (node.prefetch, one.prefetch) == (2, 1)
    assert ahead(2).on(smaller).prefetch == 2


def test_a_pinned_prefetch_is_planned_and_priced():
    graph = chain(mlp(B, SEQ, H, 4 * H), 4)
    pricer = Pricer(graph, CLUSTER, "bfloat16", solve_mlp)
    pins = {"data": CLUSTER.count, "zero": 3, "pipeline": 1, "microbatches": 1, "recompute": "none"}
    one, two = (search(graph, CLUSTER, pricer, SearchOptions(prefetch=n, **pins)) for n in (None, 2))
    assert (one.prefetch, two.prefetch) == (1, 2)
    assert two.prediction.step_time_s == one.prediction.step_time_s
    assert two.stages[0].memory.total - one.stages[0].memory.total == 2 * _numel(graph.classes["mlp"])


@pytest.mark.parametrize(
    ("where", "overlap"),
    [
        ("2x8xH100-80GB", "halves"),
        ("8", "tensor"),
        ("8", "none"),
        *(slow(*case) for case in (("2x8xH100-80GB", "tensor"), ("2x8xH100-80GB", "none"), ("8", "halves"))),
    ],
)
def test_no_strategy_is_faster_than_the_bound_without_zero_and_recomputation(where, overlap):
    cluster = parse(where)
    pricer = Pricer(chain(llama_block(8, 128, 256, 8, 4, 512), 3), cluster, "bfloat16")
    mesh = MESH if cluster.count == 16 else (Axis("a", 2, 4), Axis("b", 2, 2), Axis("c", 2, 1))
    tightest = dict.fromkeys((1, 2), 0.0)
    for compiled in (False, True):
        pin = {"overlap": overlap, "compile": compiled, "offload": "any"}
        options = SearchOptions(allow=("int8_activations",), pin=pin)
        for m in tightest:
            found = candidates(
                mesh, 8 // m, cluster.gpus_per_node, options, context=context_of(options, several_microbatches=m > 1)
            )
            for roles in found.roles:
                some = dataclasses.replace(found, roles=(roles,))
                least_s = pricer.least_time_s("block", mesh, some, m)
                priced = [p for s in some.every if (p := pricer.layer("block", mesh, s, m)) is not None]
                assert bool(priced) == math.isfinite(least_s)
                for price in priced:
                    assert 0 < least_s <= (price.forward_s + price.backward_s) * (1 + 1e-12)
                    tightest[m] = max(tightest[m], least_s / (price.forward_s + price.backward_s))
    assert min(tightest.values()) > 0.95


MIXTURE = Architecture(3, 256, 8, 8, 512, True, 1024, 128, False, False, 16, 2)
CPUS = parse("8")
PROFILED = dataclasses.replace(CLUSTER, gpu=apply_calibration(parse("1xH100-80GB"), EVIDENCE / "h100.json").gpu)
WAITING = dataclasses.replace(CPUS, collective_times=CollectiveTimes({}, {2: 1e-4, 4: 3e-4, 8: 5e-4}))


@pytest.mark.parametrize(
    ("cluster", "trainer", "sync"),
    [
        (CLUSTER, EMITTED, ALL_REDUCE),
        (CLUSTER, EMITTED, "stale:2"),
        (CLUSTER, OtherTrainer(overlap_data=2, overlap_tensor=0.5, overlap_experts=True, step_bytes=4), ALL_REDUCE),
        (CPUS, EMITTED, ALL_REDUCE),
        (PROFILED, EMITTED, ALL_REDUCE),
        (WAITING, EMITTED, ALL_REDUCE),
    ],
    ids=["emitted", "late gradients", "other trainer", "CPUs", "profiled GPUs", "CPUs that wait"],
)
def test_candidates_have_the_same_prices_together_and_alone(cluster, trainer, sync):
    graph, checked = graph_of(MIXTURE, 64), 0
    mesh = make_mesh(*((name, 2) for name in "abcd"[: cluster.count.bit_length() - 1]))
    options = SearchOptions(allow=("int8_activations",), pin={"offload": "any"})
    together, alone = (Pricer(graph, cluster, "bfloat16", trainer=trainer).of_program(2, sync) for _ in range(2))
    for cls in graph.classes:
        known = {"experts": graph.classes[cls].experts, "context": context_of(options, several_microbatches=True)}
        every = candidates(mesh, 32, 4, options, **known).every[::3]
        numbers, prices = together.layers(cls, mesh, every, 2)
        each = [alone.layer(cls, mesh, strategy, 2) for strategy in every]
        assert numbers.tolist() == [k for k, price in enumerate(each) if price is not None]
        assert list(prices) == [price for price in each if price is not None]
        assert all(price is together.layer(cls, mesh, every[k], 2) for k, price in zip(numbers, prices, strict=True))
        checked += len(prices)
    assert checked > 200


def _tied() -> Graph:
    """Three layers, of which the first and the last share their first parameter."""
    graph = chain(mlp(B, SEQ, H, 4 * H), 3)
    first, middle, last = graph.layers
    shared = dataclasses.replace(last, parameters=(first.parameters[0], *last.parameters[1:]))
    return dataclasses.replace(graph, layers=(first, middle, shared))


@pytest.mark.parametrize(
    ("zero", "microbatches", "schedule"), [(2, 1, None), (3, 1, None), (2, 2, None), (2, 2, "chimera")]
)
def test_a_gradient_that_layers_share_is_deducted_where_their_prices_have_it(zero, microbatches, schedule):
    """Under ZeRO 2 and 3 a price has the gradients of earlier microbatches, of which a step of one has none."""
    graph, stages = _tied(), 2 if schedule else 1
    mesh, strategy = (Axis("data", 16 // stages, 1),), Strategy((DATA,), zero)
    pricer = Pricer(graph, CLUSTER, "bfloat16", solve_mlp).with_copies(stages)
    gradients = pricer.tied(2, graph.layers[0].parameters[0], mesh, strategy, microbatches)[1]
    assert gradients == (4 * 4 * H * H * stages // 16 if microbatches > stages else 0)
    if schedule is None:
        plan = manual_plan(graph, data=16, zero=zero, microbatches=microbatches, precision="bfloat16")
        memory = reprice(graph, CLUSTER, pricer, plan, plan.precision).stages[0].memory
        price = pricer.layer("mlp", mesh, strategy, microbatches)
        assert price is not None and memory.gradients == 3 * price.gradients_bytes - gradients >= 0


def test_late_gradients_that_layers_share_are_stored_once():
    graph = _tied()
    plain = Pricer(graph, CLUSTER, "bfloat16", solve_mlp)
    late, name = plain.of_program(1, "stale:3"), graph.layers[0].parameters[0]
    for mesh, role, times in (((Axis("a", 16, 1),), DATA, 5), ((Axis("a", 16, 1),), TENSOR, 1)):
        whole, found = (p.tied(2, name, mesh, Strategy((role,)), 1) for p in (plain, late))
        assert found == (whole[0], times * whole[1], whole[2]) and whole[1] > 0


def test_the_host_of_a_pipeline_takes_longer_for_each_step_of_a_collective():
    """The host's time bounds a layer's passes from below."""
    found: dict[tuple[bool, float], float] = {}
    for hop_s in (0.0, 1e-3):
        network = Network((1, 2), (1e11, 5e10), (1e11, 5e10), 8, hop_s=1e-6, pipelined_host_s=hop_s, source="")
        pricer = Pricer(
            chain(mlp(B, SEQ, H, 4 * H), 4), dataclasses.replace(CLUSTER, network=network), "bfloat16", solve_mlp
        )
        for mesh in (MESH, MESH[1:]):  # all devices, a stage's
            roles = (DATA,) * (len(mesh) - 2)
            price = pricer.layer("mlp", mesh, Strategy((*roles, TENSOR, DATA)), 1)
            assert price is not None
            found[mesh is MESH, hop_s] = price.forward_s + price.backward_s
    assert found[True, 0.0] == found[True, 1e-3]
    # one collective over 4 ranks in each pass, and the host is slower than the device without these steps, too
    assert found[False, 1e-3] - found[False, 0.0] == pytest.approx(6e-3)
    seen = dataclasses.replace(CLUSTER, pipelined=True)
    assert seen.network is None and seen.host_collective_s(4) == seen.host_s


def test_a_group_on_many_nodes_sends_as_fast_as_its_gpus_and_no_faster_than_its_ring():
    network = Network((1, 2, 4), (8e11, 4e11, 1e11), (8e11, 4e11, 1e11), 8, hop_s=0.0, pipelined_host_s=0.0, source="")
    cluster = dataclasses.replace(parse("4x8xH100-80GB"), network=network, collective_s=0.0)

    def bus(size: int, per_node: int, nodes: int) -> float:
        members = RankGroup(size, per_node, nodes, 0)
        return (size - 1) / size * 1e9 / group_time_s(Collective.ALL_GATHER, 1e9, members, cluster)

    assert bus(32, 8, 4) == pytest.approx(1e11)  # the ring of all ranks
    assert bus(4, 1, 4) == pytest.approx(4e11 / 8)  # one GPU in each node
    assert bus(16, 4, 4) == pytest.approx(2e11)  # half of the GPUs
    assert bus(8, 8, 1) == pytest.approx(8e11, rel=0.05)  # with the latency of NVLink
