"""A user's own op: replicated and named without a rule, sharded with one, and imported by the program, which says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from custom_ops import Gated
from torch import Tensor, nn
from workers import WorkerPool

from autopar import register_rule
from autopar.checks.types import check_program
from autopar.emit import emit
from autopar.errors import ProgramError
from autopar.graph import Graph
from autopar.rules.table import TABLE
from autopar.search.manual import manual_plan
from autopar.shard import annotate
from autopar.verify import Subject, check_plan, make_subject


@pytest.fixture(scope="module")
def subject() -> Subject:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    batch = tuple(torch.randn(8, 4, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    return make_subject(Gated(), batch, name="gated")


@pytest.fixture
def rule() -> Iterator[None]:
    register_rule("custom_ops::gated", "* d, d -> * d")
    yield
    del TABLE["custom_ops.gated"]


def program(graph: Graph, folder: Path, **options: int) -> str:
    emit(graph, manual_plan(graph, **options), folder)
    return (folder / "model.py").read_text()


def test_without_a_rule_the_op_is_whole_and_named(subject: Subject, tmp_path: Path) -> None:
    annotated = annotate(subject.graph)
    assert any("custom_ops.gated" in name for name in annotated.replicated)
    assert "needs the full batch for custom_ops.gated (line" in annotated.unmicrobatchable
    text = program(subject.graph, tmp_path, tensor=2)
    assert "torch.ops.custom_ops.gated.default(" in text and "custom.call" not in text
    assert check_program(tmp_path) == 1


@pytest.mark.parametrize(
    "options", [{"tensor": 2}, {"data": 2, "zero": 3, "microbatches": 2}, {"data": 2, "recompute": True}]
)
def test_with_a_rule_it_is_sharded_and_exact(
    options: dict[str, int], subject: Subject, rule: None, workers2: WorkerPool
) -> None:
    outcome = check_plan(subject, manual_plan(subject.graph, **options), workers2)
    assert outcome.error.exact and outcome.stages_typed == 1


def test_the_program_imports_the_op_and_nothing_else(subject: Subject, rule: None, tmp_path: Path) -> None:
    text = program(subject.graph, tmp_path, tensor=2)
    assert "\nimport custom_ops\n" in text
    assert "custom.call(torch.ops.custom_ops.gated.default, (" in text
    assert text.count("all_reduce") == 3  # the gated products are Megatron pairs: one reduction each
    assert json.loads((tmp_path / "plan.json").read_text())["imports"] == ["custom_ops"]


def test_an_op_that_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    library = torch.library.Library("homeless", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(torch.ops.homeless.twice(x)).sum()

    given = make_subject(Doubled(), torch.randn(4, 8, dtype=torch.float64), name="doubled")
    with pytest.raises(ProgramError, match="no Python module is known to define the op homeless.twice") as refused:
        emit(given.graph, manual_plan(given.graph, data=2), tmp_path)
    assert "torch.library.custom_op" in str(refused.value.hint)
