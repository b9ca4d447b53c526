"""The options that a plan's file records: commands that take a plan use them unless the command line sets others."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any

import click

from autopar.cli.load import names_code
from autopar.cli.options import PlanRequest
from autopar.errors import UsageError
from autopar.pins import PINS, read_pins, refuse_pins
from autopar.plan import Plan
from autopar.plan_files import read_plan


def recorded_options(request: PlanRequest) -> dict[str, Any]:
    """Return the options of a request that determine the plan and aren't empty, as ``Plan.request`` records them."""
    unrecorded = ("calibration", "expert_loads", "plan_file", "capture_check", "type_check", "init")
    given = {f.name: getattr(request, f.name) for f in fields(request) if f.name not in unrecorded}
    lists = {name: list(given[name]) for name in ("pins", "allow")}
    return {name: value for name, value in (given | lists).items() if not _is_missing(value)}


def _is_missing(value: Any) -> bool:
    """Return whether an option was not given; a time limit of 0 was."""
    return value is None or value is False or value in ("", (), [])


def with_recorded_options(written: Plan | None, request: PlanRequest) -> PlanRequest:
    """Return the request, with missing options taken from the plan's file, except a factory: a file must not import code."""
    if written is None:
        return request
    # if the request recorded no batch, the factory determines it again
    before = dict(written.request) or {"global_batch": written.global_batch, "devices": written.devices}
    if _factory_of(written):
        del before["model"]
    pins = [f"{name}={before[name]}" for name in PINS if name in before]  # older versions recorded pins as options
    pinned = read_pins(request.pins)
    pins = [pin for pin in (*pins, *before.pop("pins", ())) if next(iter(read_pins([pin]))) not in pinned]
    missing = {
        name: before[name]
        for f in fields(request)
        if (name := f.name) in before and _is_missing(getattr(request, name))
    }
    return replace(request, **missing, pins=(*pins, *request.pins))


def _factory_of(written: Plan) -> str:
    """Return the factory that a plan's file names as its model, or an empty string if the model is not code."""
    model = str(written.request.get("model", ""))
    return model if names_code(model) else ""


def with_plan_file(request: PlanRequest, required: Collection[str]) -> PlanRequest:
    """Return the request of a command that has ``--plan``, completed from the plan's file, if there is one. Recorded pins are left out:
    the plan has made these decisions.

    Raises ``UsageError`` if pins are combined with the plan, or if one of the ``required`` options is missing.
    """
    written = None
    if request.plan_file:
        refuse_pins([f"--pin {pin}" for pin in request.pins], "--plan")
        written = read_plan(request.plan_file)
        request = replace(with_recorded_options(written, request), pins=())
    require(request, written, request.plan_file or "", required)
    return request


def require(
    request: PlanRequest, written: Plan | None, file: str, required: Collection[str] = ("model", "devices")
) -> None:
    """Raise ``UsageError`` if the request lacks one of the ``required`` options; ``file`` is the path of the plan ``written``."""
    if (lacking := missing_options(request, written, file, required)) is not None:
        raise UsageError(lacking[0], f"write `{lacking[1]}`")


def missing_options(
    request: PlanRequest, written: Plan | None, file: str, required: Collection[str] = ("model", "devices")
) -> tuple[str, str] | None:
    """Return which of the ``required`` options are missing and why, and the command line with them; ``None`` if none is missing."""
    missing = [name for name in required if not getattr(request, name)]
    if not missing:
        return None
    values = {"model": "MODEL", "devices": "SPEC"}
    factory = _factory_of(written) if written is not None and "model" in missing else ""
    if factory:
        values["model"] = factory
        why = f"{file} names the model {factory}, which is code, and autopar runs no code that a plan file names"
    elif written is not None:
        why = f"{file} does not name its {' and '.join(missing)}"
    else:
        why = f"the {' and the '.join(missing)} to plan for {'is' if missing == ['model'] else 'are'} missing"
    return why, _command_with({name: values[name] for name in missing})


def _command_with(values: dict[str, str]) -> str:
    """Return the command line that runs, with ``values`` of options added. MODEL precedes the options unless it is the option --model."""
    context = click.get_current_context()
    positional = {param.name for param in context.command.params if isinstance(param, click.Argument)}
    first = [value for name, value in values.items() if name in positional]
    last = [word for name, value in values.items() if name not in positional for word in (f"--{name}", value)]
    words = context.obj
    at = words.index("--") if "--" in words else len(words)
    return shlex.join([*context.command_path.split(), *first, *words[:at], *last, *words[at:]])


def command_line(plan: Plan) -> str:
    """Return the ``autopar plan`` command that the plan's file records, without files such as a calibration; an empty string if there is
    none, as in plans of ``autopar.compile``."""
    words = ["autopar", "plan", str(plan.request.get("model", ""))]
    for name in (field.name for field in fields(PlanRequest)):
        if name in plan.request and name not in ("model", "pins", "allow"):
            value = plan.request[name]
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value).removesuffix(".0")])]
    for name in ("allow", "pins"):
        for value in plan.request.get(name, ()):
            words += [f"--{name.removesuffix('s')}", value]
    return shlex.join(words) if words[2] else ""
