"""Microbatches that count as separate batches: the plans that a user allows with ``microbatch_statistics``.

Where the loss couples the examples of a batch (a router's auxiliary loss, batch norm, negatives of the same batch), splitting the batch
into microbatches changes the result, so a plan has one microbatch. Every other trainer takes several regardless: each microbatch computes
a loss from its own rows, and the step's loss is the mean of these losses. autopar gets an exact program for that by capturing the graph
for one microbatch and running it for each microbatch in turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from autopar.errors import UsageError
from autopar.graph import Graph


def apart(whole: Graph, again: Callable[[int], Graph], microbatches: int) -> Graph:
    """The graph of one of ``microbatches``, each of which counts as a separate batch.

    ``whole`` is captured for the global batch and annotated; ``again`` captures and annotates the model for fewer rows. If ``whole``
    couples no examples, it is returned unchanged: its microbatches are exact.

    Raises:
        UsageError: the global batch does not divide into that number of microbatches.
        CaptureError: the model cannot be exported with so few rows.
    """
    if microbatches == 1 or not whole.unmicrobatchable:
        return whole
    rows, rest = divmod(whole.batch_size, microbatches)
    if rest:
        raise UsageError(f"a global batch of {whole.batch_size} does not divide into {microbatches} microbatches")
    own = again(rows)
    return dataclasses.replace(
        own,
        structure=whole.structure,
        tokens=own.tokens * microbatches,
        unmicrobatchable=whole.unmicrobatchable,
        accumulated=microbatches,
    )
