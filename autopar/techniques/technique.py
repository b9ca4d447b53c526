"""A technique: one optional behaviour of a layer or of the whole plan.

Each has a file in this package with its values, their meaning and conflicts, the candidates of a search, and the pins under which
``verify`` runs it. Storage, plan files, pins, options, comparisons, descriptions and the cases of ``verify`` are made from the registry
(``autopar.techniques``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from autopar.errors import UsageError
from autopar.units import Constant

Value = int | str | bool
"""The value of a pin."""

Case = tuple[str, dict[str, Any]]
"""The name of a plan that ``verify`` runs, and its pins."""

LAYER, PLAN = "layer", "plan"
"""The scopes of techniques."""

ANY = "any"
"""The value of a pin that leaves to the search what it would not try by itself."""


@dataclass(frozen=True, slots=True)
class Pin:
    """One row of the table of pins. Without ``values`` a pin is a whole number from ``least`` to ``most``; with ``switch`` its values also
    have the short forms ``True``, for the last one, and ``False``, for the first one. ``counted`` are values that are followed by a colon
    and a whole number from ``least``. ``former``: an old spelling, which another pin has replaced."""

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
        """The values in their spelling; none for a whole number."""
        return (*self.values, *(f"{name}:K" for name in self.counted))

    @property
    def choices(self) -> str:
        """The values in words."""
        if self.values:
            return f"one of {', '.join(self.names)}"
        return f"a whole number from {self.least}" + ("" if self.most is None else f" to {self.most}")

    def checked(self, key: str, value: Value) -> Value:
        """The value in its standard spelling. Raises ``UsageError``, which names ``key``, if the pin cannot have it."""
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
    """How saved tensors are stored in fewer bits: a byte for each number, and a scale of ``scale_bytes`` for each ``block`` of them, of
    tensors of at least ``least`` numbers.

    In a layer that is not compiled, ``kernels`` round or restore ``chunk`` numbers at a time; for each number they move ``rounding`` or
    ``restoring`` bytes besides those read and stored, and ``temporary_bytes`` are live meanwhile. In a compiled layer it is one kernel.
    """

    block: int
    least: int
    chunk: int
    scale_bytes: int
    temporary_bytes: int
    rounding: Constant
    restoring: Constant
    kernels: Constant


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Facts:
    """The facts on which prices, passes and programs depend, of one value of a technique or of all values of a layer together
    (``Options``)."""

    min_zero: int = 0
    """The least ZeRO stage under which layers may have it."""
    recomputes: str = ""
    """What the backward pass computes again: nothing (empty), a ``part`` of the layer, or ``all`` of it."""
    saved_in: str = ""
    """Where saved activations are offloaded: ``host``, or empty."""
    states_in: str = ""
    """Where optimizer states are offloaded: ``host`` or ``nvme``, or empty."""
    quantized: QuantizedStorage | None = None
    """How saved tensors are stored in fewer bits, if they are."""
    wraps_layer: bool = False
    """Whether something is done before and after the layer as a whole."""
    whole_gradients: bool = False
    """Whether gradients accumulate unsharded over a step's microbatches, and are reduced once a step, also under ZeRO 2 and 3."""
    early_collectives: bool = False
    """Whether collectives of the backward pass start before the gradients of weights are computed."""
    compiled: bool = False
    """Whether ``torch.compile`` compiles the layer's arithmetic, if its class admits it."""
    parts: int = 1
    """The number of parts in which microbatches are computed, if the layer admits them."""

    @property
    def offload_tier(self) -> str:
        """The offload tier that is needed: ``host`` or ``nvme``, or empty."""
        return max(self.saved_in, self.states_in)


@dataclass(frozen=True, slots=True)
class Mode(Facts):
    """A mode of a technique; its ``name`` is the value in pins and plans.

    ``phrase`` describes it, as in "30 of 34 layers **recomputed**", or is empty; ``cell`` stands for it in a table. ``gives_up`` names the
    exactness that a user must allow (of ``plan.ALLOWED``), and ``inexact`` says what is not exact. ``max_zero`` is the last ZeRO stage
    under which layers may have it. ``unsearched``: why its memory can't be priced; a plan may have such a value, but no search takes it.
    ``counted``: it is written with a colon and a number, at least this one (``full:4``); if this is 2, the value without a number means 1.
    A layer that can't be computed in ``parts`` has the value ``fallback``; ``unsplittable`` is the reason why microbatches can't be
    computed in parts with this value. ``stale``: the number is by how many updates gradients are late. ``local_sgd``: the number is local
    SGD's steps between two averages of the parameters. ``has_server``: one replica has the optimizer states and updates.
    """

    name: str
    phrase: str = ""
    cell: str = "-"
    gives_up: str = ""
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
    """The ``values`` of a technique that do not go with some values of another decision: of a technique, or of the schedule."""

    values: tuple[str, ...]
    other: str
    others: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Context:
    """The facts of a layer and a configuration from which a search lists candidates.

    ``refused`` has the layer's refusal reasons by technique (``Technique.refusal``). Up to ``chain`` layers of its class may be recomputed
    as one, and ``segments`` says whether this is tried without a pin. ``several``: whether a step has several microbatches.
    ``allow`` names the exactness that may be given up. ``compiled``: whether layers are compiled where no pin decides. ``nvme``: whether
    the cluster describes its NVMe.
    """

    refused: Mapping[str, str] = field(default_factory=dict, hash=False)
    chain: int = 1
    segments: bool = False
    several: bool = False
    allow: Collection[str] = field(default=(), hash=False)
    compiled: bool = False
    nvme: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A call in the text of a program, which techniques change: of a layer's arithmetic, or of consecutive ``layers`` in turn.

    ``arguments`` are the texts of the arguments; for ``layers`` the first one is their sequence, and a technique names the ``function``.
    ``rows`` has the batch dim of each argument (``None``: it has none), ``joined`` that of each result. ``inputs`` are the arguments that
    are tensors, and ``resident`` those of them that are in memory anyway. ``compiled``: ``torch.compile`` compiles the layer.
    ``gives_loss``: it computes the loss.
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
        """Return the call of another function; its arguments are the same ones if none are named."""
        return replace(self, function=function, arguments=arguments or self.arguments, remark=remark or self.remark)

    def inside(self, context: str, remark: str) -> Call:
        """Return the call inside a context manager, which becomes the outermost."""
        return replace(self, contexts=(*self.contexts, (remark, context)))

    def lines(self, start: str) -> list[str]:
        """Return the statement ``start function(arguments)``, with its contexts and remarks."""
        lines = [f"# {self.remark}"] if self.remark else []
        lines.append(f"{start}{self.function}({', '.join(self.arguments)})")
        for remark, context in self.contexts:
            lines = [f"# {remark}", f"with {context}:", *(f"    {line}" for line in lines)]
        return lines


PERMISSIVE = Context(chain=2**30, several=True)
"""The context of a layer without known facts: only pinned values are tried."""

Pinned = Callable[[str], Any]
"""The value of a layer's pin by its name; ``None`` where it has none."""


class Technique:
    """The base of all techniques. A subclass sets the attributes, and overrides the methods in which it differs."""

    scope: ClassVar[str] = LAYER
    """Whether each layer has a value, or the whole plan."""
    name: ClassVar[str]
    modes: ClassVar[tuple[Mode, ...]]
    """The modes; the first is the default."""
    subject: ClassVar[str]
    """The subject of ``Mode.phrase``: "layers", or something that layers have."""
    meaning: ClassVar[str]
    """What a pin of the technique decides, for help and tables."""
    example: ClassVar[str]
    shown: ClassVar[bool] = False
    """Whether a table of layers has a column for it even if all have the default."""
    of_one: ClassVar[bool] = False
    """Whether only one layer of a model has a choice."""
    switch: ClassVar[bool] = False
    optional: ClassVar[bool] = False
    """Whether a pin has the value ``any``, for values that a search would not try by itself."""
    if_missing: ClassVar[str] = ""
    """The value for plan files that are older than the technique; the default if empty."""
    under_split: ClassVar[str] = ""
    """The value that schedules that split the backward pass force, if any."""
    outweighs_split: ClassVar[bool] = False
    """Whether it gains more than a schedule that splits the backward pass; such schedules are then tried in small models only."""
    conflicts: ClassVar[tuple[Conflict, ...]] = ()
    former_pins: ClassVar[tuple[Pin, ...]] = ()
    """Old pins, each of which decides a part of it."""
    former_fields: ClassVar[Mapping[str, Any]] = {}
    """Fields of a layer in plan files of older versions, each with its values (``plan_schema`` has the format)."""
    former_modules: ClassVar[tuple[str, ...]] = ()
    """Its modules in the runtime of folders that older versions emitted."""
    run_fields: ClassVar[tuple[str, ...]] = ()
    """The fields of a published run that give its value."""
    flags: ClassVar[tuple[str, ...]] = ()
    """The flags of other trainers that give its value."""
    modules: ClassVar[tuple[str, ...]] = ()
    """The modules of the runtime that ``model.py`` calls for it."""
    specified: ClassVar[bool] = False
    """Whether the runtime reads a layer's value in ``LayerSpec.options``."""
    compute_type: ClassVar[str] = ""
    """The return type of a layer's ``compute`` if it computes a part of a microbatch."""
    rewrite: ClassVar[str] = ""
    """The module of ``passes`` whose function ``rewrite`` changes a layer class for every value but the default (``passes.rewrite``)."""
    rewrite_local: ClassVar[str] = ""
    """The module of ``passes`` that rewrites a layer's local graph for its values (``passes.rewrite``)."""
    adds_work: ClassVar[bool] = False
    """Whether the default is the fastest value for a microbatch."""
    advice: ClassVar[str] = ""
    """The hint of the error that refuses a pinned value."""
    share: ClassVar[float] = 0.0
    """The share of device memory from which a layer's saved bytes and transients make a search try other values than the default."""

    @property
    def values(self) -> tuple[str, ...]:
        """The names of the modes."""
        return tuple(mode.name for mode in self.modes)

    @property
    def default(self) -> str:
        return self.modes[0].name

    def value_with(self, **facts: Any) -> str:
        """The first value whose mode has these facts."""
        return next(mode.name for mode in self.modes if all(getattr(mode, key) == fact for key, fact in facts.items()))

    def split(self, value: str) -> tuple[str, int]:
        """``"full:4"`` as ``("full", 4)``; the number is 1 where there is none."""
        name, _, number = value.partition(":")
        return name, int(number) if number else 1

    def mode(self, value: str) -> Mode:
        """The mode of a value."""
        name, _ = self.split(value)
        return next(mode for mode in self.modes if mode.name == name)

    def known(self, value: object) -> bool:
        """Whether ``value`` is a value in its standard spelling."""
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
        """The values in their spelling."""
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
        """What the value does to the subject (``Mode.phrase``), or an empty string."""
        return self.mode(value).phrase

    def case_phrase(self, value: str) -> str:
        """The words for the value in the names of other techniques' cases."""
        return self.phrase(value)

    def cell(self, value: str) -> str:
        """The value in a table of layers."""
        return self.mode(value).cell

    def effort(self, value: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The parts of a strategy's sort key before and after ZeRO's: among equally fast strategies a plan takes the lowest."""
        return (), ()

    def allowed(self, pinned: Pinned, context: Context) -> tuple[str, ...]:
        """The values that a search tries, in order; empty where pins contradict each other."""
        value = pinned(self.name)
        if value == ANY:
            return self.within(self.values, context)
        return self.candidates(context) if value is None else (str(value),)

    def admits(self, value: str, pinned: Pinned) -> bool:
        """Whether a layer that has the value satisfies the pins."""
        return pinned(self.name) in (None, ANY, value)

    def within(self, values: Sequence[str], context: Context) -> tuple[str, ...]:
        """The values that are exact, or whose deviation is allowed."""
        return tuple(v for v in values if not (name := self.mode(v).gives_up) or name in context.allow)

    def candidates(self, context: Context) -> tuple[str, ...]:
        """The values that a search tries without a pin."""
        return (self.default,)

    def simplest(self, pinned: Pinned, context: Context) -> str:
        """The value of a plan that is not searched: the simplest that the pins allow."""
        return self.allowed(pinned, context)[0]

    def admitted(self, pinned: Pinned) -> tuple[str, ...]:
        """The values that the pins allow in a plan that is not searched; empty if the pins contradict each other."""
        return self.allowed(pinned, PERMISSIVE)

    def refusal(self, graph: Any, cls: str) -> str:
        """Return why layers of a class can only have the default ("has no ..."), or an empty string."""
        return graph.refused.get((self.name, cls), "was not asked") if self.rewrite else ""

    def refusal_of_plan(self, graph: Any, value: str, data: Sequence[int | None]) -> str:
        """Return why a plan of ``graph`` can't have a value, or an empty string. ``data`` are the layers' pinned data-parallel degrees,
        ``None`` where one is free."""
        return ""

    def refused_roles(self, value: str, roles: Sequence[Any]) -> str:
        """Return why a layer with these roles can't have a value ("has no ..."), or an empty string."""
        return ""

    def is_tried_with(self, value: str, options: Any) -> bool:
        """Whether an unpinned value is tried together with ``options``, the values of the other techniques (``Options``)."""
        return True

    def unreadable(self, layer: Mapping[str, Any]) -> str:
        """Return what a layer in a plan file has if its old fields have no current equivalent, or an empty string."""
        return ""

    def read(self, layer: Mapping[str, Any]) -> str:
        """The value of a layer in a plan file."""
        return str(layer.get(self.name, self.if_missing or self.default))

    def note(self, names: Sequence[str], total: int, value: str) -> str:
        """A sentence for a plan's notes on the layers ``names``, of ``total``, that have the value, or an empty string."""
        return ""

    def header(self, value: str, gives_loss: bool = False) -> str:
        """A sentence at the head of ``model.py`` on how the program deviates from one device's step, or an empty string. ``gives_loss``:
        the layer that has the value computes the loss."""
        return ""

    def wrap_call(self, value: str, call: Call) -> Call:
        """Return the call of a layer, or of several, wrapped as the value requires."""
        return call

    def cases(self, n: int) -> Iterator[Case]:
        """The plans with the technique that ``verify`` runs on ``n`` devices: names, with ``{}`` in place of words for other techniques,
        and pins. ``mesh`` among the pins has the names and sizes of a mesh's axes."""
        yield from ()

    def staleness(self, value: str) -> int:
        """By how many updates gradients are late (stale)."""
        return self.split(value)[1] if self.mode(value).stale else 0

    def averaging_steps(self, value: str) -> int:
        """The number of local SGD's steps between two averages; 0 if replicas are synchronised in every step."""
        return self.split(value)[1] if self.mode(value).local_sgd else 0

    def compared(self, value: str) -> str:
        """What ``verify`` compares a plan with, in words, if not with training on one device."""
        return ""

    def spec(self, value: str) -> Mapping[str, Any]:
        """The fields of ``ProgramSpec`` that tell a program of the value."""
        known = {"late": self.staleness(value), "apart": self.averaging_steps(value)}
        known["served"] = self.mode(value).has_server
        return {name: fact for name, fact in known.items() if fact}

    def runtime_parts(self, value: str) -> Mapping[str, str]:
        """The fields of ``ProgramSpec`` that name parts of the runtime for the value, each with its module and class."""
        return {}

    def of_run(self, run: Mapping[str, Any]) -> str:
        """The value of a published run, from its ``run_fields``. Raises ``UsageError`` if they make no sense."""
        return self.default

    def of_flags(self, flags: Mapping[str, str]) -> str | None:
        """The value that another trainer's flags give, from the texts of those of ``flags`` that are set; ``None`` if they give none.
        Raises ``UsageError`` if they make no sense."""
        return None

    def random_value(self, number: float, zero: int) -> str:
        """The value in a randomly drawn plan, for a layer under ZeRO stage ``zero``; ``number`` is drawn between 0 and 1."""
        return self.default

    def alternatives(self) -> Iterator[tuple[str, str, dict[str, Value], str]]:
        """Alternatives that ``explain`` compares: a name, a title, pins, and what the cluster must describe ("host", "nvme" or "")."""
        yield from ()
