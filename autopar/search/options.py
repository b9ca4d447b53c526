"""The user's decisions: pins, limits, allowed numerical deviations, search time. ``autopar.pins`` has the table of pins."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.pins import OF_LAYER, OWNERS, PINS, LayerPins, PlanPins, Value, checked
from autopar.plan import ALLOWED, FOLDS, Role
from autopar.plan_schema import MAX_SEARCH_S
from autopar.precision import several_fp8_recipes
from autopar.techniques import ALL, LAYER, PLAN

SequencePin = tuple[str, int]
"""A kind of sequence parallelism, ``"ring"`` or ``"ulysses"``, and its degree."""


@dataclass(frozen=True, slots=True)
class SearchOptions(PlanPins):
    """The user's pins, and the limits of the search. ``None`` leaves a decision to the search.

    - ``pin``: pins by key. Pins of the plan and of all layers become fields; pins of named layers stay in ``pin``.
    - ``roles``: the roles besides data that the search may use without a pin. By default these are tensor parallelism, expert parallelism
      if there are experts, and Ulysses and ring attention if the sequence is long.
    - ``sequences``: kinds and degrees of sequence parallelism to try in all layers at once, if neither a pin nor ``roles`` decides; with
      ``sequences_last`` only if all other configurations leave a gap.
    - ``allow``: the allowed numerical deviations (of ``ALLOWED``).
    - ``time_limit_s``, ``target_gap``: the search stops at this processor time or gap (the time of the thread that calls it, so that the
      result depends less on the machine's load than with the clock). ``pin_time_s``: the same for the prices of pins, if they are wanted.
    - ``within``: how much longer than the fastest plan's (relative) a step may take, if that makes the plan simpler (``simplicity``).
    - ``progress``: called with a short text when the first bounds are known, when the incumbent improves, and before a pin is priced.
    - ``interrupt``: called several times a second; an exception that it raises ends the search.
    - ``compiled``: whether layers are compiled by default; ``nvme``: whether the cluster describes its NVMe. The search sets both.
    - ``explained``: whether a search without a plan reports the plan that needs the least memory, which takes longer.

    Raises:
        UsageError: an unknown key, an invalid value of a pin, a pin with two different values, an unknown name in ``allow``, a deviation
            that pins cause and ``allow`` lacks, or an invalid time limit.
    """

    precision: str = "bfloat16"
    time_limit_s: float = 20.0
    target_gap: float = 0.01
    within: float = 0.0
    pin: Mapping[str, Value] = field(default_factory=dict)
    allow: Collection[str] = ()
    roles: tuple[Role, ...] | None = None
    sequences: tuple[SequencePin, ...] = ()
    sequences_last: bool = False
    compiled: bool = False
    nvme: bool = False
    memory_limit_bytes: int | None = None
    pin_time_s: float | None = None
    explained: bool = True
    progress: Callable[[str], None] | None = None
    interrupt: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pin, Mapping):
            raise UsageError(
                f"pin is {self.pin!r}, but pins must be a mapping from keys to values", 'write {"pipeline": 4}'
            )
        limit_s = self.time_limit_s
        if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not 0 <= limit_s <= MAX_SEARCH_S:
            raise UsageError(
                f"the time limit is {self.time_limit_s!r}, but it must be a number of seconds from 0 to {MAX_SEARCH_S:.0f}",
                "20 is the default",
            )
        if isinstance(self.within, bool) or not isinstance(self.within, int | float) or not 0 <= self.within <= 1:
            raise UsageError(
                f"within is {self.within!r}, but it must be a share from 0 (the fastest plan) to 1",
                "0.01 is the default",
            )
        for name in PINS:
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, checked(name, given))
        named = {}
        for key, value in self.pin.items():
            value = checked(key, value)
            if "." in key:
                named[key] = value
            elif (given := getattr(self, key)) not in (None, value):
                raise UsageError(f"{key} is pinned to {given} and to {value}", "pin it once")
            else:
                object.__setattr__(self, key, value)
        object.__setattr__(self, "pin", named)
        check_allowed(self.allow, self.deviations)

    @property
    def deviations(self) -> dict[str, str]:
        """The numerical deviations that the pins cause, each with a responsible pin."""
        found = {}
        for key, value in self.pins.items():
            if (technique := OWNERS.get(name := key.rpartition(".")[2])) is not None:
                modes = [technique.mode(v) for v in technique.admitted({name: value}.get)]
                if modes and all(mode.deviation for mode in modes):
                    found[modes[0].deviation] = f"{name}={value}"
        return found

    @property
    def common(self) -> LayerPins:
        """The pins of every layer."""
        return LayerPins(**{name: getattr(self, name) for name in OF_LAYER})

    @property
    def pins(self) -> dict[str, Value]:
        """Every pin by its key; the pins of named layers come last."""
        of_all = {name: value for name in PINS if (value := getattr(self, name)) is not None}
        return {**of_all, **self.pin}

    @property
    def decides_sequences(self) -> bool:
        """Whether a pin or ``roles`` decides on the sequence parallelism of every layer."""
        return self.roles is not None or self.ring is not None or self.ulysses is not None

    @property
    def leaves_schedules(self) -> bool:
        """Whether pins leave the schedule and the number of chunks to the search."""
        return self.schedule is None and self.chunks is None

    def with_sequence(self, sequence: SequencePin) -> SearchOptions:
        """Return the options with the sequence parallelism of every layer pinned. Experts are folded over it only if a pin says so, because
        that would multiply the candidates."""
        kind, degree = sequence
        pinned = {kind: degree, "fold_experts": self.fold_experts or "none"}
        return replace(self, **pinned)  # type: ignore[arg-type]

    def without(self, key: str) -> SearchOptions:
        """Return the options without the pin ``key``."""
        if key in self.pin:
            return replace(self, pin={k: v for k, v in self.pin.items() if k != key})
        assert key in self.pins, key
        return replace(self, **{key: None})  # type: ignore[arg-type]


def check_allowed(allow: Collection[str], deviations: Mapping[str, str] | None = None) -> None:
    """Raise ``UsageError`` if ``allow`` is not a set of names in ``ALLOWED``, has two recipes for products in 8 bits, or lacks a deviation
    that pins cause (``SearchOptions.deviations``)."""
    names = isinstance(allow, Collection) and not isinstance(allow, str)
    if not names or any(name not in tuple(ALLOWED) for name in allow):
        raise UsageError(f"allow={allow!r} is not known", f"it is a set of: {', '.join(ALLOWED)}")
    if message := several_fp8_recipes(allow):
        raise UsageError(message, "allow one of them")
    for name, pin in (deviations or {}).items():
        if name not in allow:
            mode = next(mode for technique in ALL for mode in technique.modes if mode.deviation == name)
            raise UsageError(
                f"{pin} is not exact: {mode.inexact}",
                f"allow={{'{name}'}} (--allow {name.replace('_', '-')}) allows this deviation; or remove the pin",
            )


def check_replicas(graph: Graph, plan: PlanPins, data: Sequence[int | None]) -> None:
    """Raise ``UsageError`` if ``graph`` does not admit a pinned technique of the plan. ``data`` has each layer's pinned data-parallel
    degree, or ``None``."""
    for technique in PLAN:
        value = plan.of(technique.name)
        if value is not None and (reason := technique.refusal_of_plan(graph, value, data)):
            raise UsageError(f"{technique.name}={value}: {reason}", technique.advice)


def pins_by_layer(graph: Graph, options: SearchOptions) -> tuple[LayerPins, ...]:
    """Return the pins of each layer of ``graph``.

    Raises:
        UsageError: a selector names no layer, two selectors contradict each other, pins are invalid, or the model does not admit them.
    """
    found = [options.common] * len(graph.layers)
    pinned_by: dict[tuple[int, str], str] = {}
    for key, value in options.pin.items():
        selector, _, name = key.rpartition(".")
        chosen = [i for i, layer in enumerate(graph.layers) if selects(selector, layer.name, layer.cls)]
        if not chosen:
            names = [layer.name for layer in graph.layers]
            near = difflib.get_close_matches(selector, names, n=1)
            raise UsageError(
                f"{key}: the model has no layer {selector!r}" + (f"; the nearest name is {near[0]}" if near else ""),
                f"its layers are {', '.join(runs_of_names(names))}",
            )
        for i in chosen:
            other = pinned_by.setdefault((i, name), key)
            if other != key and options.pin[other] != value:
                raise UsageError(
                    f"{other}={options.pin[other]} and {key}={value} both pin {graph.layers[i].name}",
                    "narrow one of them",
                )
            found[i] = replace(found[i], **{name: value})  # type: ignore[arg-type]
    for layer, pins in zip(graph.layers, found, strict=True):
        pins.check(layer.name, options)
        _check_searched(layer.name, pins)
    check_refused(graph, found)
    if any(pins.expert for pins in found):
        found = [_of_experts(graph, i, pins) for i, pins in enumerate(found)]
    check_replicas(graph, options, [pins.data for pins in found])
    return tuple(found)


def _check_searched(layer: str, pins: LayerPins) -> None:
    """Raise ``UsageError`` if pins leave a layer only values that a search never chooses (``Mode.unsearched``)."""
    for technique in LAYER:
        reasons = [technique.mode(value).unsearched for value in technique.admitted(pins.of)]
        if all(reasons):
            value = technique.admitted(pins.of)[0]
            raise UsageError(
                f"{layer} is pinned to {technique.name}={value}, which the search never selects: {reasons[0]}",
                "remove the pin; `autopar price` prices such a plan",
            )


def check_refused(graph: Graph, pins: Sequence[LayerPins]) -> None:
    """Raise ``UsageError`` if no layer for which a technique is pinned can have it."""
    for technique in LAYER:
        wanted: dict[str, list[str]] = {}
        for layer, own in zip(graph.layers, pins, strict=True):
            if (value := own.of(technique.name)) not in (None, technique.default):
                wanted.setdefault(f"{technique.name}={value}", []).append(layer.name)
        classes = {layer.name: layer.cls for layer in graph.layers}
        for pin, layers in wanted.items():
            reasons = [technique.refusal(graph, classes[name]) for name in layers]
            if all(reasons):
                raise UsageError(f"{pin}: {layers[-1]} {reasons[-1]}", technique.advice)


def _of_experts(graph: Graph, layer: int, pins: LayerPins) -> LayerPins:
    """Return the layer's pins; if the layer has no experts, their axis becomes a factor of the data-parallel degree (which is not pinned if
    experts may be folded over a degree that is not pinned)."""
    experts = graph.classes[graph.layers[layer].cls].experts
    if pins.expert is None or experts:
        check_experts(graph, layer, pins.expert)
        return pins
    if not any(cls.experts for cls in graph.classes.values()) and pins.expert > 1:
        raise UsageError(f"expert {pins.expert}: {graph.name} has no mixture of experts", "remove the pin")
    unknown = any(pins.of(name) is None for name in FOLDS[pins.fold_experts or "none"])
    return replace(pins, expert=None, data=None if unknown else pins.data and pins.data * pins.expert_axis)


def check_experts(graph: Graph, layer: int, degree: int | None) -> None:
    """Raise ``UsageError`` if a degree of expert parallelism is above the number of experts of one of the layer's mixtures."""
    name, cls = graph.layers[layer].name, graph.layers[layer].cls
    fewest = min((count for count, _ in graph.classes[cls].mixtures), default=0)
    if fewest and degree is not None and degree > fewest:
        raise UsageError(f"expert={degree}: {name} has {fewest} experts", f"give a degree of at most {fewest}")


def selects(selector: str, name: str, cls: str) -> bool:
    """Return whether a selector matches the layer ``name`` of class ``cls``."""
    if selector == cls:
        return True
    wanted, parts = selector.split("."), name.split(".")
    if len(wanted) > len(parts):
        return False
    return all(_matches(w, p) for w, p in zip(wanted, parts[len(parts) - len(wanted) :], strict=True))


def _matches(wanted: str, part: str) -> bool:
    span = re.fullmatch(r"(\d+)-(\d+)", wanted)
    if span and part.isdecimal():
        return int(span[1]) <= int(part) <= int(span[2])
    return fnmatchcase(part, wanted)


def runs_of_names(names: Sequence[str]) -> list[str]:
    """Return names with runs of numbers joined: ``model.layers.0`` to ``model.layers.79`` become ``model.layers.0-79``."""

    def split(name: str) -> tuple[str, int | None]:
        match = re.fullmatch(r"(.*?)(\d+)", name)
        return (match[1], int(match[2])) if match else (name, None)

    found = []
    numbered = [(*split(name), at) for at, name in enumerate(names)]
    for _, group in itertools.groupby(numbered, key=lambda n: (n[0], None if n[1] is None else n[1] - n[2])):
        members = list(group)
        stem, first, _ = members[0]
        last = members[-1][1]
        found.append(stem if first is None else f"{stem}{first}" if first == last else f"{stem}{first}-{last}")
    return found
