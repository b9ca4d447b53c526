"""Declares the keys of ``fx.Node.meta`` and ``fx.GraphModule.meta`` that autopar writes, or reads from torch.

``meta(node)`` is ``node.meta`` with these types, so that mypy refuses undeclared keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, cast

from torch import fx

if TYPE_CHECKING:
    from autopar.graph import Guard, Parameter, Value
    from autopar.ops.routing import SampledChoices
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

    # of a captured graph's placeholders, written by capture (export, constants, reach) and cleaning (linear, functional); each has exactly
    # one of ``parameter``, ``input``, ``buffer`` and ``constant``
    parameter: Parameter
    input: str
    """The name of a tensor in the batch."""
    buffer: str
    """The name of a buffer, of a frozen parameter that the model writes, or of a tensor that export lifted out of the code (``lifted``)."""
    constant: str
    """The name of a folded constant."""
    lifted: bool
    shares: str
    """The name of another parameter or buffer that shares the node's memory."""
    state: bool
    """Present if the model writes the buffer: the graph then returns the buffer's new value."""

    # of nodes of a captured graph
    gradient: bool
    """Whether a gradient flows through the node. Cleaning writes this key; for a rank's graph ``passes.layer`` does."""
    no_grad: bool
    """Present for the ``detach`` of a value that code under ``torch.no_grad`` reads. Written and read by cleaning."""
    main: bool
    """Whether the node belongs to one layer: it depends on a parameter, a written buffer or a random number, or is a buffer's new value.
    ``capture.segment`` writes this key and the next two."""
    needs_input: bool
    """Whether the node depends on an input."""
    scalar: bool
    """Whether the node is a 0-d value that depends only on inputs and that layers read; it is computed once, before the first layer."""
    scalar_name: str
    """The name of a scalar. Written by cleaning (losses, selections)."""
    scalar_value: Value
    """The scalar as a value of the captured graph. Written by ``capture.layers``."""
    choices: SampledChoices
    """Choices of the router of a mixture of experts, if not all sets of experts are equally likely. Written by ``capture.routers``."""

    # of a rank's graph
    types: tuple[SpmdType, ...]
    """The type on each axis. Written by ``passes.collectives``."""
    global_shape: tuple[int, ...]
    """The global shape; ``val`` has one rank's. Written by ``passes.localise_layer``."""
    product: str
    """The name of the product into which a bias was fused. Written by ``passes.fuse_bias``, read by ``passes`` and ``emit``."""
    caller: str
    """The name of the runtime function that wraps the node's call. Written by the passes of techniques, read by ``emit``."""
    joined: bool
    """Whether the call combines a collective and products (``passes.joined``)."""
    other_half_before: bool
    """Whether the other half of the microbatch runs before the node. Written by the passes of techniques, read by ``emit``, like the next
    five."""
    kernel_async_op: str
    """The name of the function that issues the async communication of the node's kernel, during which the other half runs."""
    other_half_between: bool
    """Whether the other half runs between the node and one of its readers."""
    async_op: str
    """The name of the function that issues an async conversion."""
    shared_async: bool
    """Whether one async conversion serves both halves."""
    issued_after: list[fx.Node]
    """The async conversions that are issued right after the node."""
    kernel_send: str
    """The name of the function that exchanges the rows of a mixture of experts. Written by the passes of techniques, read by ``emit``."""
    module: str
    """The path of the torch module that computes the node, relative to the layer. Written and read by ``emit``."""
    body: str
    """The layer's method that computes the experts of a mixture. Written and read by ``emit``."""


class GraphMeta(TypedDict, total=False):
    """The metadata of a captured graph."""

    notes: list[str]
    """Notes for the user."""
    unmicrobatchable: str
    """The reason why splitting the batch into microbatches changes the result. Written by cleaning (batch_norm)."""
    local_batch_norm: bool
    """Whether batch norm uses the statistics of each rank's part of each microbatch. Set by the user."""
    updates: tuple[str, ...]
    """The names of the buffers whose new values are the graph's last outputs. Written by ``functionalise_pass``."""
    valueless: dict[str, None]
    """The buffers whose values are needed but unavailable, because the model is on the meta device."""
    assumed: tuple[tuple[str, str], ...]
    """Assumptions that only a comparison with the model can confirm, each with a hint."""
    guards: tuple[Guard, ...]
    """Values that forward read from the example batch, for which the graph is specialised."""
    possibly_unused: frozenset[str]
    """The parameters that forward skips in a step in which no token chooses their expert. Written by ``capture.hit_loops``."""


def meta(node: fx.Node) -> NodeMeta:
    """Return the node's metadata."""
    return cast(NodeMeta, node.meta)


def graph_meta(gm: fx.GraphModule) -> GraphMeta:
    """Return the graph's metadata."""
    return cast(GraphMeta, gm.meta)
