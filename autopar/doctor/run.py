"""Runs all checks of ``autopar doctor``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from autopar.doctor.findings import BROKEN, Finding
from autopar.doctor.installed import installed
from autopar.doctor.machine import gpus, machine


def examine(tell: Callable[[str], None], trials: bool = True) -> Iterator[Finding]:
    """Yield every finding. ``tell`` is called with the name of each group of checks before they run. Without ``trials``, checks that start
    processes are left out."""
    tell("installed packages")
    broken = set()
    for finding in installed():
        broken |= {finding.name} if finding.status == BROKEN else set()
        yield finding
    tell("the machine")
    yield from machine()
    if "torch" in broken:  # the other checks need torch
        return
    import torch

    tell("GPUs")
    yield from gpus(torch)
    if trials:
        from autopar.doctor.working import working

        yield from working(tell)
