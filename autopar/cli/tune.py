"""``autopar tune`` measures plans on this machine or in a SLURM allocation, corrects the prices, and plans again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rich.table import Table

from autopar.cli.commands import cluster_and_options, load, recorded_options
from autopar.cli.console import Messages, output_file, plain_table, show
from autopar.cli.options import PlanRequest
from autopar.cli.render import parallelism
from autopar.devices import Cluster
from autopar.devices.calibration import Calibration, default_path, read
from autopar.errors import LaunchError, UsageError
from autopar.run.processes import Placement, check_count
from autopar.run.ranks import is_one_of_several
from autopar.run.slurm import is_in_allocation, is_one_task_of_several, slurm_placement
from autopar.tune import Effort, TuneResult, tune
from autopar.units import seconds


def tune_command(
    request: PlanRequest,
    log: str,
    output: str | None,
    save_calibration: str | None,
    as_json: bool,
    *,
    minutes: float,
    **effort: int,
) -> None:
    """Measure, print the plans and the corrections, and write the requested files."""
    if is_one_of_several() or is_one_task_of_several():
        raise UsageError(
            "tune starts its processes, again after each program that fails, and this is one of several that a launcher started",
            "run it once, without torchrun: with --devices N for one node, or in a SLURM allocation of the cluster's nodes",
        )
    files = [output_file(name, option) if name else None for name, option in _files(log, output, save_calibration)]
    cluster, options = cluster_and_options(request)
    placement = None if cluster.local else _placement(request.devices, cluster, files)
    if placement is None:
        check_count(cluster.count)
    with Messages() as messages:
        workload = load(request, cluster, messages, "cpu")
        result = tune(
            workload,
            cluster,
            options,
            Effort(seconds=60 * minutes, **effort),
            base=None if cluster.gpu.measured is None or placement else _calibration(request),
            log=files[0],
            placement=placement,
            progress=messages,
        )
    best = dataclasses.replace(result.best, request=recorded_options(request))
    if files[1] is not None:
        files[1].write_text(best.dumps() + "\n")
    if files[2] is not None and result.calibration is not None:
        files[2].write_text(result.calibration.dumps())
    sentences = [*failures(result), *_runner_up(result), f"stopped: {result.stopped}"]
    show(as_json, result.to_json(), plans(result), "", corrections(result), "", *sentences)


def _files(log: str, output: str | None, save_calibration: str | None) -> list[tuple[str | None, str]]:
    return [(log, "--log"), (output, "-o"), (save_calibration, "--save-calibration")]


def _placement(devices: str, cluster: Cluster, files: list[Path | None]) -> Placement:
    """Return how to start processes on the nodes of this SLURM allocation; files that they share are beside the log."""
    if not is_in_allocation():
        raise LaunchError(
            f"{devices} describes devices that are not on this machine",
            "tune on the devices of one node (`--devices 4`), or in a SLURM allocation of these nodes (salloc, sbatch)",
        )
    if cluster.parts:
        raise UsageError(
            f"{devices} has nodes of several kinds, and tune measures equal ones", "tune on one of the kinds"
        )
    if files[2] is not None:
        raise UsageError(
            f"--save-calibration has measurements of one node's devices, and {devices} describes a cluster",
            "leave it out: the plan of -o has the corrected prediction",
        )
    assert files[0] is not None
    return slurm_placement(cluster.nodes, cluster.gpus_per_node, files[0].parent)


def _calibration(request: PlanRequest) -> Calibration:
    """Return the calibration that the devices have."""
    path = Path(request.calibration) if request.calibration else default_path()
    assert path is not None
    return read(path)


def plans(result: TuneResult) -> Table:
    """Return the table of plans, the best one first."""
    table = plain_table(
        None, ("plan",), ("predicted", "after corrections", "measured", "95 % interval"), ("parallelism", "outcome")
    )
    for trial in result.trials:
        measured = "" if trial.measured_s is None else seconds(trial.measured_s)
        interval = "" if trial.interval_s is None else " to ".join(map(seconds, trial.interval_s))
        outcome = (
            f"failed: {trial.failure.cause}"
            if trial.failure
            else ("best" if trial is result.trials[0] else f"{(n := len(trial.rounds_s))} round{'s' if n > 1 else ''}")
        )
        priced = seconds(trial.predicted_s), seconds(trial.corrected_s)
        table.add_row(trial.name, *priced, measured, interval, parallelism(trial.plan), outcome)
    return table


def corrections(result: TuneResult) -> Table:
    """Return the table of factors of the calibration's figures."""
    steps = f"{result.measured_steps} measured steps"
    table = plain_table(None, (f"measured times, corrected by {steps}",), ("factor", "95 % interval"))
    for one in result.corrections:
        low, high = one.interval
        table.add_row(one.group, f"{one.factor:.2f}", f"{low:.2f} to {high:.2f}")
    return table


def failures(result: TuneResult) -> list[str]:
    """Return a line for every plan that failed, with the first line of its error."""
    failed = ((trial.name, trial.failure) for trial in result.trials if trial.failure)
    return [f"{name}: {failure.cause}: {failure.error.partition(chr(10))[0]}" for name, failure in failed]


def _runner_up(result: TuneResult) -> list[str]:
    if (other := result.runner_up) is None:
        return []
    low, high = other.interval
    return [
        f"{result.trials[0].name} over {other.name}, rounds paired: {other.ratio:.3f}, 95 % interval {low:.3f} to {high:.3f}"
        + (": no difference was measured" if low <= 1 <= high else "")
    ]
