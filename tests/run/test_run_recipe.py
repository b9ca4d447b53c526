"""The recipe is in the folder: ``train.py`` alone trains as the program that it was emitted from, bit for bit; or emission says why not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recipes
import torch
from torch import Tensor
from torch.distributed.run import get_args_parser
from workers import WorkerPool

import autopar
from autopar.errors import UsageError
from autopar.program import train as train_script
from autopar.program import training
from autopar.run import Program
from autopar.run.recipe import TrainingRecipe

STEPS = 6
RECIPES: dict[str, dict[str, Any]] = {
    "groups": {"optimizer": recipes.groups},
    "Muon beside AdamW": {"optimizer": "recipes:muon", "scheduler": "recipes:by_function"},
    "schedule": {"scheduler": recipes.warm_cosine, "lr": 0.01, "seed": 5},
    "clipping": {"optimizer": recipes.own_class, "scheduler": recipes.one_cycle, "max_norm": 0.05},
}


def compiled(**options: Any) -> Program:
    torch.manual_seed(0)
    pins = {"pin": {"data": 2, "zero": 1}, "time_limit_s": 1, "capture_check": False}
    return autopar.compile(recipes.Reader(), 2, recipes.batch(0), recipes.loss_of, **pins, **options)


def test_a_rate_beside_an_optimizer_of_ones_own_is_refused() -> None:
    with pytest.raises(UsageError, match=r"lr=0.1 is the learning rate of the default optimizer") as error:
        TrainingRecipe(optimizer=recipes.groups, lr=0.1)
    assert "give the rate there" in str(error.value.hint)


def test_numbers_of_numpy_are_plain_ones_in_code() -> None:
    recipe = TrainingRecipe(lr=np.float32(0.5), max_norm=np.float64(2.0), seed=np.int64(7))  # type: ignore[arg-type]
    assert recipe._defaults() == TrainingRecipe(lr=0.5, max_norm=2.0, seed=7)._defaults()
    for given, kind in (({"seed": 1.5}, "whole number"), ({"lr": "fast"}, "number"), ({"max_norm": [1]}, "number")):
        with pytest.raises(UsageError, match=f"which is no {kind}") as error:
            TrainingRecipe(**given)  # type: ignore[arg-type]
        assert error.value.hint


def recipe_of(folder: Path) -> str:
    text = (folder / "train.py").read_text()
    return text[text.index("# -- the recipe") : text.index("# -- the training")]


def rows(program: Program, file: Path) -> Path:
    """The batches of all steps as one file."""
    batches = [program._inputs(recipes.batch(step)) for step in range(STEPS)]
    torch.save({name: torch.cat([each[name] for each in batches]) for name in batches[0]}, file)
    return file


def trained(program: Program) -> tuple[list[float], dict[str, Tensor]]:
    with program:
        losses = [program.step(recipes.batch(step)) for step in range(STEPS)]
        return losses, program.state_dict()


@pytest.mark.parametrize("name", ["Muon beside AdamW"])
def test_the_folder_trains_as_its_program(name: str, workers2: WorkerPool, tmp_path: Path) -> None:
    program = compiled(**RECIPES[name])
    folder, data = program.emit(tmp_path / "program"), rows(program, tmp_path / "data.pt")
    options = ("--steps", str(STEPS), "--dataset", str(data), "--save", str(tmp_path / "saved.pt"))
    losses, _ = workers2.run("programs:ran", str(folder), *options)[0]
    wanted, state = trained(program)
    assert list(losses.values()) == wanted
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert all(torch.equal(saved[key], value) for key, value in state.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_torchrun_alone_trains_as_the_program(name: str, tmp_path: Path) -> None:
    """In processes that find neither autopar nor the tests; the user's own module is in the working folder."""
    program = compiled(**RECIPES[name])
    folder, data = program.emit(tmp_path / "program"), rows(program, tmp_path / "data.pt")
    shutil.copy(recipes.__file__, tmp_path)
    (tmp_path / "blocker").mkdir()
    (tmp_path / "blocker" / "sitecustomize.py").write_text(
        "import sys\nsys.modules['autopar'] = sys.modules['passes'] = None\n"
    )
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"PYTHONPATH": str(tmp_path / "blocker"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--steps", str(STEPS), "--dataset", str(data), "--device", "cpu", "--save", "saved.pt"]
    done = subprocess.run(
        [*command, str(folder / "train.py"), *options], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    wanted, state = trained(program)
    assert [json.loads(line)["loss"] for line in done.stdout.splitlines()] == wanted
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert set(saved) == set(state)
    assert all(torch.equal(saved[key], value) for key, value in state.items())


def test_it_is_in_plain_sight(tmp_path: Path) -> None:
    program = compiled(
        optimizer=recipes.groups, scheduler=recipes.warm_cosine, max_norm=0.5, seed=7, folder=tmp_path / "a"
    )
    text = recipe_of(tmp_path / "a")
    assert text == recipe_of(program.emit(tmp_path / "b"))
    for line in (
        "MAX_NORM: float | None = 0.5",
        "SEED = 7",
        "{'params': select(parameters, 'embed.weight', 'layers.*.0.weight', 'head.weight'), 'weight_decay': 0.1},",
        "        lr=0.003,\n        betas=(0.9, 0.95),\n",
        "torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3),",
    ):
        assert line in text
    program._recipe = program._recipe.__class__(optimizer=recipes.backwards)
    assert "[parameters[name] for name in ('head.bias', 'head.weight'," in recipe_of(program.emit(tmp_path / "c"))
    assert "LR: float | None = 3e-4 " in recipe_of(compiled().emit(tmp_path / "d"))


def test_what_has_no_form_as_code_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, kind = compiled(folder=tmp_path / "program", scheduler=recipes.by_lambda), type(compiled()._recipe)
    why = "recipes.by_lambda.<locals>.<lambda> .* has no name that another Python can import"
    assert "has no name that another Python can import" in recipe_of(tmp_path / "program")
    monkeypatch.setattr("sys.argv", ["train.py", "--device", "cpu"])
    cases = [
        ({"scheduler": recipes.by_lambda}, why),
        ({"optimizer": recipes.local_class}, "local_class.<locals>.Own has no name"),
        ({"optimizer": recipes.changed_later}, "of the type object, which is not a plain value"),
        ({"optimizer": "recipes:nobody"}, "there is no optimizer recipes:nobody"),
    ]
    for number, (given, message) in enumerate(cases):
        program._recipe = kind(**given)
        with pytest.raises(UsageError, match=message) as refused:
            program.emit(tmp_path / str(number))
        assert refused.value.hint
        assert "REFUSED = ''" not in recipe_of(tmp_path / str(number))  # it does not train with another recipe
    home = tmp_path / "modules"
    home.mkdir()
    shutil.copy(recipes.__file__, home / "runtime.py")
    monkeypatch.syspath_prepend(str(home))
    program._recipe = kind(optimizer="runtime:own_class")
    with pytest.raises(UsageError, match=r"is in a module runtime, which the program's folder shadows"):
        program.emit(tmp_path / "shadowed")


def test_torchrun_takes_no_option_for_its_own() -> None:
    """An option of ``train.py`` that begins several of torchrun's ends its parser, and one that is torchrun's too confuses readers."""
    launcher = get_args_parser()
    parser = training.parser(train_script.recipe())
    own = {option for option in parser._option_string_actions if option.startswith("--")} - {"--help", "--log"}
    assert {"--dataset", "--log-file", "--no-check"} <= own
    assert not own & launcher._option_string_actions.keys()
    for option in own:
        given = launcher.parse_args(["--standalone", "train.py", option, "x"])
        assert given.training_script_args == [option, "x"], option


def test_old_spellings_work_and_say_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--data", "rows.pt", "--log", "log.jsonl"])
    args = training.arguments(train_script.recipe())
    assert (args.dataset, args.log_file) == ("rows.pt", "log.jsonl")
    assert "--data is deprecated; use --dataset" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_log_without_its_package_is_refused(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--dataset", "rows.pt", f"--{package}", "board"])
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(SystemExit):
        training.arguments(train_script.recipe())
    assert capsys.readouterr().err.endswith(
        f"error: --{package} needs a package: pip install {package}, or use --log-file\n"
    )
