"""The keywords of ``autopar.compile``: what a request asks for and how the program trains, beside the pins (``autopar.pins``)."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from autopar.pins import PINS, PinKeywords

if TYPE_CHECKING:
    import torch

    from autopar.program.optimizers import Scheduler
    from autopar.run.recipe import Optimizer

R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Request:
    """How a model is planned and what is checked, besides the pins; ``autopar.compile`` says what each field means."""

    precision: str | torch.dtype | None = None
    local_batch_norm: bool = False
    allow: Collection[str] = ()
    memory_limit_bytes: int | None = None
    calibration: str | Path | None = None
    time_limit_s: float = 20.0
    capture_check: bool = True
    type_check: bool = True
    init: Callable[[Any], object] | str | Path | None = None


@dataclass(frozen=True, slots=True)
class Training:
    """How a program trains; ``autopar.Program`` says what each field means."""

    optimizer: Optimizer | str | None = None
    scheduler: Scheduler | str | None = None
    lr: float = 3e-4
    max_norm: float | None = None
    seed: int = 0
    port: int = 0
    draw_init: bool = False


class Keywords(PinKeywords, total=False):
    """Pins and the fields of ``Request`` and ``Training`` as keywords; a test holds the names and types to theirs."""

    precision: str | torch.dtype | None
    local_batch_norm: bool
    allow: Collection[str]
    memory_limit_bytes: int | None
    calibration: str | Path | None
    time_limit_s: float
    capture_check: bool
    type_check: bool
    init: Callable[[Any], object] | str | Path | None
    optimizer: Optimizer | str | None
    scheduler: Scheduler | str | None
    lr: float
    max_norm: float | None
    seed: int
    port: int
    draw_init: bool


def read_keywords(given: Mapping[str, Any]) -> tuple[Request, Training, PinKeywords]:
    """The records that ``given`` makes, and the pins that are left.

    Raises:
        TypeError: a keyword that does not exist, as Python raises it.
    """
    for name in given:
        if name not in Keywords.__annotations__:
            near = difflib.get_close_matches(name, Keywords.__annotations__, n=1)
            raise TypeError(
                f"compile() got an unexpected keyword argument {name!r}"
                + (f"; did you mean {near[0]}?" if near else "")
            )
    return _record(Request, given), _record(Training, given), PinKeywords(**{k: given[k] for k in given if k in PINS})  # type: ignore[typeddict-item]


def as_keywords(record: Request | Training) -> dict[str, Any]:
    """The fields of a record with their values."""
    return {f.name: getattr(record, f.name) for f in fields(record)}


def shows_keywords(function: F) -> F:
    """``function``, whose ``**keywords`` are ``Keywords``, with all of them and their defaults in the signature that ``help`` shows."""
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    defaults = {f.name: f.default for f in (*fields(Request), *fields(Training))}
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=annotation)
        for name, annotation in Keywords.__annotations__.items()
    ]
    function.__dict__["__signature__"] = inspect.signature(function).replace(parameters=[*own, *more])
    return function


def _record(kind: type[R], given: Mapping[str, Any]) -> R:
    return kind(**{f.name: given[f.name] for f in fields(kind) if f.name in given})  # type: ignore[arg-type]
