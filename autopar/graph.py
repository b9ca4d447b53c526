"""The dataclasses of a captured model: layers, layer classes, parameters and inputs.

A **layer** is a contiguous run of graph nodes between two narrow cuts. Layers of equal structure and shapes share a **layer class**, which
stores the graph once. Shapes are those of the global batch; types later determine local shapes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import fx, nn

from autopar.plan import MICROBATCH_STATISTICS

F = TypeVar("F", bound=Callable[..., Any])
_emptied: list[Callable[[], None]] = []


def cached_for_graphs(maxsize: int) -> Callable[[F], F]:
    """``functools.lru_cache`` for functions of graphs, which it would keep alive: ``forget_graphs`` clears it."""

    def decorate(function: F) -> F:
        cached: Any = functools.lru_cache(maxsize=maxsize)(function)
        forgotten_with_graphs(cached.cache_clear)
        return cast(F, cached)

    return decorate


def forgotten_with_graphs(clear: Callable[[], None]) -> None:
    """Register ``clear`` to be called by ``forget_graphs``."""
    _emptied.append(clear)


def forget_graphs() -> None:
    """Clear the caches of functions of graphs, so that a process that compiles repeatedly doesn't leak them."""
    for clear in _emptied:
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
    """A parameter, or a slice of a fused one.

    ``original`` and ``original_shape`` are its name and shape in the user's model. A fused projection that the model splits afterwards is
    stored as slices: ``dim``, ``start`` and ``shape[dim]`` of the original (``dim`` is ``None`` for a full parameter). ``tied`` has the
    user's other names of the parameter.
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

    @property
    def value(self) -> Value:
        return Value(self.name, self.shape, self.dtype, self.trainable)


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A parameter or buffer of the user's model, by a name in its state dict. ``alias`` is the first name of the same tensor."""

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
    """A value of the batch that the model reads at ``line`` (file, number and text) and for which the graph is specialised."""

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
    ``constants``, under that name. The new values of ``updates`` (some of the buffers' names) follow the outputs in the graph's tuple.
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

    @property
    def gives_loss(self) -> bool:
        """Whether it is the last layer, which computes the loss."""
        return bool(self.outputs) and all(value.shape == () for value in self.outputs)

    @property
    def experts(self) -> int:
        """The number of experts of its mixtures (the greatest common divisor if they differ); 0 without mixtures."""
        mixtures = [node.target for node in self.graph.graph.nodes if getattr(node.target, "__name__", "") == "experts"]
        return math.gcd(*(mixture.count for mixture in mixtures))

    def batched(self, value: Value) -> bool:
        """Whether dim 0 of a border value is the batch; not for a table that only depends on parameters."""
        rows = self.rows or max(
            (v.shape[0] for v in (*self.activations, *self.inputs, *self.outputs) if v.shape), default=1
        )
        return bool(value.shape) and value.shape[0] == rows


@dataclass(frozen=True, slots=True)
class GraphLayer:
    """A use of a layer class: the names in ``Graph`` of the values at its borders, in the class's order."""

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

    ``inputs`` are the batch's tensors by name (dim 0 is the batch); ``structure`` tells how a user's batch maps to those names (see
    ``capture.flatten_batch``). ``prelude`` maps the global batch's inputs to ``scalars``: 0-d values that only depend on inputs, such as
    the number of valid tokens. ``constants`` are folded tensors, on the CPU. ``values`` describes every activation by name.
    ``replicated`` names ops without rules. ``unmicrobatchable`` is the reason why microbatches aren't exact, or empty.
    ``accumulated`` is the number of microbatches of the global batch if the graph is that of one microbatch, each of which counts as a
    separate batch (``autopar.capture.separate_microbatches``); otherwise 1. ``opaque`` has the opaque modules by the name of their op
    (``"autopar.opaque_0"``). ``buffers`` are the buffers that the forward pass writes: each belongs to one layer. Buffers that it only
    reads are ``constants``. ``valueless`` names the constants without values (of a model on meta): such a graph can be planned, but no
    program can be emitted from it. ``narrow`` lists what its plans may store in lower precision (of ``autopar.plan.NARROW``), ``FP8`` if
    its products are in FP8, and ``TF32`` if float32 products use TF32. ``state`` has the parameters and buffers of the user's model, in its
    order, whether the loss depends on them or not. ``guards`` are the values of the batch that the graph is specialised for; the prelude
    computes their tensors, after the scalars. ``assumed`` has assumptions that only a comparison with the model can confirm, each with a
    hint, such as that later forward passes don't need state that the first one stores. ``refused`` has, by technique that rewrites classes
    and by class, the reason why the class can't be rewritten, or an empty string.
    """

    name: str
    inputs: tuple[Value, ...]
    structure: object
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
    refused: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        """Rows of the global batch."""
        return self.inputs[0].shape[0] * self.accumulated

    @property
    def allow(self) -> tuple[str, ...]:
        """The allowed deviations from exact training in plans of this graph (see ``Plan.allow``)."""
        return (*((MICROBATCH_STATISTICS,) if self.accumulated > 1 else ()), *self.narrow)

    def parts(self, microbatches: int) -> int:
        """Return into how many parts a plan's microbatches divide this graph's batch."""
        return microbatches if self.accumulated == 1 else 1

    @cached_property
    def chains(self) -> dict[str, int]:
        """Return by class how many layers may be recomputed together: the longest run in which each passes its only value to the next; 1 if
        some neighbours don't, because the other values that they read would have to be saved, too."""
        readers = Counter(name for layer in self.layers for name in layer.activations)
        longest = dict.fromkeys(self.classes, 1)
        broken, run = set(), 1
        for before, this in itertools.pairwise(self.layers):
            run = run + 1 if this.cls == before.cls else 1
            longest[this.cls] = max(longest[this.cls], run)
            if run > 1 and not self._hands_on(before, this, readers):
                broken.add(this.cls)
        return longest | dict.fromkeys(broken, 1)

    def _hands_on(self, before: GraphLayer, this: GraphLayer, readers: Counter[str]) -> bool:
        alone = len(before.outputs) == 1 and readers[before.outputs[0]] == 1 and this.activations == before.outputs
        alike = (this.inputs, this.constants, this.scalars) == (before.inputs, before.constants, before.scalars)
        own = not any(name in self.shared_parameters for name in (*before.parameters, *this.parameters))
        return alone and alike and own and not self.classes[this.cls].updates

    @cached_property
    def shared_parameters(self) -> dict[str, tuple[int, ...]]:
        """Map parameters of several layers to the layers' indices."""
        uses: dict[str, list[int]] = {}
        for index, layer in enumerate(self.layers):
            for name in layer.parameters:
                uses.setdefault(name, []).append(index)
        return {name: tuple(layers) for name, layers in uses.items() if len(layers) > 1}
