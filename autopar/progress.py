"""The stages of ``autopar.compile`` by name, and how a stage reports its progress."""

from __future__ import annotations

import logging
from collections.abc import Callable

STAGES = ("capture", "search", "emit", "run")
"""The names that the command line, the logs and the progress show."""

Progress = Callable[[str, str], None]
"""Called with a stage's name and a text, which is empty when the stage begins."""

log = logging.getLogger("autopar")


def report(progress: Progress | None, stage: str, text: str = "") -> None:
    """Log the beginning of a stage (without a text) or an update, and pass it to ``progress``."""
    assert stage in STAGES, stage
    log.info("%s: %s", stage, text or "begins")
    if progress is not None:
        progress(stage, text)
