"""The chapter of concepts shows what the code says now, in its tables and in its pictures."""

from __future__ import annotations

import re
from pathlib import Path

import concept_pictures
import pytest
from concepts import FOLDER, PAGES, SCHEDULES, renewed, setting, spans_of

_NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")


@pytest.mark.parametrize("page", list(PAGES))
def test_the_page_is_current(page: str) -> None:
    made, text = PAGES[page](), (FOLDER / page).read_text()
    assert renewed(text, made.tables) == text, "make report NAME=concepts"
    assert all(f"]({name})" in text and (FOLDER / name).is_file() for name in made.pictures)


@pytest.mark.slow
@pytest.mark.parametrize("page", list(PAGES))
def test_the_pictures_are_current(page: str, tmp_path: Path) -> None:
    """They show what the tables say, and matplotlib takes as long as all of the prices."""
    for name, draw in PAGES[page]().pictures.items():
        concept_pictures.drawn(draw, tmp_path / name)
        same_picture(tmp_path / name, FOLDER / name)


def same_picture(made: Path, kept: Path) -> None:
    """The same shapes and words, at places that differ by rounding at most."""
    texts = [path.read_text() for path in (made, kept)]
    assert _NUMBER.sub("", texts[0]) == _NUMBER.sub("", texts[1]), f"{kept.name}: make report NAME=concepts"
    numbers = [[float(n) for n in _NUMBER.findall(text)] for text in texts]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-3, abs=1e-2), f"{kept.name}: make report NAME=concepts"


def test_every_page_has_a_picture_and_is_short() -> None:
    for page in FOLDER.glob("*.md"):
        text = page.read_text()
        assert page.name in PAGES and ".svg)" in text
        assert len(re.sub(r"(?m)^\|.*$|```.*?```", "", text).split()) < 700, page


def test_the_bubble_is_the_textbooks() -> None:
    """1F1B waits for (p - 1) / (m + p - 1) of the step."""
    schedule = next(s for s in SCHEDULES if s.name == "1f1b")
    p, m = schedule.pipeline, schedule.microbatches
    end = max(span.stop_s for span in spans_of(schedule))
    assert 1 - 3 * m / end == pytest.approx((p - 1) / (m + p - 1))


def test_the_optimizer_state_under_zero_1_is_an_eighth() -> None:
    whole, sharded = (setting().plan(data=8, microbatches=8, zero=z).stages[0].memory.optimizer for z in (0, 1))
    assert whole / sharded == pytest.approx(8, rel=1e-3)
