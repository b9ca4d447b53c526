"""Verification of a user's own model: every plan's loss and gradients against eager PyTorch on one device, in float64."""

from autopar.verify.case import Outcome, check_plan
from autopar.verify.kinds import Kind, alternating, ends, kind, kinds
from autopar.verify.subject import Subject, make_subject

__all__ = ["Kind", "Outcome", "Subject", "alternating", "check_plan", "ends", "kind", "kinds", "make_subject"]
