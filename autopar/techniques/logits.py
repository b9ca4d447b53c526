"""How the layer with the loss computes the logits of its cross entropy: all at once, or in slices of the vocabulary.

Slices are recomputed in the backward pass, so that memory holds one slice at a time (``passes.slice_logits``, ``program.kernels_logits``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from autopar.techniques.activations import ACTIVATIONS
from autopar.techniques.technique import Case, Context, Mode, Pinned, Technique

WHOLE, SLICED = "whole", "sliced"


class Logits(Technique):
    name = "logits"
    modes = (Mode(WHOLE, cell=WHOLE), Mode(SLICED, "in slices of the vocabulary", SLICED))
    subject = "logits"
    single_layer = True
    meaning = "how the loss layer computes its logits: all at once, or in slices of the vocabulary, which the backward pass recomputes"
    example = "logits=sliced"
    modules = ("kernels_logits",)
    rewrite = "slice_logits"
    advice = "leave logits out; slices need logits of a linear layer, at most scaled or capped, that only the cross entropy reads"
    # slices of smaller logits save little memory, and trying them makes the search a fifth slower
    min_memory_share = 0.1

    def refusal(self, graph: Any, cls: str) -> str:
        return super().refusal(graph, cls) if graph.classes[cls].gives_loss else "computes no loss"

    def allowed(self, pinned: Pinned, context: Context) -> tuple[str, ...]:
        return (WHOLE,) if context.refused.get(self.name) else super().allowed(pinned, context)

    def candidates(self, context: Context) -> tuple[str, ...]:
        return self.values

    def simplest(self, pinned: Pinned, context: Context) -> str:
        return str(pinned(self.name) or WHOLE)

    def is_tried_with(self, value: str, options: Any) -> bool:
        """Return whether to try ``value``: slices on top of recomputed or offloaded activations would save little more."""
        return value == WHOLE or not (options.recomputes or options.saved_in)

    def note(self, names: Sequence[str], total: int, value: str) -> str:
        if value == WHOLE:
            return ""
        return (
            f"{', '.join(names)} computes its logits in slices of the vocabulary, which the backward pass recomputes: memory has one "
            "slice at a time"
        )

    def cases(self, n: int) -> Iterator[Case]:
        if n == 1:
            return
        yield (
            f"logits in slices, tensor+sequence {n}",
            {"tensor": n, "sequence": True, "microbatches": 2, self.name: SLICED},
        )
        yield f"logits in slices, pipeline {n}", {"pipeline": n, "microbatches": 4 if n <= 4 else n, self.name: SLICED}
        yield (
            f"logits in slices, data {n}, zero 3{{}}",
            {"data": n, "zero": 3, ACTIVATIONS.name: ACTIVATIONS.value_with(recomputes="all"), self.name: SLICED},
        )


LOGITS = Logits()
