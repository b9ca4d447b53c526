"""The checks of ``autopar doctor``: installed packages, hardware, and trial runs on this machine."""

from autopar.doctor.findings import BROKEN, Finding
from autopar.doctor.run import examine

__all__ = ["BROKEN", "Finding", "examine"]
