"""Sets this rank's shards of the user's model from full tensors, draws them at random, and gathers them on rank 0.

Under every plan, a rank's shard of a tensor is a set of boxes (``boxes``). So checkpoints, weights, state dicts and initial values are
all loops over a rank's pieces.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .box_exchange import MasterValues
from .boxes import Box, Piece, divided, full_piece, part_of
from .collectives import exchange
from .optimizers import Updates
from .parameters import Master, ParameterGroup, upload
from .state import other_names
from .weights import runs
from .world import BufferRecord, Layout, LoadedProgram, World

_CHUNK = 1 << 16  # numbers to draw at a time, so that intermediate results stay in the processor's cache
_ROUND_BYTES = 256 * 2**20  # about the bytes that rank 0 receives at a time, from all other ranks together


class SavedBuffers(Protocol):
    """The interface of ``buffers.StageBuffers`` that this module needs."""

    def own(self) -> list[tuple[BufferRecord, Tensor]]: ...


def _value(master: Master) -> Tensor | None:
    return master.tensor.detach()


@dataclass(frozen=True)
class TrainingTensors:
    """This rank's tensors of a training: parameters, buffers that the model writes, and the optimizer's state (``updates``)."""

    program: LoadedProgram
    world: World
    groups: Sequence[ParameterGroup]
    buffers: SavedBuffers | None
    updates: Updates | None  # ``None`` while initial values are set: there is no optimizer yet

    def master_values(self, of: Callable[[Master], Tensor | None] = _value) -> Iterator[MasterValues]:
        """Yield ``of(master)`` (by default the values) for each of this rank's masters, frozen parameters included; skip ``None``."""
        for group in self.groups:
            for master in (*group.masters, *group.frozen):
                values = of(master)
                if values is not None:
                    yield MasterValues(("model", master.layout.original), master, values)

    def parameters(
        self, *, once: bool = False, of: Callable[[Master], Tensor | None] = _value
    ) -> Iterator[tuple[Layout, Piece]]:
        """Yield the pieces of ``master_values``. With ``once`` each element is yielded by one rank only (in each local SGD replica), and a
        tied parameter's elements only by its first copy."""
        for tensor in self.master_values(of):
            layout = tensor.master.layout
            if not once or self.world.first_on(tensor.master.replicated_axes) and self.program.is_first_copy(layout):
                yield from ((layout, piece) for piece in tensor.pieces(self.world))

    def written(self, *, copies: bool = False) -> Iterator[Piece]:
        """Yield the buffers that this rank's stages write; with ``copies`` also those that other stages write and these only read."""
        for record, tensor in () if self.buffers is None else self.buffers.own():
            if copies or record.written:
                yield full_piece(("model" if record.persistent else "buffer", record.original), tensor)

    def all_pieces(self) -> list[Piece]:
        """Return this rank's pieces of all parameters and buffers."""
        return [*(piece for _, piece in self.parameters()), *self.written(copies=True)]

    def pieces_once(self) -> Iterator[Piece]:
        """Yield this rank's pieces of the model's state dict; each element is yielded by one rank only, as in ``parameters(once=True)``."""
        yield from (piece for _, piece in self.parameters(once=True))
        if self.world.first_on(self.world.coordinates):
            yield from (piece for piece in self.written() if piece.path[0] == "model")

    def replica(self) -> tuple[int, int]:
        """Return the index of this rank's local SGD replica, and the number of replicas."""
        return self.world.place_on(self.program.split_local_sgd_axes(list(self.program.spec.mesh))[1])

    @torch.no_grad()
    def fill(self, source: Callable[[Layout], Tensor], buffers: Mapping[str, Tensor] | None = None) -> None:
        """Set masters from full tensors (``source``), and buffers by name; the caller then calls ``copy_masters_to_parameters``. Raises
        ``ValueError`` for wrong shapes of parameters."""
        last, full = None, torch.empty(0)
        for layout, piece in self.parameters():
            name = piece.path[1]
            if (layout, name) != last:
                last, full = (layout, name), source(layout.of(name))
                if tuple(full.shape) != piece.shape:
                    raise ValueError(f"{name} has shape {tuple(full.shape)}, the program {piece.shape}")
            piece.values.copy_(part_of(full, piece.box))
        given = buffers or {}
        for piece in (piece for piece in self.written(copies=True) if piece.path[1] in given):
            piece.values.copy_(given[piece.path[1]])

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """Draw this rank's shards of all parameters at random; the caller then calls ``copy_masters_to_parameters``.

        Matrices are normal with standard deviation 0.02, vectors named ``...weight`` are ones (a norm's scale), other vectors zeros. A
        number depends on the seed, the parameter's original name and the element's index, not on the plan; a rank draws only its shards.
        """
        for _, piece in self.parameters():
            if len(piece.shape) < 2:
                piece.values.fill_(float(piece.name.endswith("weight")))
            else:
                _fill(piece, seed)

    def copy_masters_to_parameters(self) -> None:
        """Copy the masters into the parameters that the stages read. All ranks call this after anything but an update sets masters."""
        for group in self.groups:
            upload(group.masters)
            group.publish()
        if self.updates is not None:
            self.updates.read_masters()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the unsharded parameters and written buffers, each under all its names, on the CPU of rank 0; nothing on other ranks.
        Parameters of local SGD replicas are averaged. All ranks call this."""
        state = self._full_tensors(self.program.layouts, self.pieces_once())
        for layout in self.program.layouts:
            if layout.original in state:
                state.update(dict.fromkeys(layout.tied, state[layout.original]))
        return state | {name: state[same] for name, same in other_names(self.program.records, state).items()}

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the trained parameters, as ``state_dict`` returns the parameters."""
        own = (piece for _, piece in self.parameters(once=True, of=lambda master: master.gradient))
        return self._full_tensors([layout for layout in self.program.layouts if layout.trainable], own)

    @torch.no_grad()
    def _full_tensors(self, layouts: Sequence[Layout], own: Iterable[Piece]) -> dict[str, Tensor]:
        """Return on rank 0 the full tensors of ``layouts``, and of all other tensors among the ranks' pieces."""
        found: dict[str, Tensor] = {}
        averaged: set[str] = set()
        if dist.get_rank() == 0:
            for layout in layouts:
                dtype = self.program.placement(layout).master_dtype
                found |= {name: torch.zeros(layout.original_shape, dtype=dtype) for name in layout.originals}
            averaged = {name for x in layouts if x.trainable and self.replica()[1] > 1 for name in x.originals}
        for piece in gathered(own, self.world):
            name = piece.path[1]
            if name not in found:
                found[name] = torch.empty(piece.shape, dtype=piece.values.dtype)
            part = part_of(found[name], piece.box)
            part.add_(piece.values.cpu()) if name in averaged else part.copy_(piece.values)
        for name in averaged:
            found[name] /= self.replica()[1]
        return found


def gathered(own: Iterable[Piece], world: World) -> Iterator[Piece]:
    """Send the pieces of all ranks to rank 0, and yield them there; all ranks call this, and consume the iterator. Rank 0 receives a
    bounded number of bytes at a time."""
    limit = max(_ROUND_BYTES // dist.get_world_size(), 2**18)
    mine: list[Piece] = []
    if dist.get_rank() == 0:
        yield from own
    else:
        mine += (part for piece in own for part in divided(piece, limit))
    described = [(p.path, p.shape, p.box.offsets, p.box.sizes, p.values.dtype) for p in mine]
    every: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(described, every)
    rounds, others = _rounds(mine, limit), [_rounds(map(_meta_piece, theirs), limit) for theirs in every or ()]
    count = torch.tensor(len(rounds), device=world.device)
    dist.all_reduce(count, dist.ReduceOp.MAX)
    for number in range(int(count)):
        coming = [
            (rank, replace(piece, values=torch.empty_like(piece.values, device=world.device)))
            for rank, theirs in enumerate(others)
            for piece in (theirs[number] if number < len(theirs) else ())
        ]
        sent = [(0, _bytes(piece.values)) for piece in (rounds[number] if number < len(rounds) else ())]
        exchange(sent, [(rank, _bytes(piece.values)) for rank, piece in coming], torch.uint8, world.device)
        yield from (piece for _, piece in coming)


def _rounds(own: Iterable[Piece], limit: int) -> list[list[Piece]]:
    """Divide pieces, in order, into lists of about ``limit`` bytes."""
    found: list[list[Piece]] = []
    size = limit
    for piece in own:
        if size >= limit:
            found.append([])
            size = 0
        found[-1].append(piece)
        size += piece.values.nbytes
    return found


def _meta_piece(described: tuple[Any, ...]) -> Piece:
    path, shape, offsets, sizes, dtype = described
    return Piece(path, shape, Box(offsets, sizes), torch.empty(sizes, dtype=dtype, device="meta"))


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


def _fill(piece: Piece, seed: int) -> None:
    """Draw the elements of a box, one run of consecutive elements of the full tensor after the other."""
    digest = hashlib.sha256(f"{seed} {piece.path[-1]}".encode()).digest()
    key = int.from_bytes(digest[:8], "little", signed=True)
    flat = piece.values if piece.values.is_contiguous() else torch.empty_like(piece.values).contiguous()
    at = 0
    for first, count in runs(piece.shape, piece.box):
        for start in range(first, first + count, _CHUNK):
            stop = min(start + _CHUNK, first + count)
            flat.view(-1)[at : at + stop - start].copy_(normal(key, start, stop).mul_(0.02))
            at += stop - start
    if flat is not piece.values:
        piece.values.copy_(flat)


def normal(key: int, start: int, stop: int) -> Tensor:
    """Return the normal numbers ``start`` to ``stop`` (exclusive) of the sequence that the 64-bit ``key`` seeds, in float32 on the CPU.

    A pair of numbers is the Box-Muller transform of the two halves of 64 random bits, a hash of the pair's index: SplitMix64 (Steele, Lea
    and Flood, Fast Splittable Pseudorandom Number Generators, 2014) with ``key`` as its seed.
    """
    first, last = start // 2, -(-stop // 2)
    bits = torch.arange(first, last).mul_(_signed(0x9E3779B97F4A7C15)).add_(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits.bitwise_xor_(_shifted(bits, shift)).mul_(_signed(factor))
    bits.bitwise_xor_(_shifted(bits, 31))
    radius = _shifted(bits, 32).float().add_(0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()
    angle = bits.bitwise_and_(0xFFFFFFFF).float().mul_(2 * math.pi * 2.0**-32)
    pairs = torch.stack((radius * angle.cos(), radius * angle.sin()), -1)
    return pairs.view(-1)[start - 2 * first : stop - 2 * first]


def _signed(bits: int) -> int:
    """Return the signed integer with the bits of an unsigned 64-bit integer that has its highest bit set."""
    return bits - (1 << 64)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Return ``bits >> count``, as for unsigned integers."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def source_of(state: Mapping[str, Tensor]) -> Callable[[Layout], Tensor]:
    """Return a function that looks up a parameter in a state dict of the user's model, by any of its tied names, or raises ``KeyError``."""

    def value(layout: Layout) -> Tensor:
        for name in (layout.original, *layout.tied):
            if name in state:
                return state[name]
        raise KeyError(f"the state has no {layout.original}")

    return value
