"""Optimizer states outside of the device's memory: in the host's memory, or in a file on the node's NVMe.

If the plan says so (``states`` of a layer), the master copies and optimizer states of the layer's parameters are tensors on the CPU, which
updates them chunk by chunk: a chunk's gradients are copied from the device, the optimizer updates the chunk, and its new values are copied
back. On a GPU each direction has two buffers in pinned memory, each with its stream, so the next chunk's gradients and the last chunk's
values are copied during an update. The device stores only the parameters and the gradients (ZeRO-Offload, Ren et al. 2021,
arXiv:2101.06840). If the device is a CPU, the copies are made, too.

States on NVMe are memory-mapped (ZeRO-Infinity, Rajbhandari et al. 2021, arXiv:2104.07857, and PatrickStar, Fang et al. 2021,
arXiv:2108.05818, move them in chunks, too): the operating system reads the next chunk's pages during an update, and writes changed
pages back while training continues. The file is unlinked, so it disappears however the process ends: only checkpoints persist.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import IO

import torch
from torch import Tensor, nn

from .parameters import Master, Offloaded
from .processes import StartError, nvme_folder

NVME = "nvme"
CHUNK_BYTES = 32 * 2**20  # the largest chunk of masters, and the size of a transfer buffer
_MIN_GROWTH_BYTES, _MAX_GROWTH_BYTES = 16 * 2**20, 2**30  # of the file, unless a tensor is larger


class PlaceError(StartError):
    """Raised if optimizer states can't be stored where the plan puts them."""


# -- memory -----------------------------------------------------------------------------------------------------------


@dataclass
class StateStorage:
    """Stores a rank's masters and optimizer states that are not on the device: in the host's memory, or on NVMe in a file in ``folder``,
    which is created for the first such tensor."""

    folder: str = ""
    _file: _MappedFile | None = field(default=None, init=False)

    def zeros(self, place: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor of zeros. Raises ``StartError`` if no NVMe folder is set, or the file can't grow there."""
        if place != NVME:
            return torch.zeros(tuple(shape), dtype=dtype)
        if self._file is None:
            self._file = _MappedFile(nvme_folder(self.folder))
        return self._file.zeros(shape, dtype)

    @staticmethod
    def divided(flat: Master, place: str, values: Tensor, gradient: Tensor | None = None) -> Iterator[Master]:
        """Divide a flat master in ``place`` into masters of at most a chunk. ``values`` and ``gradient`` are the device's tensors; without
        ``gradient`` every step sets the ``grad`` of each piece's ``holder``."""
        for start, stop in pieces_of(values.numel(), flat.tensor.dtype):
            here = slice(start, stop)
            holder = nn.Parameter((values if gradient is None else gradient)[here])  # it shares the device's memory
            holder.grad = None if gradient is None else gradient[here]
            offloaded = Offloaded(place, holder, values[here])
            tensor = nn.Parameter(flat.tensor.detach()[here])
            yield Master(flat.layout, tensor, flat.replicated_axes, flat.first + start, offloaded)

    def updates(
        self, optimizer: torch.optim.Optimizer, masters: Sequence[Master], device: torch.device, single_chunk: bool
    ) -> OffloadedUpdates | None:
        """Return the object that updates ``masters``, or ``None`` if all of them are on the device."""
        if all(master.offloaded is None for master in masters):
            return None
        return OffloadedUpdates(optimizer, masters, self, device, single_chunk)

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in the file."""
        return self._file is not None and self._file.has(tensor)

    def move_to_file(self, optimizer: torch.optim.Optimizer, master: Master) -> None:
        """Move the states that an optimizer created for a master into the file, if the master's place is NVMe."""
        if master.offloaded is None or master.offloaded.place != NVME:
            return  # the optimizer has created them in the right place: where the parameter is
        state = optimizer.state.get(master.tensor, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == master.tensor.shape and not self.has(value):
                state[key] = self.zeros(NVME, value.shape, value.dtype).copy_(value)

    def prefetch(self, tensors: Iterable[Tensor]) -> None:
        """Begin to read tensors from the file that will be needed soon."""
        if self._file is not None:
            self._file.advise(tensors, mmap.MADV_WILLNEED)

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Free the memory of tensors in the file until they are read again; the operating system writes changed pages to the file."""
        if self._file is not None:
            self._file.advise(tensors, mmap.MADV_DONTNEED)


class _MappedFile:
    """An unlinked file, mapped into memory part by part as it grows; tensors begin at page boundaries."""

    def __init__(self, folder: str) -> None:
        self._folder, self._size, self._used = folder, 0, 0
        self._parts: list[tuple[int, mmap.mmap, Tensor]] = []  # the address, the mapping, its bytes
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  it lives as long as the tensors
        except OSError as error:
            raise PlaceError(
                f"optimizer states cannot be kept in {folder}: {error}", "name a folder on the node's NVMe"
            ) from error

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        if not size:
            return torch.zeros(tuple(shape), dtype=dtype)
        if not self._parts or self._used + size > self._parts[-1][2].numel():
            self._grow(size)
        part = self._parts[-1][2][self._used : self._used + size]
        self._used += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        return part.view(dtype).view(tuple(shape))

    def _grow(self, size: int) -> None:
        least = min(max(_MIN_GROWTH_BYTES, self._size), _MAX_GROWTH_BYTES)
        more = max(-(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY, least)
        try:
            os.posix_fallocate(
                self._file.fileno(), self._size, more
            )  # a full disk raises an error here; later, a write would end the process by a signal
        except OSError as error:
            gb = f"{(self._size + more) / 1e9:.3g} GB"
            full = "is full" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else str(error)
            raise PlaceError(
                f"the optimizer states of this rank need {gb} in {self._folder}: {full}",
                "make room, or name another folder",
            ) from error
        mapping = mmap.mmap(self._file.fileno(), more, offset=self._size)
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        self._parts.append((memory.data_ptr(), mapping, memory))
        self._size, self._used = self._size + more, 0

    def has(self, tensor: Tensor) -> bool:
        return self._place(tensor) is not None

    def _place(self, tensor: Tensor) -> tuple[mmap.mmap, int] | None:
        """Return the mapping that contains a tensor, and the tensor's offset in it; ``None`` if it is in none."""
        at = tensor.data_ptr()
        for begin, mapping, memory in self._parts:
            if begin <= at < begin + memory.numel():
                return mapping, at - begin
        return None

    def advise(self, tensors: Iterable[Tensor], what: int) -> None:
        for tensor in tensors:
            found = self._place(tensor)
            if found is not None:
                mapping, at = found
                begin = at // mmap.PAGESIZE * mmap.PAGESIZE
                mapping.madvise(what, begin, at + tensor.nbytes - begin)


def pieces_of(elements: int, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """Return the ranges that divide ``elements`` elements into masters of at most a chunk each."""
    step = CHUNK_BYTES // dtype.itemsize
    return ((low, min(low + step, elements)) for low in range(0, elements, step))


# -- updates ----------------------------------------------------------------------------------------------------------


class OffloadedUpdates:
    """Updates this rank's masters; those that are not on the device are updated chunk by chunk.

    An optimizer skips parameters without a gradient: while it updates a chunk, only the chunk's masters have gradients. With
    ``single_chunk``, for optimizers that may count the calls of ``step``, all masters, including those on the device, are one chunk.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        masters: Sequence[Master],
        places: StateStorage,
        device: torch.device,
        single_chunk: bool,
    ) -> None:
        self._optimizer, self._places = optimizer, places
        offloaded = [master for master in masters if master.offloaded is not None]
        self._on_device = [] if single_chunk else [master for master in masters if master.offloaded is None]
        self._chunks = [offloaded] if single_chunk else list(_chunks(offloaded))
        size = max(sum(master.tensor.nbytes for master in chunk) for chunk in self._chunks)
        self._buffers = [_TransferBuffers(size, device) for _ in self._chunks[:2]]
        self._threads = _threads() if device.type == "cuda" else 0
        for master in masters:
            places.move_to_file(optimizer, master)  # Adagrad creates its states in its constructor

    @torch.no_grad()
    def step(self) -> None:
        """Update all masters by their gradients; the device's current stream waits for the new values."""
        with _many_threads(self._threads):
            if any(master.tensor.grad is not None for master in self._on_device):
                self._optimizer.step()
            with _without_gradients(self._on_device):
                self._update_chunks()

    def _update_chunks(self) -> None:
        self._fetch(0)
        for number, chunk in enumerate(self._chunks):
            buffers = self._buffers[number % 2]
            if number + 1 < len(self._chunks):
                self._fetch(number + 1)
            for master, gradient in zip(chunk, buffers.arrived(), strict=True):
                master.tensor.grad = gradient
            self._optimizer.step()
            for master in chunk:
                master.tensor.grad = None
                self._places.move_to_file(self._optimizer, master)
            buffers.send(chunk)
            self._places.release(self._tensors(chunk))
        for buffers in self._buffers:
            buffers.finish()

    def _fetch(self, number: int) -> None:
        self._places.prefetch(self._tensors(self._chunks[number]))
        self._buffers[number % 2].fetch(self._chunks[number])

    def _tensors(self, chunk: Sequence[Master]) -> Iterator[Tensor]:
        """Yield the masters of a chunk, and their states on the CPU."""
        for master in chunk:
            yield master.tensor
            yield from (value for value in self._optimizer.state.get(master.tensor, {}).values() if _on_cpu(value))


def _on_cpu(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"


@contextmanager
def _without_gradients(masters: Sequence[Master]) -> Iterator[None]:
    """Remove the gradients of these masters inside this context."""
    gradients = [master.tensor.grad for master in masters]
    for master in masters:
        master.tensor.grad = None
    yield
    for master, gradient in zip(masters, gradients, strict=True):
        master.tensor.grad = gradient


def _threads() -> int:
    """Return this process's share of the node's processors: ``torchrun`` gives each process only one thread."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@contextmanager
def _many_threads(number: int) -> Iterator[None]:
    """Run torch's ops on the CPU with at least ``number`` threads inside this context."""
    before = torch.get_num_threads()
    if number > before:
        torch.set_num_threads(number)
    yield
    if number > before:
        torch.set_num_threads(before)


def _chunks(masters: Sequence[Master]) -> Iterator[list[Master]]:
    chunk: list[Master] = []
    size = 0
    for master in masters:
        if chunk and size + master.tensor.nbytes > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(master)
        size += master.tensor.nbytes
    if chunk:
        yield chunk


class _TransferBuffers:
    """The transfer buffers of a chunk, pinned on GPUs: for gradients from the device, and for values to the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._down, self._up = (torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(2))
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if self._cuda else []
        self._gradients: list[Tensor] = []
        self._gradients_ready: torch.cuda.Event | None = None
        self._values_copied: torch.cuda.Event | None = None

    def fetch(self, chunk: Sequence[Master]) -> None:
        """Begin to copy the chunk's gradients from the device."""
        self._gradients = _views(self._down, [master.tensor for master in chunk])
        if not self._cuda:
            self._copy_down(chunk)
            return
        stream = self._streams[0]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._copy_down(chunk)
        self._gradients_ready = stream.record_event()

    def _copy_down(self, chunk: Sequence[Master]) -> None:
        for master, there in zip(chunk, self._gradients, strict=True):
            assert master.offloaded is not None
            gradient = master.offloaded.gradient.grad
            assert gradient is not None, master.layout.name
            there.copy_(gradient.view(there.shape), non_blocking=True)

    def arrived(self) -> list[Tensor]:
        """Wait for the gradients, and return them."""
        if self._gradients_ready is not None:
            self._gradients_ready.synchronize()
        return self._gradients

    def send(self, chunk: Sequence[Master]) -> None:
        """Begin to copy the chunk's new values to the device."""
        if self._values_copied is not None:
            self._values_copied.synchronize()  # until the last values of this buffer have been copied
        targets = [master.offloaded.values for master in chunk if master.offloaded is not None]
        for master, there in zip(chunk, staged := _views(self._up, targets), strict=True):
            there.copy_(master.tensor.view(there.shape))  # converts to the dtype of the parameters
        if self._cuda:
            # work on the current stream may still read the old values
            self._streams[1].wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._streams[1]) if self._cuda else nullcontext():
            for target, values in zip(targets, staged, strict=True):
                target.copy_(values, non_blocking=True)
        self._values_copied = self._streams[1].record_event() if self._cuda else None

    def finish(self) -> None:
        """Make the device's current stream wait for the values."""
        if self._values_copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._values_copied)


def _views(memory: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return parts of a buffer as tensors of these shapes and dtypes, each aligned to its elements' size."""
    found, at = [], 0
    for tensor in sorted(like, key=lambda tensor: -tensor.element_size()):
        assert at % tensor.element_size() == 0
        found.append((tensor, memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)))
        at += tensor.nbytes
    places = {id(tensor): view for tensor, view in found}
    return [places[id(tensor)] for tensor in like]
