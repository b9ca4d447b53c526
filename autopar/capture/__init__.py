"""From a model and an example batch to a graph of layers."""

from autopar.capture.batch import BatchStructure, flatten_batch
from autopar.capture.pipeline import capture

__all__ = ["BatchStructure", "capture", "flatten_batch"]
