"""The runtime against one process, on a program written by hand: float64 loss, gradients, updates, state dicts."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs import Shape, mlp_batch, mlp_model, write_mlp
from tiers import short, slow
from torch import Tensor, nn
from workers import WorkerPool

from autopar.program import parameters, world
from autopar.run.folder import import_runtime, program_modules


def adamw(params: list[Any], lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, weight_decay=0.1)


def gradients(folder: str, state: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Any]:
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        trainer = runtime.Trainer(program, runtime.start(program), state=state)
        found = []
        for _ in range(2):  # the first step is special to FSDP2 and to the schedules, and must leave nothing over
            loss = trainer.forward_backward(batch)
            found.append({"loss": loss, "gradients": trainer.gradients()})
        return {"steps": found, "state": trainer.state_dict()}


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest deviation, relative to each gradient's largest element or to a millionth of the largest of all."""
    assert set(found) == set(wanted)
    floor = 1e-6 * max(float(grad.abs().max()) for grad in wanted.values())
    return max(float((found[n] - wanted[n]).abs().max()) / max(float(wanted[n].abs().max()), floor) for n in wanted)


def reference(batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    model = mlp_model()
    loss = model(**batch)
    loss.backward()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, state


def check_exact(pool: WorkerPool, folder: Path, shape: Shape) -> None:
    batch = mlp_batch()
    loss, grads, state = reference(batch)
    results = pool.run("test_run_runtime:gradients", str(write_mlp(folder, shape)), state, batch)
    for result in results:
        for step in result["steps"]:
            assert abs(step["loss"] - loss) <= 1e-12 * abs(loss)
            assert error(step["gradients"], grads) <= 1e-12 if result is results[0] else not step["gradients"]
    assert all(not result["state"] for result in results[1:])
    assert set(results[0]["state"]) == set(state)
    assert all(torch.equal(results[0]["state"][name], state[name]) for name in state)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(data=2, zero=(0, 0)),
        Shape(data=2, zero=(1, 1), microbatches=2),
        Shape(data=2, zero=(2, 2), microbatches=4),
        Shape(data=2, zero=(3, 3), microbatches=2),
        Shape(data=2, zero=(1, 3), microbatches=2),
        Shape(tensor=2),
        Shape(tensor=2, zero=(3, 2), microbatches=4),
        Shape(pipeline=2),
        Shape(pipeline=2, microbatches=4),
        Shape(pipeline=2, microbatches=4, schedule="1f1b"),
    ],
    ids=str,
)
def test_two_processes_equal_one(workers2: WorkerPool, tmp_path: Path, shape: Shape) -> None:
    check_exact(workers2, tmp_path, shape)


FOUR = [
    *(Shape(data=2, tensor=2, zero=(z, z), microbatches=2) for z in range(4)),
    *(Shape(data=2, tensor=2, zero=(z, 3 - z), microbatches=m) for z, m in ((0, 4), (1, 1), (2, 4), (3, 1))),
    *(Shape(pipeline=2, tensor=2, microbatches=m, schedule=s) for m, s in ((1, "gpipe"), (2, "1f1b"), (4, "1f1b"))),
    *(Shape(pipeline=2, data=2, zero=(z, z), microbatches=4, schedule=s) for z in range(4) for s in ("gpipe", "1f1b")),
    *(Shape(pipeline=2, data=2, zero=zero, microbatches=2, schedule="1f1b") for zero in ((0, 3), (2, 1), (3, 0))),
    Shape(pipeline=2, data=2, zero=(1, 2)),
]


def features(shape: Shape) -> set[Any]:
    """Axes, schedule, microbatches, and the ZeRO stage of both halves of the layers."""
    axes = {name for name in ("pipeline", "data", "tensor") if getattr(shape, name) > 1}
    return axes | {shape.schedule, ("first", shape.zero[0]), ("second", shape.zero[1]), shape.microbatches > 1}


@pytest.mark.parametrize("shape", short(FOUR, features), ids=str)
def test_four_processes_equal_one(workers4: WorkerPool, tmp_path: Path, shape: Shape) -> None:
    check_exact(workers4, tmp_path, shape)


def train(
    folder: str, state: dict[str, Tensor], batches: list[dict[str, Tensor]], max_norm: float | None, lr: float = 1e-2
) -> dict[str, Any]:
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        world = runtime.start(program)
        make = functools.partial(adamw, lr=lr)
        trainer = runtime.Trainer(program, world, optimizer=make, state=state, max_norm=max_norm)
        losses = [trainer.step(batch) for batch in batches]
        trained = trainer.state_dict()
        trainer.forward_backward(batches[0])
        grads = trainer.gradients()
        norm = trainer.clip_(0.25)
        return {"losses": losses, "state": trained, "gradients": grads, "norm": norm, "clipped": trainer.gradients()}


ONE_OF_EACH_ZERO = [
    *(Shape(data=2, tensor=2, zero=(z, z), microbatches=2) for z in range(4)),
    Shape(pipeline=2, data=2, zero=(1, 3), microbatches=4, schedule="1f1b"),
    Shape(pipeline=2, tensor=2, microbatches=2, schedule="1f1b"),
]


@pytest.mark.parametrize("shape", [slow(ONE_OF_EACH_ZERO[0]), *ONE_OF_EACH_ZERO[1:]], ids=str)
def test_clipped_adamw_equals_one_process(workers4: WorkerPool, tmp_path: Path, shape: Shape) -> None:
    batches = [mlp_batch(seed) for seed in range(3)]
    model = mlp_model()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    optimizer, losses = adamw(list(model.parameters())), []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    optimizer.zero_grad()
    model(**batches[0]).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    assert norm > 0.25

    results = workers4.run("test_run_runtime:train", str(write_mlp(tmp_path, shape)), state, batches, 0.5)
    for result in results:
        assert result["losses"] == pytest.approx(losses, rel=1e-10)
        assert result["norm"] == pytest.approx(norm.item(), rel=1e-10)
    wanted = model.state_dict()
    assert all((results[0]["state"][name] - wanted[name]).abs().max() <= 1e-10 for name in wanted)
    clipped = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert error(results[0]["clipped"], clipped) <= 1e-10


def resume(folder: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        trainer = runtime.Trainer(program, runtime.start(program), seed=5)
        first = trainer.state_dict()
        trainer.load_state_dict(state)
        return {"first": first, "loaded": trainer.state_dict()}


def test_state_dicts_and_seeds_do_not_depend_on_the_plan(workers2: WorkerPool, tmp_path: Path) -> None:
    state = {name: value.detach() for name, value in mlp_model().state_dict().items()}
    firsts = []
    for shape in (Shape(data=2, zero=(1, 3)), Shape(tensor=2), Shape(pipeline=2)):
        folder = write_mlp(tmp_path / str(shape.data + 2 * shape.tensor), shape)
        result = workers2.run("test_run_runtime:resume", str(folder), state)[0]
        assert all(torch.equal(result["loaded"][name], state[name]) for name in state)
        firsts.append(result["first"])
    for first in firsts:
        assert all(torch.equal(first[name], firsts[0][name]) for name in state)
        assert torch.equal(first["embed.weight"], first["head.weight"])
        assert torch.equal(first["layers.1.norm.weight"], torch.ones(6, dtype=torch.float64))
    assert float(firsts[0]["layers.0.gate_up.weight"].std()) == pytest.approx(0.02, rel=0.2)


def test_bfloat16_keeps_masters_and_gradients_in_float32(workers2: WorkerPool, tmp_path: Path) -> None:
    model = mlp_model().float()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model(**mlp_batch()).backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for zero in range(4):
        shape = Shape(data=2, zero=(zero, zero), microbatches=2, precision="bfloat16")
        folder = write_mlp(tmp_path / str(zero), shape)
        result = workers2.run("test_run_runtime:train", str(folder), state, [mlp_batch()] * 3, None, lr=1e-5)[0]
        moved = {name: value - state[name] for name, value in result["state"].items()}
        assert all(value.dtype == torch.float32 for value in moved.values())
        # each of three steps of AdamW moves by about lr, far less than bfloat16 could hold
        median = torch.cat([value.abs().flatten() for value in moved.values()]).median()
        assert float(median) == pytest.approx(3e-5, rel=0.1)
        assert error(result["gradients"], wanted) < 0.05


def test_what_is_wrong_with_a_program_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_mlp(tmp_path, Shape(tensor=2))
    layouts = json.loads((folder / "layouts.json").read_text())
    layouts["parameters"][0]["types"]["tensor"] = "S(1)"
    (folder / "layouts.json").write_text(json.dumps(layouts))
    with program_modules(folder):
        program = world.load(folder)
        monkeypatch.setenv("WORLD_SIZE", "3")
        with pytest.raises(
            world.StartError, match=r"2 devices \(pipeline 1 x data 1 x tensor 2\) and was started with 3 proc"
        ):
            world.start(program)
        here = SimpleNamespace(
            device=torch.device("cpu"), stages=(0,), pipeline=1, coordinates={"data": (0, 1), "tensor": (0, 2)}
        )
        with pytest.raises(ValueError, match=r"table has local shape \(11, 6\) in model.py and \(11, 3\) by layouts"):
            parameters.build_stages(program, here)  # type: ignore[arg-type]
        with pytest.raises(FileNotFoundError, match="is not a program folder: it has no plan.json"):
            world.load(tmp_path / "nowhere")


def test_what_is_wrong_with_a_batch_is_said(workers2: WorkerPool, tmp_path: Path) -> None:
    folder = write_mlp(tmp_path, Shape(data=2))
    small = {name: tensor[:6] for name, tensor in mlp_batch().items()}
    narrow = mlp_batch() | {"input_ids": mlp_batch()["input_ids"][:, :2]}
    found = workers2.run("test_run_runtime:refusals", str(folder), [small, {"labels": small["labels"]}, narrow])
    assert found[0] == found[1]
    assert "'input_ids' has shape (6, 3), the plan's global batch is 8" in found[0][0]
    assert "the batch has no 'input_ids'; it has labels" in found[0][1]
    assert "'input_ids' has shape (8, 2), the program takes (8, 3)" in found[0][2]


def refusals(folder: str, batches: list[dict[str, Tensor]]) -> list[str]:
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        trainer = runtime.Trainer(program, runtime.start(program))
        said = []
        for batch in batches:
            with pytest.raises(ValueError) as error:  # noqa: PT011
                trainer.step(batch)
            said.append(str(error.value))
        return said


def test_parameters_without_replicas_have_no_second_copy(workers2: WorkerPool, tmp_path: Path) -> None:
    """Neither a parameter nor its gradient is copied where one rank alone computes the gradient."""
    names = sorted(dict(mlp_model().named_parameters()))
    run = "test_run_runtime:without_copies"
    first, last = workers2.run(run, str(write_mlp(tmp_path / "stages", Shape(pipeline=2))), mlp_batch())
    assert sorted({*first, *last}) == [name for name in names if name != "embed.weight"]  # it is in both stages
    assert workers2.run(run, str(write_mlp(tmp_path / "data", Shape(data=2))), mlp_batch()) == [[], []]


def without_copies(folder: str, batch: dict[str, Tensor]) -> list[str]:
    """The parameters that the optimizer updates in the stage itself, by the gradient that autograd accumulated."""
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        trainer = runtime.Trainer(program, runtime.start(program))
        trainer.forward_backward(batch)
        gradients = {id(param.grad): param for stage in trainer.stages.values() for param in stage.parameters()}
        masters = [master for group in trainer._groups for master in group.masters]
        return [m.layout.original for m in masters if gradients.get(id(m.tensor.grad)) is m.tensor]
