"""What is emitted runs with torch and spmd-types alone: two processes under torchrun, and an importer that refuses the rest."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from exactness import subject

from autopar.emit import emit
from autopar.search.hand import hand_plan

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


def launch(folder: Path, tmp_path: Path, *arguments: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """``train.py`` under torchrun, in processes that cannot import ``REFUSED``."""
    blocker = tmp_path / "blocker"
    blocker.mkdir(exist_ok=True)
    (blocker / "sitecustomize.py").write_text(REFUSE.format(refused=REFUSED))
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"PYTHONPATH": str(blocker), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        "train.py",
    ]
    return subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=110
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of two stages, so that every file of the folder is used."""
    graph = subject("llama").graph
    folder = tmp_path_factory.mktemp("program")
    emit(graph, hand_plan(graph, pipeline=2, microbatches=2), folder)
    return folder


def test_the_blocker_blocks(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(REFUSE.format(refused=REFUSED))
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    for name in ("autopar.plan", "ortools"):
        done = subprocess.run([sys.executable, "-c", f"import {name}"], env=environment, capture_output=True, text=True)
        assert (
            done.returncode == 1 and f"{name.partition('.')[0]}" in done.stderr and "may not be imported" in done.stderr
        )


def test_the_folder_imports_torch_and_spmd_types_alone(llama: Path) -> None:
    own = {path.stem for path in llama.glob("*.py")}
    assert {"model", "kernels", "runtime", "train"} <= own
    for path in llama.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.partition(".")[0]
                assert top in own | {"torch", "spmd_types"} | sys.stdlib_module_names, f"{path.name}: {name}"


def test_it_trains_alone_and_as_one_device_would(llama: Path, tmp_path: Path) -> None:
    given = subject("llama")
    batch, state, saved = tmp_path / "batch.pt", tmp_path / "state.pt", tmp_path / "saved.pt"
    torch.save(given.batch, batch)
    torch.save(given.state, state)
    files = ("--data", str(batch), "--init", str(state), "--save", str(saved))
    done = launch(llama, tmp_path, "--steps", "2", "--lr", "0.001", "--device", "cpu", *files)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    assert [line["step"] for line in lines] == [0, 1]
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
