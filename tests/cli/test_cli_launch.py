"""The batch file for SLURM: its lines, its syntax, and the part after them, run on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import Shape, mlp_model, write_mlp

from autopar.cli.emit import start_commands
from autopar.cli.launch import batch_file, launch_command
from autopar.devices import parse
from autopar.errors import ProgramError, UsageError
from autopar.program.state import INITIAL
from autopar.program.weights import write_file

SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" > "$FAKE/requeued"; fi
"""
SRUN = """#!{python}
import os, signal, subprocess, sys
command = [word for i, word in enumerate(sys.argv[1:]) if not all(w.startswith("--") for w in sys.argv[1 : i + 2])]
step = subprocess.Popen(command, start_new_session=True)


def members(pid):
    found = open(f"/proc/{{pid}}/task/{{pid}}/children").read().split()
    return [pid, *(inner for child in found for inner in members(int(child)))]


def pass_on(number, frame):
    for pid in members(step.pid):
        os.kill(pid, number)


signal.signal(signal.SIGUSR1, pass_on)
sys.exit(step.wait())
"""


def test_the_program_saves_before_the_time_limit_and_is_queued_again(tmp_path: Path) -> None:
    program = write_mlp(tmp_path / "program", Shape())
    write_file(program / INITIAL, mlp_model().state_dict())
    saved = tmp_path / "my saved"
    options = ("--device", "cpu", "--steps", "1000000", "--checkpoint", str(saved), "--every", "1000000")
    job = tmp_path / "job.sbatch"
    job.write_text(batch_file(program, "01:00:00", 300, options))
    subprocess.run(["bash", "-n", str(job)], check=True)
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN.format(python=sys.executable))):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    found = {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}", "FAKE": str(tmp_path)}
    slurm = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "here",
        "SLURM_NODEID": "0",
        "OMP_NUM_THREADS": "1",
    }
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        shell = subprocess.Popen(["bash", str(job)], stdout=out, stderr=err, env={**os.environ, **found, **slurm})
    deadline = time.monotonic() + 90
    while '"step": 3,' not in (tmp_path / "out").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    shell.send_signal(signal.SIGUSR1)
    assert shell.wait(60) == 0, (tmp_path / "err").read_text()
    assert "SIGUSR1: training stops after" in (tmp_path / "err").read_text()
    assert len(list(saved.glob("step-*"))) == 1
    assert (tmp_path / "requeued").read_text() == f"requeue {os.getpid()}\n"


def test_the_lines_for_the_scheduler(tmp_path: Path) -> None:
    program = write_mlp(tmp_path / "program", Shape(data=2, tensor=2))
    plan = program / "plan.json"
    plan.write_text(plan.read_text().replace('"devices": "4"', '"devices": "2x2xH100-80GB"'))
    text = batch_file(program, "02:00:00", 120, ("--checkpoint", "saved"))
    for line in (
        "--nodes=2",
        "--gpus-per-node=2",
        "--ntasks-per-node=1",
        "--time=02:00:00",
        "--signal=B:USR1@120",
        "--requeue",
    ):
        assert f"\n#SBATCH {line}\n" in text
    assert "--nnodes 2 --nproc-per-node 2 --master-addr" in text and "train.py --checkpoint saved --resume &" in text
    assert "train.py --checkpoint=saved --resume &" in batch_file(program, "1", 1, ("--checkpoint=saved",))
    with pytest.raises(UsageError, match="without checkpoints nothing is saved"):
        batch_file(program, "1", 1, ())
    with pytest.raises(ProgramError, match="has no program"):
        batch_file(tmp_path, "1", 1, ("--checkpoint", "saved"))


def test_a_plan_for_a_cluster_file_has_its_name_alone(tmp_path: Path) -> None:
    program = write_mlp(tmp_path / "program", Shape(data=2, tensor=2))
    plan = program / "plan.json"
    named = plan.read_text().replace('"devices": "4"', '"devices": "our cluster"')
    plan.write_text(named.replace('"gpus_per_node": 0', '"gpus_per_node": 2'))
    text = batch_file(program, "60", 120, ("--checkpoint", "saved"))
    assert "\n#SBATCH --nodes=2\n" in text and "\n#SBATCH --gpus-per-node=2\n" in text
    plan.write_text(named)
    with pytest.raises(ProgramError, match="'our cluster', and does not say how many devices a node has"):
        batch_file(program, "60", 120, ("--checkpoint", "saved"))


def test_nodes_with_gpus(tmp_path: Path) -> None:
    """Open files, NUMA binding where numactl is there, and the flight recorder; without GPUs the first alone."""
    program = write_mlp(tmp_path / "program", Shape(data=2, tensor=2))
    plan = program / "plan.json"
    options = ("--checkpoint", "saved")
    plain = batch_file(program, "60", 120, options)
    plan.write_text(plan.read_text().replace('"devices": "4"', '"devices": "2x2xH100-80GB"'))
    text = batch_file(program, "1-02:00:00", 120, options)
    for part in ("TORCH_FR_BUFFER_SIZE=2000", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE=", "--numa-binding node"):
        assert part in text and part not in plain
    for found in (text, plain):
        assert 'ulimit -n "$(ulimit -Hn)"' in found and "--cpu-bind=none" in found
        subprocess.run(["bash", "-n"], input=found, text=True, check=True)


@pytest.mark.parametrize(
    "name", ["a\n#SBATCH --nodes=99\nrm -rf x", "it's $(touch b) `c`", "caf\udce9 \u00e9"], ids=repr
)
def test_names_of_folders_are_text(name: str, tmp_path: Path) -> None:
    """No line of the file begins inside of a name, and the shell gives the path to train.py as it is."""
    program = write_mlp(tmp_path / name, Shape())
    job = tmp_path / "job.sbatch"
    launch_command(str(program), str(job), "60", 120, ("--checkpoint", "saved"), as_json=True)
    text = job.read_text("utf-8", "surrogateescape")
    lines = text.split("\n\n")[0].splitlines()
    assert len(lines) == 12 and "#SBATCH --nodes=1" in lines
    assert all(line.startswith(("#!/bin/bash", "#SBATCH --", "# ")) for line in lines)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "$SEEN"\n')
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/bash\necho here\n")
    for command in ("srun", "scontrol"):
        (tmp_path / "bin" / command).chmod(0o755)
    found = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SEEN": str(tmp_path / "seen"), "SLURM_JOB_ID": "7"}
    subprocess.run(["bash", str(job)], env={**os.environ, **found}, check=True, cwd=tmp_path)
    words = (tmp_path / "seen").read_bytes().split(b"\0")
    assert os.fsencode(program / "train.py") in words and not (tmp_path / "b").exists()


def test_a_time_limit_is_one_word(tmp_path: Path) -> None:
    program = write_mlp(tmp_path / "program", Shape())
    with pytest.raises(UsageError, match="is not a time limit of SLURM"):
        batch_file(program, "60\n#SBATCH --nodes=9", 120, ("--checkpoint", "saved"))


def test_nodes_of_different_sizes_have_commands_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    group = '[[group]]\nnodes = {}\ngpus_per_node = {}\ngpu = "H100-80GB"\n'
    file.write_text(group.format(2, 8) + group.format(1, 4))
    words = ["my program/train.py", "--init", "a b"]
    end = "'my program/train.py' --init 'a b'"
    assert start_commands(parse(file), 20, words) == {
        "nodes 0 to 1": f"torchrun --nnodes 3 --nproc-per-node 8 {end}",
        "node 2": f"torchrun --nnodes 3 --nproc-per-node 4 {end}",
    }
    even = f"torchrun --nnodes 2 --nproc-per-node 8 {end}"
    assert start_commands(parse(file), 16, words) == {"every node": even}
    assert start_commands(parse("2x8xH100-80GB"), 16, words) == {"every node": even}
    assert list(start_commands(parse("2x8xH100-80GB"), 4, ["train.py"]).values()) == [
        "torchrun --nnodes 1 --nproc-per-node 4 train.py"
    ]
