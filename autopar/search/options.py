"""What the user decides: pins, limits, how long to look.

A pin is a key and a value. ``pipeline``, ``chunks``, ``microbatches`` and ``schedule`` are of the whole plan; ``data``, ``tensor``,
``expert``, ``ulysses``, ``ring``, ``zero``, ``recompute``, ``segment`` and ``offload`` of every layer, or of those that a selector before
the last dot names::

    {"pipeline": 4, "schedule": "1f1b", "layers.0-7.tensor": 8, "lm_head.zero": 3}

``chunks`` is the number of stages of each device: more than one needs a pipeline and a schedule for it; interleaved
1F1B where none is pinned. ``segment`` layers are recomputed as one: more than one is full recomputation.

A selector is a layer's name or its end (``layers.3`` is ``model.layers.3``), or a layer class. In place of a number may stand a range
(``0-7``, both ends included), and ``*`` for any text. What is said of some layers goes before what is said of all. ``expert`` is of
the layers that have experts: the others take data on its axes, besides their own. ``offload`` is one of ``OFFLOADS``, ``none`` where it
is left out, or ``any``: the search then takes what wins.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.plan import OFFLOADS, RECOMPUTATIONS, Role
from autopar.schedules import SCHEDULES

Value = int | str | bool

OF_PLAN = ("pipeline", "chunks", "microbatches", "schedule")
ANY = "any"
"""The value of ``offload`` that leaves it to the search."""

DEGREES = ("data", "tensor", "expert", "ulysses", "ring")
_FORM = "write key=value, such as pipeline=4, tensor=8, layers.0-7.tensor=8, lm_head.zero=3 or schedule=1f1b"


@dataclass(frozen=True, slots=True)
class LayerPins:
    """What is pinned of one layer; ``None`` leaves it to the search. ``recompute``: of ``RECOMPUTATIONS``, or a bool for none and full.
    ``offload``: of ``OFFLOADS``, which ``None`` is the first of, or ``ANY``."""

    data: int | None = None
    tensor: int | None = None
    expert: int | None = None
    ulysses: int | None = None
    ring: int | None = None
    zero: int | None = None
    recompute: bool | str | None = None
    offload: str | None = None
    segment: int | None = None

    @property
    def recomputations(self) -> tuple[str, ...]:
        """The ways to recompute that are left, of ``RECOMPUTATIONS``."""
        if self.recompute is None:
            return RECOMPUTATIONS[-1:] if (self.segment or 1) > 1 else RECOMPUTATIONS
        return (str(self.recompute),)

    @property
    def degrees(self) -> dict[str, int]:
        """The pinned degrees by name."""
        return {name: n for name in DEGREES if (n := getattr(self, name)) is not None}

    @property
    def group(self) -> int:
        """The product of the pinned degrees: it must divide the devices of a stage."""
        product = 1
        for n in self.degrees.values():
            product *= n
        return product

    def __str__(self) -> str:
        return ", ".join(f"{f.name} {value}" for f in fields(self) if (value := getattr(self, f.name)) is not None)


OF_LAYER = tuple(f.name for f in fields(LayerPins))


@dataclass(frozen=True, slots=True)
class SearchOptions(LayerPins):
    """What the user pins, and how long to look. ``None`` leaves a choice to the search.

    The fields of ``LayerPins`` are pins of every layer (ZeRO where a layer has copies of its parameters), those in ``OF_PLAN`` of the
    whole plan; ``pin`` takes both by key, and keeps the pins of some layers (see the module). ``roles`` are the roles that may be used
    without being pinned, besides data; left out, tensor parallelism, experts where there are any, and where the sequence is long Ulysses
    and ring attention.
    The search stops once the gap is ``target_gap``, or at the limit. ``progress`` is called with a short text whenever the incumbent or
    the bound has moved.

    Raises:
        UsageError: an unknown key, a value that makes no sense, or a pin that is given twice and differs.
    """

    precision: str = "bfloat16"
    time_limit_s: float = 20.0
    target_gap: float = 0.01
    pipeline: int | None = None
    chunks: int | None = None
    microbatches: int | None = None
    schedule: str | None = None
    pin: Mapping[str, Value] = field(default_factory=dict)
    roles: tuple[Role, ...] | None = None
    memory_limit_bytes: int | None = None
    progress: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        some = {}
        for key, value in self.pin.items():
            selector, _, name = key.rpartition(".")
            _check(key, selector, name, value)
            value = _normal(name, value)
            if selector:
                some[key] = value
            elif (given := _normal(name, getattr(self, name))) not in (None, value):
                raise UsageError(f"{name} is pinned to {given} and to {value}", "pin it once")
            else:
                object.__setattr__(self, name, value)
        object.__setattr__(self, "pin", some)
        for name in (*OF_PLAN, *OF_LAYER):
            if (given := getattr(self, name)) is not None:
                _check(name, "", name, given)
                object.__setattr__(self, name, _normal(name, given))

    @property
    def common(self) -> LayerPins:
        """What is pinned of every layer."""
        return LayerPins(**{name: getattr(self, name) for name in OF_LAYER})

    @property
    def pins(self) -> dict[str, Value]:
        """Every pin by its key, shorthands included."""
        whole = {name: value for name in (*OF_PLAN, *OF_LAYER) if (value := getattr(self, name)) is not None}
        return {**whole, **self.pin}

    def without(self, key: str) -> SearchOptions:
        """The options with the pin ``key`` left to the search."""
        if key in self.pin:
            return replace(self, pin={k: v for k, v in self.pin.items() if k != key})
        assert key in self.pins, key
        return replace(self, **{key: None})  # type: ignore[arg-type]


def _check(key: str, selector: str, name: str, value: Value) -> None:
    """Raise ``UsageError`` for a key that is not there, or a value that it cannot have."""
    names = OF_LAYER if selector else (*OF_PLAN, *OF_LAYER)
    if name not in names:
        if name in OF_PLAN:
            raise UsageError(f"{name} is of the whole plan, not of {selector}", f"pin {name} alone")
        near = difflib.get_close_matches(name, names, n=1)
        raise UsageError(
            f"there is no pin {key!r}",
            f"the pins are {', '.join(names)}" + (f"; did you mean {near[0]}?" if near else f"; {_FORM}"),
        )
    if name == "schedule":
        if value not in SCHEDULES:
            raise UsageError(f"there is no schedule {value!r}", f"the schedules are {', '.join(SCHEDULES)}")
    elif name == "recompute":
        if not isinstance(value, bool) and value not in RECOMPUTATIONS:
            raise UsageError(
                f"{key} is {value!r}, it is one of {', '.join(RECOMPUTATIONS)}",
                f"write {key}=full (or true), {key}=selective or {key}=none (or false)",
            )
    elif name == "offload":
        if value not in (*OFFLOADS, ANY):
            raise UsageError(
                f"{key} is {value!r}, it is one of {', '.join((*OFFLOADS, ANY))}",
                f"write {key}=optimizer, {key}=activations or {key}=both, or {key}={ANY} to leave it to the search",
            )
    elif isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{key} is {value!r}, it must be a whole number", _FORM)
    elif name == "zero":
        if value not in (0, 1, 2, 3):
            raise UsageError(f"there is no ZeRO stage {value} ({key})", "the stages are 0, 1, 2 and 3")
    elif value < 1:
        raise UsageError(f"{key} is {value}, it must be at least 1", "leave it out to leave it to the search")


def _normal(name: str, value: Any) -> Any:
    """The value in its one spelling: recomputation is none or full where it is false or true."""
    return RECOMPUTATIONS[-1 if value else 0] if name == "recompute" and isinstance(value, bool) else value


def read_pin(text: str) -> tuple[str, Value]:
    """``"layers.0-7.tensor=8"`` as a key and a value.

    Raises:
        UsageError: no ``=``, or nothing on one of its sides.
    """
    key, equals, written = (part.strip() for part in text.partition("="))
    if not (key and equals and written):
        raise UsageError(f"{text!r} is not a pin", _FORM)
    if re.fullmatch(r"[+-]?\d+", written):
        return key, int(written)
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    return key, words.get(written.lower(), written)


def read_pins(texts: Sequence[str]) -> dict[str, Value]:
    """Pins as ``read_pin`` reads them, by key.

    Raises:
        UsageError: one that is no pin, or is given twice and differs.
    """
    pins: dict[str, Value] = {}
    for key, value in map(read_pin, texts):
        if pins.setdefault(key, value) != value:
            raise UsageError(f"{key} is pinned to {pins[key]} and to {value}", "pin it once")
    return pins


def pins_by_layer(graph: Graph, options: SearchOptions) -> tuple[LayerPins, ...]:
    """What is pinned of each layer of ``graph``.

    Raises:
        UsageError: a selector that no layer has, or two that say different things of one layer.
    """
    found = [options.common] * len(graph.layers)
    said: dict[tuple[int, str], str] = {}
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
            other = said.setdefault((i, name), key)
            if other != key and options.pin[other] != value:
                raise UsageError(
                    f"{other}={options.pin[other]} and {key}={value} both speak of {graph.layers[i].name}",
                    "narrow one of them",
                )
            found[i] = replace(found[i], **{name: value})  # type: ignore[arg-type]
    for layer, pins in zip(graph.layers, found, strict=True):
        if pins.recompute == "selective" and pins.offload in ("activations", "both"):
            raise UsageError(
                f"{layer.name}: what selective recomputation keeps stays on the device, and offload={pins.offload} would take it away",
                "pin recompute=full or recompute=none, or offload=optimizer",
            )
        against = [f"recompute={pins.recompute}"] if pins.recompute in RECOMPUTATIONS[:-1] else []
        against += [f"offload={pins.offload}"] if pins.offload in ("activations", "both") else []
        if (pins.segment or 1) > 1 and against:
            raise UsageError(
                f"a segment of {pins.segment} layers is recomputed in full from what stays on the device, and {layer.name} is pinned to "
                f"{' and '.join(against)}",
                "leave one of the two out",
            )
    return (
        tuple(_of_experts(graph, i, pins) for i, pins in enumerate(found))
        if any(p.expert for p in found)
        else tuple(found)
    )


def _of_experts(graph: Graph, layer: int, pins: LayerPins) -> LayerPins:
    """The layer's pins, ``expert`` taken as what it means for it."""
    experts = graph.classes[graph.layers[layer].cls].experts
    if pins.expert is None or experts:
        return pins
    if not any(cls.experts for cls in graph.classes.values()) and pins.expert > 1:
        raise UsageError(f"expert {pins.expert}: {graph.name} has no mixture of experts", "leave the pin out")
    return replace(pins, expert=None, data=pins.data and pins.data * pins.expert)


def selects(selector: str, name: str, cls: str) -> bool:
    """Whether a selector names the layer ``name`` of class ``cls``."""
    if selector == cls:
        return True
    wanted, parts = selector.split("."), name.split(".")
    if len(wanted) > len(parts):
        return False
    return all(_matches(w, p) for w, p in zip(wanted, parts[len(parts) - len(wanted) :], strict=True))


def _matches(wanted: str, part: str) -> bool:
    span = re.fullmatch(r"(\d+)-(\d+)", wanted)
    if span and part.isdigit():
        return int(span[1]) <= int(part) <= int(span[2])
    return fnmatchcase(part, wanted)


def runs_of_names(names: Sequence[str]) -> list[str]:
    """Names for people: ``model.layers.0`` to ``model.layers.79`` as ``model.layers.0-79``."""

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
