"""Regroups ZeRO's small ranges of elements into large boxes (rectangular parts of a tensor) before a checkpoint is written.

Under ZeRO each rank has a small range of every parameter's elements. A checkpoint's metadata lists every box: millions of them if each rank
wrote its ranges. So the ranks of a ZeRO group exchange their ranges in rounds of bounded memory: each rank receives complete rows of
a few tensors, up to ``boxes.LARGEST`` bytes in a round, and in total about as many as it sends. If several groups have equal values, each
of them exchanges a part of the tensors.
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

Axes = tuple[str, ...]
TensorKinds = tuple[tuple[tuple[str, ...], str], ...]  # a parameter's tensors: paths without its name, and dtypes


@dataclass(frozen=True, slots=True)
class MasterValues:
    """This rank's values of a tensor that is sharded like ``master``: the parameter itself, or a tensor of its optimizer state."""

    path: tuple[str, ...]
    master: Master
    values: Tensor

    def pieces(self, world: World) -> Iterator[Piece]:
        window = self.master.layout.window(world.coordinates)
        yield from pieces(self.path, self.master.layout, window, self.values, self.master.first)


class UnequalStatesError(ValueError):
    """Raised if the ranks of a ZeRO group, or the parts of a parameter, have optimizer states with different keys or dtypes."""


def regrouped(tensors: Sequence[MasterValues], program: LoadedProgram, world: World) -> Iterator[Piece]:
    """Yield the pieces that this rank writes, so that every element is written once; all ranks call this, and consume the iterator.

    Raises ``UnequalStatesError`` at the end if the ranks of a ZeRO group have different optimizer states for a parameter.
    """
    by_group: dict[Axes, list[MasterValues]] = {axes: [] for axes in _zero_axes(program, world)}
    for tensor in tensors:
        axes = program.placement(tensor.master.layout).shards
        if axes in by_group and not set(axes) <= set(tensor.master.replicated_axes):
            by_group[axes].append(tensor)
            continue
        for piece in tensor.pieces(world):
            yield from (part for part in divided(piece) if writes(part, tensor.master.replicated_axes, program, world))
    problems = []
    for axes, sharded in sorted(by_group.items()):
        try:
            yield from _exchange(sharded, axes, program, world)
        except UnequalStatesError as error:  # go on: other ranks wait for this one in the next group
            problems.append(error)
    if problems:
        raise problems[0]


def writes(piece: Piece, replicated_axes: Sequence[str], program: LoadedProgram, world: World) -> bool:
    """Return whether this rank writes a piece that is replicated along ``replicated_axes``."""
    index, count = copy_index(replicated_axes, program, world)
    # with a parameter server, only the server has masters; otherwise the ranks with copies share the work
    return index == (0 if program.has_servers else zlib.crc32(repr((piece.path, piece.box.offsets)).encode()) % count)


def copy_index(replicated_axes: Sequence[str], program: LoadedProgram, world: World) -> tuple[int, int]:
    """Return this rank's index among the ranks along ``replicated_axes`` in its local SGD replica, which all have the same values, and the
    number of these ranks."""
    return world.place_on(program.split_local_sgd_axes(list(replicated_axes))[0])


def _zero_axes(program: LoadedProgram, world: World) -> set[Axes]:
    """Return the axes of the ZeRO groups of this rank's stages, the same on all ranks of the stages; none with local SGD."""
    if program.local_steps:
        return set()
    shards = {
        placement.shards
        for layout in program.layouts
        if layout.stage in world.stages
        and (placement := program.placement(layout)).zero
        and placement.shards in program.reduced_over(layout)
    }
    return {axes for axes in shards if math.prod(world.coordinates[axis][1] for axis in axes) > 1}


# -- which rank writes what -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupTensors:
    """One parameter's tensors (the parameter and its optimizer state) in a ZeRO group; ``layout`` is the index of the parameter's layout.

    ``paths`` are their names and dtypes; the group's slice has ``elements`` elements, and one row of it ``row`` elements. ``ranges`` maps
    a rank of the group to its first element of the slice and its number of elements; a rank without elements is missing. ``copy`` is the
    group's index among the ``copies`` groups with the same values."""

    layout: int
    paths: tuple[tuple[tuple[str, ...], torch.dtype], ...]
    elements: int
    row: int
    ranges: Mapping[int, tuple[int, int]]
    copy: int
    copies: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Complete rows of a tensor that rank ``member`` of the group writes: elements ``low`` to ``high`` (exclusive) of the slice."""

    tensors: GroupTensors
    path: tuple[str, ...]
    dtype: torch.dtype
    low: int
    high: int
    member: int

    def overlap(self, rank: int) -> tuple[int, int]:
        """Return the first and the end (exclusive) of the chunk's elements that a rank of the group has; equal if it has none."""
        first, count = self.tensors.ranges.get(rank, (0, 0))
        low = max(self.low, first)
        return low, max(low, min(self.high, first + count))


def rounds(parameters: Sequence[GroupTensors], members: int) -> Iterator[list[Chunk]]:
    """Yield the chunks of each round, the same on all ranks of the group. The rank with the fewest bytes so far gets the next chunk; in a
    round, a rank gets one chunk, or several with up to ``boxes.LARGEST`` bytes together."""
    loads = [(0, member) for member in range(members)]
    received = [0] * members
    chunks: list[Chunk] = []
    index = 0
    for tensors in parameters:
        for path, dtype in tensors.paths:
            step = max(boxes.LARGEST // (tensors.row * dtype.itemsize), 1) * tensors.row
            for low in range(0, tensors.elements, step):
                high, index = min(low + step, tensors.elements), index + 1
                if index % tensors.copies != tensors.copy:
                    continue
                load, member = loads[0]
                size = (high - low) * dtype.itemsize
                if received[member] and received[member] + size > boxes.LARGEST:
                    yield chunks
                    chunks, received = [], [0] * members
                heapq.heapreplace(loads, (load + size, member))
                received[member] += size
                chunks.append(Chunk(tensors, path, dtype, low, high, member))
    if chunks:
        yield chunks


# -- the exchange -----------------------------------------------------------------------------------------------------


def _exchange(tensors: Sequence[MasterValues], axes: Axes, program: LoadedProgram, world: World) -> Iterator[Piece]:
    """Yield the pieces that this rank receives from its ZeRO group over ``axes``."""
    group = world.group(axes)
    parameters = _group_tensors(tensors, axes, program, world)
    indices = {layout: index for index, layout in enumerate(program.layouts)}
    values: dict[tuple[int, tuple[str, ...]], list[MasterValues]] = {}  # parts of a fused parameter share one path
    for tensor in sorted(tensors, key=lambda tensor: tensor.master.first):
        values.setdefault((indices[tensor.master.layout], tensor.path), []).append(tensor)
    for chunks in rounds(parameters, dist.get_world_size(group)):
        for chunk, received in _exchange_round(chunks, values, group, world.device):
            layout = program.layouts[chunk.tensors.layout]
            window = layout.window(world.coordinates)
            yield from pieces(chunk.path, layout, window, received.view(chunk.dtype), chunk.low)


def _exchange_round(
    chunks: Sequence[Chunk],
    values: Mapping[tuple[int, tuple[str, ...]], Sequence[MasterValues]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[tuple[Chunk, Tensor]]:
    """Exchange the chunks of a round; return the chunks that this rank writes, with their bytes."""
    members, me = range(dist.get_world_size(group)), dist.get_rank(group)
    sent = [(chunk.member, part) for chunk in chunks for part in _sent_bytes(chunk, values)]
    written = [
        (c, torch.empty((c.high - c.low) * c.dtype.itemsize, dtype=torch.uint8, device=device))
        for c in chunks
        if c.member == me
    ]
    received = [(sender, _received_bytes(chunk, sender, buffer)) for chunk, buffer in written for sender in members]
    exchange(sent, received, torch.uint8, device, group)
    return written


def _received_bytes(chunk: Chunk, sender: int, buffer: Tensor) -> Tensor:
    """Return the part of a chunk's buffer that a rank of the group sends: a view."""
    low, high = ((element - chunk.low) * chunk.dtype.itemsize for element in chunk.overlap(sender))
    return buffer[low:high]


def _sent_bytes(chunk: Chunk, values: Mapping[tuple[int, tuple[str, ...]], Sequence[MasterValues]]) -> list[Tensor]:
    """Return this rank's bytes of a chunk, in order."""
    parts = []
    for tensor in values.get((chunk.tensors.layout, chunk.path), ()):
        first = tensor.master.first
        low, high = max(chunk.low, first), min(chunk.high, first + tensor.values.numel())
        if low < high:
            parts.append(tensor.values.view(-1)[low - first : high - first].view(torch.uint8))
    return parts


def _group_tensors(
    tensors: Sequence[MasterValues], axes: Axes, program: LoadedProgram, world: World
) -> list[GroupTensors]:
    """Return the tensors that a ZeRO group has of each parameter, in the same order on all ranks of the group.
    Raises ``UnequalStatesError`` on all of them."""
    group = world.group(axes)
    kinds: dict[TensorKinds, int] = {}  # equal for most parameters, so each is sent once
    local: dict[int, tuple[int, int, int]] = {}
    problem = ""
    try:
        local = {index: (*part, kinds.setdefault(kind, len(kinds))) for index, part, kind in _ranges(tensors, program)}
    except UnequalStatesError as error:  # the group's other ranks wait for this one
        problem = str(error)
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (problem, list(kinds), local), group=group)
    if problems := [problem for problem, _, _ in gathered if problem]:
        raise UnequalStatesError(problems[0])
    ranks = [(rank_kinds, parts) for _, rank_kinds, parts in gathered]
    found = []
    for index in sorted({index for _, parts in ranks for index in parts}):
        layout = program.layouts[index]
        window = layout.window(world.coordinates)
        states = {rank_kinds[parts[index][2]] for rank_kinds, parts in ranks if index in parts}
        if len(states) != 1:
            raise UnequalStatesError(f"ranks have different states of {layout.original}")
        ranges = {rank: parts[index][:2] for rank, (_, parts) in enumerate(ranks) if index in parts}
        elements = math.prod(extent for _, extent in window)
        if _end_of_consecutive(ranges.values()) != elements:
            raise UnequalStatesError(f"the ranks' parts of {layout.original} are not consecutive")
        paths = tuple(((root, layout.original, *key), getattr(torch, dtype)) for (root, *key), dtype in states.pop())
        replicated_axes = [axis for axis in world.coordinates if axis not in axes and axis not in dict(layout.sharded)]
        row = math.prod(extent for _, extent in window[1:])
        found.append(GroupTensors(index, paths, elements, row, ranges, *copy_index(replicated_axes, program, world)))
    return found


def _end_of_consecutive(ranges: Iterable[tuple[int, int]]) -> int | None:
    """Return the end of ranges that are consecutive from 0 on; ``None`` if they aren't."""
    end = 0
    for first, count in sorted(ranges):
        if first != end:
            return None
        end += count
    return end


def _ranges(
    tensors: Sequence[MasterValues], program: LoadedProgram
) -> Iterator[tuple[int, tuple[int, int], TensorKinds]]:
    """Yield, for each parameter with elements on this rank, its layout's index, its range here (first element, count), and its tensors."""
    indices = {layout: index for index, layout in enumerate(program.layouts)}
    found: dict[int, dict[tuple[tuple[str, ...], str], tuple[int, int]]] = {}
    for tensor in sorted(tensors, key=lambda tensor: tensor.master.first):
        if tensor.values.numel():
            kind = (tensor.path[0], *tensor.path[2:]), str(tensor.values.dtype).removeprefix("torch.")
            ranges = found.setdefault(indices[tensor.master.layout], {})
            first, count = ranges.get(kind, (tensor.master.first, 0))
            assert first + count == tensor.master.first, tensor.path  # the parts of an offloaded master are consecutive
            ranges[kind] = first, count + tensor.values.numel()
    for index, ranges in found.items():
        if len(set(ranges.values())) != 1:
            raise UnequalStatesError(f"parts of {program.layouts[index].original} have different states")
        yield index, next(iter(ranges.values())), tuple(sorted(ranges))
