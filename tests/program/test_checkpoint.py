"""Checkpoints: saved under one plan, loaded under another, compared with training on one device without a pause."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from damage import as_format_1
from exactness import MODELS, subject
from peaks import grown_by
from programs import Shape, mlp_model, write_mlp
from resumed import KIND, Fault, batch_of, chain, emitted
from test_randomness import dropping
from tiers import in_short, slow
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from workers import WorkerPool

from autopar.capture import capture
from autopar.emit import emit
from autopar.errors import LaunchError
from autopar.program import box_files, checkpoint
from autopar.program.boxes import Box, Piece, cut, divided, pieces
from autopar.program.checkpoint_files import CheckpointError, StoredCheckpoint, finish, newest, open_or_reason
from autopar.program.world import Layout
from autopar.run.folder import import_runtime, program_modules
from autopar.search.manual import manual_plan
from autopar.shard import annotate

# -- boxes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (2, 1, 3, 2), (3, 0)])
def test_a_range_is_cut_into_few_boxes_in_order(shape: tuple[int, ...]) -> None:
    elements = torch.arange(math.prod(shape)).view(shape)
    most = max(1, 2 * len(shape) - 1)
    for low, high in itertools.combinations(range(math.prod(shape) + 1), 2):
        boxes = list(cut(shape, low, high))
        parts = [elements[tuple(slice(o, o + s) for o, s in zip(b.offsets, b.sizes, strict=True))] for b in boxes]
        assert torch.cat([part.flatten() for part in parts]).tolist() == list(range(low, high))
        assert all(tuple(part.shape) == box.sizes for part, box in zip(parts, boxes, strict=True))
        assert len(boxes) <= most
    assert list(cut(shape, 0, 0)) == []


def test_pieces_are_boxes_of_the_original_without_padding() -> None:
    """Rows 4 to 8 of a fused matrix are a part of 4 rows and 5 columns, padded to 6 columns, of which this rank has the last 3."""
    layout = Layout(
        0, "q", "qkv", (12, 5), (0, 4, 4), (4, 5), (4, 6), torch.float32, True, (), (("tensor", 1),), (), None
    )
    original = torch.arange(60).view(12, 5)
    window = layout.window({"tensor": (1, 2)})
    local = torch.nn.functional.pad(original[4:8], (0, 1))[:, 3:]
    found = list(pieces(("model", "qkv"), layout, window, local.flatten()[2:11], first=2))
    assert [piece.box for piece in found] == [Box((5, 3), (2, 2)), Box((7, 3), (1, 2))]
    for piece in found:
        rows, columns = (slice(o, o + s) for o, s in zip(piece.box.offsets, piece.box.sizes, strict=True))
        assert torch.equal(piece.values, original[rows, columns])


@pytest.mark.parametrize("largest", [1, 8, 40, 64, 10**9])
def test_a_large_piece_is_divided(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.program.boxes.LARGEST", largest)
    values = torch.arange(30.0).view(1, 5, 6)
    parts = list(divided(Piece(("model", "w"), (2, 9, 7), Box((1, 3, 1), (1, 5, 6)), values)))
    assert all(part.values.numel() * 4 <= max(largest, 4) for part in parts)
    assert len(parts) == {1: 30, 8: 15, 40: 5, 64: 3, 10**9: 1}[largest]
    found = torch.zeros(2, 9, 7)
    for part in parts:
        assert tuple(part.values.shape) == part.box.sizes
        found[tuple(slice(o, o + s) for o, s in zip(part.box.offsets, part.box.sizes, strict=True))] += part.values
    assert torch.equal(found[1, 3:8, 1:7], values[0]) and found.sum() == values.sum()


# -- other plans ------------------------------------------------------------------------------------------------------

CHAINS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "tied and fused": (
        "gpt2",
        "adamw",
        (
            "tensor 2",
            "pipeline 2 of 2 chunks x data 2, zero 1",
            "data 2, zero 3",
            "pipeline 2 x data 2, zero 2",
            "one device",
        ),
    ),
    "padding": ("odd_gpt2", "adamw", ("tensor 3", "data 3, zero 3", "tensor 2", "pipeline 3")),
    "hybrid": (
        "mlp",
        "momentum",
        ("data 2 in 2 copies, zero 3", "data 2 x tensor 2, zero 3", "data 2 in 2 copies, zero 1", "data 2, zero 2"),
    ),
    "experts": ("mixtral", "momentum", ("expert 2", "tensor 2", "data 2 x expert 2, zero 2", "data 2, zero 1")),
    "listed experts": (
        "listed experts",
        "adamw",
        ("expert 2", "data 2, zero 3", "data 2 x expert 2, zero 2", "one device", "expert 4", "pipeline 2 x expert 2"),
    ),
    "listed experts whole": (
        "listed experts",
        "muon",
        ("expert 2", "data 2, zero 3", "one device", "expert 2 x tensor 2"),
    ),
    "schedules": (
        "mlp",
        "asgd",
        ("pipeline 2, Chimera", "data 2, parameter server", "pipeline 2, zero bubble", "data 2, zero 1"),
    ),
    "whole tensors": ("gpt2", "muon", ("tensor 2", "one device", "data 2, zero 3")),
    "rows and columns": ("mlp", "adafactor", ("data 2, zero 1", "tensor 2", "data 2", "pipeline 2")),
    "buffers": ("resnet", "momentum", ("data 2, zero 2", "pipeline 2, gpipe")),
    "frozen": ("adapters", "adamw", ("data 2, zero 3", "tensor 2", "pipeline 2", "data 2, zero 1")),
}


@pytest.mark.parametrize(
    "name",
    in_short(
        CHAINS,
        "tied and fused",
        "experts",
        "listed experts",
        "listed experts whole",
        "whole tensors",
        "rows and columns",
        "buffers",
        "frozen",
    ),
)
def test_training_goes_on_under_another_plan(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    model, optimizer, kinds = CHAINS[name]
    graph = subject(model).graph
    plans = [KIND[kind].plan(graph) for kind in kinds]
    errors = chain(model, plans, optimizer, lambda count: request.getfixturevalue(f"workers{count}"), tmp_path)
    assert max(errors.values()) <= 1e-9, errors


def test_large_tensors_are_read_in_parts(workers2: WorkerPool, workers3: WorkerPool, tmp_path: Path) -> None:
    """A tensor of a checkpoint has many boxes: of its replicas some write one, some another."""
    plans = [KIND[name].plan(subject("odd_gpt2").graph) for name in ("tensor 3", "data 2", "data 3, zero 3")]
    pools = {2: workers2, 3: workers3}
    small = ("boxes.py", r"LARGEST = .*", "LARGEST = 4000")
    errors = chain("odd_gpt2", plans, "adamw", pools.__getitem__, tmp_path, [small])
    assert max(errors.values()) <= 1e-9, errors
    found, _ = newest(tmp_path / "saved" / "step-4")
    name = "model.transformer.wte.weight"  # 27,160 bytes
    assert len(found.metadata.state_dict_metadata[name].chunks) == 7
    assert len({part.relative_path for index, part in found.metadata.storage_data.items() if index.fqn == name}) == 2


FAULTS: dict[str, tuple[str, tuple[str, str], Fault]] = {
    "the optimizer starts anew": (
        "mlp", ("one device", "data 2, zero 1"), ("checkpoint.py", r"restored\[0\]\.install\(\)", "pass"),
    ),
    "masters are not published": (
        "mlp", ("one device", "data 2, zero 1"), ("model_tensors.py", r"group\.publish\(\)", "pass"),
    ),
    "pieces begin where slices begin": (
        "mlp", ("data 2, zero 1", "one device"), ("parameters.py", r"same, low - slot\.start\)", "same, 0)"),
    ),
    "shards begin where slices begin": (
        "mlp", ("data 2, zero 3", "one device"), ("fsdp.py", r"first = rows_of\(param, .*", "first = 0"),
    ),
    "parts of fused parameters have no place": (
        "gpt2", ("tensor 2", "one device"), ("boxes.py", r"offsets\[layout\.part\[0\]\] \+= layout\.part\[1\]", "pass"),
    ),
    "padding is saved": (
        "odd_gpt2", ("tensor 2", "one device"), ("boxes.py", r"min\(box\.sizes\[dim\], .*\)\)", "box.sizes[dim])"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", in_short(FAULTS, "the optimizer starts anew"))
def test_a_fault_is_caught(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """By a refusal to write what is no whole tensor, or by other numbers."""
    model, kinds, fault = FAULTS[name]
    graph = subject(model).graph
    plans = [KIND[kind].plan(graph) for kind in kinds]
    try:
        errors = chain(
            model, plans, "adamw", lambda count: request.getfixturevalue(f"workers{count}"), tmp_path, [fault]
        )
    except LaunchError as error:  # a save refuses what is no whole tensor, a start what is no part of one
        assert "CheckpointError: " in error.message or "exceeds dimension size" in error.message
        return
    assert max(errors.values()) > 1e-6


def test_torch_reads_a_checkpoint_as_the_state_dict_of_the_users_model(workers2: WorkerPool, tmp_path: Path) -> None:
    given = subject("gpt2")
    program = emitted("gpt2", KIND["tensor 2"].plan(given.graph), tmp_path / "program")
    options = {"state": f"{program}/initial.pt", "save": str(tmp_path)}
    found = workers2.run("resumed:trained", program, [batch_of("gpt2", 0)], "adamw", **options)[0]
    dcp_to_torch_save(found["path"], tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert set(whole) == {"model", "optimizer"}
    assert all(torch.equal(whole["model"][name], found["state"][name]) for name in whole["model"])
    trained = {layout["original"] for layout in _layouts(program)}
    assert set(whole["model"]) == trained == set(whole["optimizer"])
    facts = json.loads((Path(found["path"]) / "checkpoint.json").read_text())
    others, left_out = facts["other_names"], set(facts["left_out"])
    assert others == {"lm_head.weight": "transformer.wte.weight"}
    assert sorted([*trained, *others, *left_out]) == sorted(given.state)
    first = whole["optimizer"]["transformer.h.0.attn.c_attn.weight"]
    assert first["exp_avg"].shape == given.state["transformer.h.0.attn.c_attn.weight"].shape and first["step"] == 1


def _layouts(program: str) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads((Path(program) / "layouts.json").read_text())["parameters"]
    return records


# -- the same plan ----------------------------------------------------------------------------------------------------


def both(pool: WorkerPool, program: str, batches: list[Any], optimizer: str, folder: Path) -> tuple[Any, Any, Any]:
    """The results of all ranks: of a training without a pause, and of its two halves with a checkpoint between."""
    start, half = {"state": f"{program}/initial.pt"}, len(batches) // 2
    straight = pool.run("resumed:trained", program, batches, optimizer, **start)
    first = pool.run("resumed:trained", program, batches[:half], optimizer, save=str(folder), **start)
    second = pool.run("resumed:trained", program, batches[half:], optimizer, load=str(folder))
    return straight, first, second


def same_bits(straight: Any, first: Any, second: Any) -> bool:
    losses = first[0]["losses"] + second[0]["losses"]
    state = straight[0]["state"]
    return losses == straight[0]["losses"] and all(torch.equal(state[n], second[0]["state"][n]) for n in state)


SAME = {
    "data 2 x tensor+sequence 2, zero 1": ("adamw", 6),
    "pipeline 2 of 2 chunks x data 2, zero 3, recompute, reduced once a step": ("adamw", 6),
    "data 2, zero 2": ("adamw", 8),
    "data 2, zero 3": ("muon", 6),
    "tensor 2": ("adafactor", 6),
    "data 2, parameter server": ("momentum", 8),
    "data 2, local steps": ("adamw", 8),
}


@pytest.mark.parametrize(
    "kind",
    in_short(SAME, "data 2 x tensor+sequence 2, zero 1", "data 2, zero 3", "data 2, local steps"),
)
def test_the_same_plan_goes_on_bit_for_bit(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Eight steps, and four with four more; local SGD replicas are averaged after every third step, not after the fourth."""
    optimizer, steps = SAME[kind]
    plan = KIND[kind].plan(subject("mlp").graph)
    pool: WorkerPool = request.getfixturevalue(f"workers{plan.device_count}")
    program = emitted("mlp", plan, tmp_path / "program")
    results = both(pool, program, [batch_of("mlp", step) for step in range(steps)], optimizer, tmp_path / "saved")
    assert same_bits(*results)
    assert [results[1][0]["rows"], results[2][0]["rows"]] == [4 * steps, 8 * steps]


def test_dropout_goes_on_bit_for_bit(workers2: WorkerPool, tmp_path: Path) -> None:
    graph, state, batch = dropping(0.25, 0.25)
    emit(graph, manual_plan(graph, tensor=2, microbatches=2), tmp_path / "program")
    torch.save(state, tmp_path / "program" / "initial.pt")
    results = both(workers2, str(tmp_path / "program"), [batch] * 4, "adamw", tmp_path / "saved")
    assert same_bits(*results)
    assert len(set(results[0][0]["losses"])) == 4


@pytest.mark.parametrize(("precision", "stages"), [("bfloat16", (3,)), ("float16", (1,)), slow("float16", (3,))])
def test_16_bits_go_on_from_masters_in_float32(
    precision: str, stages: tuple[int, ...], workers2: WorkerPool, tmp_path: Path
) -> None:
    """In float16 with the loss scale, and the number of steps since it changed."""
    torch.manual_seed(0)
    model, batch, _ = MODELS["llama"]()
    graph = annotate(capture(model, batch, precision=precision))
    for zero in stages:
        plan = dataclasses.replace(manual_plan(graph, data=2, zero=zero), precision=precision)
        program = tmp_path / str(zero)
        emit(graph, plan, program)
        torch.save({name: tensor.detach() for name, tensor in model.state_dict().items()}, program / "initial.pt")
        assert same_bits(*both(workers2, str(program), [dict(batch)] * 6, "adamw", tmp_path / f"saved{zero}"))
        (path,) = (tmp_path / f"saved{zero}").iterdir()
        found = open_or_reason(path)
        assert isinstance(found, StoredCheckpoint)
        assert {m.properties.dtype for m in found.metadata.state_dict_metadata.values()} == {torch.float32}
        scale = found.facts["loss_scale"]
        assert (scale is None) == (precision == "bfloat16")
        assert scale is None or scale["_growth_tracker"] + math.log2(2**16 / scale["scale"]) >= 3


def test_optimizer_state_follows_its_parameter_to_another_dtype(workers1: WorkerPool, tmp_path: Path) -> None:
    """Saved in float64, read by a program in float32, whose optimizer cannot mix the two."""
    torch.manual_seed(0)
    model, batch, _ = MODELS["llama"]()
    answers = {}
    for precision, given in (
        ("float64", {"save": str(tmp_path / "saved")}),
        ("float32", {"load": str(tmp_path / "saved")}),
    ):
        graph = annotate(capture(model, batch, precision=precision))
        plan = dataclasses.replace(manual_plan(graph), precision=precision)
        emit(graph, plan, tmp_path / precision)
        torch.save({n: t.detach() for n, t in model.state_dict().items()}, tmp_path / precision / "initial.pt")
        start = {"state": str(tmp_path / precision / "initial.pt")} if precision == "float64" else {}
        program = str(tmp_path / precision)
        answers[precision] = workers1.run("resumed:trained", program, [dict(batch)] * 2, "adamw", **given, **start)
    losses = [loss for answer in answers.values() for loss in answer[0]["losses"]]
    assert losses == sorted(losses, reverse=True) and len(losses) == 4


# -- the folders ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(workers1: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 2 and 4 of the MLP, and its program."""
    folder = tmp_path_factory.mktemp("saved")
    plan = KIND["one device"].plan(subject("mlp").graph)
    program = emitted("mlp", plan, folder / "program")
    batches = [batch_of("mlp", step) for step in range(2)]
    options = {"save": str(folder / "steps")}
    workers1.run("resumed:trained", program, batches, "adamw", state=f"{program}/initial.pt", **options)
    workers1.run("resumed:trained", program, batches, "adamw", load=str(folder / "steps"), **options)
    assert sorted(path.name for path in (folder / "steps").iterdir()) == ["step-2", "step-4"]
    return folder


@pytest.fixture
def steps(saved: Path, tmp_path: Path) -> Path:
    """A copy of its checkpoints."""
    return Path(shutil.copytree(saved / "steps", tmp_path / "steps"))


def test_the_newest_whole_checkpoint_is_found(steps: Path) -> None:
    found, note = newest(steps)
    assert found.path == steps / "step-4" and note == ""
    assert found.facts["steps"] == 4 and found.facts["optimizer"]["class"] == "AdamW"
    (options,) = found.facts["optimizer"]["groups"]
    assert options["weight_decay"] == 0.1 and options["betas"] == [0.9, 0.999] and "fused" not in options
    assert newest(steps / "step-2")[0].path == steps / "step-2"


def _truncate(step: Path) -> None:
    (file,) = step.glob("*.distcp")
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 9)


HURT = {
    "does not end with the table of its boxes": _truncate,
    "is missing": lambda step: next(step.glob("*.distcp")).unlink(),
    "it has no checkpoint.json": lambda step: (step / "checkpoint.json").unlink(),
    "it has no .metadata": lambda step: (step / ".metadata").unlink(),
    "cannot be read": lambda step: (step / "checkpoint.json").write_bytes(b"no JSON"),
    "does not have the checksum": lambda step: (step / ".metadata").write_bytes(b"no pickle"),
    "it refers to os.system": lambda step: (as_format_1(step) / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR."),
    "has checksums, but its checkpoint.json has format 1": lambda step: as_format_1(step, facts_alone=True),
    "its format is 3": lambda step: (step / "checkpoint.json").write_text('{"format": 3}'),
}


@pytest.mark.parametrize("why", HURT)
def test_a_damaged_checkpoint_is_skipped_or_named(why: str, steps: Path) -> None:
    HURT[why](steps / "step-4")
    (steps / "step-5.partial").mkdir()
    found, note = newest(steps)
    assert found.path == steps / "step-2"
    assert note.count("\n") == 0 and why in note and "step-5.partial (its save did not finish)" in note
    with pytest.raises(CheckpointError, match=why):
        newest(steps / "step-4")
    shutil.rmtree(steps / "step-2")
    with pytest.raises(CheckpointError, match=f"no complete checkpoint: .*{why}"):
        newest(steps)


def test_the_last_ones_are_kept(steps: Path) -> None:
    """A checkpoint that is written removes those before it, whatever its number, and half-written ones; not those after it."""
    partial = steps / "step-3.partial"
    shutil.copytree(steps / "step-2", partial)
    (steps / "step-1.partial").mkdir()
    facts = json.loads((partial / "checkpoint.json").read_text())
    assert finish(partial, facts, keep=1) == steps / "step-3"
    assert sorted(path.name for path in steps.iterdir()) == ["step-3", "step-4"]
    shutil.copytree(steps / "step-3", partial)
    finish(partial, facts, keep=None)  # once more in place of the one of that name
    assert sorted(path.name for path in steps.iterdir()) == ["step-3", "step-4"]


def test_a_replaced_checkpoint_is_there_until_the_new_one_is(steps: Path) -> None:
    """A machine that dies between the two renames leaves the old one under its other name."""
    (steps / "step-4").rename(steps / "step-4.replaced")
    found, _ = newest(steps)
    assert found.path == steps / "step-4.replaced"
    shutil.copytree(steps / "step-4.replaced", steps / "step-4.partial")
    finish(steps / "step-4.partial", found.facts, keep=2)
    assert sorted(path.name for path in steps.iterdir()) == ["step-2", "step-4"]


def test_a_full_disk_costs_nothing(saved: Path, workers1: WorkerPool, tmp_path: Path) -> None:
    program, batch = str(saved / "program"), batch_of("mlp", 0)
    wanted = workers1.run("resumed:trained", program, [batch], "adamw", state=f"{program}/initial.pt")[0]["losses"]
    for folder, limit in ((tmp_path / "full", 4000), (tmp_path / "file" / "below", 10**9)):
        (tmp_path / "file").touch()
        why, loss = workers1.run("resumed:refused", program, batch, f"{program}/initial.pt", str(folder), limit)[0]
        assert [loss] == wanted
        assert why.count("\n") == 0
        if limit < 10**9:
            assert f"there is no room for a checkpoint in {folder}" in why
            assert [path.name for path in folder.iterdir()] == ["step-0"]
            assert isinstance(open_or_reason(folder / "step-0"), StoredCheckpoint)
        else:
            assert f"checkpoints cannot be written to {folder}" in why and "Not a directory" in why


def test_a_thread_writes_the_values_of_the_time(workers2: WorkerPool, tmp_path: Path) -> None:
    program = emitted("mlp", KIND["data 2, zero 1"].plan(subject("mlp").graph), tmp_path / "program")
    batches = [batch_of("mlp", step) for step in range(2)]
    saved = tmp_path / "saved"
    for found in workers2.run("resumed:in_background", program, batches, f"{program}/initial.pt", str(saved)):
        assert found["path"] == str(saved / "step-1") and found["begun"] == 1
        assert found["losses"][1] == found["losses"][2] != found["losses"][0]
        assert "there is no room for a checkpoint" in found["why"]
    assert [path.name for path in saved.iterdir()] == ["step-2"]
    assert json.loads((saved / "step-2" / "checkpoint.json").read_text())["data"] == {"rows": [0, 8]}


def test_another_model_or_optimizer_is_named(saved: Path, workers1: WorkerPool, tmp_path: Path) -> None:
    one = KIND["one device"]
    program = emitted("pairs", one.plan(subject("pairs").graph), tmp_path)
    call = (program, batch_of("pairs", 0), f"{program}/initial.pt", str(saved / "steps"))
    why, _ = workers1.run("resumed:refused", *call)[0]
    assert "step-4 is of another model: it has no blocks.0.up.weight, blocks.0.down.weight" in why
    assert "the model has no layers.0.0.weight" in why
    with pytest.raises(LaunchError, match="has the state of AdamW, and the program trains with SGD"):
        workers1.run("resumed:trained", str(saved / "program"), [], "momentum", load=str(saved / "steps"))


def test_another_scheduler_is_named(workers1: WorkerPool, tmp_path: Path) -> None:
    program = emitted("mlp", KIND["one device"].plan(subject("mlp").graph), tmp_path / "program")
    start = {"state": f"{program}/initial.pt"}
    workers1.run("resumed:trained", program, [batch_of("mlp", 0)], "muon", save=str(tmp_path / "saved"), **start)
    call = (program, batch_of("mlp", 0), start["state"], str(tmp_path / "saved"))
    why, _ = workers1.run("resumed:refused", *call, optimizer="muon")[0]
    assert (
        "of a training with SequentialLR(LinearLR, CosineAnnealingLR), and the program's training has no scheduler"
        in why
    )


def test_replicas_that_train_apart_are_not_mixed(workers2: WorkerPool, tmp_path: Path) -> None:
    program = emitted("mlp", KIND["data 2, local steps"].plan(subject("mlp").graph), tmp_path / "program")
    other = emitted("mlp", KIND["tensor 2"].plan(subject("mlp").graph), tmp_path / "other")
    batches = [batch_of("mlp", 0)]
    workers2.run(
        "resumed:trained", program, batches, "adamw", state=f"{program}/initial.pt", save=str(tmp_path / "saved")
    )
    call = (other, batches[0], f"{other}/initial.pt", str(tmp_path / "saved"))
    why = workers2.run("resumed:refused", *call)[0][0]
    assert "has 2 local SGD replicas (sync=local-steps), and the program has none" in why


def refusal_of_unequal_parts(folder: str) -> str:
    """In a worker: why pieces are not regrouped where rank 1 has a state of the first half of its elements only."""
    with program_modules(folder):
        runtime, regrouping = import_runtime(folder), importlib.import_module("runtime.box_exchange")
        program = runtime.load(folder)
        world = runtime.start(program, device="cpu", timeout_s=20)
        trainer = runtime.Trainer(program, world, state=mlp_model().state_dict())
        tensors = list(trainer._tensors().master_values())
        if dist.get_rank() == 1:
            half = tensors[0].values.view(-1)[: tensors[0].values.numel() // 2]
            path = "optimizer", tensors[0].path[1], "momentum"
            tensors.append(regrouping.MasterValues(path, tensors[0].master, half))
        with pytest.raises(regrouping.UnequalStatesError) as refused:
            list(regrouping.regrouped(tensors, program, world))
        return str(refused.value)


def test_every_rank_of_a_zero_group_refuses_parts_with_different_states(workers2: WorkerPool, tmp_path: Path) -> None:
    """Rank 0, whose parts are alike, must not wait for rank 1."""
    program = write_mlp(tmp_path / "program", Shape(data=2, zero=(1, 1)))
    refused = workers2.run("test_checkpoint:refusal_of_unequal_parts", str(program))
    assert len(set(refused)) == 1 and re.fullmatch("parts of .* have different states", refused[0])


def test_what_a_thread_writes_does_not_change_with_the_training() -> None:
    values, copies = torch.zeros(3), list[Piece]()
    checkpoint._copy([Piece(("model", "weight"), (3,), Box((0,), (3,)), values)], copies)
    values += 1
    assert torch.equal(copies[0].values, torch.zeros(3))


def peak_of_writing(folder: str) -> int:
    """In a worker: by how much memory grows while 192 MiB are written: parts of one tensor, whole rows and halves of rows."""
    values = torch.ones(8, 3 * 2**11, 2**10)
    values[:4, :, ::2] = 2
    own = [
        Piece(("model", f"{half}.{i}"), tuple(part.shape), Box((0, 0), tuple(part.shape)), part)
        for i, each in enumerate(values)
        for half, part in enumerate([each] if i < 4 else each.chunk(2, dim=1))
    ]
    return grown_by(lambda: box_files.write(own, Path(folder), 0, "save", {}))


def test_no_copy_of_the_parameters_is_made(workers1: WorkerPool, tmp_path: Path) -> None:
    (grown,) = workers1.run("test_checkpoint:peak_of_writing", str(tmp_path))
    assert sum(file.stat().st_size for file in tmp_path.glob("*.distcp")) > 192 * 2**20
    assert grown < 32 * 2**20
