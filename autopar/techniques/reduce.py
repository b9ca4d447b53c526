"""How often a layer's gradients are reduced under ZeRO 2 and 3: in the backward pass of every microbatch, or once a step.

Gradients that are reduced once a step add up locally and whole over the microbatches. Under ZeRO 0 and 1 they always do.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.techniques.technique import Case, Context, Pinned, Technique, Way

MICROBATCH, STEP = "microbatch", "step"


class Reduce(Technique):
    name = "reduce"
    ways = (Way(MICROBATCH, cell=MICROBATCH), Way(STEP, "reduced once a step", STEP, zero=2))
    subject = "gradients"
    meaning = "how often gradients are reduced under ZeRO 2 and 3: in every microbatch, or once a step"
    example = "reduce=step"

    def effort(self, value: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (), (self.values.index(value),)

    def allowed(self, pinned: Pinned, context: Context) -> tuple[str, ...]:
        return super().allowed(pinned, context) if context.several else (MICROBATCH,)  # both are the same then

    def candidates(self, context: Context) -> tuple[str, ...]:
        return self.values

    def cases(self, n: int) -> Iterator[Case]:
        for zero in (2, 3):
            pins = {"data": n, "zero": zero, self.name: STEP, "microbatches": 4}
            yield f"data {n}, zero {zero}, reduced once a step", pins


REDUCE = Reduce()
