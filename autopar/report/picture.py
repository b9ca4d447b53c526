"""Draws figures of a predicted step for papers: the timeline, and memory through the step on the pipeline rank that uses most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from autopar.picture import pyplot, save
from autopar.plan import Memory
from autopar.report.step import PredictedStep

KINDS = {
    "F": ("forward", "#2f6fb5"),
    "B": ("backward", "#e0922f"),
    "I": ("backward, gradients of inputs", "#e0922f"),
    "W": ("backward, gradients of weights", "#3d9970"),
    "O": ("once a step", "#7a6ea8"),
}
_SEND = ("send", "#b5179e")
PARTS = ("#3b6fb6", "#5d9f4a", "#8e7cc3", "#e0922f", "#c8442b")


def plot(steps: Sequence[tuple[str, PredictedStep]], path: Path) -> None:
    """Draw the timeline of each (name, step) above its memory, and write the figure to ``path`` (``.png``, ``.svg`` or ``.pdf``).

    Raises ``UsageError`` if matplotlib isn't installed, or the file can't be written.
    """
    heights = [height for _, step in steps for height in (0.5 + 0.22 * len(step.actions), 1.6)]
    figure, panels = pyplot().subplots(
        2 * len(steps),
        1,
        figsize=(9, sum(heights) + 0.5 * len(heights)),
        height_ratios=heights,
        sharex=True,
        squeeze=False,
    )
    for i, (name, step) in enumerate(steps):
        _timeline(panels[2 * i, 0], step)
        panels[2 * i, 0].set_title(name, loc="left", fontsize=9)
        _memory(panels[2 * i + 1, 0], step)
    panels[-1, 0].set_xlim(0, max(step.step_time_s for _, step in steps))
    panels[-1, 0].set_xlabel("seconds of one step")
    save(figure, path)


def _timeline(panel: Any, step: PredictedStep) -> None:
    for rank, actions in enumerate(step.actions):
        for kind, (name, colour) in KINDS.items():
            bars = [(a.start_s, a.stop_s - a.start_s) for a in actions if a.kind == kind]
            if bars:
                panel.broken_barh(bars, (rank + 0.1, 0.8), color=colour, label=name, linewidth=0)
        sends = [(a.stop_s - a.send.seconds, a.send.seconds) for a in actions if a.send is not None]
        if sends:
            panel.broken_barh(sends, (rank + 0.1, 0.8), color=_SEND[1], label=_SEND[0], linewidth=0)
    ranks = range(len(step.actions))
    panel.set_yticks([rank + 0.5 for rank in ranks], [f"rank {rank}" for rank in ranks], fontsize=7)
    panel.invert_yaxis()
    once = dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))  # each name once
    panel.legend(
        once.values(), once, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(once), fontsize=7, frameon=False
    )


def _memory(panel: Any, step: PredictedStep) -> None:
    fullest = max(range(len(step.actions)), key=lambda rank: max(a.memory.total for a in step.actions[rank]))
    actions = step.actions[fullest]
    names = [field.name for field in fields(Memory)]
    times = [*(a.start_s for a in actions), step.step_time_s]
    parts = [[*(getattr(a.memory, name) / 1e9 for a in actions), 0.0] for name in names]
    panel.stackplot(times, parts, labels=names, colors=PARTS, step="post", linewidth=0)
    panel.axhline(step.limits_bytes[fullest] / 1e9, color="#a4133c", label="limit")
    panel.set_ylabel(f"GB, rank {fullest}", fontsize=8)
    panel.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(names) + 1, fontsize=7, frameon=False)
