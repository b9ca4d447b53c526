"""Measures the best few plans on this machine's devices, corrects the prices by what was measured, and plans again.

``run`` has the loop, ``times`` what rounds say of step times, ``fit`` what these say of prices, ``prices`` the prices of a graph under
corrected calibrations, ``log`` the file from which a tuning resumes.
"""

from autopar.tune.log import Log, Request
from autopar.tune.result import TuneResult
from autopar.tune.run import Effort, tune

__all__ = ["Effort", "Log", "Request", "TuneResult", "tune"]
