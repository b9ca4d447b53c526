"""Weights in the safetensors format: each rank's own parts, in and out, under any plan; the files against the library of that name."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import subject
from resumed import KIND, emitted
from safetensors.torch import load_file, save_file
from torch import Tensor
from workers import WorkerPool

from autopar.program.boxes import Box, whole
from autopar.program.weights import create, divided, read, runs, stored, write
from autopar.run import remote

PART = "model-00001-of-00014.safetensors"
TENSORS: dict[str, Tensor] = {
    "matrix": torch.arange(12.0).view(3, 4),
    "flags": torch.tensor([True, False, True]),
    "number": torch.tensor(7),
    "half": torch.arange(8, dtype=torch.bfloat16).view(2, 2, 2),
    "none": torch.zeros(0, 3),
}


def test_files_are_those_of_the_library(tmp_path: Path) -> None:
    places = divided(tmp_path, {name: (t.dtype, t.shape) for name, t in TENSORS.items()}, file_bytes=50)
    create(places)
    write((places[name], whole(("model", name), tensor)) for name, tensor in TENSORS.items() if tensor.numel())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in TENSORS.items()
    )
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(TENSORS)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in TENSORS.values())


def test_any_box_of_a_file_of_the_library_is_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = stored(tmp_path)
    for name, tensor in TENSORS.items():
        for box in _boxes(tuple(tensor.shape)):
            part = tensor[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
            assert torch.equal(read(found[name], box), part)
            flat = tensor.flatten()
            assert torch.equal(
                torch.cat([flat[:0], *(flat[first : first + count] for first, count in runs(tensor.shape, box))]),
                part.flatten(),
            )


def _boxes(shape: tuple[int, ...]) -> list[Box]:
    boxes = [Box((), ())]
    for size in shape:
        ends = [(low, high - low) for low in range(size) for high in range(low + 1, size + 1)] or [(0, 0)]
        boxes = [Box((*box.offsets, o), (*box.sizes, s)) for box in boxes for o, s in ends]
    return [box for box in boxes if math.prod(box.sizes) or 0 in shape]


@pytest.mark.parametrize("cut", [0, 4, 20, -3])
def test_a_file_that_is_cut_off_is_refused(cut: int, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:cut] if cut else struct.pack("<Q", 10**9) + data[8:])
    with pytest.raises(ValueError, match="is no whole file of weights"):
        stored(tmp_path)


def exchanged(folder: str, start: str, target: str, file_bytes: int) -> dict[str, Any]:
    """In a worker: the state dict of a trainer that starts from weights, which it writes again; and why other weights are refused."""
    options = {"optimizer": None, "lr": 0.1, "seed": 0, "max_norm": None, "state": None}
    trainer = remote.open_trainer(folder, options, device="cpu", timeout_s=60)
    trainer.load_weights(start)
    trainer.save_weights(target, file_bytes=file_bytes)
    whys = []
    for refused in (lambda: trainer.save_weights(target), lambda: trainer.load_weights(f"{target}/{PART}")):
        try:
            refused()
        except RuntimeError as error:
            whys.append(str(error))
    return {"state": trainer.state_dict(), "whys": whys}


@pytest.mark.parametrize("kind", ["tensor 3", "data 3, zero 3", "pipeline 3"])
def test_weights_go_in_and_out(kind: str, workers3: WorkerPool, tmp_path: Path) -> None:
    """A GPT-2 with padding, fused and tied parameters; in one file without the second name of a tied one, out in several."""
    given = subject("odd_gpt2")
    program = emitted("odd_gpt2", KIND[kind].plan(given.graph), tmp_path / "program")
    (tmp_path / "in").mkdir()
    state = {name: tensor + 1 for name, tensor in given.state.items() if name != "lm_head.weight"}
    save_file(state, tmp_path / "in" / "model.safetensors")
    call = (program, str(tmp_path / "in"), str(tmp_path / "out"), 20_000)
    found = workers3.run("test_weights:exchanged", *call)[0]
    assert all(torch.equal(found["state"][name], state[name]) for name in state)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert files[0].name == PART
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert set(written) == set(state)
    assert all(torch.equal(written[name], state[name]) for name in state)
    assert "out exists" in found["whys"][0]
    assert f"{PART} has no weights of the model that was compiled: it has no" in found["whys"][1]
