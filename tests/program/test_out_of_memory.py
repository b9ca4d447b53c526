"""A rank without memory says what was predicted, what was measured, and what to change."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from programs import Shape, write_mlp

from autopar.program.metrics import explaining_out_of_memory, is_out_of_memory, peak_memory_bytes, sentence

PLAN = {
    "stages": [
        {
            "devices": [2 * stage, 2],
            "memory_limit_bytes": 80 * 10**9,
            "memory_by_part_bytes": {
                "parameters": 10 * 10**9,
                "gradients": 10 * 10**9,
                "optimizer": 40 * 10**9,
                "activations": stage * 50 * 10**9,
                "transients": 10**9,
            },
        }
        for stage in (0, 1)
    ]
}


def test_the_sentence_has_the_stage_of_the_rank_and_its_largest_part() -> None:
    said = sentence(PLAN, 1, (70 * 10**9, "peak device allocation"), "CUDA out of memory")
    assert said.startswith(
        "out of memory on rank 1, stage 0: the plan predicts 61 GB (parameters 10 GB, gradients 10 GB, optimizer 40 GB, activations "
        "0 bytes, transients 1 GB) of 80 GB, peak device allocation is 70 GB; plan again with --memory-limit 71GB, or shard the "
        "optimizer's states (--pin zero=1)"
    )
    said = sentence(PLAN, 2, (10**9, "m"), "")
    assert (
        "stage 1: the plan predicts 111 GB" in said
        and "--memory-limit 72GB, or recompute more (--pin activations=full)" in said
    )


def test_only_failed_allocations_are_explained(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    with (
        pytest.raises(MemoryError, match="rank 0, stage 0: the plan predicts 61 GB") as error,
        explaining_out_of_memory(tmp_path),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    assert "(CUDA out of memory. Tried to allocate 2 GiB)" in str(error.value)
    with pytest.raises(ValueError, match="the batch"), explaining_out_of_memory(tmp_path):
        raise ValueError("the batch is empty")
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"))


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_macos_counts_resident_memory_in_bytes(monkeypatch: pytest.MonkeyPatch, platform: str, unit: int) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=3_000_000))
    assert peak_memory_bytes() == 3_000_000 * unit


def test_a_training_beyond_the_limit_of_its_process_says_so(tmp_path: Path) -> None:
    """The kernel refuses memory to the process in its third step."""
    program = write_mlp(tmp_path / "program", Shape())
    model = program / "model.py"
    grow = "import resource\nkept = []\n\n\ndef prelude(inputs, constants, total):\n    kept.append(0)\n    if len(kept) == 3:\n"
    grow += "        resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))\n        torch.empty(2**34)\n"
    model.write_text(model.read_text().replace("def prelude(inputs, constants, total):\n", grow))
    command = [sys.executable, str(program / "train.py"), "--steps", "9", "--draw-init", "--device", "cpu"]
    command.append("--no-check")  # which runs the prelude in a process of its own
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.count('"step"') == 2
    assert "MemoryError: out of memory on rank 0, stage 0: the plan predicts 5 bytes (parameters 1 bytes" in done.stderr
    assert "peak resident memory is" in done.stderr and "plan again with --memory-limit" in done.stderr
