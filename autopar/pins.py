"""The table of pins: every decision that a user may fix for the search.

A pin is a key and a value. The fields of ``PlanPins`` are pins of the plan. The fields of ``LayerPins`` are pins of all layers, or of the
layers that a selector before the last dot names::

    {"pipeline": 4, "schedule": "1f1b", "layers.0-7.tensor": 8, "lm_head.zero": 3}

A selector is a layer's name or the end of one (``layers.3`` is ``model.layers.3``), or a layer class. A range (``0-7``, inclusive) may
replace a number, and ``*`` any text. A pin on named layers overrides a pin on all layers.

Each field has its values, its meaning and an example. The keywords of ``autopar.compile``, ``autopar help pins``, the checks and the table
in ``docs/guide/pins.md`` are generated from ``PINS``.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any

from autopar.errors import UsageError
from autopar.plan import DEGREES, FOLDS
from autopar.schedules import SCHEDULES
from autopar.techniques import ALL, LAYER, PLAN, conflicts_of
from autopar.techniques.technique import Pin, Technique, Value

FORM = "write key=value, such as pipeline=4, tensor=8, layers.0-7.tensor=8, lm_head.zero=3 or schedule=1f1b"


def _pin(meaning: str, example: str, **values: Any) -> Any:
    return field(default=None, metadata={"meaning": meaning, "example": example, **values})


@dataclass(frozen=True, slots=True)
class ParallelPins:
    """The pins of a layer besides those of techniques; ``None`` leaves the decision to the search."""

    data: int | None = _pin("the data-parallel degree", "data=8")
    tensor: int | None = _pin("the tensor-parallel degree", "layers.0-7.tensor=8")
    expert: int | None = _pin(
        "the degree of expert parallelism of layers that have experts, with the degrees over which experts are folded",
        "expert=4",
    )
    fold_experts: str | None = _pin(
        "over which other ranks experts are also distributed: context (those of Ulysses and ring attention), all (also those of tensor "
        "parallelism, which otherwise shards every expert) or none (the default if expert is pinned)",
        "fold_experts=all",
        values=tuple(FOLDS),
    )
    dispatch: str | None = _pin(
        "how tokens reach experts on other nodes: direct, or relayed (once to each node with any of their experts, and forwarded there)",
        "dispatch=relayed",
        values=("direct", "relayed"),
    )
    ulysses: int | None = _pin("the degree of Ulysses sequence parallelism", "ulysses=4")
    ring: int | None = _pin("the degree of ring attention", "ring=4")
    zero: int | None = _pin("the ZeRO stage", "lm_head.zero=3", least=0, most=3)
    replicate: int | None = _pin(
        "the number of copies of the state that ZeRO shards (HSDP's replicate degree)", "replicate=16"
    )

    def of(self, name: str) -> Any:
        """Return the value of the pin ``name``."""
        return getattr(self, name)

    @property
    def degrees(self) -> dict[str, int]:
        """The pinned degrees by name."""
        return {name: n for name in DEGREES if (n := self.of(name)) is not None}

    @property
    def group(self) -> int:
        """The product of the pinned degrees, which must divide the devices of a stage."""
        return math.prod((self.degrees | {"expert": self.expert_axis}).values())

    @property
    def folds(self) -> tuple[str, ...]:
        """The choices of ``fold_experts`` to try."""
        if self.fold_experts is None and self.expert is None:
            return "none", "all"
        return (self.fold_experts or "none",)

    @property
    def folded(self) -> int:
        """The product of the pinned degrees over whose devices experts are distributed, too."""
        return math.prod(self.of(name) or 1 for name in FOLDS[self.fold_experts or "none"])

    @property
    def expert_axis(self) -> int:
        """The size of the experts' own axis: their degree without the pinned degrees over which they are folded."""
        return (self.expert or self.folded) // self.folded

    def check(self, layer: str, plan: PlanPins) -> None:
        """Raise ``UsageError`` if the pins of ``layer`` contradict each other or the pins of the plan."""
        if self.expert and self.expert % self.folded:
            raise UsageError(
                f"{layer} is pinned to expert={self.expert}, which does not divide by the {self.folded} devices over which "
                f"fold_experts={self.fold_experts} distributes experts",
                f"make expert a multiple of {self.folded}, or choose another fold_experts: {', '.join(FOLDS)}",
            )
        for technique in LAYER:
            if not technique.admitted(self.of):
                raise UsageError(
                    f"{layer} is pinned to {' and '.join(_texts(technique, self))}, which contradict each other",
                    f"leave one out, or pin only {technique.name}: {', '.join(technique.pin.names)}",
                )
        decided = {t.name: t.admitted(self.of) for t in LAYER} | {"schedule": (plan.schedule or "",)}
        for technique in ALL:
            value = str((plan if technique in PLAN else self).of(technique.name) or "")
            name, _ = technique.split(value)
            for conflict in conflicts_of(technique):
                others = [other.partition(":")[0] for other in decided[conflict.other]]
                if name in conflict.values and others == [""] and conflict.pinned:
                    raise UsageError(
                        f"{layer} is pinned to {technique.name}={value}, which needs a pinned {conflict.other}",
                        f"pin {conflict.other}={conflict.pinned}: {conflict.why}",
                    )
                if name in conflict.values and set(others) <= set(conflict.others):
                    raise UsageError(
                        f"{technique.name}={value} cannot be combined with {conflict.other}={others[0]}, to which {layer} is pinned",
                        f"leave one of the two out: {conflict.why}",
                    )
        check_sharding(plan, layer, self.zero or 0, self.replicate or 1)

    def __str__(self) -> str:
        return ", ".join(f"{f.name} {value}" for f in fields(self) if (value := self.of(f.name)) is not None)


def check_sharding(plan: PlanPins, layer: str, zero: int, copies: int) -> None:
    """Raise ``UsageError`` if the ZeRO stage or HSDP degree of ``layer`` contradicts a technique of the plan."""
    sharding = f"ZeRO {zero}" if zero else f"hybrid sharding (replicate={copies})" if copies > 1 else ""
    for technique in PLAN:
        value = plan.of(technique.name) or technique.default
        if sharding and technique.mode(value).max_zero == 0:
            raise UsageError(
                f"{technique.name}={value} needs unsharded parameters and gradients on every replica, and {layer} has {sharding}",
                f"leave zero and replicate out, or leave {technique.name} out",
            )


def _texts(technique: Technique, pins: ParallelPins) -> list[str]:
    """Return the pins of a technique as key=value."""
    names = (technique.name, *(pin.name for pin in technique.former_pins))
    return [f"{name}={value}" for name in names if (value := pins.of(name)) is not None]


_PINS = {pin.name: pin for technique in ALL for pin in (technique.pin, *technique.former_pins)}
"""The pins of techniques, including former ones, by name."""

OWNERS = {pin.name: technique for technique in ALL for pin in (technique.pin, *technique.former_pins)}
"""The technique whose value a pin determines, alone or with other pins, by the pin's name."""


def _with_techniques(name: str, base: type, of_layer: bool) -> type:
    """Return a dataclass with the fields of ``base`` and one for each pin of a technique."""
    names = [pin.name for pin in _PINS.values() if pin.of_layer == of_layer]
    added = [(pin, Value | None, field(default=None)) for pin in names]
    cls = make_dataclass(name, added, bases=(base,), namespace={"__doc__": base.__doc__}, frozen=True, slots=True)
    cls.__module__ = __name__
    return cls


if TYPE_CHECKING:

    @dataclass(frozen=True, slots=True)
    class LayerPins(ParallelPins):
        """The pins of one layer: the fields of ``ParallelPins``, and a field for each pin of a technique."""

else:
    LayerPins = _with_techniques("LayerPins", ParallelPins, of_layer=True)


@dataclass(frozen=True, slots=True)
class PipelinePins(LayerPins):
    """The pins of the plan besides those of techniques, and the pins of all layers."""

    pipeline: int | None = _pin("the pipeline-parallel degree", "pipeline=4")
    chunks: int | None = _pin("the number of pipeline stages on each device (virtual stages)", "chunks=2")
    microbatches: int | None = _pin("the number of microbatches of a step", "microbatches=16")
    prefetch: int | None = _pin(
        "how many layers ahead of the computation parameters are gathered under ZeRO 2 and 3", "prefetch=2", most=2**14
    )
    schedule: str | None = _pin("the pipeline schedule", "schedule=1f1b", values=SCHEDULES)


if TYPE_CHECKING:

    @dataclass(frozen=True, slots=True)
    class PlanPins(PipelinePins):
        """The pins of the plan, and the pins of all layers."""

else:
    PlanPins = _with_techniques("PlanPins", PipelinePins, of_layer=False)

OF_LAYER = tuple(f.name for f in fields(LayerPins))
OF_PLAN = tuple(f.name for f in fields(PlanPins) if f.name not in OF_LAYER)

_metadata = {f.name: f.metadata for f in fields(PlanPins)}
PINS = {name: _PINS.get(name) or Pin(name, name in OF_LAYER, **_metadata[name]) for name in (*OF_PLAN, *OF_LAYER)}
"""All pins by name, beginning with the pins of the plan."""


SHORT = {"dp": "data", "tp": "tensor", "pp": "pipeline", "cp": "ring", "ep": "expert", "vpp": "chunks"}
"""The usual abbreviations of degrees, which an error explains with the pin's name."""


def checked(key: str, value: Value) -> Value:
    """Return the canonical value of a pin. Raises ``UsageError`` for an unknown key or an invalid value."""
    if not isinstance(key, str):
        raise UsageError(f"the key of a pin is {key!r}, which is not text", FORM)
    selector, _, name = key.rpartition(".")
    if name in PINS and (PINS[name].of_layer or not selector):
        return PINS[name].checked(key, value)
    if name in OF_PLAN:
        raise UsageError(f"{name} is a pin of the whole plan, not of {selector}", f"write {name} without {selector}")
    names = OF_LAYER if selector else tuple(PINS)
    if (meant := SHORT.get(name)) in names:
        raise UsageError(
            f"there is no pin {key!r}", f"write {key.removesuffix(name)}{meant}=..., {PINS[meant].meaning}"
        )
    closest = difflib.get_close_matches(name, names, n=1)
    raise UsageError(
        f"there is no pin {key!r}",
        f"the pins are {', '.join(names)}" + (f"; did you mean {closest[0]}?" if closest else f"; {FORM}"),
    )


def read_pin(text: str) -> tuple[str, Value]:
    """Parse ``"layers.0-7.tensor=8"`` into key and value. Raises ``UsageError`` for other forms."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not (key and equals and value):
        raise UsageError(f"{text!r} is not a pin", FORM)
    if re.fullmatch(r"[+-]?\d{1,18}", value):  # no pin has more digits, and Python converts a few thousand at most
        return key, int(value)
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    return key, words.get(value.lower(), value)


def read_pins(texts: Sequence[str]) -> dict[str, Value]:
    """Parse pins and return their values by key. Raises ``UsageError`` for an invalid pin, or for a key with two values."""
    pins: dict[str, Value] = {}
    for key, value in map(read_pin, texts):
        if pins.setdefault(key, value) != value:
            raise UsageError(f"{key} is pinned to {pins[key]} and to {value}", "pin it once")
    return pins


def refuse_pins(decisions: Collection[str], source: str) -> None:
    """Raise ``UsageError`` if there are ``decisions`` (pins and options, as the user writes them) besides ``source``, which makes all."""
    if decisions:
        raise UsageError(
            f"{next(iter(decisions))} conflicts with the decisions of {source}: a plan has only one source",
            f"remove {source}, or {' and '.join(decisions)}",
        )
