"""``Program(plan, folder)`` trains with the recipe that is in the folder's ``train.py``, or refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import recipes
import torch
from torch import Tensor

import autopar
from autopar.errors import UsageError
from autopar.program.state import read_state
from autopar.run import Program
from autopar.run.recipe import section_of

RECIPE: dict[str, Any] = {
    "optimizer": recipes.groups,
    "scheduler": recipes.warm_cosine,
    "max_norm": 0.05,
    "seed": 3,
}


def compiled(folder: Path, **options: Any) -> Program:
    torch.manual_seed(0)
    pins = {"pin": {"data": 1}, "time_limit_s": 1, "capture_check": False}
    return autopar.compile(recipes.Reader(), 1, recipes.batch(0), recipes.loss_of, folder=folder, **pins, **options)


def trained(program: Program) -> tuple[list[float], dict[str, Tensor]]:
    with program:
        return [program.step(recipes.batch(step)) for step in range(3)], program.state_dict()


def opened(program: Program, folder: Path, **options: Any) -> Program:
    found = Program(program.plan, folder, type_check=False, **options)
    found._structure = program._structure
    return found


def test_a_program_that_is_opened_has_the_recipe_of_its_folder(tmp_path: Path) -> None:
    program = compiled(tmp_path / "a", **RECIPE)
    wanted, state = trained(program)
    losses, values = trained(opened(program, tmp_path / "a"))
    assert losses == wanted
    assert all(torch.equal(values[name], value) for name, value in state.items())
    copy = opened(program, tmp_path / "a", state=state, **RECIPE).emit(tmp_path / "b")
    assert section_of(copy) == section_of(tmp_path / "a")
    assert trained(opened(program, copy))[0] != wanted  # from the other values


@pytest.mark.parametrize("options", [{"seed": 1}, {"max_norm": 0.1}, {"lr": 0.1}, {"optimizer": recipes.groups}])
def test_arguments_that_differ_from_the_recipe_of_the_folder_are_refused(
    options: dict[str, Any], home: tuple[Program, Path]
) -> None:
    program, folder = home
    with pytest.raises(UsageError, match="has a recipe that differs from the optimizer, scheduler, lr") as error:
        opened(program, folder, **options)
    assert "leave all of them out" in error.value.hint


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> tuple[Program, Path]:
    """A program whose folder has a recipe."""
    folder = tmp_path_factory.mktemp("home") / "program"
    return compiled(folder, **RECIPE), folder


def edited(folder: Path, there: Path, old: str, new: str) -> Path:
    """A copy of a folder in which ``train.py`` has other text."""
    shutil.copytree(folder, there)
    text = (there / "train.py").read_text()
    assert text.count(old) == 1
    (there / "train.py").write_text(text.replace(old, new))
    return there


def test_an_edited_recipe_is_that_of_the_program(
    home: tuple[Program, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It imports a module that only the working folder has."""
    program, folder = home
    (tmp_path / "still.py").write_text("import torch\n\ndef sgd(params):\n    return torch.optim.SGD(params, lr=0.0)\n")
    monkeypatch.chdir(tmp_path)
    there = edited(
        folder,
        tmp_path / "a",
        "    return torch.optim.AdamW",
        "    return still.sgd([*parameters.values()])\n    torch.optim.AdamW",
    )
    with pytest.raises(
        UsageError,
        match=r"^make_optimizer or make_scheduler of .*train\.py raised NameError: name 'still' is not defined",
    ):
        opened(program, there).step(recipes.batch(0))
    there = edited(there, tmp_path / "b", "import torch\n", "import still\nimport torch\n")
    found = opened(program, there)
    before = read_state(there / "initial.safetensors")
    _, after = trained(found)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    with pytest.raises(UsageError, match="has a recipe"):
        opened(program, there, **RECIPE)


WITHOUT = {
    "refused": ('REFUSED = ""', 'REFUSED = "a lambda has no name"', "has no recipe: a lambda has no name"),
    "module": ('REFUSED = ""', 'import nowhere_to_be_found\nREFUSED = ""', "cannot be read: ModuleNotFoundError: No module named"),
    "name": ("SEED = 3", "", "has no SEED"),
}  # fmt: skip


@pytest.mark.parametrize("case", WITHOUT)
def test_a_recipe_that_cannot_be_read_is_refused(case: str, home: tuple[Program, Path], tmp_path: Path) -> None:
    program, folder = home
    old, new, message = WITHOUT[case]
    there = edited(folder, tmp_path / "a", old, new)
    with pytest.raises(UsageError, match=message) as error:
        opened(program, there)
    assert error.value.hint
    if case == "refused":  # the folder has none
        assert opened(program, there, optimizer=recipes.groups)


def test_a_program_does_not_launch_another_recipe_than_the_edited_one(tmp_path: Path) -> None:
    program = compiled(tmp_path / "a", **RECIPE)
    there = edited(tmp_path / "a", tmp_path / "b", "MAX_NORM: float | None = 0.05", "MAX_NORM: float | None = 0.5")
    program.folder = there
    with pytest.raises(UsageError, match="has a recipe"):
        program.launch("--steps", "1")


def test_a_recipe_that_is_given_again_leaves_the_source_of_the_values(
    home: tuple[Program, Path], tmp_path: Path
) -> None:
    program, folder = home
    weights = folder.resolve() / "initial.safetensors"
    there = edited(folder, tmp_path / "a", "INIT: str | None = None", f"INIT: str | None = {str(weights)!r}")
    (there / "initial.safetensors").unlink()
    found = opened(program, there, **RECIPE)
    assert found._initial == weights and found._recipe.init == str(weights)
    there = edited(folder, tmp_path / "b", "DRAW_INIT = False", "DRAW_INIT = True")
    assert opened(program, there, **RECIPE)._recipe.draw_init
