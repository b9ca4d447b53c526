"""When flat groups (ZeRO 0 and 1) reduce their gradients: under the last microbatch's backward pass, in one order on every rank."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from custom_ops import Gated
from opaque_modules import Branching, Model
from places import file_of
from programs import Shape, mlp_batch, mlp_model, write_mlp
from test_overlap import LAYERS, Blocks, program
from tiers import in_short
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import capture
from autopar.emit import model_source
from autopar.errors import LaunchError
from autopar.program.parameters import norm_of
from autopar.program.spec import layers_of
from autopar.run.folder import import_runtime, program_modules
from autopar.search.manual import make_mesh, manual_plan
from autopar.shard import annotate, plan_shardings
from passes.stages import cut_stages

MICROBATCHES = 3
Fault = tuple[str, str, str]


class Late:
    """A collective that reads its input when it is started, and gives no result before it is waited for."""

    def __init__(self, collective: Callable[..., Any], out: Tensor, *source: Tensor, group: Any) -> None:
        self.collective, self.out, self.group = collective, out, group
        self.source = [tensor.clone() for tensor in (source or (out,))]

    def wait(self) -> None:
        if self.collective is all_reduce:
            self.collective(*self.source, group=self.group)
            self.out.copy_(*self.source)
        else:
            self.collective(self.out, *self.source, group=self.group)


all_reduce = dist.all_reduce


def _late(collective: Callable[..., Any]) -> Callable[..., Any]:
    def call(*tensors: Tensor, group: Any = None, async_op: bool = False, **other: Any) -> Any:
        if async_op:
            return Late(collective, *tensors, group=group)
        return collective(*tensors, group=group, **other)

    return call


def recorded(folder: str, state: dict[str, Tensor], batch: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Two steps: the loss, the gradients, and the order of layers' backward passes and of reductions' starts."""
    with program_modules(folder), mock.patch.object(dist, "all_reduce", _late(all_reduce)):
        runtime = import_runtime(folder)
        parameters = sys.modules["runtime.parameters"]
        opened = runtime.load(folder)
        trainer = runtime.Trainer(opened, runtime.start(opened, device="cpu"), state=state)
        log: list[str] = []
        start = parameters.FlatGroup.start_reduction

        def started(group: Any) -> None:
            log.append(f"reduce {group.placement.layer}")
            start(group)

        def follow(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, out: Tensor) -> None:
                out.register_hook(lambda _: log.append(f"backward {name}"))

            return hook

        for stage in trainer.stages.values():
            for name, layer in layers_of(stage).items():
                if list(layer.parameters()):
                    layer.register_forward_hook(follow(name))
        steps = []
        with (
            mock.patch.object(parameters.FlatGroup, "start_reduction", started),
            mock.patch.object(parameters, "reduce_scatter", _late(parameters.reduce_scatter)),
        ):
            for _ in range(2):
                log.clear()
                loss = trainer.forward_backward(batch)
                steps.append({"loss": loss, "order": list(log), "gradients": trainer.gradients()})
        return steps


def blocks(folder: Path, zero: int, *faults: Fault) -> tuple[str, nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Blocks().double()
    x, y = torch.randn(2, 12, 16, dtype=torch.float64)
    batch = x, y
    path = program(folder, faults=faults, model=model, batch=batch, data=2, zero=zero, microbatches=MICROBATCHES)
    inputs = {"x": batch[0], "targets": batch[1]}
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    return path, model, inputs


def is_right(found: list[list[dict[str, Any]]], model: nn.Module) -> bool:
    wanted = {name: p.grad for name, p in model.named_parameters()}
    for rank, steps in enumerate(found):
        for step in steps:
            backward = [f"backward blocks.{i}" for i in reversed(range(LAYERS))]
            last = [line for i in reversed(range(LAYERS)) for line in (f"backward blocks.{i}", f"reduce blocks.{i}")]
            if step["order"] != backward * (MICROBATCHES - 1) + last:
                return False
            if rank == 0 and any((step["gradients"][n] - g).abs().max() > 1e-12 for n, g in wanted.items()):
                return False
    return True


@pytest.mark.parametrize("zero", [0, 1])
def test_reductions_start_under_the_last_backward(zero: int, workers2: WorkerPool, tmp_path: Path) -> None:
    path, model, batch = blocks(tmp_path, zero)
    found = workers2.run("test_reductions:recorded", path, dict(model.state_dict()), batch)
    assert is_right(found, model)


def in_flight(folder: str, state: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Any]:
    """Of a step: for every reduction's start the number of those that run, how many of its bytes the reductions keep at the same time, and
    the streams on which second halves start."""
    with program_modules(folder):
        runtime = import_runtime(folder)
        parameters, streams = sys.modules["runtime.parameters"], [""]
        opened = runtime.load(folder)
        trainer = runtime.Trainer(opened, runtime.start(opened, device="cpu"), state=state)
        running: list[Any] = []
        found: dict[str, Any] = {"running": [], "kept": [], "second": [], "limit": 0}
        group_class = parameters.FlatGroup
        start, second, finish = (
            group_class.start_reduction,
            group_class.continue_reduction,
            group_class.finish_reduction,
        )

        def started(group: Any) -> None:
            running.append(group)
            found["running"].append(len(running))
            found["kept"].append(sum(other.reduction_bytes for other in running))
            start(group)

        def continued(group: Any) -> None:
            if group._copies is not None and group._work is not None and not group._over_copies:
                found["second"].append(streams[-1])
            second(group)

        def finished(group: Any) -> None:
            running.remove(group)
            finish(group)

        @contextlib.contextmanager
        def on(stream: Any) -> Iterator[None]:
            streams.append("another")
            yield
            streams.pop()

        trainer._reductions._on_stream = on
        with (
            mock.patch.object(group_class, "start_reduction", started),
            mock.patch.object(group_class, "continue_reduction", continued),
            mock.patch.object(group_class, "finish_reduction", finished),
        ):
            trainer.forward_backward(batch)
        groups = [group for own in trainer._by_stage.values() for group in own if isinstance(group, group_class)]
        return found | {"groups": len(groups), "bytes": max(group.reduction_bytes for group in groups)}


def test_reductions_that_keep_nothing_all_run(workers2: WorkerPool, tmp_path: Path) -> None:
    """ZeRO 0 sums in place: no reduction waits for an earlier one. Those of ZeRO 1 have results, of two layers at a time."""
    for zero in (0, 1):
        path, model, batch = blocks(tmp_path / str(zero), zero)
        for found in workers2.run("test_reductions:in_flight", path, dict(model.state_dict()), batch):
            assert len(found["running"]) == found["groups"] == LAYERS
            if zero == 0:
                assert found["running"] == list(range(1, LAYERS + 1)) and not found["bytes"]
            else:
                assert max(found["running"]) == 2 and max(found["kept"]) == 2 * found["bytes"] > 0


def test_the_backward_pass_does_not_wait_between_the_halves_of_a_reduction(
    workers4: WorkerPool, tmp_path: Path
) -> None:
    """Hybrid sharding: the sum over the copies takes the result of the one inside of a copy, for which another stream waits."""
    torch.manual_seed(0)
    model = Blocks().double()
    x, y = torch.randn(2, 16, 16, dtype=torch.float64)
    mesh = make_mesh(("replicas", 2), ("data", 2))
    path = program(tmp_path, model=model, batch=(x, y), mesh=mesh, zero=1, replicate=2, microbatches=2)
    batch = {"x": x, "targets": y}
    for found in workers4.run("test_reductions:in_flight", path, dict(model.state_dict()), batch):
        assert found["second"] == ["another"] * found["groups"]


FAULTS: dict[str, Fault] = {
    "the result is not waited for": ("parameters.py", r"(?s)(Wait for the sums; .*?)self\._work\.wait\(\)", r"\1pass"),
    "the first microbatch starts it": ("parameters.py", r' \* program\.passes', ""),
    "all start again after the schedule": ("reductions.py", r"self\._early\[self\._started :\]", "self._early"),
    "the next step goes on counting groups": ("reductions.py", r"(last\.begin_step\(\)\n)        self\._started = 0", r"\1"),
    "the next step goes on counting gradients": ("parameters.py", r"self\.gradient_counter\.reset\(\)", "pass"),
    "none starts before the schedule's end": ("reductions.py", r"complete = weakref\.WeakMethod\(.*\)", "complete = None"),
    "the first layer is the first in order": ("reductions.py", r"in reversed\(list\(layers\)\)", "in layers"),
    "the piece is not copied": ("parameters.py", r"self\._grads\[self\._piece\]\.copy_\(self\._sum\)", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("name", in_short(FAULTS, "the result is not waited for"))
def test_a_fault_is_caught(name: str, workers2: WorkerPool, tmp_path: Path) -> None:
    path, model, batch = blocks(tmp_path, 1, FAULTS[name])
    try:
        found = workers2.run("test_reductions:recorded", path, dict(model.state_dict()), batch)
    except LaunchError as error:
        assert "after the reduction of its group had started" in error.message + (error.hint or "")  # noqa: PT017
        return
    assert not is_right(found, model)


# -- gradients that some ranks lack -----------------------------------------------------------------------------------

ONE_RANK = (
    r"\(x \+ self\.down\.bias\)",
    "(x + self.down.bias if self.replicated_norm or torch.distributed.get_rank() == 0 else x)",
)
OPAQUE = (r"(class First\(Layer\):\n    SPEC = LayerSpec\()", r"\1opaque=True, ")
LATE = (r"for group in self\._early:\n", "for group in []:\n")


def differing(folder: Path, zero: tuple[int, int], *, opaque: bool, late: bool = False) -> str:
    """A program in which layer_0's bias gets a gradient on rank 0 alone."""
    write_mlp(folder, Shape(data=2, zero=zero, microbatches=2))
    changes = [("model.py", ONE_RANK), *([("model.py", OPAQUE)] if opaque else [])]
    for name, (pattern, replacement) in [*changes, *([("reductions.py", LATE)] if late else [])]:
        text, count = re.subn(pattern, replacement, file_of(folder, name).read_text())
        assert count, pattern
        file_of(folder, name).write_text(text)
    return str(folder)


@pytest.mark.parametrize(
    ("zero", "opaque"), [((0, 0), False), ((1, 1), False), ((0, 3), True), ((1, 2), True), ((3, 3), True)], ids=str
)
def test_a_gradient_that_one_rank_lacks(
    zero: tuple[int, int], opaque: bool, workers2: WorkerPool, tmp_path: Path
) -> None:
    """Among flat groups alone their order suffices; beside FSDP's collectives ``model.py`` has to say it."""
    state = {name: value.detach() for name, value in mlp_model().state_dict().items()}
    folder = differing(tmp_path / "late", (0, 0), opaque=False, late=True)
    wanted = workers2.run("test_run_runtime:gradients", folder, state, mlp_batch())[0]
    folder = differing(tmp_path / "given", zero, opaque=opaque)
    found = workers2.run("test_run_runtime:gradients", folder, state, mlp_batch())[0]
    for one, other in zip(found["steps"], wanted["steps"], strict=True):
        for name, gradient in other["gradients"].items():
            assert (one["gradients"][name] - gradient).abs().max() <= 1e-14, name


def source(model: nn.Module, *batch: Tensor, loss: Any = None, **options: Any) -> str:
    graph = annotate(capture(model, batch, loss))
    plan = manual_plan(graph, **options)
    return model_source(cut_stages(graph, plan, plan_shardings(graph, plan)))


def test_the_model_says_what_the_runtime_must_know() -> None:
    x = torch.randn(8, 8, dtype=torch.float64)
    text = source(Model(Branching(8, {"both": (2.0, 0.5)})).double(), x, x[:, :4], data=2)
    assert len(re.findall(r"zero=0.*opaque=True", text)) == 1
    assert "opaque=True" in source(Gated().double(), *torch.randn(2, 8, 16, dtype=torch.float64), data=2)
    model = Blocks()
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    text = source(model, torch.randn(8, 16), torch.randn(8, 16), loss=nn.functional.mse_loss, data=2, zero=3, segment=2)
    loops = re.findall(r"for i in range\((?:(\d), )?(\d)\):\n +self\.blocks\[str\(i\)\] = (.*)", text)
    frozen = [range(int(first or 0), int(end)) for first, end, made in loops if "backward=False" in made]
    assert [list(numbers) for numbers in frozen] == [[0, 1]]
    assert "segment=2" in text and "opaque" not in text


def test_the_norm_of_a_large_gradient() -> None:
    torch.manual_seed(0)
    for size in (1, 1023, 1024, 3_000_001):
        gradient = torch.randn(size) * 1e-3
        wanted = float(gradient.double().norm())
        assert float(norm_of(gradient)) == pytest.approx(wanted, rel=1e-7)
