"""One step of a program as spans of computation and of communication on every rank, and the picture of them.

Spans come from torch's profiler: the ops of ATen, and the collectives and sends of gloo from when they are started until they are
done. Receives are left out, since one that is started early spends its time waiting for the sender's computation. A collective's span
includes its wait for the slowest rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from autopar.picture import pyplot, save
from autopar.timing import remote

Spans = list[tuple[float, float]]
"""Starts and ends in seconds from the start of the step."""
Trace = Mapping[str, Sequence[Sequence[float]]]
"""A rank's spans by ``KINDS``, and ``step``: one span, the whole step."""

KINDS = ("computation", "communication")
GAP_S = 2e-4  # between two ops: the processor is busy with Python
COLOURS = {"computation": "tab:blue", "communication": "tab:orange"}


def traced(name: str, batch: str) -> dict[str, Any]:
    """In a worker: the trace of one step of an open program on the tensors in the file ``batch``."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        remote.steps(name, batch, 1)
    return spans([(e.name, e.time_range.start / 1e6, e.time_range.end / 1e6) for e in found.events()])


def spans(events: Iterable[tuple[str, float, float]]) -> dict[str, Any]:
    """The trace from (name, start, end) of a profiler's events. The step is between the first barrier's end and the second's start."""
    events = list(events)
    before, after = sorted(event[1:] for event in events if event[0] == "gloo:barrier")
    start, stop = before[1], after[0]

    def between(names: tuple[str, ...], gap_s: float, without: tuple[str, ...] = ()) -> Spans:
        chosen = [(a - start, b - start) for n, a, b in events if n.startswith(names) and not n.startswith(without)]
        clipped = [(max(a, 0.0), min(b, stop - start)) for a, b in chosen]
        return [(round(a, 5), round(b, 5)) for a, b in merged([s for s in clipped if s[0] < s[1]], gap_s)]

    return {
        "step": [(0.0, round(stop - start, 5))],
        "computation": between(("aten::",), GAP_S),
        "communication": between(("gloo:",), 0.0, ("gloo:recv", "gloo:barrier")),
    }


def merged(found: Iterable[Sequence[float]], gap_s: float = 0.0) -> Spans:
    """The union of spans, those with a gap of at most ``gap_s`` between them joined."""
    union: Spans = []
    for start, stop in sorted(map(tuple, found)):
        if union and start <= union[-1][1] + gap_s:
            union[-1] = union[-1][0], max(union[-1][1], stop)
        else:
            union.append((start, stop))
    return union


def length_s(found: Iterable[Sequence[float]]) -> float:
    """The seconds of spans that do not overlap."""
    return sum(stop - start for start, stop in found)


def common(some: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> Spans:
    """The intersection of two unions of spans."""
    return [(max(a, c), min(b, d)) for a, b in some for c, d in others if max(a, c) < min(b, d)]


def communication_share(ranks: Sequence[Trace]) -> float:
    """The share of a step, over all ranks, in which something is communicated."""
    return sum(length_s(rank["communication"]) for rank in ranks) / sum(length_s(rank["step"]) for rank in ranks)


def hidden_share(ranks: Sequence[Trace]) -> float:
    """The share of the communication, over all ranks, that runs under computation."""
    hidden_s = sum(length_s(common(rank["communication"], rank["computation"])) for rank in ranks)
    return hidden_s / sum(length_s(rank["communication"]) for rank in ranks)


def draw(traces: Mapping[str, Sequence[Trace]], path: Path) -> None:
    """One panel for every program: computation and communication of every rank."""
    figure, panels = pyplot().subplots(len(traces), 1, figsize=(9, 1.6 * len(traces) + 0.6), sharex=True, squeeze=False)
    for panel, (name, ranks) in zip(panels[:, 0], traces.items(), strict=True):
        for number, rank in enumerate(ranks):
            for row, kind in enumerate(KINDS):
                bars = [(start, stop - start) for start, stop in merged(rank[kind], 1e-3)]
                panel.broken_barh(
                    bars, (2 * number + row + 0.1, 0.8), color=COLOURS[kind], label=kind if not number else ""
                )
            panel.plot([rank["step"][0][1]] * 2, [2 * number, 2 * number + 2], color="black", linewidth=1)
        panel.set_yticks([2 * number + 1 for number in range(len(ranks))], [f"rank {n}" for n in range(len(ranks))])
        panel.invert_yaxis()
        panel.set_title(name, loc="left", fontsize=9)
    panels[0, 0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8, frameon=False)
    panels[-1, 0].set_xlabel("seconds of one step")
    save(figure, path)
