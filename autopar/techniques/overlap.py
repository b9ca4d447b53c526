"""Which collectives of a layer overlap its arithmetic.

``tensor``: the tensor-parallel collectives that ``passes.overlap`` starts early: the input gradient of a column-parallel linear layer is
reduced while the weight gradient is computed. ``halves``: all collectives, because the microbatch is computed in two halves that take turns
(as Megatron and DeepSeek-V3 do for the all-to-alls of experts). A layer that cannot be split into halves falls back to ``tensor``.
``pairs``: under DualPipeV, the all-to-alls of experts, while the other pass of a pair computes (``program.pairs``).
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.schedules import DUALPIPE_V, SCHEDULES, SPLIT, Schedule
from autopar.techniques.activations import ACTIVATIONS
from autopar.techniques.technique import Call, Case, Conflict, Mode, Technique, Value

TENSOR, NONE, HALVES, IN_PAIRS = "tensor", "none", "halves", "pairs"


class Overlap(Technique):
    name = "overlap"
    modes = (
        Mode(TENSOR, cell=TENSOR, early_collectives=True),
        Mode(NONE, cell=NONE),
        Mode(HALVES, "in two alternating halves", HALVES, early_collectives=True, parts=2, fallback=TENSOR),
        Mode(IN_PAIRS, cell=IN_PAIRS, overlaps_pairs=True),
    )
    subject = "microbatches"
    meaning = "which collectives overlap with computation (default: tensor, and pairs under the schedule dualpipev)"
    example = "overlap=none"
    default_if_missing = NONE
    under_split = NONE
    conflicts = (
        Conflict(
            (IN_PAIRS,),
            "schedule",
            tuple(name for name in SCHEDULES if name not in SPLIT),
            "only DualPipeV pairs passes",
            pinned=DUALPIPE_V,
        ),
    )
    modules = ("halves", "kernels_overlap", "pairs")
    former_modules = ("halves_experts",)
    compute_type = "halves.Half"
    rewrite_local = "overlap"
    advice = "use an even number of rows on each device in a microbatch, and layers with tensor or expert parallelism; or leave overlap out"

    def under(self, value: str, schedule: Schedule) -> str:
        return IN_PAIRS if schedule.paired and value != NONE else super().under(value, schedule)

    def wrap_call(self, value: str, call: Call) -> Call:
        if value != HALVES:
            return call
        remark, function = "", call.function
        if call.layers:
            remark = "Two halves of the microbatch: one computes while the other's collectives run."
            function = "halves.in_turn"
        given = f"({''.join(f'{argument}, ' for argument in call.arguments).rstrip()})"
        return call.by("halves.interleaved", function, given, str(call.rows), str(call.joined), remark=remark)

    def cases(self, n: int) -> Iterator[Case]:
        if n == 1:
            return
        yield f"tensor {n}, no overlap", {"tensor": n, self.name: NONE}
        yield f"tensor+sequence {n}, no overlap", {"tensor": n, "sequence": True, self.name: NONE}
        halves = {self.name: HALVES}
        yield f"tensor {n}, in halves", {"tensor": n, "microbatches": 2} | halves
        yield f"tensor+sequence {n}, in halves", {"tensor": n, "sequence": True} | halves
        yield f"expert {n}, in halves", {"expert": n} | halves
        if n % 2 == 0 and n >= 4:
            half = n // 2
            yield f"expert 2 x {half}, relayed, in halves", {"mesh": [("relay", 2), ("expert", half)]} | halves
            full = {"data": 2, "tensor": half, "zero": 3, ACTIVATIONS.name: ACTIVATIONS.value_with(recomputes="all")}
            yield f"data 2 x tensor {half}, zero 3{{}}, in halves", full | halves
            pipeline = {"tensor": half, "sequence": True, "pipeline": 2, "microbatches": 2, "schedule": "1f1b"}
            yield f"pipeline 2 x tensor+sequence {half}, in halves", pipeline | halves
            paired = {"pipeline": 2, "chunks": 2, "microbatches": 4, "schedule": DUALPIPE_V}
            for value, words in ((IN_PAIRS, "overlapped"), (NONE, "no overlap")):
                yield f"pipeline 2, DualPipeV x expert {half}, {words}", paired | {"expert": half, self.name: value}

    def alternatives(self) -> Iterator[tuple[str, str, dict[str, Value], str]]:
        yield "halves", "microbatches in two alternating halves", {self.name: HALVES}, ""


OVERLAP = Overlap()
