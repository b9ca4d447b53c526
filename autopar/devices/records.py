"""Every figure that was chosen rather than given by a data sheet, in one list: ``constants``, and what files of kinds and networks add.

Vendor specifications of a GPU are not repeated here: ``autopar hardware show`` prints them. docs/evidence/validation.md prints the
list, and a test counts what was fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.devices import constants, hardware
from autopar.devices.constants import Constant

_UNITS = {"sustained": ("sustained_matmul_bf16_tflops", "TFLOP/s, bfloat16 products in training")}


@dataclass(frozen=True, slots=True)
class Record:
    """A named figure. ``where`` is the module or file that holds it."""

    name: str
    value: float
    unit: str
    source: str
    where: str

    @property
    def kind(self) -> str:
        """The first word of the source, see ``constants``."""
        return Constant(self.value, self.unit, self.source).kind

    @property
    def fitted(self) -> bool:
        """Whether it was chosen with published measurements in view."""
        return self.kind == "fitted"


def records() -> tuple[Record, ...]:
    """All of them, those of ``constants`` first. One figure that several files share is one record."""
    named = [(name, c) for name, c in vars(constants).items() if isinstance(c, Constant)]
    found = [Record(name, c.value, c.unit, c.source, "constants") for name, c in named]
    files = [(f"kinds/{name}.toml", entry) for name, entry in hardware.table().items()]
    files += [(f"networks/{entry['name']}.toml", entry) for entry in hardware.network_entries()]
    for where, entry in files:
        found += _of_file(where, entry)
    once: dict[tuple[str, float, str], Record] = {}
    for record in found:
        once.setdefault((record.unit, record.value, record.source), record)
    return tuple(once.values())


def _of_file(where: str, entry: Mapping[str, Any]) -> list[Record]:
    """The figures of a file that are no data sheet's: a fraction reached in training, a fitted latency."""
    found = []
    for key, source in entry.get("sources", {}).items():
        if key in _UNITS:
            field, unit = _UNITS[key]
            found.append(Record(f"{entry['name']}: {field}", float(entry[field]), unit, source, where))
        elif key.endswith("_us"):
            found.append(Record(f"{entry['name']}: {key}", float(entry[key]), "microseconds a step", source, where))
    return found
