"""Corrects a calibration by factors that were learned from measured steps, one for each group of figures.

A corrected calibration is a calibration: what reads one needs to know nothing of corrections. Its ``machine`` says how it was corrected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autopar.devices.calibration import MEMORY, Calibration, Figure

ARITHMETIC, LAUNCH, OPTIMIZER = "arithmetic", "launch of an op", "optimizer"
SENDS, CALLS, HIDDEN = "sends", "call of a collective", "hidden communication"
_GROUPS = {
    **dict.fromkeys(("product", "attention", "move"), ARITHMETIC),
    "launch": LAUNCH,
    "update": OPTIMIZER,
    "call": CALLS,
    "overlap": HIDDEN,
    MEMORY: MEMORY,
}


def group_of(figure: Figure) -> str:
    """Return the group whose factor multiplies a figure: times of collectives and waits have a group for each number of members."""
    if figure.name in _GROUPS:
        return _GROUPS[figure.name]
    return SENDS if figure.variant == "p2p" else f"collectives over {int(figure.size['members'])}"


def groups(calibration: Calibration, device: str, processes: int) -> tuple[str, ...]:
    """Return the groups of the figures that apply to ``processes`` devices, without that of memory, which no step time depends on."""
    here = (f for f in calibration.figures if (f.device, f.processes) == (device, processes) and f.name != MEMORY)
    return tuple(dict.fromkeys(group_of(figure) for figure in here))


def corrected(
    calibration: Calibration, factors: Mapping[str, float], device: str, processes: int, measured_steps: int = 0
) -> Calibration:
    """Return the calibration with the figures for ``processes`` devices multiplied by the factors of their groups (1 if there is none).

    The factor of ``MEMORY`` is the bytes that programs take over those that prices predict. If the factors were learned, ``measured_steps``
    is the number of steps.
    """

    def scaled(figure: Figure) -> Figure:
        factor = factors.get(group_of(figure), 1.0)
        if (figure.device, figure.processes) != (device, processes) or factor == 1.0:
            return figure
        if figure.name == MEMORY:  # the factor is the whole ratio, not a correction of the one before
            return dataclasses.replace(figure, median=factor, low=factor, high=factor)
        values = {name: getattr(figure, name) * factor for name in ("median", "low", "high")}
        return dataclasses.replace(figure, **values)

    figures = tuple(scaled(figure) for figure in calibration.figures)
    ratio = factors.get(MEMORY, 1.0)
    has_memory = any((f.name, f.device, f.processes) == (MEMORY, device, processes) for f in figures)
    if ratio != 1.0 and not has_memory:
        unit = "measured / predicted"
        figures += (Figure(MEMORY, device, processes, "", False, {}, unit, ratio, ratio, ratio, 1),)
    machine = dict(calibration.machine)
    if measured_steps:
        before = machine.get("corrected")
        learned = {"measured_steps": measured_steps, "factors": dict(factors)}
        machine["corrected"] = {**(before if isinstance(before, dict) else {}), f"{processes} {device}": learned}
    return Calibration(machine, calibration.measured_at, figures)
