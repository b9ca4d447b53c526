"""The schema of plan files: fields, types, and consistency between fields. ``docs/reference/plan-json.md`` describes the fields.

A plan file is untrusted data, so this module checks all of it before it is read (without assertions, which ``python -O`` drops).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from autopar.data_files import MalformedFileError, shown
from autopar.errors import UsageError
from autopar.pins import PINS, read_pins
from autopar.plan import ALLOWED, DEGREES, SEQUENCES, Memory, Prediction, Role, copy_counts
from autopar.precision import FLOAT8, PRECISIONS, several_fp8_recipes
from autopar.schedules import NO_PIPELINE, PAIRED, SCHEDULES, Schedule, refusal
from autopar.techniques import LAYER, PLAN, conflict
from autopar.techniques.technique import Technique

MAX_DEVICES = 2**20
MAX_LAYERS = 2**14
MAX_ROWS = 2**32
MAX_ACTIONS = 2**22
"""Maximum number of forward actions per step: stages times microbatches."""
MAX_SEARCH_S = 1e9
"""Maximum time limit of a search: threads cannot wait for much longer."""
_MAX_AXES = 21  # more would exceed MAX_DEVICES, or have axes of size 1
_MAX_BYTES = 2**60
_RESERVED_AXES = frozenset({"pipeline", "mirror", "microbatch"})  # axes of every program


class FieldKind(Protocol):
    """The type of a field."""

    def check(self, where: str, value: Any) -> None:
        """Raise ``MalformedFileError`` if ``value``, at ``where`` in the file, has another type."""


@dataclass(frozen=True, slots=True)
class TextField:
    """A line of at most ``max`` printable characters that matches ``pattern``; ``form`` describes the pattern in messages."""

    max: int = 1000
    pattern: str = ""
    form: str = "a line of printable characters"

    def check(self, where: str, value: Any) -> None:
        if not isinstance(value, str):
            raise MalformedFileError(f"{where} is {shown(value)}, not text")
        if len(value) > self.max:
            raise MalformedFileError(f"{where} has {len(value):,} characters, and may have {self.max:,}")
        if not value.isprintable() or (self.pattern and re.fullmatch(self.pattern, value, re.ASCII) is None):
            raise MalformedFileError(f"{where} is {shown(value)}, not {self.form}")


@dataclass(frozen=True, slots=True)
class Whole:
    min: int
    max: int

    def check(self, where: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not self.min <= value <= self.max:
            raise MalformedFileError(f"{where} is {shown(value)}, not a whole number from {self.min} to {self.max}")


@dataclass(frozen=True, slots=True)
class Number:
    max: float

    def check(self, where: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise MalformedFileError(f"{where} is {shown(value)}, not a number")
        if not 0 <= value <= self.max:  # NaN is neither
            raise MalformedFileError(f"{where} is {shown(value)}, not from 0 to {self.max:g}")


@dataclass(frozen=True, slots=True)
class Flag:
    def check(self, where: str, value: Any) -> None:
        if not isinstance(value, bool):
            raise MalformedFileError(f"{where} is {shown(value)}, not true or false")


@dataclass(frozen=True, slots=True)
class Word:
    names: tuple[str, ...]

    def check(self, where: str, value: Any) -> None:
        if not isinstance(value, str) or value not in self.names:
            raise MalformedFileError(f"{where} is {shown(value)}, not one of {', '.join(self.names)}")


@dataclass(frozen=True, slots=True)
class Known:
    """A valid value of a technique."""

    technique: Technique

    def check(self, where: str, value: Any) -> None:
        if not self.technique.known(value):
            raise MalformedFileError(f"{where} is {shown(value)}, not one of {', '.join(self.technique.names)}")


@dataclass(frozen=True, slots=True)
class Pinned:
    """A value that the table of pins allows for the pin ``name``."""

    name: str

    def check(self, where: str, value: Any) -> None:
        pin = PINS[self.name]
        if not isinstance(value, int | str):
            raise MalformedFileError(f"{where} is {shown(value)}, not {pin.choices}")
        if isinstance(value, str):
            TextField().check(where, value)
        elif not -_MAX_BYTES < value < _MAX_BYTES:
            raise MalformedFileError(f"{where} is {shown(value)}, not {pin.choices}")
        try:
            pin.checked(where, value)
        except UsageError as error:
            raise MalformedFileError(error.message) from error


@dataclass(frozen=True, slots=True)
class PinValue:
    """The value of any pin, whose key may select layers: a word, an integer or a boolean."""

    def check(self, where: str, value: Any) -> None:
        if isinstance(value, str):
            TextField().check(where, value)
        elif not isinstance(value, bool):
            Whole(0, _MAX_BYTES).check(where, value)


@dataclass(frozen=True, slots=True)
class Unread:
    """Any value, which is ignored."""

    def check(self, where: str, value: Any) -> None:
        """Accept every value."""


@dataclass(frozen=True, slots=True)
class Optional:
    """``kind``, or null."""

    kind: FieldKind

    def check(self, where: str, value: Any) -> None:
        if value is not None:
            self.kind.check(where, value)


@dataclass(frozen=True, slots=True)
class Items:
    """A list of ``min`` to ``max`` values of the same kind."""

    kind: FieldKind
    min: int
    max: int

    def check(self, where: str, value: Any) -> None:
        if not isinstance(value, list):
            raise MalformedFileError(f"{where} is {shown(value)}, not a list")
        if not self.min <= len(value) <= self.max:
            raise MalformedFileError(f"{where} has {len(value):,} items, and a plan has {self.min} to {self.max:,}")
        for i, item in enumerate(value):
            self.kind.check(f"{where}[{i}]", item)


@dataclass(frozen=True, slots=True)
class Fields:
    """An object with exactly these fields; those in ``optional`` may be missing."""

    kinds: Mapping[str, FieldKind]
    optional: frozenset[str] = frozenset()

    def check(self, where: str, value: Any) -> None:
        name = where or "it"
        if not isinstance(value, dict):
            raise MalformedFileError(f"{name} is {shown(value)}, not an object" if where else "it is not a JSON object")
        for key in value:
            if key not in self.kinds:
                raise MalformedFileError(f"{name} has {shown(key)}, which is not a field of a plan")
        for key, kind in self.kinds.items():
            if key in value:
                kind.check(f"{where}.{key}" if where else key, value[key])
            elif key not in self.optional:
                raise MalformedFileError(f"{name} has no {key!r}")


_SECONDS = Number(1e12)
_SIZE = Whole(0, _MAX_BYTES)
_COUNT = Whole(1, MAX_DEVICES)
_AXIS_NAME = TextField(64, r"[A-Za-z][A-Za-z0-9_+]*", "a letter, then letters, digits, _ or +")
_MODULE_NAME = TextField(200, r"[^\W\d]\w*(\.[^\W\d]\w*)*", "the dotted name of a Python module")
_AXIS = Fields({"name": _AXIS_NAME, "size": _COUNT, "stride": _COUNT})

_STAGE = Fields(
    {
        "layers": Items(Whole(0, MAX_LAYERS), 2, 2),
        "devices": Items(Whole(0, MAX_DEVICES), 2, 2),
        "memory_bytes": _SIZE,
        "memory_limit_bytes": _SIZE,
        "memory_by_part_bytes": Fields({part.name: _SIZE for part in dataclasses.fields(Memory)}),
        "microbatch_s": _SECONDS,
        "host_bytes": _SIZE,
        "nvme_bytes": _SIZE,
        "optimizer_s": _SECONDS,
    },
    frozenset({"memory_bytes", "host_bytes", "nvme_bytes", "optimizer_s"}),
)

_DEGREES = ("data", "tensor", "expert", "sequence")


def _former(form: Any) -> FieldKind:
    """Return the type of a former field (``Technique.former_fields``)."""
    if isinstance(form, dict):
        return Fields({name: _former(inner) for name, inner in form.items()})
    return Flag() if form is bool else Whole(1, MAX_LAYERS) if form is int else Word(form)


_FORMER = {name: _former(form) for technique in LAYER for name, form in technique.former_fields.items()}
"""Fields of layers that only older plan files have."""

_LAYER = Fields(
    {
        "name": TextField(),
        "class": TextField(),
        **dict.fromkeys(_DEGREES, _COUNT),
        "zero": Whole(0, 3),
        "replicate": _COUNT,
        **{technique.name: Known(technique) for technique in LAYER},
        **_FORMER,
        "roles": Items(Word(tuple(role.value for role in Role)), 1, _MAX_AXES),
    },
    frozenset((*_DEGREES, "replicate", *(technique.name for technique in LAYER), *_FORMER)),
)

_PIN = Fields({"pin": TextField(), "value": PinValue(), "step_time_without_s": _SECONDS, "bound_without_s": _SECONDS})

_REQUEST_KINDS: dict[str, FieldKind] = {
    "model": TextField(4096),
    "devices": TextField(4096),
    "seq": Whole(1, MAX_ROWS),
    "global_batch": Whole(1, MAX_ROWS),
    "precision": TextField(40),
    "memory_limit": TextField(40),
    "time_limit": Number(MAX_SEARCH_S),
    "within": Number(1.0),
    **{name: Pinned(name) for name in PINS},
    "pins": Items(TextField(), 0, MAX_LAYERS),
    "allow": Items(Word(tuple(name.replace("_", "-") for name in ALLOWED)), 0, len(ALLOWED)),
    "local_batch_norm": Flag(),
    "trainer": TextField(40),
    "facts": Items(TextField(40), 0, 100),
}
_REQUEST = Fields(_REQUEST_KINDS, frozenset(_REQUEST_KINDS))

_SENSITIVITY = Fields(
    {
        **dict.fromkeys(("error", "regret"), Number(1.0)),
        **dict.fromkeys(("slower_compute", "slower_links"), Number(math.inf)),
        **dict.fromkeys(("margin_bytes", "wider_margin_bytes"), _SIZE),
        "wider_margin_cost": Optional(Number(math.inf)),
    }
)

_ALTERNATIVE = Fields(
    {"summary": TextField(), "step_time_s": _SECONDS, "abbreviations": Items(TextField(40), 0, 20)},
    frozenset({"abbreviations"}),
)

_PLAN = Fields(
    {
        "feasible": Flag(),
        "model": TextField(),
        "devices": TextField(4096),
        **{field.name: _SECONDS for field in dataclasses.fields(Prediction)},
        "bound_s": _SECONDS,
        "gap": Number(1.0),
        "pipeline": _COUNT,
        "chunks": _COUNT,
        "microbatches": Whole(1, MAX_ACTIONS),
        "schedule": Word(SCHEDULES),
        "prefetch": Pinned("prefetch"),
        **{technique.name: Known(technique) for technique in PLAN},
        "global_batch": Whole(1, MAX_ROWS),
        "precision": Word((*PRECISIONS, FLOAT8)),
        "mesh": Items(_AXIS, 1, _MAX_AXES),
        "stages": Items(_STAGE, 1, MAX_LAYERS),
        "layers": Items(_LAYER, 1, MAX_LAYERS),
        "solver": TextField(),
        "notes": Items(TextField(20_000), 0, 1000),
        "imports": Items(_MODULE_NAME, 0, 1000),
        "pins": Items(_PIN, 0, MAX_LAYERS),
        "allow": Items(Word(tuple(ALLOWED)), 0, len(ALLOWED)),
        "nvme_path": TextField(4096),
        "gpus_per_node": Whole(0, MAX_DEVICES),
        "sensitivity": Optional(_SENSITIVITY),
        "alternatives": Items(_ALTERNATIVE, 0, 100),
        "tokens_per_row": Whole(0, MAX_ROWS),
        "wall_time_s": _SECONDS,
        "planning_memory_bytes": _SIZE,
        "request": _REQUEST,
        "timeline": Unread(),  # of ``autopar price --timeline``
    },
    frozenset({"feasible", "pipeline", "chunks", "prefetch", "imports", "pins", "allow", "nvme_path", "request"})
    | {"gpus_per_node", "sensitivity", "alternatives", "tokens_per_row", "timeline"}
    | {technique.name for technique in PLAN},
)


def check_plan(data: Any) -> None:
    """Raise ``MalformedFileError`` if a field of ``data`` is missing, unknown, of the wrong type, or inconsistent with others."""
    if isinstance(data, dict) and data.get("feasible") is False:
        raise MalformedFileError("it says that nothing fits")
    _PLAN.check("", data)
    _check_mesh(data["mesh"])
    _check_schedule(data)
    _check_stages(data)
    for i, layer in enumerate(data["layers"]):
        _check_layer(f"layers[{i}]", layer, data["mesh"], data["schedule"])
    for technique in PLAN:
        value = technique.read(data)
        most = technique.mode(value).max_zero
        sharded = next((layer for layer in data["layers"] if layer["zero"] > most), None)
        if sharded is not None:
            raise MalformedFileError(
                f"{technique.name} is {value}, and layer {shown(sharded['name'])} has ZeRO {sharded['zero']}"
            )
        if (found := conflict(technique, value, {"schedule": data["schedule"]})) is not None:
            raise MalformedFileError(f"{technique.name} is {value}, and {found.other} is {data[found.other]}")
    _check_allowed(data)
    try:
        read_pins(data.get("request", {}).get("pins", ()))
    except UsageError as error:
        raise MalformedFileError(f"request.pins: {error.message}") from error


def _check_allowed(data: Mapping[str, Any]) -> None:
    """Check that ``allow`` names the numerical deviations that the values of techniques cause, and one recipe for products in 8 bits."""
    if message := several_fp8_recipes(data.get("allow", ())):
        raise MalformedFileError(message)
    chosen = [(technique, technique.read(data)) for technique in PLAN]
    chosen += [(technique, technique.read(layer)) for layer in data["layers"] for technique in LAYER]
    for technique, value in chosen:
        deviation = technique.mode(value).deviation
        if deviation and deviation not in data.get("allow", ()):
            raise MalformedFileError(f"{technique.name} is {value}, which is not exact, and allow lacks {deviation!r}")


def _product(mesh: Sequence[Mapping[str, Any]]) -> int:
    return math.prod(axis["size"] for axis in mesh)


def _check_mesh(mesh: Sequence[Mapping[str, Any]]) -> None:
    """Check that axes have unique names and row-major strides."""
    names = [axis["name"] for axis in mesh]
    for name in names:
        if name in _RESERVED_AXES or names.count(name) > 1:
            why = "which every program has itself" if name in _RESERVED_AXES else "twice"
            raise MalformedFileError(f"mesh has the axis {name!r}, {why}")
    if (devices := _product(mesh)) > MAX_DEVICES:
        raise MalformedFileError(f"mesh has {devices:,} devices, and a plan has at most {MAX_DEVICES:,}")
    for i, axis in enumerate(mesh):
        if axis["stride"] != (inner := _product(mesh[i + 1 :])):
            raise MalformedFileError(
                f"the axis {axis['name']!r} has stride {axis['stride']}, and the axes inside of it {inner} devices"
            )


def _schedule(data: Mapping[str, Any]) -> Schedule:
    chunks = data.get("chunks", 1)
    return Schedule(data["schedule"], len(data["stages"]) // chunks, data["microbatches"], chunks)


def _check_schedule(data: Mapping[str, Any]) -> None:
    stages, microbatches, rows = len(data["stages"]), data["microbatches"], data["global_batch"]
    schedule = _schedule(data)
    if schedule.stages != stages:
        raise MalformedFileError(f"{stages} stages do not make {schedule.chunks} on each device")
    if (given := data.get("pipeline", schedule.pipeline)) != schedule.pipeline:
        raise MalformedFileError(
            f"pipeline is {given}, and there are {stages} stages, {schedule.chunks} on each device"
        )
    if (devices := schedule.pipeline * _product(data["mesh"])) > MAX_DEVICES:
        raise MalformedFileError(
            f"{stages} stages of {_product(data['mesh']):,} devices are {devices:,}, more than {MAX_DEVICES:,}"
        )
    if rows % microbatches:
        raise MalformedFileError(f"a global batch of {rows} does not divide into {microbatches} microbatches")
    if stages * microbatches > MAX_ACTIONS:
        raise MalformedFileError(
            f"{microbatches:,} microbatches of {stages} stages are more than {MAX_ACTIONS:,} forwards in a step"
        )
    if (why := refusal(schedule, any_rounds=bool(data.get("request", {}).get("trainer")))) is not None:
        raise MalformedFileError(why[0])
    if schedule.name == NO_PIPELINE and schedule.pipeline > 1:
        raise MalformedFileError(f"schedule is {schedule.name}, and the pipeline has {schedule.pipeline} devices")


def _check_stages(data: Mapping[str, Any]) -> None:
    """Check that stages cover all layers in order, on the schedule's devices."""
    stages, layers, size = data["stages"], len(data["layers"]), _product(data["mesh"])
    bounds = [0, *(stage["layers"][1] for stage in stages)]
    for i, (stage, (start, stop), device) in enumerate(
        zip(stages, pairwise(bounds), _schedule(data).rank_of_stage, strict=True)
    ):
        if stage["layers"][0] != start or stop <= start:
            raise MalformedFileError(
                f"stages[{i}] has the layers {stage['layers']}, and the stages before it end with layer {start}"
            )
        if stage["devices"] != [device * size, size]:
            raise MalformedFileError(f"stages[{i}] has the devices {stage['devices']}, not {[device * size, size]}")
        parts = sum(stage["memory_by_part_bytes"].values())
        if stage.get("memory_bytes", parts) != parts:
            raise MalformedFileError(
                f"stages[{i}] has memory_bytes {stage['memory_bytes']}, and its parts add up to {parts}"
            )
    if bounds[-1] != layers:
        raise MalformedFileError(f"the stages have {bounds[-1]} layers, and there are {layers}")


def _check_layer(where: str, layer: Mapping[str, Any], mesh: Sequence[Mapping[str, Any]], schedule: str) -> None:
    """Check that there is a role per axis, that degrees agree with the roles, and that the strategy is valid."""
    roles = [Role(value) for value in layer["roles"]]
    if len(roles) != len(mesh):
        raise MalformedFileError(f"{where} has {len(roles)} roles, and the mesh has {len(mesh)} axes")
    used = {**DEGREES, "sequence": SEQUENCES}
    for name in _DEGREES:
        degree = math.prod(axis["size"] for axis, role in zip(mesh, roles, strict=True) if role in used[name])
        if layer.get(name, degree) != degree:
            raise MalformedFileError(f"{where}.{name} is {layer[name]}, and the roles of its axes make {degree}")
    for technique in LAYER:
        before = [name for name in technique.former_fields if name in layer]
        if technique.name in layer and before:
            raise MalformedFileError(
                f"{where} has both {technique.name!r} and {before[0]!r}, an older field of the same decision"
            )
        if what := technique.unreadable(layer):
            raise MalformedFileError(f"{where} has {what}")
    zero, replicate = layer["zero"], layer.get("replicate", 1)
    options = {technique.name: technique.read(layer) for technique in LAYER}
    copies = [axis["size"] for axis, role in zip(mesh, roles, strict=True) if role.replicates_parameters]
    wrong = {
        f"replicate {replicate} without ZeRO": replicate > 1 and not zero,
        f"replicate {replicate}, which is not a product of its outermost data axes {copies}": replicate
        not in copy_counts(copies),
    }
    for technique in LAYER:
        value = options[technique.name]
        found = conflict(technique, value, options)
        wrong[f"{technique.name} {value} under ZeRO {zero}"] = technique.mode(value).min_zero > zero
        wrong[f"{technique.name} {value} and {found and f'{found.other} {options[found.other]}'}"] = found is not None
        unpaired = technique.mode(value).overlaps_pairs and schedule not in PAIRED
        wrong[f"{technique.name} {value} under the schedule {schedule}"] = unpaired
        refused = technique.refused_roles(value, roles)
        wrong[f"{technique.name} {value}, and {refused}"] = bool(refused)
    for what, is_so in wrong.items():
        if is_so:
            raise MalformedFileError(f"{where} has {what}")
