"""Verifies a user's own model: compares every plan's loss and gradients with eager PyTorch on one device, in float64."""

from autopar.verify.attacks import Attacks, attack, compare_with_eager
from autopar.verify.case import PlanOutcome, check_plan
from autopar.verify.kinds import PlanKind, alternating, ends, kind, kinds
from autopar.verify.locate import Difference, locate
from autopar.verify.report import Attacked, CheckedPlan, Failure, Report
from autopar.verify.run import MEMORY_BYTES, check_size, verify
from autopar.verify.shrink import shrink_config, shrink_plan
from autopar.verify.subject import Subject, make_subject

__all__ = [
    "MEMORY_BYTES",
    "Attacked",
    "Attacks",
    "CheckedPlan",
    "Difference",
    "Failure",
    "PlanKind",
    "PlanOutcome",
    "Report",
    "Subject",
    "alternating",
    "attack",
    "check_plan",
    "check_size",
    "ends",
    "compare_with_eager",
    "kind",
    "kinds",
    "locate",
    "make_subject",
    "shrink_config",
    "shrink_plan",
    "verify",
]
