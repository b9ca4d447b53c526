"""The stages of ``autopar.compile`` by name, and how a stage reports its progress."""

from __future__ import annotations

import logging
from collections.abc import Callable

STAGES = ("capture", "search", "emit", "run")
"""The names that the command line, the logs and the progress show."""

Progress = Callable[[str, str], None]
"""Called with a stage's name and a short text: an empty text as the stage begins, then a text for each piece of news."""

log = logging.getLogger("autopar")


def report(progress: Progress | None, stage: str, text: str = "") -> None:
    """Tell the log and ``progress`` that a stage begins (without a text), or its news."""
    assert stage in STAGES, stage
    log.info("%s: %s", stage, text or "begins")
    if progress is not None:
        progress(stage, text)
