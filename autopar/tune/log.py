"""The log of a tuning: JSON lines, appended as things happen, from which a later call resumes. It is read back as untrusted data.

======== ========================================================================================
request  the first line: what is tuned (``Request``), and the version of the log
base     the calibration that is corrected
plan     a plan, under its name
round    the seconds of a step of each plan that took a turn, the number of timed steps, peak bytes
failed   a plan that does not run: its cause and the error
======== ========================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from autopar.data_files import MAX_BYTES, MalformedFileError, parse_json, shown
from autopar.devices.calibration import Calibration, from_json
from autopar.errors import HANG, OUT_OF_MEMORY, UsageError
from autopar.plan import Plan
from autopar.plan_schema import check_plan

VERSION = 2
WRONG_LOSS, CRASH = "wrong loss", "crash"
CAUSES = (OUT_OF_MEMORY, HANG, WRONG_LOSS, CRASH)
_HINT = "give another --log, or remove the file to start again"


@dataclass(frozen=True, slots=True)
class Request:
    """What is tuned; the log of one request does not continue another. ``memory_limit_bytes`` is that of predictions without errors."""

    model: str
    cluster: str
    nodes: int
    gpus_per_node: int
    memory_limit_bytes: int
    device: str
    precision: str
    global_batch: int
    tokens: int
    pins: dict[str, Any]
    allow: list[str]


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of some plans: the median ``seconds`` of their ``steps`` timed steps, and the peak bytes of those that ran on GPUs."""

    seconds: dict[str, float]
    steps: int
    peak_bytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a plan's program does not run: one of ``CAUSES``, and the error."""

    cause: str
    error: str


class Log:
    """The record of a tuning, in the file ``path`` if it is not ``None``.

    Raises ``UsageError`` if the file can't be read or written, isn't a log, or is that of another request.
    """

    def __init__(self, path: Path | None, request: Request) -> None:
        self.path, self.request = path, request
        self.base: Calibration | None = None
        self.plans: dict[str, Plan] = {}
        self.rounds: list[Round] = []
        self.failures: dict[str, Failure] = {}
        if path is None or not path.exists() or not path.stat().st_size:
            self._write("request", {"version": VERSION, **asdict(request)})
            return
        try:
            self._read(path, request)
        except OSError as error:
            raise UsageError(f"the log {path} cannot be read: {error.strerror}", _HINT) from error
        except MalformedFileError as error:
            raise UsageError(f"{path} is not a log of `autopar tune`: {error}", _HINT) from error

    @property
    def measured_steps(self) -> int:
        """The number of timed steps of all plans."""
        return sum(len(one.seconds) * one.steps for one in self.rounds)

    def rounds_of(self, *names: str) -> list[tuple[float, ...]]:
        """Return the seconds of these plans in each round in which all of them took a turn."""
        together = (one.seconds for one in self.rounds if all(name in one.seconds for name in names))
        return [tuple(seconds[name] for name in names) for seconds in together]

    def set_base(self, base: Calibration) -> None:
        """Record the calibration that is corrected."""
        self.base = base
        self._write("base", {"calibration": json.loads(base.dumps())})

    def add_plan(self, plan: Plan) -> str:
        """Record a plan and return its name."""
        name = f"plan-{len(self.plans) + 1}"
        self.plans[name] = plan
        self._write("plan", {"name": name, "plan": plan.to_json()})
        return name

    def add_round(self, one: Round) -> None:
        """Record a turn of some plans."""
        self.rounds.append(one)
        self._write("round", asdict(one))

    def add_failure(self, name: str, failure: Failure) -> None:
        """Record that a plan does not run."""
        self.failures[name] = failure
        self._write("failed", {"name": name, **asdict(failure)})

    def _write(self, kind: str, content: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        try:
            with self.path.open("a") as file:
                file.write(json.dumps({"kind": kind, **content}) + "\n")
        except OSError as error:
            raise UsageError(f"the log {self.path} cannot be written: {error.strerror}", _HINT) from error

    def _read(self, path: Path, request: Request) -> None:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise MalformedFileError(f"it has more than {MAX_BYTES:,} bytes")
        *lines, rest = content.split(b"\n")
        for number, text in enumerate(lines, 1):
            try:
                line = _object(parse_json(text))
                if (kind := line.pop("kind", None)) == "request":
                    self._check_request(line, request, number)
                elif number == 1:
                    raise MalformedFileError("the first line is not a request")
                else:
                    self._take(kind, line)
            except MalformedFileError as error:
                raise MalformedFileError(f"line {number}: {error}") from error
        if not lines:
            raise MalformedFileError("it has no complete line")
        if rest:  # the last line was cut off when the writer was killed
            with path.open("r+b") as file:
                file.truncate(len(content) - len(rest))

    def _check_request(self, line: dict[str, Any], request: Request, number: int) -> None:
        """Raise ``UsageError`` if the log's request is another one."""
        if number > 1:
            raise MalformedFileError("a second request")
        mine = {"version": VERSION, **asdict(request)}
        if line.keys() != mine.keys():
            raise MalformedFileError(f"the request lacks, or should not have, {shown(min(line.keys() ^ mine.keys()))}")
        for name, value in mine.items():
            if line[name] != value:
                raise UsageError(
                    f"{self.path} is the log of another request: its {name.replace('_', ' ')} is {shown(line[name])}, not {shown(value)}",
                    _HINT,
                )

    def _take(self, kind: Any, line: dict[str, Any]) -> None:
        """Add the content of a line; raise ``MalformedFileError`` if it isn't valid."""
        if kind == "base":
            _check_keys(line, ("calibration",))
            self.base = from_json(line["calibration"])
        elif kind == "plan":
            _check_keys(line, ("name", "plan"))
            if line["name"] != f"plan-{len(self.plans) + 1}":
                raise MalformedFileError(f"the plan's name is {shown(line['name'])}, not plan-{len(self.plans) + 1}")
            check_plan(line["plan"])
            self.plans[line["name"]] = Plan.from_json(line["plan"])
        elif kind == "round":
            _check_keys(line, [field.name for field in fields(Round)])
            self._check_numbers(line["seconds"], (int, float))
            self._check_numbers(line["peak_bytes"], int)
            if not _is_positive(line["steps"], int):
                raise MalformedFileError(f"steps is {shown(line['steps'])}")
            self.rounds.append(Round(**line))
        elif kind == "failed":
            _check_keys(line, ("name", "cause", "error"))
            if line["name"] not in self.plans or line["cause"] not in CAUSES or not isinstance(line["error"], str):
                raise MalformedFileError(f"no failure of a plan: {shown(line)}")
            self.failures[line["name"]] = Failure(line["cause"], line["error"])
        else:
            raise MalformedFileError(f"there is no kind of line {shown(kind)}")

    def _check_numbers(self, values: Any, kind: Any) -> None:
        """Raise ``MalformedFileError`` unless ``values`` maps names of plans to positive numbers."""
        for name, value in _object(values).items():
            if name not in self.plans:
                raise MalformedFileError(f"there is no plan {shown(name)} before it")
            if not _is_positive(value, kind):
                raise MalformedFileError(f"{name} has {shown(value)}")


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MalformedFileError(f"{shown(value)} is not a JSON object")
    return value


def _check_keys(line: Mapping[str, Any], names: Any) -> None:
    if odd := sorted(line.keys() ^ set(names)):
        raise MalformedFileError(f"it lacks, or should not have, {shown(odd[0])}")


def _is_positive(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and 0 < value < 1e30
