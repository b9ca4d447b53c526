"""The typed keys of ``fx.Node.meta`` and ``fx.GraphModule.meta``: those that autopar writes, and torch's that it reads.

``meta(node)`` is ``node.meta`` with these types, so that mypy refuses undeclared keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, cast

from torch import fx

if TYPE_CHECKING:
    from autopar.graph import Guard, Parameter, Value
    from autopar.types import SpmdType


class NodeMeta(TypedDict, total=False):
    """The metadata of a node."""

    # written by torch.export
    val: Any
    """The value as a meta tensor, or a tuple of them, with global shapes; in a local graph, with a rank's shapes."""
    nn_module_stack: dict[str, tuple[str, Any]]
    """The modules of the user's model around the node's code, outermost first."""
    stack_trace: str | None
    """The lines of the user's code that created the node."""

    # of placeholders, from capture (export, constants) and cleaning (linear, functional): one of the first four
    parameter: Parameter
    input: str
    """The name of a tensor of the batch."""
    buffer: str
    """The name of a buffer, or of a tensor that export lifted out of the code (``lifted``)."""
    constant: str
    """The name of a folded constant."""
    lifted: bool
    shares: str
    """The name of another parameter or buffer that shares the node's memory."""
    state: bool
    """Present for buffers whose new values the graph returns."""

    # of all nodes of a captured graph
    gradient: bool
    """Whether a gradient flows through the node. Written by cleaning, and for a rank's graph by ``passes.layer``."""
    no_grad: bool
    """Present for calls under ``torch.no_grad``. Written and read by cleaning."""
    main: bool
    """Whether the node depends on a parameter or a written buffer, is written to one, or draws random numbers. ``capture.segment`` writes
    this key and the next two."""
    fed: bool
    """Whether the node depends on an input."""
    scalar: bool
    """Whether the node is a 0-d value of inputs that layers read: it is computed once, before the first layer."""
    scalar_name: str
    """The name of a scalar. Written by the cleaning of losses."""
    scalar_value: Value
    """The scalar as a value of the captured graph. Written by ``capture.layers``."""

    # of a rank's graph
    types: tuple[SpmdType, ...]
    """The type on each axis. Written by ``passes.collectives``."""
    global_shape: tuple[int, ...]
    """The global shape, which ``passes.localise_layer`` replaced by one rank's."""
    product: str
    """The name of the product that a bias was joined to. Written by ``passes.fuse_bias``, read by ``passes`` and ``emit``."""
    caller: str
    """The runtime function that makes the node's call. Written by the passes of techniques, read by ``emit``."""
    joined: bool
    """Whether a call converts its input itself (``passes.joined``)."""
    turn: bool
    """Whether the other half of the microbatch takes its turn before the node. Written by the passes of techniques, read by ``emit``, like
    the next five."""
    inner: str
    """If the other half computes during the async communication of the node's kernel: the function that issues it."""
    across: bool
    """Whether the other half computes between the node and a reader."""
    async_op: str
    """For an async conversion: the function that issues it."""
    once: bool
    """Whether one async conversion serves both halves."""
    sends: list[fx.Node]
    """The async conversions that are issued right after the node."""
    module: str
    """The path of the layer's torch module that computes the node. Written and read by ``emit``."""
    body: str
    """The method that computes the body of a mixture of experts. Written and read by ``emit``."""


class GraphMeta(TypedDict, total=False):
    """The metadata of a captured graph."""

    notes: list[str]
    """Notes for the user."""
    unmicrobatchable: str
    """The reason why the batch cannot be split in time."""
    local_batch_norm: bool
    """Whether every part of the batch is normalised by its own statistics. Set by the user."""
    updates: tuple[str, ...]
    """The names of the buffers whose new values follow the loss in the output. Written by ``functionalise_pass``."""
    valueless: dict[str, None]
    """The buffers whose values are needed but unavailable (the model is on meta)."""
    assumed: tuple[tuple[str, str], ...]
    """Assumptions that only a comparison with the model can confirm, each with a hint."""
    guards: tuple[Guard, ...]
    """Values that forward read, for which the graph is specialised."""


def meta(node: fx.Node) -> NodeMeta:
    """The node's metadata."""
    return cast(NodeMeta, node.meta)


def graph_meta(gm: fx.GraphModule) -> GraphMeta:
    """The graph's metadata."""
    return cast(GraphMeta, gm.meta)
