"""From a model and an example batch to a graph of layers."""

from autopar.capture.apart import apart
from autopar.capture.batch import BatchStructure, flatten_batch, rebuild_batch
from autopar.capture.check import NOT_COMPARED, check_capture
from autopar.capture.float8 import in_float8
from autopar.capture.float64 import WholeFloat64
from autopar.capture.opaque import opaque
from autopar.capture.pipeline import capture

__all__ = [
    "NOT_COMPARED",
    "BatchStructure",
    "WholeFloat64",
    "apart",
    "capture",
    "check_capture",
    "flatten_batch",
    "in_float8",
    "opaque",
    "rebuild_batch",
]
