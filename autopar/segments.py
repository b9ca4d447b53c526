"""Groups layers into segments that are recomputed together.

A run is a sequence of consecutive layers of one stage and class, with equal strategies, in which each layer passes its only output to the
next; a class whose adjacent layers may not share a segment (see ``Graph.chains``) has runs of one layer. If the strategy combines N layers
(``Options.segment_layers``), a run is cut into segments of N layers; the last may be shorter. A segment saves its first layer's input, and
its backward recomputes the segment, so that the activations of all its layers are in memory at once. For n layers, segments of about
sqrt(n) need least memory (Chen et al., "Training deep nets with sublinear memory cost", arXiv:1604.06174).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from autopar.graph import Graph
from autopar.plan import Strategy, distinct


def segments(graph: Graph, strategies: Sequence[Strategy], bounds: Sequence[int]) -> list[range]:
    """Return the segments, as ranges that cover all layers. ``bounds`` are (0, first layer of stage 1, ..., number of layers)."""
    found = []
    for run in _runs(graph, strategies, bounds):
        segment = strategies[run[0]].options.segment_layers
        found += [run[at : at + segment] for at in range(0, len(run), segment)]
    return found


def shortened(graph: Graph, strategies: Sequence[Strategy], bounds: Sequence[int]) -> list[Strategy]:
    """Return the strategies with segments no longer than their runs, as in programs and in the cost model."""
    if all(strategy.options.segment_layers == 1 for strategy in distinct(strategies)):
        return list(strategies)
    found: list[Strategy] = []
    for run in _runs(graph, strategies, bounds):
        strategy = strategies[run[0]]
        found += [replace(strategy, options=strategy.options.of_at_most(len(run)))] * len(run)
    return found


def _runs(graph: Graph, strategies: Sequence[Strategy], bounds: Sequence[int]) -> Iterator[range]:
    """Yield the runs that segments divide. A layer that isn't recomputed together with others is a run of its own."""
    for start, stop in pairwise(bounds):
        first = start
        for i in range(start + 1, stop + 1):
            cls, strategy = graph.layers[first].cls, strategies[first]
            several = strategy.options.segment_layers > 1 and graph.chains[cls] > 1
            if i < stop and several and graph.layers[i].cls == cls and strategies[i] == strategy:
                continue
            yield range(first, i)
            first = i
