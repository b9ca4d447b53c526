"""``autopar dev launch`` writes the batch file that starts a program under SLURM, saves before the time limit, and resumes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from autopar.cli.console import output_file, show
from autopar.devices import parse
from autopar.errors import DeviceError, ProgramError, UsageError
from autopar.plan import Plan
from autopar.plan_files import read_plan

_BATCH_FILE = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
#SBATCH --time={time}
#SBATCH --signal=B:USR1@{before}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# {devices} devices for the program in {folder!r}. Written by `autopar dev launch`; yours to edit.
# {before} s before the time limit this shell gets SIGUSR1: the ranks save a checkpoint and end, and the job is queued again.

export MASTER_ADDR MASTER_PORT
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
{recorder}
again=
stop() {{
    again=yes
    kill -USR1 "$step"  # srun passes it on to all processes of the step
}}
trap stop USR1

# torchrun ignores SIGUSR1, the ranks answer it. Each node opens as many files as it may, and {binding}.
srun --kill-on-bad-exit=1 --cpu-bind=none bash -c '
    trap "" USR1
    ulimit -n "$(ulimit -Hn)" || true
    {bind}exec torchrun --node-rank "$SLURM_NODEID" "$@"' torchrun \\
    --nnodes {nodes} --nproc-per-node {ranks} --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \\
    {train} &
step=$!
wait "$step"
status=$?
if [ -n "$again" ]; then
    wait "$step"  # the signal has ended the first one, not the step
    status=$?
    [ "$status" -eq 0 ] && scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""

_RECORDER = """
# The last collectives of every rank, in a file of each, when one of them does not end; torchfrtrace of torch compares the files.
export TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1
export TORCH_FR_DUMP_TEMP_FILE="$PWD/nccl-$SLURM_JOB_ID-rank-" TORCH_NCCL_DEBUG_INFO_PIPE_FILE="/tmp/nccl-$SLURM_JOB_ID-rank-"
"""


def launch_command(folder: str, slurm: str, time: str, save_before: int, options: Sequence[str], as_json: bool) -> None:
    """Write the batch file and print its path; ``options`` are options of ``train.py``."""
    path = output_file(slurm, "--slurm")
    path.write_text(batch_file(Path(folder), time, save_before, options), "utf-8", "surrogateescape")
    show(as_json, {"file": str(path)}, str(path))


def batch_file(folder: Path, time: str, save_before_s: int, options: Sequence[str]) -> str:
    """Return the text of the batch file for the program in ``folder``.

    Raises:
        ProgramError: there is no program, or its plan does not say how many devices a node has.
        UsageError: ``options`` lack ``--checkpoint``, so that nothing could be saved before the time limit.
    """
    if not (folder / "plan.json").is_file():
        raise ProgramError(f"{folder} has no program", "write one with `autopar emit ... -o DIR`")
    if not any(option.partition("=")[0] == "--checkpoint" for option in options):
        raise UsageError(
            "without checkpoints nothing is saved before the time limit",
            "give train.py's options after --, among them --checkpoint DIR, which all nodes share",
        )
    if not re.fullmatch(r"[\w:-]+", time):
        raise UsageError(
            f"{time!r} is not a time limit of SLURM",
            "give minutes, hours:minutes:seconds or days-hours:minutes:seconds",
        )
    plan = read_plan(folder / "plan.json")
    gpus, per_node = _node(plan)
    ranks = min(plan.device_count, per_node)
    nodes = -(-plan.device_count // ranks)
    resume = [] if "--resume" in options else ["--resume"]
    train = [str(folder.resolve() / "train.py"), *options, *resume]
    return _BATCH_FILE.format(
        name=re.sub(r"[^\w.+-]+", "-", folder.resolve().name, flags=re.ASCII),
        nodes=nodes,
        gpus=f"#SBATCH --gpus-per-node={ranks}\n" if gpus else "",
        time=time,
        before=save_before_s,
        devices=plan.device_count,
        folder=str(folder.resolve()),
        recorder=_RECORDER if gpus else "",
        binding="binds each rank to the processors near its GPU, where numactl is there" if gpus else "nothing else",
        bind='command -v numactl > /dev/null && set -- --numa-binding node "$@"\n    ' if gpus else "",
        ranks=ranks,
        train=shlex.join(train),
    )


def _node(plan: Plan) -> tuple[bool, int]:
    """Return whether the plan is for GPUs, and the number of devices of a node; ``plan.devices`` may be the name of a cluster file."""
    if plan.gpus_per_node:
        return True, plan.gpus_per_node
    try:
        cluster = parse(plan.devices)
    except DeviceError as error:
        raise ProgramError(
            f"the plan is for {plan.devices!r}, and does not say how many devices a node has: its nodes differ, or have no GPUs",
            "emit a program for nodes of equal GPUs, or with --devices such as 4",
        ) from error
    return cluster.kind == "cuda", cluster.gpus_per_node
