"""The passes of one layer, as a pipeline of named steps: from the layer class's graph to the graph that one rank runs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.flow import gradient_flow, placeholders
from autopar.graph import LayerClass
from autopar.ops.meta import meta
from autopar.plan import SELECTIVE, Strategy
from autopar.sharding import Sharding, local_shape
from autopar.techniques.overlap import HALVES, TENSOR
from autopar.types import SpmdType
from passes.collectives import MICROBATCH, convert, insert_collectives_pass
from passes.defer_weights import defer_weights_pass
from passes.fuse_bias import fuse_bias_pass
from passes.grouped_widths import grouped_widths_pass
from passes.halves import halves_pass, is_chained, of_half
from passes.localise_layer import localise_pass, random_seed
from passes.overlap import JOINED, converted_types, overlap_pass
from passes.pad import pad_class
from passes.runner import run
from passes.selective import selective_pass


@dataclass(frozen=True)
class LocalParameter:
    """A parameter as one rank of the layer stores it: class-local dotted name, local shape, the shape over all ranks together (padding
    included), type on each mesh axis."""

    name: str
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    types: tuple[SpmdType, ...]


@dataclass(frozen=True)
class LocalLayer:
    """A layer class under a strategy, local: the graph that a rank runs for one microbatch, and its parameters.

    ``graph`` has the layer class's placeholders, in the same order; ``sharding`` includes the microbatch axis. With ``half``, the sharding
    of half a microbatch, the graph is what a rank runs for each half.
    """

    cls: LayerClass
    strategy: Strategy
    sharding: Sharding
    graph: fx.GraphModule
    parameters: tuple[LocalParameter, ...]
    half: Sharding | None = None

    @property
    def computed(self) -> Sharding:
        """The sharding of what ``graph`` computes."""
        return self.half or self.sharding

    @property
    def chained(self) -> bool:
        """Whether the layer is halved, and its halves go on into the next layer without meeting in between."""
        return self.half is not None and is_chained(self.strategy)

    @property
    def kinds(self) -> tuple[str, ...]:
        """For every placeholder: ``activation``, ``input``, ``constant``, ``scalar`` or ``parameter``."""
        c = self.cls
        groups = (
            (c.activations, "activation"),
            (c.inputs, "input"),
            (c.constants, "constant"),
            (c.scalars, "scalar"),
            (c.parameters, "parameter"),
        )
        return tuple(kind for values, kind in groups for _ in values)

    @property
    def random(self) -> bool:
        """Whether the layer draws random numbers."""
        return any(node.target is random_seed for node in self.graph.graph.nodes)

    @property
    def flattened(self) -> set[tuple[str, ...]]:
        """Tuples of axes (outermost first) over which one collective of the layer, or of a kernel in it, runs."""
        nodes = self.graph.graph.nodes
        found = {tuple(node.args[1]) for node in nodes if node.target is convert}
        found |= {converted_types(node)[1] for node in nodes if node.target in JOINED}
        for name in {name for types in self.sharding.types for name in types.kernel}:
            pairs = zip(self.sharding.axes, self.sharding.types, strict=True)
            found.add(tuple(a.name for a, types in pairs if name in types.kernel and a.name != MICROBATCH))
        return {axes for axes in found if len(axes) > 1}

    def border(self, index: int) -> tuple[SpmdType, ...]:
        """The mesh types in which the layer takes its ``index``-th placeholder."""
        return mesh_types(self.sharding, self.sharding.produced(placeholders(self.cls)[index].name))

    def output(self, index: int) -> tuple[SpmdType, ...]:
        """The mesh types of the layer's ``index``-th output."""
        return mesh_types(self.sharding, self.sharding.output(index))


def mesh_types(sharding: Sharding, types: tuple[SpmdType, ...]) -> tuple[SpmdType, ...]:
    """``types`` without the microbatch axis's type."""
    return tuple(t for axis, t in zip(sharding.axes, types, strict=True) if axis.name != MICROBATCH)


def local_layer(
    cls: LayerClass, sharding: Sharding, strategy: Strategy, deferred: frozenset[int] = frozenset()
) -> LocalLayer:
    """Run the passes on one layer class. ``deferred`` are the indices of the parameters whose gradients the schedule may compute later
    than those of activations; a strategy of such a schedule has no overlap (``Strategy.under``)."""
    assert not deferred or strategy.overlap == "none", strategy
    half = of_half(cls, sharding) if strategy.overlap == HALVES else None
    assert (half is None) == (strategy.overlap != HALVES), strategy
    cls = pad_class(cls, half or sharding)
    flow = gradient_flow(cls)
    for node in cls.graph.graph.nodes:
        meta(node)["gradient"] = flow.get(node.name, False)
    gm = run(
        cls.graph,
        [
            ("insert_collectives", lambda gm: insert_collectives_pass(gm, half or sharding)),
            ("localise_shapes", lambda gm: localise_pass(gm, half or sharding)),
            ("fuse_bias", fuse_bias_pass),
            ("grouped_widths", grouped_widths_pass),
        ],
    )
    if strategy.recomputation == SELECTIVE:
        gm = run(gm, [("selective", lambda gm: selective_pass(gm, [axis.name for axis in sharding.axes]))])
    if strategy.overlap == TENSOR:
        gm = run(gm, [("overlap", lambda gm: overlap_pass(gm, cls, sharding))])
    if half is not None:
        gm = run(gm, [("halves", lambda gm: halves_pass(gm, cls, half))])
    if deferred:
        own = [node for node in gm.graph.nodes if node.op == "placeholder"][-len(cls.parameters) :]
        late = [own[i] for i in deferred]
        gm = run(gm, [("defer_weights", lambda gm: defer_weights_pass(gm, late))])
    nodes = placeholders(cls)[len(placeholders(cls)) - len(cls.parameters) :]
    local = tuple(
        LocalParameter(
            value.name,
            local_shape(value.shape, sharding.axes, sharding.produced(node.name)),
            value.shape,
            mesh_types(sharding, sharding.produced(node.name)),
        )
        for node, value in zip(nodes, cls.parameters, strict=True)
    )
    return LocalLayer(cls, strategy, sharding, gm, local, half)
