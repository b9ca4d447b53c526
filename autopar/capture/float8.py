"""Products in 8 bits: the graph of plans that run them so, as a user allows with ``fp8``."""

from __future__ import annotations

import copy
import dataclasses

import torch

from autopar.graph import Graph
from autopar.plan import FP8
from passes.float8 import float8_pass, has_products


def in_float8(graph: Graph) -> Graph:
    """``graph`` with 8-bit products, ``FP8`` among its concessions. Masters, activations and everything between the products stay in
    bfloat16 and float32.

    The head is the last layer with products, if the model has it once. A graph in another precision has no such products, and is returned
    unchanged.
    """
    if graph.dtype != torch.bfloat16:
        return graph
    uses = [layer.cls for layer in graph.layers]
    head = next((name for name in reversed(uses) if has_products(graph.classes[name].graph)), "")
    classes = {
        name: dataclasses.replace(
            cls, graph=float8_pass(copy.deepcopy(cls.graph), last=name == head and uses.count(name) == 1)
        )
        for name, cls in graph.classes.items()
    }
    return dataclasses.replace(graph, classes=classes, narrow=(*graph.narrow, FP8))
