"""The actions of every schedule are torch's; sizes that torch refuses are refused; microbatches in flight follow from the actions."""

from __future__ import annotations

import itertools

import pytest
from exactness import subject

from autopar.errors import UsageError
from autopar.plan import Plan
from autopar.schedules import Schedule, refusal
from autopar.schedules.memory import max_in_flight, peak_counts
from autopar.schedules.orders import device_groups, device_order, round_size
from autopar.schedules.step_time import lower_bound, simulate
from autopar.search.manual import manual_plan
from autopar.torch_private import pipeline_order

TORCH = {
    "interleaved-1f1b": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


def sizes(name: str) -> list[Schedule]:
    """The schedule at the sizes that it admits."""
    every = [Schedule(name, p, m, v) for p in (2, 3, 4, 5) for v in (1, 2, 3) for m in range(1, 17)]
    return [schedule for schedule in every if refusal(schedule) is None]


def torchs(schedule: Schedule) -> list[list[tuple[tuple[str, int, int], ...]]]:
    """The actions of every device as torch has them."""
    return pipeline_order(TORCH[schedule.name], schedule.pipeline, schedule.chunks, schedule.microbatches)


@pytest.mark.parametrize("name", TORCH)
def test_orders_are_torchs(name: str) -> None:
    assert len(sizes(name)) > 20
    for schedule in sizes(name):
        own = [list(device_groups(schedule, rank)) for rank in range(schedule.pipeline)]
        assert own == torchs(schedule), schedule


def test_rounds_of_any_size_are_megatrons() -> None:
    """Megatron's list of forwards (``get_schedule_table``) and its warm-up (``get_pp_rank_microbatches``) in groups of more microbatches
    than pipeline ranks."""
    for p, m, v, size in ((4, 14, 2, 7), (16, 120, 2, 20), (4, 10, 3, 5), (4, 7, 2, 7), (8, 44, 3, 11)):
        schedule = Schedule("interleaved-1f1b", p, m, v)
        assert refusal(schedule, any_rounds=True) is None and round_size(p, m) == size
        table = [(i, chunk) for at in range(0, m, size) for chunk in range(v) for i in range(at, at + size)]
        for rank in range(p):
            actions = list(device_order(schedule, rank))
            forwards = [(i, stage // p) for kind, stage, i in actions if kind == "F"]
            backwards = [(i, v - 1 - stage // p) for kind, stage, i in actions if kind == "B"]
            assert forwards == backwards == table
            first = next(at for at, action in enumerate(actions) if action[0] == "B")
            assert first == min(2 * (p - 1 - rank) + (v - 1) * size + 1, m * v)
        f, b = [1.0 + stage / 7 for stage in range(p * v)], [2.0] * p * v
        assert lower_bound(schedule, f, b) <= simulate(schedule, f, b) < sum(f + b) * m


@pytest.mark.parametrize(("name", "torchs_name"), [("gpipe", "GPipe"), ("1f1b", "1F1B")])
def test_forwards_and_backwards_of_one_stage_are_in_torchs_order(name: str, torchs_name: str) -> None:
    """Torch's list for 1F1B numbers the last rank's forwards from 1, so only the order of the actions is compared."""
    for schedule in [Schedule(name, p, m) for p in (2, 3, 5) for m in (*range(p, 9), 16)]:
        for rank, groups in enumerate(pipeline_order(torchs_name, schedule.pipeline, 1, schedule.microbatches)):
            kinds = [kind for ((kind, _, _),) in groups if kind in "FB"]
            assert kinds == [kind for kind, _, _ in device_order(schedule, rank)], (schedule, rank)


@pytest.mark.parametrize("name", [name for name in TORCH if name != "zbv"])
def test_what_torch_refuses_is_refused(name: str) -> None:
    for schedule in (
        Schedule(name, 2, 3, 2),
        Schedule(name, 4, 6, 2),
        Schedule(name, 3, 5, 2),
        Schedule(name, 4, 7, 2),
    ):
        if refusal(schedule) is not None:
            with pytest.raises(ValueError, match="microbatches"):
                torchs(schedule)
        else:
            torchs(schedule)


@pytest.mark.parametrize("name", TORCH)
def test_stages_are_where_torch_puts_them(name: str) -> None:
    for schedule in sizes(name):
        for rank, groups in enumerate(torchs(schedule)):
            own = sorted({stage for group in groups for _, stage, _ in group})
            assert own == list(schedule.stages_of(rank))
            assert {schedule.rank_of_stage[stage] for stage in own} == {rank}


@pytest.mark.parametrize("name", ["none", "gpipe", "1f1b", *TORCH])
def test_microbatches_in_flight_are_those_of_the_order(name: str) -> None:
    """Of stages that save alike, the moment at which a device has most is the one that its order shows."""
    line = (1,) if name == "none" else (2, 4)
    for p, m, v in itertools.product(line, (4, 8), (1, 2, 3)):
        schedule = Schedule(name, p, m, v)
        if refusal(schedule) is not None:
            continue
        for rank in range(p):
            live = most = 0
            for kind, _, _ in device_order(schedule, rank):
                live += kind == "F"
                most = max(most, live)
                live -= kind in "BI"
            assert most == max_in_flight(schedule, rank), schedule
            assert schedule.split or most == sum(peak_counts(schedule).in_flight[s] for s in schedule.stages_of(rank))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "interleaved-1f1b", "pipeline": 2}, "several stages on each device"),
        ({"schedule": "interleaved-1f1b", "chunks": 2}, "the pipeline has one device"),
        ({"schedule": "1f1b", "pipeline": 2, "chunks": 2, "microbatches": 2}, "one stage on each device"),
        ({"pipeline": 2, "chunks": 2, "microbatches": 5}, "rounds of 2 microbatches"),
        ({"schedule": "zbv", "pipeline": 2, "microbatches": 4}, "two stages on each device, and chunks is 1"),
        ({"schedule": "zero-bubble", "chunks": 2}, "the pipeline has one device"),
        ({"schedule": "zero-bubble", "pipeline": 2, "chunks": 2, "microbatches": 5}, "rounds of 2 microbatches"),
        (
            {"schedule": "dualpipev", "pipeline": 2, "chunks": 2, "microbatches": 3},
            "over 4 stages needs at least as many microbatches",
        ),
        ({"pipeline": 4, "chunks": 2}, "6 layers cannot be cut into 8"),
        ({"schedule": "bfs", "pipeline": 2}, "schedule is 'bfs', it must be one of none, gpipe"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        manual_plan(subject("llama").graph, **options)  # type: ignore[arg-type]
    assert error.value.hint


def test_a_device_has_every_so_many_stages() -> None:
    plan = manual_plan(subject("llama").graph, pipeline=2, chunks=3, data=2, microbatches=4)
    assert plan.schedule == "interleaved-1f1b" and plan.pipeline == 2 and plan.device_count == 4
    assert [stage.devices for stage in plan.stages] == [(0, 2), (2, 2)] * 3
    assert Plan.from_json(plan.to_json()) == plan
    folded = manual_plan(subject("llama").graph, pipeline=2, chunks=2, data=2, microbatches=4, schedule="zbv")
    assert [stage.devices for stage in folded.stages] == [(0, 2), (2, 2), (2, 2), (0, 2)]
