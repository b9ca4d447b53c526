"""Chimera's action lists: against the paper's figures and formulas, symmetric, and whole."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.errors import UsageError
from autopar.schedules import CHIMERA, ONE_F_ONE_B, Schedule, check_schedule, refusal
from autopar.schedules.memory import StageBytes, live_bytes, max_in_flight
from autopar.schedules.orders import device_order
from autopar.schedules.step_time import longest_paths, parts_of, simulate, textbook_paths, timeline

SIZES = [Schedule(CHIMERA, p, m) for p in (2, 4, 6, 8) for m in (2, 4, 6, 8, 12, 16, 24)]


def listed(schedule: Schedule) -> list[list[tuple[str, int, int]]]:
    return [list(device_order(schedule, rank)) for rank in range(schedule.pipeline)]


def seconds(schedule: Schedule, forward: float, backward: float) -> float:
    return simulate(schedule, [forward] * schedule.stages, [backward] * schedule.stages)


def test_the_basic_unit() -> None:
    """The basic unit on four devices: microbatches 0 and 1 go down, 2 and 3 up; ``.`` is a time at which the device waits."""
    schedule = Schedule(CHIMERA, 4, 4)
    rows = [["."] * 10 for _ in range(4)]
    for span in timeline(schedule, [1.0] * 4, [1.0] * 4):
        rows[schedule.rank(span.stage, span.microbatch)][round(span.start_s)] = f"{span.kind}{span.microbatch}"
    assert [" ".join(row) for row in rows] == [
        "F0 F1 . F2 B2 F3 B3 B0 . B1",
        ". F0 F2 F1 F3 B2 B0 B3 B1 .",
        ". F2 F0 F3 F1 B0 B2 B1 B3 .",
        "F2 F3 . F0 B0 F1 B1 B2 . B3",
    ]


@pytest.mark.parametrize("schedule", SIZES, ids=str)
def test_lists_are_whole_and_symmetric(schedule: Schedule) -> None:
    """Every device runs its two stages for half of the microbatches each; ranks that mirror each other do the same at any time."""
    half, line = schedule.microbatches // 2, schedule.pipeline
    orders = listed(schedule)
    for rank, order in enumerate(orders):
        down, up = range(half), range(half, 2 * half)
        assert schedule.stages_of(rank) == tuple(sorted((rank, line - 1 - rank)))
        assert sorted(order) == sorted(
            (kind, stage, i)
            for kind, (stage, some) in itertools.product("FB", ((rank, down), (line - 1 - rank, up)))
            for i in some
        )
        assert all(schedule.rank(stage, i) == rank for _, stage, i in order)
        assert orders[line - 1 - rank] == [(kind, stage, (i + half) % (2 * half)) for kind, stage, i in order]
        live, _ = live_bytes(
            [(action,) for action in order], schedule.stages_of(rank), StageBytes((3, 3), (0, 0), (0, 0))
        )
        assert live[-1] == 3  # the last microbatch's, until the end of its backward


@pytest.mark.parametrize("line", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("more", [0, 2, 4, 10, 32])
@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (2, 3), (1, 3), (2, 1)])
def test_the_papers_time_and_memory(line: int, more: int, forward: int, backward: int) -> None:
    """Table 2 of the paper for a basic unit: a device waits P - 2 times, between P/2 + 1 and P microbatches are in flight. With more
    microbatches it waits no longer, and no more of them are in flight."""
    schedule = Schedule(CHIMERA, line, line + more)
    busy = schedule.microbatches * (forward + backward)
    assert seconds(schedule, forward, backward) == busy + (line - 2) * max(forward, backward)
    assert seconds(schedule, forward, backward) < seconds(
        Schedule(ONE_F_ONE_B, line, schedule.microbatches), forward, backward
    )
    live = [max_in_flight(schedule, rank) for rank in range(line)]
    assert max(live) == line and min(live) >= line // 2 + 1
    assert more or live[0] == line // 2 + 1


@pytest.mark.parametrize("schedule", SIZES, ids=str)
def test_paths_are_lower_bounds(schedule: Schedule) -> None:
    generator = np.random.default_rng(schedule.microbatches * schedule.pipeline)
    for forward, backward in generator.uniform(0.1, 3, (8, 2, schedule.stages)).tolist():
        parts = parts_of(schedule, forward, backward, ())
        step = simulate(schedule, forward, backward)
        spans = timeline(schedule, forward, backward)
        assert max(span.stop_s for span in spans) == pytest.approx(step)
        assert (textbook_paths(schedule) * parts[:, None]).sum(axis=(0, 2)).max() <= step * (1 + 1e-12)
        longest = [float((path * parts).sum()) for path in longest_paths(schedule, parts, 0.0)]
        assert max(longest) == pytest.approx(step)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Schedule(CHIMERA, 3, 4), "pairs of devices with the same two stages"),
        (Schedule(CHIMERA, 1, 4), "the pipeline has one device"),
        (Schedule(CHIMERA, 4, 3), "half of the microbatches in each direction"),
        (Schedule(CHIMERA, 4, 4, 2), "two stages on each device, one for each direction"),
    ],
)
def test_other_sizes_are_refused(schedule: Schedule, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        check_schedule(schedule)
    assert error.value.hint
    assert refusal(Schedule(CHIMERA, 4, 2)) is None
