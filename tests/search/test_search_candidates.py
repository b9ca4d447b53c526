"""Seconds by which a layer's candidates are compared before there are stages, against the simulated step."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from autopar.schedules import Schedule
from autopar.schedules.step_time import simulate
from autopar.search.construct.candidates import seconds_of

SCHEDULES = (
    Schedule("none", 1, 6),
    Schedule("gpipe", 4, 1),
    Schedule("1f1b", 4, 8),
    Schedule("interleaved-1f1b", 4, 8, 2),
    Schedule("interleaved-1f1b", 2, 4, 3),
)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_candidates_differ_as_steps_of_equal_stages_do(schedule: Schedule) -> None:
    """Each rank has one layer for each of its stages; a candidate costs time in every microbatch, or once a step."""
    time, once = np.array([3.0, 4.0, 3.5]), np.array([9.0, 0.0, 2.0])
    steps = [
        simulate(schedule, [t / 3] * schedule.stages, [2 * t / 3] * schedule.stages) + schedule.chunks * s
        for t, s in zip(time, once, strict=True)
    ]
    found = seconds_of(SimpleNamespace(schedule=schedule), SimpleNamespace(time=time, step=once))  # type: ignore[arg-type]
    assert np.array(steps) / np.array(steps)[0] == pytest.approx(found / found[0])
