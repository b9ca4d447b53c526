"""How often a layer's gradients are reduced under ZeRO 2 and 3: in the backward pass of every microbatch, or once a step.

Gradients that are reduced once a step accumulate unsharded over the microbatches on each rank, as they always do under ZeRO 0 and 1.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.schedules import CHIMERA, DUALPIPE_V, GPIPE, INTERLEAVED, ONE_F_ONE_B
from autopar.techniques.activations import ACTIVATIONS
from autopar.techniques.technique import Case, Context, Mode, Pinned, Technique

MICROBATCH, STEP = "microbatch", "step"


class Reduce(Technique):
    name = "reduce"
    modes = (
        Mode(MICROBATCH, cell=MICROBATCH),
        Mode(STEP, "reduced once a step", STEP, min_zero=2, unsharded_gradients=True),
    )
    subject = "gradients"
    meaning = "how often gradients are reduced under ZeRO 2 and 3: in every microbatch, or once per step"
    example = "reduce=step"
    adds_work = True
    specified = True

    def effort(self, value: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (), (self.values.index(value),)

    def allowed(self, pinned: Pinned, context: Context) -> tuple[str, ...]:
        # with one microbatch per step both values reduce once a step
        return super().allowed(pinned, context) if context.several_microbatches else (MICROBATCH,)

    def candidates(self, context: Context) -> tuple[str, ...]:
        return self.values

    def cases(self, n: int) -> Iterator[Case]:
        once = {self.name: STEP}
        for zero in (2, 3) if n > 1 else ():
            yield f"data {n}, zero {zero}, reduced once a step", {"data": n, "zero": zero, "microbatches": 4} | once
        if n % 2 == 0 and n >= 4:
            yield from self._combined(n // 2)

    def _combined(self, half: int) -> Iterator[Case]:
        """Yield cases on ``2 half`` devices that combine the value ``step`` with HSDP and pipelines."""
        two, three = ({"data": half, "zero": zero, self.name: STEP} for zero in (2, 3))
        copies = {"mesh": (("replicas", 2), ("data", half)), "replicate": 2, "zero": 3, self.name: STEP}
        one, gpipe = ({"pipeline": 2, "microbatches": 2, "schedule": name} for name in (ONE_F_ONE_B, GPIPE))
        chunks = {"pipeline": 2, "chunks": 2, "microbatches": 4}
        full, part = ({ACTIVATIONS.name: ACTIVATIONS.value_with(recomputes=again)} for again in ("all", "part"))
        yield f"data {half} in 2 copies, zero 3, reduced once a step", copies | {"microbatches": 2}
        yield f"pipeline 2 x data {half}, zero 2, reduced once a step", two | one
        yield f"pipeline 2, gpipe x data {half}, zero 3{{}}, reduced once a step", three | gpipe | part
        yield (
            f"pipeline 2 of 2 chunks x data {half}, zero 3{{}}, reduced once a step",
            three | chunks | {"schedule": INTERLEAVED} | full,
        )
        dualpipe = three | chunks | {"schedule": DUALPIPE_V}
        yield f"pipeline 2, DualPipeV x data {half}, zero 3, reduced once a step", dualpipe
        chimera = two | {"pipeline": 2, "microbatches": 4, "schedule": CHIMERA}
        yield f"pipeline 2, Chimera x data {half}, zero 2, reduced once a step", chimera

    def random_value(self, number: float, zero: int) -> str:
        return STEP if zero >= 2 and int(number * 100) % 2 else MICROBATCH


REDUCE = Reduce()
