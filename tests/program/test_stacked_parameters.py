"""Experts that are modules: their parameters are stored as one that expert parallelism distributes, and keep their names at the borders."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mixture_styles
import pytest
import torch
import torch.nn.functional as F
from exactness import subject
from mixture_styles import COUNT, NanoMixture, language
from plain_loop import plain_loop
from resumed import KIND, batch_of, eager, emitted
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler
from workers import WorkerPool

from autopar.capture import capture
from autopar.devices import parse
from autopar.emit import emit
from autopar.graph import Graph
from autopar.price import Pricer
from autopar.program.boxes import Box, pieces
from autopar.program.optimizers import RefusedOptimizerError, checked
from autopar.program.parameters import ALIGNMENT_BYTES, aligned
from autopar.program.world import Layout, LoadedProgram
from autopar.run import remote
from autopar.run.folder import import_runtime, program_modules
from autopar.search.evaluation import reprice
from autopar.search.manual import manual_plan
from autopar.verify import check_plan, make_subject
from autopar.verify.attacks import compare_with_eager

MODEL = "listed experts"


def experts_of(graph: Graph) -> list[str]:
    """The user's names of the experts' parameters, of those that are stacked."""
    return [name for parameter in graph.parameters.values() for name in parameter.stacked]


@functools.cache
def graph_of(dtype: str) -> Graph:
    torch.manual_seed(0)
    model, batch, _ = mixture_styles.STYLES["nanogpt_fused"]()
    return capture(model, batch, precision=dtype)


# -- memory -----------------------------------------------------------------------------------------------------------


def held(folder: str, batch: dict[str, Tensor]) -> dict[str, int]:
    """In a worker: the bytes on this rank of parameters, as aligned in flat buffers, of those of experts, and of the optimizer's state."""
    options = {"optimizer": None, "lr": 1e-3, "seed": 0, "max_norm": None, "state": None}
    trainer = remote.open_trainer(folder, options, device="cpu", timeout_s=60)
    trainer.step(batch)
    sizes = {
        layout.name: trainer.stages[layout.stage].get_parameter(layout.name).nbytes
        for layout in trainer.program.layouts
    }
    stacked = sum(sizes[layout.name] for layout in trainer.program.layouts if layout.stacked)
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    tensors = [value.nbytes for value in states if isinstance(value, Tensor) and value.dim()]
    optimizer, parameters = (sum(aligned(size, ALIGNMENT_BYTES) for size in each) for each in (tensors, sizes.values()))
    return {"parameters": parameters, "experts": stacked, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (2, {"data": 2}),
        (2, {"expert": 2}),
        (4, {"data": 2, "expert": 2}),
        (4, {"expert": 4, "tensor": 2, "fold_experts": "all"}),
    ],
    ids=["data", "expert", "data and expert", "folded"],
)
def test_a_device_has_the_parameters_of_its_experts(
    devices: int, options: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """In the program as in the plan's memory."""
    pool: WorkerPool = request.getfixturevalue(f"workers{devices}")
    graph, cluster = graph_of("float32"), parse(f"{devices}xH100-80GB")
    pricer = Pricer(graph, cluster, "float32")
    plan = reprice(graph, cluster, pricer, manual_plan(graph, **options), "float32")
    emit(graph, plan, tmp_path)
    batch = {value.name: torch.zeros(value.shape, dtype=value.dtype) for value in graph.inputs}
    full = sum(p.value.bytes for p in graph.parameters.values() if p.stacked)
    memory = plan.stages[0].memory
    for measured in pool.run("test_stacked_parameters:held", str(tmp_path), batch):
        assert measured["experts"] == full // options.get("expert", 1)
        assert measured["parameters"] == memory.parameters
        assert measured["optimizer"] == memory.optimizer


# -- the user's names -------------------------------------------------------------------------------------------------


def exchanged(folder: str, read: str, write: str) -> dict[str, Tensor]:
    """In a worker: the state dict after reading a file of weights, which are also written."""
    options = {"optimizer": None, "lr": 0.0, "seed": 0, "max_norm": None, "state": None}
    trainer = remote.open_trainer(folder, options, device="cpu", timeout_s=60)
    trainer.load_weights(read)
    trainer.save_weights(write)
    found: dict[str, Tensor] = trainer.state_dict()
    return found


@pytest.mark.parametrize("kind", ["expert 2", "data 2, zero 3", "tensor 2"])
def test_weights_have_the_names_of_the_model(kind: str, workers2: WorkerPool, tmp_path: Path) -> None:
    given = subject(MODEL)
    assert set(experts_of(given.graph)) == {name for name in given.state if ".experts." in name}
    program = emitted(MODEL, KIND[kind].plan(given.graph), tmp_path / "program")
    state = {name: tensor + 1 for name, tensor in given.state.items()}
    (tmp_path / "in").mkdir()
    save_file(state, tmp_path / "in" / "model.safetensors")
    call = (program, str(tmp_path / "in"), str(tmp_path / "out"))
    found = workers2.run("test_stacked_parameters:exchanged", *call)[0]
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == set(written) == set(state)
    assert all(torch.equal(found[name], state[name]) and torch.equal(written[name], state[name]) for name in state)


def test_the_pieces_of_a_stack_are_those_of_its_parameters() -> None:
    """Of experts 2 and 3 of three that are padded to four, a range of elements that begins and ends inside a row."""
    shape, names = (3, 2, 4), tuple(f"experts.{i}.w" for i in range(3))
    layout = Layout(
        0,
        "w",
        "experts.*.w",
        (2, 8),
        (2, 4, 4),
        shape,
        (4, 2, 4),
        torch.float64,
        True,
        (),
        (("expert", 0),),
        (),
        None,
        names,
    )
    window = layout.window({"expert": (1, 2)})
    values = torch.arange(12.0)
    found = list(pieces(("optimizer", layout.original, "exp_avg"), layout, window, values, 3))
    assert [(p.path, p.shape, p.box, p.values.flatten().tolist()) for p in found] == [
        (("optimizer", "experts.2.w", "exp_avg"), (2, 8), Box((0, 7), (1, 1)), [0.0]),
        (("optimizer", "experts.2.w", "exp_avg"), (2, 8), Box((1, 4), (1, 4)), [1.0, 2.0, 3.0, 4.0]),
    ]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (None, ["*.down", "*.up"]),
        ("wrapped", ["*.down", "*.up"]),
        ("renamed", ["*.*", "0.down"]),
    ],
)
def test_each_stack_has_a_name_of_its_own(change: str | None, names: list[str]) -> None:
    """Of the words that its parameters have in common, or of the first parameter."""
    model, batch = changed(change and globals()[change])
    stacks = [parameter for parameter in capture(model, batch).parameters.values() if parameter.stacked]
    prefix = "blocks.0.mixture.experts."
    found = [each.original.removeprefix(prefix) for each in stacks if each.original.startswith(prefix)]
    assert sorted(name.split(",")[0] for name in found) == [f"{n}.{leaf}" for n in names for leaf in ("bias", "weight")]
    assert len({each.original for each in stacks}) == len({each.name for each in stacks}) == len(stacks)


# -- experts that are stored separately -------------------------------------------------------------------------------


def tied(mixture: Any) -> None:
    mixture.experts[1].up.weight = mixture.experts[0].up.weight


def partly_frozen(mixture: Any) -> None:
    mixture.experts[1].up.weight.requires_grad_(False)


def frozen(mixture: Any) -> None:
    for expert in mixture.experts:
        expert.up.requires_grad_(False)


def wrapped(mixture: Any) -> None:
    mixture.experts[1] = nn.Sequential(mixture.experts[1])


class Renamed(nn.Module):
    def __init__(self, expert: Any) -> None:
        super().__init__()
        self.first, self.second = expert.up, expert.down

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x)))


def renamed(mixture: Any) -> None:
    mixture.experts[1] = Renamed(mixture.experts[1])


def changed(change: Callable[[Any], None] | None) -> tuple[nn.Module, Any]:
    def mixture() -> nn.Module:
        made = NanoMixture()
        if change is not None:
            change(made)
        return made

    torch.manual_seed(0)
    model, batch, _ = language(mixture)()
    return model, batch


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (None, ""),
        (frozen, ""),
        (wrapped, ""),
        (renamed, ""),
        (tied, "blocks.0.mixture.experts.0.up.weight belongs to several experts"),
        (partly_frozen, "experts.0.up.weight and blocks.0.mixture.experts.1.up.weight is trained"),
    ],
)
def test_experts_whose_parameters_differ_are_stored_separately(
    change: Callable[[Any], None] | None, reason: str, workers2: WorkerPool
) -> None:
    """They stay a mixture, and exact; a note gives the reason."""
    made = make_subject(*changed(change))
    assert compare_with_eager(made).exact
    assert max(cls.experts for cls in made.graph.classes.values()) == COUNT
    assert any(name.endswith("experts.0.up.weight") for name in experts_of(made.graph)) is not bool(reason)
    assert any(f"parameters of all {COUNT} experts" in note and reason in note for note in made.graph.notes) is bool(
        reason
    )
    outcome = check_plan(made, manual_plan(made.graph, expert=2, zero=1), workers2)
    assert outcome.error.exact, outcome.error


# -- the optimizer's groups -------------------------------------------------------------------------------------------


def loaded(folder: Path) -> LoadedProgram:
    emit(graph_of("float32"), manual_plan(graph_of("float32"), expert=2), folder)
    with program_modules(folder):
        program: LoadedProgram = import_runtime(folder).load(folder)
    return program


def test_experts_of_one_mixture_are_in_one_group(tmp_path: Path) -> None:
    program = loaded(tmp_path)

    def by_size(named_parameters: Any) -> torch.optim.Optimizer:
        named = list(named_parameters)
        matrices, vectors = [p for _, p in named if p.ndim > 1], [p for _, p in named if p.ndim < 2]
        return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])

    def by_expert(kind: Any, named_parameters: Any) -> torch.optim.Optimizer:
        first = [p for name, p in named_parameters if ".experts.0." in name and p.ndim == 2]
        others = [p for name, p in named_parameters if ".experts.0." not in name and p.ndim == 2]
        return kind([{"params": first, "lr": 0.1}, {"params": others}], lr=0.2)

    groups = checked(by_size, program).optimizers[0].param_groups
    biases = [name for name in experts_of(graph_of("float32")) if name.endswith("bias")]
    stand_ins = checked(by_size, program).stand_ins
    assert biases and all(stand_ins[name].ndim == 1 for name in biases) and groups[1]["weight_decay"] == 0.0
    with pytest.raises(RefusedOptimizerError, match=r"experts\.0.* and .*experts\.1.* are in different groups"):
        checked(lambda named_parameters: by_expert(torch.optim.AdamW, list(named_parameters)), program)
    # each full matrix has an update of its own
    checked(lambda named_parameters: by_expert(torch.optim.Muon, list(named_parameters)), program)
    with pytest.raises(RefusedOptimizerError, match=r"experts\.0.* and .*experts\.1.* are in different optimizers"):
        checked(by_optimizer, program)


def by_optimizer(named_parameters: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW([parameter]) for _, parameter in named_parameters]


def one_group_each(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [parameter]} for parameter in params], lr=1e-2)


def equal_rates(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LinearLR(optimizer, total_iters=5)


def unequal_rates(optimizer: torch.optim.Optimizer, first: int = 0) -> LRScheduler:
    """The rates of groups differ from step ``first`` on."""
    factors = [lambda step, i=index: 0.5**i if step >= first else 1.0 for index in range(len(optimizer.param_groups))]
    return LambdaLR(optimizer, factors)


def rates_unequal_late(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return unequal_rates(optimizer, first=2)


def stepped(folder: str, scheduler: str, batches: list[Any]) -> tuple[int, str, dict[str, Tensor]]:
    """In a worker: the number of steps until one is refused, why it is, and the state dict."""
    options = {
        "optimizer": one_group_each,
        "scheduler": globals()[scheduler],
        "lr": 0,
        "seed": 0,
        "max_norm": None,
        "state": f"{folder}/initial.pt",
    }
    trainer, reason = remote.open_trainer(folder, options, device="cpu", timeout_s=60), ""
    try:
        for batch in batches:
            trainer.step(batch)
    except ValueError as error:
        reason = str(error)
    return trainer.steps, reason, trainer.state_dict()


def test_groups_with_equal_options_train_as_on_one_device(workers2: WorkerPool, tmp_path: Path) -> None:
    given, folder = subject(MODEL), tmp_path / "program"
    program = emitted(MODEL, KIND["expert 2"].plan(given.graph), folder)
    batches = [batch_of(MODEL, step) for step in range(3)]
    steps, reason, found = workers2.run("test_stacked_parameters:stepped", program, "equal_rates", batches)[0]
    assert (steps, reason) == (3, "")
    model, loss_of = eager(MODEL)
    plain_loop(model, [functools.partial(loss_of, batch) for batch in batches], one_group_each, equal_rates)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)


def test_groups_that_a_scheduler_gives_other_rates_are_refused(workers2: WorkerPool, tmp_path: Path) -> None:
    """Before the first step, or before the step that would have the wrong rate."""
    given, folder = subject(MODEL), tmp_path / "program"
    program, refused = emitted(MODEL, KIND["expert 2"].plan(given.graph), folder), r"with lr .* and .* one tensor"
    with program_modules(folder), pytest.raises(RefusedOptimizerError, match=refused):
        checked(one_group_each, import_runtime(folder).load(folder), unequal_rates)
    batches = [batch_of(MODEL, step) for step in range(3)]
    for steps, reason, _ in workers2.run("test_stacked_parameters:stepped", program, "rates_unequal_late", batches):
        assert steps == 2
        assert "are in different groups of the optimizer, with lr" in reason


# -- optimizer states of experts that were stored separately -----------------------------------------------------------


class ReadsOne(NanoMixture):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.experts[0].up.weight.sum()


def read_elsewhere(mixture: Any) -> None:
    mixture.__class__ = ReadsOne


def first_frozen(mixture: Any) -> None:
    mixture.experts[0].up.weight.requires_grad_(False)


def saved(folder: str, batch: dict[str, Tensor], target: str, steps_of_expert_1: int = 1) -> None:
    """In a worker: a step, and a checkpoint in which expert 1 has made ``steps_of_expert_1``."""
    trainer = opened(folder)
    trainer.step(batch)
    for master in (master for group in trainer._groups for master in group.masters):
        if master.layout.original == "blocks.0.mixture.experts.1.up.weight":
            trainer.optimizer.state[master.tensor]["step"].fill_(steps_of_expert_1)
    trainer.save(target)


def opened(folder: str) -> Any:
    options = {"optimizer": None, "lr": 0.1, "seed": 0, "max_norm": None, "state": None}
    return remote.open_trainer(folder, options, device="cpu", timeout_s=60)


def loading(folder: str, source: str) -> tuple[str, bool, list[float]]:
    """In a worker: why a checkpoint isn't loaded, whether the state is as before, and the steps of the experts' optimizer states."""
    trainer, reason = opened(folder), ""
    before = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    try:
        trainer.load(source)
    except RuntimeError as error:
        reason = str(error)
    masters = [master for group in trainer._groups for master in group.masters if master.layout.stacked]
    steps = [float(trainer.optimizer.state[m.tensor]["step"]) for m in masters if m.tensor in trainer.optimizer.state]
    after = trainer.state_dict()
    return reason, all(torch.equal(after[name], before[name]) for name in before), steps


@pytest.mark.parametrize(
    ("change", "steps", "reason"),
    [
        (read_elsewhere, 1, ""),
        (
            read_elsewhere,
            4,
            "the checkpoint has optimizer.blocks.0.mixture.experts.0.up.weight.step 1.0 and "
            "optimizer.blocks.0.mixture.experts.1.up.weight.step 4.0, and the program updates both parameters as one tensor",
        ),
        (
            first_frozen,
            1,
            "of blocks.0.mixture.experts.1.up.weight, and none of blocks.0.mixture.experts.0.up.weight: the program updates them",
        ),
    ],
    ids=["equal steps", "unequal steps", "no state of one"],
)
def test_states_of_experts_become_a_stack_if_they_are_of_one_step(
    change: Callable[[Any], None], steps: int, reason: str, workers2: WorkerPool, tmp_path: Path
) -> None:
    batch: dict[str, Tensor] = {}
    for name, made in (("separate", change), ("stacked", None)):
        graph = capture(*changed(made))
        emit(graph, manual_plan(graph, expert=2), tmp_path / name)
        batch = {value.name: torch.zeros(value.shape, dtype=value.dtype) for value in graph.inputs}
    target = str(tmp_path / "checkpoints")
    workers2.run("test_stacked_parameters:saved", str(tmp_path / "separate"), batch, target, steps)
    ranks = workers2.run("test_stacked_parameters:loading", str(tmp_path / "stacked"), target)
    assert ranks[0][1] is bool(reason)  # the other ranks' state dicts are empty
    for found, _, numbers in ranks:
        assert (reason in found) if reason else found == ""
        assert set(numbers) == (set() if reason else {1.0})
