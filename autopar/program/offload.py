"""Activation offloading: tensors saved for a layer's backward pass are in the host's memory between forward and backward.

``saved`` is the context of a layer's arithmetic, or of the call that recomputes the layer. Saved tensors of the same memory share one copy.
A tensor is copied when it is saved, and its own elements alone: kernels such as a GRU's write parts of a storage after others were saved.
Parameters and other tensors that stay in memory anyway are not offloaded. On a GPU each direction has a stream
of its own: the copy to the host overlaps the next layer's forward, which waits for the copy at its end; the copy to the device overlaps
the backward of the layer after, whose first read also fetches the layer before it. The device so has the saved tensors of at most two
layers. On a CPU the copies are made as well, and save no memory. This file has not run on a GPU yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .saved_views import StorageView, moves, resident


@contextmanager
def saved(layer: nn.Module, *here: Tensor) -> Iterator[None]:
    """A context that offloads all tensors that autograd saves inside it, except the layer's parameters and ``here``."""
    global _latest, _going
    stay, call = resident(layer, *here), _Call(_latest)

    @torch.compiler.disable  # torch.compile would compile the copies
    def put(tensor: Tensor) -> Tensor | _OffloadedTensor:
        return call.put(tensor) if moves(tensor, stay) else tensor

    with torch.autograd.graph.saved_tensors_hooks(put, _take):
        yield
    _settle()
    _going, _latest = call, weakref.ref(call)


def _settle() -> None:
    """Make the device wait until the latest call's tensors are in the host's memory, and free the device's copies."""
    global _going
    if _going is not None:
        for _, _, storage in _going.begun.values():
            storage.wait()
        _going.begun.clear()
        _going = None


class _Call:
    """One forward of a layer: its offloaded storages, and the call before it, whose backward comes next."""

    def __init__(self, before: weakref.ref[_Call] | None) -> None:
        self.before = before
        # by memory: the sources, until the copy has ended, so that no address is reused, and the copy
        self.begun: dict[tuple[Any, ...], tuple[Tensor, Tensor, _Storage]] = {}
        self.storages: list[weakref.ref[_Storage]] = []

    def put(self, tensor: Tensor) -> _OffloadedTensor:
        view = StorageView.of(tensor)
        if view.key not in self.begun:
            stored = view.stored(tensor)
            storage = _Storage(stored, self)
            self.begun[view.key] = tensor, stored, storage
            self.storages.append(weakref.ref(storage))
        return _OffloadedTensor(self.begun[view.key][2], tensor.dtype, view)

    def fetch(self) -> None:
        """Start to copy all storages that are still needed to the device."""
        for each in self.storages:
            storage = each()
            if storage is not None:
                storage.fetch()


class _Storage:
    """The bytes of a tensor of one dim in the host's memory, and after ``fetch`` in the device's memory as well."""

    def __init__(self, tensor: Tensor, call: _Call) -> None:
        self.call, self.device = call, tensor.device
        width = tensor.element_size()
        there = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        there = there.set_(tensor.untyped_storage(), tensor.storage_offset() * width, (tensor.numel() * width,), (1,))
        self.host = torch.empty(there.numel(), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        self.back: Tensor | None = None
        self.ready = _copy(self.host, there, self.device)

    def fetch(self) -> None:
        if self.back is None:
            self.back = torch.empty(self.host.shape, dtype=torch.uint8, device=self.device)
            self.ready = _copy(self.back, self.host, self.device, after=self.ready)

    def wait(self) -> None:
        """Make the current stream wait for the latest copy."""
        if self.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(self.ready)

    def take(self) -> Tensor:
        _settle()
        self.call.fetch()
        before = self.call.before and self.call.before()
        if before:
            before.fetch()
        assert self.back is not None
        self.wait()
        return self.back

    def __del__(self) -> None:
        if self.back is not None:
            self.wait()  # fetched and not read: its memory must not be reused earlier


class _OffloadedTensor:
    """A saved tensor, as a view of an offloaded copy."""

    def __init__(self, storage: _Storage, dtype: torch.dtype, view: StorageView) -> None:
        self.storage, self.dtype, self.view = storage, dtype, view


@torch.compiler.disable
def _take(kept: Tensor | _OffloadedTensor) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    back = kept.storage.take()
    return kept.view.read(torch.empty(0, dtype=kept.dtype, device=back.device).set_(back.untyped_storage()))


def _copy(
    to: Tensor, source: Tensor, device: torch.device, after: torch.cuda.Event | None = None
) -> torch.cuda.Event | None:
    """Copy on the stream of that direction, after the work that the device's current stream has queued; the event that marks the end. A CPU
    copies at once."""
    if device.type != "cuda":
        to.copy_(source)
        return None
    way = device, to.device
    if way not in _streams:
        _streams[way] = torch.cuda.Stream(device)
    stream = _streams[way]
    stream.wait_stream(torch.cuda.current_stream(device))
    if after is not None:
        stream.wait_event(after)
    with torch.cuda.stream(stream):
        to.copy_(source, non_blocking=True)
    return stream.record_event()


_latest: weakref.ref[_Call] | None = None
_going: _Call | None = None  # the latest call, until its copies have ended
_streams: dict[tuple[torch.device, torch.device], torch.cuda.Stream] = {}
