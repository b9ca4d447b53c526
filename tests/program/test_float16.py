"""float16 with dynamic loss scaling: the scale changes no gradient, an overflow is skipped on all ranks, the rule is GradScaler's."""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import KINDS, MLP, ROWS, Pair
from torch import Tensor, nn
from workers import WorkerPool

import autopar
from autopar.capture import capture, flatten_batch
from autopar.emit import emit
from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.program.scaling import LossScale
from autopar.run.folder import import_runtime, program_modules
from autopar.search.manual import manual_plan
from autopar.shard import annotate
from autopar.verify import PlanKind, kind


def weighted_sum(output: Tensor, weights: Tensor) -> Tensor:
    """A loss whose gradients are the weights: as large as the test wants them."""
    return (output * weights).sum()


@functools.cache
def linear() -> tuple[Graph, dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The graph in float16, the state, a batch whose gradients all fit, and one with a sample whose gradients overflow at a scale of 64."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Pair(16) for _ in range(4)))  # residuals: the gradients of all layers are about as large
    x, weights = torch.randn(ROWS, 8, 16), torch.randn(ROWS, 8, 16)
    graph = annotate(capture(model, (x, weights), weighted_sum, precision="float16", name="mlp"))
    large = weights.clone()
    large[0] = 2000.0
    good, bad = (flatten_batch(graph.structure, (x, w)) for w in (weights, large))  # type: ignore[arg-type]
    return graph, {name: value.detach() for name, value in model.state_dict().items()}, good, bad


def steps(
    folder: str, state: dict[str, Tensor], good: dict[str, Tensor], bad: dict[str, Tensor]
) -> tuple[dict[str, Any], float]:
    """The gradients under two scales; then the parameters after a skipped step, with clipping and without."""
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        world = runtime.start(program)

        def trainer(max_norm: float | None = None) -> Any:
            # a step of SGD is the gradient, and the momentum remembers steps
            made = runtime.Trainer(
                program,
                world,
                optimizer=lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5),
                scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),  # it skips too
                state=state,
                max_norm=max_norm,
            )
            made.loss_scale.load_state_dict(made.loss_scale.state_dict() | {"scale": 64.0, "_growth_tracker": 7})
            return made

        found: dict[str, Any] = {}
        for scale in (32.0, 256.0):
            one = trainer()
            one.loss_scale.load_state_dict(one.loss_scale.state_dict() | {"scale": scale})
            loss = one.forward_backward(good)
            found[f"scale {scale:g}"] = one.gradients() | {"loss": torch.tensor(loss)}
        for max_norm in (None, 1.0):
            skipping, straight = trainer(max_norm), trainer(max_norm)
            lost = skipping.step(bad)
            after = skipping.loss_scale.state_dict()
            unchanged = skipping.state_dict()
            skipping.step(good)
            straight.step(good)
            found[f"clip {max_norm}"] = {
                "loss": lost,
                "after": after,
                "unchanged": unchanged,
                "skipped, then good": skipping.state_dict(),
                "good": straight.state_dict(),
            }
        return found, skipping.loss_scale.scale


PLANS = (
    *(f"data 2, zero {zero}" for zero in (1, 2, 3)),
    "data 2, parameter server",
    "tensor 2",
    "pipeline 2",
    "pipeline 2, zero bubble",
    "pipeline 2, ZBV",
    "pipeline 2, Chimera",
)


@pytest.mark.parametrize(
    "how",
    [
        *(next(each for each in KINDS if each.name == name) for name in PLANS),
        kind("data 2, 4 microbatches", data=2, microbatches=4),
        kind("data 2, local steps", data=2, sync="local-steps:1", allow=("local_steps",)),
    ],
    ids=lambda how: how.name,
)
def test_scales_change_nothing_and_overflows_are_skipped_everywhere(
    how: PlanKind, workers2: WorkerPool, tmp_path: Path
) -> None:
    graph, state, good, bad = linear()
    plan = dataclasses.replace(how.plan(graph), precision="float16")
    emit(graph, plan, tmp_path)
    ranks = workers2.run("test_float16:steps", str(tmp_path), state, good, bad)
    found = ranks[0][0]
    one, other = found["scale 32"], found["scale 256"]
    assert one.keys() == other.keys() and len(one) == len(state) + 1
    assert all(value.abs().max() > 0 and value.dtype != torch.float16 for value in one.values())
    assert all(torch.equal(one[name], other[name]) for name in one)
    for max_norm in (None, 1.0):
        run = found[f"clip {max_norm}"]
        assert torch.isfinite(torch.tensor(run["loss"])), run["loss"]
        assert (run["after"]["scale"], run["after"]["_growth_tracker"]) == (32.0, 0)
        assert all(torch.equal(run["unchanged"][name], state[name]) for name in state)
        assert not all(torch.equal(run["good"][name], state[name]) for name in state)
        assert all(torch.equal(run["skipped, then good"][name], run["good"][name]) for name in state)
    assert {scale for _, scale in ranks} == {32.0}


def test_the_scale_is_grad_scalers() -> None:
    """The same states after every step of the same random events, up to the largest scale that float32 can represent."""
    for start in (65536.0, 2.0**126):
        options = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
        ours = LossScale(torch.device("cpu"), scale=start, **options)
        theirs = torch.amp.GradScaler("cpu", init_scale=start, **options)
        parameter = nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([parameter], lr=0.0)
        chance = random.Random(0)
        scales = set()
        for _ in range(60):
            overflowed = chance.random() < 0.2
            theirs.scale(parameter * 1.0)
            parameter.grad = torch.tensor(float("nan") if overflowed else 1.0)
            theirs.step(optimizer)
            theirs.update()
            ours.update(overflowed)
            assert ours.state_dict() == theirs.state_dict()
            scales.add(ours.scale)
        assert len(scales) > 1
    assert max(scales) == 2.0**127


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_every_kind_of_overflow_is_found(value: float) -> None:
    scale = LossScale(torch.device("cpu"), scale=4.0)
    gradients = [torch.full((3000,), 8.0), torch.empty(0), torch.full((7, 5), -8.0)]
    scale.unscale(gradients)
    assert not scale._overflows and gradients[0].eq(2.0).all() and gradients[2].eq(-2.0).all()
    gradients[2][3, 4] = value
    scale.unscale(gradients)
    assert scale._overflows


def test_a_scale_that_no_gradient_survives_is_an_error() -> None:
    scale = LossScale(torch.device("cpu"), scale=2.0**-126)
    with pytest.raises(RuntimeError, match="at any loss scale"):
        scale.update(overflowed=True)


def test_compile_trains_in_float16(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, y = MLP(), torch.randn(ROWS, 8, 16), torch.randn(ROWS, 8, 8)
    with autopar.compile(
        model, 2, (x, y), nn.functional.mse_loss, precision="float16", data=2, zero=1, lr=1e-2, folder=tmp_path
    ) as program:
        assert program.plan.precision == "float16"
        losses = [program.step((x, y)) for _ in range(8)]
        assert losses[-1] < losses[0] - 0.02
        state = program.scaler_state_dict()
        assert state["scale"] == 65536.0 and state["_growth_tracker"] == 8
        program.load_scaler_state_dict(state | {"scale": 2.0**40})
        program.step((x, y))
        assert program.scaler_state_dict()["scale"] == 2.0**39


def test_float16_inside_of_another_precision_is_refused(tmp_path: Path) -> None:
    """The loss of a program in float32 is not scaled, and a part of its model in float16 would lose gradients."""
    torch.manual_seed(0)
    graph = annotate(
        capture(MLP(), (torch.randn(8, 16), torch.randn(8, 8)), nn.functional.mse_loss, precision="float16")
    )
    with pytest.raises(UsageError, match="would be float16") as error:
        emit(graph, manual_plan(graph, data=2, precision="float32"), tmp_path)
    assert error.value.hint and "precision='float16'" in error.value.hint
    assert not (tmp_path / "model.py").exists()
