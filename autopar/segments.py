"""Which layers are recomputed as one.

Layers of one class that follow each other in a stage with equal strategies, each handing its only value to the next, are cut from the
first on into segments of ``Strategy.segment`` layers; the last may be shorter. A segment keeps what its first layer is given. When its
backward comes, its forward runs again, and all that its layers save is there at once: of chains of n layers, segments of about the
square root of n hold least (Chen et al., "Training deep nets with sublinear memory cost", arXiv:1604.06174).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import pairwise

from autopar.graph import Graph
from autopar.plan import Strategy


def segments(graph: Graph, strategies: Sequence[Strategy], bounds: Sequence[int]) -> list[range]:
    """The layers of the whole model, those that are recomputed as one together. ``bounds`` are (0, first layer of stage 1, ..., number of
    layers)."""
    found = []
    for run in _runs(graph, strategies, bounds):
        found += [run[at : at + strategies[run[0]].segment] for at in range(0, len(run), strategies[run[0]].segment)]
    return found


def shortened(graph: Graph, strategies: Sequence[Strategy], bounds: Sequence[int]) -> list[Strategy]:
    """The same strategies, with segments no longer than the runs that they cut: what the program does, and what its price counts."""
    found: list[Strategy] = []
    for run in _runs(graph, strategies, bounds):
        strategy = strategies[run[0]]
        fit = min(strategy.segment, len(run))
        found += [strategy if fit == strategy.segment else dataclasses.replace(strategy, segment=fit)] * len(run)
    return found


def _runs(graph: Graph, strategies: Sequence[Strategy], bounds: Sequence[int]) -> Iterator[range]:
    """Layers that segments may span: as many as go on alike in a stage; a layer that is recomputed alone, if at all, by itself."""
    for start, stop in pairwise(bounds):
        first = start
        for i in range(start + 1, stop + 1):
            cls, strategy = graph.layers[first].cls, strategies[first]
            several = strategy.segment > 1 and graph.chains[cls] > 1
            if i < stop and several and graph.layers[i].cls == cls and strategies[i] == strategy:
                continue
            yield range(first, i)
            first = i
