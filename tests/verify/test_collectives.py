"""Recorded ranks: planted faults are found, programs are clean, the distinct ranks of a plan stand for all, and what the command prints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from collective_faults import FAULTS, FUNCTIONS, QUICK, Fault
from exactness import KINDS
from recorded import Case, captured, other_cases

from autopar.checks.nccl.findings import DEADLOCK
from autopar.cli.app import cli
from autopar.verify.recording import Recorded, Workers, record, record_call


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
    world, kind, modes = FUNCTIONS[name]
    found = record_call(f"collective_faults:{name}", world, workers).findings()
    assert {finding.kind for finding in found} == ({kind} if kind else set()), found
    if kind == DEADLOCK:
        assert sum(len(finding.modes) for finding in found) == modes, found
        assert all(
            "waits for rank" in finding.sentence and "collective_faults.py:" in finding.sentence for finding in found
        )


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


KIND = {kind.name: kind for kind in KINDS}
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


def test_the_command_prints_a_verdict(tmp_path: Path) -> None:
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
