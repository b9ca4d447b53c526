"""The table of pins: every decision that a user may make in place of the search.

A pin is a key and a value. The fields of ``PlanPins`` are pins of the whole plan, those of ``LayerPins`` of every layer, or of the layers
that a selector before the last dot names::

    {"pipeline": 4, "schedule": "1f1b", "layers.0-7.tensor": 8, "lm_head.zero": 3}

A selector is a layer's name or the end of one (``layers.3`` is ``model.layers.3``), or a layer class. A range of numbers (``0-7``, both
ends included) may stand for a number, and ``*`` for any text. A pin on named layers overrides a pin on all layers.

Each field says which values it has, what it means and how one writes it. The keywords of ``autopar.compile``, the options of the command
line, the checks and the table in ``docs/guide/pins.md`` are made from ``PINS``.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

from autopar.errors import UsageError
from autopar.plan import (
    ALL_REDUCE,
    COMPILATIONS,
    DEGREES,
    HALVES,
    LOCAL_STEPS,
    LOGITS,
    OFFLOADS,
    OVERLAPS,
    RECOMPUTATIONS,
    REDUCTIONS,
    SAVINGS,
    STATES,
    SYNCS,
    TENSOR_OVERLAP,
    Recomputation,
)
from autopar.schedules import CHIMERA, SCHEDULES, SPLIT

Value = int | str | bool

ANY = "any"
"""The value of ``offload`` and ``states`` that leaves it to the search."""

FORM = "write key=value, such as pipeline=4, tensor=8, layers.0-7.tensor=8, lm_head.zero=3 or schedule=1f1b"


@dataclass(frozen=True, slots=True)
class Pin:
    """One row of the table. Without ``values`` a pin is a whole number from ``least`` to ``most``; with ``switch`` its values also have
    the short forms ``True``, for the last one, and ``False``, for the first one. ``counted`` is a value that is followed by a colon and a
    whole number from 1."""

    name: str
    of_layer: bool
    meaning: str
    example: str
    values: tuple[str, ...] = ()
    least: int = 1
    most: int | None = None
    switch: bool = False
    counted: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The values as one writes them; none for a whole number."""
        return (*self.values, f"{self.counted}:K") if self.counted else self.values

    @property
    def choices(self) -> str:
        """The values in words."""
        if self.values:
            return f"one of {', '.join(self.names)}"
        return f"a whole number from {self.least}" + ("" if self.most is None else f" to {self.most}")

    def checked(self, key: str, value: Value) -> Value:
        """The value in its one spelling. Raises ``UsageError``, with the name ``key``, where the pin cannot have it."""
        if self.switch and isinstance(value, bool):
            return self.values[-1 if value else 0]
        if self.values:
            counted = bool(self.counted) and re.fullmatch(rf"{self.counted}:[1-9]\d*", str(value)) is not None
            fits = value in self.values or counted
        else:
            whole = isinstance(value, int) and not isinstance(value, bool)
            fits = whole and int(value) >= self.least and (self.most is None or int(value) <= self.most)
        if not fits:
            hint = f"write {key}{self.example[self.example.index('=') :]}"
            hint += f" (true means {self.values[-1]}, false means {self.values[0]})" if self.switch else ""
            hint += f", or {key}={ANY} for the search to decide" if ANY in self.values else ", or leave it out"
            raise UsageError(f"{key} is {value!r}, it must be {self.choices}", hint)
        return value


def _pin(meaning: str, example: str, **values: Any) -> Any:
    return field(default=None, metadata={"meaning": meaning, "example": example, **values})


@dataclass(frozen=True, slots=True)
class LayerPins:
    """The pins of one layer; ``None`` leaves a decision to the search."""

    data: int | None = _pin("the data-parallel degree", "data=8")
    tensor: int | None = _pin("the tensor-parallel degree", "layers.0-7.tensor=8")
    expert: int | None = _pin("the degree of expert parallelism of layers that have experts", "expert=4")
    ulysses: int | None = _pin("the degree of Ulysses sequence parallelism", "ulysses=4")
    ring: int | None = _pin("the degree of ring attention", "ring=4")
    zero: int | None = _pin("the ZeRO stage", "lm_head.zero=3", least=0, most=3)
    replicate: int | None = _pin(
        "how many copies there are of the state that ZeRO shards (HSDP's replicate degree)", "replicate=16"
    )
    reduce: str | None = _pin(
        "how often gradients are reduced under ZeRO 2 and 3: in every microbatch, or once a step",
        "reduce=step",
        values=REDUCTIONS,
    )
    recompute: bool | str | None = _pin(
        "how activations are recomputed in the backward pass", "recompute=selective", values=RECOMPUTATIONS, switch=True
    )
    offload: str | None = _pin(
        "whether saved activations wait in the host's memory",
        "offload=activations",
        values=(*OFFLOADS, ANY),
    )
    states: str | None = _pin(
        "where optimizer states and master copies are: on the device, in the host's memory, or on the node's NVMe",
        "states=host",
        values=(*STATES, ANY),
    )
    saved: str | None = _pin(
        "how saved activations are stored; exact unless `int8_activations` is allowed",
        "saved=int8",
        values=SAVINGS,
    )
    logits: str | None = _pin(
        "how the layer with the loss computes its logits: whole, or a slice of the vocabulary at a time and again in the backward pass",
        "logits=sliced",
        values=LOGITS,
    )
    segment: int | None = _pin(
        "how many consecutive layers are recomputed as one; more than one is full recomputation", "segment=4"
    )
    overlap: str | None = _pin(
        "which collectives run under the layer's own arithmetic; tensor where none is pinned",
        "overlap=none",
        values=OVERLAPS,
    )
    compile: bool | str | None = _pin(
        "what torch.compile compiles: nothing, or each layer's arithmetic; layers on GPUs and nothing on CPUs where none is pinned",
        "compile=none",
        values=COMPILATIONS,
        switch=True,
    )

    def compiles(self, default: bool) -> bool:
        """Whether layers are compiled; ``default`` where no pin decides."""
        return default if self.compile is None else self.compile == COMPILATIONS[1]

    def recomputations(self, segments: Sequence[int] = (1,)) -> tuple[Recomputation, ...]:
        """The recomputations that the pins allow. ``segments`` are the numbers of layers to recompute as one where no pin decides."""
        kinds = RECOMPUTATIONS if self.recompute is None else (str(self.recompute),)
        if self.segment is not None:
            segments = (self.segment,)
            kinds = ("full",) if self.segment > 1 else kinds
        return tuple(Recomputation(kind, n) for kind in kinds for n in (segments if kind == "full" else (1,)))

    def check_saved(self, layer: str) -> None:
        """Raise ``UsageError`` where another pin of ``layer`` leaves it nothing that it could store in 8 bits."""
        found = [f"recompute={self.recompute}"] if self.recompute in ("selective", "full") else []
        found += [f"segment={self.segment}"] if (self.segment or 1) > 1 else []
        found += [f"offload={self.offload}"] if self.offload == OFFLOADS[1] else []
        if self.saved == SAVINGS[1] and found:
            raise UsageError(
                f"saved=int8 stores what a layer saves on the device, and {layer} is pinned to {' and '.join(found)}",
                "leave one of the two out: a layer is recomputed, or offloads its activations, or stores them in 8 bits",
            )

    def check_overlap(self, layer: str, schedule: str | None) -> None:
        """Raise ``UsageError`` where ``layer`` is to be computed in halves, and another pin, or the schedule, leaves it no way to."""
        found = [f"recompute={self.recompute}"] if self.recompute == "selective" else []
        found += [f"schedule={schedule}"] if schedule in SPLIT else []
        if self.overlap == HALVES and found:
            raise UsageError(
                f"overlap={HALVES} is not written with {' or '.join(found)}, to which {layer} is pinned",
                "leave one of the two out: halves go with full recomputation, and with schedules of whole backward passes",
            )

    @property
    def may_split(self) -> bool:
        """Whether no pin asks for what a schedule that splits the backward pass leaves out (compiled layers, and overlap), or offloads
        activations, for which such plans have no exact search."""
        wanted = self.compile == COMPILATIONS[1] or self.overlap in (TENSOR_OVERLAP, HALVES)
        return not wanted and self.offload in (None, OFFLOADS[0])

    def check_segment(self, layer: str) -> None:
        """Raise ``UsageError`` where another pin of ``layer`` contradicts its segment."""
        against = [f"recompute={self.recompute}"] if self.recompute in ("none", "selective") else []
        against += [f"offload={self.offload}"] if self.offload == OFFLOADS[1] else []
        if (self.segment or 1) > 1 and against:
            raise UsageError(
                f"a segment of {self.segment} layers is recomputed in full from an input on the device, and {layer} is pinned to "
                f"{' and '.join(against)}",
                "leave one of the two out",
            )

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


@dataclass(frozen=True, slots=True)
class PlanPins(LayerPins):
    """The pins of the whole plan, and those of every layer."""

    pipeline: int | None = _pin("the pipeline-parallel degree", "pipeline=4")
    chunks: int | None = _pin("the number of pipeline stages on each device (virtual stages)", "chunks=2")
    microbatches: int | None = _pin("the number of microbatches of a step", "microbatches=16")
    prefetch: int | None = _pin(
        "how many layers ahead of the computation parameters are gathered under ZeRO 2 and 3", "prefetch=2"
    )
    schedule: str | None = _pin("the pipeline schedule", "schedule=1f1b", values=SCHEDULES)
    sync: str | None = _pin(
        "how replicas are synchronized under ZeRO 0; all-reduce where none is pinned",
        "sync=parameter-server",
        values=SYNCS,
        counted=LOCAL_STEPS,
    )


class PinKeywords(TypedDict, total=False):
    """The pins as keywords of a function; a test holds the names and types to those of ``PlanPins``."""

    pipeline: int | None
    chunks: int | None
    microbatches: int | None
    prefetch: int | None
    schedule: str | None
    sync: str | None
    data: int | None
    tensor: int | None
    expert: int | None
    ulysses: int | None
    ring: int | None
    zero: int | None
    replicate: int | None
    reduce: str | None
    recompute: bool | str | None
    offload: str | None
    states: str | None
    saved: str | None
    logits: str | None
    segment: int | None
    overlap: str | None
    compile: bool | str | None


def check_sync(given: PlanPins, layer: str, zero: int | None, replicate: int | None) -> None:
    """Raise ``UsageError`` if the schedule, or the ZeRO stage or the copies of ``layer``, contradict ``sync``."""
    sync = given.sync
    if sync not in (None, ALL_REDUCE) and given.schedule == CHIMERA:
        raise UsageError(
            f"sync={sync} is for replicas of whole pipelines, and {CHIMERA} sums the gradients of a stage's two copies by {ALL_REDUCE}",
            f"use another schedule, or leave sync out: {ALL_REDUCE} goes with every schedule",
        )
    sharding = f"ZeRO {zero}" if zero else f"hybrid sharding (replicate={replicate})" if (replicate or 1) > 1 else ""
    if sync not in (None, ALL_REDUCE) and sharding:
        raise UsageError(
            f"sync={sync} needs whole parameters and gradients on every replica, and {layer} has {sharding}",
            f"leave zero and replicate out, or leave sync out: {ALL_REDUCE} goes with every ZeRO stage",
        )


def nothing_halved(reasons: Mapping[str, str]) -> UsageError:
    """The error where no layer can be computed in halves, from why each cannot, by its name."""
    reason = Counter(reasons.values()).most_common(1)[0][0]
    layer = next(name for name, why in reasons.items() if why == reason)
    return UsageError(
        f"overlap={HALVES}: no layer's microbatches can be computed in two halves: {layer} {reason}",
        "use an even number of rows on each device in a microbatch, and layers with tensor or expert parallelism; or leave overlap out",
    )


OF_LAYER = tuple(f.name for f in fields(LayerPins))
OF_PLAN = tuple(f.name for f in fields(PlanPins) if f.name not in OF_LAYER)

_metadata = {f.name: f.metadata for f in fields(PlanPins)}
PINS = {name: Pin(name, name in OF_LAYER, **_metadata[name]) for name in (*OF_PLAN, *OF_LAYER)}
"""The table: every pin by name, those of the plan first."""


def checked(key: str, value: Value) -> Value:
    """The value of a pin in its one spelling.

    Raises:
        UsageError: a key that names no pin, or a value that the pin cannot have.
    """
    selector, _, name = key.rpartition(".")
    if name in PINS and (PINS[name].of_layer or not selector):
        return PINS[name].checked(key, value)
    if name in OF_PLAN:
        raise UsageError(f"{name} is of the whole plan, not of {selector}", f"pin {name} alone")
    names = OF_LAYER if selector else tuple(PINS)
    near = difflib.get_close_matches(name, names, n=1)
    raise UsageError(
        f"there is no pin {key!r}",
        f"the pins are {', '.join(names)}" + (f"; did you mean {near[0]}?" if near else f"; {FORM}"),
    )


def read_pin(text: str) -> tuple[str, Value]:
    """``"layers.0-7.tensor=8"`` as a key and a value.

    Raises:
        UsageError: no ``=``, or nothing on one of its sides.
    """
    key, equals, written = (part.strip() for part in text.partition("="))
    if not (key and equals and written):
        raise UsageError(f"{text!r} is not a pin", FORM)
    if re.fullmatch(r"[+-]?\d+", written):
        return key, int(written)
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    return key, words.get(written.lower(), written)


def read_pins(texts: Sequence[str]) -> dict[str, Value]:
    """Pins as ``read_pin`` reads them, by key.

    Raises:
        UsageError: a text that is not a pin, or a key with two different values.
    """
    pins: dict[str, Value] = {}
    for key, value in map(read_pin, texts):
        if pins.setdefault(key, value) != value:
            raise UsageError(f"{key} is pinned to {pins[key]} and to {value}", "pin it once")
    return pins
