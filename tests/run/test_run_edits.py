"""An edited folder: ``train.py`` refuses one that lacks a collective, before the first step, and names the line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from exactness import subject

from autopar.emit import emit
from autopar.program import type_check
from autopar.program.type_check import DIGESTS, IllTypedError, check, check_edits, edited
from autopar.search.manual import manual_plan

TENSOR, SEQUENCE = {"tensor": 2}, {"tensor": 2, "sequence": True}
PIPELINE = {"pipeline": 2, "data": 2, "microbatches": 2}
REDUCED = r'spmd\.all_reduce\((attn_output_\w+), "\w+", src=spmd\.P, dst=spmd\.I\)'
# What is edited: the model and the plan, the file, what is replaced (once) and by what.
EDITS: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    "tensor: a partial sum is not reduced": ("llama", TENSOR, "model.py", REDUCED, r"\1"),
    "tensor: reduced to another type": ("llama", TENSOR, "model.py", "src=spmd.P, dst=spmd.I", "src=spmd.P, dst=spmd.R"),
    "tensor: the input's gradient is not reduced": (
        "llama", TENSOR, "model.py", 'axis="tensor", src=spmd.I', 'axis="tensor", src=spmd.R',
    ),
    "sequence: a slice is not gathered": (
        "llama", SEQUENCE, "model.py", r'axis="tensor", src=spmd\.S\(1\)', "axis=()",
    ),
    "sequence: a sum is not scattered": (
        "llama", SEQUENCE, "model.py", r'spmd\.reduce_scatter\((.*), "tensor", src=spmd\.P, dst=spmd\.S\(1\)\)', r"\1",
    ),
    "vocabulary: the loss is not reduced over data": (
        "llama", {"tensor": 2, "data": 2}, "model.py", r'partial_axes=\("data",\)', "partial_axes=()",
    ),
    "vocabulary: the loss is reduced over another axis": (
        "llama", {"tensor": 2, "data": 2}, "model.py", '"tensor", ignore_index', '"data", ignore_index',
    ),
    "expert: a router's gradient is not reduced": (
        "mixtral", {"expert": 2}, "layouts.json", r'(mlp\.gate\.weight",(?:\n(?! *\}).*)*?"types": \{\n\s*"expert": )"R"', r'\1"I"',
    ),
    "expert: rows are not exchanged": (
        "mixtral", {"expert": 2}, "model.py", r'owners=\("expert",\)', "owners=()",
    ),
    "pipeline: a stage sends another type": (
        "llama", PIPELINE, "model.py", r'(sends=.*"data": )spmd\.S\(0\)', r"\1spmd.R",
    ),
    "pipeline: the loss has another type": ("llama", PIPELINE, "model.py", r'loss=\{"data": spmd\.P', 'loss={"data": spmd.I'),
    "ulysses: heads are not exchanged": (
        "llama", {"ulysses": 2}, "model.py",
        r'spmd\.all_to_all\((query_states_view\.transpose\(1, 2\)), "ulysses", src=spmd\.S\(2\), dst=spmd\.S\(1\)\)', r"\1",
    ),
    "ring: keys stay where they are": (
        "llama", {"ring": 2}, "model.py", r"kernels_ring\.ring_attention\((.*), \"ring\", ", r"kernels.attention(\1, ",
    ),
    "ring: a table is not sliced": ("llama", {"ring": 2}, "model.py", r'spmd\.convert\(cos, "ring", .*?\)\)', "cos"),
    "ZeRO 3: a weight is no longer replicated": (
        "llama", {"data": 2, "zero": 3}, "layouts.json", r'"types": \{\n\s*"data": "R"', '"types": {"data": "I"',
    ),
    "prelude: the number of labels is a rank's own": ("llama", {"data": 2}, "model.py", r"total\((.*?\.sum\(\))\)", r"\1"),
}  # fmt: skip


def program(folder: Path, name: str) -> Path:
    """The edited program."""
    model, options, file, pattern, replacement = EDITS[name]
    graph = subject(model).graph
    emit(graph, manual_plan(graph, **options), folder)
    text, count = re.subn(pattern, replacement, (folder / file).read_text(), count=1)
    assert count == 1
    (folder / file).write_text(text)
    return folder


@pytest.mark.parametrize("name", EDITS)
def test_each_edit_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    folder = program(tmp_path / "program", name)
    assert edited(folder) == [EDITS[name][2]]
    with pytest.raises(IllTypedError, match=r"(ill-typed|is wrong), model\.py:\d+: ") as refused:
        check(folder, lambda text: None)
    assert refused.value.hint


def test_the_check_is_made_once_and_only_of_edits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is that of the first op that has the wrong type. The first check is made by a process of its own, as in use."""
    folder, said = program(tmp_path / "program", "tensor: a partial sum is not reduced"), list[str]()
    text = (folder / "model.py").read_text()
    number = next(i for i, line in enumerate(text.splitlines(), 1) if " = x + attn_output_i" in line)
    with pytest.raises(IllTypedError, match=rf"model\.py:{number}: "):
        check_edits(folder, said.append)
    assert said == ["type-checking the program, because model.py changed since it was emitted"]
    monkeypatch.setattr(type_check, "check_in_subprocess", lambda folder: check(folder, lambda text: None))
    emit(subject("llama").graph, manual_plan(subject("llama").graph, **TENSOR), folder)
    check_edits(folder, said.append)
    assert len(said) == 1  # nothing was edited
    (folder / "model.py").write_text((folder / "model.py").read_text() + "\n# mine\n")
    check_edits(folder, said.append)
    check_edits(folder, said.append)
    assert len(said) == 2 and edited(folder) == []
    (folder / DIGESTS).unlink()
    assert edited(folder) == ["model.py"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EDITS)
def test_train_refuses_each_edit(name: str, tmp_path: Path) -> None:
    folder = program(tmp_path / "program", name)
    processes = 1
    for size in EDITS[name][1].values():
        processes *= size if size == 2 and not isinstance(size, bool) else 1
    processes //= 2 if "microbatches" in EDITS[name][1] else 1
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    options = [str(folder / "train.py"), "--device", "cpu", "--draw-init", "--steps", "1"]
    done = subprocess.run([*command, *options], env=env | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    assert re.search(r"^IllTypedError: .*model\.py:\d+: ", done.stderr, re.MULTILINE), done.stderr
    assert 'train.py", line' not in done.stderr  # no traceback of a rank
    shutil.rmtree(folder)
