"""What is installed, what this machine has, and what works here: the findings of ``autopar doctor``."""

from autopar.doctor.findings import BROKEN, Finding
from autopar.doctor.run import examine

__all__ = ["BROKEN", "Finding", "examine"]
