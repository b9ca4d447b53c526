"""Optimizer states in the host's memory and on NVMe: as on one device, through checkpoints, in chunks, in files that are really used."""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import mlp, subject
from places import file_of
from plain_loop import plain_loop
from price_models import chain as chain_of_layers
from price_models import mlp as mlp_layer
from price_models import solve_mlp
from resumed import KIND, Fault, chain, emitted
from test_run_optimizers import NORM, lamb
from tiers import in_short, slow
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import capture
from autopar.devices import parse
from autopar.emit import emit
from autopar.errors import InfeasibleError, LaunchError, UsageError
from autopar.plan import Plan
from autopar.price import Pricer
from autopar.program.optimizers import RefusedOptimizerError, checked
from autopar.program.processes import StartError
from autopar.program.state_places import NVME, PlaceError, StateStorage, pieces_of
from autopar.program.world import load
from autopar.run import Program
from autopar.run.folder import import_runtime, program_modules
from autopar.search import SearchOptions, manual_plan, search
from autopar.shard import annotate

SMALL: Fault = ("state_places.py", r"(?m)^CHUNK_BYTES = .*", "CHUNK_BYTES = 1000")  # of 125 elements in float64


def offloaded(plan: Plan, states: str, folder: Path, layers: slice = slice(None)) -> Plan:
    """The plan with the optimizer states of some layers there."""
    there = {layer.name for layer in plan.layers[layers]}
    changed = (
        replace(layer, strategy=layer.strategy.with_options(states=states)) if layer.name in there else layer
        for layer in plan.layers
    )
    return replace(plan, layers=tuple(changed), nvme_path=str(folder))


# -- tensors in a file -------------------------------------------------------------------------------------------------


def test_tensors_in_a_file_are_written_there_and_leave_nothing(tmp_path: Path) -> None:
    """Each begins at a page of its own, and has its values after its pages were unmapped; the file has no name."""
    places = StateStorage(str(tmp_path))
    tensors = [places.zeros(NVME, shape, torch.float32) for shape in ((3, 5), (1,), (5_000_000,), (), (0, 4))]
    assert all(not tensor.any() and places.has(tensor) == bool(tensor.numel()) for tensor in tensors)
    for value, tensor in enumerate(tensors):
        tensor.fill_(value + 1)
    places.release(tensors)
    places.prefetch(tensors)
    assert [float(tensor.sum()) for tensor in tensors] == [15.0, 2.0, 15_000_000.0, 4.0, 0.0]
    assert not list(tmp_path.iterdir())
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert mapped and all("(deleted)" in line and " rw-s " in line for line in mapped)


def test_a_folder_that_cannot_have_the_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOPAR_NVME", raising=False)
    with pytest.raises(StartError, match="no NVMe folder is set\nhint: set one: nvme_path"):
        StateStorage().zeros(NVME, (3,), torch.float32)
    with pytest.raises(PlaceError, match="cannot be kept in .*missing: .*No such file"):
        StateStorage(str(tmp_path / "missing")).zeros(NVME, (3,), torch.float32)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PlaceError, match="need 0.04 GB in .*: is full\nhint: make room"):
        StateStorage(str(tmp_path)).zeros(NVME, (10_000_000,), torch.float32)


@pytest.mark.parametrize("elements", [0, 1, 8 * 2**20, 8 * 2**20 + 1, 50 * 2**20])
def test_large_parameters_are_updated_piece_by_piece(elements: int) -> None:
    pieces = list(pieces_of(elements, torch.float32))
    assert [low for low, _ in pieces] == [0, *(high for _, high in pieces[:-1])] if elements else not pieces
    assert sum(high - low for low, high in pieces) == elements
    assert all(0 < high - low <= 8 * 2**20 for low, high in pieces)


# -- exact ------------------------------------------------------------------------------------------------------------

CHAINS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "zero": ("mlp", "adamw", NVME, ("data 2, zero 1", "data 2, zero 3", "data 2", "data 2, zero 2")),
    "tied and fused": (
        "gpt2",
        "adamw",
        "host",
        ("tensor 2", "data 2, zero 3", "pipeline 2 of 2 chunks x data 2, zero 1"),
    ),
    "schedules": ("mlp", "asgd", NVME, ("pipeline 2, Chimera", "data 2, parameter server", "one device")),
    "hybrid": ("mlp", "momentum", "host", ("data 2 in 2 copies, zero 3", "data 2 x tensor 2, zero 3")),
    "padding": ("odd_gpt2", "adamw", "host", ("tensor 3", "data 3, zero 3", "one device")),
    "whole tensors": ("gpt2", "muon", NVME, ("tensor 2", "data 2, zero 3")),
    "frozen": ("adapters", "adamw", "host", ("data 2, zero 3", "tensor 2")),
}


@pytest.mark.parametrize("name", in_short(CHAINS, "zero", "schedules", "whole tensors"))
def test_training_is_exact_through_checkpoints(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Under each plan two steps in small chunks, from the checkpoint of the plan before; the last plan has all states on the device, and
    of the one before it only some layers' are offloaded."""
    model, optimizer, states, kinds = CHAINS[name]
    graph = subject(model).graph
    plans = [offloaded(KIND[kind].plan(graph), states, tmp_path) for kind in kinds]
    plans[-1] = offloaded(plans[-1], states, tmp_path, slice(1, None, 2))
    plans.append(KIND["data 2, zero 1"].plan(graph))
    pools = lambda count: request.getfixturevalue(f"workers{count}")  # noqa: E731
    errors = chain(model, plans, optimizer, pools, tmp_path, [SMALL])
    assert max(errors.values()) <= 1e-9, errors


FAULTS: dict[str, tuple[str, Fault]] = {
    "gradients do not come down": ("data 2, zero 1", ("state_places.py", r"there\.copy_\(gradient\..*", "there.zero_()")),
    "values do not go up": ("data 2, zero 3", ("state_places.py", r"target\.copy_\(values, .*", "pass")),
    "a chunk is updated twice": (
        "data 2", ("state_places.py", r"(?m)^                master\.tensor\.grad = None$", "                pass"),
    ),
    "states move without their values": ("data 2, zero 1", ("state_places.py", r"\.copy_\(value\)", "")),
    "loaded masters are not uploaded": ("data 2, zero 3", ("model_tensors.py", r"upload\(group\.masters\)", "pass")),
    "pieces begin where slices begin": (
        "data 2, zero 1", ("state_places.py", r"flat\.first \+ start, offloaded", "flat.first, offloaded"),
    ),
    "shards' pieces get the first gradients": (
        "data 2, zero 3", ("fsdp.py", r"shard\.view\(-1\)\[piece\]", "shard.view(-1)[: master.tensor.numel()]"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", in_short(FAULTS, "values do not go up"))
def test_a_fault_is_caught(name: str, workers2: WorkerPool, tmp_path: Path) -> None:
    kind, fault = FAULTS[name]
    plans = [offloaded(KIND[kind].plan(subject("mlp").graph), NVME, tmp_path)] * 2
    try:
        errors = chain("mlp", plans, "adamw", {2: workers2}.__getitem__, tmp_path, [SMALL, fault])
    except LaunchError as error:
        assert "CheckpointError: " in error.message
        return
    assert max(errors.values()) > 1e-6, errors


def test_initial_values_reach_the_device(workers2: WorkerPool, tmp_path: Path) -> None:
    fault = ("model_tensors.py", r"upload\(group\.masters\)", "pass")
    plans = [offloaded(KIND["data 2, zero 3"].plan(subject("mlp").graph), "host", tmp_path)]
    errors = chain("mlp", plans, "adamw", {2: workers2}.__getitem__, tmp_path, [fault])
    assert max(errors.values()) > 1e-6, errors


# -- optimizers -------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Any] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adagrad": {"initial_accumulator_value": 0.3},
    "Adadelta": {"lr": 1.0},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Rprop": {},
    "ASGD": {"t0": 1},
}


class Counting(torch.optim.Optimizer):
    """Of the user's, elementwise by its own word: its rate falls with the calls of ``step``."""

    elementwise = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["m"] = self.state[p].get("m", torch.zeros_like(p)) + p.grad  # a new tensor each time
                    p.sub_(group["lr"] / self.calls * self.state[p]["m"])


def counting(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Counting(params, lr=0.1)


def made(name: str) -> Any:
    """The function that makes an optimizer: some decay, matrices have another rate."""

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        matrices, vectors = [p for p in params if p.ndim >= 2], [p for p in params if p.ndim < 2]
        groups = [{"params": matrices}, {"params": vectors, "lr": 0.03}]
        found: torch.optim.Optimizer = getattr(torch.optim, name)(groups, **{"lr": 0.01} | OPTIMIZERS[name])
        return found

    return counting if name == "Counting" else make


def eager(make: Any, steps: int, norm: float | None = None) -> dict[str, Tensor]:
    """The values on one device after some steps with the subject's batch."""
    model, (x, y), loss_fn = mlp()
    model = model.double()
    model.load_state_dict(subject("mlp").state)
    plain_loop(model, [lambda: loss_fn(model(x), y)] * steps, make, None, norm)
    return {name: value.detach() for name, value in model.state_dict().items()}


def updated(folder: str, state: dict[str, Tensor], batch: dict[str, Tensor], names: list[str]) -> dict[str, Any]:
    """In a worker: three clipped steps with each optimizer; the values, and the share of masters and states that are in a file."""
    found: dict[str, Any] = {}
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        world = runtime.start(program)
        for name in names:
            trainer = runtime.Trainer(program, world, optimizer=made(name), state=state, max_norm=NORM)
            for _ in range(3):
                trainer.step(batch)
            tensors = [p for group in trainer.optimizer.param_groups for p in group["params"]]
            states = [(p, value) for p in tensors for value in trainer.optimizer.state[p].values()]
            tensors += [s for p, s in states if isinstance(s, Tensor) and s.shape == p.shape]
            there = [tensor for tensor in tensors if world.places is not None and world.places.has(tensor)]
            found[name] = [trainer.state_dict(), len(there), len(tensors)]
    return found


FLAT, SHARDED = {"data": 2, "zero": 1}, {"data": 2, "zero": 3, "microbatches": 2}


@pytest.mark.parametrize(
    ("how", "states"), [(FLAT, "host"), slow(FLAT, NVME), slow(SHARDED, "host"), (SHARDED, NVME)], ids=str
)
def test_every_elementwise_optimizer_is_exact(
    how: dict[str, int], states: str, workers2: WorkerPool, tmp_path: Path
) -> None:
    given, names = subject("mlp"), [*OPTIMIZERS, "Counting"]
    plan = offloaded(manual_plan(given.graph, **how), states, tmp_path)  # type: ignore[arg-type]
    folder = Path(emitted("mlp", plan, tmp_path / "program"))
    if states == "host":  # in one chunk here, in many there
        file, pattern, text = SMALL
        file_of(folder, file).write_text(re.sub(pattern, text, file_of(folder, file).read_text()))
    found = workers2.run("test_state_places:updated", str(folder), given.state, given.batch, names)
    for name in names:
        wanted = eager(made(name), 3, NORM)
        assert max(float((wanted[n] - given.state[n]).abs().max()) for n in wanted) > 1e-3, name
        values = found[0][name][0]
        assert max(float((values[n] - wanted[n]).abs().max()) for n in wanted) <= 1e-9, name
        for _, there, count in (rank[name] for rank in found):
            assert there == (count if states == NVME else 0) and count > 0, name


def test_an_optimizer_that_looks_at_all_tensors_is_refused(tmp_path: Path) -> None:
    plan = offloaded(manual_plan(subject("mlp").graph), "host", tmp_path)
    emitted("mlp", plan, tmp_path / "program")
    with program_modules(tmp_path / "program"), pytest.raises(RefusedOptimizerError) as error:
        checked(lamb, load(tmp_path / "program"))
    assert "no rank has the full layers.0.0.weight: it is not on the device" in error.value.message


def test_half_precision_has_its_masters_there(workers2: WorkerPool, tmp_path: Path) -> None:
    """In bfloat16 the device has parameters of 16 bits, and the updates are those of masters on the device, bit for bit."""
    model, batch, loss_fn = mlp()
    graph = annotate(capture(model, batch, loss_fn, precision="bfloat16"))
    values, tensors = [], {"x": batch[0].bfloat16(), "targets": batch[1].bfloat16()}
    for states in ("device", "host", NVME):
        for zero in (1, 2):
            plan = offloaded(manual_plan(graph, data=2, zero=zero, precision="bfloat16"), states, tmp_path)
            emit(graph, plan, tmp_path / f"{states} {zero}", state=model.state_dict())
            call = str(tmp_path / f"{states} {zero}"), dict(model.state_dict()), tensors, ["Adam"]
            values.append(workers2.run("test_state_places:updated", *call)[0]["Adam"][0])
    assert all(torch.equal(values[0][name], other[name]) for other in values[2::2] for name in values[0])
    assert all(torch.equal(values[1][name], other[name]) for other in values[3::2] for name in values[1])
    assert max(float((values[0][n] - t).abs().max()) for n, t in model.state_dict().items()) > 1e-3


# -- killed, and gone on with -----------------------------------------------------------------------------------------


def test_a_training_on_nvme_is_killed_and_goes_on(workers2: WorkerPool, tmp_path: Path) -> None:
    """Two processes of ``train.py``, killed after some checkpoints, leave nothing on the drives. Resumed, they end as one device does."""
    given, drives = subject("mlp"), tmp_path / "nvme"
    drives.mkdir()
    program = tmp_path / "program"
    emit(given.graph, offloaded(manual_plan(given.graph, data=2, zero=1), NVME, Path()), program, state=given.state)
    torch.save(given.batch, tmp_path / "data.pt")  # one batch: every epoch has one step
    files = [
        "--dataset",
        str(tmp_path / "data.pt"),
        "--checkpoint",
        str(tmp_path / "saved"),
        "--every",
        "1",
        "--nvme",
        str(drives),
    ]
    train = ("programs:ran", str(program), "--lr", "0.01", *files)
    with WorkerPool(2) as pool, ThreadPoolExecutor(1) as thread:
        going = thread.submit(pool.run, *train, "--steps", "100000", timeout_s=100)
        while len(list((tmp_path / "saved").glob("step-*[0-9]"))) < 2 and not going.done():
            time.sleep(0.05)
        assert pool._processes is not None and not going.done()
        for worker in pool._processes._workers:
            os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(LaunchError, match="was killed by signal 9"):
            going.result()
    assert not list(drives.iterdir())
    begun = max(int(path.name.removeprefix("step-")) for path in (tmp_path / "saved").glob("step-*[0-9]"))
    steps = begun + 3
    more = ("--steps", str(steps), "--resume", "--save", str(tmp_path / "end.pt"))
    losses, said = workers2.run(*train, *more)[0]
    assert list(losses) == [begun + 1, begun + 2, steps] and "continues after step" in said, said
    wanted = eager(lambda params: torch.optim.AdamW(params, lr=0.01), steps)
    end = torch.load(tmp_path / "end.pt", weights_only=True)
    assert max(float((end[name] - value).abs().max()) for name, value in wanted.items()) <= 1e-9


# -- plans ------------------------------------------------------------------------------------------------------------


def test_what_fits_only_with_nvme_has_a_plan(tmp_path: Path) -> None:
    """Of 4 layers, 12.6 MB of parameters and gradients fit one device, and 25 MB of states do not; the host's memory has room for none."""
    graph = chain_of_layers(mlp_layer(8, 128, 256, 1024), 4)
    file = tmp_path / "node.toml"
    plain = 'gpu = "H100-80GB"\ngpus_per_node = 1\nhost_memory_gb = 0.005\n'
    drives = "nvme_gb = 1\nnvme_read_gb_per_s = 6\nnvme_write_gb_per_s = 3\n"

    def found(text: str, **options: Any) -> Plan:
        file.write_text(text)
        cluster = parse(str(file), memory_limit_bytes=24_000_000)
        return search(graph, cluster, Pricer(graph, cluster, "bfloat16", solve_mlp), SearchOptions(**options))

    for options in ({}, {"states": "any"}):
        with pytest.raises(InfeasibleError):
            found(plain, **options)
    plan = found(plain + drives + f'nvme_path = "{tmp_path}"\n')
    chosen = {layer.strategy.options.by_name["states"] for layer in plan.layers}
    assert NVME in chosen and plan.nvme_path == str(tmp_path) and plan.gap < 0.01
    assert 0 < plan.stages[0].nvme_bytes <= 1e9 and any(note.startswith("on NVMe: ") for note in plan.notes)
    # a drive that is slower costs more, one that is full is no way out, and a pin keeps states away from it
    assert found(plain + drives.replace("= 6", "= 0.1")).prediction.step_time_s > plan.prediction.step_time_s
    with pytest.raises(InfeasibleError):
        found(plain + drives.replace("nvme_gb = 1\n", "nvme_gb = 0.001\n"))
    with pytest.raises(InfeasibleError):
        found(plain + drives, states="device")
    # pinned and not described, one drive is assumed
    assert {layer.strategy.options.by_name["states"] for layer in found(plain, states=NVME).layers} == {NVME}


def test_a_folder_must_be_named_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOPAR_NVME", raising=False)
    given = subject("mlp")
    plan = offloaded(manual_plan(given.graph), NVME, Path())
    emit(given.graph, replace(plan, nvme_path=""), tmp_path, state=given.state)
    with (
        Program(replace(plan, nvme_path=""), tmp_path, type_check=False) as program,
        pytest.raises(UsageError, match="no NVMe folder is set"),
    ):
        program.step(given.batch)
