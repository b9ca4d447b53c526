"""The registry of the techniques of layers and plans.

To add a technique, write its file, and put it into ``LAYER`` or ``PLAN``. Plans, pins, options, comparisons, descriptions and ``verify``
read the registry, and name no technique of a layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache, cached_property
from typing import Any

from autopar.errors import UsageError
from autopar.schedules import PAIRED, SPLIT, Schedule
from autopar.techniques.activations import ACTIVATIONS
from autopar.techniques.compilation import COMPILATION
from autopar.techniques.dispatch import DISPATCH
from autopar.techniques.logits import LOGITS
from autopar.techniques.overlap import OVERLAP
from autopar.techniques.reduce import REDUCE
from autopar.techniques.states import STATES
from autopar.techniques.sync import SYNC
from autopar.techniques.technique import Call, Case, Conflict, Facts, Technique

LAYER: tuple[Technique, ...] = (LOGITS, DISPATCH, REDUCE, ACTIVATIONS, STATES, OVERLAP, COMPILATION)
"""Every technique of a layer. A search enumerates their values with the last technique varying fastest."""

PLAN: tuple[Technique, ...] = (SYNC,)
"""Every technique of the whole plan."""

ALL = (*PLAN, *LAYER)
BY_NAME = {technique.name: technique for technique in LAYER}

LAYER_DEVIATIONS = tuple(mode.deviation for technique in LAYER for mode in technique.modes if mode.deviation)
"""The numerical deviations that techniques of layers cause: a search decides in which layers."""

DEVIATIONS = (*LAYER_DEVIATIONS, *(mode.deviation for technique in PLAN for mode in technique.modes if mode.deviation))
"""The numerical deviations that techniques cause."""

_instances: dict[tuple[str, ...], Options] = {}


class Options(Facts):
    """A layer's value of every technique, and the combined facts of these values: the maximum of each number, and a text or ``quantized``
    from the one value that sets it. Equal options are the same object: prices are cached by strategy, and identity is the fastest hash."""

    values: tuple[str, ...]

    def __new__(cls, **chosen: str) -> Options:
        values = tuple(chosen.pop(technique.name, technique.default) for technique in LAYER)
        assert not chosen, f"no techniques: {chosen}"
        if values not in _instances:
            new = object.__new__(cls)
            object.__setattr__(new, "values", values)
            assert not new.problem, new.problem
            modes = [technique.mode(value) for technique, value in zip(LAYER, values, strict=True)]
            for fact in fields(Facts):
                found = [known for mode in modes if (known := getattr(mode, fact.name)) is not None]
                given = [known for known in found if known]
                assert len(given) < 2 or isinstance(given[0], int), f"several techniques give {fact.name}: {given}"
                object.__setattr__(new, fact.name, max(given or found, default=None))
            _instances[values] = new
        return _instances[values]

    def __init__(self, **chosen: str) -> None:
        """Do nothing: ``__new__`` returns a complete object."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.values,)  # a copy is the same object

    def __repr__(self) -> str:
        chosen = {technique.name: value for technique, value in self.chosen}
        return f"Options({', '.join(f'{name}={value!r}' for name, value in chosen.items())})"

    def __getitem__(self, technique: Technique) -> str:
        return self.by_name[technique.name]

    def replace(self, **changes: str) -> Options:
        """Return the options with these values changed."""
        return Options(**(self.by_name | changes))

    @cached_property
    def by_name(self) -> dict[str, str]:
        """The value of every technique, by the technique's name."""
        return {technique.name: value for technique, value in zip(LAYER, self.values, strict=True)}

    @property
    def chosen(self) -> Iterator[tuple[Technique, str]]:
        """The techniques whose value is not the default, with the value."""
        return ((t, value) for t, value in zip(LAYER, self.values, strict=True) if value != t.default)

    @cached_property
    def on_nvme(self) -> bool:
        """Whether saved activations or optimizer states are on the node's NVMe."""
        return "nvme" in (self.saved_in, self.states_in)

    @cached_property
    def segment_layers(self) -> int:
        """The number of consecutive layers in a segment, which is recomputed as one layer."""
        return max((technique.split(value)[1] for technique, value in self.chosen), default=1)

    def of_at_most(self, layers: int) -> Options:
        """Return the options with segments of no more than ``layers`` layers."""
        limited = {
            technique.name: name if layers == 1 else f"{name}:{layers}"
            for technique, value in self.chosen
            for name, number in (technique.split(value),)
            if number > layers
        }
        return self.replace(**limited) if limited else self

    def under(self, schedule: Schedule) -> Options:
        """Return the options of the layer in a pipeline of this schedule."""
        return self.replace(**{t.name: t.under(value, schedule) for t, value in zip(LAYER, self.values, strict=True)})

    @cached_property
    def admits_split(self) -> bool:
        """Whether a schedule that splits the backward pass can run a layer with these options."""
        modes = ((technique, technique.mode(value)) for technique, value in zip(LAYER, self.values, strict=True))
        return all(t.under_split in ("", mode.name) or mode.overlaps_pairs for t, mode in modes)

    @property
    def splitting(self) -> Technique:
        """The technique that computes microbatches in parts. ``parts`` must be above 1."""
        return next(technique for technique, value in self.chosen if technique.mode(value).parts > 1)

    @cached_property
    def unsplit(self) -> Options:
        """The options with the fallback of each value that computes microbatches in parts."""
        modes = {technique.name: technique.mode(value) for technique, value in self.chosen}
        return self.replace(**{name: mode.fallback for name, mode in modes.items() if mode.parts > 1})

    @cached_property
    def rewrites(self) -> tuple[str, ...]:
        """The modules of ``passes`` that rewrite the layer's class (``Technique.rewrite``)."""
        return tuple(technique.rewrite for technique, _ in self.chosen if technique.rewrite)

    @cached_property
    def specified(self) -> dict[str, str]:
        """The values that the runtime reads (``LayerSpec.options``), by the technique's name."""
        return {technique.name: value for technique, value in self.chosen if technique.specified}

    @cached_property
    def runtime_parts(self) -> dict[str, str]:
        """The runtime modules that a program with these options needs (``Technique.runtime_parts``)."""
        return {name: part for technique, value in self.chosen for name, part in technique.runtime_parts(value).items()}

    def wrap_call(self, call: Call) -> Call:
        """Return the call of a layer, or of several, in a program's text. Each technique wraps the call that later techniques have
        wrapped."""
        for technique, value in reversed([*self.chosen]):
            call = technique.wrap_call(value, call)
        return call

    @cached_property
    def quickest(self) -> Options:
        """The options with the default of every technique that ``adds_work``."""
        return self.replace(
            **{technique.name: technique.default for technique, _ in self.chosen if technique.adds_work}
        )

    @cached_property
    def problem(self) -> str:
        """The reason why no layer can have these values together, or an empty string."""
        for technique, value in zip(LAYER, self.values, strict=True):
            if not technique.known(value):
                return f"{technique.name} is {value!r}, not one of {', '.join(technique.names)}"
        for technique, value in self.chosen:
            if (found := conflict(technique, value, self.by_name)) is not None:
                return f"{technique.name}={value} cannot be combined with {found.other}={self.by_name[found.other]}: {found.why}"
        return ""


def _restored(values: tuple[str, ...]) -> Options:
    return Options(**dict(zip(BY_NAME, values, strict=True)))


@cache
def conflicts_of(technique: Technique) -> tuple[Conflict, ...]:
    """Return the conflicts that a technique lists, those of its values that compute microbatches in parts with values that are
    ``unsplittable``, and those with schedules that leave it one value (``Technique.under_split``)."""
    in_parts = tuple(mode.name for mode in technique.modes if mode.parts > 1)
    pairs = ((other.name, mode) for other in LAYER for mode in other.modes if mode.unsplittable) if in_parts else ()
    own = technique.conflicts
    if technique.under_split:
        why = f"schedules that split the backward pass run with {technique.name}={technique.under_split}"
        for mode in technique.modes:
            if mode.name != technique.under_split:
                excluded = tuple(name for name in SPLIT if not (mode.overlaps_pairs and name in PAIRED))
                own = (*own, Conflict((mode.name,), "schedule", excluded, why))
    return (*own, *(Conflict(in_parts, name, (mode.name,), mode.unsplittable) for name, mode in pairs))


def conflict(technique: Technique, value: str, others: Mapping[str, str]) -> Conflict | None:
    """Return the first conflict of a technique's value with ``others``, the other decisions by name; ``None`` if there is none."""
    name, _ = technique.split(value)
    for found in conflicts_of(technique):
        if name in found.values and str(others.get(found.other, "")).partition(":")[0] in found.others:
            return found
    return None


DEFAULTS = Options()

UNDER_SPLIT = {technique.name: technique.under_split for technique in LAYER if technique.under_split}
"""The values that techniques must have under a schedule that splits the backward pass."""


def read_options(layer: Mapping[str, Any]) -> Options:
    """Return the options of a layer in a plan file, from the current fields or those of older versions."""
    return Options(**{technique.name: technique.read(layer) for technique in LAYER})


def parts_phrase(options: Options) -> str:
    """Return in words how microbatches are computed in parts: ``"in two halves that take turns"``."""
    return options.splitting.phrase(options[options.splitting])


def cases_of(technique: Technique, devices: int) -> Iterator[Case]:
    """Yield the plans with a technique that ``verify`` runs (``Technique.cases``); their names also state the other pinned techniques."""
    for name, pins in technique.cases(devices):
        others = (other for other in ALL if other is not technique and other.name in pins)
        words = (other.case_phrase(pins[other.name]) for other in others)
        yield name.format("".join(f", {word}" for word in words if word)), pins


def not_splittable_error(options: Options, reasons: Mapping[str, str]) -> UsageError:
    """Return the error for a model in which no layer's microbatches can be computed in parts; ``reasons`` are refusal reasons by layer."""
    technique, value = options.splitting, options[options.splitting]
    reason = Counter(reasons.values()).most_common(1)[0][0]
    layer = next(name for name, why in reasons.items() if why == reason)
    return UsageError(
        f"{technique.name}={value}: no layer's microbatches can be computed {parts_phrase(options)}: {layer} {reason}",
        technique.advice,
    )


def phrases(options: Options) -> list[str]:
    """Return in words what a layer's techniques do: ``["recomputed", "gradients reduced once a step"]``."""
    words = [(technique, technique.phrase(value)) for technique, value in options.chosen]
    return [
        text if technique.subject == "layers" else f"{technique.subject} {text}" for technique, text in words if text
    ]
