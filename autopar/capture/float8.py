"""Runs a graph's matrix products in FP8, if the user allows one of ``precision.FP8_RECIPES``."""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import fx

from autopar.graph import Graph
from autopar.precision import FP8, Fp8Recipe
from passes.float8 import float8_pass, has_products, nodes_before_choices


def in_float8(graph: Graph, recipe: Fp8Recipe = FP8) -> Graph:
    """Return ``graph`` with FP8 products. Master weights, activations and other ops stay in bfloat16 and float32.

    In the head (the last layer with products, if its class occurs once) the last products stay in bfloat16. Only bfloat16 graphs change.
    """
    if graph.dtype != torch.bfloat16:
        return graph
    uses = [layer.cls for layer in graph.layers]
    head = next((name for name in reversed(uses) if has_products(graph.classes[name].graph)), "")
    choice_outputs = _choice_outputs(graph)
    classes = {}
    for name, cls in graph.classes.items():
        gm = copy.deepcopy(cls.graph)
        nodes = _placeholders(gm)
        parameters = nodes[len(nodes) - len(cls.parameters) :]
        has_head = name == head and uses.count(name) == 1
        classes[name] = dataclasses.replace(
            cls, graph=float8_pass(gm, parameters, recipe, has_head, choice_outputs[name])
        )
    return dataclasses.replace(graph, classes=classes, narrow=(*graph.narrow, recipe.name))


def _choice_outputs(graph: Graph) -> dict[str, set[int]]:
    """Return for each layer class the outputs on which a choice (such as top-k) in a later layer depends, with no product in between."""
    choice_outputs: dict[str, set[int]] = {name: set() for name in graph.classes}
    values: set[str] = set()
    for layer in reversed(graph.layers):
        cls = graph.classes[layer.cls]
        outputs = {index for index, name in enumerate(layer.outputs) if name in values}
        choice_outputs[layer.cls] |= outputs
        before = nodes_before_choices(cls.graph, outputs)
        values |= {
            name for name, node in zip(layer.activations, _placeholders(cls.graph), strict=False) if node in before
        }
    return choice_outputs


def _placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]
