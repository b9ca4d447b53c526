"""The error between two runs: NaN is never lost, complex numbers have two parts, tensors may be empty."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from autopar.measure import compare, largest_difference, largest_finite, severity

ONE, NAN, INF = torch.ones(2), torch.tensor([math.nan, 1.0]), torch.tensor([math.inf, 1.0])


@pytest.mark.parametrize("wrong", ["a", "b", "c"])
def test_a_nan_is_the_largest_error_wherever_it_is(wrong: str) -> None:
    right = dict.fromkeys("abc", ONE)
    for got, want in ((right | {wrong: NAN}, right), (right, right | {wrong: NAN}), (right | {wrong: NAN},) * 2):
        error = compare(1.0, got, 1.0, want)
        assert math.isnan(error.value) and error.where == wrong and not error.exact
    assert compare(math.nan, right, 1.0, right).where == "loss" and not compare(math.nan, right, 1.0, right).exact
    assert max([0.5, math.nan, math.inf], key=severity) is math.nan


def test_the_imaginary_part_counts() -> None:
    value = torch.tensor([1 + 1j, 2 - 1j])
    wrong = compare(1.0, {"turn": value.conj()}, 1.0, {"turn": value})
    assert wrong.where == "turn" and wrong.value == 1.0
    assert compare(1.0, {"turn": value.conj()}, 1.0, {"turn": value.conj().resolve_conj()}).exact


def test_tensors_without_elements_are_equal_and_one_of_another_shape_is_not() -> None:
    empty = torch.zeros(0, 3)
    assert compare(1.0, {"empty": empty, "a": ONE}, 1.0, {"empty": empty, "a": ONE}).exact
    assert compare(1.0, {"empty": empty.T}, 1.0, {"empty": empty}).value == math.inf


def test_a_difference_from_zeros_alone_is_an_error() -> None:
    zero = torch.zeros(2)
    assert compare(1.0, {"buffer": ONE}, 1.0, {"buffer": zero}).value == 1.0
    assert compare(1.0, {"buffer": zero}, 1.0, {"buffer": zero}).exact


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_the_same_infinity_or_nan_is_equal_where_that_is_asked_for(value: Tensor) -> None:
    both = {"mask": value, "a": ONE}
    assert compare(1.0, both, 1.0, both, same_nonfinite=True).exact
    assert math.isnan(compare(1.0, both, 1.0, both).value)
    for other in (ONE, -value if value is INF else INF if value is NAN else ONE):
        assert not compare(1.0, {"mask": other, "a": ONE}, 1.0, both, same_nonfinite=True).exact


def test_an_infinity_scales_no_other_difference_away() -> None:
    assert largest_difference(INF + torch.tensor([0.0, 0.5]), INF) == 0.5
    assert largest_finite(INF) == largest_finite(NAN) == 1.0 and largest_finite(INF[:1]) == 0.0
    assert not compare(1.0, {"a": INF, "b": 2 * ONE}, 1.0, {"a": INF, "b": ONE}, same_nonfinite=True).exact
