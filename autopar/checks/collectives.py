"""Checks the structure of an emitted program: its types must be those that the search chose, its collectives those that were priced.

It checks three properties: types in every layer, collectives and their groups also at every boundary between layers. It reads the graphs
that are emitted:

* *types*: every op produces its value in the type that the search chose, and only the conversions in the graph change types; then every
  operand must arrive in the type that its op needs, and every conversion must start from the actual type of its value;
* *groups*: the program makes a process group for the axes of each collective;
* *collectives*: the passes leave exactly those collectives in the graph that the layer's types imply and the cost model prices
  (``price.collective_pairs``): on the same values, over the same axes, with the same bytes on each device, forward and backward, including
  those inside kernels.

Equal layers share a graph and are checked once, which takes milliseconds per layer class. A difference is a bug in autopar, and raises
``ProgramError`` with the layer, the axes and the value.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from autopar.errors import ProgramError
from autopar.flow import gradient_flow, placeholders
from autopar.ops.cost import tensors
from autopar.ops.experts import Experts
from autopar.ops.meta import meta
from autopar.ops.operands import operands
from autopar.plan import Axis
from autopar.price.collective_pairs import CollectivePair, pairs_of_conversion, pairs_of_layer
from autopar.program import kernels
from autopar.rules.traffic import kernel_traffic
from autopar.sharding import Sharding
from autopar.techniques.sync import SYNC
from autopar.types import Collective, I, P, R, S, SpmdType, conversion
from passes.collectives import MICROBATCH, convert, share
from passes.conversions import ConversionStep, Types, conversion_steps
from passes.joined import converted_types, is_joined, passed_on, results_of, weights_of
from passes.layer import LocalLayer
from passes.stages import LocalProgram, Resharding

_KERNELS = kernels.__name__


@dataclass(frozen=True, slots=True, order=True)
class IssuedCollective:
    """One collective on one device: the value's name, the mesh axes (outermost first), the kind of collective, whether the backward pass
    issues it, and its bytes.

    ``overlapped`` are the weights (by placeholder name) whose gradients are computed while it runs; empty if it is awaited at once.
    The bytes are those of the full tensor (not sharded over the axes): an all-gather's result, a reduce-scatter's input, an all-reduce's
    tensor, and for all others the sum of the slices on the axes' ranks.
    """

    value: str
    axes: tuple[str, ...]
    collective: str
    backward: bool
    bytes: int
    overlapped: tuple[str, ...] = ()

    def __str__(self) -> str:
        which = "backward" if self.backward else "forward"
        overlap = f" overlapped with the gradients of {', '.join(self.overlapped)}" if self.overlapped else ""
        return f"{which} {self.collective} of {self.value} on {', '.join(self.axes)} ({self.bytes} bytes){overlap}"


def check_collectives(program: LocalProgram) -> int:
    """Check every layer and boundary of the program, and return the number of collectives (equal layers counted once).

    Raises ``ProgramError`` with the layer, the value and the axes if types are not the chosen ones, collectives not the priced ones, or
    a collective has no process group.
    """
    found = 0
    crossed: set[tuple[str, ...]] = set()
    names = {id(layer): program.graph.layers[i].name for i, layer in reversed(list(enumerate(program.layers)))}
    for layer in {id(layer): layer for layer in program.layers}.values():
        name = names[id(layer)]
        _check_types(layer, name)
        emitted = list(exchanges(layer))
        _compare(Counter(priced(layer)), Counter(emitted), name)
        found += len(emitted)
        crossed.update(one.axes for one in emitted)
    for stage in program.stages:
        for resharding in stage.reshardings:
            where = f"the boundary before {program.graph.layers[resharding.layer].name}"
            expected, emitted = _at_boundary(resharding, program)
            _compare(Counter(expected), Counter(emitted), where)
            found += len(emitted)
            crossed.update(one.axes for one in emitted)
    _check_groups(program, crossed)
    _check_replicas(program, {axis for axes in crossed for axis in axes})
    return found


def _check_groups(program: LocalProgram, crossed: set[tuple[str, ...]]) -> None:
    """Raise ``ProgramError`` if collectives run over several axes (``crossed`` are those of each) that the program makes no group for."""
    groupless = {axes for axes in crossed if len(axes) > 1} - set(program.flattened)
    if groupless:
        shown = "; ".join(", ".join(axes) for axes in sorted(groupless))
        raise ProgramError(f"the program has collectives over {shown}, and makes no process group for them", hint=_HINT)


def _check_replicas(program: LocalProgram, crossed: set[str]) -> None:
    """Raise ``ProgramError`` if a collective crosses local SGD replicas; ``crossed`` are the axes of all the program's collectives."""
    if not SYNC.averaging_steps(program.plan.sync):
        return
    replicas = {axis.name for axis in program.layers[0].strategy.replicas(program.plan.mesh)[0]}
    if replicas & crossed:
        raise ProgramError(
            f"local SGD replicas train independently, but collectives cross {', '.join(sorted(replicas & crossed))}",
            hint=_HINT,
        )


def _compare(expected: Counter[IssuedCollective], found: Counter[IssuedCollective], where: str) -> None:
    missing, extra = sorted((expected - found).elements()), sorted((found - expected).elements())
    if missing or extra:
        parts = [f"priced, but not in the program: {one}" for one in missing[:3]]
        parts += [f"in the program, but not priced: {one}" for one in extra[:3]]
        raise ProgramError(
            f"{where}: the program's collectives are not those that were priced: {'; '.join(parts)}", hint=_HINT
        )


_HINT = "this is a bug in autopar, not in the model: report it with the plan"


# -- priced collectives -----------------------------------------------------------------------------------------------


def priced(layer: LocalLayer) -> Iterator[IssuedCollective]:
    """Yield the layer's collectives in the cost model, at the captured dtypes; if it computes a microbatch in two halves, those of one."""
    nodes = [node for node in layer.cls.graph.graph.nodes if node.op != "output"]
    sizes = {n.name: sum(t.numel() * t.element_size() for t in tensors(meta(n).get("val"))) for n in nodes}
    by_name = {n.name: n for n in nodes}
    for pair in pairs_of_layer(layer.cls, layer.computed.types, sizes, gradient_flow(layer.cls)):
        products = pair.overlapped_products if layer.strategy.options.early_collectives and layer.half is None else ()
        weights = tuple(_parameter(operands(by_name[name])[1]) for name in products)
        yield from _collectives_of_pair(pair, layer.computed.axes, weights)


def _parameter(weight: fx.Node) -> str:
    """Return the name of the parameter that ``weight`` is, or is a view of."""
    while weight.op != "placeholder":
        (weight,) = weight.all_input_nodes
    return weight.name


def _collectives_of_pair(
    pair: CollectivePair, axes: tuple[Axis, ...], weights: tuple[str, ...] = ()
) -> Iterator[IssuedCollective]:
    names = tuple(axes[i].name for i in pair.axes if axes[i].name != MICROBATCH)
    members = math.prod(axes[i].size for i in pair.axes)
    size = round(pair.routed_bytes(members) / math.prod(axes[i].size for i in pair.sharded))
    return _issued(pair.value, names, (pair.forward, pair.backward), size, weights)


def _issued(
    value: str, names: tuple[str, ...], pair: tuple[Collective, Collective], size: int, weights: tuple[str, ...] = ()
) -> Iterator[IssuedCollective]:
    """Yield the collectives of a pair that move data, forward and backward, over the axes ``names``; none if there are no axes."""
    for collective, backward in zip(pair, (False, True), strict=True):
        if collective.sends and names:
            yield IssuedCollective(value, names, collective.value, backward, size, weights if backward else ())


# -- collectives in the program ---------------------------------------------------------------------------------------


def exchanges(layer: LocalLayer) -> Iterator[IssuedCollective]:
    """Yield the collectives in the layer's local graph, which its conversions and its kernels issue."""
    sizes = {axis.name: axis.size for axis in layer.computed.axes}
    originals = {node.name: node for node in layer.cls.graph.graph.nodes}
    for node in layer.graph.graph.nodes:
        if node.target is convert:
            value, axes, source, target = node.args
            assert isinstance(value, fx.Node) and isinstance(axes, tuple)
            types = SpmdType.parse(str(source)), SpmdType.parse(str(target))
            yield from _conversion(value, axes, *types, sizes, meta(node)["gradient"])
        elif is_joined(node):
            value, axes, source_type = converted_types(node)
            yield from _conversion(value, axes, source_type, R, sizes, True, tuple(map(_parameter, weights_of(node))))
        elif node.name in originals and str(getattr(node.target, "__module__", "")).startswith(_KERNELS):
            yield from _kernel(node, originals[node.name], layer.computed.axes)


def _conversion(
    value: fx.Node,
    axes: tuple[str, ...],
    source: SpmdType,
    target: SpmdType,
    sizes: dict[str, int],
    gradient: bool,
    weights: tuple[str, ...] = (),
) -> Iterator[IssuedCollective]:
    """Yield the collectives of one conversion of a local value."""
    pair = conversion(source, target)
    assert pair is not None, (value.name, source, target)
    size = sum(t.numel() * t.element_size() for t in tensors(meta(value)["val"]))
    size *= math.prod(sizes[axis] for axis in axes) if source.sharded else 1
    return _issued(_origin(value).name, axes, pair if gradient else (pair[0], Collective.NONE), size, weights)


def _kernel(node: fx.Node, original: fx.Node, axes: tuple[Axis, ...]) -> Iterator[IssuedCollective]:
    """Yield the collectives of a call of a kernel, over the axes among the call's arguments."""
    assert callable(node.target)
    given = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    over: Any = {node.target.__name__: given.get("axis", ())}
    if isinstance(node.target, Experts):
        over = {"expert_exchange": node.kwargs.get("exchange", ()), "expert_relay": node.kwargs.get("relay", ())}
    for kernel, axis in over.items():
        if axis:
            yield from _inside(kernel, (axis,) if isinstance(axis, str) else tuple(axis), node, original, axes)


def _inside(
    kernel: str, names: tuple[str, ...], node: fx.Node, original: fx.Node, axes: tuple[Axis, ...]
) -> Iterator[IssuedCollective]:
    """Yield the collectives of ``kernel`` over the axes ``names``, as ``node`` runs it in the place of ``original``."""
    local = {_origin(operand).name: operand for operand in node.all_input_nodes} | {original.name: node}
    members = math.prod(axis.size for axis in axes if axis.name in names)
    for one in kernel_traffic(kernel, original):
        value = local[one.value.name]
        tensor = tensors(meta(value)["val"])[0]
        pairs = list(zip(axes, meta(value)["types"], strict=True))
        slices = math.prod(a.size for a, t in pairs if t.sharded and a.name in names)
        size = tensor.numel() * slices * (one.itemsize or tensor.element_size()) * one.scale
        size *= 1 if one.routing is None else one.routing.reached(members)
        yield from _issued(one.value.name, names, (one.forward, one.backward), round(size))


def _at_boundary(
    resharding: Resharding, program: LocalProgram
) -> tuple[list[IssuedCollective], list[IssuedCollective]]:
    """Return the collectives between two layers in the cost model, and those in the program."""
    axes = (Axis(MICROBATCH, program.graph.parts(program.plan.microbatches), 0), *program.plan.mesh)
    microbatch_type, priced_steps = S(0), tuple[ConversionStep, ...]()  # reading a tensor of the batch moves no data
    value = resharding.value or next(v for v in program.graph.inputs if f"input {v.name}" == resharding.key)
    if resharding.value is not None:
        producer = next(i for i, layer in enumerate(program.graph.layers) if value.name in layer.outputs)
        source = program.layers[producer].sharding.output(program.graph.layers[producer].outputs.index(value.name))
        index = program.graph.layers[resharding.layer].activations.index(value.name)
        reader = program.layers[resharding.layer]
        target = reader.sharding.produced(placeholders(reader.cls)[index].name)
        microbatch_type, priced_steps = source[0], conversion_steps(source, target, value.requires_grad)
    on_mesh = [
        replace(s, axes=tuple(i + 1 for i in s.axes), after=(microbatch_type, *s.after)) for s in resharding.steps
    ]

    def on_device(steps: Iterable[ConversionStep]) -> list[IssuedCollective]:
        pairs = pairs_of_conversion(value.name, float(value.numel * value.dtype.itemsize), steps)
        return [one for pair in pairs for one in _collectives_of_pair(pair, axes)]

    return on_device(priced_steps), on_device(on_mesh)


def _origin(node: fx.Node) -> fx.Node:
    """Return the value that the conversions up to ``node`` start from."""
    while node.target in (convert, share) or passed_on(node) is not None:
        value = passed_on(node) or node.args[0]
        assert isinstance(value, fx.Node)
        node = value
    return node


# -- types ------------------------------------------------------------------------------------------------------------


def _check_types(layer: LocalLayer, name: str) -> None:
    """Follow every value's type through the conversions of the graph, and check the type in which each operand arrives."""
    sharding, originals = layer.computed, {node.name: node for node in layer.cls.graph.graph.nodes}
    flow = gradient_flow(layer.cls)
    current: dict[fx.Node, Types] = {}

    def converted(value: fx.Node, axes: tuple[str, ...], source: SpmdType, target: SpmdType) -> Types:
        now = list(current[value])
        for i, axis in enumerate(sharding.axes):
            if axis.name in axes:
                if not _equivalent(now[i], source, flow[_origin(value).name]):
                    _fail(name, f"{value.name} is {now[i]} on {axis.name} and is converted from {source}")
                now[i] = target
        return tuple(now)

    for node in layer.graph.graph.nodes:
        if node in current:
            continue
        if node.target is convert:
            value, axes, source, target = node.args
            assert isinstance(value, fx.Node) and isinstance(axes, tuple)
            current[node] = converted(value, axes, SpmdType.parse(str(source)), SpmdType.parse(str(target)))
            if not node.users:
                _fail(name, f"nothing reads {value.name} as {target} on {', '.join(axes)}")
        elif is_joined(node):
            value, axes, source_type = converted_types(node)
            read = converted(value, axes, source_type, R)
            for one in results_of(node):
                current[one.node] = sharding.produced(one.node.name) if one.product else read
                if one.product and one.weight is not None:
                    _check_arrival(name, read, sharding.needed(one.product, 0), value, flow, sharding, one.product)
                    weight = sharding.needed(one.product, 1)
                    _check_arrival(name, current[one.weight], weight, one.weight, flow, sharding, one.product)
                if one.bias is not None:
                    added = [o.name for o in operands(originals[one.node.name])].index(_origin(one.bias).name)
                    bias = sharding.needed(one.node.name, added)
                    _check_arrival(name, current[one.bias], bias, one.bias, flow, sharding, one.node.name)
        elif node.target is share:
            value = node.args[0]
            assert isinstance(value, fx.Node)
            types = zip(sharding.axes, current[value], strict=True)
            current[node] = tuple(P if axis.name == MICROBATCH else t for axis, t in types)
        elif node.op == "output":
            for i, value in enumerate(node.args[0]):
                _check_arrival(name, current[value], sharding.output(i), value, flow, sharding)
        elif node.name in originals:
            current[node] = sharding.produced(node.name)
            inputs = [inner for n in node.all_input_nodes for inner in ([n] if n in current else n.all_input_nodes)]
            for i, operand in enumerate(operands(originals[node.name]) if node.op != "placeholder" else ()):
                arriving = [n for n in inputs if _origin(n).name == operand.name]
                wanted = sharding.needed(node.name, i)
                if arriving and not any(_matches(current[n], wanted, flow[operand.name], sharding) for n in arriving):
                    _check_arrival(name, current[arriving[0]], wanted, arriving[0], flow, sharding, node.name)


def _check_arrival(
    layer: str,
    types: Types,
    wanted: Types,
    value: fx.Node,
    flow: dict[str, bool],
    sharding: Sharding,
    reader: str = "the layer's output",
) -> None:
    origin = _origin(value).name
    if not _matches(types, wanted, flow[origin], sharding):
        text = ", ".join(
            f"{t} on {axis.name} where {w} was decided"
            for axis, t, w in zip(sharding.axes, types, wanted, strict=True)
            if not _equivalent(t, w, flow[origin])
        )
        _fail(layer, f"{origin} reaches {reader} as {text}")


def _matches(types: Types, wanted: Types, gradient: bool, sharding: Sharding) -> bool:
    pairs = zip(sharding.axes, types, wanted, strict=True)
    # if there is one microbatch, every type on the microbatch axis means the full value
    return all(_equivalent(t, w, gradient) or (axis.name == MICROBATCH and axis.size == 1) for axis, t, w in pairs)


def _equivalent(a: SpmdType, b: SpmdType, gradient: bool) -> bool:
    """Return whether two types are equal; without a gradient I and R are equivalent."""
    return a == b or (not gradient and {a, b} == {I, R})


def _fail(layer: str, what: str) -> None:
    raise ProgramError(f"{layer}: {what}", hint=_HINT)
