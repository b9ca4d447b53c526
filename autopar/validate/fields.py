"""Reads single fields of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.errors import UsageError

_MAX_INTEGER = 2**40  # the largest allowed number in a row


class RowError(UsageError):
    """The row can't be priced; the message names the field that is missing or invalid."""


def integer(data: Mapping[str, Any], *keys: str, default: int | None = None, least: int = 0) -> int:
    """Return the integer under the first of ``keys`` that the row has. Raises ``RowError`` if it is not an integer from ``least`` to
    ``_MAX_INTEGER``, or if the row has none of the keys and there is no ``default``."""
    for key in keys:
        value = data.get(key)
        if value is None:
            continue
        if isinstance(value, str) and value.strip().isdecimal():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not float(value).is_integer():
            raise RowError(f"{key} = {value!r} is not a whole number")
        if not least <= value <= _MAX_INTEGER:
            raise RowError(f"{key} = {value:g} is not between {least} and {_MAX_INTEGER:g}")
        return int(value)
    if default is None:
        raise RowError(f"{keys[0]} is missing")
    return default
