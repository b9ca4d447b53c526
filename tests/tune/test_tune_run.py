"""The loop of a tuning on two processes: it survives programs that fail, ends with a reason, and resumes from its log."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tuned

from autopar.cli.tune import corrections, failures, plans
from autopar.errors import HANG, OUT_OF_MEMORY, LaunchError, UsageError
from autopar.plan import Plan
from autopar.timing import TimingSession
from autopar.tune import Effort, TuneResult, tune
from autopar.tune.fit import program_of
from autopar.tune.log import WRONG_LOSS, Failure, Log, Request, Round
from autopar.tune.prices import CorrectedPrices

REQUEST = Request("decoder", "2 processes", 1, 2, 2**34, "cpu", "float32", 16, 2048, {}, [])
QUICK = Effort(seconds=90, steps=1, rounds=1, final_rounds=2, first_plans=6, floor_s=2)
FAULT = """

def _with_fault(cls):
    import os, time
    forward = cls.forward

    def faulty(self, *args, **kwargs):
        if os.environ["RANK"] == "1":
            {fault}
        return forward(self, *args, **kwargs)

    cls.forward = faulty

for _stage in PROGRAM.stages:
    _with_fault(_stage)
"""
FAULTS = {
    "plan-2": 'raise MemoryError("planted")',
    "plan-3": "time.sleep(600)",
    "plan-4": "return forward(self, *args, **kwargs) * 1.1",
}


def with_faults(patch: pytest.MonkeyPatch, faults: dict[str, str]) -> None:
    """Let rank 1 of the named plans' programs fail in its forward pass."""
    opened = TimingSession.open_program

    def open_program(self: TimingSession, name: str, *args: object, **options: bool) -> None:
        def change(folder: Path) -> None:
            if name in faults:
                model = folder / "model.py"
                model.write_text(model.read_text() + FAULT.replace("{fault}", faults[name]))

        opened(self, name, *args, change, **options)  # type: ignore[arg-type]

    patch.setattr(TimingSession, "open_program", open_program)


def run(log: Path | None, effort: Effort = QUICK) -> TuneResult:
    return tune(tuned.workload(), tuned.cluster(), tuned.OPTIONS, effort, base=tuned.base(), log=log)


@pytest.mark.timeout(300)
def test_failures_cost_their_turn_and_the_log_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with_faults(monkeypatch, FAULTS)
    one = [{"pipeline": 2, "schedule": name} for name in ("1f1b", "gpipe")]
    few = [*one, {"tensor": 2}, {"zero": 3}, {"zero": 1}]  # so that the time suffices on a busy machine, too
    monkeypatch.setattr(CorrectedPrices, "families", lambda self: few)
    monkeypatch.setattr(CorrectedPrices, "neighbours", lambda self, plan: [])
    monkeypatch.setattr("autopar.tune.run.SPREAD", 100.0)
    path = tmp_path / "tune.jsonl"
    found = run(path)
    outcome = {trial.name: trial.failure for trial in found.trials}
    causes = {name: failure.cause for name, failure in outcome.items() if failure}
    assert causes == {"plan-2": OUT_OF_MEMORY, "plan-3": HANG, "plan-4": WRONG_LOSS}, outcome
    text = "\n".join(failures(found))
    assert "plan-2: out of memory: rank 1: " in text and "plan-3: hang: no answer from rank" in text
    assert "of plan-1" in text
    ran = [trial for trial in found.trials if not trial.failure]
    assert len(ran) >= 2 and ran[0] is found.trials[0] and found.trials[0].measured_s is not None
    programs = [program_of(trial.plan) for trial in found.trials]
    assert len(set(programs)) == len(programs)
    assert found.best.layers == found.trials[0].plan.layers and "measured" in found.best.notes[-1]
    assert Plan.from_json(json.loads(found.best.dumps())).layers == found.best.layers
    assert plans(found).row_count == len(found.trials) and corrections(found).row_count == len(found.corrections)
    assert json.loads(json.dumps(found.to_json()))["best"] == found.trials[0].name
    assert {one.group for one in found.corrections} == set(tuned.prices().groups)
    assert all(low <= one.factor <= high for one in found.corrections for low, high in [one.interval])

    lines = path.read_text()
    path.write_text(lines + '{"kind": "round", "sec')  # the writer was killed
    again = run(path, Effort(seconds=0))
    assert path.read_text() == lines
    assert [trial.name for trial in again.trials if not trial.failure] == [trial.name for trial in ran]
    assert [trial.rounds_s for trial in again.trials] == [trial.rounds_s for trial in found.trials]
    assert again.stopped == "the time of 0 us is over" and again.measured_steps == found.measured_steps
    assert again.calibration.figures == found.calibration.figures
    other = dataclasses.replace(tuned.base(), measured_at="another time")
    with pytest.raises(UsageError, match="was started with another calibration"):
        tune(tuned.workload(), tuned.cluster(), tuned.OPTIONS, Effort(seconds=0), base=other, log=path)


@pytest.mark.timeout(120)
def test_where_no_plan_runs_the_first_error_is_said(monkeypatch: pytest.MonkeyPatch):
    with_faults(monkeypatch, {f"plan-{i}": 'raise ValueError("planted")' for i in range(1, 100)})
    with pytest.raises(LaunchError, match=r"all \d+ plans failed to run: plan-1: rank 1: ValueError: planted"):
        run(None, Effort(seconds=1, first_plans=1))


def started(path: Path) -> list[dict[str, object]]:
    """The lines of a log with a plan, two rounds and a failure."""
    log = Log(path, REQUEST)
    log.set_base(tuned.base())
    first, second = (tuned.prices().repriced([tuned.plans()[n]], {})[0] for n in ("tensor 2", "data 2, ZeRO 0"))
    log.add_plan(first)
    log.add_plan(second)
    log.add_round(Round({"plan-1": 0.5}, 3, {}))
    log.add_failure("plan-2", Failure(HANG, "it hangs"))
    return [json.loads(line) for line in path.read_text().splitlines()]


def change(key: str, value: object) -> Callable[[dict[str, object]], None]:
    return lambda line: line.update({key: value})


BROKEN = [
    (0, change("kind", "round"), "line 1: the first line is not a request"),
    (0, lambda line: line.pop("pins"), "line 1: the request lacks, or should not have, 'pins'"),
    (0, change("nodes", 4), "another request: its nodes is 4, not 1"),
    (0, change("version", 9), "another request: its version is 9, not 2"),
    (1, change("calibration", {}), "line 2: it is not a JSON object of version 1"),
    (2, change("name", "plan-7"), "line 3: the plan's name is 'plan-7', not plan-1"),
    (2, change("plan", {"mesh": 3}), "line 3: "),
    (4, change("seconds", {"plan-1": -1.0}), "line 5: plan-1 has -1.0"),
    (4, change("seconds", {"plan-1": True}), "line 5: plan-1 has True"),
    (4, change("seconds", {"plan-9": 1.0}), "line 5: there is no plan 'plan-9' before it"),
    (4, change("seconds", [1.0]), "line 5: \\[1.0\\] is not a JSON object"),
    (4, change("steps", 0), "line 5: steps is 0"),
    (4, change("more", 1), "line 5: it lacks, or should not have, 'more'"),
    (5, change("cause", "magic"), "line 6: no failure of a plan"),
    (5, change("kind", "exec"), "line 6: there is no kind of line 'exec'"),
    (5, change("kind", ["exec"]), "line 6: there is no kind of line"),
]


@pytest.mark.parametrize(
    ("number", "damage", "message"), BROKEN, ids=lambda value: value if isinstance(value, str) else None
)
def test_a_malformed_log_is_refused_with_its_line(
    tmp_path: Path, number: int, damage: Callable[[dict[str, object]], object], message: str
):
    path = tmp_path / "tune.jsonl"
    lines = started(path)
    read = Log(path, REQUEST)
    assert read.rounds_of("plan-1") == [(0.5,)] and read.failures["plan-2"].cause == HANG and read.measured_steps == 3
    assert read.base == tuned.base() and list(read.plans) == ["plan-1", "plan-2"]
    damage(lines[number])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UsageError, match=message):
        Log(path, REQUEST)


@pytest.mark.parametrize("text", ["{}\n", "[1]\n", "not json\n", '{"kind": "request"', "\x00\n", '{"a": NaN}\n'])
def test_a_file_that_is_no_log_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "tune.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match="is not a log of `autopar tune`"):
        Log(path, REQUEST)
    assert path.read_text() == text


def test_a_log_that_cannot_be_read_or_written_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="cannot be written"):
        Log(tmp_path / "no" / "tune.jsonl", REQUEST)
    (tmp_path / "tune.jsonl").mkdir()
    with pytest.raises(UsageError, match="cannot be read"):
        Log(tmp_path / "tune.jsonl", REQUEST)
