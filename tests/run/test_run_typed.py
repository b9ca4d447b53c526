"""Every way to a running program passes the type checker: each collective that is taken out of an emitted folder is missed."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import subject
from torch import nn

import autopar
from autopar.checks.types import check_program
from autopar.cli import main
from autopar.compile import NOT_TYPED
from autopar.emit import emit
from autopar.errors import ProgramError
from autopar.plan import Plan
from autopar.run import Program, processes
from autopar.search.manual import manual_plan

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "convert")
JOINED = (
    "linear",
    "linears",
)  # products with the collective that their input needs, over the axes of the keyword ``axis``
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tensor": ("llama", {"tensor": 2}),
    "llama tensor+sequence": ("llama", {"tensor": 2, "sequence": True}),
    "gpt2 data x tensor": ("gpt2", {"data": 2, "tensor": 2, "pipeline": 2, "microbatches": 2}),
    "llama ulysses": ("llama", {"ulysses": 2}),
}


def removals(text: str) -> Iterator[tuple[str, str]]:
    """For every collective of the text: the line that has it, and the text in which its operand stands in its place; for joined products
    the text in which they have no axes."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        joined = node.func.attr in JOINED and getattr(node.func.value, "id", "") == "kernels_overlap"
        if joined or node.func.attr in COLLECTIVES:
            call, operand = ast.get_source_segment(text, node), ast.get_source_segment(text, node.args[0])
            assert call is not None and operand is not None
            if joined:
                operand, count = re.subn(r'axis="\w+"', "axis=()", call)
                assert count == 1
            lines = text.splitlines(keepends=True)
            start = sum(len(line) for line in lines[: node.lineno - 1]) + node.col_offset
            assert text[start : start + len(call)] == call
            yield call, text[:start] + operand + text[start + len(call) :]


@pytest.mark.parametrize("name", PLANS)
def test_each_collective_that_is_removed_is_missed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(processes.subprocess, "Popen", no_process)
    model, options = PLANS[name]
    graph = subject(model).graph
    plan = manual_plan(graph, **options)
    emit(graph, plan, tmp_path)
    Program(plan, tmp_path, graph)
    source = tmp_path / "model.py"
    found = list(removals(source.read_text()))
    assert len(found) >= 4
    for call, text in found:
        source.write_text(text)
        with pytest.raises(ProgramError, match=r"stage \d of .* is ill-typed") as error:
            Program(plan, tmp_path, graph)
        assert error.value.hint, call
        Program(plan, tmp_path, graph, type_check=False)


def small() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (torch.randn(8, 8), torch.arange(8) % 4)


def test_compile_emit_and_run_ask_the_checker_and_say_so_where_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Path] = []

    def checked(folder: Path, progress: Any = None) -> int:
        asked.append(Path(folder))
        return check_program(folder, progress)

    monkeypatch.setattr(sys.modules["autopar.compile"], "check_program", checked)
    module, batch = small()
    said: list[str] = []
    program = autopar.compile(
        module, 2, batch, nn.functional.cross_entropy, folder=tmp_path / "a", progress=lambda _, text: said.append(text)
    )
    assert asked == [tmp_path / "a"] and any("well-typed" in text for text in said)
    assert NOT_TYPED not in program.plan.notes
    plan = tmp_path / "plan.json"
    plan.write_text(program.plan.dumps())
    factory = tmp_path / "factory.py"
    factory.write_text(
        "import torch\nfrom torch import nn\n\ndef model():\n    torch.manual_seed(0)\n"
        "    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))\n"
        "    return module, (torch.randn(8, 8), torch.arange(8) % 4), nn.functional.cross_entropy\n"
    )
    for number, flags in enumerate(([], ["--no-type-check"])):
        folder = tmp_path / f"emitted{number}"
        with pytest.raises(SystemExit) as ended:
            main(["emit", f"{factory}:model", "--devices", "2", "--plan", str(plan), "-o", str(folder), *flags])
        assert ended.value.code == 0
        notes = Plan.from_json(json.loads((folder / "plan.json").read_text())).notes
        assert (NOT_TYPED in notes) == bool(flags)
    assert len(asked) == 2
    capsys.readouterr()


def test_a_process_with_a_group_of_its_own_leaves_the_check_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What that process refuses is in ``test_run_edits``."""
    graph = subject("mlp").graph
    emit(graph, manual_plan(graph, tensor=2), tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert check_program(tmp_path) == 1


def test_a_folder_that_is_no_program(tmp_path: Path) -> None:
    graph = subject("mlp").graph
    plan = manual_plan(graph, tensor=2)
    with pytest.raises(ProgramError, match="is not a program folder: it has no plan.json"):
        Program(plan, tmp_path, graph)
    emit(graph, plan, tmp_path)
    (tmp_path / "model.py").write_text((tmp_path / "model.py").read_text() + "\nPROGRAM = (Stage7,)\n")
    with pytest.raises(ProgramError, match=r"model.py of .* cannot be read: NameError: name 'Stage7'"):
        Program(plan, tmp_path, graph)


def test_equal_layers_are_followed_once_and_each_is_checked(tmp_path: Path) -> None:
    """One layer of several of a class has other types: it is followed on its own."""
    graph = subject("llama").graph
    emit(graph, manual_plan(graph, tensor=2), tmp_path)
    records = json.loads((tmp_path / "layouts.json").read_text())
    record = next(r for r in records["parameters"] if r["original"].endswith("layers.2.self_attn.o_proj.weight"))
    record["types"]["tensor"] = "I"
    (tmp_path / "layouts.json").write_text(json.dumps(records))
    with pytest.raises(ProgramError, match="ill-typed"):
        check_program(tmp_path)
