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
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any

from autopar.errors import UsageError
from autopar.plan import ALL_REDUCE, DEGREES, LOCAL_STEPS, SYNCS
from autopar.schedules import CHIMERA, SCHEDULES
from autopar.techniques import LAYER
from autopar.techniques.technique import Pin, Technique, Value

FORM = "write key=value, such as pipeline=4, tensor=8, layers.0-7.tensor=8, lm_head.zero=3 or schedule=1f1b"


def _pin(meaning: str, example: str, **values: Any) -> Any:
    return field(default=None, metadata={"meaning": meaning, "example": example, **values})


@dataclass(frozen=True, slots=True)
class ParallelPins:
    """The pins of one layer besides those of techniques; ``None`` leaves a decision to the search."""

    data: int | None = _pin("the data-parallel degree", "data=8")
    tensor: int | None = _pin("the tensor-parallel degree", "layers.0-7.tensor=8")
    expert: int | None = _pin("the degree of expert parallelism of layers that have experts", "expert=4")
    ulysses: int | None = _pin("the degree of Ulysses sequence parallelism", "ulysses=4")
    ring: int | None = _pin("the degree of ring attention", "ring=4")
    zero: int | None = _pin("the ZeRO stage", "lm_head.zero=3", least=0, most=3)
    replicate: int | None = _pin(
        "how many copies there are of the state that ZeRO shards (HSDP's replicate degree)", "replicate=16"
    )

    def of(self, name: str) -> Any:
        """A pin by its name."""
        return getattr(self, name)

    @property
    def degrees(self) -> dict[str, int]:
        """The pinned degrees by name."""
        return {name: n for name in DEGREES if (n := self.of(name)) is not None}

    @property
    def group(self) -> int:
        """The product of the pinned degrees: it must divide the devices of a stage."""
        product = 1
        for n in self.degrees.values():
            product *= n
        return product

    def check(self, layer: str, schedule: str | None) -> None:
        """Raise ``UsageError`` if the pins of ``layer``, and that of the schedule, contradict each other."""
        for technique in LAYER:
            if not technique.admitted(self.of):
                found = _said(technique, self)
                raise UsageError(
                    f"{layer} is pinned to {' and '.join(found)}, which contradict each other",
                    f"leave one of them out; {technique.name} says it in one: {', '.join(technique.pin.names)}",
                )
        decided = {t.name: t.admitted(self.of) for t in LAYER} | {"schedule": (schedule or "",)}
        for technique in LAYER:
            value = str(self.of(technique.name) or "")
            for conflict in technique.conflicts:
                others = [technique.split(v)[0] for v in decided[conflict.other]]
                if value in conflict.values and set(others) <= set(conflict.others):
                    raise UsageError(
                        f"{technique.name}={value} does not go with {conflict.other}={others[0]}, to which {layer} is pinned",
                        f"leave one of the two out: {conflict.why}",
                    )

    def __str__(self) -> str:
        return ", ".join(f"{f.name} {value}" for f in fields(self) if (value := self.of(f.name)) is not None)


def _said(technique: Technique, pins: ParallelPins) -> list[str]:
    """The pins of a technique as one writes them."""
    names = (technique.name, *(pin.name for pin in technique.former_pins))
    return [f"{name}={value}" for name in names if (value := pins.of(name)) is not None]


_PINS = {pin.name: pin for technique in LAYER for pin in (technique.pin, *technique.former_pins)}
"""The pins of techniques, those of before among them, by name."""

OWNERS = {pin.name: technique for technique in LAYER for pin in (technique.pin, *technique.former_pins)}
"""The technique of a pin, by the pin's name."""

if TYPE_CHECKING:

    @dataclass(frozen=True, slots=True)
    class LayerPins(ParallelPins):
        """The pins of one layer: ``ParallelPins``, and those of techniques, by their names."""

else:
    LayerPins = make_dataclass(
        "LayerPins",
        [(name, Value | None, field(default=None)) for name in _PINS],
        bases=(ParallelPins,),
        namespace={"__doc__": "The pins of one layer: ``ParallelPins``, and those of techniques, by their names."},
        frozen=True,
        slots=True,
    )
    LayerPins.__module__ = __name__


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


OF_LAYER = tuple(f.name for f in fields(LayerPins))
OF_PLAN = tuple(f.name for f in fields(PlanPins) if f.name not in OF_LAYER)

_metadata = {f.name: f.metadata for f in fields(PlanPins)}
PINS = {name: _PINS.get(name) or Pin(name, name in OF_LAYER, **_metadata[name]) for name in (*OF_PLAN, *OF_LAYER)}
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
