"""Programs that contain opaque modules: they run from the folder, equal eager, type-check, or are refused with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from opaque_modules import (
    Alternating,
    Branching,
    Chosen,
    Contracted,
    Counting,
    Drawing,
    Holding,
    Model,
    Quantized,
    Restored,
    Scalars,
)
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import capture, opaque
from autopar.checks.types import check_program
from autopar.emit import emit
from autopar.errors import LaunchError, ProgramError, UsageError
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.run import Program
from autopar.search.manual import manual_plan
from autopar.shard import annotate
from autopar.verify import check_plan, make_subject

PLANS: dict[str, dict[str, Any]] = {
    "tensor 2": {"tensor": 2},
    "pipeline 2": {"pipeline": 2},
    "data 2": {"data": 2, "zero": 3, "recompute": True},
}


def batch(sign: float) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(8, 8, dtype=torch.float64) * sign, "y": torch.randn(8, 4, dtype=torch.float64)}


def branching() -> nn.Module:
    torch.manual_seed(0)
    return Branching(8, {"both": (2.0, 0.5)}).double()


def alternating() -> nn.Module:
    torch.manual_seed(0)
    return Alternating(8, {"both": (2.0, 0.5)}).double()


def program(module: nn.Module, folder: Path, **options: Any) -> tuple[Model, Graph, Plan]:
    model = Model(module).double()
    graph = annotate(capture(model, batch(1), None))
    plan = manual_plan(graph, **options)
    emit(graph, plan, folder)
    return model, graph, plan


@pytest.mark.parametrize("name", PLANS)
def test_equals_eager(name: str, tmp_path: Path) -> None:
    model, graph, plan = program(branching(), tmp_path, **PLANS[name])
    assert check_program(tmp_path) == plan.pipeline
    eager = Model(model.w.module, opaque=False)
    eager.a, eager.b = model.a, model.b
    signs = set()
    with Program(plan, tmp_path, graph, state=model.state_dict()) as running:
        for sign in (1.0, -1.0):
            eager.zero_grad()
            signs.add(bool(eager.a(batch(sign)["x"]).sum() > 0))
            loss = eager(**batch(sign))
            loss.backward()
            found, gradients = running.gradients(batch(sign))
            assert abs(found - loss.item()) <= 1e-9
            expected = {name: p.grad for name, p in eager.named_parameters()}
            renamed = {name.replace("w.module.", "w."): value for name, value in gradients.items()}
            assert set(renamed) == set(expected)
            for key, value in expected.items():
                wanted = torch.zeros_like(renamed[key]) if value is None else value  # a branch not taken
                assert (renamed[key] - wanted).abs().max() <= 1e-9, key
    assert signs == {True, False}  # both branches were taken


@pytest.mark.parametrize("module", [alternating, Quantized], ids=["module", "function"])
def test_a_module_that_capture_keeps_whole_equals_eager(module: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model(module().double(), opaque=False).double()
    graph = annotate(capture(model, batch(1), None))
    plan = manual_plan(graph, tensor=2)
    emit(graph, plan, tmp_path)
    loss = model(**batch(1))
    loss.backward()
    with Program(plan, tmp_path, graph, state=model.state_dict()) as running:
        found, gradients = running.gradients(batch(1))
    assert abs(found - loss.item()) <= 1e-9
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert (gradients[name] - parameter.grad).abs().max() <= 1e-9, name


SEVERAL: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "wrapped": (lambda: Chosen(opaque=True), 8, "opaque.call_all("),
    "made opaque": (lambda: Chosen(opaque=False), 8, "opaque.call_all("),
    "no meta kernel": (Restored, 16, "opaque.call("),
    "einsum": (lambda: Contracted(None), 8, "torch.einsum("),
    "einsum with a path": (lambda: Contracted([0, 1, 0, 1]), 8, "torch.einsum("),
    "scalars and vectors": (Scalars, 8, ".view([])"),
    "einsum with another path": (lambda: Contracted([1, 2, 0, 1]), 8, "torch.einsum("),
}


@pytest.mark.parametrize("plan", ["tensor 2", "data 2"])
@pytest.mark.parametrize("case", SEVERAL)
def test_programs_of_what_a_graph_cannot_show_equal_eager(case: str, plan: str, workers2: WorkerPool) -> None:
    make, width, words = SEVERAL[case]
    torch.manual_seed(0)
    model, generator = make(), torch.Generator().manual_seed(1)
    given = {name: torch.randn(8, size, generator=generator) for name, size in (("x", width), ("y", 4))}
    subject = make_subject(model, given)
    kept = manual_plan(subject.graph, **PLANS[plan])
    with tempfile.TemporaryDirectory() as folder:
        emit(subject.graph, kept, folder)
        assert words in Path(folder, "model.py").read_text()
    assert check_plan(subject, kept, workers2).error.exact


def test_a_program_says_when_its_module_draws(tmp_path: Path) -> None:
    _, graph, plan = program(Drawing(8, 8).double(), tmp_path, tensor=2)
    with (
        pytest.raises(LaunchError, match="drew random numbers"),
        Program(plan, tmp_path, graph, draw_init=True) as running,
    ):
        running.gradients(batch(1))


def test_the_plan_names_what_the_program_imports(tmp_path: Path) -> None:
    program(branching(), tmp_path)
    plan = Plan.from_json(json.loads((tmp_path / "plan.json").read_text()))
    assert plan.notes[-1] == "the program imports opaque_modules for opaque modules"
    assert "opaque.call(" in (tmp_path / "model.py").read_text()


def test_the_folder_says_when_it_cannot_import_the_class(tmp_path: Path) -> None:
    program(branching(), tmp_path)
    code = "import json, torch; from runtime import opaque; x = torch.ones(2, 8)\n"
    code += "opaque.call(next(iter(json.load(open('runtime/opaque.json')))), "
    code += "[x], [], (2, 8), x.dtype)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "the program runs opaque_modules:Branching as it is" in found.stderr
    assert "put its folder on PYTHONPATH" in found.stderr


def test_a_sharded_operand_is_ill_typed(tmp_path: Path) -> None:
    program(branching(), tmp_path, tensor=2)
    text = (tmp_path / "model.py").read_text()
    head, found, tail = text.partition("opaque.call(")
    op, operand, rest = tail.split("[", 1)[0], *tail.split("[", 1)[1].split("]", 1)
    broken = f'{head}{found}{op}[spmd.convert({operand}, "tensor", src=spmd.I, dst=spmd.R)]{rest}'
    (tmp_path / "model.py").write_text(broken)
    with pytest.raises(ProgramError, match="neither all I nor all R"):
        check_program(tmp_path)


def in_function() -> nn.Module:
    class Local(nn.Linear):
        pass

    return Local(8, 8)


def hooked() -> nn.Module:
    module = nn.Linear(8, 8)
    module.register_forward_hook(lambda *_: None)
    return module


def in_the_script() -> nn.Module:
    return type("Script", (nn.Linear,), {"__module__": "__main__"})(8, 8)


def in_model_file() -> nn.Module:
    return type("Other", (nn.Linear,), {"__module__": "model"})(8, 8)


def nowhere() -> nn.Module:
    return type("Missing", (nn.Linear,), {"__module__": "opaque_modules"})(8, 8)


REFUSED = {
    "local class": (in_function, "Local is defined in a function"),
    "class of the script": (in_the_script, "Script is defined in the script itself"),
    "the folder's name": (in_model_file, "is in a module named model"),
    "not importable": (nowhere, "cannot be imported as opaque_modules:Missing"),
    "a function": (lambda: Holding(len), "its attribute held is a builtin_function_or_method"),
    "a tensor": (lambda: Holding([torch.ones(1)]), "its attribute held is a Tensor"),
    "a hook": (hooked, "its attribute _forward_hooks is a hook"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_hint(case: str, tmp_path: Path) -> None:
    factory, message = REFUSED[case]
    with pytest.raises(ProgramError, match=message) as error:
        program(factory(), tmp_path)
    assert error.value.hint
    assert not (tmp_path / "model.py").exists()


def test_a_module_is_wrapped_once() -> None:
    with pytest.raises(UsageError, match="Sequential already contains an opaque module"):
        opaque(nn.Sequential(opaque(nn.Linear(8, 8))))


def test_a_module_that_writes_to_its_buffer_fails(tmp_path: Path) -> None:
    model, graph, plan = program(Counting(), tmp_path, tensor=2)
    with (
        Program(plan, tmp_path, graph, state=model.state_dict()) as running,
        pytest.raises(LaunchError, match="modified its parameters or buffers"),
    ):
        running.gradients(batch(1))
