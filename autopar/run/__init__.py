"""Runs emitted programs: local worker processes, and ``Program``, the class that users call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.run.program import Program

__all__ = ["Program"]


def __getattr__(name: str) -> Any:
    """Import ``Program`` lazily: worker processes don't need its modules."""
    if name != "Program":
        raise AttributeError(f"module 'autopar.run' has no attribute {name!r}")
    from autopar.run.program import Program

    return Program
