"""What training starts from: the model's values, wherever the folder goes; and state dicts that are not the model's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import Shape, write_mlp
from torch import Tensor, nn
from workers import WorkerPool

import autopar
from autopar.cli import main
from autopar.errors import UsageError
from autopar.program.model_tensors import normal
from autopar.program.state import NO_VALUES, initial, wrong_state
from autopar.program.weights import mapped, write_file
from autopar.run import Program
from autopar.run.folder import import_runtime, program_modules


class Scaled(nn.Module):
    """Two layers, a learned scale that no seed would draw, a buffer that is read, one that is written, one that is not used, a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(8)
        self.logit_scale = nn.Parameter(torch.tensor(2.6592))
        self.register_buffer("offsets", torch.linspace(0.5, 1.5, 8))
        self.register_buffer("unused", torch.ones(3))
        self.spare = nn.Linear(2, 2)  # the loss does not depend on it

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(ids)) * self.offsets) * self.logit_scale.exp()


def given() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    model = Scaled().double()
    with torch.no_grad():
        model.norm.running_mean.normal_()
    return model, (torch.arange(8) % 12, torch.arange(8) * 5 % 12)


def compiled(folder: Path | None, model: nn.Module | None = None, **options: Any) -> Program:
    own, batch = given()
    model = model or own
    return autopar.compile(model, 1, batch, nn.functional.cross_entropy, folder=folder, **options)


def values(folder: Path) -> dict[str, Tensor]:
    """The folder's initial values."""
    path = initial(folder)
    assert path is not None
    return dict(mapped(path))


def first_loss() -> float:
    model, (ids, labels) = given()
    return float(nn.functional.cross_entropy(model(ids), labels).detach())


def batch_of(program: Program, folder: Path) -> str:
    torch.save(program._inputs(given()[1]), folder / "batch.pt")
    return str(folder / "batch.pt")


def one_step(pool: WorkerPool, folder: Path, *args: str) -> tuple[dict[int, float], str]:
    """``train.py`` for one step: the losses by step, and what it says to people."""
    answer: tuple[dict[int, float], str] = pool.run("programs:ran", str(folder), "--steps", "1", *args)[0]
    return answer


def test_the_folder_starts_from_the_models_values(tmp_path: Path, workers1: WorkerPool) -> None:
    program = compiled(tmp_path / "a")
    model, batch = given()
    data = batch_of(program, tmp_path)
    (loss,) = one_step(workers1, tmp_path / "a", "--dataset", data)[0].values()
    assert loss == pytest.approx(first_loss(), rel=1e-10)
    drawn, talk = one_step(workers1, tmp_path / "a", "--dataset", data, "--draw-init")
    assert abs(drawn[1] - first_loss()) > 0.1 and "starts from random values" in talk
    held = values(tmp_path / "a")
    assert set(held) == set(model.state_dict())
    assert all(torch.equal(held[name], value) for name, value in model.state_dict().items())
    assert NO_VALUES not in json.loads((tmp_path / "a" / "plan.json").read_text())["notes"]
    temporary = compiled(None)
    temporary.emit(tmp_path / "b")
    assert NO_VALUES not in json.loads((tmp_path / "b" / "plan.json").read_text())["notes"]
    with Program(program.plan, tmp_path / "b") as opened:
        inputs = program._inputs(batch)
        assert opened.step(inputs) == pytest.approx(first_loss(), rel=1e-10)
        trained = opened.state_dict()
        assert set(trained) == set(model.state_dict())
        assert torch.equal(trained["spare.weight"], model.state_dict()["spare.weight"])


def test_a_folder_without_values_says_so_and_does_not_start_by_itself(tmp_path: Path, workers1: WorkerPool) -> None:
    model, batch = given()
    table = model.offsets
    model.to("meta").offsets = table  # what the model computes with has values, or no program is written
    program = compiled(tmp_path / "a", model)
    data = batch_of(program, tmp_path)
    assert NO_VALUES in json.loads((tmp_path / "a" / "plan.json").read_text())["notes"]
    losses, talk = one_step(workers1, tmp_path / "a", "--dataset", data)
    assert not losses and "exit" in talk and "has no initial.safetensors" in talk and "--draw-init" in talk
    with pytest.raises(UsageError, match="no values to start from") as error:
        program.step(batch)
    assert error.value.hint and "draw_init=True" in error.value.hint
    torch.save(given()[0].state_dict(), tmp_path / "state.pt")
    with Program(program.plan, tmp_path / "a", draw_init=True) as drawn:
        assert torch.isfinite(torch.tensor(drawn.step(program._inputs(batch))))
    compiled(tmp_path / "a")
    assert initial(tmp_path / "a") is not None


def test_a_folder_of_another_program_keeps_no_values_of_it(tmp_path: Path) -> None:
    compiled(None).emit(tmp_path / "a")
    model, _ = given()
    table = model.offsets
    model.to("meta").offsets = table
    compiled(None, model, draw_init=True).emit(tmp_path / "a")
    assert initial(tmp_path / "a") is None
    assert NO_VALUES in json.loads((tmp_path / "a" / "plan.json").read_text())["notes"]


WRONG: dict[str, tuple[Any, str]] = {
    "missing": (lambda state: state.pop("logit_scale"), "it has no logit_scale"),
    "extra": (lambda state: state.update(lora=torch.zeros(2)), "the model has no lora"),
    "shape": (lambda state: state.update(logit_scale=torch.zeros(2)), r"wrong shape: logit_scale \(\(2,\), in the model \(\)"),
    "unused shape": (lambda state: state.update(unused=torch.zeros(2)), r"wrong shape: unused"),
    "buffer": (lambda state: state.pop("norm.running_var"), r"it has no norm.running_var"),
    "meta": (lambda state: state.update(logit_scale=torch.zeros((), device="meta")), "on the meta device, without values: logit_scale"),
    "no tensor": (lambda state: state.update(unused=3), "not a tensor: unused"),
    "torn tie": (lambda state: state.update({"head.weight": torch.zeros(12, 8)}), "tied in the model, but with different values here"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_state_dict_that_is_not_the_models_is_refused_before_anything_starts(
    case: str, tmp_path: Path, workers1: WorkerPool
) -> None:
    program = compiled(tmp_path / "a")
    spoil, message = WRONG[case]
    state = dict(given()[0].state_dict())
    spoil(state)
    with pytest.raises(UsageError, match=message) as error:
        program.load_state_dict(state)
    assert program._processes is None and error.value.hint
    if case == "meta":
        return
    with pytest.raises(UsageError, match=message):
        Program(program.plan, tmp_path / "a", state=state)
    if case == "extra":
        torch.save(state, tmp_path / "state.pt")
        losses, talk = one_step(workers1, tmp_path / "a", "--init", str(tmp_path / "state.pt"))
        assert not losses and "exit" in talk and "the model has no lora" in talk


def test_what_the_program_does_not_use_is_that_of_the_last_weights(tmp_path: Path) -> None:
    program = compiled(tmp_path / "a")
    state = {name: value.clone() for name, value in given()[0].state_dict().items()}
    others = {name: value + 1 for name, value in state.items() if name != "head.weight"}
    write_file(tmp_path / "others.safetensors", others)
    with program:
        program.load_weights(tmp_path / "others.safetensors")
        loaded = program.state_dict()
        assert set(loaded) == set(state)
        assert all(torch.equal(loaded[name], value) for name, value in others.items() if name != "offsets")
        program.load_state_dict(state)
        assert all(torch.equal(value, state[name]) for name, value in program.state_dict().items())


def test_what_the_program_does_not_use_may_be_missing(tmp_path: Path) -> None:
    compiled(tmp_path)
    records = json.loads((tmp_path / "layouts.json").read_text())
    state = dict(given()[0].state_dict())
    for name in ("spare.weight", "unused", "offsets", "head.weight"):
        del state[name]
    assert wrong_state(records, state) == ""


FACTORY = """
import torch
from torch import nn

def model(device="cpu"):
    torch.manual_seed(5)
    with torch.device(device):
        module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return module, (torch.randn(8, 8), torch.arange(8) % 4), nn.functional.cross_entropy

def on_meta():
    return model("meta")
"""


def emitted(capsys: pytest.CaptureFixture[str], folder: Path, *args: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["emit", *args, "--devices", "2", "--time-limit", "5", "-o", str(folder)])
    err = capsys.readouterr().err
    assert ended.value.code == 0, err
    return err


def test_emit_writes_the_values_that_a_model_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    factory = tmp_path / "factory.py"
    factory.write_text(FACTORY)
    assert "no initial values" not in emitted(capsys, tmp_path / "a", f"{factory}:model")
    torch.manual_seed(5)
    assert torch.equal(values(tmp_path / "a")["0.weight"], nn.Linear(8, 16).weight)
    said = emitted(capsys, tmp_path / "b", f"{factory}:on_meta")
    assert "has no initial values" in said and "--draw-init" in said and initial(tmp_path / "b") is None


def test_emit_refuses_weights_of_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    factory = tmp_path / "factory.py"
    factory.write_text(FACTORY)
    words, right = (f"{factory}:on_meta", "--init"), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    torch.save(right.state_dict(), tmp_path / "right.pt")
    torch.save(nn.Linear(8, 16).state_dict(), tmp_path / "wrong.pt")
    (tmp_path / "no.pt").write_text("no weights")
    assert "not on this machine" not in emitted(capsys, tmp_path / "a", *words, str(tmp_path / "right.pt"))
    assert "elsewhere is not on this machine" in emitted(capsys, tmp_path / "b", *words, "elsewhere")
    for name, why in (("wrong", "has no weights of this model: it has no 0.weight"), ("no", "cannot be read")):
        with pytest.raises(AssertionError, match=f"{name}.pt {why}"):
            emitted(capsys, tmp_path / name, *words, str(tmp_path / f"{name}.pt"))


def test_emit_makes_small_models_of_configurations_with_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from autopar.cli import commands

    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 16, "n_layer": 1, "n_head": 2,
              "n_positions": 16, "vocab_size": 32}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = (str(tmp_path / "config.json"), "--seq", "8", "--global-batch", "4")
    assert "no initial values" not in emitted(capsys, tmp_path / "a", *sizes)
    assert float(values(tmp_path / "a")["transformer.wte.weight"].std()) == pytest.approx(0.02, rel=0.3)
    monkeypatch.setattr(commands, "VALUES_LIMIT_BYTES", 1000)
    assert "has no initial values" in emitted(capsys, tmp_path / "b", *sizes)


# -- drawn values -----------------------------------------------------------------------------------------------------


def test_drawn_numbers_are_normal_and_belong_to_their_places() -> None:
    numbers = normal(7, 0, 1 << 20)
    again = torch.cat([normal(7, at, min(at + 1001, 1 << 20)) for at in range(0, 1 << 20, 1001)])
    assert torch.equal(again, numbers)
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):  # their standard errors are at most 0.01
        assert float((numbers.double() ** power).mean()) == pytest.approx(moment, abs=0.03)
    for other in (numbers.roll(1), numbers.roll(2), normal(8, 0, 1 << 20)):
        assert abs(float(torch.corrcoef(torch.stack((numbers, other)))[0, 1])) < 0.004
    assert 4.5 < float(numbers.abs().max()) < 6.8


def drawn(folder: str, seed: int) -> dict[str, Tensor]:
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        state: dict[str, Tensor] = runtime.Trainer(program, runtime.start(program), seed=seed).state_dict()
        return state


def test_every_plan_draws_the_same_values(tmp_path: Path, workers1: WorkerPool, workers4: WorkerPool) -> None:
    whole = workers1.run("test_run_values:drawn", str(write_mlp(tmp_path / "one", Shape())), 5)[0]
    table = whole["embed.weight"]
    assert float(table.std()) == pytest.approx(
        0.02, abs=4 * 0.02 / math.sqrt(2 * table.numel())
    )  # four standard errors
    assert not torch.equal(whole["layers.0.down.weight"], whole["layers.1.down.weight"])
    for i, shape in enumerate(
        (
            Shape(data=2, tensor=2, zero=(1, 3)),
            Shape(data=4, zero=(3, 2)),
            Shape(pipeline=2, tensor=2, microbatches=2, schedule="1f1b"),
        )
    ):
        state = workers4.run("test_run_values:drawn", str(write_mlp(tmp_path / str(i), shape)), 5)[0]
        assert set(state) == set(whole)
        assert all(torch.equal(state[name], whole[name]) for name in whole), shape
