"""autopar turns a single-device PyTorch model and a description of a cluster into a distributed training program.

The names below are public. They are imported lazily, so that ``import autopar`` (and ``autopar --help``) doesn't import torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "capture": "autopar.capture",
    "compile": "autopar.compile",
    "opaque": "autopar.capture",
    "register_rule": "autopar.checks.register",
    "verify": "autopar.verify",
    "Plan": "autopar.plan",
    "Program": "autopar.run",
    "AutoparError": "autopar.errors",
    "UsageError": "autopar.errors",
    "DeviceError": "autopar.errors",
    "ModelError": "autopar.errors",
    "BatchError": "autopar.errors",
    "RuleError": "autopar.errors",
    "CaptureError": "autopar.errors",
    "CheckpointError": "autopar.errors",
    "InfeasibleError": "autopar.errors",
    "ProgramError": "autopar.errors",
    "LaunchError": "autopar.errors",
    "NonFiniteLossError": "autopar.errors",
}

__all__ = [
    "AutoparError",
    "BatchError",
    "CaptureError",
    "CheckpointError",
    "DeviceError",
    "InfeasibleError",
    "LaunchError",
    "ModelError",
    "NonFiniteLossError",
    "Plan",
    "Program",
    "ProgramError",
    "RuleError",
    "UsageError",
    "__version__",
    "capture",
    "compile",
    "opaque",
    "register_rule",
    "verify",
]

if TYPE_CHECKING:
    from autopar.capture import capture, opaque
    from autopar.checks.register import register_rule
    from autopar.compile import compile
    from autopar.errors import (
        AutoparError,
        BatchError,
        CaptureError,
        CheckpointError,
        DeviceError,
        InfeasibleError,
        LaunchError,
        ModelError,
        NonFiniteLossError,
        ProgramError,
        RuleError,
        UsageError,
    )
    from autopar.plan import Plan
    from autopar.run import Program
    from autopar.verify import verify


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """Keeps a public function when the import system binds a submodule of the same name, as for ``autopar.compile``."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
