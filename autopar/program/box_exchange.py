"""Regroups ZeRO's small ranges of elements into large boxes before a checkpoint is written.

Under ZeRO each rank has a small range of each of many parameters, so all ranks together have millions of boxes: more than a checkpoint's
metadata can list. Before a checkpoint is written, the ranks of a ZeRO group exchange their ranges in rounds of bounded
memory: each rank receives complete rows of a few tensors, up to ``boxes.LARGEST`` bytes at a time, about as many bytes as it sends.
If several ZeRO groups have the same values, each exchanges only its share of the tensors.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import boxes
from .boxes import Piece, divided, pieces
from .collectives import exchange
from .parameters import Master
from .world import LoadedProgram, World


@dataclass(frozen=True, slots=True)
class Held:
    """Elements of a tensor that has a parameter's shape: those of ``master``."""

    path: tuple[str, ...]
    master: Master
    values: Tensor

    def pieces(self, world: World) -> Iterator[Piece]:
        window = self.master.layout.window(world.coordinates)
        yield from pieces(self.path, self.master.layout, window, self.values, self.master.first)


class UnequalStatesError(ValueError):
    """The ranks of a ZeRO group, or the parts of a parameter, have different kinds of optimizer state."""


def gathered(held: Sequence[Held], program: LoadedProgram, world: World) -> Iterator[Piece]:
    """Yield the pieces that this rank writes, so that every element is written once; all ranks call this, and consume the iterator.

    Raises ``UnequalStatesError`` at the end if ranks of a ZeRO group have different tensors of a parameter.
    """
    by_group: dict[tuple[str, ...], list[Held]] = {axes: [] for axes in _zero_axes(program, world)}
    for each in held:
        axes = program.placement(each.master.layout).shards
        if axes in by_group and not set(axes) <= set(each.master.alike):
            by_group[axes].append(each)
            continue
        for piece in each.pieces(world):
            yield from (part for part in divided(piece) if writes(part, each.master.alike, program, world))
    problems = []
    for axes, mine in sorted(by_group.items()):
        try:
            yield from _exchanged(mine, axes, program, world)
        except UnequalStatesError as error:  # other ranks wait for this one in the next group
            problems.append(error)
    if problems:
        raise problems[0]


def writes(piece: Piece, alike: Sequence[str], program: LoadedProgram, world: World) -> bool:
    """Return whether this rank writes a piece of which all ranks along the axes ``alike`` have a copy."""
    index, count = copy_of(alike, program, world)
    # with a parameter server, only the server has masters; otherwise the copies share the work
    return index == (0 if program.has_servers else zlib.crc32(repr((piece.path, piece.box.offsets)).encode()) % count)


def copy_of(alike: Sequence[str], program: LoadedProgram, world: World) -> tuple[int, int]:
    """Return this rank's index among the ranks with the same values, and their number. Local SGD replicas have different values."""
    return world.place_on(program.parted(list(alike))[0])


def _zero_axes(program: LoadedProgram, world: World) -> set[tuple[str, ...]]:
    """The axes of the ZeRO groups of this rank's stages; the same for every rank of the stages. Local SGD replicas have none."""
    if program.local_steps:
        return set()
    own = {
        placement.shards
        for layout in program.layouts
        if layout.stage in world.stages
        and (placement := program.placement(layout)).zero
        and placement.shards in program.reduced_over(layout)
    }
    return {axes for axes in own if math.prod(world.coordinates[axis][1] for axis in axes) > 1}


# -- which rank writes what -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupTensors:
    """The tensors of one parameter's shape in a ZeRO group: their paths and dtypes, the elements of the group's slice and of one row of
    it, and of each rank of the group that has some the first element and their number. ``copy`` is the group's place among ``copies``
    groups with the same values."""

    layout: int
    paths: tuple[tuple[tuple[str, ...], torch.dtype], ...]
    elements: int
    row: int
    ranges: Mapping[int, tuple[int, int]]
    copy: int
    copies: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Complete rows of a tensor, elements ``low`` to ``high`` of the slice, that the rank ``member`` of the group writes."""

    tensors: GroupTensors
    path: tuple[str, ...]
    dtype: torch.dtype
    low: int
    high: int
    member: int

    def overlap(self, rank: int) -> tuple[int, int]:
        """Return the elements that a rank of the group has; empty where the ends are equal."""
        first, count = self.tensors.ranges.get(rank, (0, 0))
        low = max(self.low, first)
        return low, max(low, min(self.high, first + count))


def rounds(every: Sequence[GroupTensors], members: int) -> Iterator[list[Chunk]]:
    """Yield the chunks of each round: each goes to the rank with the fewest bytes so far, which gets up to ``boxes.LARGEST`` bytes
    in a round, or one chunk. The same on every rank of the group."""
    loads = [(0, member) for member in range(members)]
    received = [0] * members
    found: list[Chunk] = []
    number = 0
    for tensors in every:
        for path, dtype in tensors.paths:
            step = max(boxes.LARGEST // (tensors.row * dtype.itemsize), 1) * tensors.row
            for low in range(0, tensors.elements, step):
                high, number = min(low + step, tensors.elements), number + 1
                if number % tensors.copies != tensors.copy:
                    continue
                load, member = loads[0]
                size = (high - low) * dtype.itemsize
                if received[member] and received[member] + size > boxes.LARGEST:
                    yield found
                    found, received = [], [0] * members
                heapq.heapreplace(loads, (load + size, member))
                received[member] += size
                found.append(Chunk(tensors, path, dtype, low, high, member))
    if found:
        yield found


# -- the exchange -----------------------------------------------------------------------------------------------------


def _exchanged(held: Sequence[Held], axes: tuple[str, ...], program: LoadedProgram, world: World) -> Iterator[Piece]:
    """Yield the pieces that this rank gets in the exchange with its ZeRO group over ``axes``."""
    group = world.group(axes)
    every = _tensors(held, axes, program, world, group)
    numbers = {layout: number for number, layout in enumerate(program.layouts)}
    values: dict[tuple[int, tuple[str, ...]], list[Held]] = {}  # parts of a fused parameter have one path
    for each in sorted(held, key=lambda each: each.master.first):
        values.setdefault((numbers[each.master.layout], each.path), []).append(each)
    for chunks in rounds(every, dist.get_world_size(group)):
        for chunk, received in _round(chunks, values, group, world.device):
            layout = program.layouts[chunk.tensors.layout]
            window = layout.window(world.coordinates)
            yield from pieces(chunk.path, layout, window, received.view(chunk.dtype), chunk.low)


def _round(
    chunks: Sequence[Chunk],
    values: Mapping[tuple[int, tuple[str, ...]], Sequence[Held]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[tuple[Chunk, Tensor]]:
    """Exchange these chunks; return those of this rank with their bytes."""
    members, me = range(dist.get_world_size(group)), dist.get_rank(group)
    sent = [(chunk.member, part) for chunk in chunks for part in _sent(chunk, values)]
    mine = [
        (c, torch.empty((c.high - c.low) * c.dtype.itemsize, dtype=torch.uint8, device=device))
        for c in chunks
        if c.member == me
    ]
    received = [(rank, _bytes(chunk, rank, into)) for chunk, into in mine for rank in members]
    exchange(sent, received, torch.uint8, device, group)
    return mine


def _bytes(chunk: Chunk, rank: int, received: Tensor) -> Tensor:
    """Return the bytes of a chunk that a rank of the group has: a view of them."""
    low, high = ((element - chunk.low) * chunk.dtype.itemsize for element in chunk.overlap(rank))
    return received[low:high]


def _sent(chunk: Chunk, values: Mapping[tuple[int, tuple[str, ...]], Sequence[Held]]) -> list[Tensor]:
    """Return this rank's bytes of a chunk, in order."""
    found = []
    for held in values.get((chunk.tensors.layout, chunk.path), ()):
        first = held.master.first
        low, high = max(chunk.low, first), min(chunk.high, first + held.values.numel())
        if low < high:
            found.append(held.values.view(-1)[low - first : high - first].view(torch.uint8))
    return found


def _tensors(
    held: Sequence[Held], axes: tuple[str, ...], program: LoadedProgram, world: World, group: dist.ProcessGroup
) -> list[GroupTensors]:
    """Return what the ranks of a ZeRO group have of each parameter, in one order."""
    kinds: dict[
        tuple[tuple[tuple[str, ...], str], ...], int
    ] = {}  # the tensors of a parameter, mostly those of all others
    mine = {number: (*whole, kinds.setdefault(kind, len(kinds))) for number, whole, kind in _ranges(held, program)}
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, (list(kinds), mine), group=group)
    found = []
    for number in sorted({number for _, theirs in every for number in theirs}):
        layout = program.layouts[number]
        window = layout.window(world.coordinates)
        there = {rank: (theirs[number], names) for rank, (names, theirs) in enumerate(every) if number in theirs}
        if len({names[kind] for (_, _, kind), names in there.values()}) != 1:
            raise UnequalStatesError(f"ranks have different states of {layout.original}")
        ranges = {rank: (first, count) for rank, ((first, count, _), _) in there.items()}
        elements = math.prod(extent for _, extent in window)
        if _ends(ranges.values()) != elements:
            raise UnequalStatesError(f"ranks have no consecutive parts of {layout.original}")
        (_, _, kind), names = next(iter(there.values()))
        paths = tuple(((what, layout.original, *key), getattr(torch, dtype)) for (what, *key), dtype in names[kind])
        same = [axis for axis in world.coordinates if axis not in axes and axis not in dict(layout.sharded)]
        row = math.prod(extent for _, extent in window[1:])
        found.append(GroupTensors(number, paths, elements, row, ranges, *copy_of(same, program, world)))
    return found


def _ends(ranges: Iterable[tuple[int, int]]) -> int | None:
    """Return the end of ranges that are consecutive from 0 on; ``None`` if they aren't."""
    end = 0
    for first, count in sorted(ranges):
        if first != end:
            return None
        end += count
    return end


def _ranges(
    held: Sequence[Held], program: LoadedProgram
) -> Iterator[tuple[int, tuple[int, int], tuple[tuple[tuple[str, ...], str], ...]]]:
    """Of each parameter that this rank has elements of: its number, the first element and their number, and its tensors with dtypes."""
    numbers = {layout: number for number, layout in enumerate(program.layouts)}
    found: dict[int, dict[tuple[tuple[str, ...], str], tuple[int, int]]] = {}
    for each in sorted(held, key=lambda each: each.master.first):
        if each.values.numel():
            kind = (each.path[0], *each.path[2:]), str(each.values.dtype).removeprefix("torch.")
            own = found.setdefault(numbers[each.master.layout], {})
            first, count = own.get(kind, (each.master.first, 0))
            assert first + count == each.master.first, each.path  # the parts of an offloaded master follow each other
            own[kind] = first, count + each.values.numel()
    for number, own in found.items():
        if len(set(own.values())) != 1:
            raise UnequalStatesError(f"parts of {program.layouts[number].original} have different states")
        yield number, next(iter(own.values())), tuple(sorted(own))
