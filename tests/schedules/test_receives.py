"""The receive buffers that a rank uses again under torch's schedules, and how many are priced."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from autopar.program.pipeline import received_at_once
from autopar.schedules import Schedule, refusal
from autopar.schedules.memory import _most_received, pipeline_buffers
from autopar.torch_private import pipeline_schedule

TORCH = {
    "interleaved-1f1b": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
PASSES = ("F", "B", "I")


def sizes(name: str) -> list[Schedule]:
    lengths = (2, 4, 6, 9, 16, 30)
    every = [Schedule(name, p, m, v) for p in (2, 3, 4, 5) for v in (1, 2, 3) for m in lengths]
    return [
        schedule for schedule in every if refusal(schedule) is None and (name != "zbv" or schedule.microbatches > 8)
    ]


def orders_of(schedule: Schedule) -> dict[int, list[Any]]:
    """What torch's ranks do, transfers included."""
    name = TORCH[schedule.name]
    made = pipeline_schedule(name, schedule.pipeline, schedule.chunks, schedule.microbatches)
    found: dict[int, list[Any]] = made.pipeline_order_with_comms
    return found


def actions(order: list[Any]) -> list[list[tuple[str, int, int]]]:
    groups = [group.sub_actions or (group,) for group in order]
    return [[(str(a.computation_type.value), a.stage_index, a.microbatch_index) for a in group] for group in groups]


def has_overwritten(schedule: Schedule, rank: int, order: list[Any], depths: tuple[dict[int, int], ...]) -> bool:
    """Whether a rank receives into a buffer that its ``depths`` give to a microbatch whose backward pass has not ended."""
    mine = schedule.stages_of(rank)
    buffers: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for group in actions(order):
        for kind, stage, i in group:
            receiver = {"RECV_F": (0, stage), "RECV_B": (1, stage)}.get(kind)
            if kind == "F" and stage + 1 in mine:
                receiver = 0, stage + 1
            elif kind in "BI" and stage - 1 in mine:
                receiver = 1, stage - 1
            if receiver is not None:
                which, target = receiver
                if i % depths[which][target] in buffers[receiver]:
                    return True
                buffers[receiver][i % depths[which][target]] = i
            which = int(kind != "F")
            if kind in PASSES and stage in depths[which]:
                assert buffers[which, stage][i % depths[which][stage]] == i  # what the pass reads
        for kind, stage, i in group:
            for which in (0, 1) if kind in ("B", "W") else ():
                if stage in depths[which]:
                    del buffers[which, stage][i % depths[which][stage]]
    assert not any(buffers.values())
    return False


@pytest.mark.parametrize("name", TORCH)
def test_buffers_are_used_again_when_their_microbatch_has_ended(name: str) -> None:
    """With a buffer less, something would be overwritten."""
    bounded = 0
    for schedule in sizes(name):
        for rank, order in orders_of(schedule).items():
            depths = received_at_once(order)
            assert not has_overwritten(schedule, rank, order, depths)
            for which in (0, 1):
                for stage, depth in depths[which].items():
                    bounded += depth < schedule.microbatches
                    if depth > 1:
                        fewer = [dict(each) for each in depths]
                        fewer[which][stage] -= 1
                        assert has_overwritten(schedule, rank, order, tuple(fewer))
    assert bounded > 50


@pytest.mark.parametrize("name", TORCH)
def test_prices_count_what_torch_receives(name: str) -> None:
    for schedule in sizes(name):
        inputs, gradients = _most_received(schedule)
        for rank, order in orders_of(schedule).items():
            depths = received_at_once(order)
            for stage in schedule.stages_of(rank):
                if stage > 0 and schedule.links[stage - 1] is not None:
                    assert inputs[stage] == depths[0][stage], (schedule, stage)
                if stage < schedule.stages - 1 and schedule.links[stage] is not None:
                    assert gradients[stage] <= depths[1][stage] <= gradients[stage] + 3, (schedule, stage)


def test_buffers_do_not_grow_with_the_number_of_microbatches() -> None:
    for name, chunks in {"interleaved-1f1b": 2, "zero-bubble": 2, "zbv": 2, "dualpipev": 2, "1f1b": 1}.items():
        few, many = (pipeline_buffers(Schedule(name, 4, m, chunks)) for m in (32, 128))
        assert few == many and max(few) < 32
