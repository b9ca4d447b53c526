"""The dataclasses of a captured model: layers, layer classes, parameters and inputs.

A **layer** is a contiguous run of graph nodes between two narrow cuts: places that few tensors cross. Layers of equal structure and shapes
share a **layer class**, which stores the graph once. Shapes are those of the global batch; types later determine local shapes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import fx, nn

from autopar.plan import MICROBATCH_STATISTICS

F = TypeVar("F", bound=Callable[..., Any])
_cache_clearers: list[Callable[[], None]] = []


def cached_for_graphs(maxsize: int) -> Callable[[F], F]:
    """``functools.lru_cache`` for functions of graphs; ``forget_graphs`` clears the cache, which would keep the graphs alive."""

    def decorate(function: F) -> F:
        cached: Any = functools.lru_cache(maxsize=maxsize)(function)
        forgotten_with_graphs(cached.cache_clear)
        return cast(F, cached)

    return decorate


def forgotten_with_graphs(clear: Callable[[], None]) -> None:
    """Register ``clear`` to be called by ``forget_graphs``."""
    _cache_clearers.append(clear)


def forget_graphs() -> None:
    """Clear the caches of functions of graphs, so that a process that compiles repeatedly doesn't leak them."""
    for clear in _cache_clearers:
        clear()


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor at a layer's border: name, global shape, dtype, and whether a gradient flows through it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter, a slice of a fused one, or a stack of several.

    ``original`` and ``original_shape`` are the name and shape in the user's model. A fused projection whose result the model splits is
    stored as slices: each starts at ``start`` of the original's ``dim``, and has ``shape[dim]`` elements there (``dim`` is ``None`` for a
    full parameter). ``tied`` has the other names of the parameter in the user's model. ``stacked`` has the names in the user's model of the
    parameters, each of ``original_shape``, that it stacks along a new dim 0; ``original`` is then their common name, with ``*`` where they
    differ.
    """

    name: str
    original: str
    original_shape: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None = None
    start: int = 0
    tied: tuple[str, ...] = ()
    trainable: bool = True
    stacked: tuple[str, ...] = ()

    @property
    def originals(self) -> tuple[str, ...]:
        """The parameters of the user's model that it stacks, or the one of which it is (a part), by their first names."""
        return self.stacked or (self.original,)

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the ``originals`` in the user's model."""
        return (*self.originals, *self.tied)

    @property
    def value(self) -> Value:
        return Value(self.name, self.shape, self.dtype, self.trainable)


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A parameter or buffer under one of its names in the user's state dict. ``alias`` is the tensor's first name, if this isn't it."""

    name: str
    shape: tuple[int, ...]
    parameter: bool
    trainable: bool = False
    alias: str | None = None


@dataclass(frozen=True)
class Buffer:
    """A buffer that the forward pass writes. ``value`` is its value at capture, on the CPU; ``None`` on meta. ``persistent``: whether it
    is in the model's state dict."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    value: torch.Tensor | None = None
    persistent: bool = True


@dataclass(frozen=True, slots=True)
class Guard:
    """A data-dependent value that the model reads at ``line`` (file, number and text); the graph is specialised for it."""

    line: str
    value: Any


@dataclass(frozen=True)
class LayerClass:
    """The graph of layers with equal structure.

    ``graph``'s placeholders come in this order: ``activations`` (from earlier layers), ``inputs`` (tensors of the batch),
    ``constants`` (folded tables), ``scalars`` (the prelude's 0-d results), ``parameters``. Its output is a tuple: the
    ``outputs``, in order; the last layer's only output is the 0-d loss. ``parameters`` have class-local dotted names
    (``self_attn.q_proj.weight``); placeholder names are identifiers. Every node has ``meta["val"]``, a meta tensor at global shapes.

    ``buffers`` are the buffers that the layer reads or writes, by class-local dotted names. A buffer that it reads is also among the
    ``constants``, with the same name. ``updates`` names the buffers that the layer writes: their new values follow the outputs in the
    graph's tuple.
    """

    name: str
    graph: fx.GraphModule
    activations: tuple[Value, ...]
    inputs: tuple[Value, ...]
    constants: tuple[Value, ...]
    scalars: tuple[Value, ...]
    parameters: tuple[Value, ...]
    outputs: tuple[Value, ...]
    buffers: tuple[Value, ...] = ()
    updates: tuple[str, ...] = ()
    rows: int = 0  # of the global batch; 0: the largest dim 0 of border values
    # ``expert_loads.ClassLoads`` of its mixtures, ``None`` for even loads: prices alone depend on them, so cached types do not
    loads: Any = field(default=None, compare=False)

    @property
    def gives_loss(self) -> bool:
        """Whether this is the last layer, which computes the loss."""
        return bool(self.outputs) and all(value.shape == () for value in self.outputs)

    @property
    def experts(self) -> int:
        """The number of experts of the layer's mixtures (their greatest common divisor if they differ); 0 without mixtures."""
        return math.gcd(*(count for count, _ in self.mixtures))

    @cached_property
    def mixtures(self) -> tuple[tuple[int, int], ...]:
        """The number of experts of each mixture of the layer, and the number of its router's choices for all tokens together."""
        nodes = [node for node in self.graph.graph.nodes if getattr(node.target, "__name__", "") == "experts"]
        return tuple((node.target.count, math.prod(node.args[1].meta["val"].shape)) for node in nodes)

    def batched(self, value: Value) -> bool:
        """Return whether dim 0 of a border value is the batch dim; false for a table that depends on parameters alone."""
        rows = self.rows or max(
            (v.shape[0] for v in (*self.activations, *self.inputs, *self.outputs) if v.shape), default=1
        )
        return bool(value.shape) and value.shape[0] == rows


class Structure(Protocol):
    """What programs need of the structure of a user's batch, which ``autopar.capture.batch`` describes."""

    @property
    def sample(self) -> Any:
        """The structure of a sample, as ``autopar.program.spec.ProgramSpec.sample``."""


@dataclass(frozen=True, slots=True)
class GraphLayer:
    """An instance of a layer class: the names of its border values in ``Graph``, in the class's order."""

    name: str
    cls: str
    activations: tuple[str, ...]
    inputs: tuple[str, ...]
    constants: tuple[str, ...]
    scalars: tuple[str, ...]
    parameters: tuple[str, ...]
    outputs: tuple[str, ...]
    buffers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Graph:
    """A captured model.

    - ``inputs``: the batch's tensors by name (dim 0 is the batch); ``structure``: the map from a user's batch to these names
      (``capture.flatten_batch``).
    - ``prelude``: the graph that computes ``scalars`` from the global batch: 0-d values that depend on inputs alone, such as the number of
      valid tokens. ``constants``: folded tensors, on the CPU. ``values``: every activation by name.
    - ``replicated``: the names of ops without rules. ``unmicrobatchable``: why microbatches aren't exact, or empty.
    - ``accumulated``: the number of microbatches in the global batch if each counts as a separate batch and the graph is that of one
      microbatch (``autopar.capture.separate_microbatches``); otherwise 1.
    - ``opaque``: the opaque modules by the name of their op (``"autopar.opaque_0"``).
    - ``buffers``: the buffers that the forward pass writes; each belongs to one layer. Buffers that are only read are ``constants``.
    - ``valueless``: the names of constants without values (of a model on meta). Such a graph can be planned, but not emitted.
    - ``narrow``: the tensors that plans may store in lower precision (names of ``autopar.plan.NARROW``), a name of
      ``precision.FP8_RECIPES`` if matrix products are in FP8, ``TF32`` if float32 products use TF32.
    - ``state``: all parameters, then all buffers, of the user's state dict, also those that don't affect the loss.
    - ``guards``: the data-dependent values for which the graph is specialised; the prelude computes their tensors, after the scalars.
    - ``assumed``: assumptions that only a comparison with the model can confirm, such as that later forward passes don't need state that
      the first one stores; each with a hint.
    - ``possibly_unused``: the parameters of experts that eager PyTorch skips, and gives no gradient, in a step in which no token chooses
      them. The graph gives them a gradient of zeros.
    - ``refused``: why a class can't be rewritten, or an empty string, by technique and class.
    - ``no_evaluation``: why programs can't evaluate the model, or an empty string.
    """

    name: str
    inputs: tuple[Value, ...]
    structure: Structure | None
    parameters: dict[str, Parameter]
    constants: dict[str, torch.Tensor]
    scalars: tuple[Value, ...]
    prelude: fx.GraphModule | None
    layers: tuple[GraphLayer, ...]
    classes: dict[str, LayerClass]
    values: dict[str, Value]
    loss: str
    dtype: torch.dtype
    tokens: int
    notes: tuple[str, ...] = ()
    unmicrobatchable: str = ""
    replicated: tuple[str, ...] = field(default=())
    opaque: dict[str, nn.Module] = field(default_factory=dict)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    accumulated: int = 1
    narrow: tuple[str, ...] = ()
    valueless: tuple[str, ...] = ()
    state: tuple[StateTensor, ...] = ()
    guards: tuple[Guard, ...] = ()
    assumed: tuple[tuple[str, str], ...] = ()
    possibly_unused: frozenset[str] = frozenset()
    refused: dict[tuple[str, str], str] = field(default_factory=dict)
    no_evaluation: str = "the captured graph was not compared with the model in evaluation mode"

    @property
    def batch_size(self) -> int:
        """Rows of the global batch."""
        return self.inputs[0].shape[0] * self.accumulated

    @property
    def allow(self) -> tuple[str, ...]:
        """The allowed numerical deviations in plans of this graph (see ``Plan.allow``)."""
        return (*((MICROBATCH_STATISTICS,) if self.accumulated > 1 else ()), *self.narrow)

    def parts(self, microbatches: int) -> int:
        """Return the number of parts into which a plan's microbatches divide this graph's batch."""
        return microbatches if self.accumulated == 1 else 1

    @cached_property
    def chains(self) -> dict[str, int]:
        """The maximum number of layers per recomputed segment, by class: the longest run in which each layer passes its only output to the
        next. It is 1 if adjacent layers exchange other values, have different inputs, share parameters, or update buffers."""
        readers = Counter(name for layer in self.layers for name in layer.activations)
        longest = dict.fromkeys(self.classes, 1)
        broken, run = set(), 1
        for before, this in itertools.pairwise(self.layers):
            run = run + 1 if this.cls == before.cls else 1
            longest[this.cls] = max(longest[this.cls], run)
            if run > 1 and not self._can_share_segment(before, this, readers):
                broken.add(this.cls)
        return longest | dict.fromkeys(broken, 1)

    def _can_share_segment(self, before: GraphLayer, this: GraphLayer, readers: Counter[str]) -> bool:
        chained = len(before.outputs) == 1 and readers[before.outputs[0]] == 1 and this.activations == before.outputs
        same_inputs = (this.inputs, this.constants, this.scalars) == (before.inputs, before.constants, before.scalars)
        unshared = not any(name in self.shared_parameters for name in (*before.parameters, *this.parameters))
        return chained and same_inputs and unshared and not self.classes[this.cls].updates

    @cached_property
    def shared_parameters(self) -> dict[str, tuple[int, ...]]:
        """The parameters that several layers use, with the indices of these layers."""
        uses: dict[str, list[int]] = {}
        for index, layer in enumerate(self.layers):
            for name in layer.parameters:
                uses.setdefault(name, []).append(index)
        return {name: tuple(layers) for name, layers in uses.items() if len(layers) > 1}
