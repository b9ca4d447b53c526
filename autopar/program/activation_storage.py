"""Activation offloading to the host, and activations saved in 8 bits: how a layer's saved tensors are stored until its backward pass.

``in_host`` and ``in_8_bits`` are contexts around a layer's forward, or around its recomputation. Saved tensors that share
memory are stored once. Parameters, buffers and other tensors that stay in memory anyway are saved unchanged.

*In the host's memory.* A tensor is copied when autograd saves it: only its elements, not the rest of its storage, because kernels such as
a GRU's write other parts of the storage later. On a GPU each direction has its own stream. A layer's copies to the host overlap the
forward pass of the next layer, which waits for them at its end. The copies back overlap a backward pass: the first read in a layer's
backward fetches the layer's tensors, and prefetches those of the layer that runs its backward next. So the device holds the saved tensors
of at most two layers. On a CPU the copies are made too, but save no memory.

*In 8 bits.* Numbers are rounded in blocks of ``BLOCK`` consecutive elements: one float32 scale per block, its largest
magnitude / 127. So zeros stay zeros, and the error is at most 1/254 of the block's largest magnitude. Sharding does not change the
rounding if each rank's part of the tensor consists of complete blocks. -infinity has its own code; in a block with NaN or +infinity
every number becomes NaN. The layer's arguments, integers, and tensors of fewer than ``MIN_ELEMENTS`` elements are not rounded. Tensors that
share memory are views of one restored tensor until the last of them is read. The forward pass does not change, gradients do:
``allow={"int8_activations"}`` permits that.

This file has not run on a GPU yet.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F  # noqa: N812  torch's own convention

from . import fusion

BLOCK = 64
MIN_ELEMENTS = 1024
CHUNK = 2**22
"""Without ``fused``, at most this many elements are rounded or restored at a time, which limits the temporary tensors."""


# -- saved tensors as views of memory -----------------------------------------------------------------------------------


class StorageView(NamedTuple):
    """A tensor's view of its storage. Tensors with the same ``key`` read the same memory. ``strides`` is ``None`` if the
    tensor has gaps in memory: its elements are then stored without the gaps."""

    key: tuple[Any, ...]
    size: tuple[int, ...]
    strides: tuple[int, ...] | None

    @staticmethod
    def of(tensor: Tensor) -> StorageView:
        size, strides, span = tuple(tensor.size()), tensor.stride(), _span(tensor)
        dense = span <= tensor.numel()
        place = (tensor.storage_offset(), span) if dense else (tensor.storage_offset(), size, strides)
        key = (tensor.untyped_storage().data_ptr(), tensor.dtype, *place)
        return StorageView(key, size, strides if dense else None)

    def stored(self, tensor: Tensor) -> Tensor:
        """Return the elements of ``tensor`` as a 1-d tensor, in the order of memory, or in logical order if ``strides`` is ``None``."""
        if self.strides is None:
            return tensor.detach().reshape(-1)
        return tensor.detach().as_strided((_span(tensor),), (1,))

    def read(self, stored: Tensor) -> Tensor:
        """Return the tensor as a view of ``stored``, the result of the method ``stored``."""
        return stored.view(self.size) if self.strides is None else stored.as_strided(self.size, self.strides)


def _span(tensor: Tensor) -> int:
    """Return the number of elements in a tensor's storage from its first element to its last."""
    strides = zip(tensor.size(), tensor.stride(), strict=True)
    return 1 + sum((extent - 1) * stride for extent, stride in strides) if tensor.numel() else 0


class _Stored(Protocol):
    """The stored elements of a saved tensor, in the host's memory or in 8 bits."""

    def restore(self) -> Tensor:
        """Return the elements on the device, as a 1-d tensor."""


class _Saved(NamedTuple):
    """A saved tensor, as a view of stored elements."""

    view: StorageView
    stored: _Stored


@contextmanager
def _saving(
    layer: nn.Module, resident: tuple[Tensor, ...], store: Callable[[Tensor, StorageView], _Stored | None]
) -> Iterator[None]:
    """Save ``store(tensor, view)`` in place of each tensor that autograd saves inside this context, unless that is ``None``.

    The parameters and buffers of ``layer`` and the tensors ``resident`` stay in memory anyway, and are saved unchanged."""
    tensors = (*layer.parameters(), *layer.buffers(), *resident)
    addresses = {0, *(tensor.untyped_storage().data_ptr() for tensor in tensors)}  # 0: the address of an empty storage

    @torch.compiler.disable  # torch.compile would compile the copies into the layer
    @torch.no_grad()
    def put(tensor: Tensor) -> Tensor | _Saved:
        plain = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
        if not plain or tensor.untyped_storage().data_ptr() in addresses:
            return tensor
        view = StorageView.of(tensor)
        stored = store(tensor, view)
        return tensor if stored is None else _Saved(view, stored)

    with torch.autograd.graph.saved_tensors_hooks(put, _take):
        yield


@torch.compiler.disable
@torch.no_grad()
def _take(kept: Tensor | _Saved) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.view.read(kept.stored.restore())


# -- in the host's memory -----------------------------------------------------------------------------------------------


@contextmanager
def in_host(layer: nn.Module, *resident: Tensor) -> Iterator[None]:
    """Keep saved tensors in the host's memory inside this context, except the layer's parameters and buffers, and ``resident``."""
    global _latest, _pending
    call = _Call(_latest)
    with _saving(layer, resident, call.put):
        yield
    _finish_pending_offload()
    _pending, _latest = call, weakref.ref(call)


def _finish_pending_offload() -> None:
    """Make the current stream wait until the last call's tensors are in the host's memory, and free the device's copies."""
    global _pending
    if _pending is not None:
        for _, _, storage in _pending.in_flight.values():
            storage.wait()
        _pending.in_flight.clear()
        _pending = None


class _Call:
    """One forward pass of a layer: its offloaded tensors, and the call before it (``previous``), whose backward pass follows this one's."""

    def __init__(self, previous: weakref.ref[_Call] | None) -> None:
        self.previous = previous
        # by ``StorageView.key``: the source tensors (kept until the copy ends, so that their address is not reused), and the copy
        self.in_flight: dict[tuple[Any, ...], tuple[Tensor, Tensor, _Offloaded]] = {}
        self.storages: list[weakref.ref[_Offloaded]] = []

    def put(self, tensor: Tensor, view: StorageView) -> _Offloaded:
        if view.key not in self.in_flight:
            stored = view.stored(tensor)
            storage = _Offloaded(stored, self)
            self.in_flight[view.key] = tensor, stored, storage
            self.storages.append(weakref.ref(storage))
        return self.in_flight[view.key][2]

    def fetch(self) -> None:
        """Start to copy all tensors that are still needed back to the device."""
        for each in self.storages:
            storage = each()
            if storage is not None:
                storage.fetch()


class _Offloaded:
    """The bytes of a 1-d tensor in the host's memory, and after ``fetch`` in the device's memory as well."""

    def __init__(self, tensor: Tensor, call: _Call) -> None:
        self.call, self.device, self.dtype = call, tensor.device, tensor.dtype
        width = tensor.element_size()
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        source = source.set_(tensor.untyped_storage(), tensor.storage_offset() * width, (tensor.numel() * width,), (1,))
        self.host = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        self.fetched: Tensor | None = None
        self.ready = _copy(self.host, source, self.device)

    def fetch(self) -> None:
        if self.fetched is None:
            self.fetched = torch.empty(self.host.shape, dtype=torch.uint8, device=self.device)
            self.ready = _copy(self.fetched, self.host, self.device, after=self.ready)

    def wait(self) -> None:
        """Make the current stream wait for the latest copy."""
        if self.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(self.ready)

    def restore(self) -> Tensor:
        _finish_pending_offload()
        self.call.fetch()
        previous = self.call.previous and self.call.previous()
        if previous:
            previous.fetch()
        assert self.fetched is not None
        self.wait()
        return self.fetched.view(self.dtype)

    def __del__(self) -> None:
        if self.fetched is not None:
            self.wait()  # fetched but never read: the memory must not be reused before the copy ends


def _copy(
    to: Tensor, source: Tensor, device: torch.device, after: torch.cuda.Event | None = None
) -> torch.cuda.Event | None:
    """Queue a copy on the stream of its direction, after the work on the current stream and after the event ``after``; return the event
    that marks the copy's end. On a CPU, copy at once and return ``None``."""
    if device.type != "cuda":
        to.copy_(source)
        return None
    direction = device, to.device
    if direction not in _streams:
        _streams[direction] = torch.cuda.Stream(device)
    stream = _streams[direction]
    stream.wait_stream(torch.cuda.current_stream(device))
    if after is not None:
        stream.wait_event(after)
    with torch.cuda.stream(stream):
        to.copy_(source, non_blocking=True)
    return stream.record_event()


_latest: weakref.ref[_Call] | None = None
_pending: _Call | None = None  # the latest call, until its copies to the host have ended
_streams: dict[tuple[torch.device, torch.device], torch.cuda.Stream] = {}


# -- in 8 bits ----------------------------------------------------------------------------------------------------------


def in_8_bits(layer: nn.Module, *resident: Tensor, fused: bool = False) -> AbstractContextManager[None]:
    """Keep saved tensors in 8 bits inside this context, except the layer's parameters and buffers, and ``resident``. ``fused``: one
    compiled kernel rounds, and one restores."""
    known: dict[tuple[Any, ...], tuple[StorageWeakRef, _Rounded]] = {}

    def store(tensor: Tensor, view: StorageView) -> _Rounded | None:
        if not tensor.is_floating_point() or (stored := view.stored(tensor)).numel() < MIN_ELEMENTS:
            return None
        if view.key not in known or known[view.key][0].expired():  # a new tensor may be at this address
            known[view.key] = StorageWeakRef(tensor.untyped_storage()), _Rounded(stored, fused)
        return known[view.key][1]

    return _saving(layer, resident, store)


class _Rounded:
    """A 1-d tensor in 8 bits. The first read in the backward pass restores it, and later reads share the result."""

    def __init__(self, tensor: Tensor, fused: bool) -> None:
        self.dtype, self.numel, self.fused = tensor.dtype, tensor.numel(), fused
        blocks = math.ceil(self.numel / BLOCK)
        if fused:
            self.codes, self.scales = fusion.fused(rounded)(_in_blocks(tensor))
        else:
            self.codes = torch.empty(blocks, BLOCK, dtype=torch.int8, device=tensor.device)
            self.scales = torch.empty(blocks, 1, dtype=torch.float32, device=tensor.device)
            for i, chunk in enumerate(tensor.split(CHUNK)):
                rows = slice(i * CHUNK // BLOCK, i * CHUNK // BLOCK + math.ceil(chunk.numel() / BLOCK))
                self.codes[rows], self.scales[rows] = rounded(_in_blocks(chunk))
        self.codes = self.codes.view(-1)[: self.numel]
        self.result: Tensor | None = None

    def restore(self) -> Tensor:
        if self.result is None:
            codes = _in_blocks(self.codes)
            if self.fused:
                self.result = fusion.fused(restored)(codes, self.scales, self.dtype).view(-1)[: self.numel]
            else:
                self.result = torch.empty(codes.shape, dtype=self.dtype, device=codes.device)
                rows = CHUNK // BLOCK
                parts = zip(self.result.split(rows), codes.split(rows), self.scales.split(rows), strict=True)
                for part, chunk, scales in parts:
                    part.copy_(restored(chunk, scales, torch.float32))
                self.result = self.result.view(-1)[: self.numel]
        return self.result


def rounded(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the int8 codes ``[n, BLOCK]`` of ``blocks [n, BLOCK]`` and the float32 scales ``[n, 1]``; -128 stands for -infinity."""
    wide = blocks.float()
    finite = torch.nan_to_num(wide, nan=math.nan, posinf=math.inf, neginf=0.0)
    scales = torch.linalg.vector_norm(finite, math.inf, dim=1, keepdim=True) / 127
    codes = (wide / scales.clamp(min=torch.finfo(torch.float32).tiny)).round_().clamp_(min=-128)
    return codes.to(torch.int8), scales


def restored(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that ``codes [n, BLOCK]`` with ``scales [n, 1]`` stand for."""
    return (codes * scales).masked_fill_(codes == -128, -math.inf).to(dtype)


def _in_blocks(tensor: Tensor) -> Tensor:
    """Return a 1-d tensor as ``[n, BLOCK]``, with zeros after its end."""
    return F.pad(tensor, (0, -tensor.numel() % BLOCK)).view(-1, BLOCK)
