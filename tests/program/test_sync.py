"""How replicas are synchronised: several steps of training against the same steps on one device, and faults that are caught."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from places import file_of
from tiers import in_short
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import capture
from autopar.checks.collectives import check_collectives
from autopar.emit import emit
from autopar.errors import LaunchError, ProgramError, UsageError
from autopar.graph import Graph
from autopar.plan import Plan, Role, Strategy
from autopar.run.folder import import_runtime, program_modules
from autopar.search.manual import make_mesh, manual_plan
from autopar.shard import annotate
from autopar.summary import describe

Batch = dict[str, Tensor]
Fault = tuple[str, str, str]
WIDTH, ROWS, STEPS, MAX_NORM = 8, 8, 4, 0.05
SERVER = {"sync": "parameter-server"}
PIPELINE = {"pipeline": 2, "data": 2, "microbatches": 2}


class Tied(nn.Module):
    """The table is read by the first and the last layer; ``unused`` is read by none, and the loss gives ``silent`` no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"norm": nn.LayerNorm(WIDTH), "up": nn.Linear(WIDTH, 16), "down": nn.Linear(16, WIDTH, bias=False)}
            )
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.table.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.silent = nn.Parameter(torch.ones(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids) * self.silent.detach()
        for block in self.blocks:
            hidden = hidden + block["down"](torch.tanh(block["up"](block["norm"](hidden))))
        return self.head(hidden).flatten(0, 1)


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, targets.flatten())


def tied(dtype: torch.dtype = torch.float64) -> Tied:
    torch.manual_seed(0)
    return Tied().to(dtype)


def batches(count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    """Some labels are masked, unevenly over the rows: a mean over replicas would not be the mean over tokens."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        ids, targets = torch.randint(16, (2, ROWS, 4), generator=generator)
        targets[0, 1:] = -100
        found.append((ids, targets))
    return found


@functools.cache
def captured(dtype: torch.dtype) -> Graph:
    return annotate(capture(tied(dtype), batches(1)[0], loss_of))


def planned(model: Tied, **options: Any) -> tuple[Graph, Plan]:
    graph = captured(model.table.weight.dtype)
    return graph, manual_plan(graph, **options)


def program(folder: Path, *faults: Fault, model: Tied | None = None, **options: Any) -> str:
    """Emit a program; ``faults`` are changes of its files: the file, a pattern, the replacement."""
    emit(*planned(model or tied(), **options), folder)
    for name, pattern, replacement in faults:
        text, count = re.subn(pattern, replacement, file_of(folder, name).read_text())
        assert count == 1, (name, pattern, count)
        file_of(folder, name).write_text(text)
    return str(folder)


OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "sgd": functools.partial(torch.optim.SGD, lr=0.5),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=1e-2, eps=(1e-8, 1e-3)),
}


def trained(
    folder: str, state: dict[str, Tensor], optimizer: str, max_norm: float | None, steps: list[Batch]
) -> dict[str, Any]:
    """Losses and the state dict after the steps; of this rank, the parameters that its stages read and the bytes of optimizer states."""
    with program_modules(folder):
        runtime = import_runtime(folder)
        opened = runtime.load(folder)
        world = runtime.start(opened, device="cpu")
        trainer = runtime.Trainer(opened, world, optimizer=OPTIMIZERS[optimizer], state=state, max_norm=max_norm)
        losses = [trainer.step(batch) for batch in steps]
        states = trainer.optimizer.state.values()
        sizes = [t.numel() for each in states for t in each.values() if isinstance(t, Tensor) and t.dim()]
        trainer.finish_update()
        read = {
            f"{index} {name}": parameter.detach().clone()
            for index, stage in trainer.stages.items()
            for name, parameter in stage.named_parameters()
        }
        coordinates = {axis: index for axis, (index, _) in world.coordinates.items()}
        return {
            "losses": losses, "state": trainer.state_dict(), "read": read, "states": sum(sizes), "at": coordinates,
        }  # fmt: skip


def run(
    pool: WorkerPool, folder: str, model: nn.Module, optimizer: str = "adamw", max_norm: float | None = MAX_NORM
) -> list[dict[str, Any]]:
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    steps = [{"ids": ids, "targets": targets} for ids, targets in batches()]
    return pool.run("test_sync:trained", folder, state, optimizer, max_norm, steps)


def reference(
    model: nn.Module, optimizer: str = "adamw", max_norm: float | None = MAX_NORM
) -> tuple[list[float], dict[str, Tensor]]:
    """The same steps on one device."""
    updates = OPTIMIZERS[optimizer](list(model.parameters()))
    losses = []
    for ids, targets in batches():
        updates.zero_grad()
        loss = loss_of(model(ids), targets)
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        updates.step()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def differs(found: list[dict[str, Any]], losses: list[float], state: dict[str, Tensor]) -> float:
    """The largest difference of a loss on any rank, or of a parameter after the last step."""
    trained = found[0]["state"]
    assert {*trained, "unused"} == set(state)  # a program has no parameter that nothing reads
    values = [float((value - state[name]).abs().max()) for name, value in trained.items()]
    return max(values + [abs(a - b) for rank in found for a, b in zip(rank["losses"], losses, strict=True)])


def replicas_agree(found: list[dict[str, Any]]) -> bool:
    """Whether ranks that differ on data axes alone read the same parameters."""
    seen: dict[Any, dict[str, Tensor]] = {}
    for rank in found:
        key = tuple(rank["read"]), rank["at"].get("tensor")
        other = seen.setdefault(key, rank["read"])
        if not all(torch.equal(other[name], value) for name, value in rank["read"].items()):
            return False
    return len(seen) < len(found)


# -- a parameter server -----------------------------------------------------------------------------------------------

SERVED: dict[str, dict[str, Any]] = {
    "data": {"data": 4},
    "two data axes": {"mesh": make_mesh(("data0", 2), ("data1", 2)), "microbatches": 2},
    "tensor": {"data": 2, "tensor": 2, "microbatches": 2},
    "tensor+sequence": {"data": 2, "tensor": 2, "sequence": True},
    "ring": {"data": 2, "ring": 2},
    "pipeline": PIPELINE | {"schedule": "1f1b"},
    "interleaved": PIPELINE | {"chunks": 2, "microbatches": 4, "schedule": "interleaved-1f1b", "recompute": "full"},
    "zero bubble": PIPELINE | {"schedule": "zero-bubble"},
}


@pytest.mark.parametrize("name", in_short(SERVED, "two data axes", "tensor+sequence", "interleaved"))
def test_a_parameter_server_trains_as_one_device(name: str, workers4: WorkerPool, tmp_path: Path) -> None:
    found = run(workers4, program(tmp_path, **SERVED[name], **SERVER), tied())
    assert differs(found, *reference(tied())) < 1e-9
    assert replicas_agree(found)
    whole = run(workers4, program(tmp_path / "all", **SERVED[name]), tied())
    for rank, other in zip(found, whole, strict=True):
        first = all(index == 0 for axis, index in rank["at"].items() if axis.startswith(("data", "ring")))
        norms_only = first and rank["at"].get("tensor", 0) > 0 and name == "tensor+sequence"
        assert rank["states"] <= other["states"] if first else rank["states"] == 0
        assert norms_only or not first or rank["states"] == other["states"]


FAULTS: dict[str, Fault] = {
    "the server does not broadcast": ("parameters.py", r"self\._sending = dist\.broadcast\(.*\)", "pass"),
    "another rank updates": ("parameters.py", r"dist\.get_rank\(self\._group\) == 0", "dist.get_rank(self._group) == 1"),
    "the sum is on another rank": ("parameters.py", r"group_dst=0", "group_dst=1"),
    "another rank broadcasts": ("parameters.py", r"group_src=0", "group_src=1"),
    "the server's own gradient counts twice": (
        "parameters.py", r"(\n\s+)(self\._work = dist\.reduce\()", r"\1self._grads *= 1 + self._has_masters\1\2",
    ),
    "gradients are not reduced": ("parameters.py", r"self\._work = dist\.reduce\(.*\)", "pass"),
    "every rank clips by its own norm": ("trainer.py", r"dist\.all_reduce\(squares, .*\)", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("name", in_short(FAULTS, "the server does not broadcast"))
def test_a_fault_of_a_server_is_caught(name: str, workers4: WorkerPool, tmp_path: Path) -> None:
    """Of AdamW alone a norm that is wrong in size would show little: the plan has two stages, and gradients are clipped."""
    folder = program(tmp_path, FAULTS[name], **SERVED["pipeline"], **SERVER)
    try:
        found = run(workers4, folder, tied(), "sgd")
    except LaunchError:
        return
    assert differs(found, *reference(tied(), "sgd")) > 1e-6 or not replicas_agree(found)


def test_a_server_sends_16_bits_and_keeps_32(workers2: WorkerPool, tmp_path: Path) -> None:
    """Two terms have one sum in any order, so that the results have the same bits as with all-reduces."""
    model = tied(torch.bfloat16)
    server, plain = (
        run(workers2, program(tmp_path / str(i), model=model, data=2, precision="bfloat16", **options), model)
        for i, options in enumerate((SERVER, {}))
    )
    assert server[0]["losses"] == plain[0]["losses"] and replicas_agree(server)
    for name, value in plain[0]["state"].items():
        assert torch.equal(server[0]["state"][name], value), name
    assert server[0]["state"]["table.weight"].dtype == torch.float32 and server[1]["states"] == 0


def test_where_a_server_makes_no_sense() -> None:
    for zero in (1, 2, 3):
        with pytest.raises(UsageError, match=f"parameter-server needs unsharded parameters .* has ZeRO {zero}"):
            planned(tied(), data=2, zero=zero, **SERVER)
    with pytest.raises(UsageError, match="chimera sums the gradients of a stage's two copies"):
        planned(tied(), data=2, pipeline=2, microbatches=2, schedule="chimera", **SERVER)
    mixed = {0: Strategy((Role.DATA,), zero=1)}
    with pytest.raises(UsageError, match="has ZeRO 1"):
        planned(tied(), data=2, strategies=mixed, **SERVER)
    assert planned(tied(), data=2, **SERVER)[1].sync == "parameter-server"
    assert planned(tied(), tensor=2, **SERVER)[1].sync == "all-reduce"  # one replica


# -- local steps ------------------------------------------------------------------------------------------------------

APART: dict[str, dict[str, Any]] = {
    "data": {"data": 4},
    "two data axes": {"mesh": make_mesh(("data0", 2), ("data1", 2)), "microbatches": 2},
    "tensor": {"data": 2, "tensor": 2, "microbatches": 2},
    "tensor+sequence": {"data": 2, "tensor": 2, "sequence": True},
    "ring": {"data": 2, "ring": 2},
    "pipeline": PIPELINE | {"schedule": "1f1b"},
    "zero bubble": PIPELINE | {"schedule": "zero-bubble"},
}


def local(steps: int) -> dict[str, Any]:
    return {"sync": f"local-steps:{steps}", "allow": {"local_steps"}}


def replicas_of(name: str) -> int:
    """The ranks of a ring are one replica: they have slices of the same sequences."""
    return 4 if "data" in name else 2


def simulated(
    name: str, every: int, optimizer: str, max_norm: float | None
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Local SGD in one process: a copy of the model for each replica, on its rows of every microbatch. A replica's loss is the sum over its
    tokens, times the number of replicas, over the number of the whole batch's tokens: the mean of these losses is the batch's."""
    count, microbatches = replicas_of(name), APART[name].get("microbatches", 1)
    models = [tied() for _ in range(count)]
    updates = [OPTIMIZERS[optimizer](list(model.parameters())) for model in models]
    losses = []
    for step, (ids, targets) in enumerate(batches(), 1):
        rows = torch.arange(ROWS).view(microbatches, count, -1).transpose(0, 1).flatten(1)
        total = 0.0
        for model, update, own in zip(models, updates, rows, strict=True):
            update.zero_grad()
            terms = nn.functional.cross_entropy(model(ids[own]), targets[own].flatten(), reduction="sum")
            loss = count * terms / (targets != -100).sum()
            loss.backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            update.step()
            total += loss.item() / count
        losses.append(total)
        if step % every == 0:
            for together in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([parameter.detach() for parameter in together]).mean(0)
                for parameter in together:
                    parameter.data.copy_(mean)
    return losses, [{name: value.detach() for name, value in model.state_dict().items()} for model in models]


def mean_of(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


def own_parameters_differ(found: list[dict[str, Any]], states: list[dict[str, Tensor]]) -> float:
    """The largest difference between the table that a rank reads and its replica's in the simulation. The table is whole on every rank of
    the stages that have it, under data parallelism and pipelines."""
    worst = 0.0
    for rank in found:
        replica = 0
        for axis, index in rank["at"].items():
            replica = replica * (2 if axis in ("data0", "data1") else 1) + (index if axis.startswith("data") else 0)
        for name, value in rank["read"].items():
            if value.shape == (16, WIDTH) and "up" not in name:
                worst = max(worst, float((value - states[replica]["table.weight"]).abs().max()))
    return worst


@pytest.mark.parametrize("name", in_short(APART, "two data axes", "tensor+sequence", "pipeline"))
@pytest.mark.parametrize(("every", "optimizer"), [(3, "adamw"), (2, "sgd")])
def test_replicas_train_apart_as_simulated(
    name: str, every: int, optimizer: str, workers4: WorkerPool, tmp_path: Path
) -> None:
    """With an average every 3 of 4 steps the last step is apart; each replica clips by its own norm and keeps its own moments."""
    found = run(workers4, program(tmp_path, **APART[name], **local(every)), tied(), optimizer)
    losses, states = simulated(name, every, optimizer, MAX_NORM)
    assert differs(found, losses, mean_of(states)) < 1e-9
    if "tensor" not in name:
        assert own_parameters_differ(found, states) < 1e-9
    assert replicas_agree(found) == (STEPS % every == 0)


def test_the_average_reaches_whole_tensors(workers4: WorkerPool, tmp_path: Path) -> None:
    """Inside of each replica one rank updates the whole of a tensor of which two have slices."""
    found = run(workers4, program(tmp_path, **APART["tensor"], **local(3)), tied(), "adafactor")
    losses, states = simulated("tensor", 3, "adafactor", MAX_NORM)
    assert differs(found, losses, mean_of(states)) < 1e-9


def test_an_average_after_every_step_of_plain_sgd_is_the_all_reduce(workers4: WorkerPool, tmp_path: Path) -> None:
    """The mean of the replicas' updates is the update of the mean of their gradients, which is the batch's gradient."""
    for name in ("data", "pipeline"):
        folder = program(tmp_path / name, **APART[name], **local(1))
        found = run(workers4, folder, tied(), "sgd", max_norm=None)
        assert differs(found, *reference(tied(), "sgd", max_norm=None)) < 1e-9
        assert replicas_agree(found)


def test_masters_of_replicas_are_averaged_in_32_bits(workers2: WorkerPool, tmp_path: Path) -> None:
    """Plain SGD, an average in every step, two replicas: sums of two terms and means of two masters are rounded alike but for a digit."""
    model = tied(torch.bfloat16)
    apart, plain = (
        run(workers2, program(tmp_path / str(i), model=model, data=2, precision="bfloat16", **more), model, "sgd", None)
        for i, more in enumerate((local(1), {}))
    )
    assert replicas_agree(apart)
    for name, value in plain[0]["state"].items():
        assert (apart[0]["state"][name] - value).abs().max() < 1e-2 and apart[0]["state"][name].dtype == value.dtype


APART_FAULTS: dict[str, Fault] = {
    "replicas are not averaged": ("trainer.py", r"group\.average\(\)", "pass"),
    "averaged in every step": ("trainer.py", r"if local_steps and .*:", "if local_steps:"),
    "the sum, not the mean": ("parameters.py", r"own\.div_\(dist\.get_world_size\(self\._replicas\)\)", "own"),
    "a replica's own term of the loss": ("parameters.py", r"self\._grads \*= dist\.get_world_size\(self\._replicas\)", "pass"),
    "clipped by all replicas' norm": ("trainer.py", r"squares, group=self\.world\.replica", "squares"),
    "gradients are summed over the replicas": (
        "parameters.py", r"axes, self\._local_sgd_axes = program\.", "_, self._local_sgd_axes = program.",
    ),
    "only the first replica's norm counts": ("parameters.py", r"\(\*self\._shards, \*self\._local_sgd_axes\)", "self._shards"),
}  # fmt: skip


@pytest.mark.parametrize("name", in_short(APART_FAULTS, "replicas are not averaged"))
def test_a_fault_of_an_average_is_caught(name: str, workers4: WorkerPool, tmp_path: Path) -> None:
    """With clipping to a small norm, which hides a gradient's scale, or without it, which hides the norm."""
    folder = program(tmp_path, APART_FAULTS[name], **APART["pipeline"], **local(3))
    worst = 0.0
    for max_norm in (MAX_NORM, None):
        try:
            found = run(workers4, folder, tied(), "sgd", max_norm)
        except LaunchError:
            return
        losses, states = simulated("pipeline", 3, "sgd", max_norm)
        worst = max(worst, differs(found, losses, mean_of(states)), own_parameters_differ(found, states))
    assert worst > 1e-6


class Coupled(nn.Module):
    """Batch norm couples the rows of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_where_replicas_cannot_train_apart(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="(?s)not exact: between averages .*allow=.'local_steps'."):
        planned(tied(), data=2, sync="local-steps:4")
    with pytest.raises(UsageError, match="has ZeRO 1"):
        planned(tied(), data=2, zero=1, **local(4))
    with pytest.raises(UsageError, match="must be one of all-reduce, parameter-server, local-steps:K"):
        planned(tied(), data=2, sync="local-steps:0", allow={"local_steps"})
    mesh = make_mesh(("data", 2), ("inner", 2))
    mixed = {0: Strategy((Role.DATA, Role.DATA)), 1: Strategy((Role.DATA, Role.TENSOR))}
    with pytest.raises(UsageError, match="the result depends on the number of replicas"):
        planned(tied(), mesh=mesh, strategies=mixed, **local(4))
    x, y = torch.randn(2, 8, 4)
    graph = annotate(capture(Coupled(), (x, y), nn.functional.mse_loss))
    with pytest.raises(UsageError, match="local SGD replicas cannot train independently: batch norm couples the batch"):
        manual_plan(graph, data=2, **local(4))
    coupled = replace(manual_plan(graph, data=2), sync="local-steps:4")  # as if it had not been refused
    with pytest.raises(ProgramError, match="local SGD replicas train independently, but collectives cross data"):
        check_collectives(emit(graph, coupled, tmp_path / "coupled"))


def test_a_plan_and_its_program_say_that_they_are_not_exact(tmp_path: Path) -> None:
    text = (Path(program(tmp_path, data=2, **local(4))) / "model.py").read_text()
    assert (
        "Local SGD replicas train independently, as local_steps allows" in text and "averaged every 4 step(s)" in text
    )
    plan = planned(tied(), data=2, **local(4))[1]
    assert plan.allow == ("local_steps",) and "replicas averaged every 4 steps" in (words := describe(plan))
    assert "local steps (not exact)" in words
    assert Plan.from_json(plan.to_json()) == plan
    alone = planned(tied(), tensor=2, **local(4))[1]  # one replica: what one device computes
    assert (alone.sync, alone.allow) == ("all-reduce", ())
