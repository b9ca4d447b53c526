"""What a verification found, as a record and as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from autopar.measure import EXACT
from autopar.verify.locate import Difference


@dataclass(frozen=True, slots=True)
class Checked:
    """One plan that was run: its kind, the largest error of the loss and all gradients, where, and the stages that type-check."""

    kind: str
    plan: str
    error: float
    where: str
    stages_typed: int


@dataclass(frozen=True, slots=True)
class Failure:
    """One plan that is not exact, is ill-typed or does not run; ``first`` is the first node that differs, where one was found."""

    kind: str
    plan: str
    message: str
    first: Difference | None = None

    def to_json(self) -> dict[str, Any]:
        first = None if self.first is None else self.first.to_json()
        return {"kind": self.kind, "plan": self.plan, "message": self.message, "first_difference": first}


@dataclass(frozen=True, slots=True)
class Report:
    """A model's verification. ``skipped`` gives kinds that the model does not admit with the reason; ``notes`` what was changed for the
    comparison (dropout, sizes)."""

    model: str
    devices: int
    checked: tuple[Checked, ...]
    failures: tuple[Failure, ...]
    skipped: dict[str, str]
    typechecked: int
    replicated_ops: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether something was checked, and all of it equals one device."""
        return bool(self.checked) and not self.failures and self.max_relative_difference <= EXACT

    @property
    def max_relative_difference(self) -> float:
        return max((check.error for check in self.checked), default=math.inf)

    def to_json(self) -> dict[str, Any]:
        """A JSON object; a difference that is no number, or nothing checked, is ``null`` there."""
        worst = self.max_relative_difference
        return {
            "exact": self.exact,
            "max_relative_difference": worst if math.isfinite(worst) else None,
            "plans_checked": len(self.checked),
            "typechecked": self.typechecked,
            "replicated_ops": list(self.replicated_ops),
            "failures": [failure.to_json() for failure in self.failures],
            "kinds": [check.kind for check in self.checked],
            "skipped": self.skipped,
            "notes": list(self.notes),
            "model": self.model,
            "devices": self.devices,
        }
