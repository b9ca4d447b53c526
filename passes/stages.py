"""Cuts the model into pipeline stages: which layers, what crosses the borders and in which types.

A value that a later stage needs is handed on hop by hop. Values cross in the types in which their layer leaves them; the
receiving stage converts, as it does between two of its own layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.graph import Graph, Value
from autopar.plan import Plan
from autopar.sharding import Sharding, local_shape
from autopar.types import I, R, S, SpmdType
from passes.layer import LocalLayer, local_layer, mesh_types

Types = tuple[SpmdType, ...]


@dataclass(frozen=True)
class Border:
    """An activation that crosses a stage's border: local shape for one microbatch, type on each mesh axis."""

    value: Value
    shape: tuple[int, ...]
    types: Types


@dataclass(frozen=True)
class Stage:
    """One stage, local: its layers by index, and what it takes and gives.

    ``inputs`` are the batch's tensors with the types in which the stage takes them; ``owned`` the parameters that the stage
    holds itself because several of its layers use them, with the first layer that does.
    """

    index: int
    layers: tuple[int, ...]
    receives: tuple[Border, ...]
    sends: tuple[Border, ...]
    inputs: dict[str, Types]
    scalars: tuple[str, ...]
    constants: tuple[str, ...]
    owned: dict[str, int]
    random: bool


@dataclass(frozen=True)
class LocalProgram:
    """Everything that the emitter writes down: layers and stages, local."""

    graph: Graph
    plan: Plan
    layers: tuple[LocalLayer, ...]
    stages: tuple[Stage, ...]


def cut_stages(graph: Graph, plan: Plan, shardings: tuple[Sharding, ...]) -> LocalProgram:
    """Run the layers' passes (once per layer class and sharding) and cut at the plan's stages."""
    made: dict[object, LocalLayer] = {}
    layers = []
    for layer, sharding, planned in zip(graph.layers, shardings, plan.layers, strict=True):
        key = (layer.cls, planned.strategy, tuple(id(types) for types in sharding.types))
        if key not in made:
            records = tuple(graph.parameters[name] for name in layer.parameters)
            made[key] = local_layer(graph.classes[layer.cls], sharding, planned.strategy, records)
        layers.append(made[key])
    stages = tuple(_stage(graph, plan, tuple(layers), index) for index in range(plan.pipeline))
    return LocalProgram(graph, plan, tuple(layers), stages)


def _stage(graph: Graph, plan: Plan, layers: tuple[LocalLayer, ...], index: int) -> Stage:
    span = plan.stages[index]
    own = range(span.start, span.stop)
    last = index == plan.pipeline - 1
    used = {name for i in own for name in graph.layers[i].parameters}
    owned = {}
    for name in sorted(used & set(graph.shared_parameters)):
        users = [i for i in own if name in graph.layers[i].parameters]
        if len(users) > 1:
            owned[name] = users[0]
    return Stage(
        index=index,
        layers=tuple(own),
        receives=_crossing(graph, plan, layers, span.start),
        sends=() if last else _crossing(graph, plan, layers, span.stop),
        inputs=_inputs(graph, layers, own, len(plan.mesh)),
        scalars=tuple(dict.fromkeys(name for i in own for name in graph.layers[i].scalars)),
        constants=tuple(dict.fromkeys(name for i in own for name in graph.layers[i].constants)),
        owned=owned,
        random=any(layers[i].random for i in own),
    )


def _crossing(graph: Graph, plan: Plan, layers: tuple[LocalLayer, ...], cut: int) -> tuple[Border, ...]:
    """The values that are produced before layer ``cut`` and read at or after it."""
    if cut == 0:
        return ()
    read = {name for layer in graph.layers[cut:] for name in layer.activations}
    borders = []
    for i in range(cut):
        for position, name in enumerate(graph.layers[i].outputs):
            if name in read:
                sharding = layers[i].sharding
                value = graph.values[name]
                shape = local_shape(value.shape, sharding.axes, sharding.output(position))
                borders.append(Border(value, shape, mesh_types(sharding, sharding.output(position))))
    return tuple(borders)


def _inputs(graph: Graph, layers: tuple[LocalLayer, ...], own: range, axes: int) -> dict[str, Types]:
    """An input is taken sliced along the batch on the axes where all layers of the stage that read it want that, whole on the
    others: slicing a batch costs nothing, and gathering it again would."""
    wanted: dict[str, list[Types]] = {}
    for i in own:
        first = len(graph.layers[i].activations)
        for position, name in enumerate(graph.layers[i].inputs):
            wanted.setdefault(name, []).append(layers[i].border(first + position))
    result = {}
    for value in graph.inputs:
        if value.name in wanted:
            columns = [{types[axis] for types in wanted[value.name]} for axis in range(axes)]
            result[value.name] = tuple(S(0) if kinds == {S(0)} else I if kinds == {I} else R for kinds in columns)
    return result
