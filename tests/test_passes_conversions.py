"""The order of one-axis conversions keeps nested slices nested: checked on real tensors against the definition."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.types import I, P, R, S, SpmdType, conversion
from passes.conversions import conversion_steps

SIZES = (2, 2, 3)  # a mesh of three axes, outer to inner


def slice_of(whole: torch.Tensor, types: tuple[SpmdType, ...], position: tuple[int, ...]) -> torch.Tensor:
    """What the rank at ``position`` holds: nested slices, outermost axis first."""
    for size, t, i in zip(SIZES, types, position, strict=True):
        if t.dim is not None:
            whole = whole.chunk(size, t.dim)[i]
    return whole


def convert_all(ranks: dict[tuple[int, ...], torch.Tensor], axis: int, source: SpmdType, target: SpmdType):
    """One conversion on every rank, by its definition: unshard along the axis, then take the axis's slice."""
    result = {}
    for position in ranks:
        group = [position[:axis] + (i,) + position[axis + 1 :] for i in range(SIZES[axis])]
        whole = ranks[position] if source.dim is None else torch.cat([ranks[p] for p in group], source.dim)
        result[position] = whole if target.dim is None else whole.chunk(SIZES[axis], target.dim)[position[axis]]
    return result


TYPES = (I, S(0), S(1))


@pytest.mark.parametrize("source", list(itertools.product(TYPES, repeat=3)), ids=str)
def test_every_pair_of_types_ends_in_the_target_slices(source: tuple[SpmdType, ...]) -> None:
    whole = torch.arange(12 * 12 * 2).reshape(12, 12, 2)
    positions = list(itertools.product(*(range(n) for n in SIZES)))
    for target in itertools.product(TYPES, repeat=3):
        ranks = {p: slice_of(whole, source, p) for p in positions}
        for step in conversion_steps(source, target):
            ranks = convert_all(ranks, step.axis, step.source, step.target)
        for p in positions:
            assert torch.equal(ranks[p], slice_of(whole, target, p)), (source, target, p)


def test_a_partial_sum_is_scattered_directly() -> None:
    steps = conversion_steps((S(0), P), (S(0), S(1)))
    assert [(s.axis, str(s.source), str(s.target)) for s in steps] == [(1, "P", "S(1)")]


def test_nothing_to_do_is_nothing() -> None:
    assert conversion_steps((R, S(0)), (R, S(0))) == ()


def test_each_conversion_has_collectives() -> None:
    for source, target in itertools.product((I, R, P, S(0), S(1)), repeat=2):
        pair = conversion(source, target)
        assert (pair is None) == (source.kind == "S" and target == P), (source, target)
