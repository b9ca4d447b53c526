"""Tensors saved for the backward pass as views of memory: which of them a hook may store elsewhere, and how to read them back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


def resident(layer: nn.Module, *here: Tensor) -> set[int]:
    """The addresses of what stays in memory anyway: the layer's parameters and buffers, and ``here``. At 0 there is nothing."""
    tensors = (*layer.parameters(), *layer.buffers(), *here)
    return {0, *(tensor.untyped_storage().data_ptr() for tensor in tensors)}


def moves(tensor: Tensor, stay: set[int]) -> bool:
    """Whether a saved tensor may be stored elsewhere: it has plain memory of its own, not at an address in ``stay``."""
    plain = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
    return plain and tensor.untyped_storage().data_ptr() not in stay


class StorageView(NamedTuple):
    """What of its storage a tensor reads. Tensors of one ``key`` read the same memory. ``steps`` are the strides, ``None`` if there are
    gaps between the elements, which are stored without them."""

    key: tuple[Any, ...]
    size: tuple[int, ...]
    steps: tuple[int, ...] | None

    @staticmethod
    def of(tensor: Tensor) -> StorageView:
        size, steps, span = tuple(tensor.size()), tensor.stride(), _span(tensor)
        dense = span <= tensor.numel()
        place = (tensor.storage_offset(), span) if dense else (tensor.storage_offset(), size, steps)
        key = (tensor.untyped_storage().data_ptr(), tensor.dtype, *place)
        return StorageView(key, size, steps if dense else None)

    def stored(self, tensor: Tensor) -> Tensor:
        """The elements that ``tensor`` reads, in the order of their memory, as one dim."""
        if self.steps is None:
            return tensor.detach().reshape(-1)
        return tensor.detach().as_strided((_span(tensor),), (1,))

    def read(self, stored: Tensor) -> Tensor:
        """The tensor again, as a view of what ``stored`` gave."""
        return stored.view(self.size) if self.steps is None else stored.as_strided(self.size, self.steps)


def _span(tensor: Tensor) -> int:
    """The elements from the first to the last one of a tensor in its storage."""
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    return 1 + sum((extent - 1) * step for extent, step in steps) if tensor.numel() else 0
