"""Runs the passes of one layer as a pipeline of named steps, from the layer class's graph to the graph that one rank runs."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import fx

from autopar.flow import gradient_flow, parameter_nodes, placeholders
from autopar.graph import LayerClass
from autopar.ops.compilation import is_compiled
from autopar.ops.meta import meta
from autopar.plan import Strategy
from autopar.sharding import AxisTypes, Sharding, local_shape
from autopar.types import SpmdType
from passes.collectives import MICROBATCH, convert, insert_collectives_pass
from passes.defer_weights import defer_weights_pass
from passes.fuse_bias import fuse_bias_pass
from passes.grouped_widths import grouped_widths_pass
from passes.joined import converted_types, is_joined
from passes.localise_layer import localise_pass, random_seed
from passes.pad import pad_class
from passes.rewrite import computed, local_rewrites
from passes.runner import run


@dataclass(frozen=True)
class LocalParameter:
    """A parameter as the graph of one rank reads it: its dotted name in the class, the local shape, the type on each mesh axis."""

    name: str
    shape: tuple[int, ...]
    types: tuple[SpmdType, ...]


@dataclass(frozen=True)
class LocalLayer:
    """A layer class under a strategy, as one rank runs it: its graph for one microbatch, and its parameters.

    ``cls`` has padded shapes; ``graph`` has the placeholders of ``cls``, in the same order. ``sharding`` includes the microbatch axis.
    If ``half`` (the sharding of half a microbatch) is set, ``graph`` computes one half, and a rank runs it for each.
    """

    cls: LayerClass
    strategy: Strategy
    sharding: Sharding
    graph: fx.GraphModule
    parameters: tuple[LocalParameter, ...]
    half: Sharding | None = None

    @property
    def computed(self) -> Sharding:
        """The sharding of the microbatch, or of its half, that ``graph`` computes."""
        return self.half or self.sharding

    @property
    def compiled(self) -> bool:
        """Whether ``torch.compile`` compiles the layer."""
        return is_compiled(self.cls, self.strategy.options)

    @property
    def chained(self) -> bool:
        """Whether the layer is halved, and its halves continue into the next layer without synchronisation."""
        return self.half is not None and self.strategy.uninterrupted

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
        """Tuples of several axes (outermost first) over which one collective of the layer, or of a kernel in it, runs."""
        nodes = self.graph.graph.nodes
        found = {tuple(node.args[1]) for node in nodes if node.target is convert}
        found |= {converted_types(node)[1] for node in nodes if is_joined(node)}
        # an op may have different kernels on different axes, such as the two hops of a dispatch: each has collectives of its own
        for name, kernel in {item for types in self.sharding.types for item in types.kernel.items()}:
            pairs = zip(self.sharding.axes, self.sharding.types, strict=True)
            found.add(tuple(a.name for a, t in pairs if t.kernel.get(name) == kernel and a.name != MICROBATCH))
        return {axes for axes in found if len(axes) > 1}

    def border(self, index: int) -> tuple[SpmdType, ...]:
        """Return the mesh types of the layer's ``index``-th placeholder."""
        return mesh_types(self.sharding, self.sharding.produced(placeholders(self.cls)[index].name))

    def output(self, index: int) -> tuple[SpmdType, ...]:
        """Return the mesh types of the layer's ``index``-th output."""
        return mesh_types(self.sharding, self.sharding.output(index))


def batch_dims(cls: LayerClass, microbatch_types: AxisTypes) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """Return the batch dim of each placeholder and of each result (``None`` without one), from the types on the microbatch axis."""
    read = tuple(microbatch_types.produced[node.name].dim for node in placeholders(cls))
    return read, tuple(t.dim for t in microbatch_types.outputs)


def mesh_types(sharding: Sharding, types: tuple[SpmdType, ...]) -> tuple[SpmdType, ...]:
    """Return ``types`` without the microbatch axis's type."""
    return tuple(t for axis, t in zip(sharding.axes, types, strict=True) if axis.name != MICROBATCH)


def local_layer(
    cls: LayerClass, sharding: Sharding, strategy: Strategy, deferred: frozenset[int] = frozenset()
) -> LocalLayer:
    """Run the passes on one layer class. ``deferred`` has the indices of the parameters whose gradients the schedule may compute after
    the input gradients, which compiled code can't; if there are any, ``strategy`` must come from ``Strategy.under``."""
    assert not deferred or strategy.options.admits_split, strategy
    graph_sharding = computed(cls, sharding, strategy.options)
    cls = pad_class(cls, graph_sharding)
    flow = gradient_flow(cls)
    for node in cls.graph.graph.nodes:
        meta(node)["gradient"] = flow.get(node.name, False)
    gm = run(
        cls.graph,
        [
            ("insert_collectives", lambda gm: insert_collectives_pass(gm, graph_sharding)),
            ("localise_shapes", lambda gm: localise_pass(gm, graph_sharding)),
            ("fuse_bias", fuse_bias_pass),
            ("grouped_widths", grouped_widths_pass),
        ],
    )
    for name, value, rewrite in local_rewrites(strategy.options):
        gm = run(gm, [(name, functools.partial(rewrite, cls=cls, sharding=graph_sharding, value=value))])
    if deferred and not is_compiled(cls, strategy.options):
        parameters = [node for node in gm.graph.nodes if node.op == "placeholder"][-len(cls.parameters) :]
        deferred_weights = [parameters[i] for i in deferred]
        gm = run(gm, [("defer_weights", lambda gm: defer_weights_pass(gm, deferred_weights))])
    local = tuple(
        LocalParameter(
            value.name,
            local_shape(value.shape, sharding.axes, sharding.produced(node.name)),
            mesh_types(sharding, sharding.produced(node.name)),
        )
        for node, value in zip(parameter_nodes(cls), cls.parameters, strict=True)
    )
    return LocalLayer(cls, strategy, sharding, gm, local, graph_sharding if graph_sharding is not sharding else None)
