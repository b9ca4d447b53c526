"""Chimera: two pipelines in opposite directions are one device's step, under every ZeRO stage; both copies of a stage stay equal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import emitted, is_right
from test_overlap import Blocks
from test_run_pipeline import Skip
from tiers import in_short, slow
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from workers import WorkerPool

from autopar.program.chimera import REDUCE, RankStep, with_transfers
from autopar.run.folder import import_runtime, program_modules
from autopar.schedules import Schedule
from autopar.schedules.memory import pipeline_buffers
from autopar.schedules.orders import device_order
from autopar.search.manual import manual_plan
from autopar.verify.case import check_plan
from autopar.verify.subject import make_subject

PLAN: dict[str, Any] = {"schedule": "chimera", "pipeline": 2}
EVERY_ZERO: list[dict[str, Any]] = [{"data": 2, "zero": zero} for zero in range(4)]
MAX_NORM = 0.01


@pytest.mark.parametrize("recompute", ["none", slow("selective"), "full"])
def test_two_ranks(recompute: str, workers2: WorkerPool, tmp_path: Path) -> None:
    folder, model, batch = emitted(tmp_path, **PLAN, recompute=recompute)
    assert is_right(workers2.run("pipelines:stepped", folder, model.state_dict(), batch), model)


@pytest.mark.parametrize("microbatches", [2, slow(4), 16])
def test_four_ranks(microbatches: int, workers4: WorkerPool, tmp_path: Path) -> None:
    folder, model, batch = emitted(tmp_path, **(PLAN | {"pipeline": 4}), microbatches=microbatches)
    assert is_right(workers4.run("pipelines:stepped", folder, model.state_dict(), batch), model)


@pytest.mark.parametrize(
    "options", [EVERY_ZERO[0], *map(slow, EVERY_ZERO[1:]), {"data": 2, "zero": 3, "reduce": "step"}], ids=str
)
def test_with_data_parallelism(options: dict[str, Any], workers4: WorkerPool, tmp_path: Path) -> None:
    folder, model, batch = emitted(tmp_path, **PLAN, **options)
    assert is_right(workers4.run("pipelines:stepped", folder, model.state_dict(), batch), model)


class Uneven(Blocks):
    """The first block's weight is the last block's, too; the second's is frozen, and nothing reads one parameter of the third."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[-1].up.weight = self.blocks[0].up.weight
        self.blocks[1].up.weight.requires_grad_(False)
        self.blocks[2].unused = nn.Parameter(torch.ones(3))


def trained(folder: str, state: dict[str, Tensor], batch: dict[str, Tensor], max_norm: float) -> dict[str, Any]:
    """In a worker: the losses of three clipped steps, the gradients' norm, the state dict, and this rank's own parameters by stage."""
    with program_modules(folder):
        runtime = import_runtime(folder)
        opened = runtime.load(folder)
        trainer = runtime.Trainer(opened, runtime.start(opened, device="cpu"), state=state, max_norm=max_norm)
        losses = [trainer.step(batch) for _ in range(3)]
        trainer.finish_update()
        own = {
            (stage, name): value.full_tensor() if isinstance(value, DTensor) else value.detach()
            for stage, module in trainer.stages.items()
            for name, value in module.named_parameters()
        }
        saved = trainer.state_dict()
        trainer.forward_backward(batch)
        return {"losses": losses, "norm": trainer.clip_(max_norm), "state": saved, "own": own}


@pytest.mark.parametrize("options", [{"pipeline": 4}, *map(slow, EVERY_ZERO[:2]), *EVERY_ZERO[2:]], ids=str)
def test_both_copies_train_as_one_device(options: dict[str, Any], workers4: WorkerPool, tmp_path: Path) -> None:
    """AdamW, with gradients clipped to their norm: losses, norm and parameters; both copies of every parameter are equal bit by bit."""
    folder, model, batch = emitted(tmp_path, model=Uneven().double(), **(PLAN | options))
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    found = workers4.run("test_chimera:trained", folder, state, batch, MAX_NORM)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-4), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch["x"]), batch["targets"])
        loss.backward()
        losses.append(loss.item())
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()
        if len(losses) < 4:
            optimizer.step()
    assert norm > MAX_NORM
    for rank in found:
        assert rank["losses"] == pytest.approx(losses[:3], rel=1e-12) and rank["norm"] == pytest.approx(norm, rel=1e-12)
    wanted = {name: value for name, value in model.state_dict().items() if name != "blocks.2.unused"}
    torch.testing.assert_close(found[0]["state"], wanted, rtol=1e-9, atol=1e-12)
    stages = {stage for stage, _ in found[0]["own"]} | {stage for stage, _ in found[1]["own"]}
    assert stages == set(range(PLAN["pipeline"] if "data" in options else 4))
    copies: dict[tuple[int, str], list[Tensor]] = {}
    for rank in found:
        for key, value in rank["own"].items():
            copies.setdefault(key, []).append(value)
    for values in copies.values():
        assert len(values) == len(found) * 2 // len(stages) and all(torch.equal(values[0], other) for other in values)


FAULTS = {  # faults that gradients alone do not show: a file of the program, a pattern, the replacement
    "both copies of a parameter count in the norm": (
        "parameters.py",
        "if axis not in spread",
        'if axis not in spread and axis != "mirror"',
    ),
    "one copy of a stage is not updated": (
        "trainer.py",
        "        if not skipped:",
        '        if not skipped and not self.world.coordinates["mirror"][0]:',
    ),
}


@pytest.mark.parametrize("fault", in_short(FAULTS, "one copy of a stage is not updated"))
def test_faults_in_training_are_caught(fault: str, workers4: WorkerPool, tmp_path: Path) -> None:
    folder, model, batch = emitted(tmp_path, FAULTS[fault], **PLAN, data=2, zero=1)
    right, _, _ = emitted(tmp_path / "right", **PLAN, data=2, zero=1)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    found, wanted = (workers4.run("test_chimera:trained", f, state, batch, MAX_NORM)[0] for f in (folder, right))
    assert found["losses"][0] == wanted["losses"][0] and found["losses"][1:] != pytest.approx(wanted["losses"][1:])


def test_values_that_stages_pass_on(workers2: WorkerPool) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64))
    subject = make_subject(Skip(), batch, nn.functional.mse_loss)
    for cut in range(1, len(subject.graph.layers)):
        plan = manual_plan(subject.graph, **PLAN, cuts=(cut,), microbatches=4)
        assert check_plan(subject, plan, workers2).error.exact


def steps_of(schedule: Schedule) -> list[list[RankStep]]:
    orders = [
        [RankStep(kind, stage, i) for kind, stage, i in device_order(schedule, r)] for r in range(schedule.pipeline)
    ]
    return with_transfers(orders, schedule.stages)


@pytest.mark.parametrize("line", [2, 4, 8])
@pytest.mark.parametrize("microbatches", [2, 8, 32])
def test_transfers_are_in_one_order(line: int, microbatches: int) -> None:
    """Every receipt comes before the action that needs it, and any two ranks have their transfers in one order."""
    schedule = Schedule("chimera", line, microbatches)
    ranks = steps_of(schedule)
    for rank, steps in enumerate(ranks):
        received = set()
        for step in steps:
            if step.peer is not None and not step.send:
                received.add((step.kind, step.stage, step.microbatch))
            elif step.peer is None and step.kind != REDUCE and step.stage != {"F": 0, "B": line - 1}[step.kind]:
                assert (step.kind, step.stage, step.microbatch) in received
        for other, theirs in enumerate(ranks):
            mine = [(s.kind, s.stage, s.microbatch, s.send) for s in steps if s.peer == other]
            assert mine == [(s.kind, s.stage, s.microbatch, not s.send) for s in theirs if s.peer == rank]


@pytest.mark.parametrize("line", [2, 4, 6, 8])
@pytest.mark.parametrize("microbatches", [2, 8, 14, 48])
def test_buffers_are_as_many_as_the_price_says(line: int, microbatches: int) -> None:
    """Tensors between stages that a rank keeps: outputs until their backward, what it has received, and gradients until they are sent."""
    schedule = Schedule("chimera", line, microbatches)
    for rank, steps in enumerate(steps_of(schedule)):
        for stage in schedule.stages_of(rank):
            inputs = gradients = outputs = most = 0
            for step in steps:
                here = step.stage == stage and not step.send
                if step.peer is not None:
                    inputs += here and step.kind == "F"
                    gradients += here and step.kind == "B"
                elif here and step.kind == "F":
                    inputs, outputs = inputs - (stage > 0), outputs + (stage < line - 1)
                elif here and step.kind == "B":
                    gradients, outputs = gradients - (stage < line - 1), outputs - (stage < line - 1)
                most = max(most, inputs + gradients + outputs)
            assert most <= pipeline_buffers(schedule)[stage] <= most + 3, (
                schedule,
                rank,
                stage,
                most,
                pipeline_buffers(schedule),
            )


@pytest.mark.parametrize("line", [2, 4, 8])
@pytest.mark.parametrize("microbatches", [2, 8, 32])
def test_kernels_in_the_order_of_their_issue_do_not_block(line: int, microbatches: int) -> None:
    """Transfers and sums over both copies, each rank one after the other in the order of its list: every one meets its partner. A stage's
    sum comes after all of its backward passes."""
    schedule = Schedule("chimera", line, microbatches)
    left = [[s for s in steps if s.peer is not None or s.kind == REDUCE] for steps in steps_of(schedule)]
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(left):
            if steps:
                partner, theirs = line - 1 - rank, steps[0]
                if steps[0].peer is not None:
                    partner, theirs = steps[0].peer, replace(steps[0], peer=rank, send=not steps[0].send)
                if left[partner][:1] == [theirs]:
                    del steps[0], left[partner][0]
                    moved = True
    assert not any(left)
    for steps in steps_of(schedule):
        seen = [(s.kind, s.stage) for s in steps if s.peer is None]
        for stage in {stage for _, stage in seen}:
            assert seen.count(("R", stage)) == 1 and ("B", stage) not in seen[seen.index(("R", stage)) :]


def test_lists_that_wait_for_each_other_are_refused() -> None:
    lists = [
        [RankStep("F", 0, 0), RankStep("B", 0, 0), RankStep("F", 1, 1)],
        [RankStep("F", 1, 0), RankStep("F", 0, 1), RankStep("B", 0, 1)],
    ]
    with pytest.raises(ValueError, match="wait for each other: 0B0, 0B1"):
        with_transfers(lists, 2)
