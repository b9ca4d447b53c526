"""Emits a plan's rank-local stages as a folder of readable Python that runs under ``torchrun`` without autopar."""

from autopar.emit.program import emit, layouts, model_source

__all__ = ["emit", "layouts", "model_source"]
