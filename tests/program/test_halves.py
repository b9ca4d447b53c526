"""Halves of a microbatch that take turns: values, the order of what they send and compute, where a layer is whole, and the price."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
from exactness import run_case, subject
from price_models import chain, llama_block
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from workers import WorkerPool

from autopar.devices import parse
from autopar.emit import emit
from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.plan import Axis, Plan, Role, Strategy
from autopar.price import Pricer
from autopar.price.order import exposed_s
from autopar.program import finite, halves
from autopar.program.mesh_axes import on_mesh
from autopar.run.folder import program_modules
from autopar.search.manual import manual_plan
from autopar.verify import remote
from autopar.verify.kinds import PlanKind

ISSUES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- conversions ------------------------------------------------------------------------------------------------------

PAIRS = ((spmd.P, spmd.I), (spmd.P, spmd.R), (spmd.I, spmd.R), *((spmd.S(d), spmd.R) for d in range(3)),
         (spmd.S(1), spmd.I), *((spmd.P, spmd.S(d)) for d in range(3)), (spmd.S(0), spmd.S(2)), (spmd.S(2), spmd.S(1)))  # fmt: skip


def converted() -> list[tuple[str, Tensor, Tensor, Tensor, Tensor]]:
    """Every conversion apart, and by ``spmd_types``: results, and gradients of the input."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("t",))
    found = []
    for src, dst in PAIRS:
        same = src is spmd.I
        x = values(4, 6, 8, seed=0 if same else 1 + dist.get_rank())
        sides = []
        for apart in (True, False):
            own = x.clone().requires_grad_()
            with on_mesh(mesh):
                flight = halves.start(own * 1, "t", src=src, dst=dst) if apart else None
                y = halves._converted(own * 1, "t", src, dst) if flight is None else flight.wait()
                alike = dst in (spmd.I,)  # the gradient of an invariant value is the same everywhere
                (y * values(*y.shape, seed=9 if alike else 9 + dist.get_rank())).sum().backward()
            sides += [y.detach(), own.grad]
        found.append((f"{src} to {dst}", *sides))
    return found


def test_a_conversion_apart_is_that_of_spmd_types(workers2: WorkerPool) -> None:
    for rank in workers2.run("test_halves:converted"):
        for name, value, gradient, other, of_other in rank:
            assert torch.equal(value, other), name
            assert torch.equal(gradient, of_other), name


# -- the order of a program -------------------------------------------------------------------------------------------


@contextmanager
def traced(module: Any) -> Iterator[list[str]]:
    """What is issued and awaited, by number, and the large products, in order."""
    events: list[str] = []
    after, number = module._after, itertools.count()

    def counted(work: Any, result: Any) -> Any:
        own, finish = next(number), after(work, result)
        events.append(f"issue {own}")

        def waiting() -> Tensor:
            events.append(f"wait {own}")
            return finish()

        return waiting

    class Products(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if str(func).split(".")[1] in ("mm", "addmm"):
                events.append("product")
            return func(*args, **(kwargs or {}))

    with mock.patch.object(module, "_after", counted), Products():
        yield events


def events_of_a_step(folder: str, state: str, batch: dict[str, Tensor]) -> list[str]:
    with program_modules(folder):
        trainer = remote.open_trainer(folder, state)
        with traced(type(trainer.stages[0]).forward.__globals__["halves"]) as events:
            trainer.forward_backward(batch)
    return events


@pytest.mark.parametrize(
    ("options", "left"),
    [({}, 4), ({"sequence": True}, 8), ({"recompute": True}, 24)],
    ids=["tensor", "sequence", "recomputed"],
)
def test_what_one_half_sends_travels_while_the_other_computes(
    options: dict[str, Any], left: int, workers2: WorkerPool, tmp_path: Path
) -> None:
    """Of a Llama's four blocks, forward and backward. ``left`` is the most that nothing hides: at the ends of the chain, or of each
    layer if the halves meet there; and under sequence parallelism the sum of the gradient of each layer's first norm."""
    given = subject("llama")
    emit(given.graph, manual_plan(given.graph, tensor=2, overlap="halves", **options), tmp_path)
    state = tmp_path / "initial.pt"
    torch.save(given.state, state)
    for events in workers2.run("test_halves:events_of_a_step", str(tmp_path), str(state), given.batch):
        issued = [event.split()[1] for event in events if event.startswith("issue")]
        # two blocks in a layer, a collective at each end of them in one pass or the other (in both under sequence parallelism)
        assert len(issued) >= 4 * 2 * 2 * (4 if options.get("sequence") else 2)
        bare = 0
        for own in issued:
            start, stop = events.index(f"issue {own}"), events.index(f"wait {own}")
            bare += "product" not in events[start:stop]
        assert bare <= left, (bare, len(issued))


def test_compiled_halves_let_go_of_what_they_send(tmp_path: Path) -> None:
    graph = subject("llama").graph
    emit(graph, manual_plan(graph, tensor=2, overlap="halves", compile="layers"), tmp_path)
    text = (tmp_path / "model.py").read_text()
    sent = re.findall(r"halves\.start\((\w+), .*\n +(.*)\n", text)
    assert len(sent) >= 4  # nothing else reads these values
    for name, line in sent:
        assert name in line.removeprefix("del ").split(", "), (name, line)


def test_layers_without_products_and_the_loss_stay_whole(tmp_path: Path) -> None:
    given = subject("llama")
    local = emit(given.graph, manual_plan(given.graph, tensor=2, overlap="halves"), tmp_path)
    assert [layer.half is not None for layer in local.layers] == [False, True, True, True, True, False]
    assert local.layers[-1].strategy.options.by_name["overlap"] == "tensor"


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("llama", {"tensor": 2, "microbatches": 8}, "has an odd number of rows on each device in a microbatch"),
        ("llama", {"data": 2}, "has no collective to hide"),
        ("resnet", {"tensor": 2}, "from several rows of the batch|writes buffers"),
        (
            "llama",
            {"tensor": 2, "recompute": "selective"},
            "overlap=halves cannot be combined with activations=selective",
        ),
        ("llama", {"tensor": 2, "pipeline": 2, "microbatches": 2, "schedule": "zero-bubble"}, "schedule=zero-bubble"),
    ],
    ids=["one row", "data", "batch norm", "selective", "split backward"],
)
def test_what_cannot_be_halved_is_refused_by_name(
    model: str, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    graph = subject(model).graph
    with pytest.raises(UsageError, match=said):
        emit(graph, manual_plan(graph, overlap="halves", **options), tmp_path)


# -- the price --------------------------------------------------------------------------------------------------------


def test_a_collective_is_beside_the_pieces_of_the_other_half() -> None:
    """Pieces of 1, 2 and 4 s: what piece 0 sends and piece 1 reads is beside piece 2 of the layer before (for the first half) and beside
    piece 2 (for the second)."""

    def left(wire_s: float, under_s: float) -> float:
        return max(0.0, wire_s - under_s)

    assert exposed_s([1, 2, 4], [(0, 1, 5.0)], True, left) == 2 * (5 - 4)
    assert exposed_s([1, 2, 4], [(0, 1, 5.0)], False, left) == 5 + (5 - 4)  # the halves meet at the layer's ends
    assert exposed_s([1, 2, 4], [(1, 2, 5.0)], True, left) == (5 - 1) + (5 - 1)
    assert exposed_s([1, 2, 4], [(0, 1, 5.0), (0, 1, 5.0)], True, left) == 4 * (5 - 2)  # two share a piece


NODE = parse("8xH100-80GB")


def block_s(overlap: str, role: Role, activations: str = "keep", rows: int = 2) -> tuple[float, float]:
    """Seconds of a block of Llama-3-70B on 8 devices, and of its exposed communication."""
    graph = chain(llama_block(rows, 8192, 8192, 64, 8, 28672), 2)
    strategy = Strategy((role,), activations=activations, overlap=overlap)
    found = Pricer(graph, NODE, "bfloat16").layer("block", (Axis("t", 8, 1),), strategy, 1)
    assert found is not None
    return found.forward_s + found.backward_s, found.communication_s


@pytest.mark.parametrize("role", [Role.TENSOR, Role.TENSOR_SEQUENCE], ids=lambda role: role.value)
def test_halves_hide_most_of_a_large_blocks_collectives(role: Role) -> None:
    (whole_s, sent_s), (halved_s, left_s) = block_s("tensor", role), block_s("halves", role)
    slowdown = NODE.overlap_slowdown
    assert left_s >= 0.9 * slowdown * block_s("none", role)[1]  # what is hidden slows arithmetic down
    assert left_s < 0.5 * sent_s and halved_s < whole_s


def test_halves_that_meet_at_a_layers_ends_hide_less() -> None:
    role = Role.TENSOR_SEQUENCE
    assert block_s("halves", role)[1] < block_s("halves", role, "full")[1] < block_s("tensor", role, "full")[1]


def test_an_odd_number_of_rows_has_the_price_of_a_whole_microbatch() -> None:
    role = Role.TENSOR
    assert block_s("halves", role, rows=1) == block_s("tensor", role, rows=1)


def mixed(graph: Graph) -> Plan:
    """Halves in some blocks, of which one is recomputed, and whole microbatches in between."""
    plan = manual_plan(graph, tensor=2, sequence=True, overlap="halves")
    ways = [layer.strategy for layer in plan.layers]
    ways[2] = ways[2].with_options(overlap="tensor")
    ways[4] = ways[4].with_options(activations="full")
    return replace(plan, layers=tuple(replace(layer, strategy=s) for layer, s in zip(plan.layers, ways, strict=True)))


def test_halves_beside_whole_layers_are_exact(workers2: WorkerPool) -> None:
    """As pins of named layers ask for."""
    outcome = run_case("llama", PlanKind("halves beside whole layers", 2, mixed=mixed), workers2, typed=False)
    assert outcome.error.value <= 1e-9


def test_the_first_result_that_is_not_finite_is_found_in_a_half() -> None:
    places: list[tuple[int, int, int, str]] = []
    watch = finite._RecordNonFinite(places, 0, 3, "block")

    def half(value: float) -> halves.Half:
        yield
        return torch.full((2,), value)

    halves.interleaved(lambda x: watch(torch.nn.Identity(), (), half(float(x[0]))), (torch.ones(2),), (0,), (0,))
    assert not places
    both = torch.tensor([1.0, float("nan")])
    halves.interleaved(lambda x: watch(torch.nn.Identity(), (), half(float(x[0]))), (both,), (0,), (0,))
    assert places == [(1, 0, 3, "block")]  # of the second microbatch
