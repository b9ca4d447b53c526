"""Saved activations in 8 bits: what a layer saves for its backward pass is stored as integers, and restored when the backward reads it.

Numbers are rounded in blocks of ``BLOCK`` that follow each other in memory: one float32 scale for each block, its largest magnitude / 127.
So zeros stay zeros, and each number is within 1/254 of the largest one of its block. A plan rounds as one device does where the pieces of
memory that a device has of a tensor are whole blocks. -infinity has a code of its own; in a block with NaN or infinity every number is NaN.

Parameters, buffers, the layer's arguments, integers, and tensors of fewer than ``LEAST`` elements stay as they are. Tensors of the same
memory are rounded once, and are views of one restored tensor until the last of them is read. The values of the forward pass do not change,
gradients do: ``allow={"int8_activations"}`` gives that exactness up. This file has not run on a GPU yet.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F  # noqa: N812  torch's own convention

from .saved_views import StorageView, moves, resident

BLOCK = 64
LEAST = 1024
CHUNK = 2**22
"""Elements that are rounded or restored at a time where that takes several kernels, and so tensors in between."""


@contextmanager
def saved(layer: nn.Module, *here: Tensor, fused: bool = False) -> Iterator[None]:
    """A context in which autograd's saved tensors are stored in 8 bits, except the layer's parameters and ``here``. ``fused``: rounded and
    restored by one compiled kernel each."""
    stay = resident(layer, *here)
    known: dict[tuple[Any, ...], tuple[StorageWeakRef, _Rounded]] = {}

    @torch.compiler.disable  # torch.compile would compile the rounding into the layer
    @torch.no_grad()
    def put(tensor: Tensor) -> Tensor | _RoundedTensor:
        if not tensor.is_floating_point() or not moves(tensor, stay):
            return tensor
        view = StorageView.of(tensor)
        if (stored := view.stored(tensor)).numel() < LEAST:
            return tensor
        if view.key not in known or known[view.key][0].expired():  # another tensor may have come to be at this address
            known[view.key] = StorageWeakRef(tensor.untyped_storage()), _Rounded(stored, fused)
        return _RoundedTensor(view, known[view.key][1])

    with torch.autograd.graph.saved_tensors_hooks(put, _take):
        yield


class _Rounded:
    """A tensor of one dim in 8 bits, and restored once the backward has read it."""

    def __init__(self, tensor: Tensor, fused: bool) -> None:
        self.dtype, self.numel, self.fused = tensor.dtype, tensor.numel(), fused
        blocks = math.ceil(self.numel / BLOCK)
        if fused:
            self.codes, self.scales = _compiled(rounded)(_in_blocks(tensor))
        else:
            self.codes = torch.empty(blocks, BLOCK, dtype=torch.int8, device=tensor.device)
            self.scales = torch.empty(blocks, 1, dtype=torch.float32, device=tensor.device)
            for at, some in enumerate(tensor.split(CHUNK)):
                rows = slice(at * CHUNK // BLOCK, at * CHUNK // BLOCK + math.ceil(some.numel() / BLOCK))
                self.codes[rows], self.scales[rows] = rounded(_in_blocks(some))
        self.codes = self.codes.view(-1)[: self.numel]
        self.whole: Tensor | None = None

    def restore(self) -> Tensor:
        if self.whole is None:
            codes = _in_blocks(self.codes)
            if self.fused:
                self.whole = _compiled(restored)(codes, self.scales, self.dtype).view(-1)[: self.numel]
            else:
                self.whole = torch.empty(codes.shape, dtype=self.dtype, device=codes.device)
                rows = CHUNK // BLOCK
                parts = zip(self.whole.split(rows), codes.split(rows), self.scales.split(rows), strict=True)
                for part, some, scales in parts:
                    part.copy_(restored(some, scales, torch.float32))
                self.whole = self.whole.view(-1)[: self.numel]
        return self.whole


class _RoundedTensor:
    """A saved tensor, as a view of a rounded one."""

    def __init__(self, view: StorageView, stored: _Rounded) -> None:
        self.view, self.stored = view, stored


@torch.compiler.disable
@torch.no_grad()
def _take(kept: Tensor | _RoundedTensor) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.view.read(kept.stored.restore())


def rounded(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of ``blocks`` ``[n, BLOCK]``, and the blocks' scales ``[n, 1]``; -128 stands for -infinity."""
    wide = blocks.float()
    finite = torch.nan_to_num(wide, nan=math.nan, posinf=math.inf, neginf=0.0)
    scales = torch.linalg.vector_norm(finite, math.inf, dim=1, keepdim=True) / 127
    codes = (wide / scales.clamp(min=torch.finfo(torch.float32).tiny)).round_().clamp_(min=-128)
    return codes.to(torch.int8), scales


def restored(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that ``codes`` stand for."""
    return (codes * scales).masked_fill_(codes == -128, -math.inf).to(dtype)


def _in_blocks(tensor: Tensor) -> Tensor:
    """A tensor of one dim as ``[n, BLOCK]``, with zeros behind its end."""
    return F.pad(tensor, (0, -tensor.numel() % BLOCK)).view(-1, BLOCK)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)
