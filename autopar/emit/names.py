"""Names in emitted code: identifiers made from the user's, without clashes."""

from __future__ import annotations

import keyword
import re

# What an emitted module defines or imports itself.
_RESERVED = frozenset({"self", "torch", "nn", "F", "spmd", "kernels", "checkpoint", "key"})


def identifier(text: str) -> str:
    """``model.layers.0`` is ``model_layers_0``; never a keyword, never empty, never a name that emitted code uses."""
    name = re.sub(r"\W+", "_", text).strip("_") or "value"
    if name[0].isdigit():
        name = f"_{name}"
    return f"{name}_" if keyword.iskeyword(name) or name in _RESERVED else name


class Names:
    """Hands out identifiers, each once."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def fresh(self, text: str) -> str:
        """An identifier like ``text``, numbered when it is taken."""
        base = identifier(text)
        name, n = base, 1
        while name in self._taken:
            n += 1
            name = f"{base}_{n}"
        self._taken.add(name)
        return name
