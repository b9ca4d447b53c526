"""The memory of a device at every action of its schedule: hand-counted, and its maximum is what plans predict."""

from __future__ import annotations

import itertools

import pytest
from price_models import chain, mlp, solve_mlp

from autopar.cli.timeline import curve, timeline_data
from autopar.devices import parse
from autopar.plan import Axis, Role, Strategy
from autopar.price import Pricer
from autopar.schedules import SPLIT, Schedule
from autopar.schedules.memory import StageBytes, live_bytes, peak_counts, pipeline_buffers
from autopar.schedules.orders import Group, device_groups, device_order
from autopar.search import evaluate, memory_timeline

CLUSTER = parse("8xH100-80GB")
MESH = (Axis("data", 2, 1),)


def test_moments_by_hand():
    """Two stages on one device: the second's transients come when less is saved."""
    stages = StageBytes(saved=(10, 1), waiting=(0, 0), transients=(5, 100))
    order = [("F", 0, 0), ("F", 0, 1), ("F", 1, 0), ("B", 1, 0), ("B", 0, 0), ("F", 1, 1), ("B", 1, 1), ("B", 0, 1)]
    activations, transients = live_bytes([(action,) for action in order], (0, 1), stages)
    assert activations.tolist() == [10, 20, 21, 21, 20, 11, 11, 10]
    assert transients.tolist() == [5, 5, 100, 100, 5, 100, 100, 5]


def test_moments_of_a_pair_by_hand():
    """The forward's activations and the backward's are live in both; so are both stages' transients, if the passes take turns. Both
    transients contain the device's two bytes of buffers."""
    groups: list[Group] = [(("F", 1, 0),), (("F", 2, 0),), (("F", 1, 1), ("B", 2, 0)), (("B", 1, 0),)]
    for in_turns, pair in ((True, 6), (False, 5)):
        sizes = StageBytes(saved=(10, 1), waiting=(0, 0), transients=(5, 3), in_turns=in_turns, buffers=2)
        activations, transients = live_bytes(groups, (1, 2), sizes)
        assert activations.tolist() == [10, 11, 21, 21, 20]
        assert transients.tolist() == [5, 3, pair, pair, 5]


def test_moments_of_backwards_in_two_parts_by_hand():
    """Saved bytes are live until the gradients of the inputs exist, waiting bytes until those of the weights do."""
    stages = StageBytes(saved=(10, 1), waiting=(7, 2), transients=(5, 3))
    order = [("F", 1, 0), ("F", 2, 0), ("I", 2, 0), ("I", 1, 0), ("W", 2, 0), ("F", 1, 1), ("W", 1, 0), ("B", 1, 1)]
    activations, transients = live_bytes([(action,) for action in order], (1, 2), stages)
    assert activations.tolist() == [10, 11, 12, 12, 9, 17, 17, 10]
    assert transients.tolist() == [5, 3, 3, 5, 3, 5, 5, 5]


@pytest.mark.parametrize(("name", "chunks"), [("zero-bubble", 1), ("zero-bubble", 3), ("zbv", 2), ("dualpipev", 2)])
@pytest.mark.parametrize("line", [2, 4])
def test_split_orders_are_whole_and_leave_nothing(name, chunks, line):
    m = 2 * line
    schedule = Schedule(name, line, m, chunks)
    for rank in range(line):
        order, own = list(device_order(schedule, rank)), schedule.stages_of(rank)
        where = {action: i for i, action in enumerate(order)}
        assert len(where) == len(order)
        for stage, i in itertools.product(own, range(m)):
            assert (("B", stage, i) in where) != (("I", stage, i) in where and ("W", stage, i) in where)
            parts = [where[kind, stage, i] for kind in "FBIW" if (kind, stage, i) in where]
            assert parts == sorted(parts)
        activations, _ = live_bytes(
            list(device_groups(schedule, rank)), own, StageBytes((5,) * chunks, (3,) * chunks, (0,) * chunks)
        )
        assert activations[-1] == {"B": 5, "W": 3}[order[-1][0]]  # the last microbatch's, until its end


@pytest.mark.parametrize("line", [1, 2, 4])
@pytest.mark.parametrize("chunks", [1, 3])
def test_orders_are_whole_and_hold_what_the_search_counts(line, chunks):
    name = "interleaved-1f1b" if chunks > 1 else "1f1b" if line > 1 else "none"
    schedule = Schedule(name, line, 2 * line, chunks)
    for rank in range(line):
        order, own = list(device_order(schedule, rank)), schedule.stages_of(rank)
        assert len(order) == len(set(order)) == 2 * 2 * line * chunks
        assert {stage for _, stage, _ in order} == set(own)
        where = {action: i for i, action in enumerate(order)}
        assert all(where["F", s, i] < where["B", s, i] for kind, s, i in order if kind == "B")
        activations, _ = live_bytes(
            list(device_groups(schedule, rank)), own, StageBytes((1,) * chunks, (0,) * chunks, (0,) * chunks)
        )
        assert activations.max() == sum(peak_counts(schedule).in_flight[stage] for stage in own)


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
        (4, "chimera", 1),
    ],
)
def test_the_maximum_is_the_predicted_memory(pipeline, schedule, chunks):
    graph = chain(mlp(32, 128, 256, 1024), 8)
    cluster = parse(f"{2 * pipeline}xH100-80GB")
    pricer = Pricer(graph, cluster, "bfloat16", solve_mlp)
    strategies = [Strategy((Role.DATA,), zero=1, activations="keep" if i % 3 else "full") for i in range(8)]
    stages = pipeline * chunks
    plan = evaluate(
        graph, cluster, pricer, mesh=MESH, stage_bounds=[8 * i // stages for i in range(stages + 1)], strategies=strategies,
        schedule=Schedule(schedule, pipeline, 4, chunks), precision="bfloat16",
    )  # fmt: skip
    devices = memory_timeline(graph, cluster, pricer, plan)
    assert len(devices) == pipeline
    for d, moments in enumerate(devices):
        assert max(m.memory.total for m in moments) == plan.stages[d].memory.total
        for kinds in ("F", "BW", "BI"):
            assert sum(m.kind in kinds for m in moments) == 4 * chunks
        last = moments[-1].memory
        if schedule not in (*SPLIT, "chimera"):
            assert last.activations == min(
                m.memory.activations for m in moments if m.kind == "B" and m.stage == moments[-1].stage
            )
    data = timeline_data(devices)
    assert [entry["memory_bytes"] for entry in data] == [plan.stages[d].memory.total for d in range(pipeline)]


@pytest.mark.parametrize(
    ("pipeline", "microbatches", "schedule", "chunks", "held"),
    [
        (1, 4, "none", 1, (0,)),
        # outputs in flight and a gradient; from the second stage on the gradient that was sent last, once there is another forward
        (4, 8, "1f1b", 1, (4 + 1, 3 + 1 + 1, 2 + 1 + 1, 1)),
        (2, 2, "1f1b", 1, (2 + 1, 1)),
        (3, 4, "gpipe", 1, (4 + 1, 4 + 1, 0)),
        # outputs in flight, gradients and inputs that come early, two gradients that were sent; inputs in flight are saved anyway
        (2, 4, "interleaved-1f1b", 2, (4 + 1, 3 + 2 + 1 + 2, 2 + 1 + 2, 1 + 2)),
        # outputs in flight and a gradient; two inputs that come early, and the gradient that was sent last
        (4, 8, "chimera", 1, (4 + 1, 3 + 1 + 2 + 1, 2 + 1 + 2 + 1, 2 + 1)),
        # nothing is received where the next stage is on the same device
        (2, 4, "zbv", 2, (4 + 2, 2, 2 + 1, 1 + 2)),
    ],
)
def test_tensors_between_stages(pipeline, microbatches, schedule, chunks, held):
    assert pipeline_buffers(Schedule(schedule, pipeline, microbatches, chunks)) == held


def test_a_curve_keeps_its_peak():
    assert curve([0, 4, 8], 8) == " ▄█"
    long = curve([1] * 500 + [8] + [1] * 499, 8)
    assert len(long) == 64 and long.count("█") == 1
