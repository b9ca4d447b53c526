"""Reads options as the values of a setting, by a trainer's table of flags."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from autopar.errors import UsageError
from autopar.trainers.options import Option
from autopar.trainers.trainer import FACT, Flag, Reading, switch

_OFF = ("false", "no", "off", "0", "none", "null")

_TYPO = 0.95  # similarity (difflib's ratio) from which an unknown option may be a misspelled one: a wrong letter in 20

_SHOWN = 12  # maximum number of unknown options that a note names


def read_flags(options: Iterable[Option], table: Mapping[str, Flag], key: Callable[[str], str]) -> Reading | None:
    """Return what the options say by ``table``, whose keys are ``key(option.name)``; ``None`` if none of them is in it.

    Options that are not in ``table``, and those whose value is not in the file, are notes. If an option is repeated, the last value counts.
    Raises ``UsageError`` for an invalid value.
    """
    values: dict[str, Any] = {}
    facts: set[str] = set()
    unknown: list[str] = []
    notes: list[str] = []
    known = False
    for option in options:
        flag = table.get(key(option.name))
        if flag is None:
            unknown.append(option.name)
            continue
        known = True
        if isinstance(option.value, str) and "$" in option.value:
            notes.append(f"{option.name} is {option.value}, which the file does not set: it is not read")
            continue
        value = _value(option, flag)
        if flag.name == FACT:
            facts = facts | {value} if value else facts
        elif value is not None:
            if values.get(flag.name, value) != value:
                notes.append(f"{option.name} is set twice: {value} counts, not {values[flag.name]}")
            values[flag.name] = value
    if not known:
        return None
    if unknown:
        names = list(dict.fromkeys(unknown))
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        for name in names:
            near = difflib.get_close_matches(key(name), table, n=1, cutoff=_TYPO)
            notes += [f"{name} is not known: is {near[0]} meant?"] if near else []
        notes.append(f"not read: {', '.join(names[:_SHOWN])}{more}")
    return Reading(values, frozenset(facts), tuple(notes))


def _value(option: Option, flag: Flag) -> Any:
    """Return the value that an option sets; ``None`` if it is switched off or empty."""
    text = option.value
    if text is None or str(text).lower() == "auto":
        return None
    if not callable(flag.read):
        return None if isinstance(text, bool | None | str | int) and str(text).lower() in _OFF else flag.read
    if text == "" and flag.read is not switch:
        raise UsageError(f"{option.name} has no value", f"write {option.name} followed by its value")
    try:
        return flag.read(str(text))
    except UsageError as error:
        raise UsageError(f"{option.name}: {error.message}", error.hint) from None
