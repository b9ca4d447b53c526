"""Hangs and waits before and now: the smallest case of each sort, and the page of the lines."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_overlap
from collective_waits import (
    CHIMERA_BEFORE,
    LAYERS_TIMED,
    NO_LINKS,
    RESULTS,
    RING_BEFORE,
    SHARED,
    TIMED,
    Edit,
    hang_line,
    makespan_line,
    plant,
)
from collective_waits_page import page, passed
from places import file_of
from recorded import Case

import autopar.program
from autopar.verify import kind
from autopar.verify.recording import RecordedSteps, Workers

pytestmark = pytest.mark.slow  # a report is no part of the product

RUNTIME = Path(autopar.program.__file__).parent
CHIMERA = Case(
    "mlp", kind("pipeline 2, Chimera", pipeline=2, microbatches=4, schedule="chimera"), RecordedSteps(steps=1)
)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers() as held:
        yield held


def test_what_hung_hangs_and_what_runs_does_not(workers: Workers) -> None:
    line = hang_line(CHIMERA, CHIMERA_BEFORE, workers)
    assert passed(line) and line["ranks"] == 2
    lost = {name for name, count in line["before"]["stuck"].items() if count}
    assert lost == {"in order", "in order with device_id"}


def test_a_step_takes_its_order_and_the_transfers_on_its_path(workers: Workers) -> None:
    """GPipe issues a receive behind the computation before it, so that each of eight transfers is on the path."""
    case = Case("mlp", kind("pipeline 2, GPipe", pipeline=2, microbatches=4, schedule="gpipe"))
    line = makespan_line(case, NO_LINKS, SHARED, workers)
    assert line["schedule_s"] == 5 * (1 + 2)
    assert line["before"] == line["after"] == {"0.02": 15.16, "0.5": 19.0}


@pytest.mark.parametrize("edits", [RING_BEFORE, CHIMERA_BEFORE, NO_LINKS, TIMED, LAYERS_TIMED])
def test_today_s_files_can_be_changed_back(edits: tuple[Edit, ...], tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir()
    for file in {edit.file for edit in edits}:
        shutil.copy(RUNTIME / file, file_of(tmp_path, file))
    plant(edits, tmp_path)
    for edit in edits:
        text = file_of(tmp_path, edit.file).read_text()
        assert text != (RUNTIME / edit.file).read_text()
        compile(text, edit.file, "exec")


def test_fsdp_s_file_can_be_changed_back() -> None:
    for file, pattern, _ in (test_overlap.ALWAYS_LAST, test_overlap.NOT_KEPT, test_overlap.NO_EVENT):
        assert len(re.findall(pattern, (RUNTIME / file).read_text())) == 1


def test_the_page_is_that_of_its_lines() -> None:
    lines = [json.loads(text) for text in RESULTS.read_text().splitlines()]
    assert all(map(passed, lines))
    assert page(lines) == RESULTS.with_suffix(".md").read_text()
    failed = {"part": "rings", "case": "rings 4 x 2", "failure": "LaunchError: no", "torch": "2.13.0"}
    assert not passed(failed) and "| rings 4 x 2 | **LaunchError: no** |" in page([failed])
