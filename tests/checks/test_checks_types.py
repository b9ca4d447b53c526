"""The type checker over emitted programs: right ones pass, broken ones are refused, and what it cannot see is said."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import spmd_types
import torch
from exactness import KINDS, subject
from matrix import check_at_64
from mutations import ILL_TYPED, UNSEEN, Mutation, break_file
from spmd_types.checker import typecheck

from autopar.checks.types import check_program
from autopar.emit import emit
from autopar.errors import ProgramError
from autopar.program import type_check
from autopar.search.manual import manual_plan

Programs = Callable[[str, dict[str, Any]], Path]

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama data x tensor": ("llama", {"data": 2, "tensor": 2}),
    "llama pipeline": ("llama", {"pipeline": 2, "data": 2, "microbatches": 2}),
    "mlp data": ("mlp", {"data": 2}),
}


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    """The folder of a model's program under a plan, emitted once."""
    made: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as root:

        def program(model: str, options: dict[str, Any]) -> Path:
            key = f"{model} {options}"
            if key not in made:
                made[key] = Path(root) / str(len(made))
                emit(subject(model).graph, manual_plan(subject(model).graph, **options), made[key])
            return made[key]

        yield program


def broken(folder: Path, to: Path, mutation: Mutation) -> Path:
    """A copy of the program with the mutation in it."""
    shutil.copytree(folder, to)
    break_file(to / mutation.file, mutation)
    return to


@pytest.mark.parametrize("name", ["llama data x tensor", "llama pipeline", "mlp data"])
def test_emitted_programs_are_well_typed(programs: Programs, name: str) -> None:
    model, options = PLANS[name]
    assert check_program(programs(model, options)) == options.get("pipeline", 1)


class _SavesInputs(torch.autograd.Function):
    """Saves inputs as ``torch.utils.checkpoint`` does in torch 2.11."""

    @staticmethod
    def forward(*args: Any) -> torch.Tensor:
        return torch.empty((0,))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*(value for value in inputs if isinstance(value, torch.Tensor)))


def test_inputs_that_a_recomputed_function_saves_have_a_rule() -> None:
    type_check._type_saved_inputs(_SavesInputs)
    with type_check._fake_world({"data": 2}) as mesh, spmd_types.set_current_mesh(mesh), typecheck(local=False):
        x = spmd_types.assert_type(torch.randn(4), {"data": spmd_types.R})
        scale = spmd_types.assert_type(torch.randn(()), {"data": spmd_types.P})
        saved = _SavesInputs.apply(torch.empty((0,), requires_grad=True), {"scale": scale}, x, 3)
        assert list(spmd_types.get_local_type(saved).values()) == [spmd_types.R]


SIXTY_FOUR = ["data 4", "pipeline 4, gpipe", "data 2 x tensor+sequence 2, zero 1", "mixed: tensor 1, 2 and 4"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name in SIXTY_FOUR], ids=lambda kind: kind.name)
def test_programs_for_64_devices_are_well_typed(kind: Any) -> None:
    """The fake process group costs nothing per rank; ``tests/reports/matrix.py`` does this for every model and kind."""
    assert check_at_64("llama", kind) == kind.options.get("pipeline", 1)


@pytest.mark.parametrize("mutation", ILL_TYPED, ids=lambda mutation: mutation.name)
def test_a_broken_program_is_refused(programs: Programs, tmp_path: Path, mutation: Mutation) -> None:
    folder = broken(programs(mutation.model, mutation.options), tmp_path / "broken", mutation)
    with pytest.raises(ProgramError, match=r"stage \d of broken is ill-typed"):
        check_program(folder)


@pytest.mark.parametrize("mutation", UNSEEN, ids=lambda mutation: mutation.name)
def test_the_checker_does_not_see_values(programs: Programs, tmp_path: Path, mutation: Mutation) -> None:
    """The types of these programs are right, and the checker lets them pass; the exactness run does not."""
    assert check_program(broken(programs(mutation.model, mutation.options), tmp_path / "broken", mutation)) == 1
