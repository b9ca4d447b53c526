"""Schedules that give a device several stages: torch's own orders, what is refused, and programs that are exact."""

from __future__ import annotations

import pytest
from exactness import subject

from autopar.errors import UsageError
from autopar.plan import Plan
from autopar.search.hand import hand_plan
from autopar.search.simulate import device_order
from autopar.torch_private import pipeline_order

TORCH = {"interleaved-1f1b": "Interleaved1F1B"}


def sizes(schedule: str) -> list[tuple[int, int, int]]:
    """Devices in a line, chunks and microbatches that the schedule admits."""
    return [(p, v, m) for p in (2, 3, 4) for v in (2, 3) for m in range(1, 17) if m % max(1, m // p) == 0]


@pytest.mark.parametrize("schedule", TORCH)
def test_orders_are_torchs(schedule: str) -> None:
    for line, chunks, m in sizes(schedule):
        wanted = pipeline_order(TORCH[schedule], line, chunks, m)
        assert [device_order(schedule, rank, line, m, chunks) for rank in range(line)] == wanted, (line, chunks, m)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "interleaved-1f1b", "pipeline": 2}, "several stages on each device"),
        ({"schedule": "interleaved-1f1b", "chunks": 2}, "one device in the line"),
        ({"schedule": "1f1b", "pipeline": 2, "chunks": 2, "microbatches": 2}, "one stage on each device"),
        ({"pipeline": 2, "chunks": 2, "microbatches": 5}, "rounds of 2 microbatches"),
        ({"pipeline": 4, "chunks": 2}, "6 layers cannot be cut into 8"),
        ({"schedule": "bfs", "pipeline": 2}, "no schedule 'bfs'"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        hand_plan(subject("llama").graph, **options)  # type: ignore[arg-type]
    assert error.value.hint


def test_a_device_has_every_so_many_stages() -> None:
    plan = hand_plan(subject("llama").graph, pipeline=2, chunks=3, data=2, microbatches=4)
    assert plan.schedule == "interleaved-1f1b" and plan.pipeline == 2 and plan.device_count == 4
    assert [stage.devices for stage in plan.stages] == [(0, 2), (2, 2)] * 3
    assert Plan.from_json(plan.to_json()) == plan
