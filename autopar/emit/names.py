"""Makes identifiers, string literals and comments of emitted code from the user's names."""

from __future__ import annotations

import keyword
import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

from torch import nn

from autopar.techniques import ALL

# runtime modules whose functions emitted code may call
CALLED = frozenset(
    """custom flattened guards kernels kernels_ctc kernels_experts kernels_fp8 kernels_norm kernels_random kernels_ring kernels_rnn
    kernels_vocab opaque weight_gradients""".split()  # noqa: SIM905  a list of words
) | {module for technique in ALL for module in technique.modules}

# names that emitted modules define or import
_RESERVED = CALLED | frozenset(
    """self float range str torch nn F spmd checkpoint key seeds prelude Layer LayerSpec StageSpec TensorSpec ProgramSpec
    Prelude Tensors Total OPTIONS""".split()  # noqa: SIM905  a list of words
)

# attributes of every module, which parameters of the user's model may not replace
_MODULE = frozenset(dir(nn.Module())) | {
    *("compute", "number", "updates", "SPEC", "expert_body"),
    *(f"piece_{i}" for i in range(64)),  # methods of a compiled layer in halves
}


def identifier(text: str) -> str:
    """Return an identifier such as ``model_layers_0`` for ``model.layers.0``; never a keyword, empty, or a reserved name."""
    name = re.sub(r"\W+", "_", unicodedata.normalize("NFKC", text)).strip("_") or "value"  # as Python reads identifiers
    if not f"_{name}".isidentifier():  # superscripts match \\w and aren't valid in identifiers
        name = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") or "value"
    if name[0].isdigit():
        name = f"_{name}"
    return f"{name}_" if keyword.iskeyword(name) or name in _RESERVED else name


def quoted(text: str) -> str:
    """Return a string literal, in double quotes unless it needs escapes."""
    return f'"{text}"' if text.isprintable() and not set(text) & {'"', "\\"} else repr(text)


def remark(text: str) -> str:
    """Escape text for comments and docstrings, so that it can't end them."""
    return repr(text)[1:-1].replace('"', "'")


class Names:
    """Makes unique identifiers that aren't in ``taken``."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)

    def exactly(self, name: str) -> str:
        """Return ``name``, an identifier that the runtime passes an argument by, and take it."""
        assert name.isidentifier() and name not in self._taken | _RESERVED, name
        self._taken.add(name)
        return name

    def fresh(self, text: str) -> str:
        """Return an identifier like ``text``, with a number if it is taken."""
        base = identifier(text)
        name, n = base, 1
        while name in self._taken:
            n += 1
            name = f"{base}_{n}"
        self._taken.add(name)
        return name


@lru_cache(maxsize=256)
def attributes(paths: tuple[str, ...]) -> dict[str, str]:
    """Map dotted names of parameters to attribute paths: ``0.weight`` to ``_0.weight``.

    Siblings whose identifiers would collide (``scale`` and ``_scale``) are numbered, as are attributes named like methods.
    """
    made = {"": ""}
    names: dict[str, Names] = {}
    for path in paths:
        parent = ""
        for part in path.split("."):
            here = f"{parent}.{part}" if parent else part
            if here not in made:
                fresh = names.setdefault(parent, Names(_MODULE)).fresh(part)
                made[here] = f"{made[parent]}.{fresh}" if parent else fresh
            parent = here
    return {path: made[path] for path in paths}


@lru_cache(maxsize=256)
def flat_attributes(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return an attribute for each of ``names``: ``model_layers_0`` for ``model.layers.0``."""
    taken = Names(_MODULE)
    return tuple(taken.fresh(name) for name in names)
