"""Expert parallelism as the search finds it: its candidates, where it pays, what pins mean, and that what was found is exact."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from unittest import mock

import expert_models
import pytest
from exactness import subject
from tiers import slow
from workers import WorkerPool

from autopar.checks.collectives import check_collectives
from autopar.cli.pricing import price_plan
from autopar.devices import parse
from autopar.emit import emit
from autopar.errors import ProgramError, UsageError
from autopar.expert_loads import ExpertLoads
from autopar.flow import parameter_nodes
from autopar.graph import Graph
from autopar.ops.experts import of_experts
from autopar.plan import Axis, Plan, Role, Strategy
from autopar.planning import write_plan
from autopar.price import Pricer
from autopar.schedules import NO_PIPELINE, Schedule
from autopar.search import SearchOptions, search
from autopar.search.manual import filled_plan, manual_plan
from autopar.search.options import pins_by_layer
from autopar.search.prices import Prices
from autopar.search.problem import Configuration, meshes
from autopar.search.strategies import TENSOR_ROLES, candidates
from autopar.shard import annotate
from autopar.shard.plan import role_types
from autopar.types import Collective, R, S
from autopar.validate.models import graph_of
from autopar.validate.rows import Architecture
from autopar.verify import Subject, check_plan, kind, make_subject

ROLES = (*TENSOR_ROLES, Role.EXPERT)


@pytest.fixture(scope="module")
def mixtral() -> Graph:
    """Two blocks, with thirty-two times as many parameters in experts as a token meets."""
    return graph_of(Architecture(2, 2048, 16, 16, 4096, True, 1024, 2048, False, False, 64, 2), 64)


def degrees(plan: Plan, graph: Graph) -> set[tuple[bool, int]]:
    """For every layer, whether it has experts, and over how many devices they are distributed."""
    return {
        (graph.classes[layer.cls].experts > 0, layer.strategy.degrees(plan.mesh)["expert"]) for layer in plan.layers
    }


def found(graph: Graph, devices: str, precision: str = "bfloat16", **options: object) -> Plan:
    cluster = parse(devices)
    chosen = SearchOptions(precision=precision, **options)  # type: ignore[arg-type]
    return search(graph, cluster, Pricer(graph, cluster, precision), chosen)


class TestCandidates:
    def test_degrees_divide_the_experts_and_the_batch(self) -> None:
        (mesh,) = meshes(16)
        tried = candidates(mesh, 16, 8, SearchOptions(roles=ROLES), experts=4).every
        assert {s.degree(mesh, Role.EXPERT) for s in tried} == {1, 2, 4}
        assert all(s.degree(mesh, Role.DATA, Role.EXPERT) <= 16 for s in tried)
        assert all(Role.IDLE not in s.roles for s in tried if Role.EXPERT in s.roles)
        few = candidates(mesh, 2, 8, SearchOptions(roles=ROLES), experts=4).every
        assert not any(Role.EXPERT in s.roles and s.degree(mesh, Role.EXPERT) > 2 for s in few)

    def test_few_experts_are_padded_without_a_pin(self) -> None:
        """12 experts are 12 on 1, 2 and 4 devices, 16 on 8 and 16; 60 experts are 64 there, and 6 experts on 4 devices are 8."""
        (mesh,) = meshes(16)

        def tried(experts: int, **pins: int) -> set[int]:
            found = candidates(mesh, 32, 16, SearchOptions(roles=ROLES, **pins), experts=experts).every
            return {s.degree(mesh, Role.EXPERT) for s in found}

        assert tried(60) == {1, 2, 4, 8, 16} and tried(12) == {1, 2, 4} and tried(6) == {1, 2}
        assert tried(12, expert=8) == {8} and tried(6, expert=4) == {4}

    def test_a_degree_above_the_experts_is_refused(self, mixtral: Graph) -> None:
        with pytest.raises(UsageError, match="expert=128: .* has 64 experts"):
            pins_by_layer(mixtral, SearchOptions(expert=128))
        with pytest.raises(UsageError, match="expert=128: .* has 64 experts"):
            filled_plan(mixtral, 128, {"expert": 128})

    def test_only_layers_with_experts_have_them(self) -> None:
        (mesh,) = meshes(8)
        assert not any(Role.EXPERT in s.roles for s in candidates(mesh, 8, 8, SearchOptions(roles=ROLES)).every)

    def test_a_pin_holds_for_experts_and_gives_the_others_data(self, mixtral: Graph) -> None:
        (mesh,) = meshes(8)
        options = SearchOptions(roles=ROLES, data=2, expert=4)
        found = pins_by_layer(mixtral, options)
        first, mixture = (candidates(mesh, 8, 8, options, found[i], experts=8 * i).every for i in (0, 1))
        assert {(s.degree(mesh, Role.DATA), s.degree(mesh, Role.EXPERT)) for s in mixture} == {(2, 4)}
        assert {(s.degree(mesh, Role.DATA), s.degree(mesh, Role.EXPERT)) for s in first} == {(8, 1)}
        dense = dataclasses.replace(
            mixtral, layers=mixtral.layers[:1], classes={"Embedding": mixtral.classes["Embedding"]}
        )
        with pytest.raises(UsageError, match="no mixture"):
            pins_by_layer(dense, options)

    def test_they_stand_beside_tensor_parallelism_of_every_degree(self) -> None:
        (mesh,) = meshes(16)
        both = [
            s for s in candidates(mesh, 16, 4, SearchOptions(roles=ROLES), experts=4).every if Role.EXPERT in s.roles
        ]
        assert {s.degree(mesh, *TENSOR_ROLES) for s in both} == {1, 2, 4, 8}


class TestFolded:
    """Experts over axes that shard something else in attention (folded)."""

    def tried(self, mixtral: Graph, **pins: object) -> tuple[set[tuple[Role, ...]], set[tuple[Role, ...]]]:
        """The roles that are tried on 8 devices in nodes of 4, for the embedding and for a mixture of 8 experts."""
        (mesh,) = meshes(8)
        options = SearchOptions(roles=(*ROLES, Role.RING), **pins)  # type: ignore[arg-type]
        by_layer = pins_by_layer(mixtral, options)
        both = [candidates(mesh, 8, 4, options, by_layer[i], experts=8 * i).roles for i in (0, 1)]
        return set(both[0]), set(both[1])

    def test_they_are_tried_over_every_axis_that_shards_tokens_or_none(self, mixtral: Graph) -> None:
        first, mixture = self.tried(mixtral)
        data, tensor, folded = (Role.DATA,), (Role.TENSOR_SEQUENCE,) * 2, (Role.TENSOR_SEQUENCE_EXPERT,) * 2
        assert {data + tensor, data + folded, (Role.EXPERT, *tensor), (Role.EXPERT, *folded)} <= mixture
        assert (Role.RING_EXPERT,) * 3 in mixture
        assert not any(Role.TENSOR_EXPERT in roles for roles in mixture)  # sequence parallelism sends less
        assert not any(role.distributes_experts for roles in first for role in roles)

    def test_pins_decide_it(self, mixtral: Graph) -> None:
        """A degree of experts is one over their own axis unless a pin folds it."""
        pins = {"tensor": 2, "ring": 2, "expert": 4}
        assert {r.value for roles in self.tried(mixtral, **(pins | {"expert": 2}))[1] for r in roles} == {
            "expert", "ring", "tensor", "tensor+sequence",
        }  # fmt: skip
        ring, tensor = Role.RING_EXPERT, (Role.TENSOR, Role.TENSOR_SEQUENCE)
        over_ring = self.tried(mixtral, fold_experts="context", dispatch="direct", **pins)[1]
        assert over_ring == {(Role.EXPERT, ring, role) for role in tensor}
        relayed = self.tried(mixtral, fold_experts="context", dispatch="relayed", **pins)[1]
        assert relayed == {(Role.EXPERT_RELAYED, ring, role) for role in tensor}
        over_all = self.tried(mixtral, fold_experts="all", **pins)[1]
        assert over_all == {(Role.DATA, ring, role.folded) for role in tensor}
        first, _ = self.tried(mixtral, fold_experts="all", data=1, **(pins | {"expert": 8, "ulysses": 1}))
        assert first == {(Role.DATA, Role.RING, role) for role in tensor}  # experts' own axis is a data axis there
        with pytest.raises(
            UsageError, match="expert=2, which does not divide by the 4 devices over which fold_experts=all"
        ):
            self.tried(mixtral, fold_experts="all", **(pins | {"expert": 2}))

    def test_every_expert_is_sliced_or_whole_on_a_tensor_parallel_axis(self, mixtral: Graph) -> None:
        for role in (Role.TENSOR, Role.TENSOR_SEQUENCE):
            sliced, whole = role_types(mixtral, 1, role, 8), role_types(mixtral, 1, role.folded, 8)
            assert sliced is not None and whole is not None
            names = {name for name in _placeholders(mixtral) if "experts" in name}
            assert names and all((sliced.produced[name].dim or 0) > 0 for name in names)
            assert {whole.produced[name] for name in names} == {S(0)}

    def test_one_exchange_spans_all_axes_that_distribute_experts(self, mixtral: Graph) -> None:
        cls, pricer = mixtral.layers[1].cls, Pricer(mixtral, parse("2x8xH100-80GB"), "bfloat16")
        (mesh,) = (m for m in meshes(16) if [axis.size for axis in m] == [2, 2, 2, 2])
        tensor = (Role.TENSOR_SEQUENCE,) * 3
        sizes = []
        for roles in (
            (Role.EXPERT, *tensor),
            (Role.DATA, *(r.folded for r in tensor)),
            (Role.EXPERT, *(r.folded for r in tensor)),
        ):
            found = pricer.collectives(cls, mesh, Strategy(roles), 1)
            sizes.append({one.members.size for one in found if one.collective.value == "all_to_all"})
        assert sizes == [{2}, {8}, {16}]

    def test_resharding_depends_on_the_layout_alone(self, mixtral: Graph) -> None:
        """The search compares candidates of one layout, wherever their experts are."""
        pricer = Pricer(mixtral, parse("2x8xH100-80GB"), "bfloat16")
        (mesh,) = (m for m in meshes(16) if [axis.size for axis in m] == [2, 2, 2, 2])
        options = SearchOptions(roles=(*ROLES, Role.RING, Role.ULYSSES))
        by_layout: dict[tuple[Role, ...], list[Strategy]] = {}
        for roles in candidates(mesh, 64, 8, options, experts=64).roles:
            by_layout.setdefault(Strategy(roles).layout, []).append(Strategy(roles))
        assert max(map(len, by_layout.values())) > 3
        others = [Strategy(roles) for roles in candidates(mesh, 64, 8, options).roles]
        for same in by_layout.values():
            into = {tuple(pricer.edge(0, mesh, other, s, 1) for other in others) for s in same}
            out_of = {tuple(pricer.edge(1, mesh, s, other, 1) for other in others) for s in same}
            assert len(into) == len(out_of) == len({pricer.p2p(1, mesh, s, 1) for s in same}) == 1

    def test_a_relay_gets_a_row_once_for_all_experts_of_its_node(self, mixtral: Graph) -> None:
        cls, pricer = mixtral.layers[1].cls, Pricer(mixtral, parse("2x8xH100-80GB"), "bfloat16")
        (mesh,) = (m for m in meshes(16) if [axis.size for axis in m] == [2, 2, 2, 2])
        direct, relayed = (
            [
                one
                for one in pricer.collectives(cls, mesh, Strategy((role, *(Role.EXPERT,) * 3)), 1)
                if one.collective is Collective.ALL_TO_ALL and one.bytes > 1e8
            ]
            for role in (Role.EXPERT, Role.EXPERT_RELAYED)
        )
        assert {one.members.size for one in direct} == {16} and {one.members.size for one in relayed} == {2, 8}
        tokens = 64 * 2048 * 2048 * 2  # bytes
        # of two choices among 64 experts, both are on the same node in 31 of 63 cases
        (far,) = {one.bytes for one in relayed if one.members.size == 2}
        assert far == pytest.approx(tokens * (1 + 32 / 63) / 8)
        assert (
            {one.bytes for one in direct} == {2 * tokens} == {2 * one.bytes for one in relayed if one.members.size == 8}
        )

    @pytest.mark.parametrize(("choices", "relays"), [(2, False), (8, True)])
    def test_only_the_faster_way_to_other_nodes_is_searched(self, choices: int, relays: bool) -> None:
        """A relay pays where a token has many experts on each node."""
        graph = graph_of(Architecture(2, 2048, 16, 16, 4096, True, 1024, 2048, False, False, 64, choices), 64)
        cluster = parse("2x8xH100-80GB")
        pricer = Pricer(graph, cluster, "bfloat16")
        (mesh,) = (m for m in meshes(16) if [axis.size for axis in m] == [2, 2, 2, 2])
        prices = Prices(graph, cluster, pricer, SearchOptions(roles=ROLES))
        table = prices.table(1, Configuration(mesh, Schedule(NO_PIPELINE, 1, 1)), False)
        assert table is not None
        searched = {strategy.roles for strategy in table.everything.strategies}
        direct, relayed = ((role, *(Role.EXPERT,) * 3) for role in (Role.EXPERT, Role.EXPERT_RELAYED))
        seconds = [pricer.layer(graph.layers[1].cls, mesh, Strategy(roles), 1) for roles in (direct, relayed)]
        assert all(price is not None for price in seconds)
        faster = min(seconds, key=lambda price: price.forward_s + price.backward_s)  # type: ignore[union-attr]
        assert (faster is seconds[1]) is relays
        assert (direct in searched, relayed in searched) == (not relays, relays)

    def test_a_plan_written_by_hand_folds_them(self, mixtral: Graph) -> None:
        plan = filled_plan(mixtral, 16, {"tensor": 4, "expert": 8, "fold_experts": "all", "zero": 1}, sequence=True)
        assert [(axis.name, axis.size) for axis in plan.mesh] == [("data", 2), ("expert", 2), ("tensor", 4)]
        first, mixture = (plan.layers[i].strategy.degrees(plan.mesh) for i in (0, 1))
        assert mixture == {"data": 2, "tensor": 4, "expert": 8, "sequence": 4} and first["data"] == 4
        assert Plan.from_json(plan.to_json()) == plan


class TestTypes:
    def test_experts_are_distributed_and_the_rest_is_replicated(self, mixtral: Graph) -> None:
        types = role_types(mixtral, 1, Role.EXPERT, 8)
        assert types is not None
        parameters = [name for name in types.produced if name.endswith(("weight", "proj")) or "experts" in name]
        held = {name: types.produced[name] for name in parameters if name in _placeholders(mixtral)}
        assert {t for name, t in held.items() if "experts" in name} == {S(0)}
        assert {t for name, t in held.items() if "experts" not in name} == {R}
        assert set(types.kernel.values()) == {"expert_exchange"}

    def test_sizes_that_divide_alike_have_one_solution(self, mixtral: Graph) -> None:
        """A token's two choices are an extent that four and eight devices do not divide, and two do."""
        assert role_types(mixtral, 1, Role.TENSOR, 4) is role_types(mixtral, 1, Role.TENSOR, 8)
        assert role_types(mixtral, 1, Role.TENSOR, 2) is not role_types(mixtral, 1, Role.TENSOR, 8)


def _placeholders(graph: Graph) -> set[str]:
    return {node.name for node in graph.classes[graph.layers[1].cls].graph.graph.nodes if node.op == "placeholder"}


def test_zero_shards_experts_and_other_parameters_over_the_axes_on_which_they_are_replicated(mixtral: Graph) -> None:
    cls, pricer = mixtral.layers[1].cls, Pricer(mixtral, parse("2x8xH100-80GB"), "bfloat16")
    (mesh,) = (m for m in meshes(16) if [axis.size for axis in m] == [2, 2, 2, 2])
    roles = (Role.DATA, Role.EXPERT, Role.EXPERT, Role.EXPERT)
    count = {True: 0, False: 0}
    for value, node in zip(mixtral.classes[cls].parameters, parameter_nodes(mixtral.classes[cls]), strict=True):
        count[of_experts(node)] += value.numel
    assert count[True] > count[False] > 0
    # two copies leave no axis to shard experts over
    for zero, copies, dense_shards, expert_shards in (
        (0, 1, 1, 1),
        (1, 1, 16, 2),
        (1, 2, 8, 1),
        (3, 1, 16, 2),
        (3, 2, 8, 1),
    ):
        price = pricer.layer(cls, mesh, Strategy(roles, zero, copies), 1)
        assert price is not None
        # two moments and a master weight in float32; under ZeRO 3 the master weights are the shards of parameters
        bytes_of = {n: 8 if zero == 3 and n > 1 else 12 for n in (dense_shards, expert_shards)}
        expected = (
            bytes_of[dense_shards] * count[False] / dense_shards
            + bytes_of[expert_shards] * count[True] / 8 / expert_shards
        )
        assert price.optimizer_bytes == pytest.approx(expected, rel=0.01)
    sums = [one for one in pricer.collectives(cls, mesh, Strategy(roles, 0), 4) if one.purpose == "gradients"]
    assert {(one.members.size, one.count) for one in sums} == {(16, 1), (2, 1)}  # of other parameters, of experts


class TestSearch:
    def test_experts_are_distributed_where_that_is_cheaper(self, mixtral: Graph) -> None:
        """Every device has all of the batch's experts to reduce under data, and all tokens to gather under tensor parallelism."""
        plan = found(mixtral, "2x8xH100-80GB")
        without = found(mixtral, "2x8xH100-80GB", roles=TENSOR_ROLES)
        assert {degree for has, degree in degrees(plan, mixtral) if has} != {1}
        assert {degree for has, degree in degrees(plan, mixtral) if not has} == {1}
        assert plan.prediction.step_time_s < 0.8 * without.prediction.step_time_s
        assert any("of 64 experts (expert " in note and "same number of tokens" in note for note in plan.notes)
        assert Plan.from_json(plan.to_json()) == plan

    def test_a_written_plan_with_experts_has_a_price(self, mixtral: Graph) -> None:
        cluster = parse("8xH100-80GB")
        pricer = Pricer(mixtral, cluster, "bfloat16")
        plans = [
            price_plan(mixtral, cluster, write_plan(mixtral, cluster, SearchOptions(expert=n, zero=1)), pricer)
            for n in (1, 8)
        ]
        assert degrees(plans[1], mixtral) == {(True, 8), (False, 1)}
        kept = [plan.stages[0].memory for plan in plans]
        assert kept[1].parameters < 0.3 * kept[0].parameters and kept[1].gradients < 0.3 * kept[0].gradients
        with pytest.raises(UsageError, match="expert 3"):
            write_plan(mixtral, cluster, SearchOptions(expert=3))


@pytest.mark.parametrize(
    ("model", "devices", "pins"),
    [
        ("mixtral", 2, {"expert": 2, "pipeline": 1}),
        ("mixtral", 4, {"expert": 2, "data": 2, "zero": 3, "microbatches": 2}),
        ("mixtral", 4, {"expert": 2, "data": 2, "zero": 2, "replicate": 2}),
        ("mixtral", 4, {"expert": 4, "tensor": 2, "fold_experts": "all", "zero": 3, "pipeline": 1, "microbatches": 2}),
        slow("deepseek", 4, {"expert": 2, "zero": 1, "pipeline": 2, "microbatches": 2}),
        slow("qwen3_moe", 4, {"expert": 4, "pipeline": 1, "microbatches": 2}),
    ],
)
def test_what_is_found_is_exact(model: str, devices: int, pins: dict[str, int], request: pytest.FixtureRequest) -> None:
    """Mixtures beside dense layers, and a first layer that is dense: those take data where the others distribute experts."""
    given = subject(model)
    plan = found(given.graph, str(devices), "float64", **pins)
    assert degrees(plan, given.graph) == {(True, pins["expert"]), (False, 1)}
    outcome = check_plan(given, plan, request.getfixturevalue(f"workers{devices}"))
    assert outcome.error.exact, outcome.error


@pytest.mark.parametrize(
    ("experts", "devices", "options"),
    [
        (5, 4, {"expert": 4, "zero": 1}),
        slow(6, 4, {"expert": 4, "overlap": "halves"}),
        (5, 4, {"expert": 2, "tensor": 2, "sequence": True, "zero": 3}),
        slow(5, 2, {"expert": 2, "microbatches": 2}),
    ],
)
def test_padded_experts_are_exact(
    experts: int, devices: int, options: dict[str, object], request: pytest.FixtureRequest
) -> None:
    given = make_subject(*expert_models.mixtral(num_local_experts=experts, num_hidden_layers=1))
    plan = kind("padded", **options).plan(given.graph)
    types = role_types(given.graph, 1, Role.EXPERT, options["expert"])
    assert types is not None and "expert_exchange" in types.kernel.values()
    outcome = check_plan(given, plan, request.getfixturevalue(f"workers{devices}"))
    assert outcome.error.exact, outcome.error


HOPS = {
    (Role.EXPERT_RELAYED, Role.EXPERT, Role.EXPERT): {("a1", "a2")},
    (Role.EXPERT_RELAYED, Role.EXPERT_RELAYED, Role.EXPERT): {("a0", "a1")},
    (Role.EXPERT, Role.EXPERT, Role.TENSOR): {("a0", "a1")},
}


def hops(roles: tuple[Role, ...]) -> tuple[Subject, Plan]:
    """A mixture whose experts are distributed over three axes, in these roles."""
    given = make_subject(*expert_models.mixtral(num_local_experts=8, num_hidden_layers=1))
    mesh = tuple(Axis(f"a{i}", 2, 4 >> i) for i in range(3))
    has = [given.graph.classes[layer.cls].experts > 0 for layer in given.graph.layers]
    own = {i: Strategy(roles if of_experts else Strategy(roles).layout) for i, of_experts in enumerate(has)}
    return given, manual_plan(given.graph, mesh=mesh, strategies=own)


@pytest.mark.parametrize("roles", HOPS)
def test_each_hop_of_a_dispatch_has_a_group_over_its_axes(roles: tuple[Role, ...], tmp_path: Path) -> None:
    """An op with different kernels on different axes: each kernel's collectives run over its own axes, flattened."""
    given, plan = hops(roles)
    program = emit(given.graph, plan, tmp_path)
    (line,) = (each for each in (tmp_path / "model.py").read_text().splitlines() if "flattened=" in each)
    assert HOPS[roles] <= set(ast.literal_eval(re.search(r"flattened=(\(.*\)),", line)[1]))  # type: ignore[index]
    check_collectives(program)
    with (
        mock.patch.object(type(program), "flattened", ()),
        pytest.raises(ProgramError, match="makes no process group"),
    ):
        check_collectives(program)


@pytest.mark.slow
def test_dispatches_over_several_axes_are_exact() -> None:
    with WorkerPool(8) as pool:
        for roles in HOPS:
            given, plan = hops(roles)
            outcome = check_plan(given, plan, pool)
            assert outcome.error.exact, (roles, outcome.error)


def test_the_busiest_device_has_no_padded_experts() -> None:
    """Of 60 experts on 16 devices, 15 devices have four, and one has none: they compute 16/15 of the mean."""
    sizes = Architecture(2, 2048, 16, 16, 4096, True, 1024, 2048, False, False, 60, 2)
    graph, (mesh,) = graph_of(sizes, 64), meshes(16)

    def forward_s(given: Graph) -> float:
        pricer = Pricer(given, parse("2x8xH100-80GB"), "bfloat16")
        price = pricer.layer(given.layers[1].cls, mesh, Strategy((Role.EXPERT,) * 4), 1)
        assert price is not None
        return price.forward_s

    busiest, busier = (ExpertLoads("a test", assumed=times).on(graph) for times in (16 / 15, 1.2))
    assert forward_s(graph) == forward_s(busiest) < forward_s(busier)


def test_a_loss_over_all_tokens_choices_says_where_it_is() -> None:
    why = annotate(subject("mixtral_balanced").graph).unmicrobatchable
    assert re.search(r"needs the full batch for histc \(line \d+ of modeling_mixtral.py: .*load_balancing_loss", why)


def test_a_degree_that_does_not_divide_the_batch_has_no_types(mixtral: Graph) -> None:
    assert role_types(mixtral, 1, Role.EXPERT, 16) is not None and role_types(mixtral, 1, Role.EXPERT, 3) is None
