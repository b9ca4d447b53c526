"""Measures this machine's devices and the links between them, at several sizes, to calibrate the cost model.

``sweep`` lists the measurements, ``remote`` makes them in worker processes that run at the same time, ``run`` turns the samples into a
calibration (``autopar.devices.calibration``).
"""

from autopar.profile.run import profile

__all__ = ["profile"]
