"""The numerical deviations from exact training that the user allows, and the best plan over all their combinations."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch

from autopar.errors import AutoparError, BatchError, CaptureError, InfeasibleError, UsageError
from autopar.graph import Graph
from autopar.plan import MICROBATCH_STATISTICS, NARROW, Plan
from autopar.precision import FP8_RECIPES, TF32
from autopar.search.options import SearchOptions, check_allowed
from autopar.techniques import LAYER_DEVIATIONS
from autopar.techniques.technique import ANY

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Numerics:
    """The numerical deviations that one plan may have.

    ``narrow`` has the names of deviations: gradients and moments in 16 bits (``NARROW``), matrix products in 8 bits (``FP8_RECIPES``),
    float32 products in TF32 (``TF32``), and those of techniques (``LAYER_DEVIATIONS``). Each of ``microbatches`` computes its own
    statistics and loss, which is exact only for one microbatch.
    """

    narrow: tuple[str, ...] = ()
    microbatches: int = 1

    @staticmethod
    def of(plan: Plan) -> Numerics:
        """Return the deviations of ``plan``. Raises ``UsageError`` if they contradict each other."""
        check_allowed(plan.allow)
        narrow = tuple(name for name in (*NARROW, *FP8_RECIPES, TF32, *LAYER_DEVIATIONS) if name in plan.allow)
        return Numerics(narrow, plan.microbatches if MICROBATCH_STATISTICS in plan.allow else 1)


def allowed_numerics(graph: Graph, options: SearchOptions) -> list[Numerics]:
    """Return every combination that the user allows and that may make the graph's plan faster, the most exact one first.

    Microbatches are exact if the samples of a batch are independent. Narrow states apply to models in 16 bits, products in 8 bits to models
    in bfloat16, TF32 to models in float32. A deviation that a pin requires is in every combination.
    """
    names = [name for name in NARROW if name in options.allow and graph.dtype.itemsize == 2]
    names += [name for name in FP8_RECIPES if name in options.allow and graph.dtype == torch.bfloat16]
    names += [TF32] if TF32 in options.allow and graph.dtype == torch.float32 else []
    names += [name for name in LAYER_DEVIATIONS if name in options.allow]
    narrow = [some for count in range(len(names) + 1) for some in itertools.combinations(names, count)]
    narrow = [some for some in narrow if set(options.deviations) & set(LAYER_DEVIATIONS) <= set(some)]
    counts = [1]
    if MICROBATCH_STATISTICS in options.allow and graph.unmicrobatchable:
        counts = [m for m in range(1, graph.batch_size + 1) if graph.batch_size % m == 0]
        if options.microbatches is not None:
            counts = [options.microbatches]
    return [Numerics(*each) for each in itertools.product(narrow, counts)]


def is_better(plan: Plan, other: Plan, less_exact: bool, target_gap: float) -> bool:
    """Return whether a plan is preferred to another: one that fits is, and a less exact one must be faster by more than ``target_gap``."""
    if bool(plan.too_full) != bool(other.too_full):
        return not plan.too_full
    return plan.fastest_s < other.fastest_s * (1 - target_gap * less_exact)


def preferred(candidates: Iterable[T], plan_of: Callable[[T], Plan], target_gap: float) -> T | None:
    """Return the candidate whose plan ``is_better`` than the others', the most exact candidates first; ``None`` if there are none."""
    best: T | None = None
    for each in candidates:
        if best is None or is_better(plan_of(each), plan_of(best), True, target_gap):
            best = each
    return best


def best_plan(
    candidates: list[Numerics],
    options: SearchOptions,
    find: Callable[[Numerics, SearchOptions], Plan],
    refused: Callable[[str], None],
) -> Plan:
    """Return the fastest of the plans that ``find`` returns for the candidates, each in an equal share of the time limit; its bound is the
    minimum of all bounds.

    A less exact plan must be faster by more than the target gap. ``refused`` is called with the reason if the model can't
    be captured with a number of microbatches. With several candidates pins are not priced, and a note says so. If there is no plan, the
    error is that of the smallest microbatches for which nothing fits, then of those that pins exclude, then of the capture.
    """
    if len(candidates) == 1:
        return find(candidates[0], options)
    share = dataclasses.replace(options, time_limit_s=options.time_limit_s / len(candidates), pin_time_s=None)
    plans: list[Plan] = []
    why: AutoparError | None = None
    for numerics in candidates:
        try:
            allow = {name for name in share.allow if name not in LAYER_DEVIATIONS or name in numerics.narrow}
            plans.append(find(numerics, dataclasses.replace(share, allow=allow)))
        except (CaptureError, BatchError) as error:  # such as a batch norm over one row
            refused(f"cannot be captured with {numerics.microbatches} microbatches: {error.message}")
            why = why or error
        except (InfeasibleError, UsageError) as error:  # pins may exclude this number of microbatches alone
            if not isinstance(why, InfeasibleError) or isinstance(error, InfeasibleError):
                why = error  # the last error is that of the smallest microbatches, which need the least memory
    if not plans:
        assert why is not None
        raise why
    best = plans[0]
    for plan in plans[1:]:
        one, other = Numerics.of(plan), Numerics.of(best)
        more = len(one.narrow) > len(other.narrow) or one.microbatches > other.microbatches
        best = plan if is_better(plan, best, more, options.target_gap) else best
    bound_s = min(plan.bound_s for plan in plans)
    notes = best.notes
    if options.pin_time_s is not None and (pins := [key for key, value in options.pins.items() if value != ANY]):
        notes += (f"the pins {', '.join(pins)} have no price, because several numerical deviations were searched",)
    gap = max(0.0, 1 - bound_s / best.prediction.step_time_s)
    return dataclasses.replace(best, bound_s=bound_s, gap=gap, notes=notes)
