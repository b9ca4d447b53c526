"""``autopar plan --trainer``, ``price --from`` and ``compare`` with a configuration, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiers import in_short

from autopar.cli.app import cli
from autopar.cli.options import TRAINER_NAMES
from autopar.errors import UsageError
from autopar.trainers import TRAINERS

REQUEST = ("gpt2", "--devices", "8xH100-80GB")
SIZES = ("--seq", "256", "--global-batch", "64")


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_line_names_every_trainer():
    assert set(TRAINER_NAMES) == set(TRAINERS)


@pytest.mark.parametrize(
    "trainer",
    # no price is read back from Accelerate's file; tests/trainers/test_exports.py has it
    in_short(TRAINER_NAMES, *(name for name in TRAINER_NAMES if name != "accelerate")),
)
def test_an_exported_plan_is_read_back_and_has_the_same_price(trainer: str, tmp_path: Path):
    folder = tmp_path / "flags"
    plan = json.loads(invoke("plan", *REQUEST, *SIZES, "--trainer", trainer, "--export", str(folder), "--json"))
    assert plan["request"]["trainer"] == trainer and plan["gap"] == 0
    assert json.loads((folder / "plan.json").read_text())["step_time_s"] == plan["step_time_s"]
    written = [file for file in folder.iterdir() if file.name not in ("plan.json", "NOTES.md")]
    assert written and (folder / "NOTES.md").read_text().startswith("- ")
    recomputed = any(layer["activations"] != "keep" for layer in plan["layers"])
    for file in written:
        sizes = SIZES if trainer in ("deepspeed", "accelerate") else ()
        if trainer == "accelerate":  # the microbatch is an argument of the user's script
            continue
        again = json.loads(invoke("price", *REQUEST, *sizes, "--from", str(file), "--trainer", trainer, "--json"))
        if not (trainer == "deepspeed" and recomputed):
            assert again["step_time_s"] == pytest.approx(plan["step_time_s"], rel=1e-9), file
            assert again["layers"] == plan["layers"]
    again = json.loads(invoke("price", *REQUEST, *SIZES, "--plan", str(folder / "plan.json"), "--json"))
    assert again["step_time_s"] == pytest.approx(plan["step_time_s"], rel=1e-9)
    with pytest.raises(UsageError, match="this one is for "):
        invoke("explain", str(folder / "plan.json"))
    if trainer == "megatron":
        emitted = (
            "emit",
            "--plan",
            str(folder / "plan.json"),
            "-o",
            str(tmp_path / "program"),
            "--no-type-check",
            "--no-capture-check",
        )
        said = CliRunner().invoke(cli, emitted, catch_exceptions=False).stderr
        assert "the plan was made for Megatron-Core: this is autopar's own program" in said
    with pytest.raises(UsageError, match="exists already"):
        invoke(
            "plan", "no-model", *REQUEST[1:], "--trainer", trainer, "--export", str(folder)
        )  # before the model is read


def test_a_plan_says_that_the_time_limit_ended_its_search():
    words = ("plan", *REQUEST, *SIZES, "--trainer", "megatron", "--json")
    best, early = json.loads(invoke(*words)), json.loads(invoke(*words, "--time-limit", "0"))
    assert best["bound_s"] == best["step_time_s"] and best["solver"].endswith("each priced or excluded by a bound")
    assert early["solver"].endswith("neither priced nor excluded when --time-limit ended the search")
    assert 0 < early["bound_s"] <= best["step_time_s"] <= early["step_time_s"]
    assert early["gap"] == pytest.approx(1 - early["bound_s"] / early["step_time_s"])


LLAMA = ("llama3-8b", "--devices", "8xH100-80GB")
FLAGS = (
    "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --micro-batch-size 1 --bf16 --use-flash-attn "
    "--overlap-grad-reduce --tp-comm-overlap --cross-entropy-loss-fusion --seq-length 4096 --global-batch-size 8"
)
PINNED = ("--seq", "4096", "--global-batch", "8", "--pin", "tensor=2", "--pin", "zero=1", "--microbatch", "1")


@pytest.mark.parametrize(("allow", "flags"), [((), ()), (("--allow", "fp8"), ("--fp8-format", "hybrid"))])
def test_pins_are_priced_as_the_trainer_runs_them(allow: tuple[str, ...], flags: tuple[str, ...], tmp_path: Path):
    printed = invoke("price", *LLAMA, *PINNED, "--trainer", "megatron", *allow, "--json")
    found = json.loads(printed)
    same = json.loads(invoke("price", *LLAMA, "--json", "--", *FLAGS.split(), *flags))
    assert found["step_time_s"] == same["step_time_s"] and found["stages"] == same["stages"]
    assert found["precision"] == ("float8" if allow else "bfloat16") and found["allow"] == (["fp8"] if allow else [])
    assert any(note.startswith("not exact, as fp8 allows") for note in found["notes"]) == bool(allow)
    own = json.loads(invoke("price", *LLAMA, *PINNED, "--json"))
    assert own["step_time_s"] > 1.01 * found["step_time_s"]  # Megatron's kernels are fused
    file = tmp_path / "plan.json"
    file.write_text(printed)
    again = json.loads(invoke("price", *LLAMA, *PINNED[:4], "--plan", str(file), "--json"))
    assert again["step_time_s"] == pytest.approx(found["step_time_s"], rel=1e-9) and again["allow"] == found["allow"]


def test_a_configuration_beside_better_ones(tmp_path: Path):
    file = tmp_path / "run.sh"
    file.write_text(
        "--tensor-model-parallel-size 8 --sequence-parallel --micro-batch-size 1 --global-batch-size 64 --seq-length 256 --bf16 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    )
    found = json.loads(invoke("compare", str(file), "--model", REQUEST[0], *REQUEST[1:], "--json"))
    steps = next(row for row in found["figures"] if row["figure"] == "step time")
    assert steps["best of Megatron-Core"] < steps["yours"]
    assert found["trainer"] == "megatron" and "megatron_args.sh" in found["files"]
    gains = [change["step_time_s"] for change in found["changes"]]
    assert gains == sorted(gains) and 1 <= len(gains) <= 3 and gains[0] >= steps["best of Megatron-Core"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", *REQUEST, "--export", "x"), "--export writes the configuration of a trainer"),
        (("plan", *REQUEST, "--trainer", "megatron", "--pin", "schedule=1f1b"), "schedule=1f1b is not a decision of Megatron-Core"),
        (("plan", *REQUEST, "--trainer", "megatron", "--pin", "lm_head.zero=1"), "lm_head.zero=1 is not a decision"),
        (("price", *REQUEST, "--from", "nothing.sh"), "nothing.sh cannot be read"),
        (("price", *REQUEST, "--trainer", "deepspeed", "--pin", "tensor=2"), "DeepSpeed ZeRO has no tensor parallelism"),
        (("price", *REQUEST, "--trainer", "torchtitan", "--pin", "zero=1"), "zero=1: torchtitan does not have it"),
        (("price", *REQUEST, "--trainer", "megatron", "--pin", "expert=2"), "expert=2: gpt2 has no mixture of experts"),
        (("price", *REQUEST, "--trainer", "megatron", "--pin", "chunks=2"), "chunks=2: a pipeline of 1 has one stage"),
        (("price", *REQUEST, "--trainer", "accelerate", "--sequence"), "--sequence: Accelerate with FSDP2 does not have it"),
        (("price", *REQUEST, "--allow", "fp8", "--", "--bf16"), "--allow fp8 conflicts with the decisions of the flags"),
        (("plan", *REQUEST, "--trainer", "megatron", "--allow", "fp8-blockwise"), "fp8-blockwise: Megatron-Core does not have it"),
        (("compare", "run.sh"), "there is no second plan"),
        (("compare", "a.json", "b.json", "--model", "gpt2"), "two plans need neither"),
        (("price", *REQUEST, "--from", "a", "--", "--bf16"), "a plan has only one source"),
        (("price", "--devices", "8xH100-80GB", "--", "--bf16"), "the model to plan for is missing"),
    ],
)  # fmt: skip
def test_contradictions_get_a_sentence(arguments: tuple[str, ...], message: str):
    with pytest.raises(UsageError, match=message):
        CliRunner().invoke(cli, arguments, catch_exceptions=False)
