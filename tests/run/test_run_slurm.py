"""Processes on the nodes of a SLURM allocation, whose ``srun`` here runs every command on this machine and records its node."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tuned

from autopar.devices import parse
from autopar.errors import LaunchError, UsageError
from autopar.run import processes
from autopar.run.processes import Processes
from autopar.run.slurm import is_one_task_of_several, slurm_placement
from autopar.tune import Effort, tune

NODES = ("127.0.0.1", "127.0.0.2")
SRUN = """#!{python}
import os, sys
options = [word for i, word in enumerate(sys.argv[1:]) if all(w.startswith("--") for w in sys.argv[1 : i + 2])]
command = sys.argv[1 + len(options) :]
node = next(word.partition("=")[2] for word in options if word.startswith("--nodelist="))
with open("{seen}", "a") as seen:
    print(node, *(os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")), file=seen)
assert "SLURM_GPUS_PER_TASK" not in os.environ
os.execvp(command[0], command)
"""


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An allocation of two nodes; the file lists the node, the rank and the local rank of every command that srun started."""
    commands = {
        "scontrol": f"#!/bin/bash\nprintf '%s\\n' {' '.join(NODES)}\n",
        "srun": SRUN.format(python=sys.executable, seen=tmp_path / "seen"),
    }
    (tmp_path / "bin").mkdir()
    for name, text in commands.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")  # of ``sbatch --gpus-per-task=1``
    monkeypatch.setattr(processes, "subprocess", subprocess)  # a fork of the tests' server has no srun
    return tmp_path / "seen"


def test_ranks_start_on_their_nodes(seen: Path, tmp_path: Path) -> None:
    placement = slurm_placement(2, 2, tmp_path)
    assert placement.env == {"MASTER_ADDR": "127.0.0.1"} and seen.read_text() == "127.0.0.1,127.0.0.2   \n"
    workers = Processes(4, placement=placement)
    try:
        assert workers.folder.parent == tmp_path
        assert workers.call("os:getenv", "RANK") == ["0", "1", "2", "3"]
    finally:
        workers.close()
    started = {line.split()[1]: line.split() for line in seen.read_text().splitlines()[1:]}
    assert [started[str(rank)] for rank in range(4)] == [
        [NODES[rank // 2], str(rank), str(rank % 2), "2"] for rank in range(4)
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_plans_are_tuned_on_two_nodes(seen: Path, tmp_path: Path) -> None:
    """The rates of the cluster are corrected, those of the network apart, and the log is resumed."""
    cluster = dataclasses.replace(parse(2), nodes=2, gpus_per_node=1, local=False)
    effort = Effort(seconds=4, steps=1, rounds=1, final_rounds=2, first_plans=2, floor_s=5)
    log, options = tmp_path / "tune.jsonl", {"placement": slurm_placement(2, 1, tmp_path)}
    found = tune(tuned.workload(), cluster, tuned.OPTIONS, effort, log=log, **options)
    ran = [trial for trial in found.trials if trial.failure is None]
    assert len(ran) >= 2 and found.best.layers == found.trials[0].plan.layers and found.calibration is None
    assert {c.group for c in found.corrections} == {
        "arithmetic",
        "memory bandwidth",
        "links in a node",
        "links between nodes",
    }
    assert all(trial.corrected_s > 0 for trial in found.trials)
    nodes = {line.split()[0] for line in seen.read_text().splitlines()}
    assert nodes == {*NODES, ",".join(NODES)} and not list(tmp_path.glob("autopar-*"))
    again = tune(tuned.workload(), cluster, tuned.OPTIONS, dataclasses.replace(effort, seconds=0), log=log, **options)
    assert again.measured_steps == found.measured_steps and again.best.layers == found.best.layers


def test_what_the_allocation_lacks_is_refused(seen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="allocation has 2 nodes, and the devices are 3 nodes"):
        slurm_placement(3, 1, tmp_path)
    with pytest.raises(UsageError, match=f"not all of the nodes 127.0.0.1, 127.0.0.2 have the folder {tmp_path}/no"):
        slurm_placement(2, 1, tmp_path / "no")
    (tmp_path / "bin" / "srun").write_text("#!/bin/bash\necho no resources >&2; exit 1\n")
    with pytest.raises(LaunchError, match="srun .* failed: no resources"):
        slurm_placement(2, 1, tmp_path)
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/bash\necho down >&2; exit 1\n")
    with pytest.raises(LaunchError, match="scontrol show hostnames .* failed: down"):
        slurm_placement(2, 1, tmp_path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LaunchError, match="scontrol cannot be run"):
        slurm_placement(2, 1, tmp_path)
    assert not is_one_task_of_several()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert is_one_task_of_several()
