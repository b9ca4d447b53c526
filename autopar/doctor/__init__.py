"""Packages, hardware and working parts of this machine: the findings of ``autopar doctor``."""

from autopar.doctor.findings import BROKEN, Finding
from autopar.doctor.run import examine

__all__ = ["BROKEN", "Finding", "examine"]
