"""Results are kept until the code changes, and words are not code."""

from __future__ import annotations

from results import without_docstrings

CODE = '''
"""A module."""

LIMIT = 3
"""Seconds."""

class Clock:
    """A clock."""

def late(seconds):
    """Whether time is over."""
    return seconds > LIMIT  # not at the limit
'''


def test_words_of_a_file_are_not_its_code() -> None:
    words = CODE.replace("A module", "The module").replace("Seconds.", "In s.").replace("A clock", "Time")
    other = words.replace("Whether time is over.", "If it is late.").replace("  # not at the limit", "")
    assert other != CODE
    assert without_docstrings(other) == without_docstrings(CODE)


def test_any_other_change_is_one_of_code() -> None:
    for before, after in (
        ("LIMIT = 3", "LIMIT = 4"),
        ("seconds > LIMIT", "seconds >= LIMIT"),
        ("late(seconds)", "late(seconds=0)"),
    ):
        assert without_docstrings(CODE.replace(before, after)) != without_docstrings(CODE)
