"""Emitted programs with something wrong in their text."""

from __future__ import annotations

import re
from typing import Any

import autopar.emit.program as program

_SOURCE = program.model_source


def rewriting(pattern: str, replacement: str) -> Any:
    """In the place of ``model_source``: the text of ``model.py`` with ``pattern`` replaced everywhere; it must be there, and change."""

    def model_source(*args: Any, **kwargs: Any) -> str:
        text = _SOURCE(*args, **kwargs)
        changed = re.sub(pattern, replacement, text)
        assert changed != text, pattern
        return changed

    return model_source
