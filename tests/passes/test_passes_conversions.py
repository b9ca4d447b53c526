"""The order of one-axis conversions keeps nested slices nested: checked on real tensors against the definition."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.types import Collective, I, P, R, S, SpmdType, conversion
from passes.conversions import ConversionStep, conversion_steps

SIZES = (2, 2, 3)  # a mesh of three axes, outer to inner


def slice_of(whole: torch.Tensor, types: tuple[SpmdType, ...], position: tuple[int, ...]) -> torch.Tensor:
    """What the rank at ``position`` holds: nested slices, outermost axis first."""
    for size, t, i in zip(SIZES, types, position, strict=True):
        if t.dim is not None:
            whole = whole.chunk(size, t.dim)[i]
    return whole


def convert_all(ranks: dict[tuple[int, ...], torch.Tensor], step: ConversionStep):
    """One conversion on every rank, by its definition: unshard along the flattened axis, then take its slice."""
    result = {}
    for position in ranks:
        group = sorted(p for p in ranks if all(p[a] == position[a] for a in range(len(SIZES)) if a not in step.axes))
        whole = ranks[position] if step.source.dim is None else torch.cat([ranks[p] for p in group], step.source.dim)
        mine = group.index(position)
        result[position] = whole if step.target.dim is None else whole.chunk(len(group), step.target.dim)[mine]
    return result


TYPES = (I, S(0), S(1))


@pytest.mark.parametrize("source", list(itertools.product(TYPES, repeat=3)), ids=str)
def test_every_pair_of_types_ends_in_the_target_slices(source: tuple[SpmdType, ...]) -> None:
    whole = torch.arange(12 * 12 * 2).reshape(12, 12, 2)
    positions = list(itertools.product(*(range(n) for n in SIZES)))
    for target in itertools.product(TYPES, repeat=3):
        ranks = {p: slice_of(whole, source, p) for p in positions}
        for step in conversion_steps(source, target):
            ranks = convert_all(ranks, step)
        for p in positions:
            assert torch.equal(ranks[p], slice_of(whole, target, p)), (source, target, p)


def parts(steps: tuple[ConversionStep, ...]) -> list[tuple[tuple[int, ...], SpmdType, SpmdType]]:
    return [(step.axes, step.source, step.target) for step in steps]


def test_without_a_gradient_i_and_r_are_the_same() -> None:
    (step,) = conversion_steps((I, S(0)), (R, R), gradient=False)
    assert (step.axes, step.after, step.backward) == ((1,), (I, R), Collective.NONE)
    assert [one.backward for one in conversion_steps((I, S(0)), (R, R))] == [
        Collective.REDUCE_SCATTER,
        Collective.ALL_REDUCE,
    ]


def test_a_partial_sum_is_scattered_directly() -> None:
    steps = conversion_steps((S(0), P), (S(0), S(1)))
    assert parts(steps) == [((1,), P, S(1))] and steps[0].after == (S(0), S(1)) and steps[0].sharded == (0,)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ((P, P, R), (I, I, R), [((0, 1), P, I)]),
        ((P, S(0), P), (I, S(0), I), [((0, 2), P, I)]),  # what stands between them is another dim's
        ((S(0), S(0), R), (R, R, R), [((0, 1), S(0), R)]),
        ((S(0), S(0), R), (S(1), S(1), R), [((0, 1), S(0), S(1))]),  # one all-to-all
        ((P, P, R), (S(0), S(0), R), [((0, 1), P, S(0))]),
        ((S(0), S(0), S(0)), (R, R, S(0)), [((0, 1, 2), S(0), R), ((2,), R, S(0))]),
        ((P, S(0), P), (S(0), S(0), S(0)), [((1,), S(0), R), ((0,), P, S(0)), ((1,), R, S(0)), ((2,), P, S(0))]),
    ],
    ids=str,
)
def test_equal_conversions_are_one_on_the_flattened_axis(source, target, expected) -> None:
    assert parts(conversion_steps(source, target)) == expected


def test_nothing_to_do_is_nothing() -> None:
    assert conversion_steps((R, S(0)), (R, S(0))) == ()


def test_each_conversion_has_collectives() -> None:
    for source, target in itertools.product((I, R, P, S(0), S(1)), repeat=2):
        pair = conversion(source, target)
        assert (pair is None) == (source.kind == "S" and target == P), (source, target)
