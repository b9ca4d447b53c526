"""Our rules against DTensor's: a few calls of each kind; ``make report NAME=dtensor-check`` asks about all of them."""

from __future__ import annotations

import pytest
import torch

from autopar.checks.dtensor import Agreement, compare
from autopar.checks.rules import sample
from autopar.checks.samples import n, r
from autopar.types import P, R, S

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="DTensor dispatches through other private names before torch 2.13"
)


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, tuple[object, ...]], Agreement]:
    calls = [
        sample(aten.mm.default, r(6, 12), r(12, 6)),
        sample(aten.relu.default, r(6, 4)),
        sample(aten.softmax.int, r(6, 4), 1),
        sample(aten.gather.default, r(6, 5, 12), 1, n(5, 6, 2, 6)),
    ]
    return {(answer.op, answer.operands): answer for answer in compare(calls)}


def test_both_know_a_product(answers: dict[tuple[str, tuple[object, ...]], Agreement]) -> None:
    for operands, result in (((S(0), R), S(0)), ((R, S(1)), S(1)), ((S(1), S(0)), P), ((R, R), R)):
        answer = answers["aten.mm", operands]
        assert answer.verdict == "agree" and answer.ours == result and answer.ours_confirmed


def test_neither_takes_what_is_not_linear_of_terms_of_a_sum(
    answers: dict[tuple[str, tuple[object, ...]], Agreement],
) -> None:
    assert ("aten.relu", (P,)) not in answers and ("aten.softmax", (S(1),)) not in answers
    assert answers["aten.softmax", (S(0),)].verdict == "agree"


def test_execution_decides_where_they_differ(answers: dict[tuple[str, tuple[object, ...]], Agreement]) -> None:
    """An index shorter than what it indexes cannot be cut alike: DTensor 2.13 says that it can."""
    answer = answers["aten.gather", (S(2), S(2))]
    assert answer.verdict == "only theirs" and answer.theirs_confirmed is False
