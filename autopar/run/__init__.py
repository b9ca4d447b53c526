"""Running an emitted program: local worker processes, and the ``Program`` that a user holds."""

from autopar.run.program import Program

__all__ = ["Program"]
