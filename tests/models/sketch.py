"""Layer classes and graphs drawn by hand, for tests of the op-level optimum, the passes and the emitter."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.graph import Graph, GraphLayer, LayerClass, Parameter, Value

KINDS = ("activations", "inputs", "constants", "scalars", "parameters")


class Sketch:
    """A layer class in the making: borders first, in the order of ``KINDS``, then calls, then ``layer``."""

    def __init__(self, name: str = "Sketch") -> None:
        self.name = name
        self.graph = fx.Graph()
        self.borders: dict[str, list[Value]] = {kind: [] for kind in KINDS}

    def activation(self, name: str, *shape: int, dtype: torch.dtype = torch.float64, grad: bool = True) -> fx.Node:
        return self._border("activations", name, shape, dtype, grad)

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.int64) -> fx.Node:
        return self._border("inputs", name, shape, dtype, False)

    def constant(self, name: str, *shape: int) -> fx.Node:
        return self._border("constants", name, shape, torch.float64, False)

    def scalar(self, name: str) -> fx.Node:
        return self._border("scalars", name, (), torch.float64, False)

    def parameter(self, name: str, *shape: int, trainable: bool = True) -> fx.Node:
        return self._border("parameters", name, shape, torch.float64, trainable)

    def _border(self, kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype, grad: bool) -> fx.Node:
        assert not any(self.borders[later] for later in KINDS[KINDS.index(kind) + 1 :]), "borders out of order"
        node = self.graph.placeholder(name.replace(".", "_"))
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        self.borders[kind].append(Value(name, shape, dtype, grad))
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call whose value is computed on the meta device."""
        node = self.graph.call_function(target, args, kwargs)
        given, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["val"] = target(*given, **named)
        return node

    def layer(self, *outputs: fx.Node) -> LayerClass:
        """The finished class."""
        self.graph.output(tuple(outputs))
        values = tuple(Value(n.name, tuple(n.meta["val"].shape), n.meta["val"].dtype, True) for n in outputs)
        borders = {kind: tuple(found) for kind, found in self.borders.items()}
        return LayerClass(self.name, fx.GraphModule(torch.nn.Module(), self.graph), **borders, outputs=values)


def use(
    cls: LayerClass, name: str, activations: tuple[str, ...], outputs: tuple[str, ...], **borders: Any
) -> GraphLayer:
    """A layer of ``cls``; inputs, constants and scalars keep their names, parameters are prefixed with the layer's."""
    names: dict[str, tuple[str, ...]] = {kind: tuple(v.name for v in getattr(cls, kind)) for kind in KINDS[1:4]}
    names["parameters"] = tuple(f"{name}.{v.name}" for v in cls.parameters)
    return GraphLayer(name, cls.name, activations=activations, outputs=outputs, **(names | borders))


def whole(name: str, classes: tuple[LayerClass, ...], layers: tuple[GraphLayer, ...]) -> Graph:
    """The graph of ``layers``: what is not said there follows from their classes."""
    by_name = {cls.name: cls for cls in classes}
    inputs: dict[str, Value] = {}
    parameters: dict[str, Parameter] = {}
    values: dict[str, Value] = {}
    for layer in layers:
        cls = by_name[layer.cls]
        inputs |= dict(zip(layer.inputs, cls.inputs, strict=True))
        for called, value in zip(layer.parameters, cls.parameters, strict=True):
            parameters[called] = Parameter(called, called, value.shape, value.shape, value.dtype)
        for called, value in zip(layer.outputs, cls.outputs, strict=True):
            values[called] = Value(called, value.shape, value.dtype, True)
    loss = layers[-1].outputs[0]
    rows = next(iter(inputs.values())).shape
    return Graph(
        name, tuple(inputs.values()), None, parameters, {}, (), None, layers, by_name, values, loss, torch.float64,
        tokens=math.prod(rows),
    )  # fmt: skip
