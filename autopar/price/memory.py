"""What autograd keeps of a layer, and what a parameter costs at rest.

``trace`` runs a layer class's graph once on meta tensors under ``saved_tensors_hooks``: what is saved is what PyTorch
saves, not a formula's idea of it. Saved tensors are told apart by their storage, so that a value which three ops keep
counts once and a view counts as what it views. Parameters, constants and the batch's own tensors are in memory anyway
and are left out. Attention is not run but taken as flash attention (queries, keys, values, result and one float per row of
scores), because on the meta device it would fall apart into the ops that keep the scores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from autopar.errors import UsageError
from autopar.graph import LayerClass, Value
from autopar.ops.cost import attention_dropout, is_attention, tensors
from autopar.ops.facts import Kind, facts
from autopar.ops.operands import operands
from autopar.plan import NARROW_GRADIENTS, NARROW_MOMENTS
from autopar.price.practice import EMITTED, Practice

OUTPUT = -1  # Saved.operand of the node's own result
INTERNAL = -2  # Saved.operand of a tensor that is neither operand nor result, such as a softmax's inside a loss


@dataclass(frozen=True, slots=True)
class Saved:
    """A storage that ``node``'s op keeps for the backward pass: the one of its operand number ``operand``."""

    storage: int
    node: str
    operand: int
    numel: int  # of the storage, in elements of ``dtype``
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Trace:
    """One run of a layer class on meta tensors.

    ``views`` are the nodes whose result lies in an operand's storage; ``requires_grad`` says of every node whether a gradient
    reaches its value. ``storage`` numbers the storage of every node's first tensor, ``extent`` gives a storage's elements and
    dtype, and ``excluded`` are the storages that are in memory anyway.
    """

    saved: tuple[Saved, ...]
    views: frozenset[str]
    requires_grad: dict[str, bool]
    storage: dict[str, int]
    extent: dict[int, tuple[int, torch.dtype]]
    excluded: frozenset[int]


class _Tracer(fx.Interpreter):
    """Runs the graph and notes storages. Every value is kept to the end, so that no storage is taken for another."""

    def __init__(self, cls: LayerClass, borders: tuple[Value, ...], flash: bool, query_layout: bool) -> None:
        super().__init__(cls.graph, garbage_collect_values=False)
        self.flash, self.query_layout = flash, query_layout
        self.borders = dict(zip((n.name for n in cls.graph.graph.nodes if n.op == "placeholder"), borders, strict=True))
        free = (*cls.inputs, *cls.constants, *cls.scalars, *cls.parameters)
        names = [n.name for n in cls.graph.graph.nodes if n.op == "placeholder"]
        self.excluded_names = set(names[len(cls.activations) :]) if free else set()
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
        return super().call_function(target, args, kwargs | {"device": "meta"} if "device" in kwargs else kwargs)

    def note(self, n: fx.Node, result: Any) -> None:
        made = tensors(result)
        self.requires_grad[n.name] = any(t.requires_grad for t in made)
        if n.op == "call_function" and made:
            read = {self.number(t) for o in operands(n) for t in tensors(self.env[o])}
            if all(self.number(t) in read for t in made):
                self.views.add(n.name)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = self.number(tensor)
        node = self.current
        assert node is not None
        if storage not in self.excluded and node.op == "call_function":
            which = INTERNAL
            for index, operand in enumerate(operands(node)):
                if any(self.number(t) == storage for t in tensors(self.env[operand])):
                    which = index
                    break
            self.keep(storage, node, which, tensor)
        return tensor

    def keep(self, storage: int, node: fx.Node, operand: int, tensor: torch.Tensor) -> None:
        numel = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
        # the meta device makes a dropout's mask in the value's dtype, a real one in bytes
        dtype = torch.bool if operand == INTERNAL and facts(node).kind is Kind.DROPOUT else tensor.dtype
        self.saved.setdefault((storage, node.name, operand), Saved(storage, node.name, operand, numel, dtype))

    def attention(self, n: fx.Node) -> torch.Tensor:
        """Flash attention's result and what it keeps, without its arithmetic."""
        read = [tensors(self.env[o])[0] for o in operands(n)]
        query, _, value = read[:3]
        shape = tuple(n.meta["val"].shape)
        assert shape[-1] == value.shape[-1], n.format_node()
        # GPUs' kernels write [batch, length, heads, size] and give a transposed view, so that merging the heads copies nothing
        *batch, heads, length, width = shape
        result = query.new_empty([*batch, length, heads, width]).transpose(-2, -3)
        if self.query_layout and tuple(query.shape) == shape:
            result = torch.empty_like(query, requires_grad=False)
        if any(t.requires_grad for t in read):
            result.requires_grad_()
            for index, tensor in enumerate(read):
                if self.number(tensor) not in self.excluded:
                    self.keep(self.number(tensor), n, index, tensor)
            if self.flash:
                self.keep(self.number(result), n, OUTPUT, result)
                rows = query.new_empty(shape[:-1], dtype=torch.float32)
                self.keep(self.number(rows), n, INTERNAL, rows)
            else:
                for tensor in scores(n, shape[:-1], read[1].shape[-2], query):
                    self.keep(self.number(tensor), n, INTERNAL, tensor)
        return result


def scores(node: fx.Node, rows: tuple[int, ...], keys: int, like: torch.Tensor) -> list[torch.Tensor]:
    """What attention without flash keeps of its scores: the probabilities, and with dropout its mask and the dropped ones."""
    made = [like.new_empty((*rows, keys))]
    if attention_dropout(node) > 0:
        made += [like.new_empty((*rows, keys), dtype=torch.bool), like.new_empty((*rows, keys))]
    return made


_Run = tuple[tuple[Value, ...], bool, bool]
_traces: WeakKeyDictionary[fx.GraphModule, dict[_Run, Trace]] = WeakKeyDictionary()


def trace(cls: LayerClass, flash: bool = True, query_layout: bool = False) -> Trace:
    """Runs ``cls`` once on the meta device at global shapes (nothing is allocated) and reports what autograd keeps.

    A class that has been run is not run again for another pricer: half of the time in which one that is new prices a plan.
    """
    borders = (*cls.activations, *cls.inputs, *cls.constants, *cls.scalars, *cls.parameters)
    known, key = _traces.setdefault(cls.graph, {}), (borders, flash, query_layout)
    if key not in known:
        known[key] = _trace(cls, borders, flash, query_layout)
    return known[key]


def _trace(cls: LayerClass, borders: tuple[Value, ...], flash: bool, query_layout: bool) -> Trace:
    tracer = _Tracer(cls, borders, flash, query_layout)
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
        # a result is first seen while its op runs, before it has a name
        own = entry.operand == INTERNAL and made_by.get(entry.storage) == entry.node
        saved.append(Saved(entry.storage, entry.node, OUTPUT, entry.numel, entry.dtype) if own else entry)
    storage, extent = {}, {}
    for node, value in tracer.env.items():
        for tensor in tensors(value)[:1]:
            storage[node.name] = number = tracer.number(tensor)
            extent[number] = (tensor.untyped_storage().nbytes() // tensor.dtype.itemsize, tensor.dtype)
    return Trace(
        tuple(saved), frozenset(tracer.views), tracer.requires_grad, storage, extent, frozenset(tracer.excluded)
    )


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of one element of an activation, and of one parameter: the copy that is computed with, its gradient, and
    what the optimizer holds (Adam's two moments, and a float32 master copy under mixed precision). ``shard`` are the bytes of a parameter
    at rest under ZeRO-3, ``fresh`` those of the gradient that one backward leaves
    behind; ``products_add`` and ``apart`` as in ``Practice``. ``at_rest`` are the bytes of the master copy that under ZeRO-3 is the shard
    itself."""

    name: str
    activation: int
    parameter: int
    gradient: int
    optimizer: int
    master: bool
    shard: int
    fresh: int = 0
    products_add: bool = False
    apart: bool = False
    at_rest: int = 0

    @property
    def accumulated(self) -> int:
        """Bytes moved per parameter and microbatch when its gradient is added to those of earlier ones.

        A wide sum that is kept besides is read and written, and the product's own result written and read, or read alone where that is
        counted already; one that stands alone is what the product itself adds to, under its arithmetic.
        """
        wide = self.reduced
        if self.products_add:
            return 0
        if self.copies:
            return 2 * wide + 2 * self.parameter
        if self.apart and wide > self.parameter:
            return 2 * wide + self.parameter
        return 0 if self.master and wide > self.parameter else 3 * wide

    @property
    def reduced(self) -> int:
        """Bytes of a gradient on the wire under ZeRO: of several copies the wide one."""
        return min(self.gradient, 4) if self.master else self.gradient

    @property
    def averaged(self) -> int:
        """Bytes of a gradient on the wire without ZeRO: where there is a copy in the computation's precision, DDP takes that."""
        return self.parameter if self.copies else self.reduced

    @property
    def copies(self) -> bool:
        """Whether a gradient is there both in the computation's precision and as a wide sum."""
        return bool(self.fresh) or self.gradient > self.reduced


_PRECISIONS = {
    # matrix products in 8 bits, everything that is held as with bfloat16
    "float8": Precision("float8", 2, 2, 2, 4 + 8, True, 2),
    "float64": Precision("float64", 8, 8, 8, 16, False, 8),
    "float32": Precision("float32", 4, 4, 4, 8, False, 4),
    "bfloat16": Precision("bfloat16", 2, 2, 2, 4 + 8, True, 2),
    "float16": Precision("float16", 2, 2, 2, 4 + 8, True, 2),
}


def precision(name: str, practice: Practice = EMITTED, allow: Collection[str] = ()) -> Precision:
    """The precision of that name, with the copies that ``practice`` keeps where parameters have 16 bits, less what ``allow`` (of
    ``plan.NARROW``) makes narrow.

    Raises:
        UsageError: no such precision.
    """
    if name not in _PRECISIONS:
        raise UsageError(f"there is no precision {name!r}", f"the precisions are {', '.join(_PRECISIONS)}")
    found = _PRECISIONS[name]
    if not found.master:
        return found
    if practice.fsdp:  # the master copy is the shard
        found = dataclasses.replace(found, shard=4, optimizer=found.optimizer - 4)
    found = dataclasses.replace(
        found,
        gradient=practice.gradient_bytes or found.gradient,
        fresh=practice.fresh_bytes,
        products_add=practice.products_add,
        apart=practice.apart,
        at_rest=4 if practice.apart else 0,
    )
    if NARROW_GRADIENTS in allow:
        found = dataclasses.replace(found, gradient=found.parameter, fresh=0)
    if NARROW_MOMENTS in allow:
        found = dataclasses.replace(found, optimizer=found.optimizer - 2 * 2)
    return found


def state_bytes(
    parameters: int, trainable: int, data: int, zero: int, numbers: Precision, aside: bool = False
) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state on one device, at the peak of the step.

    Args:
        parameters, trainable: elements on one device before ZeRO.
        data: the number of data-parallel devices that share them.
        zero: 0 replicates; 1 shards the optimizer; 2 the gradients too; 3 the parameters too. Stage 2 holds its parameters whole
            from forward to backward, and where the optimizer has no master copy a shard of them besides.
        aside: the optimizer's states and master copies are not on the device.
    """
    state = -(-trainable // data) if zero >= 1 else trainable
    gradients = -(-trainable // data) if zero >= 2 else trainable
    held = -(-parameters // data) if zero == 3 else parameters
    optimizer = 0 if aside else state * numbers.optimizer
    if zero == 3:
        if numbers.at_rest and not aside:
            return held * numbers.at_rest, gradients * numbers.gradient, optimizer - state * numbers.at_rest
        return held * numbers.shard, gradients * numbers.gradient, optimizer
    beside = (
        numbers.shard if zero == 2 and data > 1 and (not numbers.master or numbers.shard > numbers.parameter) else 0
    )
    return (
        held * numbers.parameter + -(-parameters // data) * beside,
        gradients * numbers.gradient,
        optimizer,
    )
