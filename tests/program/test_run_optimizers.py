"""Optimizers see the user's parameters: exact as on one device, or refused by name before anything starts."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import mlp, subject
from programs import Shape, mlp_batch, mlp_model, mlp_plan, write_mlp
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import capture
from autopar.emit import emit
from autopar.errors import UsageError
from autopar.program.optimizers import RefusedOptimizerError, checked
from autopar.program.world import load
from autopar.run import Program
from autopar.run.folder import import_runtime, program_modules
from autopar.search.manual import manual_plan
from autopar.shard import annotate


class Lamb(torch.optim.Optimizer):
    """Written by hand: the step of each tensor is scaled by its norm. ``clamp`` is no option of a group."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0, clamp: float = 10.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.clamp = clamp

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 0.1)
                state["v"].lerp_(p.grad.square(), 0.01)
                update = state["m"] / (state["v"].sqrt() + 1e-6) + group["weight_decay"] * p
                trust = p.norm().clamp(0, self.clamp) / update.norm().clamp_min(1e-12)
                p.sub_(update * trust * group["lr"])


class Signs(torch.optim.Optimizer):
    """Of the user's, and elementwise by its own word."""

    elementwise = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad.sign())


class PerTensorLamb(Lamb):
    per_tensor = True


class Odd(Lamb):
    """Cannot be made again: what it is given is in no attribute, and no group."""

    def __init__(self, params: Any, schedule: Any) -> None:
        super().__init__(params)


class Doubling(Lamb):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["lr"] *= 2


Params = list[nn.Parameter]


def by_ndim(params: Params) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not, as everybody has it."""
    matrices, vectors = [p for p in params if p.ndim >= 2], [p for p in params if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0, "lr": 0.03}]
    return torch.optim.AdamW(groups, lr=0.01)


def by_name(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    own: dict[bool, Params] = {True: [], False: []}
    for name, p in named_parameters:
        own[name.startswith("layers.1.") or name == "embed.weight"].append(p)
    return torch.optim.AdamW([{"params": own[True], "lr": 0.05}, {"params": own[False]}], lr=0.01, weight_decay=0.2)


def by_order(params: Params) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": params[::2]}, {"params": params[1::2], "lr": 0.04}], lr=0.01)


def with_names(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(named_parameters), lr=0.01, weight_decay=0.2)


def some(params: Params) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in params if p.ndim == 1], lr=0.1, momentum=0.9)


def adagrad(params: Params) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.02, initial_accumulator_value=0.3)


def muon(params: Params) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.02)


def adafactor(params: Params) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=0.02)


def lamb(params: Params) -> torch.optim.Optimizer:
    return Lamb([{"params": params[:4], "weight_decay": 0.1}, {"params": params[4:]}], lr=0.02, clamp=0.7)


def signs(params: Params) -> torch.optim.Optimizer:
    return Signs(params, lr=0.01)


def train(folder: str, state: dict[str, Tensor], names: list[str]) -> dict[str, dict[str, Tensor]]:
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        world = runtime.start(program)
        trained = {}
        for name in names:
            trainer = runtime.Trainer(program, world, optimizer=globals()[name], state=state)
            for seed in range(3):
                trainer.step(mlp_batch(seed))
            trained[name] = trainer.state_dict()
        return trained


@functools.cache
def one_process(name: str) -> dict[str, Tensor]:
    model, make = mlp_model(), globals()[name]
    optimizer = make(list(model.named_parameters()) if name in ("by_name", "with_names") else list(model.parameters()))
    for seed in range(3):
        optimizer.zero_grad()
        model(**mlp_batch(seed)).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def check(pool: WorkerPool, folder: Path, shape: Shape, names: list[str]) -> None:
    state = {name: value.detach() for name, value in mlp_model().state_dict().items()}
    found = pool.run("test_run_optimizers:train", str(write_mlp(folder, shape)), state, names)[0]
    for name in names:
        wanted = one_process(name)
        assert set(found[name]) == set(wanted)
        assert max(float((found[name][n] - wanted[n]).abs().max()) for n in wanted) <= 1e-9, name


ELEMENTWISE = ["by_ndim", "by_name", "by_order", "with_names", "some", "adagrad", "signs"]


@pytest.mark.parametrize(
    "shape",
    [*(Shape(data=2, zero=(z, z)) for z in range(4)), Shape(tensor=2), Shape(pipeline=2, microbatches=2)],
    ids=str,
)
def test_elementwise_ones_are_exact_under_every_plan(workers2: WorkerPool, tmp_path: Path, shape: Shape) -> None:
    check(workers2, tmp_path, shape, ELEMENTWISE)


# -- optimizers that look at whole tensors: on an emitted program whose projections are not fused ------------------------


def emitted(folder: Path, **options: Any) -> Path:
    graph = subject("mlp").graph
    emit(graph, manual_plan(graph, **options), folder)
    return folder


def train_emitted(folder: str, state: dict[str, Tensor], batch: dict[str, Tensor], names: list[str]) -> Any:
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        world = runtime.start(program)
        trained = {}
        for name in names:
            trainer = runtime.Trainer(program, world, optimizer=globals()[name], state=state)
            for _ in range(3):
                trainer.step(batch)
            trained[name] = trainer.state_dict()
        return trained


def one_process_of_mlp(name: str) -> dict[str, Tensor]:
    model, (x, y), loss_fn = mlp()
    model = model.double()
    model.load_state_dict(subject("mlp").state)
    optimizer = globals()[name](list(model.parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("options", [{"data": 2}, {"data": 2, "microbatches": 2}], ids=str)
def test_whole_tensor_ones_are_exact_where_masters_are_whole(
    workers2: WorkerPool, tmp_path: Path, options: dict[str, int]
) -> None:
    given, names = subject("mlp"), ["muon", "adafactor", "lamb"]
    found = workers2.run(
        "test_run_optimizers:train_emitted", str(emitted(tmp_path, **options)), given.state, given.batch, names
    )[0]
    for name in names:
        wanted = one_process_of_mlp(name)
        moved = max(float((wanted[n] - given.state[n]).abs().max()) for n in wanted)
        assert moved > 1e-3
        assert max(float((found[name][n] - wanted[n]).abs().max()) for n in wanted) <= 1e-9, name


def test_torchs_own_are_exact_over_a_pipeline(workers2: WorkerPool, tmp_path: Path) -> None:
    given = subject("mlp")
    folder = str(emitted(tmp_path, pipeline=2, microbatches=2))
    names = ["muon", "adafactor", "per_tensor"]
    found = workers2.run("test_run_optimizers:train_emitted", folder, given.state, given.batch, names)[0]
    for name in names:
        wanted = one_process_of_mlp(name)
        assert max(float((found[name][n] - wanted[n]).abs().max()) for n in wanted) <= 1e-9, name


def per_tensor(params: Params) -> torch.optim.Optimizer:
    return PerTensorLamb(params, clamp=0.5)


def why(folder: Path, make: Any) -> RefusedOptimizerError:
    with program_modules(folder), pytest.raises(RefusedOptimizerError) as error:
        checked(make, load(folder))
    assert error.value.hint
    return error.value


CUTS = [
    ({"data": 2, "zero": 1}, "no rank has the whole of .*: ZeRO 1 divides it over data"),
    ({"data": 2, "zero": 3}, "no rank has the whole of .*: ZeRO 3 divides it over data"),
    ({"tensor": 2}, "no rank has the whole of layers.0.0.weight: the axis tensor shards it"),
]


@pytest.mark.parametrize(("options", "message"), CUTS, ids=str)
def test_whole_tensor_ones_are_refused_by_name_where_ranks_hold_pieces(
    tmp_path: Path, options: dict[str, int], message: str
) -> None:
    folder = emitted(tmp_path, **options)
    for make, name in ((muon, "Muon"), (adafactor, "Adafactor"), (lamb, "Lamb")):
        refused = why(folder, make)
        assert re.search(f"{name} looks at whole tensors, and {message}", refused.message)
        assert "zero=0 and data parallelism" in refused.hint and ("elementwise = True" in refused.hint) == (
            name == "Lamb"
        )


def test_a_fused_projection_is_no_whole_tensor(tmp_path: Path) -> None:
    message = "no rank has the whole of layers.0.gate_up.weight: it is a fused projection"
    assert message in why(write_mlp(tmp_path, Shape()), adafactor).message


def test_an_unknown_one_may_look_over_the_pipeline(tmp_path: Path) -> None:
    refused = why(emitted(tmp_path, pipeline=2, microbatches=2), lamb)
    assert "Lamb may look at all tensors together" in refused.message and "per_tensor = True" in refused.hint


def scheduled(params: Params) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def hooked(params: Params) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


REFUSED: dict[str, tuple[Any, str]] = {
    "LBFGS": (torch.optim.LBFGS, "LBFGS cannot train a program"),
    "SparseAdam": (torch.optim.SparseAdam, "SparseAdam cannot train a program"),
    "not made again": (lambda params: Odd(params, 3), "Odd cannot be made again .*its class raised TypeError"),
    "changes options": (Doubling, "Doubling cannot be made again .*changes the option lr"),
    "scheduler": (scheduled, "SGD cannot be made again .*was replaced"),
    "hooks": (hooked, "SGD cannot be made again .*it has hooks"),
    "other tensors": (lambda params: torch.optim.SGD([torch.zeros(3)], lr=0.1), "tensors that are no parameters"),
    "no optimizer": (lambda params: [torch.optim.SGD(params, lr=0.1)], "gave back list"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_made_again_is_refused(tmp_path: Path, case: str) -> None:
    make, message = REFUSED[case]
    assert re.search(message, why(emitted(tmp_path, data=2), make).message)


def test_the_callable_sees_the_users_parameters(tmp_path: Path) -> None:
    seen: list[Any] = []

    def spy(named_parameters: Any) -> torch.optim.Optimizer:
        seen.extend(named_parameters)
        return torch.optim.SGD([p for _, p in seen], lr=0.1)

    model = mlp()[0]
    model.layers[1].requires_grad_(False)
    for folder, options in (("a", {"tensor": 2}), ("b", {"pipeline": 2, "microbatches": 2})):
        graph = annotate(capture(model, mlp()[1], mlp()[2], precision="float64"))
        emit(graph, manual_plan(graph, **options), tmp_path / folder)
        seen.clear()
        with program_modules(tmp_path / folder):
            checked(spy, load(tmp_path / folder))
        assert [(n, p.shape, p.requires_grad, p.is_meta) for n, p in seen] == [
            (n, p.shape, p.requires_grad, True) for n, p in model.named_parameters()
        ]


def test_program_refuses_before_a_process_starts(tmp_path: Path) -> None:
    shape = Shape(data=2, zero=(1, 1))
    cases = [
        (adafactor, "Adafactor looks at whole"),
        ("nothing:here", "no optimizer"),
        (raises, "ValueError: as it likes"),
    ]
    for make, message in cases:
        program = Program(mlp_plan(shape), write_mlp(tmp_path, shape), optimizer=make, type_check=False, draw_init=True)
        with pytest.raises(UsageError, match=message) as error:
            program.step(mlp_batch())
        assert error.value.hint and program._processes is None


def raises(params: Params) -> torch.optim.Optimizer:
    raise ValueError("as it likes")
