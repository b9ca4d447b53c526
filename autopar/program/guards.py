"""Guards: conditions on the batch under which the program equals the model; every step checks them on the global batch.

Capture evaluated each `if` on the values of the example batch, and the program contains only the branch that was taken.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


class GuardError(ValueError):
    """Raised for a batch with which the model would take a different branch than the program does."""


def as_python_number(value: Tensor, like: Any) -> Any:
    """Return ``value`` as a Python number of the type of ``like``."""
    return type(like)(value.item())


def check_guard(value: Tensor, expected: Any, where: str) -> None:
    """Raise ``GuardError`` unless ``value`` is ``expected``, the Python number that it was for the example batch.

    ``where`` is the file, line and text of the user's code that reads the value.
    """
    found = as_python_number(value, expected)
    if found != expected:
        hint = "" if type(expected) is bool else "; a number that may change stays a tensor if .item() is left out"
        raise GuardError(
            f"{where}: this value was {expected} at capture and is {found} now, so the model may take another branch; "
            f"plan again with a batch like this one{hint}"
        )
