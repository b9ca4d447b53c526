"""``autopar tune`` at the command line: what it refuses, prints and writes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tuned

from autopar.cli import main
from autopar.cli import tune as tune_cli
from autopar.devices.calibration import read
from autopar.devices.corrections import ARITHMETIC
from autopar.errors import HANG
from autopar.plan_files import read_plan
from autopar.tune import TuneResult
from autopar.tune.log import Failure
from autopar.tune.result import Correction, RunnerUp, Trial


def result() -> TuneResult:
    """A result in which one plan hangs."""
    plans = [tuned.plans()[name] for name in ("tensor 2", "data 2, ZeRO 0", "pipeline 2, 4 microbatches")]
    best, *_ = tuned.prices().repriced(plans, {})
    return TuneResult(
        best=best,
        trials=(
            Trial("plan-2", plans[0], 0.2, 0.5, 0.51, (0.5, 0.52), 0.51, (0.5, 0.52)),
            Trial("plan-1", plans[1], 0.1, 0.6, 0.6, (0.6, 0.6), 0.6, (0.6, 0.6)),
            Trial("plan-3", plans[2], 0.3, 0.9, 0.9, (), None, None, Failure(HANG, "no answer from rank 1\nmore")),
        ),
        corrections=(Correction(ARITHMETIC, 2.5, (2.0, 3.1)),),
        calibration=tuned.prices().calibration_with({ARITHMETIC: 2.5}, 12),
        runner_up=RunnerUp("plan-1", 0.85, (0.8, 1.01)),
        bound_s=0.45,
        measured_steps=12,
        stopped="no plan could be faster",
        took_s=3.0,
    )


def run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["tune", "gpt2", *options])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return caught.value.code or 0, captured.out, captured.err  # type: ignore[return-value]


def test_the_result_is_printed_and_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    given: dict[str, Any] = {}

    def tune(workload: object, cluster: object, options: object, effort: object, **more: Any) -> TuneResult:
        given.update(more, effort=effort)
        return result()

    monkeypatch.setattr(tune_cli, "tune", tune)
    monkeypatch.setattr(tune_cli, "load", lambda *_: None)
    plan, calibration, log = (str(tmp_path / name) for name in ("plan.json", "tuned.json", "tune.jsonl"))
    wanted = ("--devices", "2", "--log", log, "-o", plan, "--save-calibration", calibration, "--minutes", "2")
    status, out, _ = run(capsys, *wanted)
    lines = out.splitlines()
    assert status == 0 and lines[0].split()[:3] == ["plan", "predicted", "after"]
    assert "200.00 ms" in lines[1] and "510.00 ms" in lines[1]
    assert "TP 2" in out and "best" in out  # narrow terminals wrap the last columns
    assert "failed: hang" in out and "plan-3: hang: no answer from rank 1\n" in out and "2.00 to 3.10" in out
    assert "plan-2 over plan-1, rounds paired: 0.850, 95 % interval 0.800 to 1.010: no difference was measured" in out
    assert lines[-1] == "stopped: no plan could be faster"
    assert given["base"] is None and given["log"] == Path(log) and given["effort"].seconds == 120
    assert read_plan(plan).request["model"] == "gpt2"
    assert read(Path(calibration)).machine["corrected"]["2 cpu"] == {
        "measured_steps": 12,
        "factors": {ARITHMETIC: 2.5},
    }
    status, out, _ = run(capsys, *wanted, "--json")
    assert status == 0 and json.loads(out)["trials"][2]["failure"] == {
        "cause": HANG,
        "error": "no answer from rank 1\nmore",
    }


def test_a_given_calibration_is_the_one_that_is_corrected(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    bases: list[object] = []

    def tune(*_: object, base: object, **__: object) -> TuneResult:
        bases.append(base)
        return result()

    monkeypatch.setattr(tune_cli, "tune", tune)
    monkeypatch.setattr(tune_cli, "load", lambda *_: None)
    monkeypatch.setattr("autopar.devices.calibration.machine_mismatch", lambda _: "")
    path = tmp_path / "base.json"
    path.write_text(dataclasses.replace(tuned.base()).dumps())
    assert run(capsys, "--devices", "2", "--calibration", str(path), "--log", str(tmp_path / "log"))[0] == 0
    assert bases == [tuned.base()]


def test_what_cannot_be_tuned_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    status, out, err = run(capsys, "--devices", "8xH100-80GB", "--log", str(tmp_path / "log"))
    assert (
        (status, out) == (1, "")
        and "not on this machine" in err
        and "in a SLURM allocation of these nodes (salloc, sbatch)" in err
    )
    status, _, err = run(capsys, "--devices", "2", "--log", str(tmp_path / "no" / "log"))
    assert status == 2 and "there is no folder" in err
    monkeypatch.setenv("WORLD_SIZE", "8")
    status, _, err = run(capsys, "--devices", "2", "--log", str(tmp_path / "log"))
    assert (
        status == 2 and "one of several that a launcher started" in err and "hint: run it once, without torchrun" in err
    )


def test_nodes_of_an_allocation_are_tuned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    given: list[object] = []

    def tune(*_: object, **options: object) -> TuneResult:
        given.extend((options["placement"], options["base"]))
        return dataclasses.replace(result(), calibration=None)

    monkeypatch.setattr(tune_cli, "tune", tune)
    monkeypatch.setattr(tune_cli, "load", lambda *_: None)
    monkeypatch.setattr(tune_cli, "slurm_placement", lambda *sizes: sizes)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    wanted = ("--devices", "2x8xH100-80GB", "--log", str(tmp_path / "log"))
    status, out, _ = run(capsys, *wanted, "-o", str(tmp_path / "plan.json"))
    assert status == 0 and "plan-2" in out and given == [(2, 8, tmp_path), None]
    assert read_plan(tmp_path / "plan.json").request["devices"] == "2x8xH100-80GB"
    status, _, err = run(capsys, *wanted, "--save-calibration", str(tmp_path / "tuned.json"))
    assert status == 2 and "--save-calibration has measurements of one node's devices" in err
    mixed = tmp_path / "mixed.toml"
    mixed.write_text(
        "".join(f'[[group]]\nnodes = 1\ngpus_per_node = 8\ngpu = "{gpu}-80GB"\n' for gpu in ("A100", "H100"))
    )
    status, _, err = run(capsys, "--devices", str(mixed), "--log", str(tmp_path / "log"))
    assert status == 2 and "nodes of several kinds" in err
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert "one of several" in run(capsys, *wanted)[2]
