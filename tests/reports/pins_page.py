"""The table of pins in ``docs/guide/pins.md``, from ``autopar.pins`` (``make report NAME=reference``)."""

from __future__ import annotations

import re

from places import DOCS

from autopar.pins import PINS

PAGE = DOCS / "guide" / "pins.md"
_HEADING = "| pin | applies to | values | decides | example |\n|---|---|---|---|---|\n"


def table() -> str:
    """The rows of every pin, with the heading."""
    return _HEADING + "".join(
        f"| `{pin.name}` | {'layers' if pin.of_layer else 'the plan'} | {_values(pin.names) or pin.choices} | {pin.meaning} "
        f"| `--pin {pin.example}` |\n"
        for pin in PINS.values()
    )


def _values(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def page(text: str) -> str:
    """The document ``text`` with the table as it should be."""
    return re.sub(re.escape(_HEADING) + r"(?:\|.*\n)*", lambda _: table(), text)
