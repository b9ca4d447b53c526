"""Optimizers see the user's parameters: exact as on one device, or refused by name before anything starts."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import mlp, subject
from plain_loop import plain_loop
from programs import Shape, mlp_batch, mlp_model, mlp_plan, write_mlp
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from workers import WorkerPool

from autopar.capture import capture
from autopar.emit import emit
from autopar.errors import UsageError
from autopar.program import optimizer_state
from autopar.program.optimizer_state import described
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


class Eager(Lamb):
    """Looks at its first parameter, and a rank may have none."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.device = next(p.device for group in self.param_groups for p in group["params"])


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


def per_tensor(params: Params) -> torch.optim.Optimizer:
    return PerTensorLamb(params, clamp=0.5)


def pair(params: Params) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest."""
    matrices, others = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01, weight_decay=0.2)]


def warm_cosine(optimizer: torch.optim.Optimizer) -> LRScheduler:
    warm = lr_scheduler.LinearLR(optimizer, 0.2, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.CosineAnnealingLR(optimizer, 4)], [2])


def one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """It also changes the betas; at every step the group that comes second has the larger rate."""
    return lr_scheduler.OneCycleLR(optimizer, [0.02, 0.05], total_steps=8)


def by_lambda(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


SCHEDULERS: dict[str, Any] = {
    "by_ndim": warm_cosine,
    "by_name": one_cycle,
    "pair": warm_cosine,
    "per_tensor": by_lambda,
}
"""Of the optimizers that have one; the others' rates are constant."""
NORM = 0.5


def train(folder: str, state: dict[str, Tensor], names: list[str]) -> dict[str, dict[str, Tensor]]:
    return trained(folder, state, [mlp_batch(seed) for seed in range(3)], names)


def trained(
    folder: str, state: dict[str, Tensor], batches: list[dict[str, Tensor]], names: list[str]
) -> dict[str, dict[str, Tensor]]:
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        world = runtime.start(program)
        found = {}
        for name in names:
            make, schedule = globals()[name], SCHEDULERS.get(name)
            trainer = runtime.Trainer(program, world, optimizer=make, scheduler=schedule, state=state, max_norm=NORM)
            for batch in batches:
                trainer.step(batch)
            found[name] = trainer.state_dict()
        return found


def values_after(name: str, model: nn.Module, losses: list[Callable[[], Tensor]]) -> dict[str, Tensor]:
    plain_loop(model, losses, globals()[name], SCHEDULERS.get(name), NORM)
    return {name: value.detach() for name, value in model.state_dict().items()}


@functools.cache
def one_process(name: str) -> dict[str, Tensor]:
    model = mlp_model()
    return values_after(name, model, [functools.partial(model, **mlp_batch(seed)) for seed in range(3)])


def check(pool: WorkerPool, folder: Path, shape: Shape, names: list[str]) -> None:
    state = {name: value.detach() for name, value in mlp_model().state_dict().items()}
    found = pool.run("test_run_optimizers:train", str(write_mlp(folder, shape)), state, names)[0]
    for name in names:
        wanted = one_process(name)
        assert set(found[name]) == set(wanted)
        assert max(float((wanted[n] - state[n]).abs().max()) for n in wanted) > 1e-3
        assert max(float((found[name][n] - wanted[n]).abs().max()) for n in wanted) <= 1e-9, name


ELEMENTWISE = ["by_ndim", "by_name", "by_order", "with_names", "some", "adagrad", "signs"]
WHOLE = ["adafactor", "muon", "pair", "per_tensor"]


@pytest.mark.parametrize(
    "shape",
    [*(Shape(data=2, zero=(z, z)) for z in range(4)), Shape(tensor=2), Shape(pipeline=2, microbatches=2)],
    ids=str,
)
def test_they_are_exact_under_every_plan(workers2: WorkerPool, tmp_path: Path, shape: Shape) -> None:
    """The program has parts of a fused projection, and a tied parameter: under the pipeline, a copy in either stage."""
    check(workers2, tmp_path, shape, [*ELEMENTWISE, *WHOLE])


@pytest.mark.parametrize("shape", [Shape(data=2, tensor=2, zero=(3, 1)), Shape(2, 1, 2, microbatches=2)], ids=str)
def test_whole_tensors_of_two_axes(workers4: WorkerPool, tmp_path: Path, shape: Shape) -> None:
    check(workers4, tmp_path, shape, ["adafactor", "pair"])


# -- optimizers that read all parameters at once: on an emitted program whose projections are not fused -----------------


def emitted(folder: Path, **options: Any) -> Path:
    graph = subject("mlp").graph
    emit(graph, manual_plan(graph, **options), folder)
    return folder


def one_process_of_mlp(name: str) -> dict[str, Tensor]:
    model, (x, y), loss_fn = mlp()
    model = model.double()
    model.load_state_dict(subject("mlp").state)
    return values_after(name, model, [lambda: loss_fn(model(x), y)] * 3)


@pytest.mark.parametrize("options", [{"data": 2}, {"data": 2, "microbatches": 2}], ids=str)
def test_whole_tensor_ones_are_exact_where_masters_are_whole(
    workers2: WorkerPool, tmp_path: Path, options: dict[str, int]
) -> None:
    given, names = subject("mlp"), ["muon", "adafactor", "lamb"]
    call = (str(emitted(tmp_path, **options)), given.state, [given.batch] * 3, names)
    found = workers2.run("test_run_optimizers:trained", *call)[0]
    for name in names:
        wanted = one_process_of_mlp(name)
        assert max(float((wanted[n] - given.state[n]).abs().max()) for n in wanted) > 1e-3
        assert max(float((found[name][n] - wanted[n]).abs().max()) for n in wanted) <= 1e-9, name


def why(folder: Path, make: Any) -> RefusedOptimizerError:
    with program_modules(folder), pytest.raises(RefusedOptimizerError) as error:
        checked(make, load(folder))
    assert error.value.hint
    return error.value


CUTS = [
    ({"data": 2, "zero": 1}, "no rank has the full .*: ZeRO 1 divides it over data"),
    ({"data": 2, "zero": 3}, "no rank has the full .*: ZeRO 3 divides it over data"),
    ({"tensor": 2}, "no rank has the full layers.0.0.weight: the axis tensor shards it"),
    ({"pipeline": 2, "microbatches": 2}, "each pipeline stage has only some of them"),
]


@pytest.mark.parametrize(("options", "message"), CUTS, ids=str)
def test_unknown_ones_are_refused_by_name_where_ranks_have_parts_of_the_model(
    tmp_path: Path, options: dict[str, int], message: str
) -> None:
    refused = why(emitted(tmp_path, **options), lamb)
    assert re.search(f"Lamb may read all parameters at once, but {message}", refused.message)
    assert "per_tensor = True" in refused.hint and "elementwise = True" in refused.hint


def test_parts_of_a_fused_projection_are_refused_by_name(tmp_path: Path) -> None:
    message = "no rank has the full layers.0.gate_up.weight: it is a fused projection"
    assert message in why(write_mlp(tmp_path, Shape()), lamb).message


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
    "not made again": (lambda params: Odd(params, 3), "Odd cannot be rebuilt .*its class raised TypeError"),
    "changes options": (Doubling, "Doubling cannot be rebuilt .*changes the option lr"),
    "scheduler": (scheduled, "SGD cannot be rebuilt .*was replaced"),
    "hooks": (hooked, "SGD cannot be rebuilt .*it has hooks"),
    "other tensors": (lambda params: torch.optim.SGD([torch.zeros(3)], lr=0.1), "tensors that are no parameters"),
    "no optimizer": (lambda params: {"sgd": torch.optim.SGD(params, lr=0.1)}, "returned dict"),
    "an empty list": (lambda params: [], "returned an empty list"),
    "one parameter twice": (lambda params: [by_ndim(params), some(params)], "two optimizers have layers.0.0.bias"),
    "needs parameters": (Eager, "Eager cannot be rebuilt .*its class raised StopIteration"),
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


def test_schedulers_that_are_refused(tmp_path: Path) -> None:
    folder = emitted(tmp_path, data=2)
    cases: list[tuple[Any, str]] = [
        (lr_scheduler.ReduceLROnPlateau, "ReduceLROnPlateau waits for a measure"),
        (lambda optimizer: None, "the scheduler's function returned NoneType"),
        (lambda optimizer: by_lambda(torch.optim.SGD([torch.zeros(1)])), "LambdaLR is for another optimizer"),
    ]
    for make, message in cases:
        with program_modules(folder), pytest.raises(RefusedOptimizerError, match=message) as error:
            checked(by_ndim, load(folder), make)
        assert error.value.hint


class Halving:
    """A callable with a state of its own: how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.9**self.calls


EVERY: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "LambdaLR": by_lambda,
    "LambdaLR of an object": lambda o: lr_scheduler.LambdaLR(o, [Halving(), lambda step: 0.5**step]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 6, 7]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=6),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 9, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "SequentialLR": warm_cosine,
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.5, total_iters=6), lr_scheduler.MultiStepLR(o, [3, 6])]
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, 4),
    "CyclicLR with a function": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, scale_fn=lambda x: 0.5**x),
    "OneCycleLR": one_cycle,
}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_every_scheduler_goes_on_from_its_json(name: str, lr: float | Tensor) -> None:
    """The options of the groups, and the scheduler's own state, after 4 of 8 steps."""

    def made() -> tuple[torch.optim.Optimizer, LRScheduler]:
        groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": copy.deepcopy(lr)} for _ in range(2)]
        optimizer = torch.optim.SGD(groups, lr=0.3, momentum=0.9)
        return optimizer, EVERY[name](optimizer)

    def steps(optimizer: torch.optim.Optimizer, scheduler: LRScheduler) -> list[list[float]]:
        found = []
        for _ in range(4):
            optimizer.step()
            scheduler.step()
            found.append([float(group[key]) for group in optimizer.param_groups for key in ("lr", "momentum")])
        return found

    straight, half = made(), made()
    wanted = [steps(*straight), steps(*straight)]
    assert steps(*half) == wanted[0] and len({tuple(each) for each in wanted[0] + wanted[1]}) > 1
    groups, facts = json.loads(json.dumps((described(half[0])["groups"], optimizer_state.described_scheduler(half[1]))))
    optimizer, scheduler = made()
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        group.update(
            {key: torch.tensor(value) if isinstance(group[key], Tensor) else value for key, value in options.items()}
        )
    optimizer_state.check_scheduler(scheduler, facts)
    optimizer_state.restore_scheduler(scheduler, facts)
    assert steps(optimizer, scheduler) == wanted[1]


def test_a_learning_rate_that_is_a_tensor_has_a_schedule(tmp_path: Path) -> None:
    """The check makes a scheduler too, which writes into its own learning rate alone."""
    folder = emitted(tmp_path, data=2)
    with program_modules(folder):
        (model,) = checked(with_tensor, load(folder), warm_cosine).optimizers
    assert float(model.param_groups[0]["lr"]) == 0.5


def with_tensor(params: Params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=torch.tensor(0.5))


def test_a_program_trains_by_schedule_and_goes_on(tmp_path: Path) -> None:
    """Two steps in one program and two in the next, of another plan, against four steps of a plain loop."""
    own = {"optimizer": pair, "scheduler": "test_run_optimizers:warm_cosine", "max_norm": NORM, "type_check": False}
    model = mlp_model()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for number, shape in enumerate((Shape(data=2, zero=(3, 1)), Shape(tensor=2))):
        folder = write_mlp(tmp_path / str(number), shape)
        start: dict[str, Any] = {"draw_init": True} if number else {"state": state}
        with Program(mlp_plan(shape), folder, **own, **start) as program:
            if number:
                assert program.load(tmp_path / "saved") == 2
            for seed in (2 * number, 2 * number + 1):
                program.step(mlp_batch(seed))
            program.save(tmp_path / "saved")
            found = program.state_dict()
    wanted = values_after("pair", model, [functools.partial(model, **mlp_batch(seed)) for seed in range(4)])
    assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) <= 1e-9


def test_program_refuses_before_a_process_starts(tmp_path: Path) -> None:
    shape = Shape(data=2, zero=(1, 1))
    cases = [
        (lamb, "Lamb may read all parameters at once"),
        ("nothing:here", "no optimizer"),
        (raises, "ValueError: as it likes"),
        (None, "ReduceLROnPlateau waits for"),
        (by_ndim, "ReduceLROnPlateau waits for"),
    ]
    for make, message in cases:
        how: dict[str, Any] = {"optimizer": make, "type_check": False, "draw_init": True}
        how |= {"scheduler": lr_scheduler.ReduceLROnPlateau} if "Plateau" in message else {}
        program = Program(mlp_plan(shape), write_mlp(tmp_path, shape), **how)
        with pytest.raises(UsageError, match=message) as error:
            program.step(mlp_batch())
        assert error.value.hint and program._processes is None


def raises(params: Params) -> torch.optim.Optimizer:
    raise ValueError("as it likes")
