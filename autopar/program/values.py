"""The values that parameters start from: those of a state dict, or drawn ones."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .boxes import Piece
from .checkpoint import SavedTraining, parameters
from .weights import runs
from .world import Layout

_CHUNK = 1 << 16  # numbers that are drawn at a time; their intermediate results stay in the processor's cache


@torch.no_grad()
def draw(training: SavedTraining, seed: int) -> None:
    """Draw this rank's parts of all parameters. All ranks call this.

    Matrices are normal with standard deviation 0.02, vectors named ``...weight`` are ones (a norm's scale), other vectors zeros. A number
    depends on the seed, the parameter's original name and the element's place in it, not on the plan, and a rank draws no others.
    """
    for piece in parameters(training, every_copy=True):
        if len(piece.shape) < 2:
            piece.values.fill_(float(piece.name.endswith("weight")))
        else:
            _fill(piece, seed)
    for group in training.groups:
        group.upload()
        group.publish()


def _fill(piece: Piece, seed: int) -> None:
    """Draw the elements of a box, which are runs of consecutive elements of the original."""
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
    """The normal numbers ``start`` to ``stop`` (exclusive) of the sequence that belongs to the 64-bit ``key``, in float32 on the CPU.

    Number pairs are Box and Muller's of the two halves of 64 random bits, which are a hash of the pair's place: SplitMix64 (Steele, Lea and
    Flood, Fast Splittable Pseudorandom Number Generators, 2014) with ``key`` as its seed.
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
    """The 64-bit integer with these bits, as torch has it."""
    return bits - (1 << 64)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """``bits >> count`` of unsigned integers."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def given(state: Mapping[str, Tensor]) -> Callable[[Layout], Tensor]:
    """Initial values from a state dict of the user's model; any name of a tied parameter works."""

    def value(layout: Layout) -> Tensor:
        for name in (layout.original, *layout.tied):
            if name in state:
                return state[name]
        raise KeyError(f"the state has no {layout.original}")

    return value
