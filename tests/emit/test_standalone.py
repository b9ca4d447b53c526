"""What is emitted runs with torch and spmd-types alone (and a user's own ops): two processes under torchrun, and an importer that
refuses the rest."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Set
from pathlib import Path
from typing import Any

import custom_ops
import pytest
import torch
from exactness import subject

import autopar.program
from autopar import register_rule
from autopar.emit import emit
from autopar.program.type_check import digests, write_digests
from autopar.rules.table import TABLE
from autopar.run.folder import import_runtime, program_modules
from autopar.search.manual import manual_plan
from autopar.verify import make_subject

# networkx is a dependency of ours too, but torch has it as its own: its pipelining imports its compiler.
REFUSED = ("autopar", "passes", "transformers", "ortools", "safetensors", "rich", "click", "typer", "pytest")
REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ImportError(f"{{name}} may not be imported here")

sys.meta_path.insert(0, Refuse())
"""


def launch(folder: Path, tmp_path: Path, *arguments: str, processes: int) -> subprocess.CompletedProcess[str]:
    """``train.py``, under torchrun if there are several processes, which cannot import ``REFUSED`` and find what lies in
    ``tmp_path / "blocker"``."""
    blocker = tmp_path / "blocker"
    blocker.mkdir(exist_ok=True)
    (blocker / "sitecustomize.py").write_text(REFUSE.format(refused=REFUSED))
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"PYTHONPATH": str(blocker), "OMP_NUM_THREADS": "1"}
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    command = [sys.executable, *(torchrun if processes > 1 else ()), "train.py", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of two stages, so that every file of the folder is used."""
    graph = subject("llama").graph
    folder = tmp_path_factory.mktemp("program")
    emit(graph, manual_plan(graph, pipeline=2, microbatches=2), folder)
    return folder


def test_the_blocker_blocks(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(REFUSE.format(refused=REFUSED))
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    for name in ("autopar.plan", "ortools"):
        done = subprocess.run([sys.executable, "-c", f"import {name}"], env=environment, capture_output=True, text=True)
        assert (
            done.returncode == 1 and f"{name.partition('.')[0]}" in done.stderr and "may not be imported" in done.stderr
        )


def check_imports(folder: Path, allowed: Set[str]) -> None:
    """Assert that the folder's files import each other, the standard library and ``allowed``."""
    assert {"model", "train"} == {path.stem for path in folder.glob("*.py")}
    for path in folder.rglob("*.py"):
        own = {"model", "runtime"} if path.parent == folder else {""}
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += ["" if node.level else str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.partition(".")[0]
                assert top in own | allowed | sys.stdlib_module_names, f"{path.name}: {name}"


def test_the_folder_imports_torch_and_spmd_types_alone(llama: Path) -> None:
    check_imports(llama, {"torch", "spmd_types"})


def test_a_users_op_is_the_only_other_import(tmp_path: Path) -> None:
    """The file that defines it is all that the process has beside the folder. Programs that shard such ops run in ``test_custom_ops``."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    batch = tuple(torch.randn(8, 4, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    given = make_subject(custom_ops.Gated(), batch, name="gated")
    folder, alone, data, state, home = (
        tmp_path / name for name in ("program", "alone", "batch.pt", "state.pt", "blocker")
    )
    register_rule("custom_ops::gated", "* d, d -> * d")
    try:
        emit(given.graph, manual_plan(given.graph, tensor=2), folder)
    finally:
        del TABLE["custom_ops.gated"]
    emit(given.graph, manual_plan(given.graph), alone)
    assert "custom.call(torch.ops.custom_ops.gated.default, (" in (folder / "model.py").read_text()
    assert json.loads((folder / "plan.json").read_text())["imports"] == ["custom_ops"]
    for emitted in (folder, alone):
        check_imports(emitted, {"torch", "spmd_types", "custom_ops"})
    torch.save(given.batch, data)
    torch.save(given.state, state)
    home.mkdir()
    shutil.copy(custom_ops.__file__, home)
    arguments = ("--steps", "1", "--device", "cpu", "--dataset", str(data), "--init", str(state))
    done = launch(alone, tmp_path, *arguments, processes=1)
    assert done.returncode == 0, done.stderr
    (line,) = (json.loads(text) for text in done.stdout.splitlines() if text.startswith("{"))
    assert line["loss"] == pytest.approx(given.loss, rel=1e-9)


def test_it_trains_alone_and_as_one_device_would(llama: Path, tmp_path: Path) -> None:
    given = subject("llama")
    batch, state, saved = tmp_path / "batch.pt", tmp_path / "state.pt", tmp_path / "saved.pt"
    torch.save(given.batch, batch)
    torch.save(given.state, state)
    files = ("--dataset", str(batch), "--init", str(state), "--save", str(saved))
    done = launch(llama, tmp_path, "--steps", "2", "--lr", "0.001", "--device", "cpu", *files, processes=2)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["loss"] == pytest.approx(given.loss, rel=1e-9)
    assert lines[1]["loss"] < lines[0]["loss"]
    trained = torch.load(saved, weights_only=True)
    # AdamW moves every weight that has a gradient by the learning rate in its first step, whatever the gradient's size.
    name = "model.layers.3.mlp.down_proj.weight"
    moved = (trained[name] - given.state[name]).abs().max()
    assert set(trained) == set(given.state) and 1e-3 < moved < 3e-3


def test_without_spmd_types_the_error_names_it(llama: Path, tmp_path: Path) -> None:
    """The one dependency beside torch."""
    (tmp_path / "sitecustomize.py").write_text(REFUSE.format(refused=("spmd_types",)))
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", "import model"], cwd=llama, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1 and "spmd_types may not be imported here" in done.stderr


SPLIT = {"pipeline.py", "split_pipeline.py", "weight_gradients.py"}
NEEDED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "data": ({"data": 2}, set()),
    "ZeRO 1": ({"data": 2, "zero": 1}, {"whole_tensors.py"}),
    "ZeRO 3": ({"data": 2, "zero": 3}, {"fsdp.py", "whole_tensors.py"}),
    "server": ({"data": 2, "sync": "parameter-server"}, set()),
    "one device": ({}, set()),
    "pipeline": ({"pipeline": 2, "microbatches": 2}, {"pipeline.py"}),
    "zero bubble": ({"pipeline": 2, "microbatches": 2, "schedule": "zero-bubble"}, {*SPLIT}),
    "zero bubble, ZeRO 2": (
        {"pipeline": 2, "data": 2, "zero": 2, "microbatches": 2, "schedule": "zero-bubble"},
        {*SPLIT, "fsdp.py", "fsdp_split.py", "whole_tensors.py"},
    ),
    "Chimera": ({"pipeline": 2, "microbatches": 2, "schedule": "chimera"}, {"chimera.py"}),
}
OPTIONAL = set().union(*(files for _, files in NEEDED.values())) | {
    "scaling.py",
    "buffers.py",
    "kernels.py",
    "flattened.py",
}


def test_a_folder_has_the_parts_of_the_runtime_that_its_plan_needs(tmp_path: Path) -> None:
    graph = subject("mlp").graph
    for name, (pins, files) in NEEDED.items():
        emit(graph, manual_plan(graph, **pins), tmp_path)
        assert {path.name for path in tmp_path.glob("runtime/*.py")} & OPTIONAL == files, name


def test_a_folder_has_the_files_that_its_program_needs(tmp_path: Path) -> None:
    """A dense model needs no kernels of rings, recurrences or mixtures; what an earlier program left is removed, a user's file is not."""
    for name, others in (("mixtral", ()), ("llama", ("kernels_experts.py",))):
        graph = subject(name).graph
        emit(graph, manual_plan(graph, tensor=2), tmp_path)
        found = {path.name for path in tmp_path.glob("runtime/*.py")}
        assert not found & {
            *others,
            "kernels_ring.py",
            "kernels_rnn.py",
            "kernels_ctc.py",
            "activation_storage.py",
            "recomputing.py",
            "opaque.py",
        }
        assert ("kernels_experts.py" in found) == (name == "mixtral")
    for mine in (tmp_path / "recomputing.py", tmp_path / "runtime" / "recomputing.py"):
        mine.write_text("mine = True\n")
    emit(graph, manual_plan(graph, tensor=2), tmp_path)
    for mine in (tmp_path / "recomputing.py", tmp_path / "runtime" / "recomputing.py"):
        assert mine.read_text() == "mine = True\n"


def test_the_runtime_is_a_copy(llama: Path) -> None:
    """The same files in every folder, byte for byte, and the version is the package's."""
    for path in (llama / "runtime").glob("*.py"):
        assert path.read_bytes() == (Path(autopar.program.__file__).parent / path.name).read_bytes()
    assert autopar.program.__version__ == autopar.__version__


def test_files_of_a_flat_folder_are_removed(tmp_path: Path) -> None:
    """Before there was a package, the runtime lay beside ``model.py``: what was emitted goes, what was edited since stays."""
    (tmp_path / "layouts.json").write_text("{}")
    for name in ("kernels.py", "world.py"):
        (tmp_path / name).write_text("# as emitted\n")
    (tmp_path / "checked.json").write_text(json.dumps(digests(tmp_path)))
    (tmp_path / "world.py").write_text("# edited\n")
    graph = subject("mlp").graph
    emit(graph, manual_plan(graph), tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == {"model.py", "train.py", "world.py"}


def test_files_that_the_package_had_before_are_removed(tmp_path: Path) -> None:
    """What an earlier version emitted and nobody edited since goes, and its trainer is found until then."""
    graph = subject("mlp").graph
    emit(graph, manual_plan(graph), tmp_path)
    package = tmp_path / "runtime"
    (package / "trainer.py").rename(package / "runtime.py")
    for name in ("values.py", "segments.py"):
        (package / name).write_text("# as emitted\n")
    (package / "mine.py").write_text("# a user's\n")
    write_digests(tmp_path)
    with program_modules(tmp_path):
        assert import_runtime(tmp_path).__name__ == "runtime.runtime"
    (package / "values.py").write_text("# edited\n")
    emit(graph, manual_plan(graph), tmp_path)
    assert {"trainer.py", "values.py", "mine.py"} <= {path.name for path in package.glob("*.py")}
    assert not (package / "runtime.py").exists() and not (package / "segments.py").exists()
    with program_modules(tmp_path):
        assert import_runtime(tmp_path).__name__ == "runtime.trainer"
