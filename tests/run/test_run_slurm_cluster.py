"""Two nodes of a SLURM cluster on this machine: ranks that srun starts, and a job that saves before its time limit and is queued again.

It needs root, and the packages slurm-wlm and munge of Debian; the daemons run until the module's tests end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tuned
from programs import Shape, mlp_model, write_mlp

from autopar.cli.launch import batch_file
from autopar.devices import parse
from autopar.errors import UsageError
from autopar.program.state import INITIAL
from autopar.program.weights import write_file
from autopar.run import processes
from autopar.run.processes import Processes
from autopar.run.slurm import slurm_placement
from autopar.tune import Effort, tune

DAEMONS = ("munged", "slurmctld", "slurmd")
missing = [name for name in DAEMONS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(missing), reason=f"this machine has no {', '.join(missing)} (Debian: slurm-wlm, munge)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="SLURM's daemons need root"),
]
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmctldPidFile={home}/slurmctld.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdPidFile={home}/slurmd-%n.pid
SlurmdLogFile={home}/slurmd-%n.log
SlurmdSpoolDir={home}/spool-%n
StateSaveLocation={home}/state
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
NodeName={nodes[0]} NodeHostname={host} Port={ports[1]} CPUs=2 RealMemory=4000
NodeName={nodes[1]} NodeHostname={host} Port={ports[2]} CPUs=2 RealMemory=4000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def wait_for(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} took more than {limit_s} s"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The names of the nodes of a cluster, whose commands are on PATH and find it. Both are this machine."""
    home, host = tmp_path_factory.mktemp("slurm"), socket.gethostname()
    names = ("127.0.0.1", "127.0.0.2")
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as running:
        patch.setenv("PATH", f"{os.environ['PATH']}:/usr/sbin")
        patch.setenv("SLURM_CONF", str(home / "slurm.conf"))
        patch.setattr(processes, "subprocess", subprocess)  # a fork of the tests' server has no srun
        text = CONFIGURATION.format(home=home, host=host, nodes=names, ports=free_ports(3))
        (home / "slurm.conf").write_text(text)
        (home / "state").mkdir()
        (home / "key").write_bytes(os.urandom(128))
        (home / "key").chmod(0o600)
        files = [
            f"--{name}={home / name.partition('-')[0]}" for name in ("key-file", "pid-file", "log-file", "seed-file")
        ]
        starts = [["munged", "--foreground", "--force", f"--socket={home / 'munge'}", *files], ["slurmctld", "-D"]]
        for name in names:
            (home / f"spool-{name}").mkdir()
            starts.append(["slurmd", "-D", "-N", name])
        for command in starts:
            daemon = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            running.callback(daemon.wait)
            running.callback(daemon.terminate)
            if command[0] == "munged":
                wait_for((home / "munge").exists, 10, "munged")
        wait_for(lambda: slurm("sinfo", "-h", "-o", "%D %T").split() == ["2", "idle"], 60, "the start of the nodes")
        yield names


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


IN_ALLOCATION = """
import sys
sys.path[:0] = {path!r}
from test_run_slurm_cluster import inside
inside({folder!r})
"""


def test_ranks_and_tunings_in_an_allocation(nodes: tuple[str, str], tmp_path: Path) -> None:
    script = IN_ALLOCATION.format(path=sys.path, folder=str(tmp_path))
    command = ["salloc", "--nodes=2", "--time=10", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    first, second = nodes
    assert found["nodes"] == [first, first, second, second] and found["ranks"] == ["0", "1", "2", "3"]
    assert found["refused"] == "the SLURM allocation has 2 nodes, and the devices are 3 nodes"
    assert found["ran"] >= 2 and found["groups"] == [
        "arithmetic",
        "links between nodes",
        "links in a node",
        "memory bandwidth",
    ]
    assert not list(tmp_path.glob("autopar-*"))


def inside(folder: str) -> None:
    """In the allocation: print which ranks run where, and what a tuning of a small model found."""
    home = Path(folder)
    workers = Processes(4, placement=slurm_placement(2, 2, home))
    ranks, places = (workers.call("os:getenv", name) for name in ("RANK", "SLURMD_NODENAME"))
    workers.close()
    try:
        refused = str(slurm_placement(3, 1, home))
    except UsageError as error:
        refused = error.message
    cluster = dataclasses.replace(parse(2), nodes=2, gpus_per_node=1, local=False)
    effort = Effort(seconds=10, steps=1, rounds=1, final_rounds=2, first_plans=2)
    placement = slurm_placement(2, 1, home)
    tuning = tune(tuned.workload(), cluster, tuned.OPTIONS, effort, log=home / "tune.jsonl", placement=placement)
    ran = sum(trial.failure is None for trial in tuning.trials)
    groups = sorted(one.group for one in tuning.corrections)
    print(json.dumps({"ranks": ranks, "nodes": places, "refused": refused, "ran": ran, "groups": groups}))


def test_a_job_saves_before_its_limit_is_queued_again_and_resumes(nodes: tuple[str, str], tmp_path: Path) -> None:
    """The batch file of ``autopar dev launch`` for two nodes, without the request for GPUs."""
    program = write_mlp(tmp_path / "program", Shape(data=2, tensor=2))
    write_file(program / INITIAL, mlp_model().state_dict())
    plan = program / "plan.json"
    plan.write_text(plan.read_text().replace('"devices": "4"', '"devices": "2x2xH100-80GB"'))
    saved, job, log = tmp_path / "saved", tmp_path / "job.sbatch", tmp_path / "program-1.log"
    options = ("--device", "cpu", "--steps", "1000000", "--checkpoint", str(saved), "--every", "1000000")
    text = batch_file(program, "01:00:00", 300, options)
    job.write_text(text.replace("#SBATCH --gpus-per-node=2\n", ""))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    submit = ["sbatch", "--parsable", f"--output={log}", str(job)]
    number = subprocess.run(
        submit, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()
    try:
        wait_for(lambda: log.exists() and '"step": 3,' in log.read_text(), 120, "the first steps")
        slurm("scancel", "--signal=USR1", "--batch", number)  # as SLURM does before the time limit
        wait_for(lambda: slurm("squeue", "-h", "-j", number, "-o", "%t").strip() == "PD", 120, "queueing it again")
        assert "SIGUSR1: training stops after" in log.read_text() and len(list(saved.glob("step-*"))) == 1
        last = int(next(saved.glob("step-*")).name.partition("-")[2])
        slurm("scontrol", "update", f"JobId={number}", "StartTime=now")  # SLURM waits two minutes otherwise
        wait_for(lambda: f'"step": {last + 3},' in log.read_text(), 120, "resuming")
        assert log.read_text().count(f'"step": {last},') == 1 and '"step": 1,' in log.read_text()
    finally:
        slurm("scancel", number)
        wait_for(lambda: not slurm("squeue", "-h"), 90, "the end of the job")
