"""Recorded ranks: planted faults are found, programs are clean, the distinct ranks of a plan stand for all, and what the command prints."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner
from collective_faults import FAULTS, FUNCTIONS, QUICK, TORCH, Fault
from exactness import KINDS
from places import file_of
from recorded import Case, captured, other_cases
from tiers import slow

from autopar.checks.nccl.distinct import DIFFERENT, Grid
from autopar.checks.nccl.distinct import check as check_distinct
from autopar.checks.nccl.findings import DEADLOCK, SEQUENCE, agreed, findings, sequences, unaligned
from autopar.checks.nccl.objects import Objects
from autopar.checks.nccl.records import Communicator, Event, Operation, RankTrace, TensorRange
from autopar.cli.app import cli
from autopar.cli.load import SizeOptions, load_model
from autopar.cli.options import PlanRequest
from autopar.cli.recorded import with_recorded_options
from autopar.cli.verify import _full_size_graph
from autopar.emit import emit
from autopar.plan_files import check_model
from autopar.search.manual import manual_plan
from autopar.shard import annotate
from autopar.verify import kind, kinds
from autopar.verify.recording import Recorded, Workers, record, record_call, record_sizes


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers() as found:
        yield found


def recorded(case: Case, workers: Workers) -> Recorded:
    given = captured(case.model)
    return record(given.graph, case.plan(given.graph), given.state, given.batch, workers, case.recipe)


def by_name(name: str) -> Case:
    return next(case for case in other_cases() if " / ".join(case.key) == name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_deadlocks_of_small_functions(name: str, workers: Workers) -> None:
    world, expected, modes = FUNCTIONS[name]
    found = record_call(f"collective_faults:{name}", world, workers).findings()
    assert {finding.kind for finding in found} == ({expected} if expected else set()), found
    if expected == DEADLOCK:
        assert sum(len(finding.modes) for finding in found) == modes, found
        assert all(
            "waits for rank" in finding.sentence and "collective_faults.py:" in finding.sentence for finding in found
        )


def test_a_member_without_any_collective_is_found() -> None:
    pair = Communicator("pair", (0, 1))
    reduce = Operation(0, pair, "all_reduce", (TensorRange((4,), "float32"),), "sum", -1, None, 0, 0, 0, "model.py:1")
    traces = {0: RankTrace(0, 2, (reduce,)), 1: RankTrace(1, 2, ())}
    for ordered in (traces, {1: traces[1], 0: traces[0]}):
        (found,) = sequences(ordered)
        assert found.kind == SEQUENCE and found.ranks == (0, 1)
        assert "rank 0 issues 1 collectives of the group of ranks 0, 1 and rank 1 0" in found.sentence
        assert {finding.kind for finding in findings(ordered)} >= {SEQUENCE, DEADLOCK}


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name in QUICK], ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Fault, workers: Workers) -> None:
    check(fault, workers)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name not in QUICK], ids=lambda fault: fault.name)
def test_every_planted_fault_is_found(fault: Fault, workers: Workers) -> None:
    check(fault, workers)


def check(fault: Fault, workers: Workers) -> None:
    found = fault.found(workers)
    assert {finding.kind for finding in found} & set(fault.kinds), found


KIND = {each.name: each for each in KINDS}
PAIRS = [
    Case("llama", KIND["data 2, zero 3"]),
    Case("llama", KIND["pipeline 2 of 2 chunks"]),
    Case("mixtral", KIND["expert 2, in halves"]),
    by_name("llama / states on NVMe, data 4, zero 2 (saved, async)"),
]


@pytest.mark.parametrize("case", PAIRS, ids=lambda case: " / ".join(case.key))
def test_programs_are_clean(case: Case, workers: Workers) -> None:
    found = recorded(case, workers)
    assert found.findings() == ()
    assert sorted(found.late) == sorted(found.at_once) == list(range(case.kind.devices))
    assert all(trace.finite and trace.operations for trace in found.at_once.values())


def test_the_command_prints_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one kind in four: a report records all of them."""
    some = kinds(3)[::4]
    monkeypatch.setattr(importlib.import_module("autopar.verify.collectives"), "kinds", lambda devices: some)
    (tmp_path / "small.py").write_text(
        "import torch\n"
        "def factory():\n"
        "    layers = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)\n"
        "    return torch.nn.Sequential(*layers), (torch.randn(4, 8), torch.randn(4, 8)), torch.nn.functional.mse_loss\n"
    )
    result = CliRunner().invoke(cli, ["verify", f"{tmp_path}/small.py:factory", "--devices", "3", "--collectives"])
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "clean: " in said and "no deadlock" in said


def test_a_plan_of_a_factory_with_a_fixed_batch_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "fixed.py"
    file.write_text(
        "import torch\n"
        "def factory(seq=4):\n"
        "    layers = torch.nn.Linear(seq, seq), torch.nn.Linear(seq, seq)\n"
        "    return torch.nn.Sequential(*layers), (torch.randn(4, seq), torch.randn(4, seq)), torch.nn.functional.mse_loss\n"
    )
    request = PlanRequest(model=f"{file}:factory", plan_file="plan.json")
    for recorded_request, seq in (({}, 4), ({"model": f"{file}:factory", "devices": "2", "seq": 8}, 8)):
        graph = annotate(load_model(request.model, SizeOptions(seq)).capture())
        plan = replace(manual_plan(graph, data=2, precision="float32"), request=recorded_request)
        found = _full_size_graph(with_recorded_options(plan, request), plan)
        assert found.batch_size == 4
        check_model(plan, found)
        assert {tuple(p.shape) for cls in found.classes.values() for p in cls.parameters} == {(seq, seq), (seq,)}


# -- distinct ranks ----------------------------------------------------------------------------------------------------

WIDE = kind("pipeline 2 x data 8, zero 1", pipeline=2, data=8, zero=1, microbatches=1, schedule="gpipe")
GRID = Grid(2, (("data", 8),))


START = "self._reductions.start()"


def test_a_rank_that_is_recorded_alone_keeps_what_the_root_would_scatter() -> None:
    group: Any = SimpleNamespace(communicator=Communicator("pair", (0, 1)), rank=lambda: 1)
    scatter = Objects(None).functions(mock.MagicMock())["scatter_object_list"]
    for given, wanted in ((None, "mine"), (["a", "b"], "b")):
        found = ["mine"]
        scatter(found, given, group=group, group_src=0)
        assert found == [wanted]


def sampled(folder: Path, workers: Workers, before: str = "") -> dict[int, RankTrace]:
    """The traces of the distinct ranks of ``WIDE``, whose program does ``before`` before it starts its reductions."""
    given = captured("mlp")
    emit(given.graph, WIDE.plan(given.graph), folder)
    file = file_of(folder, "trainer.py")
    assert START in file.read_text()
    file.write_text(file.read_text().replace(START, before + START))
    shapes = {value.name: (tuple(value.shape), value.dtype) for value in given.graph.inputs}
    found = record_sizes(folder, shapes, GRID.samples(), workers)
    assert not found.failures
    return dict(found.late)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, workers: Workers) -> dict[int, RankTrace]:
    return sampled(tmp_path_factory.mktemp("clean"), workers)


def test_the_distinct_ranks_of_a_plan() -> None:
    assert GRID.samples() == [0, 1, 4, 7, 8, 9, 12, 15]
    assert all(GRID.rank(GRID.coordinates(rank)) == rank for rank in range(16))
    assert Grid(32, (("data", 1),)).samples() == list(range(32))  # a pipeline alone


def test_distinct_ranks_stand_for_all_where_they_do_the_same(
    tmp_path: Path, workers: Workers, clean: dict[int, RankTrace]
) -> None:
    assert check_distinct(clean, GRID) == []
    own = f"dist.get_rank() != 7 and dist.all_reduce(losses[0].detach() if losses else {TORCH}.zeros(1)); "
    (found,) = [f for f in check_distinct(sampled(tmp_path, workers, own), GRID) if f.kind == DIFFERENT]
    assert found.ranks == (0, 7)


def test_ranks_of_one_position_may_have_other_alignments(clean: dict[int, RankTrace]) -> None:
    """FSDP2 gathers from wherever a rank's shard begins in its buffer: slower where it is not aligned, and nothing else."""

    def moved(event: Event) -> Event:
        if not isinstance(event, Operation):
            return event
        return replace(event, operands=tuple(replace(operand, offset=8) for operand in event.operands))

    traces = clean | {7: replace(clean[7], events=tuple(map(moved, clean[7].events)))}
    found = unaligned(traces)
    assert len(found) > 0 and all("begins 8 bytes after" in finding.sentence for finding in found)
    assert check_distinct(traces, GRID) == []


def test_pipeline_positions_are_compared(tmp_path: Path, workers: Workers) -> None:
    first = f"dist.get_rank() < 8 and dist.all_reduce({TORCH}.zeros(1)); "
    found = check_distinct(sampled(tmp_path, workers, first), GRID)
    assert DIFFERENT not in {finding.kind for finding in found}
    assert {SEQUENCE, DEADLOCK} <= {finding.kind for finding in found}
    assert all("pipeline position" in finding.sentence for finding in found)


SIZED = [("llama", "pipeline 2 x data 2, zero 2"), ("mixtral", "expert 2"), slow("gpt2", "tensor+sequence 2")]


@pytest.mark.parametrize(("model", "name"), SIZED)
def test_sizes_are_those_of_a_run_with_values(model: str, name: str, tmp_path: Path, workers: Workers) -> None:
    """Without values a rank issues what it issues with them."""
    given, each = captured(model), KIND[name]
    plan = each.plan(given.graph)
    whole = record(given.graph, plan, given.state, given.batch, workers)
    emit(given.graph, plan, tmp_path)
    shapes = {value.name: (tuple(value.shape), value.dtype) for value in given.graph.inputs}
    found = record_sizes(tmp_path, shapes, range(each.devices), workers)
    assert not found.failures
    for rank in range(each.devices):
        ours, theirs = (
            [agreed(o) for o in recorded.late[rank].operations if o.operands and o.operands[0].dtype == "float64"]
            for recorded in (found, whole)
        )
        assert ours == theirs and len(ours) > 10
    assert found.findings() == ()
