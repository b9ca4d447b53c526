"""Schedules that give a device several stages: torch's own orders, what is refused, and programs that are exact."""

from __future__ import annotations

import pytest
from exactness import subject

from autopar.errors import UsageError
from autopar.plan import Plan, device_of, stages_of
from autopar.search.manual import manual_plan, refusal
from autopar.search.schedules import device_groups
from autopar.torch_private import pipeline_order

TORCH = {
    "interleaved-1f1b": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


def sizes(schedule: str) -> list[tuple[int, int, int]]:
    """Devices in a line, chunks and microbatches that the schedule admits."""
    every = [(p, v, m) for p in (2, 3, 4, 5) for v in (1, 2, 3) for m in range(1, 17)]
    return [(p, v, m) for p, v, m in every if refusal(schedule, p, v, m) is None]


@pytest.mark.parametrize("schedule", TORCH)
def test_orders_are_torchs(schedule: str) -> None:
    assert len(sizes(schedule)) > 20
    for line, chunks, m in sizes(schedule):
        wanted = pipeline_order(TORCH[schedule], line, chunks, m)
        assert [device_groups(schedule, rank, line, m, chunks) for rank in range(line)] == wanted, (line, chunks, m)


@pytest.mark.parametrize("schedule", [name for name in TORCH if name != "zbv"])
def test_what_torch_refuses_is_refused(schedule: str) -> None:
    for line, chunks, m in [(2, 2, 3), (4, 2, 6), (3, 2, 5), (4, 2, 7)]:
        if refusal(schedule, line, chunks, m) is not None:
            with pytest.raises(ValueError, match="microbatches"):
                pipeline_order(TORCH[schedule], line, chunks, m)
        else:
            pipeline_order(TORCH[schedule], line, chunks, m)


@pytest.mark.parametrize("schedule", TORCH)
def test_stages_are_where_torch_puts_them(schedule: str) -> None:
    for line, chunks, m in sizes(schedule):
        for rank, groups in enumerate(pipeline_order(TORCH[schedule], line, chunks, m)):
            own = sorted({stage for group in groups for _, stage, _ in group})
            assert own == list(stages_of(rank, line, chunks, schedule))
            assert {device_of(stage, line, schedule) for stage in own} == {rank}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "interleaved-1f1b", "pipeline": 2}, "several stages on each device"),
        ({"schedule": "interleaved-1f1b", "chunks": 2}, "one device in the line"),
        ({"schedule": "1f1b", "pipeline": 2, "chunks": 2, "microbatches": 2}, "one stage on each device"),
        ({"pipeline": 2, "chunks": 2, "microbatches": 5}, "rounds of 2 microbatches"),
        ({"schedule": "zbv", "pipeline": 2, "microbatches": 4}, "two stages on each device, and chunks is 1"),
        ({"schedule": "zero-bubble", "chunks": 2}, "one device in the line"),
        ({"schedule": "zero-bubble", "pipeline": 2, "chunks": 2, "microbatches": 5}, "rounds of 2 microbatches"),
        ({"schedule": "dualpipev", "pipeline": 2, "chunks": 2, "microbatches": 3}, "over 4 stages needs a microbatch"),
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
