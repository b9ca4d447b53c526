"""Shows a plan's memory timeline as a table and as data: the memory of each pipeline rank at each action of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from autopar.cli.console import plain_table
from autopar.search.timeline import Moment
from autopar.units import size

_LEVELS = " ▁▂▃▄▅▆▇█"
_COLUMNS = 64  # maximum characters of a curve

Timeline = Sequence[Sequence[Moment]]


def timeline_data(devices: Timeline) -> list[dict[str, Any]]:
    """Return the actions of each pipeline rank in order, with the bytes of each part of memory; ``memory_bytes`` is the peak total."""
    return [
        {
            "device": d,
            "memory_bytes": max(moment.memory.total for moment in moments),
            "moments": [
                {
                    "action": moment.kind,
                    "stage": moment.stage,
                    "microbatch": moment.microbatch,
                    **dataclasses.asdict(moment.memory),
                    "total": moment.memory.total,
                }
                for moment in moments
            ],
        }
        for d, moments in enumerate(devices)
    ]


def timeline_table(devices: Timeline) -> Table:
    """Return a table with the memory curve of each pipeline rank, on a common scale, and the action at which it peaks."""
    numbers = ("device", "peak at", "activations", "transients", "total")
    table = plain_table("memory through one step", numbers=numbers)
    table.add_column("from the first action to the last", no_wrap=True)
    most = max(moment.memory.total for moments in devices for moment in moments)
    for d, moments in enumerate(devices):
        top = max(moments, key=lambda moment: moment.memory.total)
        m, several = top.memory, len({moment.stage for moment in moments}) > 1
        action = f"{top.kind}{top.microbatch}" + (f" of stage {top.stage}" if several else "")
        sizes = map(size, (m.activations, m.transients, m.total))
        table.add_row(str(d), action, *sizes, curve([x.memory.total for x in moments], most))
    return table


def curve(values: Sequence[int], most: int) -> str:
    """Return ``values`` as at most ``_COLUMNS`` block characters, one for the largest value of each interval; ``most`` has full height."""
    columns = min(_COLUMNS, len(values))
    bounds = [len(values) * i // columns for i in range(columns + 1)]
    shares = [max(values[a:b]) / most if most else 0.0 for a, b in zip(bounds, bounds[1:], strict=False)]
    return "".join(_LEVELS[round(share * (len(_LEVELS) - 1))] for share in shares)
