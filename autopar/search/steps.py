"""The steps of a configuration: bounds, solutions, the exact method. One step runs each time that the configuration's bound is the lowest.

Bounds come first: most configurations need no solution, and the linear program provides initial cuts.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from autopar.search.bounds.bottleneck import bottleneck_bound, whole_bound
from autopar.search.bounds.cheap import cheap_bound
from autopar.search.bounds.linear import device_bound, linear_bound, textbook_bound
from autopar.search.construct.candidates import tied_cost
from autopar.search.construct.drafts import CLOSE, construct
from autopar.search.exact import TooManyLabelsError, solve_labels
from autopar.search.minimum_memory import least_memory
from autopar.search.problem import Configuration
from autopar.search.state import SearchNode, State
from autopar.search.tables import Instance

LABEL_LAYERS = 16
"""Maximum number of layers for label setting (``exact``)."""

LABELS_S = 3.0
"""Time limit of label setting. With several stages on each device, each configuration that is too large halves it for the next."""

MARGIN = 0.15
"""A relative difference. Without an incumbent, ``_whole_bound`` considers plans up to this far above the known bound; a configuration
with a bound at least this far below the incumbent may get an early solution (``_textbook``)."""

PROMISING = 0.12
"""If a configuration's early solution is at most this far (relative) above the incumbent, other numbers of chunks get early solutions,
too (``_is_promising``)."""

WASTE_LIMIT = 0.2
"""Maximum share of the time limit spent in a row on early solutions that do not improve the incumbent; then there are no more."""

NONE_YET = 0.15
"""The share of the time limit after which ``_coarse`` looks for a first solution without a pipeline."""

TIE_MULTIPLIERS = (0.0, 0.03, 0.3)
"""Lagrange multipliers of memory for decisions on tied layers, in units of a stage's minimum time per device memory."""

Step = Callable[[State, SearchNode], None]
Bound = Callable[[Instance, float, float], float]
"""``bound(instance, known_s, cutoff_s)`` returns a lower bound of a configuration in seconds, at least ``known_s``. It may stop at
``cutoff_s``, because a configuration with this bound cannot improve the incumbent."""


def may_segment(instance: Instance) -> bool:
    """Return whether the search may recompute several layers of a configuration as one, even if no pin asks for it."""
    return not instance.schedule.multi_stage


def advance(state: State, node: SearchNode) -> None:
    """Run the next step of a configuration."""
    _steps_of(node.instance)[node.done](state, node)


def _steps_of(instance: Instance) -> tuple[Step, ...]:
    schedule = instance.schedule
    if schedule.copies > 1:
        return BIDIRECTIONAL_STEPS
    if schedule.multi_stage:
        return MULTI_STAGE_STEPS
    return ONE_STAGE_STEPS if schedule.stages > 1 else NO_PIPELINE_STEPS


def _raise_bound(state: State, node: SearchNode, bound_s: float) -> None:
    """Give a configuration a higher bound; an infinite bound proves that none of its plans fits."""
    if not np.isfinite(bound_s):
        retry_in_segments(state, node)
    else:
        state.push(node.instance, bound_s, node.done + 1)


def _bounding(bound: Bound) -> Step:
    """Return the step that computes a bound."""
    return lambda state, node: _raise_bound(state, node, bound(node.instance, node.bound_s, state.cutoff_s))


def retry_in_segments(state: State, node: SearchNode) -> None:
    """Continue a configuration for which no plan fits: try segments of several layers, which need less memory. The bound so far may include
    what would free memory without them."""
    instance = segmented(state, node.instance)
    if instance is not None:
        state.push(instance, cheap_bound(instance))


def proved_infeasible(instance: Instance, deadline: float) -> bool:
    """Return whether there is a proof that no plan of a configuration fits in device memory and in its offload tiers."""
    if least_memory(instance)[0] > 1:
        return True
    if not instance.offload_tiers or instance.layers > LABEL_LAYERS:
        return False
    try:
        return solve_labels(instance, np.inf, deadline)[1] is None
    except TooManyLabelsError:
        return False


def segmented(state: State, instance: Instance) -> Instance | None:
    """Return the configuration with segments of several layers among its candidates; ``None`` if there are no such candidates."""
    config = instance.config
    if config.segments or not may_segment(instance):
        return None
    found = state.prices.instance(replace(config, segments=True))
    return (
        found
        if found is not None and any(a is not b for a, b in zip(found.kinds, instance.kinds, strict=True))
        else None
    )


def _coarse(state: State, node: SearchNode) -> None:
    """Compute a coarse bound, which suffices for most configurations. If there is no incumbent after half of the time, construct a solution
    at once. A pipeline of one stage, whose solutions are found fast, gets an early one after ``NONE_YET`` of the time: it discards many
    pipelines before they are priced."""
    bound = bottleneck_bound(node.instance, node.bound_s)
    limit_s, none_yet = state.options.time_limit_s, np.isfinite(bound) and state.best is None
    if none_yet and state.left_s() < 0.5 * limit_s:
        _construct(
            state, replace(node, bound_s=bound, done=_steps_of(node.instance).index(_construct))
        )  # find a plan first
        return
    if none_yet and state.left_s() < (1 - NONE_YET) * limit_s and node.instance.schedule.stages == 1:
        _find_solution(state, node.instance, early=True)
    _raise_bound(state, node, bound)


def _whole_bound(instance: Instance, at_least_s: float, cutoff_s: float) -> float:
    return whole_bound(instance, at_least_s, cutoff_s if np.isfinite(cutoff_s) else (1 + MARGIN) * at_least_s)


def _linear(state: State, node: SearchNode) -> None:
    """Compute ``linear_bound``, which considers all devices together. It stops early if the incumbent is fast."""
    improve_early(state)
    state.solvers.add("GLOP")
    _raise_bound(state, node, linear_bound(node.instance, node.bound_s, state.cutoff_s))


def _textbook(state: State, node: SearchNode) -> None:
    """Compute a coarse bound for several stages on each device. If it is far below the incumbent, or the early solution of another number
    of chunks is about as fast, construct a solution at once: a better incumbent discards other configurations, and is worth more than a
    better bound. There is no such early solution if those with other numbers of chunks were slow, or if the latest ones took too long and
    improved nothing (``WASTE_LIMIT``)."""
    bound_s, known_s = textbook_bound(node.instance, node.bound_s), state.step_s
    config = node.instance.config
    may_waste = state.wasted_s < WASTE_LIMIT * state.options.time_limit_s and not state.raises_bounds_only
    if may_waste and _is_promising(state, config, bound_s):
        started = time.thread_time()
        step_s = _find_solution(state, node.instance, early=True)
        state.early_s.setdefault(config.without_chunks, {})[config.schedule.chunks] = step_s
        state.wasted_s = 0.0 if state.step_s < known_s else state.wasted_s + time.thread_time() - started
    _raise_bound(state, node, bound_s)


def _is_promising(state: State, config: Configuration, bound_s: float) -> bool:
    """Return whether an early solution is worth its time: one with another number of chunks is about as fast as the incumbent; or the bound
    is far below the incumbent, and none with another number is known, or one is about as fast as the early solution of the incumbent's
    configuration with the same number of chunks."""
    own, best_s, limit = state.early_s.get(config.without_chunks, {}), dict[int, float](), 1 + PROMISING
    if bound_s >= (1 - MARGIN) * state.step_s:
        return bound_s < state.cutoff_s and any(s < limit * state.step_s for s in own.values())
    if state.best is not None:
        best_s = state.early_s.get(state.best[0].config.without_chunks, {})
    return not own or any(s < limit * max(state.step_s, best_s.get(chunks, 0.0)) for chunks, s in own.items())


def _construct(state: State, node: SearchNode) -> None:
    """Search for a solution of a configuration."""
    instance = node.instance
    can_improve = node.bound_s < state.cutoff_s and not state.raises_bounds_only
    found_none = can_improve and np.isinf(_find_solution(state, instance))
    if found_none and may_segment(instance) and least_memory(instance)[0] > 1:
        return retry_in_segments(state, node)
    state.push(instance, node.bound_s, node.done + 1)


def _find_solution(state: State, instance: Instance, early: bool = False) -> float:
    """Search for a solution of the configuration; return its seconds, or infinity if none was found. Many early solutions are tried, so
    only those that improve the incumbent get a local search, and no layers are moved: that takes longer than the rest."""
    state.opened += 1
    child = _dive(state, instance)
    if child is None:
        return np.inf
    child.cuts[:] = instance.cuts
    found = construct(child, state.deadline, state.step_s, close=0.0 if early else CLOSE, moves=not early)
    if found is None:
        return np.inf
    state.offer(child, found[1])
    if early:
        heapq.heappush(state.to_improve, (found[0], next(state.counter), child))
    return found[0]


def improve_early(state: State, close: float = 0.0) -> bool:
    """Search again in the configuration of the fastest early solution that is at most ``close`` (relative) slower than the incumbent, now
    with moves of layers and the linear program's cuts; return whether there is one. Each is improved once."""
    if state.raises_bounds_only or not state.to_improve or state.to_improve[0][0] > (1 + close) * state.step_s:
        return False
    instance = heapq.heappop(state.to_improve)[2]
    if not instance.cuts:
        linear_bound(instance, 0.0, state.cutoff_s)  # stores its cuts
    _find_solution(state, instance)
    return True


def _dive(state: State, instance: Instance) -> Instance | None:
    """Return the instance with the most promising decision for every tie; ``None`` if a tie has none. Solutions are searched there before
    the search branches on ties."""
    while (group := state.undecided(instance.config)) is not None:
        children = list(decided(state, instance, group))
        if not children:
            return None
        layers = state.prices.groups[group]
        likely = [min(children, key=lambda child, p=price: tied_cost(child, layers, p)) for price in TIE_MULTIPLIERS]  # type: ignore[misc]
        kept = {id(child): child for child in likely}.values()
        estimate = cheap_bound if instance.schedule.multi_stage else bottleneck_bound
        instance = min(kept, key=estimate) if len(kept) > 1 else likely[0]
    return instance


def decided(state: State, instance: Instance, group: int) -> Iterator[Instance]:
    """Yield an instance for each possible decision of the tie of ``group``."""
    for roles, zero in state.prices.ties(instance.config, group):
        child = state.prices.instance(replace(instance.config, ties=(*instance.config.ties, (group, roles, zero))))
        if child is not None:
            yield child


def _close(state: State, node: SearchNode) -> None:
    """Branch on the next tie of a configuration, or solve it by label setting. If neither works, its bound is final."""
    instance = node.instance
    group = state.undecided(instance.config)
    if group is not None and (not instance.schedule.multi_stage or instance.layers <= LABEL_LAYERS):
        for child in decided(state, instance, group):
            state.push(child, max(node.bound_s, cheap_bound(child)), 1)
        return
    if instance.layers <= LABEL_LAYERS and _labels(state, node):
        return
    state.closed_s = min(state.closed_s, node.bound_s)


def _labels(state: State, node: SearchNode) -> bool:
    """Run label setting; return whether it solved the configuration."""
    instance, several = node.instance, node.instance.schedule.multi_stage
    deadline = time.thread_time() + min(state.left_s(), LABELS_S / 2 ** (state.too_large * several))
    try:
        value, solution = solve_labels(instance, state.step_s, deadline)
    except TooManyLabelsError:
        state.too_large += several
        return False
    state.solvers.add("labels")
    if solution is not None:
        state.offer(instance, solution)
    elif may_segment(instance) and proved_infeasible(instance, deadline):
        retry_in_segments(state, node)
    state.closed_s = min(state.closed_s, value)
    return True


NO_PIPELINE_STEPS = (_coarse, _bounding(_whole_bound), _construct, _linear, _close)
"""Without cuts the linear program gives solutions nothing to start from: it only improves the bound."""

ONE_STAGE_STEPS = (_coarse, _bounding(_whole_bound), _linear, _construct, _close)
MULTI_STAGE_STEPS = (_textbook, _linear, _construct, _bounding(device_bound), _close)
"""``device_bound`` comes after ``_construct``: it takes long, and needs an incumbent."""

BIDIRECTIONAL_STEPS = (_construct, _close)
"""Schedules with copies of each stage have only the cheap bound and, in small models, the exact method."""
