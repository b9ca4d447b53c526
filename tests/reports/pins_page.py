"""The tables of pins in ``docs/guide/pins.md`` and of techniques in ``docs/reference/plan-json.md`` (``make report NAME=reference``)."""

from __future__ import annotations

import re

from places import DOCS

from autopar.pins import PINS
from autopar.techniques import LAYER

PAGE = DOCS / "guide" / "pins.md"
FIELDS = DOCS / "reference" / "plan-json.md"
_HEADING = "| pin | applies to | values | decides | example |\n|---|---|---|---|---|\n"


def table() -> str:
    """The rows of every pin, with the heading."""
    return _HEADING + "".join(
        f"| `{pin.name}` | {'layers' if pin.of_layer else 'the plan'} | {_values(pin.names) or pin.choices} | {pin.meaning} "
        f"| `--pin {pin.example}` |\n"
        for pin in PINS.values()
        if not pin.former
    )


_FIELDS_HEADING = "| field | values, the default first | decides |\n|---|---|---|\n"


def fields() -> str:
    """The rows of every technique's field in a plan file, with the heading."""
    return _FIELDS_HEADING + "".join(
        f"| `{technique.name}` | {_values(technique.names)} | {technique.meaning} |\n" for technique in LAYER
    )


def _values(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def page(text: str) -> str:
    """The document ``text`` with its tables as they should be."""
    for heading, rows in ((_HEADING, table), (_FIELDS_HEADING, fields)):
        text = re.sub(re.escape(heading) + r"(?:\|.*\n)*", lambda _, made=rows: made(), text)  # type: ignore[misc]
    return text
