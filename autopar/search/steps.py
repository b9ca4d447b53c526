"""The steps of a configuration: bounds, solutions, the exact method. One step runs each time that the configuration's bound is the lowest.

Bounds come first: most configurations need no solution, and the linear program provides initial cuts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from autopar.search.bounds.bottleneck import bottleneck_bound, whole_bound
from autopar.search.bounds.cheap import cheap_bound
from autopar.search.bounds.linear import device_bound, linear_bound, textbook_bound
from autopar.search.construct.candidates import tied_cost
from autopar.search.construct.drafts import construct
from autopar.search.exact import TooManyLabelsError, solve_labels
from autopar.search.minimum_memory import least_memory
from autopar.search.problem import Configuration
from autopar.search.state import SearchNode, State
from autopar.search.tables import Instance

LABEL_LAYERS = 16
"""Maximum number of layers for label setting (``exact``)."""

LABELS_S = 3.0
"""Seconds for label setting. With several stages on each device, every configuration that was too large halves them for the next."""

MARGIN = 0.15
"""Relative distance from a configuration's bound. Without an incumbent, bounds look for plans up to this far above it (``_whole``); a bound
this far below the incumbent makes an early solution worthwhile (``_first``)."""

HOPEFUL = 0.05
"""If a configuration's early solution is at most this far (relative) above the incumbent, other numbers of chunks get early solutions,
too (``_is_hopeful``)."""

WASTED = 0.1
"""The share of the time limit for early solutions that do not improve the incumbent; after it, better bounds come first."""

TIE_MULTIPLIERS = (0.0, 0.03, 0.3)
"""Lagrange multipliers of memory for decisions on tied layers, in units of a stage's minimum time per device memory."""

Step = Callable[[State, SearchNode], None]
Bound = Callable[[Instance, float, float], float]
"""Computes a bound of a configuration, in seconds, from the known bound and the seconds from which on the configuration cannot improve the
incumbent."""


def may_segment(instance: Instance) -> bool:
    """Return whether several layers of a configuration may be recomputed as one without a pin."""
    return not instance.schedule.multi_stage


def advance(state: State, node: SearchNode) -> None:
    """Run the next step of a configuration."""
    _steps_of(node.instance)[node.done](state, node)


def _steps_of(instance: Instance) -> tuple[Step, ...]:
    schedule = instance.schedule
    if schedule.copies > 1:
        return BIDIRECTIONAL
    if schedule.multi_stage:
        return MULTI_STAGE
    return ONE_STAGE if schedule.stages > 1 else NO_PIPELINE


def _raise_bound(state: State, node: SearchNode, bound_s: float) -> None:
    """Raise a configuration's bound; an infinite bound proves that none of its plans fits."""
    if not np.isfinite(bound_s):
        retry_in_segments(state, node)
    else:
        state.push(node.instance, bound_s, node.done + 1)


def _bounding(bound: Bound) -> Step:
    """Return the step that computes a bound."""
    return lambda state, node: _raise_bound(state, node, bound(node.instance, node.bound_s, state.cutoff_s))


def retry_in_segments(state: State, node: SearchNode) -> None:
    """Continue a configuration for which no plan fits: try segments of several layers, which need less memory and are never faster, except
    if they replace offloading."""
    instance = segmented(state, node.instance)
    if instance is not None:
        state.push(instance, cheap_bound(instance) if instance.offload_tiers else node.bound_s)


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
    """Compute a coarse bound, which suffices for most configurations. Without an incumbent, late in the search, construct a solution at
    once."""
    bound = bottleneck_bound(node.instance, node.bound_s)
    if np.isfinite(bound) and state.best is None and state.left_s() < 0.5 * state.options.time_limit_s:
        _construct(
            state, replace(node, bound_s=bound, done=_steps_of(node.instance).index(_construct))
        )  # find a plan first
    else:
        _raise_bound(state, node, bound)


def _whole(instance: Instance, at_least_s: float, cutoff_s: float) -> float:
    return whole_bound(instance, at_least_s, cutoff_s if np.isfinite(cutoff_s) else (1 + MARGIN) * at_least_s)


def _linear(state: State, node: SearchNode) -> None:
    """Compute ``linear_bound``, which considers all devices together."""
    state.solvers.add("GLOP")
    _raise_bound(state, node, linear_bound(node.instance, node.bound_s, state.cutoff_s))


def _first(state: State, node: SearchNode) -> None:
    """Compute a coarse bound for several stages on each device. If it is far below the incumbent, construct a solution at once: a better
    incumbent discards other configurations, and is worth more than a better bound. Don't if other numbers of chunks gave little hope, nor
    after too many solutions without improvement."""
    bound_s, known_s = textbook_bound(node.instance, node.bound_s), state.step_s
    config = node.instance.config
    far = np.isfinite(bound_s) and bound_s < (1 - MARGIN) * known_s
    if far and _is_hopeful(state, config) and state.wasted_s < WASTED * state.options.time_limit_s:
        started = time.monotonic()
        state.early_s.setdefault(config.without_chunks, {})[config.schedule.chunks] = _find_solution(
            state, node.instance
        )
        state.wasted_s = 0.0 if state.step_s < known_s else state.wasted_s + time.monotonic() - started
    _raise_bound(state, node, bound_s)


def _is_hopeful(state: State, config: Configuration) -> bool:
    """Return whether no early solution with another number of chunks is known, or one is close to the incumbent, or to the early solution
    of the incumbent's configuration with as many chunks."""
    own, best_s = state.early_s.get(config.without_chunks, {}), dict[int, float]()
    if state.best is not None:
        best_s = state.early_s.get(state.best[0].config.without_chunks, {})
    limit = 1 + HOPEFUL
    return not own or any(s < limit * max(state.step_s, best_s.get(chunks, 0.0)) for chunks, s in own.items())


def _construct(state: State, node: SearchNode) -> None:
    """Search for a solution of a configuration."""
    instance = node.instance
    wanted = node.bound_s < state.cutoff_s
    none = wanted and np.isinf(_find_solution(state, instance))
    if none and may_segment(instance) and least_memory(instance)[0] > 1:
        return retry_in_segments(state, node)
    state.push(instance, node.bound_s, node.done + 1)


def _find_solution(state: State, instance: Instance) -> float:
    """Search for a solution of the configuration; return its seconds, or infinity if none was found."""
    state.opened += 1
    decided = _dive(state, instance)
    if decided is None:
        return np.inf
    decided.cuts[:] = instance.cuts
    found = construct(decided, state.deadline, state.step_s)
    if found is None:
        return np.inf
    state.offer(decided, found[1])
    return found[0]


def _dive(state: State, instance: Instance) -> Instance | None:
    """Return the instance with the most promising decision for every tie, in which a solution is searched before the search branches on
    ties."""
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
    """Branch on the next tie of a configuration, or solve it; its bound is then final."""
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
    deadline = time.monotonic() + min(state.left_s(), LABELS_S / 2 ** (state.too_large * several))
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


NO_PIPELINE = (_coarse, _bounding(_whole), _construct, _linear, _close)
"""One stage has no cuts, so the linear program serves only the proof."""

ONE_STAGE = (_coarse, _bounding(_whole), _linear, _construct, _close)
MULTI_STAGE = (_first, _linear, _construct, _bounding(device_bound), _close)
"""The bound of whole layers comes last: it takes long, and needs an incumbent."""

BIDIRECTIONAL = (_construct, _close)
"""Schedules with copies of each stage have only the cheap bound and, in small models, the exact method."""
