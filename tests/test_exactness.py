"""The exactness matrix's default tier: every model under several kinds of plans, every kind under some model, on real processes."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from exactness import KINDS, MODELS, Kind, run_case
from matrix import ROOT, page, passed, read
from workers import WorkerPool

BY_NAME = {kind.name: kind for kind in KINDS}

# Which models run which kind: each kind once, on the model whose structure it strains most (tied weights across stages and
# data axes on gpt2, grouped heads on llama, biases and padding on bert, cuts inside a block on mlp).
PAIRS: dict[str, tuple[str, ...]] = {
    "data 2": ("bert",),
    "data 4": ("llama",),
    "data 2, zero 1": ("gpt2",),
    "data 2, zero 2": ("mlp",),
    "data 2, zero 3": ("llama", "gpt2"),
    "data 4, zero 1": ("mlp",),
    "data 4, zero 2": ("bert",),
    "data 4, zero 3": ("mlp",),
    "tensor 2": ("bert", "gpt2"),
    "tensor 4": ("llama",),
    "tensor+sequence 2": ("llama", "mlp"),
    "tensor+sequence 4": ("bert",),
    "pipeline 2": ("gpt2",),
    "pipeline 4": ("mlp",),
    "pipeline 2, gpipe": ("bert",),
    "pipeline 4, gpipe": ("llama",),
    "recompute, data 2": ("mlp",),
    "recompute, tensor 2": ("gpt2",),
    "recompute, data 4, zero 3": ("gpt2",),
    "pipeline 2 x tensor 2": ("bert",),
    "pipeline 2 x data 2, zero 2": ("gpt2",),
    "pipeline 2 x data 2, zero 3, recompute": ("llama",),
    "data 2 x tensor 2, zero 3": ("gpt2",),
    "data 2 x tensor+sequence 2, zero 1": ("llama",),
    "pipeline 2 x tensor+sequence 2, recompute": ("mlp",),
    "mixed: zero-3 ends, tensor blocks": ("bert",),
    "mixed: tensor 1, 2 and 4": ("llama", "mlp"),
}
CASES = [(model, BY_NAME[kind]) for kind, models in PAIRS.items() for model in models]


@pytest.mark.parametrize(("model", "kind"), CASES, ids=lambda value: value.name if isinstance(value, Kind) else value)
def test_exact(model: str, kind: Kind, request: pytest.FixtureRequest) -> None:
    pool: WorkerPool = request.getfixturevalue(f"workers{kind.devices}")
    outcome = run_case(model, kind, pool)
    assert outcome.error.exact, outcome.error
    assert outcome.stages_typed == kind.options.get("pipeline", 1)


def test_every_kind_and_every_model_is_tried() -> None:
    assert set(PAIRS) == set(BY_NAME)
    counts = Counter(model for model, _ in CASES)
    assert set(counts) == set(MODELS) and min(counts.values()) >= 5, counts


# -- the full matrix's results, which are kept with the code ----------------------------------------------------------


def test_the_results_are_of_the_whole_matrix_and_exact() -> None:
    results = read(ROOT / "docs" / "exactness.jsonl")
    assert [json.dumps(line) for line in results if not passed(line)] == []
    tried = {(line["model"], line["kind"]) for line in results}
    missing = {(model, kind) for model in MODELS for kind in BY_NAME} - tried
    assert not missing, f"{len(missing)} cases, such as {min(missing)}: python tests/matrix.py --resume does them"


def test_the_page_is_what_the_results_say() -> None:
    assert (ROOT / "docs" / "exactness.md").read_text() == page(read(ROOT / "docs" / "exactness.jsonl"))


def line(**changes: Any) -> dict[str, Any]:
    base = {"model": "m", "kind": "k", "devices": 2, "error": 1e-15, "where": "loss", "seconds": 1.0, "torch": "2"}
    return base | {"stages_typed": 1, "stages_typed_at_64": 1} | changes


def test_a_case_that_is_not_exact_shows_on_the_page() -> None:
    text = page([line(), line(kind="l", error=1e-3, where="w"), line(kind="n", failure="ProgramError: a|b")])
    assert "1 of 3 cases" in text and "**1.0e-03** in w" in text and "ProgramError: a/b" in text
    assert not passed(line(error=float("nan"))) and not passed(line(error=float("inf")))
