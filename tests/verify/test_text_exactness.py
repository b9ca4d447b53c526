"""Text models and models as people write them, exact under kinds of plans that strain what is awkward in each."""

from __future__ import annotations

from pathlib import Path

import pytest
from exactness import KINDS, run_case, subject
from text_models import TEXT
from tiers import slow
from workers import WorkerPool
from written_models import WRITTEN

from autopar.emit import emit
from autopar.errors import ProgramError
from autopar.search.manual import manual_plan
from autopar.shard import annotate

KINDS_PER_MODEL = 2
"""By default in the exactness tier, which has every pair of features on some model."""
BY_NAME = {kind.name: kind for kind in KINDS}
# Microbatches and slices hold different numbers of valid tokens in all of these.
WHOLE_BATCH = ("data 2, zero 2", "pipeline 2")
PAIRS: dict[str, tuple[str, ...]] = {
    "t5": ("tensor 2", "pipeline 2", "data 4, zero 3"),
    "qwen3": ("tensor+sequence 2", "pipeline 2 x data 2, zero 2"),
    "bert classes": ("data 2 x tensor 2, zero 3", "pipeline 2"),
    "transformer encoder": ("tensor 4", "pipeline 2 x tensor 2"),
    "two towers": ("data 2", "tensor 2"),
    "three uses": ("pipeline 2", "tensor 2", "data 4, zero 2"),
    "plain mlp": ("tensor 2", "pipeline 2"),
    "char cnn": (*WHOLE_BATCH, "tensor 2"),
    "masked by hand": (*WHOLE_BATCH, "recompute, tensor 2"),
    "several losses": (*WHOLE_BATCH, "data 4, zero 3"),
    "losses in a dict": ("pipeline 2", "tensor 2"),
    "losses in a list": ("data 2, zero 3", "pipeline 2"),
    "functional": ("data 4, zero 2", "tensor 2"),
    "frozen backbone": ("data 2, zero 3", "pipeline 2"),
    "adapters": ("data 2, zero 3", "tensor 2", "pipeline 2"),
    "contrastive": ("data 2", "data 4, zero 3", "tensor 2"),
    "deeply supervised": ("pipeline 2", "tensor+sequence 2"),
    "token weights": WHOLE_BATCH,
    "relative": ("data 2, zero 2", "tensor 2", "data 2 x tensor 2, zero 3"),
    "unrolled": ("data 2, zero 1", "tensor 2", "pipeline 2"),
    "ordinal": ("data 2, zero 3", "tensor 2", "pipeline 2"),
    "listed experts": (
        "data 2 x expert 2, zero 2",
        "expert 2, in halves",
        "data 2 x tensor 2, experts folded, zero 3",
        "pipeline 2 x expert 2",
        "expert 2 x tensor 2, relayed",
        "data 2, zero 3",
    ),
    "parallel blocks": ("tensor 2", "tensor+sequence 2", "recompute in part, tensor 2"),
}
# Models whose second kind strains something that the first does not: a decoder's second input between stages, a module in three stages,
# losses over batches that are cut in rows and in time.
SECOND = ("t5", "three uses", "char cnn", "several losses", "adapters", "unrolled", "relative")
CASES = [
    (model, kind) if number < (2 if model in SECOND else 1) else slow(model, kind)
    for model, kinds in PAIRS.items()
    for number, kind in enumerate(kinds)
]


@pytest.mark.parametrize(("model", "kind"), CASES)
def test_exact(model: str, kind: str, request: pytest.FixtureRequest) -> None:
    pool: WorkerPool = request.getfixturevalue(f"workers{BY_NAME[kind].devices}")
    outcome = run_case(model, BY_NAME[kind], pool)
    assert outcome.error.exact, outcome.error
    assert outcome.stages_typed == BY_NAME[kind].options.get("pipeline", 1)


def test_every_model_is_tried() -> None:
    assert set(PAIRS) == set(TEXT) | set(WRITTEN)


@pytest.mark.parametrize("model", ["two towers", "contrastive"])
def test_negatives_from_the_batch_forbid_microbatches(model: str, tmp_path: Path) -> None:
    graph = subject(model).graph
    assert "needs the full batch" in annotate(graph).unmicrobatchable
    with pytest.raises(ProgramError, match="over the microbatches"):
        emit(graph, manual_plan(graph, data=2, microbatches=2), tmp_path)


@pytest.mark.parametrize("model", sorted((set(TEXT) | set(WRITTEN)) - {"two towers", "contrastive"}))
def test_the_others_take_microbatches(model: str) -> None:
    assert annotate(subject(model).graph).unmicrobatchable == ""


def test_parameters_that_are_not_trained_or_not_used_are_known() -> None:
    graph = subject("masked by hand").graph
    assert not graph.parameters["positions"].trainable
    assert "unused.weight" not in graph.parameters and any("unused.weight" in note for note in graph.notes)
