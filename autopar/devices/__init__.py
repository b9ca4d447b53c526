"""The devices: how many, of which kind, how they are linked, and where each figure comes from."""

from autopar.devices.cluster import Cluster, Gpu, Link
from autopar.devices.constants import Constant
from autopar.devices.hardware import gpu_names
from autopar.devices.parse import described, parse
from autopar.devices.records import Record, records

__all__ = ["Cluster", "Constant", "Gpu", "Link", "Record", "described", "gpu_names", "parse", "records"]
