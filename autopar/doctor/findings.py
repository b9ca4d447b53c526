"""The result of one check of this machine, and its possible statuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

OK, ABSENT, WARNING, BROKEN = "ok", "absent", "warning", "broken"
"""``absent``: missing, but optional; ``warning``: a problem for some runs; ``broken``: a problem for every run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: ``value`` is the result in words, ``figures`` has it as data, ``hint`` tells how to fix a problem,
    ``status`` is one of the four above."""

    part: str
    name: str
    status: str
    value: str
    hint: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
