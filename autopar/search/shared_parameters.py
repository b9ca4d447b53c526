"""The memory of parameters that several layers share: a stage stores them, their gradients and their optimizer state once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from autopar.graph import Graph
from autopar.layer_price import LayerPrice
from autopar.plan import Memory, Strategy
from autopar.search.problem import Configuration, Mesh, PriceSource

StateBytes = tuple[int, int, int]
"""Bytes of parameters, of gradients and of optimizer state."""


def duplicated_state_bytes(
    graph: Graph, pricer: PriceSource, config: Configuration, bounds: Sequence[int], strategies: Sequence[Strategy]
) -> list[StateBytes]:
    """Return for each pipeline rank the surplus bytes in the sum of its layers' prices: several layers of a stage may share a parameter,
    which is stored once but is in the price of each.

    Each stage has a copy of its own, even if a device has several stages.
    """
    found = []
    spans = list(pairwise(bounds))
    for d in range(config.schedule.pipeline):
        extra = [0, 0, 0]
        here = [range(*spans[s]) for s in config.schedule.stages_of(d)]
        for (name, uses), span in itertools.product(graph.shared_parameters.items(), here):
            for layer in [i for i in uses if i in span][1:]:
                state = pricer.tied(layer, name, config.mesh, strategies[layer], config.schedule.microbatches)
                extra = [a + b for a, b in zip(extra, state, strict=True)]
        found.append((extra[0], extra[1], extra[2]))
    return found


def stored_already(graph: Graph) -> dict[int, tuple[str, ...]]:
    """Return by layer its parameters that an earlier layer of the graph has, too (a pipeline of one stage stores them once)."""
    found: dict[int, tuple[str, ...]] = {}
    for name, uses in graph.shared_parameters.items():
        for layer in uses[1:]:
            found[layer] = (*found.get(layer, ()), name)
    return found


def stored_once(
    price: LayerPrice,
    pricer: PriceSource,
    layer: int,
    names: Sequence[str],
    mesh: Mesh,
    strategy: Strategy,
    microbatches: int,
) -> LayerPrice:
    """Return a layer's price without the states of the parameters ``names``, which its stage stores for another layer."""
    for name in names:
        p, g, o = pricer.tied(layer, name, mesh, strategy, microbatches)
        price = replace(
            price,
            parameters_bytes=price.parameters_bytes - p,
            gradients_bytes=price.gradients_bytes - g,
            optimizer_bytes=price.optimizer_bytes - o,
        )
    return price


def without_state(live: Memory, state: StateBytes) -> Memory:
    """Return ``live`` minus the parameters, gradients and optimizer state in ``state``."""
    p, g, o = state
    return replace(live, parameters=live.parameters - p, gradients=live.gradients - g, optimizer=live.optimizer - o)
