"""Describes clusters: the number and kind of devices, their links, and the source of every figure."""

from autopar.devices.cluster import Cluster, Gpu, Link
from autopar.devices.constants import Constant
from autopar.devices.hardware import gpu_names
from autopar.devices.parse import check_text, described, parse

__all__ = ["Cluster", "Constant", "Gpu", "Link", "check_text", "described", "gpu_names", "parse"]
