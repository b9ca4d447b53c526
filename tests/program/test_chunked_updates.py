"""Updates of masters whose gradients and moments are in bfloat16: to the last bit the arithmetic that is described, under every plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import MODELS
from test_run_optimizers import Signs
from tiers import in_short
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import capture, flatten_batch
from autopar.emit import emit
from autopar.graph import Graph
from autopar.plan import NARROW, NARROW_GRADIENTS, NARROW_MOMENTS, Plan
from autopar.program.box_exchange import MasterValues
from autopar.program.boxes import Box, part_of
from autopar.program.chunked_updates import MOMENTS, positions, round_into, thresholds_at
from autopar.program.optimizers import checked
from autopar.program.world import Layout
from autopar.run import remote
from autopar.run.folder import import_runtime, program_modules
from autopar.search import manual_plan
from autopar.shard import annotate

# -- rounding ---------------------------------------------------------------------------------------------------------


def test_an_element_gets_every_threshold_once() -> None:
    """So over 2**16 steps its roundings have the mean of exact arithmetic; over 64 steps they are near it, at any position."""
    steps = torch.arange(2**16)
    assert thresholds_at(torch.full_like(steps, 12345), steps).unique().numel() == 2**16
    values = (
        1 + torch.rand(1000, generator=torch.Generator().manual_seed(0)) / 128
    )  # between two neighbours of bfloat16
    rounded = torch.zeros(1000, dtype=torch.bfloat16)
    sums = torch.zeros(1000, dtype=torch.float64)
    for step in range(64):
        round_into(rounded, values.clone(), thresholds_at(torch.arange(1000), torch.tensor(float(step))))
        sums += rounded
    assert (sums / 64 - values).abs().max() < 3 / 64 / 128  # roundings at random would be within 8 / 64 at best


def test_what_bfloat16_has_stays() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    values[:4] = torch.tensor([0.0, -0.0, math.inf, -math.inf])
    rounded = torch.empty_like(values)
    round_into(rounded, values.float(), torch.full((1000,), 2**16 - 1, dtype=torch.int32))
    assert torch.equal(rounded.view(torch.int16), values.view(torch.int16))


def second_moment(rounding: Callable[[Tensor, Tensor, int], None]) -> float:
    """The mean second moment after 1,000 steps with gradients around 1 and 1,500 with gradients around 0.1, to what it is in float32."""
    generator = torch.Generator().manual_seed(0)
    stored, exact = torch.zeros(1000, dtype=torch.bfloat16), torch.zeros(1000)
    for step in range(2500):
        gradient = torch.randn(1000, generator=generator) * (1.0 if step < 1000 else 0.1)
        wide = stored.float().mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        exact.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        rounding(stored, wide, step)
    return float(stored.float().mean() / exact.mean())


def test_the_second_moment_follows_the_gradients_and_to_nearest_it_would_not() -> None:
    where = torch.arange(1000)
    by_thresholds = second_moment(lambda stored, wide, step: round_into(stored, wide, thresholds_at(where, step)))
    assert by_thresholds == pytest.approx(1, abs=0.01)
    assert second_moment(lambda stored, wide, _: stored.copy_(wide)) > 3


@pytest.mark.parametrize("part", [None, (0, 4, 8), (2, 3, 2)])
def test_positions_are_those_in_the_whole_parameter(part: tuple[int, int, int] | None) -> None:
    original = torch.arange(16 * 6 * 8).view(16, 6, 8)
    whole = original if part is None else original.narrow(*part)
    sharded = (("a", 1), ("b", 2)) if part is None or part[0] == 0 else (("a", 0), ("b", 1))
    shape = tuple(whole.shape)
    layout = Layout(0, "w", "w", (16, 6, 8), part, shape, shape, torch.bfloat16, True, (), sharded, (), None)
    coordinates = {"a": (1, 2), "b": (0, 2)}
    for dim, (start, extent) in enumerate(layout.window(coordinates)):
        whole = whole.narrow(dim, start, extent)
    found = positions(layout, coordinates, 7, whole.numel(), torch.device("cpu"))
    assert torch.equal(found, whole.flatten()[7:])


# -- programs ---------------------------------------------------------------------------------------------------------


def llama() -> tuple[Graph, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, batch, _ = MODELS["llama"]()
    graph = annotate(capture(model.train(), batch, precision="bfloat16", name="llama"))
    return graph, flatten_batch(graph.structure, batch)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def captured() -> tuple[Graph, dict[str, Tensor]]:
    return llama()


def written(graph: Graph, folder: Path, allow: tuple[str, ...] = NARROW, states: str = "", **pins: Any) -> str:
    """The folder of a program whose updates take parts of parameters: chunks have 1,000 elements."""
    graph = replace(graph, narrow=allow)
    plan: Plan = manual_plan(graph, precision="bfloat16", **pins)
    if states:
        layers = (replace(layer, strategy=layer.strategy.with_options(states=states)) for layer in plan.layers)
        plan = replace(plan, layers=tuple(layers), nvme_path=str(folder.parent))
    emit(graph, plan, folder)
    file = folder / "runtime" / "chunked_updates.py"
    assert file.exists() == bool(allow)
    if allow:
        text = file.read_text()
        file.write_text(text.replace("CHUNK_ELEMENTS = 2**22", "CHUNK_ELEMENTS = 1000"))
        assert text != file.read_text()
    return str(folder)


def opened(folder: str) -> Any:
    options = {"optimizer": amsgrad, "lr": None, "seed": 0, "max_norm": None, "state": None}
    return remote.open_trainer(folder, options, device="cpu", timeout_s=60)


def amsgrad(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, amsgrad=True)


Moments = list[tuple[tuple[str, str], tuple[int, ...], tuple[int, ...], tuple[int, ...], Tensor]]
"""Parts of a rank: the key and the parameter's name, the parameter's shape, the offsets and sizes of the box, the values."""


def moments(trainer: Any) -> Moments:
    """Copies of this rank's parts of the optimizer's state, without the number of steps."""
    state = trainer.optimizer.state
    found = [(m, k, v) for group in trainer._groups for m in group.masters for k, v in state[m.tensor].items()]
    return [
        ((key, master.layout.original), piece.shape, piece.box.offsets, piece.box.sizes, piece.values.clone())
        for master, key, value in found
        if key != "step"
        for piece in MasterValues((), master, value).pieces(trainer.world)
    ]


Step = tuple[dict[str, Tensor], dict[str, Tensor], Moments, list[torch.dtype]]


def stepped(folder: str, batch: dict[str, Tensor], steps: int) -> list[Step]:
    """Of every step the gradients, and then the parameters and the moments; and the dtypes of the gradients."""
    trainer, found = opened(folder), []
    found.append(({}, trainer.state_dict(), [], []))
    for _ in range(steps):
        trainer.forward_backward(batch)
        gradients = trainer.gradients()
        dtypes = [master.gradient.dtype for group in trainer._groups for master in group.masters]
        trainer.update()
        found.append((gradients, trainer.state_dict(), moments(trainer), dtypes))
    return found


def simulated(values: dict[str, Tensor], gradients: list[dict[str, Tensor]]) -> list[dict[str, dict[str, Tensor]]]:
    """In one process: torch's optimizer in float32, and after each step the moments rounded by arithmetic on integers."""
    params = {name: nn.Parameter(values[name].clone()) for name in gradients[0]}
    optimizer = amsgrad(list(params.values()))
    found = []
    for step, own in enumerate(gradients, 1):
        for name, param in params.items():
            param.grad = own[name]
        optimizer.step()
        for param in params.values():
            for key in MOMENTS:
                threshold = (torch.arange(param.numel()) * 27147 + step * 40503) % 2**16
                bits = optimizer.state[param][key].view(torch.int32).long() + threshold.view(param.shape)
                optimizer.state[param][key] = (bits // 2**16 * 2**16).to(torch.int32).view(torch.float32)
        states = {name: {k: v.clone() for k, v in optimizer.state[p].items()} for name, p in params.items()}
        found.append({name: {"": p.detach().clone(), **states[name]} for name, p in params.items()})
    return found


PLANS: dict[str, dict[str, Any]] = {
    "data 2": {"data": 2},
    "ZeRO 1": {"data": 2, "zero": 1},
    "ZeRO 3": {"data": 2, "zero": 3, "microbatches": 2},
    "tensor 2": {"tensor": 2},
    "ZeRO 1, states on the host": {"data": 2, "zero": 1, "states": "host"},
    "ZeRO 3, states on NVMe": {"data": 2, "zero": 3, "states": "nvme"},
    "zero bubble, ZeRO 2": {"pipeline": 2, "schedule": "zero-bubble", "microbatches": 2, "zero": 2},
}


@pytest.mark.parametrize(
    "name",
    in_short(
        ("one device", *PLANS),
        *("one device", "tensor 2", "ZeRO 1, states on the host", "ZeRO 3, states on NVMe", "zero bubble, ZeRO 2"),
    ),
)
def test_steps_are_those_of_one_process_to_the_last_bit(
    name: str, captured: tuple[Graph, dict[str, Tensor]], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Two steps under each plan, from the gradients that the program has; the second starts from rounded moments."""
    graph, batch = captured
    pool: WorkerPool = request.getfixturevalue("workers2" if name in PLANS else "workers1")
    folder = written(graph, tmp_path / "program", **PLANS.get(name, {}))
    ranks = pool.run("test_chunked_updates:stepped", folder, batch, 2)
    (_, values, _, _), *steps = ranks[0]
    assert {dtype for rank in ranks for step in rank for dtype in step[3]} == {torch.bfloat16}
    for number, state in enumerate(simulated(values, [gradients for gradients, *_ in steps]), 1):
        after = ranks[0][number][1]
        assert all(torch.equal(own[""], after[name]) for name, own in state.items())
        pieces = [entry for rank in ranks for entry in rank[number][2]]
        assert {names for names, *_ in pieces} == {(k, n) for n in state for k in (*MOMENTS, "max_exp_avg_sq")}
        for (key, original), _, offsets, sizes, part in pieces:
            assert part.dtype == (torch.bfloat16 if key in MOMENTS else torch.float32)
            assert torch.equal(part.float(), part_of(state[original][key], Box(offsets, sizes))), (original, key)


def resumed(folder: str, batch: dict[str, Tensor], read: str, write: str) -> tuple[Moments, dict[str, Tensor], Moments]:
    """The moments after a resume; the parameters and the moments after another step, of which there is a checkpoint."""
    trainer = opened(folder)
    if read:
        trainer.load(read)
    before = moments(trainer) if read else []
    trainer.step(batch)
    trainer.save(write)
    return before, trainer.state_dict(), moments(trainer)


def whole(ranks: list[tuple[Moments, Any, Moments]], at: int) -> dict[tuple[str, str], Tensor]:
    """The moments of all ranks as whole tensors."""
    found: dict[tuple[str, str], Tensor] = {}
    for names, shape, offsets, sizes, values in (entry for rank in ranks for entry in rank[at]):
        tensor = found.setdefault(names, torch.full(shape, math.nan, dtype=values.dtype))
        part_of(tensor, Box(offsets, sizes)).copy_(values)
    return found


def same(some: dict[tuple[str, str], Tensor], others: dict[tuple[str, str], Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


Run = Callable[[str, str, str], Any]


@pytest.fixture
def run(captured: tuple[Graph, dict[str, Tensor]], workers2: WorkerPool, tmp_path: Path) -> Run:
    """Runs ``resumed`` in the program of a name, from and to the checkpoints of these names."""
    graph, batch = captured
    pins: dict[str, dict[str, Any]] = {
        "first": {"data": 2, "zero": 1},
        "tensor": {"tensor": 2},
        "host": {"data": 2, "zero": 3, "states": "host"},
        "wide": {"data": 2, "allow": ()},
    }

    def run(name: str, read: str, write: str) -> Any:
        folder = tmp_path / name
        text = str(folder) if folder.exists() else written(graph, folder, **pins[name])
        files = read and str(tmp_path / read), str(tmp_path / write)
        return workers2.run("test_chunked_updates:resumed", text, batch, *files)

    return run


@pytest.mark.parametrize("name", ["first", "tensor", "host"])
def test_any_plan_resumes_with_the_same_moments(name: str, run: Run) -> None:
    first = run("first", "", "one")
    assert same(whole(run(name, "one", "two"), 0), whole(first, 2))


def test_a_resumed_training_goes_on_bit_for_bit(run: Run) -> None:
    run("first", "", "one")
    assert same(*(whole(run("first", "one", write), 2) for write in ("two", "three")))


def test_moments_of_a_plan_without_the_deviation_are_float32(run: Run) -> None:
    """They have the values in bfloat16, and are rounded when a plan with the deviation reads them."""
    narrow, wide = whole(run("first", "", "one"), 2), whole(run("wide", "one", "two"), 0)
    assert all(tensor.dtype == torch.float32 for tensor in wide.values())
    assert same({name: t.float() for name, t in narrow.items()}, wide)
    rounded = whole(run("first", "two", "three"), 0)
    assert {tensor.dtype for (key, _), tensor in rounded.items() if key in MOMENTS} == {torch.bfloat16}


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allow", "optimizer", "message"),
    [
        (
            NARROW_MOMENTS,
            lambda params: torch.optim.SGD(params, lr=0.1),
            r"SGD does not support that \(supported: Adam, AdamW",
        ),
        (
            NARROW_MOMENTS,
            lambda params: torch.optim.Muon([p for p in params if p.ndim == 2]),
            "Muon does not support that",
        ),
        (NARROW_MOMENTS, lambda params: Signs(params, 0.1), "Signs does not support that"),
        (NARROW_GRADIENTS, lambda params: torch.optim.Muon([p for p in params if p.ndim == 2]), "Muon may need them"),
        (NARROW_GRADIENTS, lambda params: Signs(params, 0.1), "Signs may need them in the parameters' dtype"),
        (NARROW_GRADIENTS, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), ""),
        (NARROW_MOMENTS, lambda params: torch.optim.NAdam(params, lr=0.1), ""),
    ],
)
def test_optimizers_that_cannot_are_refused(
    allow: str, optimizer: Any, message: str, captured: tuple[Graph, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder = written(captured[0], tmp_path / "program", (allow,), data=2)
    with program_modules(folder):
        runtime = import_runtime(folder)  # its classes are other ones
        program = runtime.load(folder)
        if not message:
            checked(optimizer, program)
            return
        with pytest.raises(ValueError, match=message) as refused:
            checked(optimizer, program)
        assert f"plan without {allow} in allow" in str(refused.value)
