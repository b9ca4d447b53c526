"""Rewrites layer classes as a strategy's techniques ask (``Technique.rewrite``), before types are chosen.

A rewritten class is an ordinary layer class: types, prices, padding and text follow from its graph.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence

from autopar.graph import Graph, LayerClass
from autopar.plan import Strategy
from autopar.techniques import Options

Rewrite = Callable[[LayerClass], LayerClass | str]
"""Returns the rewritten class, or why it cannot be rewritten, as the end of a sentence about the layer."""


def rewrite_of(module: str) -> Rewrite:
    """The function ``rewrite`` of a module in this package. Techniques name their module, because they are imported first."""
    found: Rewrite = importlib.import_module(f"passes.{module}").rewrite
    return found


def rewritten_class(cls: LayerClass, options: Options) -> LayerClass:
    """``cls`` after the rewrites that ``options`` ask for and that it admits."""
    for module in options.rewrites:
        found = rewrite_of(module)(cls)
        cls = cls if isinstance(found, str) else found
    return cls


def rewritten_graph(graph: Graph, strategies: Sequence[Strategy]) -> Graph:
    """``graph`` with the classes of all layers rewritten; ``graph`` itself if nothing changes."""
    found = {
        layer.cls: rewritten_class(graph.classes[layer.cls], strategy.options)
        for layer, strategy in zip(graph.layers, strategies, strict=True)
        if strategy.options.rewrites
    }
    changed = {name: cls for name, cls in found.items() if cls is not graph.classes[name]}
    return dataclasses.replace(graph, classes=graph.classes | changed) if changed else graph
