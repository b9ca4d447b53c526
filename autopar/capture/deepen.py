"""Repeats a block of a captured graph: a deep model is captured with few blocks, in a fraction of the time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from autopar.graph import Graph, GraphLayer

_NAMES_OF_LAYER = tuple(field.name for field in fields(GraphLayer) if field.name not in ("name", "cls"))


def deepen(graph: Graph, number: int, more: int) -> Graph | None:
    """Return the graph of the same model with ``more`` further copies of block ``number`` (``model.layers.2``) after it, and later blocks
    renumbered.

    Names, order and types are those of a capture of the deeper model if its additional blocks equal that one. Return ``None`` if the block
    can't be repeated: it has no neighbour of its class, several inputs or outputs, or shared parameters.
    """
    if more <= 0:
        return graph
    at = next((i for i, layer in enumerate(graph.layers) if layer.name.endswith(f".{number}")), 0)
    names, pattern = _Names(graph.layers[at].name.removesuffix(str(number)), number, more), graph.layers[at]
    if not at or not any(
        names.equal(pattern, other) for other in (graph.layers[at - 1], *graph.layers[at + 1 : at + 2])
    ):
        return None
    if (
        len(pattern.activations) > 1
        or len(pattern.outputs) > 1
        or {*pattern.parameters} & graph.shared_parameters.keys()
    ):
        return None
    by_name = {layer.name: layer for layer in graph.layers}
    renamed, states = names.renamed, {state.name: state for state in graph.state}
    return replace(
        graph,
        layers=tuple(_layer(by_name[name], names, by) for name, by in names.of_deeper(by_name)),
        parameters={
            renamed(old, by): replace(
                p := graph.parameters[old],
                name=renamed(old, by),
                original=renamed(p.original, by),
                tied=tuple(renamed(name, by) for name in p.tied),
                stacked=tuple(renamed(name, by) for name in p.stacked),
            )
            for old, by in names.of_deeper(graph.parameters)
        },
        values={
            renamed(old, by): replace(graph.values[old], name=renamed(old, by))
            for old, by in names.of_deeper(graph.values)
        },
        constants={renamed(old, by): graph.constants[old] for old, by in names.of_deeper(graph.constants)},
        valueless=tuple(renamed(old, by) for old, by in names.of_deeper(graph.valueless)),
        buffers={
            renamed(old, by): replace(graph.buffers[old], name=renamed(old, by))
            for old, by in names.of_deeper(graph.buffers)
        },
        state=tuple(
            replace(state := states[old], name=renamed(old, by), alias=state.alias and renamed(state.alias, by))
            for old, by in names.of_deeper(states)
        ),
        possibly_unused=frozenset(renamed(old, by) for old, by in names.of_deeper(sorted(graph.possibly_unused))),
    )


def _layer(layer: GraphLayer, names: _Names, by: int) -> GraphLayer:
    """Return a layer of the deeper model; a layer outside of the copies reads the output of the last copy."""
    copy = names.block(layer.name) == names.number
    changed: dict[str, Any] = {
        field: tuple(names.renamed(name, by) if copy else names.after(name) for name in getattr(layer, field))
        for field in _NAMES_OF_LAYER
    }
    return replace(layer, name=names.renamed(layer.name, by), **changed)


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of a model with ``more`` copies of block ``number`` of the module list ``stack`` (``"model.layers."``)."""

    stack: str
    number: int
    more: int

    def block(self, name: str) -> int | None:
        """Return the number of the block that a name belongs to; ``None`` outside of the list."""
        if not name.startswith(self.stack):
            return None
        digits = name[len(self.stack) :].partition(".")[0]
        return int(digits) if digits.isdecimal() else None

    def equal(self, layer: GraphLayer, other: GraphLayer) -> bool:
        """Return whether two blocks have one class, and read the same values except for those of each block."""
        by = (self.block(layer.name) or 0) - (self.block(other.name) or 0)
        return layer.cls == other.cls and all(
            getattr(layer, field) == tuple(self.renamed(name, by) for name in getattr(other, field))
            for field in ("inputs", "constants", "scalars", "parameters", "buffers")
        )

    def renamed(self, name: str, by: int) -> str:
        """Return the name with ``by`` added to its block's number."""
        block = self.block(name)
        if block is None or not by:
            return name
        return f"{self.stack}{block + by}{name[len(f'{self.stack}{block}') :]}"

    def after(self, name: str) -> str:
        """Return what a later block calls the value ``name``, or an earlier block: the repeated block's value is that of its last copy."""
        block = self.block(name)
        return self.renamed(name, self.more) if block is not None and block >= self.number else name

    def of_deeper(self, names: Iterable[str]) -> Iterator[tuple[str, int]]:
        """Yield for each name of the deeper model, in order, the name in this one and what is added to its block's number."""
        for repeated, run in itertools.groupby(names, key=lambda name: self.block(name) == self.number):
            here = list(run)
            if repeated:
                yield from ((name, by) for by in range(self.more + 1) for name in here)
            else:
                yield from ((name, self.more if (self.block(name) or 0) > self.number else 0) for name in here)
