"""The result of one check of this machine, and its possible statuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

OK, ABSENT, WARNING, BROKEN = "ok", "absent", "warning", "broken"
"""``absent``: missing and optional; ``warning``: some runs need it; ``broken``: every run needs it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: ``value`` says in words what the check found, ``figures`` has the same as data, ``hint`` says how to fix a
    problem."""

    part: str
    name: str
    status: str
    value: str
    hint: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
