"""Layers beside each other in a graph: the values between them, and which classes may run before and after a class."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from autopar.graph import Graph
from autopar.plan import Axis, Role
from autopar.price.collective_pairs import CollectivePair, pairs_of_conversion
from autopar.price.state import Precision
from autopar.price.table import element_bytes
from autopar.sharding import AxisTypes
from autopar.types import SpmdType
from passes.conversions import conversion_steps

Mesh = tuple[Axis, ...]
Roles = tuple[Role, ...]


class Borders:
    """The values between the layers of ``graph``. ``types`` are ``Pricer.types``."""

    def __init__(
        self, graph: Graph, precision: Precision, types: Callable[[str, Mesh, Roles], tuple[AxisTypes, ...] | None]
    ) -> None:
        self._graph, self._precision, self._types = graph, precision, types
        self._producers = {name: (i, k) for i, layer in enumerate(graph.layers) for k, name in enumerate(layer.outputs)}
        self._last_readers = {name: i for i, layer in enumerate(graph.layers) for name in layer.activations}

    def conversions(self, layer_index: int, mesh: Mesh, left: Roles, right: Roles) -> Iterator[CollectivePair]:
        """Yield the collectives between layer ``layer_index`` and the next, in roles ``left`` and ``right``."""
        for name in self._graph.layers[layer_index + 1].activations:
            source = self._produced(name, mesh, left)
            target = self._needed(name, layer_index + 1, mesh, right)
            if left != right and source is not None and target is not None:
                steps = conversion_steps(source, target, self._graph.values[name].requires_grad)
                yield from pairs_of_conversion(name, self._bytes(name), steps)

    def sent_bytes(self, layer_index: int, mesh: Mesh, roles: Roles, axes: Mesh) -> float:
        """Return the bytes of the values that layers after ``layer_index`` read, on one device. ``axes`` are the axis of microbatches and
        the mesh."""
        sent = 0.0
        for name, (producer, _) in self._producers.items():
            if producer <= layer_index < self._last_readers.get(name, -1):
                types = self._produced(name, mesh, roles) or ()
                pieces = math.prod(a.size for a, t in zip(axes, types, strict=False) if t.sharded)
                sent += self._bytes(name) / pieces
        return sent

    def _bytes(self, name: str) -> float:
        value = self._graph.values[name]
        return float(value.numel * element_bytes(value.dtype, self._graph.dtype, self._precision))

    def _produced(self, name: str, mesh: Mesh, roles: Roles) -> tuple[SpmdType, ...] | None:
        """Return the types of the value that its layer produces under ``roles``; ``None`` if the roles are inadmissible there."""
        producer, index = self._producers[name]
        types = self._types(self._graph.layers[producer].cls, mesh, roles)
        return None if types is None else tuple(t.outputs[index] for t in types)

    def _needed(self, name: str, reader: int, mesh: Mesh, roles: Roles) -> tuple[SpmdType, ...] | None:
        """Return the types of the value that layer ``reader`` needs under ``roles``; ``None`` if the roles are inadmissible there."""
        layer = self._graph.layers[reader]
        types = self._types(layer.cls, mesh, roles)
        placeholders = self._graph.classes[layer.cls].graph.graph.find_nodes(
            op="placeholder"
        )  # activations are the first
        placeholder = placeholders[layer.activations.index(name)].name
        return None if types is None else tuple(t.produced[placeholder] for t in types)


def adjacent_classes(graph: Graph, distance: int) -> dict[str, tuple[set[str], set[str]]]:
    """Return for each class the classes of the layers that come ``distance`` layers before and after its layers, counting only layers with
    parameters."""
    found: dict[str, tuple[set[str], set[str]]] = {layer.cls: (set(), set()) for layer in graph.layers}
    classes = [layer.cls for layer in graph.layers if layer.parameters]
    for left, right in zip(classes, classes[distance:], strict=False):
        found[left][1].add(right)
        found[right][0].add(left)
    return found
