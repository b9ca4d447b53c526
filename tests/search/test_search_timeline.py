"""The memory of a device at every action of its schedule: hand-counted, and its maximum is what plans predict."""

from __future__ import annotations

import itertools

import pytest
from price_models import chain, mlp, solve_mlp

from autopar.cli.timeline import curve, timeline_data
from autopar.devices import parse
from autopar.plan import SPLIT, Axis, Role, Strategy, stages_of
from autopar.price import Pricer
from autopar.search import evaluate, memory_timeline
from autopar.search.problem import Choice
from autopar.search.schedules import device_order, interleaved_in_flight
from autopar.search.timeline import Held, timeline

CLUSTER = parse("8xH100-80GB")
MESH = (Axis("data", 2, 1),)


def test_moments_by_hand():
    """Two stages on one device: the second's transients come when less is saved."""
    held = Held((0, 1), saved=(10, 1), waiting=(0, 0), transients=(5, 100), parameters=7, gradients=3, optimizer=2)
    order = [("F", 0, 0), ("F", 0, 1), ("F", 1, 0), ("B", 1, 0), ("B", 0, 0), ("F", 1, 1), ("B", 1, 1), ("B", 0, 1)]
    moments = timeline(held, order)
    assert [m.memory.activations for m in moments] == [10, 20, 21, 21, 20, 11, 11, 10]
    assert [m.memory.transients for m in moments] == [5, 5, 100, 100, 5, 100, 100, 5]
    assert all(m.memory.parameters == 7 and m.memory.total >= 12 for m in moments)
    assert moments[2].memory.total == max(m.memory.total for m in moments) == 12 + 121


def test_moments_of_backwards_in_two_parts_by_hand():
    """What is saved is there until the weights' gradients have been made, and more of it once the inputs' have."""
    held = Held((1, 2), saved=(10, 1), waiting=(7, 2), transients=(5, 3), parameters=0, gradients=0, optimizer=0)
    order = [("F", 1, 0), ("F", 2, 0), ("I", 2, 0), ("I", 1, 0), ("W", 2, 0), ("F", 1, 1), ("W", 1, 0), ("B", 1, 1)]
    moments = timeline(held, order)
    assert [m.memory.activations for m in moments] == [10, 11, 13, 20, 20, 27, 27, 10]
    assert [m.memory.transients for m in moments] == [5, 3, 3, 5, 3, 5, 5, 5]


@pytest.mark.parametrize(("schedule", "chunks"), [("zero-bubble", 1), ("zero-bubble", 3), ("zbv", 2), ("dualpipev", 2)])
@pytest.mark.parametrize("line", [2, 4])
def test_split_orders_are_whole_and_leave_nothing(schedule, chunks, line):
    for rank in range(line):
        m, own = 2 * line, stages_of(rank, line, chunks, schedule)
        order = device_order(schedule, rank, line, m, chunks)
        where = {action: i for i, action in enumerate(order)}
        assert len(where) == len(order)
        for stage, i in itertools.product(own, range(m)):
            assert (("B", stage, i) in where) != (("I", stage, i) in where and ("W", stage, i) in where)
            parts = [where[kind, stage, i] for kind in "FBIW" if (kind, stage, i) in where]
            assert parts == sorted(parts)
        moments = timeline(Held(own, (5,) * chunks, (0,) * chunks, (0,) * chunks, 0, 0, 0), order)
        assert moments[-1].memory.activations == 5  # the last microbatch's, until its end


@pytest.mark.parametrize("line", [1, 2, 4])
@pytest.mark.parametrize("chunks", [1, 3])
def test_orders_are_whole_and_hold_what_the_search_counts(line, chunks):
    schedule = "interleaved-1f1b" if chunks > 1 else "1f1b" if line > 1 else "none"
    counts = interleaved_in_flight(line, chunks, 2 * line) if chunks > 1 else None
    for rank in range(line):
        order = device_order(schedule, rank, line, 2 * line, chunks)
        assert len(order) == len(set(order)) == 2 * 2 * line * chunks
        assert {stage for _, stage, _ in order} == set(range(rank, line * chunks, line))
        where = {action: i for i, action in enumerate(order)}
        assert all(where["F", s, i] < where["B", s, i] for kind, s, i in order if kind == "B")
        stages = tuple(range(rank, line * chunks, line))
        held = Held(stages, (1,) * chunks, (0,) * chunks, (0,) * chunks, 0, 0, 0)
        if counts is not None:
            most = max(moment.memory.activations for moment in timeline(held, order))
            assert most == sum(counts[stage] for stage in stages)


@pytest.mark.parametrize(
    ("pipeline", "schedule", "chunks"),
    [
        (1, "none", 1),
        (2, "gpipe", 1),
        (4, "1f1b", 1),
        (2, "interleaved-1f1b", 2),
        (4, "zero-bubble", 1),
        (2, "zero-bubble", 2),
        (4, "zbv", 2),
        (2, "dualpipev", 2),
    ],
)
def test_the_maximum_is_the_predicted_memory(pipeline, schedule, chunks):
    graph = chain(mlp(32, 128, 256, 1024), 8)
    cluster = parse(f"{2 * pipeline}xH100-80GB")
    pricer = Pricer(graph, cluster, "bfloat16", solve_mlp)
    strategies = [Strategy((Role.DATA,), zero=1, recompute=i % 3 == 0) for i in range(8)]
    stages = pipeline * chunks
    plan = evaluate(
        graph, cluster, pricer, mesh=MESH, stage_bounds=[8 * i // stages for i in range(stages + 1)], strategies=strategies,
        microbatches=4, schedule=schedule, precision="bfloat16", chunks=chunks,
    )  # fmt: skip
    devices = memory_timeline(graph, cluster, pricer, plan)
    assert len(devices) == pipeline
    for d, moments in enumerate(devices):
        assert max(m.memory.total for m in moments) == plan.stages[d].memory.total
        for kinds in ("F", "BW", "BI"):
            assert sum(m.kind in kinds for m in moments) == 4 * chunks
        last = moments[-1].memory
        if schedule not in SPLIT:
            assert last.activations == min(
                m.memory.activations for m in moments if m.kind == "B" and m.stage == moments[-1].stage
            )
    data = timeline_data(devices)
    assert [entry["memory_bytes"] for entry in data] == [plan.stages[d].memory.total for d in range(pipeline)]


@pytest.mark.parametrize(
    ("pipeline", "microbatches", "schedule", "chunks", "held"),
    [
        (1, 4, "none", 1, (0,)),
        # outputs in flight and two gradients; from the second stage on the gradient that was sent last, once there is another forward
        (4, 8, "1f1b", 1, (4 + 2, 3 + 2 + 1, 2 + 2 + 1, 1)),
        (2, 2, "1f1b", 1, (2 + 2, 1)),
        (3, 4, "gpipe", 1, (4 + 4, 4 + 4, 0)),
        # one input and one gradient for each microbatch; of the inputs those in flight are saved anyway
        (2, 4, "interleaved-1f1b", 2, (3 + 4, 2 + 4 + 2 + 1, 2 + 4 + 2 + 1, 3 + 1)),
        # nothing is received where the next stage is on the same device
        (2, 4, "zbv", 2, (3 + 4, 2 + 1, 1 + 4, 3 + 1)),
    ],
)
def test_tensors_between_stages(pipeline, microbatches, schedule, chunks, held):
    choice = Choice(MESH, pipeline, microbatches, schedule, chunks=chunks)
    assert choice.passing == held


def test_a_curve_keeps_its_peak():
    assert curve([0, 4, 8], 8) == " ▄█"
    long = curve([1] * 500 + [8] + [1] * 499, 8)
    assert len(long) == 64 and long.count("█") == 1
