"""Captures a model and an example batch as a graph of layers."""

from autopar.capture.batch import BatchStructure, flatten_batch, rebuild_batch
from autopar.capture.check import NOT_COMPARED, check_capture, without_check
from autopar.capture.deepen import deepen
from autopar.capture.float8 import in_float8
from autopar.capture.float64 import Float64Everywhere
from autopar.capture.opaque import opaque
from autopar.capture.pipeline import capture
from autopar.capture.separate_microbatches import separate_microbatches

__all__ = [
    "NOT_COMPARED",
    "BatchStructure",
    "Float64Everywhere",
    "capture",
    "check_capture",
    "deepen",
    "flatten_batch",
    "in_float8",
    "opaque",
    "rebuild_batch",
    "separate_microbatches",
    "without_check",
]
