"""A technique: one optional behaviour of a layer or of the whole plan.

Each technique has a file in this package with its values, their meaning and conflicts, the candidates of a search, and the pins under which
``verify`` runs it. Plan files, pins, options, comparisons, descriptions and the cases of ``verify`` are derived from the registry
(``autopar.techniques``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from autopar.errors import UsageError
from autopar.schedules import Schedule
from autopar.units import Constant

Value = int | str | bool
"""The value of a pin."""

Case = tuple[str, dict[str, Any]]
"""The name of a plan that ``verify`` runs, and its pins."""

LAYER, PLAN = "layer", "plan"
"""The scopes of techniques."""

ANY = "any"
"""The value of a pin that lets the search also try values that it skips by default."""


@dataclass(frozen=True, slots=True)
class Pin:
    """One row of the table of pins. ``of_layer``: layers may have different values. A pin without ``values`` is an integer from ``least``
    to ``most``. With ``switch``, ``True`` stands for the last value and ``False`` for the first. ``counted`` are values that take a
    colon and an integer from ``least``. A ``former`` pin is an old spelling that another pin has replaced."""

    name: str
    of_layer: bool
    meaning: str
    example: str
    values: tuple[str, ...] = ()
    least: int = 1
    most: int | None = None
    switch: bool = False
    counted: tuple[str, ...] = ()
    former: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The values as they are written; empty for an integer."""
        return (*self.values, *(f"{name}:K" for name in self.counted))

    @property
    def choices(self) -> str:
        """The valid values in words, for error messages."""
        if self.values:
            return f"one of {', '.join(self.names)}"
        return f"a whole number from {self.least}" + ("" if self.most is None else f" to {self.most}")

    def checked(self, key: str, value: Value) -> Value:
        """Return the value in its standard spelling. Raises ``UsageError``, which names ``key``, if the value is invalid."""
        if self.switch and isinstance(value, bool):
            return self.values[-1 if value else 0]
        if self.values:
            name, _, number = str(value).partition(":")
            counted = name in self.counted and re.fullmatch(r"[1-9]\d{0,8}", number, re.ASCII)
            fits = value in self.values or bool(counted and int(number) >= self.least)
        else:
            whole = isinstance(value, int) and not isinstance(value, bool)
            fits = whole and int(value) >= self.least and (self.most is None or int(value) <= self.most)
        if not fits:
            hint = f"write {key}{self.example[self.example.index('=') :]}"
            hint += f" (true means {self.values[-1]}, false means {self.values[0]})" if self.switch else ""
            hint += f", or {key}={ANY} for the search to decide" if ANY in self.values else ", or leave it out"
            raise UsageError(f"{key} is {value!r}, it must be {self.choices}", hint)
        return value


@dataclass(frozen=True, slots=True)
class QuantizedStorage:
    """How saved tensors of at least ``min_elements`` elements are quantized: a byte per element, and ``scale_bytes`` per ``block`` of
    elements.

    In a layer that is not compiled, ``kernels`` kernels quantize or dequantize ``chunk`` elements at a time. Per element they move
    ``rounding`` or ``restoring`` bytes besides the tensor that they read and the tensor that they write, and allocate ``temporary_bytes``.
    In a compiled layer one kernel does it.
    """

    block: int
    min_elements: int
    chunk: int
    scale_bytes: int
    temporary_bytes: int
    rounding: Constant
    restoring: Constant
    kernels: Constant


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Facts:
    """The facts about a technique's value, or about all values of a layer (``Options``), that the cost model, passes and programs read."""

    min_zero: int = 0
    """The lowest ZeRO stage that the value allows."""
    recomputes: str = ""
    """What the backward pass recomputes: nothing (empty), a ``part`` of the layer, or ``all`` of it."""
    saved_in: str = ""
    """Where saved activations are offloaded: ``host``, or empty."""
    states_in: str = ""
    """Where optimizer states are offloaded: ``host`` or ``nvme``, or empty."""
    quantized: QuantizedStorage | None = None
    """How saved tensors are quantized; ``None`` if they are stored exactly."""
    wraps_layer: bool = False
    """Whether the program runs code before and after the layer's call."""
    unsharded_gradients: bool = False
    """Whether gradients accumulate unsharded over a step's microbatches, and are reduced once a step, also under ZeRO 2 and 3."""
    early_collectives: bool = False
    """Whether collectives of the backward pass start before the weight gradients are computed."""
    overlaps_pairs: bool = False
    """Whether all-to-alls of experts overlap the other pass of a pair (``Schedule.paired``)."""
    compiled: bool = False
    """Whether ``torch.compile`` compiles the layer's arithmetic, if its class admits it."""
    parts: int = 1
    """The number of parts in which microbatches are computed, if the layer admits them."""

    @property
    def offload_tier(self) -> str:
        """The slowest offload tier that the value uses: ``host`` or ``nvme``, or empty."""
        return max(self.saved_in, self.states_in)


@dataclass(frozen=True, slots=True)
class Mode(Facts):
    """A mode of a technique; its ``name`` is the value in pins and plans.

    - ``phrase``: words for it, as in "30 of 34 layers **recomputed**", or empty; ``cell``: its entry in a table.
    - ``deviation``: the numerical deviation that a user must allow (one of ``plan.ALLOWED``); ``inexact``: a sentence about it.
    - ``max_zero``: the highest ZeRO stage that the mode allows.
    - ``unsearched``: why its memory can't be priced; a plan may have such a mode, but no search chooses it.
    - ``counted``: the minimum of a number after the name (``full:4``); 0: no number; 2: the name alone means 1.
    - ``fallback``: the value of layers that can't be computed in ``parts``.
    - ``unsplittable``: why microbatches can't be computed in parts with this mode.
    - ``stale``: the number is the gradients' staleness in updates.
    - ``local_sgd``: the number is local SGD's steps between two averages of the parameters.
    - ``has_server``: one replica has the optimizer states and updates the parameters.
    """

    name: str
    phrase: str = ""
    cell: str = "-"
    deviation: str = ""
    inexact: str = ""
    max_zero: int = 3
    unsearched: str = ""
    counted: int = 0
    fallback: str = ""
    unsplittable: str = ""
    stale: bool = False
    local_sgd: bool = False
    has_server: bool = False


@dataclass(frozen=True, slots=True)
class Conflict:
    """The ``values`` of a technique that exclude the values ``others`` of the decision ``other``: a technique, or the schedule. If
    ``pinned`` is set, a pin of the values needs that pin of the other decision."""

    values: tuple[str, ...]
    other: str
    others: tuple[str, ...]
    why: str
    pinned: str = ""


@dataclass(frozen=True, slots=True)
class Context:
    """The facts of a layer and a configuration from which a search lists candidates.

    ``refused`` has the layer's refusal reasons by technique (``Technique.refusal``). Up to ``chain`` layers of its class may be recomputed
    as one segment, and ``segments`` says whether a search tries this without a pin. ``several_microbatches``: whether a step has several
    microbatches. ``split``: whether the schedule splits the backward pass. ``allow``: the numerical deviations that the user allows.
    ``compiled``: whether layers are compiled by default. ``nvme``: whether the cluster describes its NVMe.
    """

    refused: Mapping[str, str] = field(default_factory=dict, hash=False)
    chain: int = 1
    segments: bool = False
    several_microbatches: bool = False
    split: bool = False
    allow: Collection[str] = field(default=(), hash=False)
    compiled: bool = False
    nvme: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A call in a program's text that techniques wrap: of a layer's arithmetic or, with ``layers``, of consecutive layers.

    ``arguments`` are the texts of the arguments; with ``layers`` the first one is the sequence of layers, and a technique sets the
    ``function``. ``rows`` has the batch dim of each argument (``None`` without one), ``joined`` the batch dim of each result. ``inputs``
    are the arguments that are tensors, ``resident`` the inputs that stay in memory anyway. ``compiled``: ``torch.compile`` compiles the
    layer. ``gives_loss``: the layer computes the loss.
    """

    arguments: tuple[str, ...]
    function: str = ""
    rows: tuple[int | None, ...] = ()
    joined: tuple[int | None, ...] = ()
    inputs: tuple[str, ...] = ()
    resident: tuple[str, ...] = ()
    layers: bool = False
    compiled: bool = False
    gives_loss: bool = False
    remark: str = ""
    contexts: tuple[tuple[str, str], ...] = ()

    def by(self, function: str, *arguments: str, remark: str = "") -> Call:
        """Return a call of another function, with the same arguments unless new ones are passed."""
        return replace(self, function=function, arguments=arguments or self.arguments, remark=remark or self.remark)

    def inside(self, context: str, remark: str) -> Call:
        """Return the call inside one more context manager, which becomes the outermost."""
        return replace(self, contexts=(*self.contexts, (remark, context)))

    def lines(self, start: str) -> list[str]:
        """Return the statement ``start function(arguments)``, with its contexts and remarks."""
        lines = [f"# {self.remark}"] if self.remark else []
        lines.append(f"{start}{self.function}({', '.join(self.arguments)})")
        for remark, context in self.contexts:
            lines = [f"# {remark}", f"with {context}:", *(f"    {line}" for line in lines)]
        return lines


PERMISSIVE = Context(chain=2**30, several_microbatches=True)
"""The context of a layer whose facts are unknown: it excludes no pinned value."""

Pinned = Callable[[str], Any]
"""Returns the value of a layer's pin from the pin's name; ``None`` if it is not pinned."""


class Technique:
    """The base class of all techniques. A subclass sets the attributes, and overrides methods whose default does not fit."""

    scope: ClassVar[str] = LAYER
    """``LAYER`` if each layer has a value of its own, ``PLAN`` if the plan has one value."""
    name: ClassVar[str]
    modes: ClassVar[tuple[Mode, ...]]
    """The modes; the first is the default."""
    subject: ClassVar[str]
    """The subject of ``Mode.phrase``: "layers", or something that layers have."""
    meaning: ClassVar[str]
    """What a pin of the technique decides, for help and tables."""
    example: ClassVar[str]
    shown: ClassVar[bool] = False
    """Whether a table of layers has a column for the technique even if every layer has the default."""
    single_layer: ClassVar[bool] = False
    """Whether only one layer of a model can have a value other than the default."""
    switch: ClassVar[bool] = False
    optional: ClassVar[bool] = False
    """Whether the pin also has the value ``any``, which adds values that a search skips by default."""
    default_if_missing: ClassVar[str] = ""
    """The value of layers in plan files that are older than the technique; empty for the default."""
    under_split: ClassVar[str] = ""
    """The value that layers must have under schedules that split the backward pass; empty for any value."""
    conflicts: ClassVar[tuple[Conflict, ...]] = ()
    former_pins: ClassVar[tuple[Pin, ...]] = ()
    """Old pins, each of which decides a part of the technique's value."""
    former_fields: ClassVar[Mapping[str, Any]] = {}
    """Fields of a layer in plan files of older versions, with their valid values (``plan_schema`` has the format)."""
    former_modules: ClassVar[tuple[str, ...]] = ()
    """The technique's runtime modules in programs that older versions emitted."""
    run_fields: ClassVar[tuple[str, ...]] = ()
    """The fields of a published run from which ``of_run`` reads the value."""
    modules: ClassVar[tuple[str, ...]] = ()
    """The runtime modules that ``model.py`` calls for the technique."""
    specified: ClassVar[bool] = False
    """Whether the runtime reads a layer's value in ``LayerSpec.options``."""
    compute_type: ClassVar[str] = ""
    """The return type of a layer's ``compute`` in programs that compute microbatches in parts."""
    rewrite: ClassVar[str] = ""
    """The module of ``passes`` whose function ``rewrite`` changes a layer class for every value but the default (``passes.rewrite``)."""
    rewrite_local: ClassVar[str] = ""
    """The module of ``passes`` that rewrites a layer's local graph for the technique's values (``passes.rewrite``)."""
    adds_work: ClassVar[bool] = False
    """Whether no value makes a microbatch faster than the default does."""
    advice: ClassVar[str] = ""
    """The hint of the error about a pinned value that layers can't have."""
    min_memory_share: ClassVar[float] = 0.0
    """A search tries values other than the default only if a layer's saved and transient bytes exceed this share of device memory."""

    @property
    def values(self) -> tuple[str, ...]:
        """The names of the modes."""
        return tuple(mode.name for mode in self.modes)

    @property
    def default(self) -> str:
        return self.modes[0].name

    def value_with(self, **facts: Any) -> str:
        """Return the first value whose mode has these facts."""
        return next(mode.name for mode in self.modes if all(getattr(mode, key) == fact for key, fact in facts.items()))

    def split(self, value: str) -> tuple[str, int]:
        """Split ``"full:4"`` into ``("full", 4)``; a value without a number gets 1."""
        name, _, number = value.partition(":")
        return name, int(number) if number else 1

    def mode(self, value: str) -> Mode:
        """Return the mode of a value."""
        name, _ = self.split(value)
        return next(mode for mode in self.modes if mode.name == name)

    def known(self, value: object) -> bool:
        """Return whether ``value`` is a valid value in its standard spelling."""
        if not isinstance(value, str):
            return False
        name, colon, number = value.partition(":")
        mode = next((mode for mode in self.modes if mode.name == name), None)
        if mode is None or not colon:
            return mode is not None and mode.counted != 1
        return (
            bool(mode.counted)
            and re.fullmatch(r"[1-9]\d{0,8}", number, re.ASCII) is not None
            and int(number) >= mode.counted
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The values as they are written: ``"full"``, ``"full:K"``."""
        plain = (mode.name for mode in self.modes if mode.counted != 1)
        return (*plain, *(f"{mode.name}:K" for mode in self.modes if mode.counted))

    @property
    def pin(self) -> Pin:
        """The row of the table of pins."""
        values = (*self.values, ANY) if self.optional else self.values
        counted = [mode for mode in self.modes if mode.counted]
        plain = tuple(value for value in values if self.known(value) or value == ANY)
        form = {"counted": tuple(mode.name for mode in counted), "least": counted[0].counted} if counted else {}
        return Pin(self.name, self.scope == LAYER, self.meaning, self.example, plain, switch=self.switch, **form)  # type: ignore[arg-type]

    def phrase(self, value: str) -> str:
        """Return in words what the value does to the subject (``Mode.phrase``), or an empty string."""
        return self.mode(value).phrase

    def case_phrase(self, value: str) -> str:
        """Return the words for the value in the names of other techniques' cases."""
        return self.phrase(value)

    def cell(self, value: str) -> str:
        """Return the value's entry in a table of layers."""
        return self.mode(value).cell

    def effort(self, value: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return what goes before and after the ZeRO stage in a strategy's sort key: of equally fast strategies a search takes the
        lowest."""
        return (), ()

    def allowed(self, pinned: Pinned, context: Context) -> tuple[str, ...]:
        """Return the values that a search tries, in order; empty if pins contradict each other."""
        value = pinned(self.name)
        if value == ANY:
            return self.within(self.values, context)
        return self.candidates(context) if value is None else (str(value),)

    def admits(self, value: str, pinned: Pinned) -> bool:
        """Return whether a layer with the value satisfies the pins."""
        return pinned(self.name) in (None, ANY, value)

    def within(self, values: Sequence[str], context: Context) -> tuple[str, ...]:
        """Return those of ``values`` that are exact, or whose deviation is allowed."""
        return tuple(v for v in values if not (name := self.mode(v).deviation) or name in context.allow)

    def candidates(self, context: Context) -> tuple[str, ...]:
        """Return the values that a search tries without a pin."""
        return (self.default,)

    def simplest(self, pinned: Pinned, context: Context) -> str:
        """Return the simplest value that the pins allow, for a plan that is not searched."""
        return self.allowed(pinned, context)[0]

    def admitted(self, pinned: Pinned) -> tuple[str, ...]:
        """Return the values that the pins allow in a plan that is not searched; empty if the pins contradict each other."""
        return self.allowed(pinned, PERMISSIVE)

    def under(self, value: str, schedule: Schedule) -> str:
        """Return the value of a layer with ``value`` in a pipeline of this schedule."""
        return self.under_split or value if schedule.split else value

    def refusal(self, graph: Any, cls: str) -> str:
        """Return why layers of a class can only have the default ("has no ..."), or an empty string."""
        return graph.refused.get((self.name, cls), "was not rewritten") if self.rewrite else ""

    def refusal_of_plan(self, graph: Any, value: str, data: Sequence[int | None]) -> str:
        """Return why a plan of ``graph`` can't have a value, or an empty string. ``data`` has each layer's pinned data-parallel degree, or
        ``None``."""
        return ""

    def refused_roles(self, value: str, roles: Sequence[Any]) -> str:
        """Return why a layer with these roles can't have a value ("has no ..."), or an empty string."""
        return ""

    def is_tried_with(self, value: str, options: Any) -> bool:
        """Return whether a search tries an unpinned value with ``options``, the values of the other techniques (``Options``)."""
        return True

    def unreadable(self, layer: Mapping[str, Any]) -> str:
        """Return what is wrong with the old fields of a layer in a plan file if no current value is equivalent, or an empty string."""
        return ""

    def read(self, layer: Mapping[str, Any]) -> str:
        """Return the value of a layer in a plan file."""
        return str(layer.get(self.name, self.default_if_missing or self.default))

    def note(self, names: Sequence[str], total: int, value: str) -> str:
        """Return a sentence for a plan's notes on the layers ``names``, of ``total``, with the value, or an empty string."""
        return ""

    def header(self, value: str, gives_loss: bool = False) -> str:
        """Return a sentence for the head of ``model.py`` on how the program deviates from training on one device, or an empty string.
        ``gives_loss``: the layer with the value computes the loss."""
        return ""

    def wrap_call(self, value: str, call: Call) -> Call:
        """Return the call of a layer, or of several, wrapped as the value requires."""
        return call

    def cases(self, n: int) -> Iterator[Case]:
        """Yield the name and the pins of each plan with the technique that ``verify`` runs on ``n`` devices. In a name ``{}`` stands for
        the words of other techniques; the pin ``mesh`` has the names and sizes of the mesh's axes."""
        yield from ()

    def staleness(self, value: str) -> int:
        """Return the staleness of gradients in updates; 0 if they are current."""
        return self.split(value)[1] if self.mode(value).stale else 0

    def averaging_steps(self, value: str) -> int:
        """Return local SGD's number of steps between two averages; 0 if replicas are synchronised in every step."""
        return self.split(value)[1] if self.mode(value).local_sgd else 0

    def compared(self, value: str) -> str:
        """Return in words what ``verify`` compares a plan with; an empty string means training on one device."""
        return ""

    def spec(self, value: str) -> Mapping[str, Any]:
        """Return the fields of ``ProgramSpec`` that the value sets."""
        known = {"late": self.staleness(value), "apart": self.averaging_steps(value)}
        known["served"] = self.mode(value).has_server
        return {name: fact for name, fact in known.items() if fact}

    def runtime_parts(self, value: str) -> Mapping[str, str]:
        """Return the fields of ``ProgramSpec`` that name runtime parts for the value, each with its ``module.Class``."""
        return {}

    def of_run(self, run: Mapping[str, Any]) -> str:
        """Return the value of a published run, from its ``run_fields``. Raises ``UsageError`` if the fields are invalid."""
        return self.default

    def random_value(self, number: float, zero: int) -> str:
        """Return the value in a random plan for a layer under ZeRO stage ``zero``; ``number`` is a random number from 0 to 1."""
        return self.default

    def alternatives(self) -> Iterator[tuple[str, str, dict[str, Value], str]]:
        """Yield alternatives that ``explain`` compares: a name, a title, pins, and what the cluster must describe ("host", "nvme" or
        "")."""
        yield from ()
