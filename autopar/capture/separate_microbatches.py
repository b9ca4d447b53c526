"""Treats microbatches as separate batches, if the user allows ``microbatch_statistics``.

If the loss couples the examples of a batch (a router's auxiliary loss, batch norm, in-batch negatives), splitting the batch into
microbatches changes the result, so a plan has one microbatch. Other trainers split it regardless: the step's loss is the mean of the
microbatches' losses. To do the same, autopar captures the graph of one microbatch and runs it for each microbatch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from autopar.errors import UsageError
from autopar.graph import Graph


def separate_microbatches(graph: Graph, capture_rows: Callable[[int], Graph], microbatches: int) -> Graph:
    """Return the graph of one microbatch, if the global batch is split into ``microbatches`` separate batches.

    ``graph`` is annotated (``shard.annotate``) with the reason why its examples are coupled; without one, microbatches are exact, and
    ``graph`` is returned unchanged. ``capture_rows`` captures and annotates the model for fewer rows.

    Raises:
        UsageError: the global batch isn't divisible by ``microbatches``.
        CaptureError: the model can't be exported with so few rows.
    """
    if microbatches == 1 or not graph.unmicrobatchable:
        return graph
    rows, rest = divmod(graph.batch_size, microbatches)
    if rest:
        raise UsageError(f"a global batch of {graph.batch_size} does not divide into {microbatches} microbatches")
    part = capture_rows(rows)
    return dataclasses.replace(
        part,
        structure=graph.structure,
        tokens=part.tokens * microbatches,
        unmicrobatchable=graph.unmicrobatchable,
        accumulated=microbatches,
    )
