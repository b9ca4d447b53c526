"""The keywords of ``autopar.compile`` besides the pins (``autopar.pins``): options of planning and training."""

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from autopar.errors import UsageError
from autopar.pins import PINS, SHORT

if TYPE_CHECKING:
    import torch

    from autopar.program.optimizers import Scheduler
    from autopar.run.recipe import Optimizer

R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Request:
    """Options of planning and checks; ``autopar.compile`` documents the fields."""

    precision: str | torch.dtype | None = None
    local_batch_norm: bool = False
    allow: Collection[str] = ()
    memory_limit_bytes: int | None = None
    calibration: str | Path | None = None
    expert_loads: str | Path | float | None = None
    time_limit_s: float = 20.0
    within: float = 0.01
    capture_check: bool = True
    type_check: bool = True
    init: Callable[[Any], object] | str | Path | None = None


@dataclass(frozen=True, slots=True)
class Training:
    """Options of training; ``autopar.Program`` documents the fields."""

    optimizer: Optimizer | str | None = None
    scheduler: Scheduler | str | None = None
    lr: float = 3e-4
    max_norm: float | None = None
    seed: int = 0
    port: int = 0
    draw_init: bool = False


def keywords() -> dict[str, tuple[Any, Any]]:
    """Return every keyword with its type as text and its default: the pins, then the fields of ``Request`` and ``Training``."""
    pins = {name: (f"{' | '.join(_types(name))} | None", None) for name in PINS}
    return pins | {f.name: (f.type, f.default) for f in (*fields(Request), *fields(Training))}


def _types(name: str) -> list[str]:
    pin = PINS[name]
    return [*(["bool"] if pin.switch else []), "str" if pin.values else "int"]


def read_keywords(given: Mapping[str, Any]) -> tuple[Request, Training, dict[str, Any]]:
    """Split keywords into ``Request``, ``Training`` and pins. Raises ``TypeError`` for an unknown keyword, and ``UsageError`` for ``True``
    or ``False`` where the keyword's type has no ``bool``."""
    known = keywords()
    for name, value in given.items():
        if name not in known:
            near = [SHORT[name]] if name in SHORT else difflib.get_close_matches(name, known, n=1)
            raise TypeError(
                f"compile() got an unexpected keyword argument {name!r}"
                + (f"; did you mean {near[0]}?" if near else "")
            )
        if isinstance(value, bool) and "bool" not in str(known[name][0]) and name not in PINS:
            raise UsageError(f"{name} is {value}, but its type is {known[name][0]}", f"{known[name][1]} is the default")
        if name in ("optimizer", "scheduler") and not (value is None or isinstance(value, str) or callable(value)):
            of = "the list of parameters" if name == "optimizer" else "the optimizer"
            raise UsageError(
                f"{name} is an object of type {type(value).__name__}, not a function",
                f"give a function of {of} that returns it",
            )
    return _record(Request, given), _record(Training, given), {k: given[k] for k in given if k in PINS}


def as_keywords(record: Request | Training) -> dict[str, Any]:
    """Return the values of the fields by name."""
    return {f.name: getattr(record, f.name) for f in fields(record)}


def with_explicit_signature(function: F) -> F:
    """Replace ``**keywords`` in the function's signature with all of ``keywords``, for ``help`` and editors, and ``PINS`` in its docstring
    with the names of the pins."""
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in keywords().items()
    ]
    function.__doc__ = (function.__doc__ or "").replace(
        "PINS", textwrap.fill(", ".join(PINS), 120, subsequent_indent=" " * 12)
    )
    function.__dict__["__signature__"] = inspect.signature(function).replace(parameters=[*own, *more])
    return function


def _record(kind: type[R], given: Mapping[str, Any]) -> R:
    return kind(**{f.name: given[f.name] for f in fields(kind) if f.name in given})  # type: ignore[arg-type]
