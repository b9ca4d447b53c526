"""Rewrites layers for the techniques of their strategies: layer classes before types are chosen, local graphs afterwards.

A technique names its module in this package by a string, because techniques are imported first. A class that ``Technique.rewrite`` has
changed is an ordinary layer class: types, costs, padding and text follow from its graph. ``Technique.rewrite_local`` changes the graph that
one rank runs.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import fx

from autopar.graph import Graph, LayerClass
from autopar.plan import Strategy
from autopar.sharding import AxisTypes, Sharding
from autopar.techniques import LAYER, Options, Technique
from passes.turns import Read, Turns

Rewrite = Callable[[LayerClass], LayerClass | str]
"""Returns the rewritten class, or the reason why it can't be rewritten ("computes no ...")."""


def rewrite_of(module: str) -> Rewrite:
    """Return the function ``rewrite`` of a module in this package."""
    found: Rewrite = importlib.import_module(f"passes.{module}").rewrite
    return found


def rewritten_class(cls: LayerClass, options: Options) -> LayerClass:
    """Return ``cls`` after those rewrites of ``options`` that it allows."""
    for module in options.rewrites:
        found = rewrite_of(module)(cls)
        cls = cls if isinstance(found, str) else dataclasses.replace(found, loads=cls.loads)  # ``found`` is cached
    return cls


def rewritten_graph(graph: Graph, strategies: Sequence[Strategy]) -> Graph:
    """Return ``graph`` with the classes of all layers rewritten; ``graph`` itself if nothing changes."""
    found = {
        layer.cls: rewritten_class(graph.classes[layer.cls], strategy.options)
        for layer, strategy in zip(graph.layers, strategies, strict=True)
        if strategy.options.rewrites
    }
    changed = {name: cls for name, cls in found.items() if cls is not graph.classes[name]}
    return dataclasses.replace(graph, classes=graph.classes | changed) if changed else graph


class LocalRewrite(Protocol):
    """Rewrites the local graph of ``cls`` for a technique's value; ``sharding`` is that of a microbatch, or of the part of one that the
    graph computes."""

    def __call__(self, gm: fx.GraphModule, cls: LayerClass, sharding: Sharding, value: str) -> fx.GraphModule: ...


def local_rewrites(options: Options) -> Iterator[tuple[str, str, LocalRewrite]]:
    """Yield the names of the techniques that rewrite local graphs, in order, with their values and functions."""
    for technique in LAYER:
        if technique.rewrite_local:
            yield technique.name, options[technique], _module(technique).rewrite_local


def computed(cls: LayerClass, sharding: Sharding, options: Options) -> Sharding:
    """Return the sharding of the microbatch, or of the part of one, that a local graph computes."""
    if options.parts == 1:
        return sharding
    part = _module(options.splitting).part_of(cls, sharding)
    assert part is not None, cls.name
    return part


def turns_of(cls: LayerClass, types: Sequence[AxisTypes], options: Options) -> Turns | str:
    """Return where the parts of a layer's microbatches take turns, or the reason why they can't be computed in parts, whatever their
    shapes. ``types`` are those of the microbatch axis, then of the mesh's axes (or runs of axes with equal types)."""
    found: Turns | str = _module(options.splitting).turns_or_reason(cls, types)
    return found


def products_of(
    cls: LayerClass, types: Sequence[AxisTypes], gradient: Mapping[str, bool]
) -> dict[Read, tuple[fx.Node, ...]]:
    """Return the products whose weight gradients overlap the reduction of their input gradient, if a technique starts it early, keyed by
    value and needed types; ``types`` as in ``turns_of``, ``gradient`` says through which values a gradient flows."""
    found: dict[Read, tuple[fx.Node, ...]] = {}
    for technique in LAYER:
        if any(mode.early_collectives for mode in technique.modes):
            found |= _module(technique).products_of(cls, types, gradient)
    return found


def not_splittable_reason(cls: LayerClass, sharding: Sharding, options: Options) -> str:
    """Return why the microbatches of a layer can't be computed in parts, or an empty string."""
    return _module(options.splitting).not_splittable_reason(cls, sharding) if options.parts > 1 else ""


def _module(technique: Technique) -> Any:
    """Return the module that rewrites local graphs for a technique. It has ``rewrite_local``; also, for values with several parts,
    ``part_of``, ``turns_or_reason`` and ``not_splittable_reason``, and for values that start collectives early ``products_of``."""
    return importlib.import_module(f"passes.{technique.rewrite_local}")


for _technique in LAYER:  # importing the modules registers the ops that their passes create
    if _technique.rewrite:
        rewrite_of(_technique.rewrite)
