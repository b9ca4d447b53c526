"""Runs named passes one after the other, so that a log, a dump or an error can name the step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from torch import fx

log = logging.getLogger("autopar.passes")

Pass = Callable[[fx.GraphModule], fx.GraphModule]
Step = tuple[str, Pass]


def run(gm: fx.GraphModule, steps: Iterable[Step]) -> fx.GraphModule:
    """Apply ``steps`` in order; an exception gets a note that names the failing pass.

    At debug level, ``Graph.lint`` checks the graph after each step: its cost is linear in the graph's size, but not zero.
    """
    for name, step in steps:
        start_s = time.perf_counter()
        before = len(gm.graph.nodes)
        try:
            gm = step(gm)
            if log.isEnabledFor(logging.DEBUG):
                gm.graph.lint()
        except Exception as error:
            error.add_note(f"in pass '{name}'")
            raise
        elapsed_s = time.perf_counter() - start_s
        log.debug("%s: %d -> %d nodes, %.3f s", name, before, len(gm.graph.nodes), elapsed_s)
    return gm
