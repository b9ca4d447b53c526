"""The strategies to try for a layer on a mesh: which roles its axes may have, under which ZeRO stages and with which techniques."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from autopar.pins import LayerPins
from autopar.plan import DEGREES, Role, Strategy, copy_counts, folded
from autopar.schedules import Schedule
from autopar.search.options import SearchOptions
from autopar.search.problem import Mesh
from autopar.techniques import LAYER, PLAN, UNDER_SPLIT, Options, conflict
from autopar.techniques.technique import Context

TENSOR_ROLES = (Role.TENSOR, Role.TENSOR_SEQUENCE)
SEQUENCE_ROLES = (Role.ULYSSES, Role.RING)
MOST_NODES = 4
"""Maximum number of nodes that a degree of tensor parallelism, or of sequence parallelism in all layers, spans without a pin."""
MOST_PADDED = 0.25
"""Maximum share of padded experts without a pin."""
LONG_SEQUENCE = 16384
"""Minimum sequence length in tokens at which the search decides sequence parallelism per layer: attention then outweighs communication."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """The strategies to try for a layer, listed on demand. ``roles`` has every assignment of roles to the mesh's axes, ``options`` the
    combinations of techniques under each ZeRO stage."""

    mesh: Mesh
    gpus_per_node: int
    pins: LayerPins
    roles: tuple[tuple[Role, ...], ...]
    options: tuple[tuple[Options, ...], ...]

    def under(self, schedule: Schedule) -> Candidates:
        """Return the candidates for a pipeline of this schedule (``Strategy.under``)."""
        if not schedule.split:
            return self
        return replace(self, options=tuple(tuple(o.under(schedule) for o in under) for under in self.options))

    @cached_property
    def every(self) -> tuple[Strategy, ...]:
        """All candidates."""
        found: list[Strategy] = []
        for roles in self.roles:
            refused = {o for o in {o for under in self.options for o in under} if _refuses(o, roles)}
            allowed = [[o for o in under if o not in refused] for under in self.options]
            for zero, copies in _zeros(self.mesh, roles, self.gpus_per_node, self.pins):
                found += [Strategy(roles, zero, copies, options) for options in allowed[zero]]
        return tuple(found)

    @cached_property
    def quickest(self) -> tuple[Strategy, ...]:
        """A few strategies, perhaps none of them a candidate, one of which takes no longer for a microbatch than the fastest candidate:
        each candidate does the work of one of them, or more."""
        stages = (0, 1, 2, 3) if self.pins.zero is None else (self.pins.zero,)
        low, high = (
            dict.fromkeys(o.quickest for z in stages for o in self.options[z] if (z >= 2) == is_high)
            for is_high in (False, True)
        )
        return tuple(
            Strategy(roles, zero, 1, options)
            for roles in self.roles
            for zero, under in ((1, low), (3, high))
            for options in under
        )


def _refuses(options: Options, roles: tuple[Role, ...]) -> bool:
    """Return whether a technique does not admit these roles."""
    return any(technique.refused_roles(value, roles) for technique, value in options.chosen)


def candidates(
    mesh: Mesh,
    batch: int,
    gpus_per_node: int,
    options: SearchOptions,
    pins: LayerPins | None = None,
    experts: int = 0,
    context: Context | None = None,
) -> Candidates:
    """Return the candidates for a layer on ``mesh`` that ``pins`` (default: the pins of every layer) allow, for a microbatch of ``batch``
    samples. ``context`` has the facts of the layer that techniques read (default: those of a layer in a step of one microbatch).

    Data parallelism takes the longest prefix of the axes whose size divides the batch (or is the pinned degree), other roles a suffix; axes
    in between are idle. Because data is a prefix in every layer, the batch dim is gathered from its innermost axis outwards, and each slice
    stays contiguous. A layer with ``experts`` may distribute them directly inside the data axes, over a degree that divides their
    number, or needs few padded experts (``MOST_PADDED``).
    """
    pins = options.common if pins is None else pins
    if any(t.mode(options.of(t.name) or t.default).max_zero == 0 for t in PLAN):
        pins = replace(pins, zero=0)
    sizes = [axis.size for axis in mesh]
    context = context_of(options) if context is None else context
    found: list[tuple[Role, ...]] = []
    roles = TENSOR_ROLES if options.roles is None else options.roles
    for suffix in _suffixes(mesh, gpus_per_node, roles, pins, experts):
        outer = len(sizes) - len(suffix)
        degrees = [math.prod(sizes[:j]) for j in range(outer + 1)]
        prefixes = [j for j, n in enumerate(degrees) if batch % n == 0 and pins.data in (None, n)]
        # ranks of the experts' own axes take different samples, too
        if owning := suffix.count(Role.EXPERT) + suffix.count(Role.EXPERT_RELAYED):
            owners = math.prod(sizes[outer : outer + owning])
            prefixes = [j for j in prefixes if j == outer and batch % (degrees[j] * owners) == 0]
        if prefixes:
            prefix = prefixes[-1]
            found.append((Role.DATA,) * prefix + (Role.IDLE,) * (outer - prefix) + suffix)
    return Candidates(
        mesh, gpus_per_node, pins, tuple(found), tuple(_options(pins, context, zero) for zero in range(4))
    )


def context_of(options: SearchOptions, **known: Any) -> Context:
    """Return the facts of a layer that techniques need: those from ``options``, and ``known``."""
    return Context(allow=options.allow, compiled=options.compiled, nvme=options.nvme, **known)


def may_split(pins: LayerPins, context: Context, small: bool) -> bool:
    """Return whether schedules that split the backward pass are tried without a pin. They are not if a pin requires a value that they
    exclude, if layers may be offloaded (such plans have no exact search) or, unless the model is ``small``, if layers may be compiled."""
    modes = [technique.mode(value) for technique in LAYER for value in technique.allowed(pins.of, context)]
    if any(mode.offload_tier or (mode.compiled and not small) for mode in modes):
        return False
    return all(pins.of(name) in (None, value) for name, value in UNDER_SPLIT.items())


@lru_cache(1024)
def _options(pins: LayerPins, context: Context, zero: int) -> tuple[Options, ...]:
    """Return the combinations of techniques' values to try for a layer under a ZeRO stage: pins, conflicts and ``is_tried_with`` decide."""
    allowed: list[tuple[str, ...]] = []
    for technique in LAYER:
        values = technique.allowed(pins.of, context)
        allowed.append(tuple(v for v in values if technique.mode(v).min_zero <= zero) or (technique.default,))
    names = [technique.name for technique in LAYER]
    every = [dict(zip(names, values, strict=True)) for values in itertools.product(*allowed)]
    found = [Options(**each) for each in every if not any(conflict(t, each[t.name], each) for t in LAYER)]
    for technique in LAYER:
        if pins.of(technique.name) is None:
            tried = [options for options in found if technique.is_tried_with(options[technique], options)]
            values_tried = {options[technique] for options in tried}
            found = [options for options in found if options in tried or options[technique] not in values_tried]
    return tuple(found)


@lru_cache(1024)
def _suffixes(
    mesh: Mesh, gpus_per_node: int, roles: tuple[Role, ...], pinned: LayerPins, experts: int
) -> tuple[tuple[Role, ...], ...]:
    """Return the roles to try for the innermost axes, besides data. Their order, from the outermost axis inwards, is experts, ring
    attention, then Ulysses and tensor parallelism.

    A tensor degree spans at most ``MOST_NODES`` nodes unless it is pinned: long before that, all-reduce on the slow links costs more than
    it saves. Experts are tried alone, beside tensor parallelism, and beside pinned degrees; ring attention and Ulysses alone, beside tensor
    parallelism over exactly one node, and beside pinned degrees. Experts may be folded over the axes of the other roles (``FOLDS``).
    """
    tensor_roles = tuple(role for role in roles if role in TENSOR_ROLES)
    pins = {
        Role.EXPERT: pinned.expert,
        Role.RING: pinned.ring,
        Role.ULYSSES: pinned.ulysses,
        Role.TENSOR: pinned.tensor,
    }
    any_number = range(len(mesh) + 1)
    tried = {role: any_number if role in roles or pins[role] is not None else (0,) for role in list(pins)[:-1]}
    tried[Role.EXPERT] = tried[Role.EXPERT] if experts else (0,)
    folds: tuple[str, ...] = ("none",)
    if experts and tried[Role.EXPERT] is any_number:
        folds = pinned.folds
    found: list[tuple[Role, ...]] = []
    for numbers in itertools.product(*tried.values(), any_number):
        counts = dict(zip(pins, numbers, strict=True))
        tensor = counts[Role.TENSOR]
        if sum(numbers) > len(mesh):
            continue
        for role in tensor_roles if tensor else (Role.TENSOR,):
            # Ulysses exchanges the heads that tensor parallelism leaves, so its axes are inner ones; outer ones if both shard the sequence
            inside = [Role.TENSOR, Role.ULYSSES] if role is Role.TENSOR else [Role.ULYSSES, Role.TENSOR]
            suffix = tuple(each for each in (Role.EXPERT, Role.RING, *inside) for _ in range(counts[each]))
            inner = mesh[len(mesh) - len(suffix) :]
            degrees = {each: Strategy(suffix).degree(inner, each) for each in counts}
            if any(counts[each] and degrees[each] == 1 for each in counts):
                continue  # a mesh of one device needs no suffix
            axes = tuple(role if each is Role.TENSOR else each for each in suffix)
            for fold in folds:
                owning = folded(axes, fold)
                if Role.TENSOR_EXPERT in owning and pinned.fold_experts is None:
                    continue  # all ranks have all tokens; with sequence parallelism each sends its own
                owners = Strategy(owning).degree(inner, *DEGREES["expert"])
                if experts and not (_few_padded(experts, owners) if pinned.expert is None else pinned.expert == owners):
                    continue
                fixed = pins if pinned.expert is None else pins | {Role.EXPERT: degrees[Role.EXPERT]}
                if all(_wanted(each, degrees, fixed, roles, gpus_per_node) for each in counts):
                    found += _dispatches(owning, inner, gpus_per_node, pinned)
    return tuple(dict.fromkeys(found))


def _few_padded(experts: int, ranks: int) -> bool:
    """Return whether ``ranks`` have at least one of the experts each, and need few padded ones (``MOST_PADDED``)."""
    return ranks <= experts and -(-experts // ranks) * ranks <= (1 + MOST_PADDED) * experts


def _dispatches(
    roles: tuple[Role, ...], mesh: Mesh, gpus_per_node: int, pinned: LayerPins
) -> Iterator[tuple[Role, ...]]:
    """Yield the roles, and those that relay tokens to experts on other nodes, if nodes have several of a layer's experts."""
    far = [role is Role.EXPERT and axis.stride >= gpus_per_node for axis, role in zip(mesh, roles, strict=True)]
    near = any(role.distributes_experts and not away for role, away in zip(roles, far, strict=True))
    relayable = any(far) and near
    if not relayable or pinned.dispatch != "relayed":
        yield roles
    if relayable and pinned.dispatch != "direct":
        yield tuple(Role.EXPERT_RELAYED if away else role for role, away in zip(roles, far, strict=True))


def _wanted(
    role: Role, degrees: dict[Role, int], pins: dict[Role, int | None], roles: tuple[Role, ...], gpus_per_node: int
) -> bool:
    """Return whether a role may have its degree, given the degrees of the other roles."""
    degree, pin = degrees[role], pins[role]
    if pin is not None:
        return degree == pin
    if role is Role.TENSOR:
        return degree <= MOST_NODES * gpus_per_node
    others = [other for other in degrees if other is not role and degrees[other] > 1 and pins[other] is None]
    beside_tensor = [Role.TENSOR] if role is Role.EXPERT or degrees[Role.TENSOR] == gpus_per_node else []
    return degree == 1 or (role in roles and others in ([], beside_tensor))


def _zeros(mesh: Mesh, roles: tuple[Role, ...], gpus_per_node: int, pins: LayerPins) -> Iterator[tuple[int, int]]:
    """Yield ZeRO stages with numbers of copies of the shards (HSDP): from one up to the number at which each copy is within one node. More
    copies would save little, because the links inside a node are equally fast."""
    axes = [axis for axis, role in zip(mesh, roles, strict=True) if role.replicates_parameters]
    total = math.prod(axis.size for axis in axes)
    counts = copy_counts([axis.size for axis in axes])
    across = [n for n, axis in zip(counts, axes, strict=False) if axis.size * axis.stride > gpus_per_node]
    tried = {1, *across, *counts[len(across) : len(across) + 1]} if pins.replicate is None else {pins.replicate}
    for zero in ((0, 1, 2, 3) if pins.zero is None else (pins.zero,)) if total > 1 else (0,):
        if zero:
            yield from ((zero, n) for n in sorted(tried) if n in counts)
        elif 1 in tried:
            yield 0, 1


def for_sequence(options: SearchOptions, length: int) -> SearchOptions:
    """Return the options with the roles for a sequence of ``length``: below ``LONG_SEQUENCE``, sequence roles would only slow the
    search."""
    if options.roles is not None:
        return options
    return replace(options, roles=(*TENSOR_ROLES, Role.EXPERT, *(SEQUENCE_ROLES if length >= LONG_SEQUENCE else ())))
