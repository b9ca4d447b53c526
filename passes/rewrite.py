"""Rewrites layers as their strategies' techniques ask: classes before types are chosen, and local graphs.

A technique names its module of this package, because techniques are imported first. A class that ``Technique.rewrite`` has changed is an
ordinary layer class: types, prices, padding and text follow from its graph. ``Technique.rewrite_local`` changes the graph that one rank
runs; its module has ``LocalRewrite``'s functions.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, cast

from torch import fx

from autopar.graph import Graph, LayerClass
from autopar.plan import Strategy
from autopar.sharding import Sharding
from autopar.techniques import LAYER, Options

Rewrite = Callable[[LayerClass], LayerClass | str]
"""Returns the rewritten class, or why it cannot be rewritten, as the end of a sentence about the layer."""


def rewrite_of(module: str) -> Rewrite:
    """The function ``rewrite`` of a module in this package."""
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


class LocalRewrite(Protocol):
    """The functions of a module that rewrites local graphs for a technique."""

    def computed(self, cls: LayerClass, sharding: Sharding, value: str) -> Sharding:
        """The sharding of what the local graph computes under ``value``: of the whole microbatch, or of a part."""

    def rewrite_local(self, gm: fx.GraphModule, cls: LayerClass, sharding: Sharding, value: str) -> fx.GraphModule:
        """The local graph under ``value``; ``sharding`` is what it computes."""

    def why_not(self, cls: LayerClass, sharding: Sharding, value: str) -> str:
        """Why a layer of these shapes does not admit ``value``, as the end of a sentence about the layer; empty if it does."""


def local_rewrites(options: Options) -> Iterator[tuple[str, str, LocalRewrite]]:
    """The names of the techniques that rewrite local graphs, in order, with their values and modules."""
    for technique in LAYER:
        if technique.rewrite_local:
            module = importlib.import_module(f"passes.{technique.rewrite_local}")
            yield technique.name, options[technique], cast(LocalRewrite, module)


def why_whole(cls: LayerClass, sharding: Sharding, options: Options) -> str:
    """Why the microbatches of a layer are not computed in parts, as the end of a sentence about the layer; empty if they are."""
    reasons = (module.why_not(cls, sharding, value) for _, value, module in local_rewrites(options))
    return next((reason for reason in reasons if reason), "") if options.parts > 1 else ""
