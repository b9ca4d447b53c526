"""The steps of an outer choice: bounds, solutions, then a proof. One step runs each time that the choice's bound is the lowest.

An ``Engine`` is such a sequence. Choices with one stage on each device get bounds before solutions: their bounds are tight,
and most choices need no solution. With several stages on each device bounds are expensive and looser, and a solution comes first: the
better the incumbent, the fewer choices need such bounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from autopar.search.bounds.bottleneck import GRIDS, bottleneck_bound, whole_bound
from autopar.search.bounds.chain import chain_bound, is_chain
from autopar.search.bounds.cheap import fewest_seconds
from autopar.search.bounds.columns import columns_bound, even_bound
from autopar.search.bounds.devices import devices_bound
from autopar.search.bounds.mixed import mixed_bound
from autopar.search.bounds.relaxation import relaxation
from autopar.search.construct.changes import changed
from autopar.search.construct.devices import construct_devices
from autopar.search.construct.shifts import shifted
from autopar.search.construct.stages import construct_stages, tied_cost
from autopar.search.evaluation import Solution, all_in_turn, cost, fits, leaving_room
from autopar.search.exact import TooLargeError, solve_labels, solve_scip
from autopar.search.minimum_memory import least_memory
from autopar.search.state import Node, State
from autopar.search.tables import Instance

LABEL_LAYERS = 16
"""Up to this many layers the label method is tried before SCIP."""

LABELS_S = 3.0
"""Seconds for the label method; with several stages on each device, every choice that was too large halves them for the next."""

MARGIN = 0.15
"""How far above a choice's bound a plan is searched for while no plan is known."""

CLOSE = 0.03
"""How far above the best plan a solution with several stages on each device may be, for changes of single layers to be tried in it."""

FEW = 16
"""Up to this many layers of a device, devices of whole layers are mixed rather than layers: with more layers it gains less."""

PRICES = (0.0, 0.03, 0.3)
"""Prices of memory with which tied layers are decided, in units of a stage's least time per device memory."""

Step = Callable[[State, Node], None]
Bound = Callable[[Instance, float, float], float]
"""Computes a bound of a choice, in seconds. The numbers that it takes are the known bound, and the seconds from which on the choice cannot
improve the best plan."""


@dataclass(frozen=True, slots=True)
class Engine:
    """How the choices of one family are solved.

    ``estimate``: a bound by which the ways to decide a tie are compared. ``segments``: whether several layers may be recomputed as one
    without a pin. ``integer``: whether SCIP decides choices that the label method cannot.
    """

    steps: tuple[Step, ...]
    construct: Callable[[Instance, float], tuple[float, Solution] | None]
    estimate: Callable[[Instance], float]
    segments: bool
    integer: bool


def engine_of(instance: Instance) -> Engine:
    if instance.schedule.copies > 1:
        return BOTH_WAYS
    return SEVERAL_STAGES if instance.schedule.interleaved else ONE_STAGE


def advance(state: State, node: Node) -> None:
    """Run the next step of a choice."""
    engine_of(node.instance).steps[node.done](state, node)


def _raise_bound(state: State, node: Node, bound_s: float) -> None:
    """Raise a choice's bound; an infinite one proves that no plan of the choice fits."""
    if not np.isfinite(bound_s):
        not_possible(state, node)
    else:
        state.push(node.instance, bound_s, node.done + 1)


def _bounding(bound: Bound) -> Step:
    """The step that computes a bound."""
    return lambda state, node: _raise_bound(state, node, bound(node.instance, node.bound_s, state.enough_s))


def not_possible(state: State, node: Node) -> None:
    """No plan of a choice fits: try it again with segments of several layers, which need less memory and are never faster, except in
    place of offloading."""
    instance = segmented(state, node.instance)
    if instance is not None:
        state.push(instance, fewest_seconds(instance) if instance.outside else node.bound_s)


def nothing_fits(instance: Instance, deadline: float) -> bool:
    """Whether it is proved that no plan of a choice fits in device memory and in the other memories that it uses."""
    if least_memory(instance)[0] > 1:
        return True
    if not instance.outside or instance.layers > LABEL_LAYERS:
        return False
    try:
        return solve_labels(instance, np.inf, deadline)[1] is None
    except TooLargeError:
        return False


def segmented(state: State, instance: Instance) -> Instance | None:
    """The same choice with segments of several layers among its candidates; ``None`` if there are no such candidates."""
    choice = instance.choice
    if choice.segments or not engine_of(instance).segments:
        return None
    found = state.prices.instance(replace(choice, segments=True))
    return (
        found
        if found is not None and any(a is not b for a, b in zip(found.kinds, instance.kinds, strict=True))
        else None
    )


def _coarse(state: State, node: Node) -> None:
    """Coarse bounds first: most choices are far from the best."""
    bound = bottleneck_bound(node.instance, node.bound_s, state.enough_s, GRIDS[:1])
    if np.isfinite(bound) and state.best is None and state.left_s() < 0.5 * state.options.time_limit_s:
        _construct(state, replace(node, bound_s=bound))  # find a plan first
    else:
        _raise_bound(state, node, bound)


def _fine(instance: Instance, at_least_s: float, enough_s: float) -> float:
    return bottleneck_bound(instance, at_least_s, enough_s, GRIDS[1:2])


def _whole(instance: Instance, at_least_s: float, enough_s: float) -> float:
    bound = whole_bound(instance, at_least_s, enough_s if np.isfinite(enough_s) else (1 + MARGIN) * at_least_s)
    return chain_bound(instance, bound) if is_chain(instance) and np.isfinite(bound) else bound


def _relax(state: State, node: Node) -> None:
    state.solvers.add("GLOP")
    _raise_bound(state, node, relaxation(node.instance, node.bound_s, max(state.left_s(), 0.05)))


def _mixed(state: State, node: Node) -> None:
    """``mixed_bound`` or ``columns_bound``: all devices together."""
    instance, bound = node.instance, node.bound_s
    if instance.layers <= FEW * instance.schedule.pipeline:
        state.solvers.add("CLP")
        bound = mixed_bound(instance, bound, state.enough_s)
    if bound < state.enough_s:
        state.solvers.add("GLOP")
        bound = columns_bound(instance, bound, state.enough_s)
    _raise_bound(state, node, bound)


def _construct(state: State, node: Node) -> None:
    if node.bound_s < state.enough_s:
        state.opened += 1
        if not _look(state, node.instance) and least_memory(node.instance)[0] > 1:
            return not_possible(state, node)
    state.push(node.instance, node.bound_s, ONE_STAGE.steps.index(_construct) + 1)


def _first(state: State, node: Node) -> None:
    """A solution before more expensive bounds; the bounds wait while other choices are left."""
    if node.bound_s < state.enough_s:
        state.opened += 1
        _look(state, node.instance)
    state.later.append(replace(node, done=node.done + 1))


def _second(state: State, node: Node) -> None:
    """A second solution, now that a relaxation gives the number of layers of each device."""
    if node.bound_s < state.enough_s:
        _look(state, node.instance)
    state.push(node.instance, node.bound_s, node.done + 1)


def _look(state: State, instance: Instance) -> bool:
    """Search for a solution of the choice; whether one was found."""
    decided = _dive(state, instance)
    found = engine_of(instance).construct(decided, state.deadline) if decided is not None else None
    if decided is None or found is None:
        return False
    step_s, solution = found
    if instance.schedule.interleaved and step_s < (1 + CLOSE) * state.step_s:
        solution = changed(decided, solution, state.deadline)
        if cost(decided, solution).step_time_s < state.step_s:
            solution = shifted(decided, solution, state.deadline)
    state.offer(decided, solution)
    return True


def _dive(state: State, instance: Instance) -> Instance | None:
    """The instance with every tie decided in the way that looks best: a solution is searched for in it before the search branches on
    ties."""
    while (group := state.undecided(instance.choice)) is not None:
        children = list(decided(state, instance, group))
        if not children:
            return None
        layers = state.prices.groups[group]
        likely = [min(children, key=lambda child, p=price: tied_cost(child, layers, p)) for price in PRICES]  # type: ignore[misc]
        kept = {id(child): child for child in likely}.values()
        instance = min(kept, key=engine_of(instance).estimate) if len(kept) > 1 else likely[0]
    return instance


def decided(state: State, instance: Instance, group: int) -> Iterator[Instance]:
    """The instances in which the tie of ``group`` is decided, one for each possible decision."""
    for roles, zero in state.prices.ties(instance.choice, group):
        child = state.prices.instance(replace(instance.choice, ties=(*instance.choice.ties, (group, roles, zero))))
        if child is not None:
            yield child


def _close(state: State, node: Node) -> None:
    """Decide the next tie of a choice, or solve it: its bound is then final."""
    instance, engine = node.instance, engine_of(node.instance)
    group = state.undecided(instance.choice)
    if group is not None and (engine.integer or instance.layers <= LABEL_LAYERS):
        for child in decided(state, instance, group):
            state.push(child, max(node.bound_s, fewest_seconds(child)), 1)
        return
    if instance.layers <= LABEL_LAYERS and _labels(state, node):
        return
    state.closed_s = min(state.closed_s, _integer(state, node) if engine.integer else node.bound_s)


def _labels(state: State, node: Node) -> bool:
    """Run the label method; whether it solved the choice."""
    instance, several = node.instance, node.instance.schedule.interleaved
    deadline = time.monotonic() + min(state.left_s(), LABELS_S / 2 ** (state.too_large * several))
    try:
        value, solution = solve_labels(instance, state.step_s, deadline)
    except TooLargeError:
        state.too_large += several
        return False
    state.solvers.add("labels")
    if solution is not None:
        state.offer(instance, solution)
    elif engine_of(instance).segments and nothing_fits(instance, deadline):
        not_possible(state, node)
    state.closed_s = min(state.closed_s, value)
    return True


def _integer(state: State, node: Node) -> float:
    """SCIP's bound; SCIP's solution, if any, is offered as incumbent."""
    instance = node.instance
    state.solvers.add("SCIP")
    # a choice that SCIP does not close soon it hardly ever closes
    budget = min(state.left_s(), max(2.0, 0.1 * state.options.time_limit_s))
    gap = max(state.options.target_gap / 4, 1e-9)
    bound, solution = solve_scip(instance, node.bound_s, state.step_s, budget, gap)
    if solution is not None and instance.segmented and not fits(instance, all_in_turn(instance, solution)):
        tight = leaving_room(instance, all_in_turn(instance, solution))
        solution = solve_scip(tight, node.bound_s, state.step_s, min(budget, state.left_s()), gap)[1]
    if solution is not None:
        state.offer(instance, solution)
    return bound


ONE_STAGE = Engine(
    (_coarse, _bounding(_fine), _bounding(_whole), _construct, _relax, _close),
    construct_stages,
    bottleneck_bound,
    segments=True,
    integer=True,
)
SEVERAL_STAGES = Engine(
    (_bounding(even_bound), _bounding(devices_bound), _first, _mixed, _second, _close),
    construct_devices,
    fewest_seconds,
    segments=False,
    integer=False,
)
BOTH_WAYS = Engine((_first, _close), construct_devices, fewest_seconds, segments=False, integer=False)
"""Schedules that have copies of each stage: solutions as with several stages on each device, the cheap bound alone, and, for models of few
layers, the label method."""
