"""Weights in the safetensors format: each rank's own parts, in and out, under any plan; the files against the library of that name."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import subject
from resumed import KIND, emitted
from safetensors.torch import load_file, save_file
from torch import Tensor
from workers import WorkerPool

from autopar.program import checkpoint_files
from autopar.program.boxes import Box, full_piece, part_of
from autopar.program.weights import create, file_places, mapped, runs, write, write_file
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
    places = file_places(tmp_path, {name: (t.dtype, t.shape) for name, t in TENSORS.items()}, file_bytes=50)
    create(places)
    write((places[name], full_piece(("model", name), tensor)) for name, tensor in TENSORS.items() if tensor.numel())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in TENSORS.items()
    )
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(TENSORS)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in TENSORS.values())


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_a_file_of_the_library_is_mapped(shift: int, tmp_path: Path) -> None:
    """Also where the tensors begin at an odd byte: the format asks for no alignment."""
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length] + b" " * shift
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])
    found = mapped(tmp_path)
    assert set(found) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_the_runs_of_a_box_are_its_elements() -> None:
    for tensor in TENSORS.values():
        for box in _boxes(tuple(tensor.shape)):
            flat, parts = tensor.flatten(), [tensor.flatten()[:0]]
            parts += [flat[first : first + count] for first, count in runs(tensor.shape, box)]
            assert torch.equal(torch.cat(parts), part_of(tensor, box).flatten())


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
    with pytest.raises(ValueError, match="is not a complete file of weights"):
        mapped(tmp_path)


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


def gathered(folder: str, start: str) -> dict[str, Tensor]:
    """In a worker: the state dict of a trainer that starts from weights."""
    trainer = started(folder)
    trainer.load_weights(start)
    found: dict[str, Tensor] = trainer.state_dict()
    return found


@pytest.mark.parametrize("kind", ["tensor 2", "data 2, zero 1", "data 2, zero 3"])
def test_a_state_dict_is_gathered_a_few_bytes_at_a_time(kind: str, workers2: WorkerPool, tmp_path: Path) -> None:
    given = subject("odd_gpt2")
    program = emitted("odd_gpt2", KIND[kind].plan(given.graph), tmp_path / "program")
    file = tmp_path / "program" / "runtime" / "model_tensors.py"
    text, count = re.subn(r"limit = max\(.*\)", "limit = 1000", file.read_text())
    assert count == 1
    file.write_text(text)
    state = {name: tensor + 1 for name, tensor in given.state.items() if name != "lm_head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    found = workers2.run("test_weights:gathered", program, str(tmp_path / "model.safetensors"))
    assert all(torch.equal(found[0][name], state[name]) for name in state) and set(found[0]) == set(given.state)
    assert found[1] == {}


def test_a_tensor_with_two_names_is_stored_once_and_found_under_both(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).view(2, 3)
    state = {"embed": tensor, "head": tensor, "rows": tensor[:1], "flag": torch.tensor([True])}
    write_file(tmp_path / "model.safetensors", state)
    assert set(load_file(tmp_path / "model.safetensors")) == {"embed", "rows", "flag"}
    found = mapped(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in state.items())
    assert found["head"].data_ptr() == found["embed"].data_ptr() != found["rows"].data_ptr()


def test_a_lazily_conjugated_tensor_is_written_conjugated(tmp_path: Path) -> None:
    values = torch.randn(4, dtype=torch.cfloat)
    state = {"plain": values, "conjugated": values.conj(), "negated": values.conj().imag}
    write_file(tmp_path / "model.safetensors", state)
    found = mapped(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in state.items())


# -- errors on the way ------------------------------------------------------------------------------------------------


def started(folder: str) -> Any:
    options = {"optimizer": None, "lr": 0.1, "seed": 0, "max_norm": None, "state": None}
    return remote.open_trainer(folder, options, device="cpu", timeout_s=60)


def why_refused(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        assert type(error).__name__ == "CheckpointError"
        return str(error)
    return ""


def torn_and_unreadable(folder: str, torn: str, good: str, batch: dict[str, Tensor]) -> dict[str, Any]:
    """In a worker: weights that are refused, weights that one rank cannot read to their end, whole ones; and a step after each."""
    trainer = started(folder)
    before = trainer.state_dict()
    whys = [why_refused(lambda: trainer.load_weights(torn))]
    after = trainer.state_dict()
    whys.append(why_refused(lambda: trainer.step(batch)))
    os.environ["UNREADABLE"] = "1" if os.environ["RANK"] == "1" else ""
    whys.append(why_refused(lambda: trainer.load_weights(good)))
    whys += [why_refused(lambda: trainer.step(batch)), why_refused(lambda: trainer.save(f"{folder}/saved"))]
    os.environ["UNREADABLE"] = ""
    whys.append(why_refused(lambda: trainer.load_weights(good)))
    return {
        "whys": whys,
        "same": [name for name in before if torch.equal(before[name], after[name])],
        "state": trainer.state_dict(),
    }


def test_nothing_goes_on_from_weights_that_were_read_in_part(workers2: WorkerPool, tmp_path: Path) -> None:
    """What can be known before is refused before any value changes; an error of the disk after that stops steps and saves."""
    given = subject("odd_gpt2")
    program = emitted("odd_gpt2", KIND["tensor 2"].plan(given.graph), tmp_path / "program")
    file, line = tmp_path / "program" / "runtime" / "model_tensors.py", "piece.values.copy_(part_of(full, piece.box))"
    fault = "if __import__('os').environ.get('UNREADABLE') and 'ln_f.bias' in piece.name:\n"
    fault += f"                raise OSError(5, 'Input/output error')\n            {line}"
    assert file.read_text().count(line) == 1
    file.write_text(file.read_text().replace(line, fault))
    good = {name: tensor + 1 for name, tensor in given.state.items()}
    good["lm_head.weight"] = good["transformer.wte.weight"]
    last = good["lm_head.weight"].clone()
    last[-1, -1] += 1
    write_file(tmp_path / "good.safetensors", good)
    write_file(tmp_path / "torn.safetensors", good | {"lm_head.weight": last})
    call = (program, str(tmp_path / "torn.safetensors"), str(tmp_path / "good.safetensors"), given.batch)
    for rank, found in enumerate(workers2.run("test_weights:torn_and_unreadable", *call)):
        torn, step, unreadable, other_step, save, again = found["whys"]
        assert "tied in the model, but with different values here:" in torn and "lm_head.weight" in torn and step == ""
        assert (
            "Input/output error" in unreadable
            and "before training continues: some parameters have been replaced" in unreadable
        )
        assert "are of two states" in other_step and "are of two states" in save and again == ""
        if rank == 0:
            assert set(found["same"]) == set(given.state)
            assert all(torch.equal(found["state"][name], good[name]) for name in good)


def saved_with_errors(folder: str, target: str) -> dict[str, Any]:
    """In a worker: why weights cannot be written, what is left behind; and what was on the disk when the folder got its name."""
    trainer = started(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))
    whys = [why_refused(lambda: trainer.save_weights(target, file_bytes=20_000))]
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    left = sorted(os.listdir(os.path.dirname(target)))
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noted(descriptor: int) -> None:
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(source: Any, to: Any, **options: Any) -> None:
        events.append(f"to {os.path.basename(to)}")
        rename(source, to, **options)

    os.fsync, os.rename = noted, renamed  # type: ignore[assignment]
    try:
        trainer.save_weights(target, file_bytes=20_000)
    finally:
        os.fsync, os.rename = fsync, rename
    return {"whys": whys, "left": left, "events": events}


def test_weights_are_on_the_disk_before_they_have_their_name_or_nothing_is_left(
    workers2: WorkerPool, tmp_path: Path
) -> None:
    program = emitted("odd_gpt2", KIND["tensor 2"].plan(subject("odd_gpt2").graph), tmp_path / "program")
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "weights"
    found = workers2.run("test_weights:saved_with_errors", program, str(target))
    assert all("File too large" in rank["whys"][0] for rank in found) and found[0]["left"] == []
    events = found[0]["events"]
    named = events.index("to weights")
    assert {path.name for path in target.iterdir()} | {"weights.partial"} <= set(events[:named])
    assert "out" in events[named:]
    text = (tmp_path / "program" / "runtime" / "weights.py").read_text()
    other = re.sub(r"set\(_NAMES\) - \{torch.complex128\}", "set(_NAMES) - {torch.float64}", text)
    assert other != text
    (tmp_path / "program" / "runtime" / "weights.py").write_text(other)
    why = workers2.run("test_weights:refused_dtype", program, str(tmp_path / "out" / "others"))[0]
    assert "safetensors files have no torch.float64, the dtype of" in why
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["weights"]


def refused_dtype(folder: str, target: str) -> str:
    """In a worker: why weights in the dtype of the model cannot be written."""
    return why_refused(lambda: started(folder).save_weights(target))


# -- what a checkpoint lacks ------------------------------------------------------------------------------------------


def forgotten(folder: str, batch: dict[str, Tensor], saved: str) -> str:
    """In a worker: what is said on loading a checkpoint in which one parameter has no optimizer state."""
    trainer = started(folder)
    trainer.step(batch)
    for group in trainer._groups:
        for master in group.masters:
            if master.layout.original.endswith("h.0.ln_1.weight"):
                del trainer.optimizer.state[master.tensor]
    trainer.save(saved)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        trainer.load(saved)
    return said.getvalue()


def test_optimizer_state_that_a_checkpoint_lacks_is_named(workers2: WorkerPool, tmp_path: Path) -> None:
    given = subject("gpt2")
    program = emitted("gpt2", KIND["data 2, zero 1"].plan(given.graph), tmp_path / "program")
    said = workers2.run("test_weights:forgotten", program, given.batch, str(tmp_path / "saved"))
    assert "AdamW starts without state, because " in said[0]
    assert said[0].endswith(" has none, for transformer.h.0.ln_1.weight\n")
    assert said[1] == ""
    facts = next((tmp_path / "saved").glob("*/checkpoint.json"))
    without = json.loads(facts.read_text()) | {"optimizer": None}
    facts.write_text(json.dumps(checkpoint_files._sealed(without, (facts.parent / ".metadata").read_bytes())))
    why = workers2.run("test_weights:load_refused", program, str(tmp_path / "saved"))[0]
    assert "has no optimizer state, but the program trains with AdamW" in why


def load_refused(folder: str, saved: str) -> str:
    """In a worker: why a checkpoint cannot be loaded."""
    return why_refused(lambda: started(folder).load(saved))
