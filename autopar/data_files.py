"""Reads untrusted JSON files: bounded size and depth, unique keys, finite numbers, valid Unicode."""

from __future__ import annotations

import json
import math
import reprlib
from collections import Counter
from pathlib import Path
from typing import Any

MAX_BYTES = 16 * 2**20
MAX_LEVELS = 100
"""Maximum nesting of objects and lists."""


class MalformedFileError(ValueError):
    """A file has invalid content; the message is a clause about it, such as "it has more than 10 bytes"."""


def read_json(path: str | Path, max_bytes: int = MAX_BYTES) -> Any:
    """Read a JSON file.

    Raises:
        MalformedFileError: the file is larger than ``max_bytes``, or ``parse_json`` refuses its text.
        OSError: the file can't be read.
    """
    with Path(path).open("rb") as file:
        content = file.read(max_bytes + 1)  # devices and pipes don't report a size
    if len(content) > max_bytes:
        raise MalformedFileError(f"it has more than {max_bytes:,} bytes")
    return parse_json(content)


def parse_json(content: bytes | str) -> Any:
    """Parse JSON. Raises ``MalformedFileError`` if the content isn't UTF-8 JSON, has duplicate keys, is nested deeper than ``MAX_LEVELS``,
    or has an infinite number, a NaN or a lone surrogate."""
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        found = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse, parse_float=_finite)
        if "\\ud" in text or "\\uD" in text or isinstance(content, str):  # else it has no lone surrogate
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise MalformedFileError(f"it is nested deeper than {MAX_LEVELS} levels") from error
    except UnicodeDecodeError as error:
        raise MalformedFileError(f"byte {error.start} is not UTF-8") from error
    except UnicodeEncodeError as error:
        raise MalformedFileError("it has half of a surrogate pair, which is not a character") from error
    except json.JSONDecodeError as error:
        raise MalformedFileError(f"line {error.lineno} is not JSON: {error.msg}") from error
    except MalformedFileError:
        raise
    except ValueError as error:  # an integer of more digits than Python converts
        raise MalformedFileError("it has an integer with thousands of digits") from error
    if isinstance(found, dict | list) and _nests_deeper(found, MAX_LEVELS):
        raise MalformedFileError(f"it is nested deeper than {MAX_LEVELS} levels")
    return found


def shown(value: Any) -> str:
    """Return a value for a message, shortened to one line."""
    return _SHORT.repr(value)


def _short() -> reprlib.Repr:
    found = reprlib.Repr()
    found.maxlevel, found.maxstring, found.maxother, found.maxlong, found.maxlist, found.maxdict = 2, 60, 60, 30, 4, 4
    return found


_SHORT = _short()


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise MalformedFileError(f"one of its objects has the key {shown(twice)} twice")
    return found


def _refuse(text: str) -> float:
    raise MalformedFileError(f"{text} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise MalformedFileError(f"{text[:20]} is larger than any number")
    return value


def _nests_deeper(value: Any, levels: int) -> bool:
    """Return whether objects and lists are nested deeper than ``levels``."""
    within = [value]
    for _ in range(levels):
        inner = (each for outer in within for each in (outer.values() if isinstance(outer, dict) else outer))
        within = [each for each in inner if isinstance(each, dict | list)]
        if not within:
            return False
    return True
