"""One finding about this machine, and the order of what can be found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

OK, ABSENT, WARNING, BROKEN = "ok", "absent", "warning", "broken"
"""``absent`` is something that a run can do without, ``warning`` what some runs will miss, ``broken`` what every run needs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """``value`` is what was found, in words; ``figures`` the same for programs; ``hint`` what to do about it."""

    part: str
    name: str
    status: str
    value: str
    hint: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
