"""Text in emitted code: identifiers made from the user's names, without clashes, literals, and words in comments and docstrings."""

from __future__ import annotations

import keyword
import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

from torch import nn

from autopar.techniques import ALL

# Modules of the folder whose functions an emitted module may call.
CALLED = frozenset(
    """custom flattened guards kernels kernels_ctc kernels_experts kernels_fp8 kernels_norm kernels_random kernels_ring kernels_rnn
    kernels_vocab opaque weight_gradients""".split()  # noqa: SIM905  a list of words
) | {module for technique in ALL for module in technique.modules}

# Names that an emitted module defines or imports itself.
_RESERVED = CALLED | frozenset(
    """self float range str torch nn F spmd checkpoint key seeds prelude Layer LayerSpec StageSpec TensorSpec ProgramSpec
    Prelude Tensors Total""".split()  # noqa: SIM905  a list of words
)

# Attributes that every module has: the user's attributes may not replace them.
_MODULE = frozenset(dir(nn.Module())) | {
    *("compute", "number", "updates", "SPEC", "expert_body"),
    *(f"piece_{i}" for i in range(64)),  # of a compiled layer in halves
}


def identifier(text: str) -> str:
    """``model.layers.0`` is ``model_layers_0``; never a keyword, never empty, never a name that emitted code uses."""
    name = re.sub(r"\W+", "_", unicodedata.normalize("NFKC", text)).strip("_") or "value"  # as Python reads identifiers
    if not f"_{name}".isidentifier():  # a superscript is a word's character, and not an identifier's
        name = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_") or "value"
    if name[0].isdigit():
        name = f"_{name}"
    return f"{name}_" if keyword.iskeyword(name) or name in _RESERVED else name


def quoted(text: str) -> str:
    """A Python literal of the text, whatever it holds: in double quotes where it needs no escapes."""
    return f'"{text}"' if text.isprintable() and not set(text) & {'"', "\\"} else repr(text)


def remark(text: str) -> str:
    """The text as words of a comment or a docstring, which it cannot end: escapes in place of other than printable characters."""
    return repr(text)[1:-1].replace('"', "'")


class Names:
    """A supply of identifiers: each is given once, and none is in ``taken``."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)

    def fresh(self, text: str) -> str:
        """An identifier like ``text``, with a number if it is taken."""
        base = identifier(text)
        name, n = base, 1
        while name in self._taken:
            n += 1
            name = f"{base}_{n}"
        self._taken.add(name)
        return name


@lru_cache(maxsize=256)
def attributes(paths: tuple[str, ...]) -> dict[str, str]:
    """The attribute paths of a module's parameters, by their dotted names: ``0.weight`` is at ``_0.weight``.

    Siblings whose identifiers would collide (``scale`` and ``_scale``) are numbered, and so is an attribute named like a method.
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
    """One attribute of a module for each of ``names``, in order: ``model.layers.0`` is ``model_layers_0``."""
    taken = Names(_MODULE)
    return tuple(taken.fresh(name) for name in names)
