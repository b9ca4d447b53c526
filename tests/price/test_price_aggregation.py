"""The ways to sum gradients, as functions of the number of nodes, and that plans' all-reduces are priced by the same ring."""

from __future__ import annotations

import math

import pytest
from price_models import time_s

from autopar.devices import parse
from autopar.price.aggregation import WAYS, ring
from autopar.schedules import Schedule
from autopar.schedules.step_time import simulate
from autopar.types import Collective

SIZE, HOP_S, SPEED = 1e9, 1e-5, 1e10


@pytest.mark.parametrize("nodes", [2, 4, 8, 64, 1024])
def test_the_table_of_gradient_aggregation(nodes):
    """Time in units of B / bandwidth, the busiest node's bytes in a step and the bytes of all nodes, in units of B."""
    n = nodes
    expected = {
        "parameter server": (2 * n, n, 2 * n),
        "sequential": (2 * (n - 1), 1, 2 * (n - 1)),
        "ring": (2 * (n - 1) / n, 1 / n, 2 * (n - 1)),
        "parallel": (2 * (n - 1) / n, (n - 1) / n, 2 * (n - 1)),
        "recursive halving": (2 * (n - 1) / n, 1 / 2, 2 * (n - 1)),
    }
    assert set(expected) == set(WAYS)
    for name, (sequence, node, total) in expected.items():
        found = WAYS[name](SIZE, n)
        assert found.sequence_bytes == pytest.approx(sequence * SIZE), name
        assert found.node_bytes == pytest.approx(node * SIZE) and found.total_bytes == pytest.approx(total * SIZE), name
        assert found.seconds(0.0, SPEED) == pytest.approx(sequence * SIZE / SPEED)


def test_latency_tells_apart_what_bandwidth_does_not():
    small = {name: way(1e3, 64).seconds(HOP_S, SPEED) for name, way in WAYS.items()}
    large = {name: way(SIZE, 64).seconds(HOP_S, SPEED) for name, way in WAYS.items()}
    assert small["parallel"] < small["recursive halving"] < small["ring"]
    assert WAYS["recursive halving"](1e3, 64).steps == 2 * math.log2(64)
    assert large["parallel"] == pytest.approx(large["ring"], rel=0.02)
    assert large["parameter server"] > 60 * large["ring"] and large["sequential"] > 60 * large["ring"]


def test_a_plans_all_reduce_is_that_ring():
    cluster = parse("8xH100-80GB")
    way = ring(SIZE, 8)
    expected = way.seconds(cluster.intra.latency_s, cluster.intra.bytes_per_s) + cluster.collective_s
    assert time_s(Collective.ALL_REDUCE, SIZE, 8, 1, cluster) == pytest.approx(expected)


@pytest.mark.parametrize(("microbatches", "busy"), [(1, 0.25), (4, 4 / 7)])
def test_a_pipeline_of_four_stages(microbatches, busy):
    """25 % of the devices' time is used with one microbatch, 57 % with four."""
    step_s = simulate(Schedule("gpipe", 4, microbatches), [1.0] * 4, [2.0] * 4)
    assert microbatches * 3.0 / step_s == pytest.approx(busy)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (4, 4), (8, 3), (16, 64)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble(stages, microbatches, schedule):
    step_s = simulate(Schedule(schedule, stages, microbatches), [1.0] * stages, [2.0] * stages)
    assert 1 - microbatches * 3.0 / step_s == pytest.approx((stages - 1) / (microbatches + stages - 1))
