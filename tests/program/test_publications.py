"""When updated parameters are sent (ZeRO 1, parameter servers): under the next step's forward pass, in one order on every rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_overlap import LAYERS, Blocks, program
from test_reductions import Late
from tiers import in_short
from torch import Tensor, nn
from workers import WorkerPool

from autopar.errors import LaunchError
from autopar.program.spec import layers_of
from autopar.run.folder import import_runtime, program_modules

Fault = tuple[str, str, str]
STEPS = 3


def sgd(params: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def trained(folder: str, state: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Any]:
    """The parameters after some steps, and the order of layers' forward passes and of publications' starts in the last."""
    with program_modules(folder):
        runtime = import_runtime(folder)
        opened = runtime.load(folder)
        trainer = runtime.Trainer(opened, runtime.start(opened, device="cpu"), state=state, optimizer=sgd)
        parameters = sys.modules["runtime.parameters"]
        log: list[str] = []
        start = parameters.FlatGroup.start_publication

        def started(group: Any) -> None:
            log.append(f"send {group.placement.layer}")
            start(group)

        for stage in trainer.stages.values():
            for name, layer in layers_of(stage).items():
                if list(layer.parameters()):
                    layer.register_forward_hook(lambda *_, name=name: log.append(f"forward {name}"))

        def broadcast(tensor: Tensor, group: Any, group_src: int, async_op: bool) -> Late:
            return Late(lambda out, *_, group: sent(out, group=group, group_src=group_src), tensor, group=group)

        sent, gather = dist.broadcast, parameters.all_gather
        with (
            mock.patch.object(parameters.FlatGroup, "start_publication", started),
            mock.patch.object(parameters, "all_gather", lambda *x, group, async_op: Late(gather, *x, group=group)),
            mock.patch.object(dist, "broadcast", broadcast),
        ):
            for _ in range(STEPS):
                log.clear()
                trainer.step(batch)
            return {"order": log, "state": trainer.state_dict()}


def eager(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    optimizer = sgd(list(model.parameters()))
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def errors(pool: WorkerPool, folder: Path, how: dict[str, Any], *faults: Fault) -> tuple[list[list[str]], float]:
    """Each rank's order, and the largest difference from training on one device."""
    torch.manual_seed(0)
    model = Blocks().double()
    x, y = torch.randn(2, 8, 16, dtype=torch.float64)
    path = program(folder, faults=faults, model=model, batch=(x, y), data=2, microbatches=2, **how)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    found = pool.run("test_publications:trained", path, state, {"x": x, "targets": y})
    wanted = eager(model, (x, y))
    return [rank["order"] for rank in found], max(
        float((found[0]["state"][name] - value).abs().max()) for name, value in wanted.items()
    )


HOW: dict[str, dict[str, Any]] = {"zero 1": {"zero": 1}, "parameter server": {"sync": "parameter-server"}}


@pytest.mark.parametrize("how", HOW)
def test_parameters_arrive_under_the_forward(how: str, workers2: WorkerPool, tmp_path: Path) -> None:
    orders, error = errors(workers2, tmp_path, HOW[how])
    assert error <= 1e-14
    send, forward = ([f"{word} blocks.{i}" for i in range(LAYERS)] for word in ("send", "forward"))
    # the first two were started after the update of the step before
    first = [line for i in range(LAYERS) for line in (*send[i + 2 : i + 3], forward[i])]
    assert orders[0] == orders[1] == [*first, *forward, *send[:2], *send[2:]]


FAULTS: dict[str, Fault] = {
    "a layer does not wait": ("reductions.py", r"lambda \*_, place=place: self\._await\(place\)", "lambda *_: None"),
    "a layer waits for the layer before": ("reductions.py", r"self\._await\(place\)\)", "self._await(place - 1))"),
    "the gather is not waited for": ("parameters.py", r"self\._sending\.wait\(\)", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("name", in_short(FAULTS, "a layer does not wait"))
def test_a_fault_is_caught(name: str, workers2: WorkerPool, tmp_path: Path) -> None:
    try:
        _, error = errors(workers2, tmp_path, HOW["zero 1"], FAULTS[name])
    except LaunchError as refused:
        assert "has been modified by an inplace operation" in refused.message + (refused.hint or "")  # noqa: PT017
        return
    assert error > 1e-6
