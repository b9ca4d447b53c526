"""``autopar price``, ``compare`` and ``help hardware``: plans written by hand, side by side, and figures with their sources."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from places import ROOT

from autopar.cli.app import cli
from autopar.devices import gpu_names
from autopar.errors import UsageError

GPT2 = ["gpt2", "--devices", "8xH100-80GB", "--seq", "256", "--global-batch", "64"]


def invoke(*arguments: str) -> str:
    return CliRunner().invoke(cli, arguments, catch_exceptions=False).stdout


def test_a_hand_written_plan_has_the_price_of_the_same_plan_in_a_file(tmp_path: Path):
    printed = invoke(
        "price", *GPT2, "--pin", "tensor=2", "--pin", "pipeline=2", "--pin", "zero=1", "--microbatch", "8", "--json"
    )
    plan = json.loads(printed)
    assert plan["pipeline"] == 2 and plan["microbatches"] == 4 and plan["layers"][3]["tensor"] == 2
    assert plan["layers"][3]["zero"] == 1 and plan["step_time_s"] > 0 and plan["solver"] == "given"
    file = tmp_path / "plan.json"
    file.write_text(printed)
    again = json.loads(invoke("price", *GPT2, "--plan", str(file), "--json"))
    assert again["step_time_s"] == plan["step_time_s"] and again["stages"] == plan["stages"]
    side = invoke("compare", str(file), str(file))
    assert "step time" in side and "1.00" in side and "memory, activations" in side
    assert not re.search(r"activations +keep|chunks +1", side)  # decisions that are equal are left out
    other = tmp_path / "other.json"
    other.write_text(invoke("price", *GPT2, "--pin", "activations=host", "--json"))
    assert re.search(r"pipeline +2 +1", invoke("compare", str(file), str(other)))


COUPLED = """
import torch
from torch import nn


class Coupled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.last(torch.relu(self.norm(self.first(x)))), y)


def model():
    torch.manual_seed(0)
    return Coupled(), {"x": torch.randn(16, 8), "y": torch.randint(0, 10, (16,))}
"""


def test_pins_with_statistics_of_microbatches_are_priced(tmp_path: Path):
    (tmp_path / "coupled.py").write_text(COUPLED)
    request = ("price", f"{tmp_path}/coupled.py:model", "--devices", "4", "--allow", "microbatch-statistics", "--json")
    for options, count in (((), 1), (("--microbatch", "2"), 2)):
        found = json.loads(invoke(*request, *options))
        assert found["microbatches"] == count
        assert found["allow"] == (["microbatch_statistics"] if count > 1 else [])


def test_a_deviation_that_the_pins_do_not_admit_is_a_note():
    request = ("price", "llama3-8b", "--devices", "8xB200-180GB-SXM", "--seq", "1000", "--global-batch", "64")
    found = json.loads(invoke(*request, "--pin", "tensor=8", "--microbatch", "1", "--allow", "mxfp8", "--json"))
    assert not found["allow"] and any(note.startswith("mxfp8 is not used: ") for note in found["notes"])


def _fullest(plan: dict[str, Any]) -> float:
    return max(stage["memory_bytes"] / stage["memory_limit_bytes"] for stage in plan["stages"])


def test_pins_have_the_allowed_deviations_with_which_they_are_faster_or_fit():
    request = ("price", "llama3-8b", "--devices", "8xH100-80GB", "--seq", "4096", "--global-batch", "8", "--json")
    exact, fp8 = (json.loads(invoke(*request, *more)) for more in ((), ("--allow", "fp8")))
    assert fp8["allow"] == ["fp8"] and fp8["step_time_s"] < 0.99 * exact["step_time_s"]
    request = ("price", "llama3-8b", "--devices", "8xH200-141GB-SXM", "--seq", "1024", "--global-batch", "8", "--json")
    exact = json.loads(invoke(*request))
    assert _fullest(exact) > 1 and not exact["allow"]
    narrow = json.loads(invoke(*request, "--allow", "bfloat16-moments"))
    assert _fullest(narrow) < 1 and narrow["allow"] == ["bfloat16_moments"]
    assert narrow["step_time_s"] > exact["step_time_s"]  # slower, but it fits


@pytest.mark.parametrize(
    ("request_of", "words"),
    [
        (["gpt2", "--devices", "16xH100-80GB"], "is for 8 devices"),
        ([f"{ROOT}/examples/mlp.py:model", "--devices", "8xH100-80GB"], "14 layers"),
    ],
)
def test_a_plan_for_other_devices_or_layers_is_refused(tmp_path: Path, request_of: list[str], words: str):
    file = tmp_path / "plan.json"
    file.write_text(invoke("price", *GPT2, "--json"))
    for command in (
        ["price", *request_of, "--plan", str(file)],
        ["explain", str(file), "--model", *request_of],
    ):
        with pytest.raises(UsageError, match=words) as error:
            invoke(*command)
        assert error.value.hint


def test_a_ring_needs_attention_and_slices_belong_to_the_loss():
    model = f"{ROOT}/examples/mlp.py:model"
    with pytest.raises(UsageError, match="ring=2: mlp has no attention") as error:
        invoke("price", model, "--devices", "4xH100-80GB", "--pin", "ring=2")
    assert error.value.hint == "leave ring out"
    plan = json.loads(invoke("price", *GPT2, "--pin", "ring=2", "--pin", "logits=sliced", "--json"))
    assert {layer["sequence"] for layer in plan["layers"]} == {2}
    assert {layer["logits"] for layer in plan["layers"][:-1]} == {"whole"} and plan["layers"][-1]["logits"] == "sliced"


def test_degrees_that_do_not_divide_are_refused():
    with pytest.raises(UsageError, match="do not divide into tensor 3"):
        invoke("price", *GPT2, "--pin", "tensor=3")


def test_every_kind_can_be_shown_with_its_sources():
    listed = {row["name"] for row in json.loads(invoke("help", "hardware", "--json"))}
    assert listed == {*gpu_names(), "cpu"} and {"GB200", "MI300X", "L40S", "RTX4090"} <= listed
    for name in ("H100-80GB", "V100-32GB-SXM2", "cpu"):
        figures = json.loads(invoke("help", "hardware", name, "--json"))
        assert all(row["value"] > 0 and row["unit"] and row["source"] for row in figures), name
    assert "all-gather, 8 nodes" in invoke("help", "hardware", "H100-80GB")
    with pytest.raises(UsageError, match="not known"):
        invoke("help", "hardware", "draw")


def test_a_price_has_every_pin_of_the_request():
    """A value that needs ZeRO is not left out because layers are given their ZeRO stage one by one."""
    words = ("--pin", "zero=3", "--pin", "reduce=step", "--pin", "microbatches=4")
    layers = json.loads(invoke("price", *GPT2, *words, "--json"))["layers"]
    assert {(layer["zero"], layer["reduce"]) for layer in layers} == {(3, "step")}


@pytest.mark.parametrize(
    ("option", "flag"),
    [(("--seq", "256"), ("--seq-length", "128")), (("--precision", "float32"), ("--bf16",))],
)
def test_an_option_and_a_flag_that_contradict_each_other_are_refused(option: tuple[str, ...], flag: tuple[str, ...]):
    with pytest.raises(UsageError, match=f"^{option[0]} is {option[1]}, and .* in the flags after --") as error:
        invoke("price", "gpt2", "--devices", "8xH100-80GB", *option, "--", *flag)
    assert error.value.hint == f"leave {option[0]} out"


@pytest.mark.parametrize("option", [("--microbatch", "4"), ("--sequence",), ("--pin", "tensor=2")])
def test_a_decision_beside_a_configuration_is_refused(option: tuple[str, ...]):
    with pytest.raises(UsageError, match=f"^{option[0]}.* a plan has only one source"):
        invoke("price", "gpt2", "--devices", "8xH100-80GB", *option, "--", "--micro-batch-size", "1")


def test_a_plan_that_leaves_devices_idle_is_read_for_all_of_them(tmp_path: Path):
    model, file = f"{ROOT}/examples/mlp.py:model", tmp_path / "plan.json"
    file.write_text(invoke("price", model, "--devices", "2xH100-80GB", "--pin", "data=2", "--json"))
    asked = (model, "--devices", "3xH100-80GB")
    again = json.loads(invoke("price", *asked, "--plan", str(file), "--json"))
    assert again["step_time_s"] == json.loads(file.read_text())["step_time_s"]
    words = ("explain", str(file), "--model", *asked, "--time-limit", "1", "--json")
    result = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert {"explain: the best plan with more memory ...", "explain: the best plan with no pipeline ..."} <= set(
        result.stderr.splitlines()
    )
    explained = json.loads(result.stdout)
    assert explained["step_time_s"] == again["step_time_s"]
    page = tmp_path / "page.html"
    invoke("report", str(file), "--model", *asked, "-o", str(page))
    assert page.is_file()
