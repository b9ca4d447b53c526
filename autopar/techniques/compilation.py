"""Which parts of a program ``torch.compile`` compiles: nothing, or each layer's arithmetic, if its class can be compiled
(``ops.compilation``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.techniques.technique import Context, Mode, Technique

NONE, LAYERS = "none", "layers"


class Compilation(Technique):
    name = "compile"
    modes = (Mode(NONE), Mode(LAYERS, cell="compiled", compiled=True))
    subject = "layers"
    meaning = (
        "what torch.compile compiles: nothing, or each layer's arithmetic; default: layers on GPUs, nothing on CPUs"
    )
    example = "compile=none"
    switch = True
    former_fields = {"compiled": bool}

    def candidates(self, context: Context) -> tuple[str, ...]:
        """Return both values under a schedule that splits the backward pass: an eager layer leaves weight gradients for its second part."""
        return (self.values if context.split else (LAYERS,)) if context.compiled else (NONE,)

    def read(self, layer: Mapping[str, Any]) -> str:
        return str(layer.get(self.name, LAYERS if layer.get("compiled", False) else NONE))


COMPILATION = Compilation()
