"""The mutation check's default tier: some of the faults, one of each sort, and the results that are kept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from capture_faults import FAULTS, Fault, compiled, found
from exactness import subject
from mutations import CATCHERS, MUTATIONS, RESULTS, Mutation, caught, page
from workers import WorkerPool

import autopar.program
from autopar.errors import CaptureError
from autopar.search.manual import manual_plan
from autopar.verify import check_plan

RUNTIME_FILES = Path(autopar.program.__file__).parent

# One for each catcher that sees it first, and faults that nothing but the exactness run sees.
TRIED = {
    "partial sum is not reduced": {"types", "exactness"},
    "attention with another scale": {"exactness"},
    "rows of other ranks are not zeroed in a masked lookup": {"exactness"},
    "tied gradients are not summed over the stages": {"exactness"},
    "every rank's piece under ZeRO is the first": {"exactness"},
    "ring without the correction of earlier blocks": {"exactness"},
    "ring's kernels without the correction of earlier blocks": {"exactness"},
    "variance without the spread of the ranks' means": {"exactness"},
    "softmax: its dim may be sharded": {"rules"},
    "I to R is left out: gradients of replicated inputs are not summed": {"structure", "types", "exactness"},
    "S to R is left out": {"passes"},
    "the gradients of a stage's copies are not summed": {"exactness"},
    "both directions run the first half of the microbatches": {"exactness"},
}


@pytest.fixture(scope="module")
def pools(workers2: WorkerPool) -> Iterator[dict[int, WorkerPool]]:
    yield {2: workers2}


_exact: dict[tuple[str, str], bool] = {}


def is_exact(mutation: Mutation, pool: WorkerPool) -> bool:
    """Whether the program without the mutation is exact; each program is run once."""
    key = mutation.model, str(mutation.options)
    if key not in _exact:
        given = subject(mutation.model)
        _exact[key] = check_plan(given, manual_plan(given.graph, **mutation.options), pool).error.exact
    return _exact[key]


@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if m.name in TRIED], ids=lambda mutation: mutation.name)
def test_a_fault_is_caught(mutation: Mutation, pools: dict[int, WorkerPool]) -> None:
    assert mutation.breaks == "rule" or is_exact(mutation, pools[2])
    assert set(caught(mutation, pools)) == TRIED[mutation.name]


def test_all_that_was_tried_is_there() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert {fault.name for fault in FAULTS} > ALIKE
    assert set(TRIED) <= set(names) and len(set(names)) == len(names) >= 40
    assert {mutation.breaks for mutation in MUTATIONS} == {"rule", "pass", "program", "runtime"}


@pytest.mark.parametrize(
    "mutation", [m for m in MUTATIONS if m.breaks == "runtime"], ids=lambda mutation: mutation.name
)
def test_what_a_fault_replaces_is_in_the_runtime(mutation: Mutation) -> None:
    assert re.search(mutation.pattern, (RUNTIME_FILES / mutation.file).read_text())


def test_the_results_are_of_all_mutations_and_all_are_caught() -> None:
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    assert [line["mutation"] for line in lines] == [mutation.name for mutation in (*MUTATIONS, *FAULTS)]
    assert [line["mutation"] for line in lines if not line["caught"]] == []
    assert all(set(line["caught"]) <= set(CATCHERS) for line in lines)
    assert RESULTS.with_suffix(".md").read_text() == page(lines)


REFUSED = {"a Python counter is baked in", "a number drawn by Python is baked in"}
"""Of the faults in capture, those that break a refusal: without the fault there is no graph."""


# Of several faults of one sort, whose damage the same comparison sees, those that the slow tests try.
ALIKE = {
    "a buffer becomes zeros",
    "a running sum along the batch is worked out of one row",
    "eval mode is ignored: dropout",
    "blocks with other numbers are taken for equal",
    "a buffer's update is dropped",
    "a region under no_grad gets a gradient",
    "a number of the batch is computed of its first row",
    "a number drawn by Python is baked in",
    "a norm's epsilon is another",
    "a cast to integers is lost",
    "what is put together comes in another order",
}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(each, marks=pytest.mark.slow if each.name in ALIKE else (), id=each.name) for each in FAULTS],
)
def test_a_fault_in_capture_is_found(fault: Fault) -> None:
    said = found(fault)
    assert said
    if fault.name in REFUSED:
        with pytest.raises(CaptureError):
            compiled(fault)
    else:
        assert "the captured graph equals the model" in compiled(fault).plan.notes[-1]
