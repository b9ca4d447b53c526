"""The examples: each is run, and what it prints is that of one device; the table of them is the one of the files."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import examples_page as page
import pytest

from autopar.rules.table import TABLE

FLOAT32 = 5e-6  # transformers computes the loss in float32, whatever the model's dtype; Lightning logs in it

TOLERANCE = {
    "gpt": 1e-12, "vit": 1e-12, "custom_op": 1e-12,
    "llama": FLOAT32, "finetune": FLOAT32, "moe": FLOAT32, "pins": FLOAT32, "resume": FLOAT32, "lengths": FLOAT32,
}  # fmt: skip
pytestmark = pytest.mark.timeout(300)
SLOW = {
    "custom_op",
    "finetune",
    "llama",
    "vit",
    "moe",
    "pins",
    "resume",
    "lengths",
}  # what they use has tests of its own, in short


def skeleton(line: str) -> str:
    """A line without its numbers."""
    return re.sub(r"\d[\d.,]*(e[-+]\d+)?", "#", line)


def run(name: str, capfd: pytest.CaptureFixture[str]) -> Any:
    """What the example returns; its last line is that of the table, but for the numbers."""
    found = importlib.import_module(name).main()
    line = capfd.readouterr().out.strip().splitlines()[-1]
    row = next(row for row in page.PAGE.read_text().splitlines() if f"`python examples/{name}.py`" in row)
    assert skeleton(row).endswith(f"| {skeleton(line)} |"), (row, line)
    assert page.purpose(name) in row
    return found


@pytest.fixture(autouse=True)
def rules_as_before() -> Iterator[None]:
    """What an example registers is gone after its test."""
    before = dict(TABLE)
    yield
    TABLE.clear()
    TABLE.update(before)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in TOLERANCE]
)
def test_losses_are_those_of_one_device(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    losses, alone, *more = run(name, capfd)
    assert losses == pytest.approx(alone, abs=TOLERANCE[name]) and losses[-1] < losses[0] - 0.2
    if name == "vit":
        assert more[0] > 0.6  # of the digits; guessing finds 0.1
    elif name == "finetune":
        assert more[0] < FLOAT32  # the largest difference of a weight
    elif name == "moe":
        assert more == [2]  # each layer of the model
    elif name == "custom_op":
        before, after = more[0]
        assert before > 0 == after
    elif name == "pins":
        plan = more[0]
        strategies = {layer.name: layer.strategy for layer in plan.layers}
        assert (plan.pipeline, plan.schedule, plan.microbatches) == (2, "1f1b", 4)
        assert strategies.pop("lm_head").zero == 3
        assert all(s.options.recomputes == "all" for n, s in strategies.items() if ".layers." in n)


@pytest.mark.slow
def test_stages_on_faster_gpus_have_more_layers(capfd: pytest.CaptureFixture[str]) -> None:
    plan = run("mixed_gpus", capfd)
    fast, slow = importlib.import_module("mixed_gpus").layers(plan)
    assert fast > 1.5 * slow and plan.device_count == 16  # an H100 multiplies 3.2 times as fast as an A100
    assert plan.bound_s <= plan.prediction.step_time_s


@pytest.mark.slow
def test_the_trainer_of_transformers_logs_what_it_logs_on_one_device(capfd: pytest.CaptureFixture[str]) -> None:
    ours, plain = run("hf_trainer", capfd)
    for name, count in {"loss": 10, "grad_norm": 10, "learning_rate": 10, "eval_loss": 2}.items():
        assert len(ours.all(name)) == count
        assert ours.all(name) == pytest.approx(plain.all(name), abs=FLOAT32), name


@pytest.mark.slow
def test_lightning_logs_what_it_logs_on_one_device(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pytorch_lightning", reason="`pip install 'autopar[lightning]'` has it")
    ours, plain = run("with_lightning", capfd)
    assert len(ours.train) == 12 and len(ours.validation) == 2
    assert ours.train == pytest.approx(plain.train, abs=FLOAT32)
    assert ours.validation == pytest.approx(plain.validation, abs=FLOAT32)


def test_every_example_is_in_the_table_and_is_run() -> None:
    rows = re.findall(r"`python examples/(\w+)\.py`", page.PAGE.read_text())
    run_here = {*TOLERANCE, "mixed_gpus", "hf_trainer", "with_lightning", "mlp"}
    assert rows == page.names() and set(rows) == run_here
