"""Gradients that are applied late: several steps of training against a simulation of the same rule on one device."""

from __future__ import annotations

import functools
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from test_sync import MAX_NORM, OPTIMIZERS, Batch, batches, loss_of, planned, program, tied
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import capture
from autopar.emit import emit
from autopar.errors import UsageError
from autopar.run.folder import import_runtime, program_modules
from autopar.search.manual import manual_plan
from autopar.shard import annotate
from autopar.summary import describe
from autopar.techniques import SYNC
from autopar.verify import verify

STEPS = 6
ALLOW = {"allow": {"stale_gradients"}}
PIPELINE = {"pipeline": 2, "data": 2, "microbatches": 2}
HOST = {"states": "host"}
Gradients = list[Tensor | None]


def stale(late: int, **options: Any) -> dict[str, Any]:
    return ALLOW | {"sync": f"stale:{late}"} | options


def trained(
    folder: str,
    state: dict[str, Tensor],
    optimizer: str,
    steps: list[Batch],
    pause: tuple[str, int] | None = None,
    on_nan: str = "",
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses, and the state dict after the steps. With ``pause`` a checkpoint is written into that folder after so many steps, and
    another trainer goes on from it."""
    with program_modules(folder):
        runtime = import_runtime(folder)
        opened = runtime.load(folder)
        world = runtime.start(opened, device="cpu")
        make = functools.partial(runtime.Trainer, opened, world, optimizer=OPTIMIZERS[optimizer], max_norm=MAX_NORM)
        trainer = make(state=state)
        losses = []
        for i, batch in enumerate(steps):
            if pause is not None and i == pause[1]:
                trainer.save(pause[0], wait=bool(i % 2))
                trainer.finish_saving()
                trainer = make(resume=pause[0])
            if i == 2:
                trainer.forward_backward(steps[0])  # gradients that no update follows
            losses.append(trainer.step(batch, on_nan))
        return losses, trainer.state_dict()


def resumed(folder: str, saved: str, optimizer: str, steps: list[Batch]) -> list[float]:
    """The losses of steps after a checkpoint."""
    with program_modules(folder):
        runtime = import_runtime(folder)
        opened = runtime.load(folder)
        world = runtime.start(opened, device="cpu")
        trainer = runtime.Trainer(opened, world, optimizer=OPTIMIZERS[optimizer], max_norm=MAX_NORM, resume=saved)
        return [trainer.step(batch) for batch in steps]


def simulated(
    model: nn.Module, late: int, optimizer: str, steps: list[Batch], loss_of: Any = loss_of
) -> tuple[list[float], dict[str, Tensor]]:
    """The rule on one device: the update of step t uses the clipped gradients of step t - ``late``; zeros where there are none. A step
    whose loss is not finite updates nothing, and its gradients are forgotten."""
    updates = OPTIMIZERS[optimizer](list(model.parameters()))
    waiting: deque[Gradients | None] = deque([None] * late)
    losses = []
    for batch in steps:
        updates.zero_grad()
        x, y = batch.values()
        loss = loss_of(model(x), y)
        loss.backward()
        own: Gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        finite = bool(loss.isfinite())
        waiting.append(own if finite else None)
        due = waiting.popleft()
        losses.append(loss.item())
        if not finite:
            continue
        for i, parameter in enumerate(model.parameters()):
            fresh = own[i]
            old = None if due is None else due[i]
            parameter.grad = old if old is not None or fresh is None else torch.zeros_like(fresh)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        updates.step()
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def steps_of(count: int = STEPS) -> list[Batch]:
    return [{"ids": ids, "targets": targets} for ids, targets in batches(count)]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def far(found: tuple[list[float], dict[str, Tensor]], wanted: tuple[list[float], dict[str, Tensor]]) -> float:
    """The largest difference of losses and values, relative to the largest one of each."""
    losses = torch.tensor(found[0]), torch.tensor(wanted[0])
    pairs = [losses] + [(value, wanted[1][name]) for name, value in found[1].items()]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


CASES = {
    "1 late": (2, "adamw", stale(1, data=2)),
    "2 late, sgd": (2, "sgd", stale(2, data=2, microbatches=2)),
    "1 late, states in the host": (2, "adamw", stale(1, data=2, **HOST)),
    "3 late, 4 replicas": (4, "adamw", stale(3, data=4)),
    "1 late, pipeline": (4, "adamw", stale(1, **PIPELINE)),
    "2 late, tensor": (4, "sgd", stale(2, data=2, tensor=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_the_rule_says(name: str, workers2: WorkerPool, workers4: WorkerPool, tmp_path: Path) -> None:
    """The table is tied; a pipeline has it in two stages. Neither the losses nor the values are those of exact training."""
    devices, optimizer, options = CASES[name]
    late = int(options["sync"].partition(":")[2])
    folder, state = program(tmp_path / "program", **options), state_of(tied())
    pool = workers2 if devices == 2 else workers4
    found = pool.run("test_late_gradients:trained", folder, state, optimizer, steps_of())[0]
    assert far(found, simulated(tied(), late, optimizer, steps_of())) < 1e-9
    for other in {0, late - 1, late + 1}:
        assert far(found, simulated(tied(), other, optimizer, steps_of())) > 1e-6


@pytest.mark.parametrize(
    ("pause", "options"), [(3, stale(2, data=2)), (2, stale(2, data=2, **HOST)), (1, stale(2, data=2))]
)
def test_a_checkpoint_has_the_gradients_that_wait(
    pause: int, options: dict[str, Any], workers2: WorkerPool, tmp_path: Path
) -> None:
    folder, state = program(tmp_path / "program", **options), state_of(tied())
    whole = workers2.run("test_late_gradients:trained", folder, state, "adamw", steps_of())[0]
    halves = workers2.run(
        "test_late_gradients:trained", folder, state, "adamw", steps_of(), (str(tmp_path / "saved"), pause)
    )[0]
    assert halves[0] == whole[0] and all(torch.equal(halves[1][name], value) for name, value in whole[1].items())
    assert far(whole, simulated(tied(), 2, "adamw", steps_of())) < 1e-9


def test_a_checkpoint_loads_under_a_plan_without_late_gradients(workers2: WorkerPool, tmp_path: Path) -> None:
    """The gradients that wait are not used there."""
    folder, after = program(tmp_path / "late", **stale(2, data=2)), program(tmp_path / "exact", data=2)
    state, saved = state_of(tied()), str(tmp_path / "saved")
    workers2.run("test_late_gradients:trained", folder, state, "adamw", steps_of()[:4], (saved, 3))
    losses = workers2.run("test_late_gradients:resumed", after, saved, "adamw", steps_of()[3:])[0]
    late = simulated(tied(), 2, "adamw", steps_of())[0]
    assert losses[0] == pytest.approx(late[3], rel=1e-9) and losses[1] != pytest.approx(late[4], rel=1e-6)


def test_gradients_of_a_loss_that_is_not_finite_are_never_applied(workers2: WorkerPool, tmp_path: Path) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    generator = torch.Generator().manual_seed(3)
    steps = [
        {"input": torch.randn(8, 4, generator=generator).double(), "y": torch.randn(8, 4, generator=generator).double()}
        for _ in range(5)
    ]
    steps[1]["y"][0, 0] = torch.nan
    graph = annotate(capture(made(), tuple(steps[0].values()), nn.functional.mse_loss))
    names = [value.name for value in graph.inputs]
    emit(graph, manual_plan(graph, **stale(1, data=2)), tmp_path)
    given = [dict(zip(names, step.values(), strict=True)) for step in steps]
    found = workers2.run("test_late_gradients:trained", str(tmp_path), state_of(made()), "sgd", given, None, "skip")[0]
    wanted = simulated(made(), 1, "sgd", steps, nn.functional.mse_loss)
    assert (
        far(([found[0][i] for i in (0, 2, 3, 4)], found[1]), ([wanted[0][i] for i in (0, 2, 3, 4)], wanted[1])) < 1e-9
    )


def test_the_plan_says_what_it_is() -> None:
    plan = planned(tied(), **stale(2, data=2))[1]
    assert plan.sync == "stale:2" and plan.allow == ("stale_gradients",)
    assert "gradients 2 steps old" in describe(plan)
    assert "uses the gradients of 2 steps before" in SYNC.note((), 0, plan.sync)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"data": 2, "sync": "stale:1"}, "sync=stale:1 is not exact"),
        (stale(1, data=2, zero=1), "needs unsharded parameters"),
        (stale(1, data=2, pipeline=2, microbatches=2, schedule="chimera"), "cannot be combined with schedule=chimera"),
        (stale(1, data=2, precision="float16"), "is rescaled every step"),
        (ALLOW | {"data": 2, "sync": "stale"}, "must be one of"),
    ],
    ids=["not allowed", "zero", "chimera", "float16", "no number"],
)
def test_refusals(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        planned(tied(torch.float16 if "precision" in options else torch.float64), **options)


def test_verify_compares_the_first_step() -> None:
    found = verify(tied(), batches(1)[0], loss_of, plan=planned(tied(), **stale(2, data=2))[1])
    assert found.agrees and not found.exact and "2 updates late" in found.reference
