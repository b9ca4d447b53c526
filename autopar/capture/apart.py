"""A microbatch as a batch of its own: what a user lets a plan do by allowing ``microbatch_statistics``.

Where the loss couples the examples of a batch (a router's auxiliary loss, batch norm, negatives of the same batch) microbatches change what
is computed, and a plan has one. Every other trainer takes several regardless: each computes its own loss of its own rows, and the
step's loss is their mean. Such a program is the exact one of a graph that is captured for one microbatch, run for each of them in turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from autopar.errors import UsageError
from autopar.graph import Graph


def apart(whole: Graph, again: Callable[[int], Graph], microbatches: int) -> Graph:
    """The graph of one of ``microbatches``, each a batch of its own.

    ``whole`` is captured for the global batch and annotated, and so is what ``again`` gives for fewer rows. Where ``whole`` couples no
    examples it is given back: its microbatches are exact.

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
