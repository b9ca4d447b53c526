"""How far prices of published runs were off, by trainer: ``errors.toml``, which ``make report NAME=validation`` writes."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("errors.toml")


@dataclass(frozen=True)
class PublishedErrors:
    """Relative errors of step time and memory on ``runs`` and ``memory_runs`` published runs: the median, and what nine of ten are below.
    The cost model's constants were chosen with these runs in view. Memory errors are 0 without runs."""

    runs: int
    time_median: float
    time_p90: float
    memory_runs: int = 0
    memory_median: float = 0.0
    memory_p90: float = 0.0

    def __str__(self) -> str:
        time = f"step time off by {self.time_median:.0%} in the median and {self.time_p90:.0%} in one of ten of {self.runs} published runs"
        if not self.memory_runs:
            return time
        return f"{time}, memory by {self.memory_median:.0%} and {self.memory_p90:.0%} in {self.memory_runs}"


@functools.cache
def published_errors() -> dict[str, PublishedErrors]:
    """Return the errors by ``Trainer.evidence``."""
    return {name: PublishedErrors(**fields) for name, fields in tomllib.loads(FILE.read_text("utf-8")).items()}
