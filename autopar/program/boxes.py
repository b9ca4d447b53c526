"""Divides a rank's shards of the model's tensors into boxes, the form in which checkpoints store them under any plan.

A rank has its slice of a parameter, or under ZeRO a range of the slice's elements. A *box* is a rectangular part of the original tensor,
without padding: the form in which ``torch.distributed.checkpoint`` writes and reads parts of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .world import Layout

LARGEST = 64 * 2**20
"""Bytes of the largest box in a checkpoint: ``torch.distributed.checkpoint`` reads complete boxes, even if it needs little of one."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: its first element along every dim, and its size."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """This rank's ``values`` in a box (a view), and the ``path`` and full ``shape`` of the tensor in a checkpoint."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    box: Box
    values: Tensor

    @property
    def name(self) -> str:
        return ".".join(self.path)


def full_piece(path: tuple[str, ...], values: Tensor) -> Piece:
    """Return a piece that covers the full tensor ``values``."""
    shape = tuple(values.shape)
    return Piece(path, shape, Box((0,) * len(shape), shape), values)


def part_of(tensor: Tensor, box: Box) -> Tensor:
    """Return a view of the part of a tensor that is in a box."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def cut(shape: Sequence[int], low: int, high: int) -> Iterator[Box]:
    """Yield the boxes that cover the elements ``low`` to ``high`` (exclusive, in row-major order) of a tensor of this shape, in that order.

    A range of a matrix is at most three boxes: the end of a row, complete rows, the beginning of a row. With more dims, an incomplete row
    is cut in the same way.
    """
    if low >= high:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-low // row), high // row  # the complete rows
    if first > last:  # the range is inside one row
        yield from _in_row(shape, last, low - last * row, high - last * row)
        return
    if low < first * row:
        yield from _in_row(shape, first - 1, low - (first - 1) * row, row)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _in_row(shape, last, 0, high - last * row)


def _in_row(shape: Sequence[int], index: int, low: int, high: int) -> Iterator[Box]:
    for box in cut(shape[1:], low, high):
        yield Box((index, *box.offsets), (1, *box.sizes))


def pieces(
    path: tuple[str, ...], layout: Layout, window: Sequence[tuple[int, int]], values: Tensor, first: int
) -> Iterator[Piece]:
    """Yield the pieces of an original parameter (or of a tensor of its shape) that this rank has, without padding. ``path[1]`` is the
    parameter's name: the pieces of a stacked one have the names of the user's parameters.

    ``window`` is the rank's slice of the stored parameter (``Layout.window``); ``values`` are consecutive elements of the slice, in
    row-major order, and ``first`` is the index of their first element.
    """
    flat, at = values.view(-1), 0
    for box in cut([extent for _, extent in window], first, first + flat.numel()):
        count = math.prod(box.sizes)
        view = flat[at : at + count].view(box.sizes)
        at += count
        offsets, sizes = [], []
        for dim, (start, _) in enumerate(window):
            offset = start + box.offsets[dim]
            size = max(0, min(box.sizes[dim], layout.shape[dim] - offset))
            view = view.narrow(dim, 0, size)
            offsets.append(offset)
            sizes.append(size)
        if layout.part is not None:
            offsets[layout.part[0]] += layout.part[1]
        if not view.numel():
            continue
        if not layout.stacked:
            yield Piece(path, layout.original_shape, Box(tuple(offsets), tuple(sizes)), view)
            continue
        inside = Box(tuple(offsets[1:]), tuple(sizes[1:]))
        for name, entry in zip(layout.stacked[offsets[0] :], view, strict=False):
            yield Piece((path[0], name, *path[2:]), layout.original_shape, inside, entry)


def divided(piece: Piece, limit: int | None = None) -> Iterator[Piece]:
    """Yield the piece in boxes of up to ``limit`` bytes (default: ``LARGEST``), divided along the first dim of size above one."""
    sizes = piece.box.sizes
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), None)
    parts = -(-piece.values.nbytes // (limit or LARGEST))
    if dim is None or parts <= 1:
        yield piece
        return
    step = -(-sizes[dim] // parts)
    for start in range(0, sizes[dim], step):
        length = min(step, sizes[dim] - start)
        offsets = [*piece.box.offsets]
        offsets[dim] += start
        box = Box(tuple(offsets), (*sizes[:dim], length, *sizes[dim + 1 :]))
        yield from divided(replace(piece, box=box, values=piece.values.narrow(dim, start, length)), limit)
