"""Sizes that no axis divides: plans of 2, 3 and more devices are exact, and padding stays zero."""

from __future__ import annotations

import pytest
from exactness import Kind, run_case
from workers import WorkerPool

from autopar.verify import kind

CASES = [
    ("odd_gpt2", kind("tensor 2", tensor=2)),
    ("odd_llama", kind("tensor 2, recomputed", tensor=2, recompute=True, microbatches=2)),
    ("gated", kind("tensor 2", tensor=2)),
    ("odd_gpt2", kind("data 3, zero 3", data=3, zero=3)),
    ("odd_gpt2", kind("tensor 3", tensor=3)),
    ("odd_llama", kind("tensor+sequence 3", tensor=3, sequence=True)),
    ("gated", kind("tensor 3", tensor=3)),
    ("odd_llama", kind("pipeline 3", pipeline=3, microbatches=3)),
]


@pytest.mark.parametrize(("model", "kind"), CASES, ids=lambda value: value.name if isinstance(value, Kind) else value)
def test_exact(model: str, kind: Kind, request: pytest.FixtureRequest) -> None:
    pool: WorkerPool = request.getfixturevalue(f"workers{kind.devices}")
    outcome = run_case(model, kind, pool)
    assert outcome.error.exact, outcome.error
