"""The command line's manners: statuses, where words go, no tracebacks."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import autopar
from autopar.capture import capture
from autopar.cli import bench, commands, main
from autopar.cli import profile as profile_cli
from autopar.cli.console import Messages, progress_bar
from autopar.errors import CaptureError, InfeasibleError, UsageError
from autopar.plan import Prediction
from autopar.run import processes
from autopar.search.manual import manual_plan
from autopar.shard import annotate
from autopar.units import parse_size


def invoke(capsys, *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return caught.value.code, captured.out, captured.err


PLAN = ("plan", "gpt2", "--global-batch", "8")
MLP = f"{Path(__file__).parents[2]}/examples/mlp.py:model"


def test_without_a_command_the_help_is_shown(capsys):
    code, out, err = invoke(capsys)
    assert code == 2 and not out and err.startswith("Usage: autopar") and "error" not in err and "plan " in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("plan",), "Missing argument 'MODEL'"),
        (("plan", "gpt2"), "Missing option '--devices'"),
        (("trace", "plan.json"), "write `autopar report PLAN --trace FILE`"),
        (("launch", "program"), "write `autopar dev launch`"),
        (("models",), "write `autopar help models`"),
        ((*PLAN, "--devices", "2", "--within", "150%"), "150% is not a percentage from 0% to 100%: write 1% or 0.01"),
        ((*PLAN, "--devices", "2", "--within", "1"), "1 is not a percentage from 0% to 100%: write 1% or 0.01"),
        (("launhc",), "did you mean `autopar dev launch`?"),
        (("dev", "zzz"), "`autopar dev --help` lists them"),
        (("help", "models", "gpt2"), "has no part 'gpt2'"),
        (("price", "gpt2", "--devices", "8xH100-80GB", "--pin", "head.zero=1"), "has the same pins for every layer"),
        (("price", "gpt2", "--devices", "8xH100-80GB", "--pin", "data=4"), "do not divide into"),
        (("report", "plan.json"), "add -o FILE, --plot FILE, --trace FILE"),
        (("report", "plan.json", "-o", "a.html", "--measured", "b.json"), "add --trace FILE"),
        (("report", "a.json", "b.json", "--trace", "c.json"), "leave --trace out, or one of the plans"),
        (("fly",), "there is no command `autopar fly`"),
        (("memory", "plan.json"), "hint: `plan` prints the memory of each stage"),
        (("train", "model.py:model"), "hint: `run` trains in local processes"),
        ((*PLAN, "--devices", "0"), "must be positive, not 0"),
        ((*PLAN, "--devices", "-4"), "must be positive, not -4"),
        ((*PLAN, "--devices", "8xH1000-80GB"), "H1000"),
        ((*PLAN, "--devices", "8xH100-80GB", "--memory-limit", "much"), "'much' is not a size"),
        ((*PLAN, "--devices", "8xH100-80GB", "--zero", "4"), "zero is 4, it must be a whole number from 0 to 3"),
        ((*PLAN, "--devices", "8xH100-80GB", "--schedule", "zigzag"), "zigzag"),
        ((*PLAN, "--devices", "8xH100-80GB", "--pipeline", "0"), "pipeline is 0"),
        ((*PLAN, "--devices", "8xH100-80GB", "--precision", "int3"), "no precision 'int3'"),
        (("plan", "gpt22", "--devices", "8xH100-80GB"), "no model called 'gpt22'"),
        (("emit", "gpt2", "--devices", "4", "-o", __file__), "is a file"),
        (("run", "gpt2", "--devices", "4", "--steps", "0"), "--steps"),
        (("run", "gpt2", "--devices", "4", "--resume"), "add --checkpoint DIR"),
        (("run", "gpt2", "--devices", "4", "--shuffle"), "add --dataset DATA"),
        (("run", "gpt2", "--devices", "4", "--data", "rows.pt"), "write --dataset DATA"),
        (("run", "gpt2", "--devices", "4", "--data", "-1"), "write data=8"),
        (("run", "gpt2", "--devices", "2", "--dataset", "nowhere.pt"), "there is no file nowhere.pt"),
        (("run", "gpt2", "--devices", "2", "--eval-data", f"{__file__}:nothing"), "has no attribute 'nothing'"),
        ((*PLAN, "--devices", "2", "--dtype", "bf16"), "hint: write --precision bfloat16"),
        ((*PLAN, "--devices", "2", "--pin", "tp=2"), "hint: write tensor=..., the tensor-parallel degree"),
        (("run", "gpt2", "--devices", "4", "--eval-every", "2"), "add --eval-data DATA"),
        (
            ("run", MLP, "--devices", "1", "--time-limit", "1", "--no-capture-check", "--eval-data", "os:getcwd"),
            "--eval-data os:getcwd: the program cannot evaluate the model: it was not compared with the model in evaluation mode: the "
            "comparison is switched off (--no-capture-check",
        ),
        (
            ("run", "gpt2", "--devices", "4", "--elastic", "1:1", "--dataset", "x.pt"),
            "--elastic trains on the example batch",
        ),
        (("emit", "gpt2", "--devices", "4", "-o", f"{__file__}/program"), "is a file"),
        (("sweep", "gpt2", "--devices", "8", "--plot", "/nowhere/at/all.png"), "no folder /nowhere/at"),
        (("sweep", "gpt2", "--devices", "8", "--plot", "all.txt"), "has no suffix of a picture format"),
        (("sweep", "gpt2", "--devices", "8..4"), "'8..4' is not a range"),
        (("sweep", "gpt22", "--devices", "8"), "no model called 'gpt22'"),
        (("sweep", "gpt2", "--devices", "8", "--seq", "4096"), "1024 learned positions"),
        (("bench", "--plot", "/nowhere/at/all.png"), "no folder /nowhere/at"),
        (("bench", "-o", "/"), "/ is a folder"),
        (("profile", "-o", "/nowhere/at/all.json"), "no folder /nowhere/at"),
        (("explain", "nowhere.json", "--devices", "8xH100-80GB"), "no file nowhere.json"),
        (("compare", "nowhere.json", "nowhere.json"), "nowhere.json cannot be read"),
        (("verify", "gpt2", "--seq", "0"), "--seq is 0"),
        ((*PLAN, "--devices", "2", "--seq", "9999999999"), "--seq is 9,999,999,999, it must be at most"),
        ((*PLAN, "--devices", "8xH100-80GB", "--time-limit", "nan"), "the time limit is nan"),
        ((*PLAN, "--devices", "8xH100-80GB", "--memory-limit", "200GB"), "a device of 8xH100-80GB has 85.9 GB"),
        ((*PLAN, "--devices", "8xH100-80GB", "--schedule", "1f1b", "--pipeline", "1"), "pipeline=1 has no pipeline"),
        (("profile", "--processes", "100000"), "100000 processes on"),
        ((*PLAN, "--devices", "99999999999999999999"), "more than autopar plans for"),
        ((*PLAN, "--devices", "8xH100-80GB", "--memory-limit", "1e400"), "'1e400' is not a size"),
        ((*PLAN, "--devices", "8xH100-80GB", "-o", "/nowhere/at/all.json"), "no folder /nowhere/at"),
        (("price", "gpt2", "--devices", "8xH100-80GB", "-o", "/"), "/ is a folder"),
        (
            ("price", "gpt2", "--devices", "8xH100-80GB", "--plan", "a.json", "--tensor", "2"),
            "remove --plan, or --pin tensor=2",
        ),
        (
            ("emit", "gpt2", "--devices", "2", "-o", "p", "--plan", "a.json", "--pin", "zero=1"),
            "remove --plan, or --pin zero=1",
        ),
        (
            ("dev", "init", "gpt2", "--devices", "2", "--global-batch", "8", "-o", __file__),
            "cannot be made",
        ),
        (("ui", "/nowhere/model.py:model"), "no file /nowhere/model.py"),
        (("ui", MLP.partition(":")[0]), f"hint: did you mean {MLP}"),
        (("plan", ":model", "--devices", "2"), "no file before the colon"),
        (("emit", "gpt2", "--devices", "4", "-o", ""), "is no path"),
        (("run", "gpt2", "--devices", "2", "--seed", "9" * 30), "--seed"),
        (("run", "gpt2", "--devices", "2", "--checkpoint", __file__), "checkpoints cannot be written to"),
        (("run", "gpt2", "--devices", "2", "--checkpoint", "/proc/nothing"), "checkpoints cannot be written to"),
        (("run", "gpt2", "--devices", "2", "--elastic", "1:1", "--meet", "here"), "--meet here is not an address"),
        (("run", "gpt2", "--devices", "2", "--elastic", "1:1", "--meet", "a.invalid:1"), "there is no host a.invalid"),
    ],
)
def test_requests_that_are_wrong_end_with_2_and_a_hint(capsys, argv, words):
    status, out, err = invoke(capsys, *argv)
    assert (status, out) == (2, "")
    assert words in err and (err.startswith("error: ") or "\nerror: " in err)
    assert "hint: " in err


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("plan.json", '{"mesh": [], "stages": []}', "plan.json is a plan, not the configuration of a model"),
        ("foreign.json", '{"model_type": "no-such-model"}', " ...\nhint: give the config.json"),
        (
            "wide.py:model",
            "def model(width): ...",
            "requires the argument width, and autopar has no value for it\nhint: give it",
        ),
    ],
)
def test_a_model_that_cannot_be_built_gets_a_short_reason_and_a_hint(
    capsys, tmp_path: Path, file: str, text: str, words: str
):
    (tmp_path / file.partition(":")[0]).write_text(text)
    status, _, err = invoke(capsys, "plan", f"{tmp_path}/{file}", "--devices", "2")
    assert status == 2 and words in err and max(map(len, err.splitlines())) < 500


def test_a_file_that_holds_no_plan_is_named_with_the_reason(capsys, tmp_path):
    plan = manual_plan(
        annotate(capture(nn.Linear(4, 4), (torch.zeros(4, 4), torch.zeros(4, 4)), nn.functional.mse_loss))
    )
    whole = {**plan.to_json(), **asdict(Prediction(1.0, 1.0, 0.0, 0.0, 0.0, 0.5, 1.0))}
    odd = {
        "[1, 2]": "it is not a JSON object",
        json.dumps({"feasible": False, "error": "nothing fits"}): "it says that nothing fits",
        json.dumps(whole | {"step_time_s": float("nan")}): "NaN is not a number",
        json.dumps(whole | {"compute_s": "much"}): "compute_s is 'much', not a number",
        json.dumps(whole | {"stages": []}): "stages has 0 items",
        json.dumps({key: value for key, value in whole.items() if key != "mesh"}): "it has no 'mesh'",
    }
    file = tmp_path / "plan.json"
    for text, words in odd.items():
        file.write_text(text)
        status, out, err = invoke(capsys, "compare", str(file), str(file))
        assert (status, out) == (2, "") and f"{file} holds no plan (" in err and words in err, text
    file.write_text(json.dumps(whole))
    assert invoke(capsys, "compare", str(file), str(file))[0] == 0


def fail_with(error: BaseException):
    def stage(*args, **kwargs):
        raise error

    return stage


def test_infeasible_is_an_answer(capsys, monkeypatch):
    error = InfeasibleError("stage 0 needs 90 GB for layer head", "a limit of 91 GB would do")
    monkeypatch.setattr(commands, "plan_model", fail_with(error))
    status, out, err = invoke(capsys, *PLAN, "--devices", "8xH100-80GB", "--json")
    assert status == 1
    assert json.loads(out) == {"feasible": False, "error": error.message, "hint": error.hint, "changes": []}
    status, out, err = invoke(capsys, *PLAN, "--devices", "8xH100-80GB")
    assert (status, out) == (1, "")
    assert f"error: {error.message}\nhint: {error.hint}\n" in err


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (CaptureError("model.py:3: data-dependent branch"), 1, "error: model.py:3: data-dependent branch"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("by zero"), 1, "error: ZeroDivisionError: by zero"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "error: No space left on device\nhint: give a file"),
        (
            OSError(errno.EROFS, "Read-only file system", "p.json"),
            1,
            "error: p.json: Read-only file system\nhint: give",
        ),
    ],
)
def test_other_ends(capsys, monkeypatch, error, status, words):
    monkeypatch.setattr(commands, "plan_model", fail_with(error))
    got, out, err = invoke(capsys, *PLAN, "--devices", "8xH100-80GB")
    assert got == status and out == "" and words in err


def test_a_path_in_brackets_is_text(capsys):
    with Messages() as messages:
        messages.console = Console(stderr=True, force_terminal=True)
        messages._status = messages.console.status("")
        messages("load", "x[/y]/m.py:f")
        messages.say("x[/y]/m.py:f")
    with progress_bar("x[/y]/m.py:f") as progress:
        progress("x[/y]", 1, 2)
    assert "x[/y]/m.py:f" in capsys.readouterr().err


def test_a_measurement_that_cannot_be_written_is_not_made(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOPAR_CALIBRATION", str(tmp_path / "file" / "calibration.json"))
    monkeypatch.setattr(profile_cli, "profile", fail_with(AssertionError("measured")))
    status, _, err = invoke(capsys, "profile", "--processes", "1")
    assert status == 2 and "calibration.json cannot be written" in err
    monkeypatch.setenv("AUTOPAR_CALIBRATION", str(tmp_path))
    status, _, err = invoke(capsys, "profile", "--processes", "1")
    assert status == 2 and f"AUTOPAR_CALIBRATION {tmp_path} is a folder" in err


def test_a_benchmark_without_matplotlib_draws_nothing_and_measures_nothing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "pyplot", fail_with(UsageError("a plot needs matplotlib", "install it")))
    monkeypatch.setattr(bench, "contest", fail_with(AssertionError("measured")))
    status, _, err = invoke(capsys, "bench", "llama", "--plot", str(tmp_path / "bench.svg"))
    assert status == 2 and "a plot needs matplotlib" in err


def test_described_devices_are_never_run_on(capsys):
    status, out, err = invoke(capsys, "run", "gpt2", "--devices", "8xH100-80GB")
    assert (status, out) == (1, "") and "not on this machine" in err and "autopar emit" in err


def test_an_emission_does_not_overwrite_other_files(capsys, tmp_path):
    (tmp_path / "thesis.tex").write_text("the only copy")
    status, _, err = invoke(capsys, "emit", "gpt2", "--devices", "8xH100-80GB", "-o", str(tmp_path))
    assert status == 2 and "has files that are not a program's" in err
    assert (tmp_path / "thesis.tex").read_text() == "the only copy"


def test_a_plan_beside_other_files_does_not_make_a_program_of_their_folder(capsys, tmp_path):
    for name in ("plan.json", "model.py", "train.py"):
        (tmp_path / name).write_text("mine")
    status, _, err = invoke(capsys, "emit", "gpt2", "--devices", "8xH100-80GB", "-o", str(tmp_path))
    assert status == 2 and "has files that are not a program's" in err and (tmp_path / "model.py").read_text() == "mine"


def test_models_lists_the_zoo(capsys):
    status, out, _ = invoke(capsys, "help", "models")
    assert status == 0 and "llama3-70b" in out and "resnet50" in out
    status, out, _ = invoke(capsys, "help", "models", "--json")
    assert {"name", "parameters", "source"} <= set(json.loads(out)[0])


def test_version(capsys):
    assert invoke(capsys, "--version")[1].strip() == f"autopar, version {autopar.__version__}"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("40GB", 40 * 10**9),
        ("37GiB", 37 * 2**30),
        ("1.5 MB", 1_500_000),
        ("4e10", 40_000_000_000),
        ("512", 512),
        ("1tb", 10**12),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "0", "-1GB", "12 parsecs", "1.2.3GB"])
def test_sizes_that_are_none(text):
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


def test_ctrl_c_ends_quietly(tmp_path):
    (tmp_path / "slow.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "autopar", "plan", f"{tmp_path}/slow.py:f", "--devices", "8xH100-80GB"]
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell's background job ignores it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    # what a model prints is not the result
    assert child.stderr is not None and any(line == "here\n" for line in child.stderr)
    start = time.perf_counter()
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=20)
    assert child.returncode == 130 and "interrupted" in err and "Traceback" not in err
    assert time.perf_counter() - start < 10


def test_more_processes_than_a_machine_has_use_for_are_refused_unless_asked_for(capsys, monkeypatch):
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda pid: {0, 1})
    for argv in (
        ("run", "gpt2", "--devices", "64"),
        ("verify", "gpt2", "--devices", "64"),
        ("profile", "--processes", "2,64"),
    ):
        status, out, err = invoke(capsys, *argv)
        assert (status, out) == (2, "") and "64 processes on 2 processors" in err and "up to 16" in err
    with pytest.raises(UsageError, match="17 processes"):
        processes.Processes(17)
    processes.check_count(16)
    monkeypatch.setenv("AUTOPAR_PROCESSES", "64")
    processes.check_count(64)


def test_a_log_that_needs_a_missing_package_is_refused_before_planning(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    status, _, err = invoke(capsys, "run", "gpt2", "--devices", "2", "--wandb", "project")
    assert status == 2 and "--wandb needs the package wandb" in err and "pip install wandb" in err


def test_resuming_says_where_it_continues_and_when_there_is_nothing_to_do(capsys, tmp_path):
    model = tmp_path / "small.py"
    model.write_text(
        "import torch\nfrom torch import nn\n"
        "def rows():\n    return [(torch.full((4,), float(i)), torch.zeros(1)) for i in range(16)]\n"
        "def model():\n    loss = lambda out, target: (out - target).square().mean()\n"
        "    return nn.Linear(4, 1), (torch.ones(8, 4), torch.zeros(8, 1)), loss\n"
    )
    data = ("--dataset", f"{model}:rows", "--checkpoint", str(tmp_path / "saved"), "--log-file", str(tmp_path / "log"))
    run = ("run", f"{model}:model", "--devices", "1", *data)
    assert invoke(capsys, *run, "--steps", "3")[0] == 0  # the second epoch has begun
    status, out, err = invoke(capsys, *run, "--steps", "4", "--resume")
    assert (
        status == 0 and out.startswith("step 4 loss") and "continues after step 3, with the optimizer's options" in err
    )
    status, out, err = invoke(capsys, *run, "--steps", "4", "--resume")
    assert (status, out) == (0, "") and "has 4 steps, and --steps 4 counts them" in err
    assert [json.loads(line)["step"] for line in (tmp_path / "log").read_text().splitlines()] == [1, 2, 3, 4]
