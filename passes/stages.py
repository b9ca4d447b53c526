"""Cuts the model into pipeline stages: each stage's layers, and the values that cross its borders, with their types.

Each stage passes on the values that later stages need. Values cross a border in the types of the layer that produced them; the receiving
stage converts them, as it does between two of its layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.errors import UsageError
from autopar.graph import Graph, GraphLayer, LayerClass, Value
from autopar.plan import Plan, Strategy
from autopar.segments import segments, shortened
from autopar.sharding import Sharding, local_shape
from autopar.techniques import not_splittable_error
from autopar.types import I, R, S, SpmdType
from passes.conversions import ConversionStep, conversion_steps
from passes.layer import LocalLayer, local_layer, mesh_types
from passes.rewrite import not_splittable_reason, rewritten_class

Types = tuple[SpmdType, ...]


@dataclass(frozen=True)
class StageBoundaryValue:
    """An activation that crosses a stage's border: local shape for one microbatch, type on each mesh axis."""

    value: Value
    shape: tuple[int, ...]
    types: Types


@dataclass(frozen=True)
class Resharding:
    """The conversions, on the mesh's axes, of a value that a layer needs in other types than the value's layer produces.

    ``key`` is the value's name in the stage (``argument_keys``). A later layer that needs the same types reuses the converted value.
    """

    layer: int
    key: str
    value: Value | None  # the value, if it is an activation
    source: Types
    target: Types
    steps: tuple[ConversionStep, ...]


@dataclass(frozen=True)
class Stage:
    """One pipeline stage as a rank runs it: the indices of its layers, its inputs and outputs.

    ``inputs`` maps the batch's tensors to their types in the stage. ``owned`` maps the parameters that several layers of the stage share,
    and that the stage's module therefore owns, to the first of these layers.
    """

    index: int
    layers: tuple[int, ...]
    receives: tuple[StageBoundaryValue, ...]
    sends: tuple[StageBoundaryValue, ...]
    inputs: dict[str, Types]
    scalars: tuple[str, ...]
    constants: tuple[str, ...]
    owned: dict[str, int]
    random: bool
    reshardings: tuple[Resharding, ...]


@dataclass(frozen=True)
class LocalProgram:
    """All data that the emitter writes into a program: layers and stages as one rank runs them."""

    graph: Graph
    plan: Plan
    layers: tuple[LocalLayer, ...]
    stages: tuple[Stage, ...]

    @property
    def flattened(self) -> tuple[tuple[str, ...], ...]:
        """Tuples of axes (outermost first) over which one collective of the program runs."""
        names = [axis.name for axis in self.plan.mesh]
        found = {axes for layer in {id(layer): layer for layer in self.layers}.values() for axes in layer.flattened}
        for stage in self.stages:
            steps = [step for resharding in stage.reshardings for step in resharding.steps]
            found |= {tuple(names[axis] for axis in step.axes) for step in steps if len(step.axes) > 1}
        return tuple(sorted(found))


def cut_stages(graph: Graph, plan: Plan, shardings: tuple[Sharding, ...]) -> LocalProgram:
    """Run the layers' passes (once per layer class and sharding) and cut at the plan's stages. Raises ``UsageError`` or ``ProgramError``
    if no program can run the plan."""
    check_parts(graph, plan, shardings)
    made: dict[object, LocalLayer] = {}
    layers = []
    bounds = [0, *(stage.stop for stage in plan.stages)]
    schedule = plan.sized_schedule
    strategies = shortened(graph, [planned.strategy.under(schedule) for planned in plan.layers], bounds)
    for i, (layer, sharding, strategy) in enumerate(zip(graph.layers, shardings, strategies, strict=True)):
        deferred = _deferred(graph, plan, i) if schedule.split else frozenset()
        strategy = admitted(graph.classes[layer.cls], sharding, strategy)
        key = (layer.cls, strategy, tuple(id(types) for types in sharding.types), deferred)
        if key not in made:
            made[key] = local_layer(
                rewritten_class(graph.classes[layer.cls], strategy.options), sharding, strategy, deferred
            )
        layers.append(made[key])
    _check_shared(graph, layers)
    _check_segments(graph, layers, segments(graph, strategies, bounds))
    stages = tuple(_stage(graph, plan, tuple(layers), index) for index in range(len(plan.stages)))
    return LocalProgram(graph, plan, tuple(layers), stages)


def admitted(cls: LayerClass, sharding: Sharding, strategy: Strategy) -> Strategy:
    """Return the strategy, or the same one without parts if the layer's microbatches can't be computed in parts."""
    return strategy.unsplit if not_splittable_reason(cls, sharding, strategy.options) else strategy


def check_parts(graph: Graph, plan: Plan, shardings: tuple[Sharding, ...]) -> None:
    """Raise ``UsageError`` if the plan computes microbatches in parts, but none of the layers concerned allows parts."""
    wanted = {
        i: planned.strategy.options for i, planned in enumerate(plan.layers) if planned.strategy.options.parts > 1
    }
    reasons = {
        graph.layers[i].name: not_splittable_reason(graph.classes[graph.layers[i].cls], shardings[i], options)
        for i, options in wanted.items()
    }
    if wanted and all(reasons.values()):
        raise not_splittable_error(next(iter(wanted.values())), reasons)


def _deferred(graph: Graph, plan: Plan, layer: int) -> frozenset[int]:
    """Return the indices of the parameters of a layer that no other layer of its stage reads."""
    span = plan.stages[plan.stage_of(layer)]
    others = {name for i in range(span.start, span.stop) if i != layer for name in graph.layers[i].parameters}
    return frozenset(i for i, name in enumerate(graph.layers[layer].parameters) if name not in others)


def _check_shared(graph: Graph, layers: list[LocalLayer]) -> None:
    """Raise ``UsageError`` if layers pad a parameter that they share, which is stored once, to different shapes."""
    for name, uses in graph.shared_parameters.items():
        found = {layers[i].cls.parameters[graph.layers[i].parameters.index(name)].shape: i for i in uses}
        if len(found) > 1:
            shapes = ", ".join(f"{list(shape)} in {graph.layers[i].name}" for shape, i in found.items())
            raise UsageError(
                f"{graph.parameters[name].original} would be padded to {shapes}",
                "give the layers that share it equal roles, on axes whose sizes divide its dims",
            )


def _check_segments(graph: Graph, layers: list[LocalLayer], groups: list[range]) -> None:
    """Raise ``UsageError`` if a value is converted between layers that are recomputed as one."""
    for i in (i for group in groups for i in group[1:]):
        if layers[i].border(0) != layers[i - 1].output(0):
            raise UsageError(
                f"{graph.layers[i].name} cannot be recomputed as one with the layer before: that layer's output is converted in between",
                "leave segment out",
            )


def _stage(graph: Graph, plan: Plan, layers: tuple[LocalLayer, ...], index: int) -> Stage:
    span = plan.stages[index]
    indices = range(span.start, span.stop)
    last = index == len(plan.stages) - 1
    used = {name for i in indices for name in graph.layers[i].parameters}
    owned = {}
    for name in sorted(used & set(graph.shared_parameters)):
        users = [i for i in indices if name in graph.layers[i].parameters]
        if len(users) > 1:
            owned[name] = users[0]
    receives = _boundary_values(graph, plan, layers, span.start)
    inputs = _inputs(graph, layers, indices, len(plan.mesh))
    return Stage(
        index=index,
        layers=tuple(indices),
        receives=receives,
        sends=() if last else _boundary_values(graph, plan, layers, span.stop),
        inputs=inputs,
        scalars=tuple(dict.fromkeys(name for i in indices for name in graph.layers[i].scalars)),
        constants=tuple(
            dict.fromkeys(name for i in indices for name in graph.layers[i].constants if name not in graph.buffers)
        ),
        owned=owned,
        random=any(layers[i].random for i in indices),
        reshardings=tuple(_reshardings(graph, layers, indices, receives, inputs)),
    )


def argument_keys(layer: GraphLayer) -> list[tuple[int, str]]:
    """Return (placeholder index, name in the stage) for each value that a layer reads besides its parameters and buffers."""
    keys = [
        *layer.activations,
        *(f"input {name}" for name in layer.inputs),
        *(f"constant {name}" for name in layer.constants),
        *(f"scalar {name}" for name in layer.scalars),
    ]
    buffers = {f"constant {name}" for name in layer.buffers}
    return [(place, key) for place, key in enumerate(keys) if key not in buffers]


def _reshardings(
    graph: Graph,
    layers: tuple[LocalLayer, ...],
    indices: range,
    receives: tuple[StageBoundaryValue, ...],
    inputs: dict[str, Types],
) -> Iterator[Resharding]:
    produced = {border.value.name: border.types for border in receives}
    produced |= {f"input {name}": types for name, types in inputs.items()}
    converted: set[tuple[str, Types]] = set()
    for i in indices:
        for position, key in argument_keys(graph.layers[i]):
            needed = layers[i].border(position)
            source = produced.get(key, (R,) * len(needed))
            value = graph.values.get(key)
            steps = conversion_steps(source, needed, value is not None and value.requires_grad)
            if steps and (key, needed) not in converted:
                converted.add((key, needed))
                yield Resharding(i, key, value, source, needed, steps)
        produced |= {name: layers[i].output(position) for position, name in enumerate(graph.layers[i].outputs)}


def _boundary_values(
    graph: Graph, plan: Plan, layers: tuple[LocalLayer, ...], cut: int
) -> tuple[StageBoundaryValue, ...]:
    """Return the values that are produced before layer ``cut`` and read at or after it."""
    if cut == 0:
        return ()
    read = {name for layer in graph.layers[cut:] for name in layer.activations}
    found = []
    for i in range(cut):
        for position, name in enumerate(graph.layers[i].outputs):
            if name in read:
                sharding = layers[i].sharding
                value = graph.values[name]
                shape = local_shape(value.shape, sharding.axes, sharding.output(position))
                found.append(StageBoundaryValue(value, shape, mesh_types(sharding, sharding.output(position))))
    return tuple(found)


def _inputs(graph: Graph, layers: tuple[LocalLayer, ...], indices: range, axes: int) -> dict[str, Types]:
    """Return the types of the stage's inputs. An axis slices an input along the batch if all layers that read the input need it sliced
    there; otherwise each rank has all of it, because slicing it in a layer is free, and gathering it is not. If only some layers need it
    sliced on an axis, the axes inside that axis don't slice it either."""
    wanted: dict[str, list[Types]] = {}
    for i in indices:
        first = len(graph.layers[i].activations)
        for position, name in enumerate(graph.layers[i].inputs):
            wanted.setdefault(name, []).append(layers[i].border(first + position))
    result = {}
    for value in graph.inputs:
        if value.name in wanted:
            columns = [{types[axis] for types in wanted[value.name]} for axis in range(axes)]
            taken = [S(0) if kinds == {S(0)} else I if kinds == {I} else R for kinds in columns]
            first_mixed = next((axis for axis, kinds in enumerate(columns) if S(0) in kinds and kinds != {S(0)}), axes)
            result[value.name] = tuple(R if t == S(0) and axis > first_mixed else t for axis, t in enumerate(taken))
    return result
