"""Measures this machine: what its devices and the ways between them do by size, for prices that hold here.

``sweep`` says what is measured, ``remote`` measures it in worker processes that all work at once, ``run`` turns the samples into a
calibration (``autopar.devices.calibration``).
"""

from autopar.profile.run import profile

__all__ = ["profile"]
