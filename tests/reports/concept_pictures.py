"""The pictures of ``docs/concepts`` (``concepts.py``), as SVG files whose text stays text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from autopar.picture import pyplot, save
from autopar.plan import Memory
from autopar.report.picture import KINDS, PARTS
from autopar.schedules import Schedule
from autopar.schedules.step_time import Span
from autopar.types import SpmdType
from autopar.units import seconds

_TYPES = {"I": "#7f8c9b", "R": "#7f8c9b", "S": "#3b6fb6", "P": "#e0922f"}
_PIECES = ("#3b6fb6", "#5d9f4a", "#e0922f", "#8e7cc3")
_LIMIT = "#a4133c"
RANKS = 4


@dataclass(frozen=True)
class Held:
    """A value of a block on one device: the kind of its type on the axis, its bytes there, and what there is to say of it."""

    name: str
    kind: str
    bytes: int
    remarks: tuple[str, ...]


STYLE = {"font.size": 8, "axes.titlesize": 8, "font.sans-serif": ["DejaVu Sans"], "svg.fonttype": "none"}


def drawn(picture: Callable[[Path], None], path: Path) -> None:
    """Draws a picture in the style of the pages."""
    with pyplot().rc_context(STYLE):
        picture(path)


def _figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    return pyplot().subplots(rows, columns, figsize=(width, height), squeeze=False, **options)


def _write(figure: Any, path: Path) -> None:
    save(figure, path, bbox_inches="tight")


def memory_and_time(bars: Sequence[tuple[str, Memory, float]], limit: int, path: Path) -> None:
    """For each plan its memory by part as a bar beside the limit, and the seconds of its step."""
    figure, ((left, right),) = _figure(8, 0.8 + 0.42 * len(bars), columns=2, width_ratios=(3, 2), sharey=True)
    names = [name for name, _, _ in bars]
    start = [0.0] * len(bars)
    for field, colour in zip(fields(Memory), PARTS, strict=True):
        widths = [getattr(memory, field.name) / 1e9 for _, memory, _ in bars]
        left.barh(names, widths, left=start, color=colour, label=field.name, height=0.6)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    left.axvline(limit / 1e9, color=_LIMIT, label="limit")
    left.set_xlabel("GB on one device")
    left.invert_yaxis()
    figure.legend(
        *left.get_legend_handles_labels(), loc="lower center", bbox_to_anchor=(0.5, 0.98), ncols=6, frameon=False
    )
    fit = [memory.total <= limit for _, memory, _ in bars]
    shades = ["#5b6b7b" if fits else "#d3d8de" for fits in fit]
    drawn = right.barh(names, [time_s for _, _, time_s in bars], color=shades, height=0.6)
    texts = [seconds(t) + ("" if fits else ", if it fitted") for (_, _, t), fits in zip(bars, fit, strict=True)]
    right.bar_label(drawn, texts, padding=3, fontsize=8)
    right.set_xlim(0, 1.6 * max(time_s for _, _, time_s in bars))
    right.set_xlabel("seconds of one step")
    _write(figure, path)


def conversions(pairs: Sequence[tuple[SpmdType, SpmdType, str, str]], path: Path) -> None:
    """What four ranks hold of a tensor before and after each conversion."""
    figure, panels = _figure(8, 2.6, columns=6)
    for panel, (source, target, forward, _) in zip(panels.flat, pairs, strict=True):
        for rank in range(RANKS):
            _holding(panel, source, rank, 0.0)
            _holding(panel, target, rank, 7.2)
            panel.text(5.6, 5 * rank + 2, "→", ha="center", va="center")
        panel.set(xlim=(-0.2, 11.4), ylim=(19.2, -0.2), aspect="equal")
        panel.set_title(f"{source} to {target}\n{forward}")
        panel.set_axis_off()
    for rank in range(RANKS):
        panels[0, 0].text(-0.6, 5 * rank + 2, f"rank {rank}", fontsize=7, ha="right", va="center")
    _write(figure, path)


def _holding(panel: Any, kind: SpmdType, rank: int, left: float) -> None:
    """A tensor of 4 x 4 elements on one rank: what it has is filled, terms of a sum are pale and hatched."""
    top = 5 * rank
    for row in range(RANKS):
        columns = [c for c in range(RANKS) if kind.kind != "S" or (row, c)[kind.dim] == rank]
        filled: dict[str, Any] = {"facecolor": _PIECES[row], "edgecolor": "none", "clip_on": False}
        if kind.kind == "P":
            filled |= {"alpha": 0.35, "hatch": "//////"}
        if columns:
            panel.add_patch(pyplot().Rectangle((left + columns[0], top + row), len(columns), 1, **filled))
    frame = pyplot().Rectangle(
        (left, top), RANKS, RANKS, facecolor="none", edgecolor="#7f8c9b", linewidth=0.5, clip_on=False
    )
    panel.add_patch(frame)


def curves(sizes: Sequence[int], found: Mapping[tuple[str, str], Sequence[float]], path: Path) -> None:
    """Seconds of collectives by bytes, a panel for each group of ranks."""
    groups = list(dict.fromkeys(name for name, _ in found))
    figure, panels = _figure(8, 3, columns=len(groups), sharey=True)
    for panel, name in zip(panels.flat, groups, strict=True):
        for (own, kind), times in found.items():
            if own == name:
                panel.plot(sizes, times, label=kind)
        panel.set(title=name, xscale="log", yscale="log", xlabel="bytes of the whole tensor")
        panel.grid(alpha=0.3)
    panels.flat[0].set_ylabel("seconds")
    panels.flat[0].legend(fontsize=7)
    _write(figure, path)


def by_ranks(counts: Sequence[int], found: Mapping[str, Sequence[float]], path: Path) -> None:
    """Seconds of a synchronization by the number of ranks."""
    figure, ((panel,),) = _figure(8, 3.4)
    for name, times in found.items():
        style = "--" if name.startswith("parameter") else "-"
        panel.plot(counts, times, style, marker="o", markersize=3, label=name)
    panel.set(xscale="log", yscale="log", xlabel="replicas, one on each GPU", ylabel="seconds of one synchronization")
    panel.set_xticks(counts, [str(n) for n in counts])
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    _write(figure, path)


def block(panels: Sequence[tuple[str, Sequence[Held]]], path: Path) -> None:
    """What a device holds of each value of a block, and where collectives are."""
    figure, drawn = _figure(8, 5.2, columns=len(panels), sharey=True)
    for panel, (name, values) in zip(drawn.flat, panels, strict=True):
        most = max(one.bytes for one in values)
        for i, one in enumerate(values):
            panel.barh(i, one.bytes / 1e6, color=_TYPES[one.kind], height=0.7)
            panel.text(one.bytes / 1e6 + most / 4e7, i, "\n".join(one.remarks), fontsize=6, va="center")
        panel.set_yticks(range(len(values)), [one.name for one in values])
        panel.set(title=name, xlabel="MB on one of 4 devices", xlim=(0, 2.3 * most / 1e6))
    drawn[0, 0].invert_yaxis()
    _write(figure, path)


def sequences(degrees: Sequence[int], volumes: Mapping[str, Sequence[float]], path: Path) -> None:
    """Which rank computes which part of causal attention, in turn and in the balanced order; bytes sent by degree."""
    figure, (panels,) = _figure(8, 3, columns=3)
    n = RANKS
    orders = {
        "in turn": [(2 * rank, 2 * rank + 1) for rank in range(n)],
        "balanced": [(rank, 2 * n - 1 - rank) for rank in range(n)],
    }
    for panel, (name, chunks) in zip(panels, orders.items(), strict=False):
        work = [0.0] * n
        for rank, own in enumerate(chunks):
            for row in own:
                for column in range(row + 1):
                    panel.add_patch(pyplot().Rectangle((column, row), 1, 1, facecolor=_PIECES[rank], edgecolor="white"))
                work[rank] += row + 0.5
        panel.set(xlim=(0, 2 * n), ylim=(2 * n, 0), aspect="equal", xlabel="chunks of keys", ylabel="chunks of queries")
        panel.set_title(f"ring, {name}:\nwork " + ", ".join(f"{w:g}" for w in work), fontsize=8)
        panel.set_xticks([])
        panel.set_yticks([])
    for name, found in volumes.items():
        panels[2].plot(degrees, found, marker="o", markersize=3, label=name)
    panels[2].set(xlabel="degree", ylabel="MB sent by a device for a block", ylim=(0, None))
    panels[2].set_xticks(degrees)
    panels[2].legend(fontsize=6)
    panels[2].grid(alpha=0.3)
    _write(figure, path)


def timelines(drawn: Sequence[tuple[str, Schedule, Sequence[Span]]], path: Path) -> None:
    """Every action of every device, with its microbatch; later stages of a device are fainter."""
    figure, panels = _figure(8, 1.35 * len(drawn), rows=len(drawn), sharex=True)
    for panel, (name, schedule, spans) in zip(panels.flat, drawn, strict=True):
        bars: dict[tuple[str, bool, int], list[tuple[float, float]]] = {}
        for span in spans:
            rank, width = schedule.rank(span.stage, span.microbatch), span.stop_s - span.start_s
            later = span.stage != schedule.stages_of(rank)[0]
            bars.setdefault((span.kind, later, rank), []).append((span.start_s, width))
            if span.kind != "W":
                panel.text(span.start_s + width / 2, rank + 0.5, str(span.microbatch), fontsize=4.5, ha="center", va="center",
                           color="white")  # fmt: skip
        for (kind, later, rank), own in bars.items():
            shade = {"facecolor": KINDS[kind][1], "edgecolor": "white", "linewidth": 0.4, "alpha": 0.65 if later else 1}
            panel.broken_barh(own, (rank + 0.06, 0.88), **shade)
        panel.set(ylim=(schedule.pipeline, 0), facecolor="#eef0f3")
        panel.set_title(name, loc="left", fontsize=8)
        panel.set_yticks(
            [r + 0.5 for r in range(schedule.pipeline)], [f"rank {r}" for r in range(schedule.pipeline)], fontsize=6
        )
    panels[-1, 0].set_xlim(0, max(span.stop_s for _, _, spans in drawn for span in spans))
    panels[-1, 0].set_xlabel("time: a forward pass of a microbatch on a device takes 1")
    handles = [
        pyplot().Rectangle((0, 0), 1, 1, facecolor=colour, label=kind) for kind, colour in list(KINDS.values())[:4]
    ]
    figure.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4, frameon=False)
    _write(figure, path)


def bytes_each(found: Sequence[tuple[str, Sequence[int]]], path: Path) -> None:
    """Bytes of a parameter's state by part."""
    figure, ((panel,),) = _figure(8, 0.9 + 0.4 * len(found))
    names, start = [name for name, _ in found], [0] * len(found)
    for i, part in enumerate(("parameter", "gradient", "master copy", "Adam's moments")):
        widths = [each[i] for _, each in found]
        panel.barh(names, widths, left=start, color=PARTS[i], label=part, height=0.6)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    panel.invert_yaxis()
    panel.set_xlabel("bytes of one parameter")
    panel.legend(fontsize=7, ncols=4, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    _write(figure, path)
