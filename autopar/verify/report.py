"""The result of a verification, as dataclasses and as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from autopar.measure import EXACT
from autopar.verify.locate import Difference


@dataclass(frozen=True, slots=True)
class CheckedPlan:
    """A plan that ran: its kind, the error of a step (``compare_step``) and where it is, and the number of type-checked stages.
    ``attack`` names the adversarial batch that the plan also ran with (empty: none), ``attack_error`` is the error with that batch."""

    kind: str
    plan: str
    error: float
    where: str
    stages_typed: int
    attack: str = ""
    attack_error: float = 0.0


@dataclass(frozen=True, slots=True)
class Attacked:
    """An attack (``autopar.verify.attacks``: adversarial batches, other modes) on the captured graph: the largest error and where it is."""

    name: str
    error: float
    where: str


@dataclass(frozen=True, slots=True)
class Failure:
    """A plan or an attack that isn't exact, is ill-typed or fails; ``first`` is the first node that differs, if it could be located. For an
    attack, ``kind`` is its name, and ``plan`` is ``"one device"``."""

    kind: str
    plan: str
    message: str
    first: Difference | None = None

    def to_json(self) -> dict[str, Any]:
        first = None if self.first is None else self.first.to_json()
        return {"kind": self.kind, "plan": self.plan, "message": self.message, "first_difference": first}


@dataclass(frozen=True, slots=True)
class Report:
    """The verification of a model. ``skipped`` says why each skipped kind of plan is invalid for the model, ``notes`` how the comparison
    differs from training (no dropout, fewer devices), ``reference`` what the plans are compared with if it isn't training on one device.
    ``typechecked`` counts the programs that type-check, without those that then failed to run. ``replicated_ops`` have no sharding rules.
    ``attacks`` ran on one device; ``attacks_skipped`` says why others didn't; an attack that raised is only in ``failures``."""

    model: str
    devices: int
    checked: tuple[CheckedPlan, ...]
    failures: tuple[Failure, ...]
    skipped: dict[str, str]
    typechecked: int
    replicated_ops: tuple[str, ...]
    notes: tuple[str, ...] = ()
    attacks: tuple[Attacked, ...] = ()
    attacks_skipped: dict[str, str] = field(default_factory=dict)
    reference: str = ""

    @property
    def agrees(self) -> bool:
        """Whether plans were checked and all results equal their references."""
        return bool(self.checked) and not self.failures and self.max_relative_difference <= EXACT

    @property
    def exact(self) -> bool:
        """Whether plans were checked and all results equal training on one device."""
        return self.agrees and not self.reference

    @property
    def max_relative_difference(self) -> float:
        """The largest error of all plans and attacks; infinite if no plan was checked, or if an error is NaN."""
        errors = [error for check in self.checked for error in (check.error, check.attack_error)]
        errors += [attack.error for attack in self.attacks]
        return max(errors) if self.checked and not any(map(math.isnan, errors)) else math.inf

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON, with ``null`` for differences that aren't finite."""
        worst = self.max_relative_difference
        return {
            "exact": self.exact,
            "max_relative_difference": _finite_or_none(worst),
            "plans_checked": len(self.checked),
            "typechecked": self.typechecked,
            "replicated_ops": list(self.replicated_ops),
            "failures": [failure.to_json() for failure in self.failures],
            "kinds": [check.kind for check in self.checked],
            "skipped": self.skipped,
            "attacks": [{"name": a.name, "error": _finite_or_none(a.error), "where": a.where} for a in self.attacks],
            "attacks_in_plans": {check.kind: check.attack for check in self.checked if check.attack},
            "attacks_skipped": self.attacks_skipped,
            "notes": list(self.notes),
            "agrees": self.agrees,
            "reference": self.reference,
            "model": self.model,
            "devices": self.devices,
        }


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
