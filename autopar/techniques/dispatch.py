"""The format in which expert parallelism sends rows to the owners of their experts: the model's, or 8 bits.

8 bits are e4m3 with one scale for each tile of 1 x 128 (``program.kernels_fp8.TiledRows``), as DeepSeek-V3 trains (arXiv:2412.19437,
section 3.3.3). The backward pass sends gradients of the experts' results in the same format. What returns from the experts, results and
gradients of rows, stays in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.techniques.technique import Context, Mode, Pinned, Technique

MODEL, FP8 = "model", "fp8"
FP8_DISPATCH = "fp8_dispatch"


class Dispatch(Technique):
    name = "dispatch_format"
    modes = (
        Mode(MODEL),
        Mode(
            FP8,
            "dispatched in 8 bits",
            FP8,
            deviation=FP8_DISPATCH,
            inexact="expert parallelism sends rows to their experts, and gradients of the experts' results, in e4m3 with one scale for "
            "each 128 numbers, in models in bfloat16",
        ),
    )
    subject = "rows"
    meaning = "the format of the rows that expert parallelism sends to their experts: the model's, or 8 bits (if fp8_dispatch is allowed)"
    example = "dispatch_format=fp8"
    rewrite = "dispatch"
    advice = "leave dispatch_format out; 8 bits need a mixture of experts in bfloat16 whose rows are exchanged"

    def allowed(self, pinned: Pinned, context: Context) -> tuple[str, ...]:
        return (MODEL,) if context.refused.get(self.name) else super().allowed(pinned, context)

    def candidates(self, context: Context) -> tuple[str, ...]:
        return self.within(self.values, context)

    def refused_roles(self, value: str, roles: Sequence[Any]) -> str:
        exchanges = any(role.distributes_experts and (role.shards_batch or role.shards_sequence) for role in roles)
        return "" if value == MODEL or exchanges else "sends no rows to experts on other devices"

    def note(self, names: Sequence[str], total: int, value: str) -> str:
        if value == MODEL:
            return ""
        return (
            f"not exact, as {FP8_DISPATCH} allows: {len(names)} of {total} layers send rows to their experts, and gradients of the "
            "experts' results, in e4m3 (one scale for each 128 numbers); results and gradients of rows return in 16 bits"
        )

    def header(self, value: str, gives_loss: bool = False) -> str:
        if value == MODEL:
            return ""
        return f"Some layers send rows to their experts, and gradients of the results, in 8 bits, as {FP8_DISPATCH} allows."


DISPATCH = Dispatch()
