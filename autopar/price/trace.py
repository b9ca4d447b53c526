"""The tensors that autograd saves for the backward pass of a layer.

``trace`` runs a layer class's graph once on meta tensors under ``saved_tensors_hooks``, so the result is the set of tensors that PyTorch
saves, not an estimate from a formula. Storages identify saved tensors: a value that three ops save counts once, and a view counts as its
base tensor. Parameters, constants and the tensors of the batch are in memory anyway, and are excluded. Attention does not run: on the meta
device it would decompose into ops that save the scores. It is modelled as flash attention, which saves queries, keys, values, the result,
and one float per row of scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from autopar.graph import LayerClass, Value, forgotten_with_graphs
from autopar.ops.cost import is_attention, tensors
from autopar.ops.facts import OpKind, facts
from autopar.ops.operands import operands
from autopar.torch_private import overload_schema

OUTPUT = -1  # Saved.operand for the node's own result
INTERNAL = -2  # Saved.operand for a tensor that is neither operand nor result, such as the softmax inside a loss


@dataclass(frozen=True, slots=True)
class Saved:
    """A storage that ``node``'s op saves for the backward pass. ``operand`` is the index of the operand in it, ``OUTPUT`` or
    ``INTERNAL``."""

    storage: int
    node: str
    operand: int
    numel: int  # of the storage, in elements of ``dtype``
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Trace:
    """One run of a layer class on meta tensors.

    ``views`` are the nodes whose result shares an operand's storage; ``requires_grad[node]`` is whether a gradient reaches the node's
    value. ``storage`` is the storage number of every node's first tensor, ``extent`` the elements and dtype of each numbered storage, and
    ``excluded`` the storages that are in memory anyway.
    """

    saved: tuple[Saved, ...]
    views: frozenset[str]
    requires_grad: dict[str, bool]
    storage: dict[str, int]
    extent: dict[int, tuple[int, torch.dtype]]
    excluded: frozenset[int]


class _Tracer(fx.Interpreter):
    """Interpreter that runs the graph and records storages. All values stay alive until the end, so that no storage id is reused."""

    def __init__(self, cls: LayerClass, borders: tuple[Value, ...], cpu: bool) -> None:
        super().__init__(cls.graph, garbage_collect_values=False)
        self.cpu = cpu
        self.borders = dict(zip((n.name for n in cls.graph.graph.nodes if n.op == "placeholder"), borders, strict=True))
        resident = (*cls.inputs, *cls.constants, *cls.scalars, *cls.parameters)
        names = [n.name for n in cls.graph.graph.nodes if n.op == "placeholder"]
        self.excluded_names = set(names[len(cls.activations) :]) if resident else set()
        self.storages: dict[int, Any] = {}  # number to storage
        self.numbers: dict[int, int] = {}  # id of a storage to its number
        self.excluded: set[int] = set()
        self.current: fx.Node | None = None
        self.saved: dict[tuple[int, str, int], Saved] = {}
        self.views: set[str] = set()
        self.requires_grad: dict[str, bool] = {}

    def number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if id(storage) not in self.numbers:
            self.numbers[id(storage)] = len(self.storages)
            self.storages[len(self.storages)] = storage
        return self.numbers[id(storage)]

    def run_node(self, n: fx.Node) -> Any:
        self.current = n
        if n.op == "placeholder":
            value = self.borders[n.name]
            result: Any = torch.empty(value.shape, dtype=value.dtype, device="meta")
            if value.requires_grad and (value.dtype.is_floating_point or value.dtype.is_complex):
                result.requires_grad_()
            if n.name in self.excluded_names:
                self.excluded.add(self.number(result))
        elif is_attention(n):
            result = self.attention(n)
        else:
            result = super().run_node(n)
        if n.op != "output":
            self.note(n, result)
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        # a factory such as aten.full allocates on the processor if the graph names no device
        takes_device = any(name == "device" for name, _ in overload_schema(target) or ())
        return super().call_function(target, args, {**kwargs, "device": "meta"} if takes_device else kwargs)

    def note(self, n: fx.Node, result: Any) -> None:
        made = tensors(result)
        self.requires_grad[n.name] = any(t.requires_grad for t in made)
        if n.op == "call_function" and made:
            read = {self.number(t) for o in operands(n) for t in tensors(self.env[o])}
            if all(self.number(t) in read for t in made):
                self.views.add(n.name)

    def pack(self, tensor: torch.Tensor) -> None:
        """Record a saved tensor, and return ``None`` to autograd: a node that kept its own result would be a cycle that Python can't
        collect."""
        storage = self.number(tensor)
        node = self.current
        assert node is not None
        if storage not in self.excluded and node.op == "call_function":
            which = INTERNAL
            for index, operand in enumerate(operands(node)):
                if any(self.number(t) == storage for t in tensors(self.env[operand])):
                    which = index
                    break
            self.save(storage, node, which, tensor)

    def save(self, storage: int, node: fx.Node, operand: int, tensor: torch.Tensor) -> None:
        numel = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
        # on the meta device a dropout mask has the value's dtype; on other devices it is bool
        dtype = torch.bool if operand == INTERNAL and facts(node).kind is OpKind.DROPOUT else tensor.dtype
        self.saved.setdefault((storage, node.name, operand), Saved(storage, node.name, operand, numel, dtype))

    def attention(self, n: fx.Node) -> torch.Tensor:
        """Return flash attention's result and record its saved tensors, without the arithmetic."""
        read = [tensors(self.env[o])[0] for o in operands(n)]
        query, _, value = read[:3]
        shape = tuple(n.meta["val"].shape)
        assert shape[-1] == value.shape[-1], n.format_node()
        # GPU kernels write [batch, length, heads, size] and return a transposed view, so that merging the heads copies nothing; the results
        # of CPU kernels have the memory layout of the queries
        *batch, heads, length, width = shape
        result = query.new_empty([*batch, length, heads, width]).transpose(-2, -3)
        if self.cpu and tuple(query.shape) == shape:
            result = torch.empty_like(query, requires_grad=False)
        if any(t.requires_grad for t in read):
            result.requires_grad_()
            for index, tensor in enumerate(read):
                if self.number(tensor) not in self.excluded:
                    self.save(self.number(tensor), n, index, tensor)
            self.save(self.number(result), n, OUTPUT, result)
            rows = query.new_empty(shape[:-1], dtype=torch.float32)
            self.save(self.number(rows), n, INTERNAL, rows)
        return result


_Run = tuple[tuple[Value, ...], bool]
_traces: WeakKeyDictionary[fx.GraphModule, dict[_Run, Trace]] = WeakKeyDictionary()
forgotten_with_graphs(_traces.clear)  # a trace contains its graph


def trace(cls: LayerClass, cpu: bool = False) -> Trace:
    """Run ``cls`` once on the meta device at global shapes (nothing is allocated) and return the tensors that autograd saves.

    ``cpu``: with the memory layouts of PyTorch's CPU kernels. Results are cached across pricers, because tracing takes half of the time in
    which a new pricer prices a plan.
    """
    borders = (*cls.activations, *cls.inputs, *cls.constants, *cls.scalars, *cls.parameters)
    known, key = _traces.setdefault(cls.graph, {}), (borders, cpu)
    if key not in known:
        known[key] = _trace(cls, borders, cpu)
    return known[key]


def _trace(cls: LayerClass, borders: tuple[Value, ...], cpu: bool) -> Trace:
    tracer = _Tracer(cls, borders, cpu)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(tracer.pack, lambda t: t):
        tracer.run(*([None] * len(borders)))
    made_by = {
        tracer.number(t): node.name
        for node in reversed(cls.graph.graph.nodes)
        if node.op == "call_function"
        for t in tensors(tracer.env.get(node))
    }
    saved = []
    for entry in tracer.saved.values():
        # an op may save its result before the tracer knows the result's node
        own = entry.operand == INTERNAL and made_by.get(entry.storage) == entry.node
        saved.append(Saved(entry.storage, entry.node, OUTPUT, entry.numel, entry.dtype) if own else entry)
    storage, extent = {}, {}
    for node, value in tracer.env.items():
        for tensor in tensors(value)[:1]:
            storage[node.name] = number = tracer.number(tensor)
            extent[number] = (tensor.untyped_storage().nbytes() // tensor.dtype.itemsize, tensor.dtype)
    tracer.env.clear()  # autograd's nodes keep the hook, and with it the tracer
    return Trace(
        tuple(saved), frozenset(tracer.views), tracer.requires_grad, storage, extent, frozenset(tracer.excluded)
    )
