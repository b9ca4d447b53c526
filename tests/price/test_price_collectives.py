"""Collectives against values computed by hand, and the laws that hold between them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from price_models import time_s

from autopar.devices import Cluster, Gpu, Link, parse
from autopar.devices.cluster import joined
from autopar.ops.routing import Routing
from autopar.plan import Axis
from autopar.price.collectives import RankGroup, dispatch_s, group, group_time_s, p2p_s
from autopar.types import Collective

WIRE = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)
GPU = Gpu("g", 10**10, {"bfloat16": 1e14}, 1.0, 1e12, 1.0, 1e-6)
# 4 nodes of 8; one hop 2 us at 100 GB/s within, 10 us at 5 GB/s per device between
TOY = Cluster("toy", 4, 8, "cuda", GPU, Link(2e-6, 1e11, ""), Link(1e-5, 5e9, ""), collective_s=1e-6)


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        (8, 1, RankGroup(8, 8, 1)),
        (2, 4, RankGroup(2, 2, 1)),
        (4, 8, RankGroup(4, 1, 4)),
        (16, 1, RankGroup(16, 8, 2)),
        (8, 4, RankGroup(8, 2, 4)),
        (2, 16, RankGroup(2, 1, 2)),
        (32, 0, RankGroup(1, 1, 1)),  # microbatches follow one another on the same devices
    ],
)
def test_members_per_node(size, stride, expected):
    assert group((Axis("a", size, stride),), TOY) == expected


def rack(trays: int) -> Cluster:
    """Nodes of 4 devices in NVLink domains of 72."""
    return replace(TOY, nodes=trays, gpus_per_node=4, nvlink_domain=72)


@pytest.mark.parametrize(
    ("trays", "size", "stride", "expected"),
    [
        (16, 64, 1, RankGroup(64, 64, 1)),  # all in one domain
        (16, 8, 8, RankGroup(8, 8, 1)),
        (36, 8, 1, RankGroup(8, 8, 1)),  # 72 is a multiple of 8: no group of 8 is divided
        (36, 2, 36, RankGroup(2, 2, 1)),
        (36, 2, 72, RankGroup(2, 1, 2)),
        (36, 16, 1, RankGroup(16, 8, 2)),  # ranks 64 to 79 are divided after the eighth
        (36, 2, 8, RankGroup(2, 1, 2)),
        (4, 4, 4, RankGroup(4, 4, 1)),
    ],
)
def test_members_per_nvlink_domain(trays, size, stride, expected):
    assert group((Axis("a", size, stride),), rack(trays)) == expected


def counted(axes: tuple[Axis, ...], node_of: list[int]) -> tuple[int, int]:
    """The fewest members of a group on a node that has any, and the most nodes of a group, rank by rank."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, node in enumerate(node_of):
        others = rank - sum(rank // axis.stride % axis.size * axis.stride for axis in axes)
        groups.setdefault((others,), []).append(node)
    on_nodes = [Counter(nodes) for nodes in groups.values()]
    return min(min(found.values()) for found in on_nodes), max(len(found) for found in on_nodes)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_group_is_counted_rank_by_rank(data):
    """Meshes of any factors on nodes of any size, and on parts whose nodes differ; each group by its member with the slowest path."""
    sizes = data.draw(st.lists(st.sampled_from([2, 3, 4, 5, 6, 7, 8]), min_size=1, max_size=4), label="mesh")
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    mesh = [Axis(f"a{i}", n, stride) for i, (n, stride) in enumerate(zip(sizes, strides, strict=True))]
    axes = tuple(axis for axis in mesh if data.draw(st.booleans(), label=axis.name))
    count = math.prod(sizes)
    near = [n for n in range(1, count + 1) if count % n == 0]
    per_node = data.draw(st.sampled_from(near), label="per node")
    cluster = replace(TOY, nodes=count // per_node, gpus_per_node=per_node)
    node_of = [rank // per_node for rank in range(count)]
    if data.draw(st.booleans(), label="two parts") and cluster.nodes > 1:
        split = data.draw(st.integers(1, cluster.nodes - 1), label="nodes of the first part")
        other = data.draw(st.sampled_from([n for n in near if (count - split * per_node) % n == 0]), label="per node")
        parts = [
            replace(cluster, nodes=split),
            replace(cluster, nodes=(count - split * per_node) // other, gpus_per_node=other),
        ]
        cluster = joined("two", parts, None)
        node_of = [rank // per_node for rank in range(split * per_node)]
        node_of += [cluster.nodes + rank // other for rank in range(count - split * per_node)]
    found = group(axes, cluster)
    assert (found.per_node, found.nodes) == counted(axes, node_of)
    assert found.size == math.prod(axis.size for axis in axes)


@pytest.mark.parametrize(
    ("size", "per_node", "expected"),
    [(3, 8, (1, 2)), (5, 8, (1, 2)), (6, 8, (2, 2)), (7, 8, (1, 2)), (4, 6, (2, 2)), (2, 8, (2, 1))],
)
def test_groups_that_straddle_two_nodes(size, per_node, expected):
    cluster = replace(TOY, nodes=size * 4, gpus_per_node=per_node)
    found = group((Axis("tensor", size, 1),), cluster)
    assert (found.per_node, found.nodes) == expected


def test_stages_that_begin_inside_a_node():
    """Stages of 12 devices on nodes of 8: the second begins after four devices of a node."""
    parts = [replace(TOY, nodes=3), replace(TOY, nodes=3)]
    first, second = joined("two", parts, None).stages(4)[:2]
    assert (first.first, second.first) == (0, 4)
    assert group((Axis("tensor", 4, 1),), second) == RankGroup(4, 4, 1)
    assert group((Axis("data", 3, 4),), second) == RankGroup(3, 1, 2)
    assert group((Axis("all", 12, 1),), second) == RankGroup(12, 4, 2)


def test_axes_that_are_not_neighbours_make_one_group():
    assert group((Axis("a", 4, 8), Axis("b", 2, 1)), TOY) == RankGroup(8, 2, 4)


def test_values_by_hand():
    b = 1e9
    # within a node: 7 hops of 2 us, 7/8 of a second per 100 GB
    assert time_s(Collective.ALL_GATHER, b, 8, 1, TOY) == pytest.approx(1e-6 + 7 * 2e-6 + b * 7 / 8 / 1e11)
    # between nodes: 4 hops of 10 us, over one device's share
    assert time_s(Collective.REDUCE_SCATTER, b, 4, 8, TOY) == pytest.approx(1e-6 + 4 * 1e-5 + b * 3 / 4 / 5e9)
    # 2 members on each of 2 nodes: the ring crosses twice, and both members' shares carry it
    assert time_s(Collective.ALL_GATHER, b, 4, 4, TOY) == pytest.approx(1e-6 + 2 * 2e-6 + 2 * 1e-5 + b * 3 / 4 / 1e10)
    # all 8 members' shares (40 GB/s) carry the ring over all devices
    assert time_s(Collective.ALL_GATHER, b, 32, 1, TOY) == pytest.approx(
        1e-6 + 28 * 2e-6 + 4 * 1e-5 + b * 31 / 32 / 4e10
    )
    # an all-to-all within a node moves 7/8 of an eighth
    assert time_s(Collective.ALL_TO_ALL, b, 8, 1, TOY) == pytest.approx(1e-6 + 2e-6 + b / 8 * 7 / 8 / 1e11)
    # and over nodes, three quarters of a quarter through the share
    assert time_s(Collective.ALL_TO_ALL, b, 4, 8, TOY) == pytest.approx(1e-6 + 1e-5 + b / 4 * 3 / 4 / 5e9)
    assert p2p_s(b, TOY, crosses_node=True) == pytest.approx(1e-6 + 1e-5 + 0.2)
    assert p2p_s(b, TOY, crosses_node=False) == pytest.approx(1e-6 + 2e-6 + 0.01)


def test_a_large_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    for size, stride in ((2, 1), (8, 1), (4, 8), (32, 1)):
        parts = time_s(Collective.ALL_GATHER, 1e10, size, stride, TOY) + time_s(
            Collective.REDUCE_SCATTER, 1e10, size, stride, TOY
        )
        assert time_s(Collective.ALL_REDUCE, 1e10, size, stride, TOY) == pytest.approx(parts - 1e-6)


def test_a_small_all_reduce_over_many_nodes_takes_the_tree():
    big = parse("128x8xH100-80GB")
    ring_hops = 2 * (1024 - 128) * big.intra.latency_s
    tree_hops = 2 * (7 * big.intra.latency_s + math.log2(128) * big.inter.latency_s)
    assert time_s(Collective.ALL_REDUCE, 8, 1024, 1, big) == pytest.approx(big.collective_s + tree_hops, rel=1e-3)
    assert tree_hops < ring_hops


@pytest.mark.parametrize("collective", WIRE)
@pytest.mark.parametrize(("size", "stride"), [(2, 1), (8, 1), (4, 8), (32, 1), (8, 4), (3, 1)])
def test_more_bytes_take_longer(collective, size, stride):
    times = [time_s(collective, 2.0**k, size, stride, TOY) for k in range(4, 36)]
    assert all(a < b for a, b in zip(times, times[1:], strict=False))


def test_what_moves_nothing_costs_nothing():
    assert time_s(Collective.NONE, 1e9, 8, 1, TOY) == time_s(Collective.LOCAL, 1e9, 8, 1, TOY) == 0
    assert all(time_s(c, 1e9, 1, 1, TOY) == 0 for c in WIRE)


def test_gloo_is_near_its_measurements():
    four = parse(["cpu"] * 4)
    assert time_s(Collective.ALL_REDUCE, 2**20, 4, 1, four) == pytest.approx(9.6e-3, rel=0.05)
    assert time_s(Collective.ALL_REDUCE, 2**26, 4, 1, four) == pytest.approx(198e-3, rel=0.05)


def test_dispatch_kernels_send_a_token_once_to_each_node():
    """With one node per rank they send what an all-to-all of the reached ranks would; inside a node nothing crosses the network."""
    router, rows = Routing(64, 8), 2.0**28
    apart, together = RankGroup(8, 1, 8), RankGroup(8, 8, 1)
    sent = rows * router.reached(8) * 7 / 8
    fixed_s = TOY.collective_s + TOY.inter.latency_s
    assert dispatch_s(rows, router, apart, TOY) == pytest.approx(fixed_s + sent / TOY.inter.bytes_per_s)
    assert dispatch_s(rows, router, together, TOY) < dispatch_s(rows, router, apart, TOY)
    choices = 8 * rows * 8  # an all-to-all sends a row for each choice
    assert dispatch_s(rows, router, together, TOY) < group_time_s(Collective.ALL_TO_ALL, choices, together, TOY)
    assert dispatch_s(rows, router, RankGroup(1, 1, 1), TOY) == 0


@pytest.mark.parametrize(
    ("experts", "choices", "ranks"), [(128, 8, 8), (256, 8, 64), (128, 4, 64), (8, 2, 1), (64, 8, 64)]
)
def test_consecutive_experts_are_on_few_ranks(experts: int, choices: int, ranks: int):
    """AutoModel's forced balance: token t chooses the experts t * choices, t * choices + 1, ..."""
    owners = [
        {(token * choices + i) % experts // (experts // ranks) for i in range(choices)} for token in range(experts)
    ]
    router = Routing(experts, choices, consecutive=True)
    assert router.reached(ranks) == sum(map(len, owners)) / len(owners) <= Routing(experts, choices).reached(ranks)
