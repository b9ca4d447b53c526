"""What of a layer is in the host's memory: plans, prices, the search, programs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from brute_force import random_offload
from exactness import run_case, subject
from price_models import chain, mlp, solve_mlp
from search_models import brute_force
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from workers import WorkerPool

from autopar import compile
from autopar.devices import parse
from autopar.emit import emit
from autopar.errors import InfeasibleError, UsageError
from autopar.layer_price import LayerPrice
from autopar.plan import FULL, NONE, OFFLOADS, Plan, Recomputation, Role, Strategy
from autopar.price import Pricer
from autopar.program.offload import _Storage, saved
from autopar.schedules import Schedule
from autopar.search import SearchOptions, evaluate, make_mesh, manual_plan, price_pins, search, steps
from autopar.search.options import pins_by_layer
from autopar.verify import kind


def offloaded(plan: Plan, offload: str) -> Plan:
    """The plan with every layer so."""
    layers = tuple(replace(layer, strategy=replace(layer.strategy, offload=offload)) for layer in plan.layers)
    return replace(plan, layers=layers)


def test_the_plan_says_it_and_reads_it_back() -> None:
    plan = manual_plan(subject("mlp").graph, data=2)
    assert plan.to_json()["layers"][0]["offload"] == "none"
    for offload in OFFLOADS:
        written = offloaded(plan, offload)
        assert written.to_json()["layers"][0]["offload"] == offload
        assert Plan.from_json(written.to_json()) == written
    older = plan.to_json()
    for layer in older["layers"]:
        del layer["offload"]
    assert Plan.from_json(older) == plan


@pytest.mark.parametrize("offload", ["optimizer", "both"])
def test_what_has_no_program_yet_is_refused(offload: str, tmp_path: Path) -> None:
    graph = subject("mlp").graph
    with pytest.raises(UsageError, match="in the host's memory"):
        emit(graph, offloaded(manual_plan(graph, data=2), offload), tmp_path)


# -- prices ----------------------------------------------------------------------------------------------------------

B, S, H, F = 8, 128, 256, 1024
GRAPH, MESH = chain(mlp(B, S, H, F), 4), make_mesh(("data", 8))
TRAINABLE = 2 * H * F


def price(offload: str, zero: int = 0, devices: str = "8xH100-80GB", again: Recomputation = NONE) -> LayerPrice:
    pricer = Pricer(GRAPH, parse(devices), "bfloat16", solve_mlp)
    found = pricer.layer("mlp", MESH, Strategy((Role.DATA,), zero, again, offload=offload), 1)
    assert found is not None
    return found


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_optimizer_in_the_host(zero: int) -> None:
    """Per element a gradient of 4 bytes goes down and a parameter of 2 comes up; the update reads 4 of gradient, reads and writes 12 of
    states and master copy, writes 2 of parameter. Under ZeRO-3 the device's shard is the master copy, and without it has 2 bytes."""
    here, there = price("none", zero), price("optimizer", zero)
    mine = TRAINABLE // 8 if zero else TRAINABLE
    assert (here.optimizer_bytes, here.host_bytes) == ((8 if zero == 3 else 12) * mine, 0)
    assert (there.optimizer_bytes, there.host_bytes, there.host_saved_bytes) == (0, 18 * mine, 0)
    assert here.parameters_bytes - there.parameters_bytes == (2 * mine if zero == 3 else 0)
    link, memory = 614.4e9 * 0.83 / 16, 614.4e9 * 0.5 / 8  # of the node's memory: each device's share
    update = 6 * mine / link + (4 + 2 * 12 + 2) * mine / memory
    gpu = parse("8xH100-80GB").gpu
    assert there.step_s - here.step_s == pytest.approx(update - (4 + 2 * 12 + 2 * 2) * mine / gpu.bytes_per_s)
    same = ("forward_s", "backward_s", "gradients_bytes", "saved_bytes", "transient_bytes")
    assert all(getattr(here, name) == getattr(there, name) for name in same)


def test_activations_in_the_host() -> None:
    """x, up(x) and gelu(up(x)) of one device's row; two layers' worth of them is on the device while one is at work."""
    here, there = price("none"), price("activations")
    saved = 2 * S * (H + 2 * F)
    assert (here.saved_bytes, here.host_saved_bytes) == (saved, 0)
    assert (there.saved_bytes, there.host_saved_bytes, there.host_bytes) == (0, saved, 0)
    assert there.transient_bytes == here.transient_bytes + 2 * saved
    assert there.step_s == here.step_s and there.optimizer_bytes == here.optimizer_bytes
    way = saved / (614.4e9 * 0.83 / 16)
    # this layer is bound by the start of its kernels, whose time hides the way as well
    hidden_forward, hidden_backward = here.forward_s, here.backward_s
    assert there.forward_s == pytest.approx(here.forward_s + max(0.0, way - hidden_forward))
    assert there.backward_s == pytest.approx(here.backward_s + max(0.0, way - hidden_backward))


def test_what_a_slow_link_does_not_hide_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "slow.toml"
    file.write_text('gpu = "H100-80GB"\nhost_gb_per_s = 1')
    here, there = price("none"), price("activations", devices=str(file))
    way = 2 * S * (H + 2 * F) / (1e9 * 0.85)
    assert there.forward_s == pytest.approx(way) and way > here.forward_s
    assert there.backward_s == pytest.approx(way) and way > here.backward_s
    assert there.communication_s - here.communication_s == pytest.approx(2 * way - here.forward_s - here.backward_s)


def test_a_recomputed_layer_puts_its_input_aside() -> None:
    here, there = price("none", again=FULL), price("both", again=FULL)
    assert here.saved_bytes == there.host_saved_bytes == 2 * S * H
    assert there.saved_bytes == 0 and there.transient_bytes == here.transient_bytes + 2 * here.saved_bytes
    assert there.host_bytes == 18 * TRAINABLE


def test_processes_of_this_machine_have_no_memory_but_the_hosts() -> None:
    """States stay where they are; what is saved is copied there and back."""
    cluster = parse(["cpu"] * 8)
    pricer = Pricer(GRAPH, cluster, "bfloat16", solve_mlp)
    here, states, saved, both = (
        pricer.layer("mlp", MESH, Strategy((Role.DATA,), offload=offload), 1) for offload in OFFLOADS
    )
    assert here is not None and saved is not None and here == states and saved == both
    assert (saved.saved_bytes, saved.host_saved_bytes) == (here.saved_bytes, 0)
    # of which the optimizer's own copies, when all backwards are done, leave room for some
    assert here.transient_bytes < saved.transient_bytes <= here.transient_bytes + 2 * here.saved_bytes
    copy = 2 * here.saved_bytes / cluster.gpu.bytes_per_s
    assert saved.forward_s == pytest.approx(here.forward_s + copy)
    assert saved.backward_s == pytest.approx(here.backward_s + copy)


# -- the search ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_host_memory_is_kept_to_where_the_exact_solver_is_scip(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison by the hundred has a family of its own (``brute_force``), which the other exact solver closes."""
    monkeypatch.setattr(steps, "LABEL_LAYERS", 0)
    outcomes = []
    for seed in range(1000, 1050):
        graph, cluster, pricer, options = random_offload(seed)
        best = brute_force(graph, cluster, pricer, options)
        try:
            plan = search(graph, cluster, pricer, options)
        except InfeasibleError as error:
            assert best is None, seed
            outcomes.append("host" if "host's memory" in error.message else "device")
            continue
        assert best is not None, seed
        assert plan.bound_s <= best * (1 + 1e-6) and best <= plan.prediction.step_time_s * (1 + 1e-9), seed
        assert all(stage.host_bytes <= cluster.host_limit_bytes for stage in plan.stages)
        there = {layer.strategy.offload for layer in plan.layers}
        outcomes.append("there" if there != {"none"} else "here")
    assert all(outcomes.count(outcome) >= 2 for outcome in ("host", "device", "here", "there")), outcomes


def test_pins() -> None:
    assert SearchOptions().offload is None and SearchOptions(offload="any").pins == {"offload": "any"}
    with pytest.raises(
        UsageError, match="offload is 'disk', it must be one of none, optimizer, activations, both, any"
    ):
        SearchOptions(offload="disk")
    with pytest.raises(UsageError, match="selective recomputation saves activations on the device"):
        pins_by_layer(GRAPH, SearchOptions(recompute="selective", pin={"layers.1.offload": "both"}))
    graph, cluster, pricer, _ = random_offload(0)
    everything = replace(cluster, memory_limit_bytes=10**9, host_limit_bytes=10**9)
    plan = search(graph, everything, pricer, SearchOptions(pin={"layers.0.offload": "both"}))
    assert [layer.strategy.offload for layer in plan.layers] == ["both", *["none"] * (len(plan.layers) - 1)]
    # what leaves a choice to the search decides nothing, and has no price
    options = SearchOptions(offload="any", zero=0)
    found = search(graph, everything, pricer, options)
    assert [pin.pin for pin in price_pins(graph, everything, pricer, options, found, 4.0).pins] == ["zero"]


def test_a_plan_that_is_written_down_says_when_the_host_is_full(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text('gpu = "H100-80GB"\nhost_memory_gb = 0.01')
    for devices, full in (("8xH100-80GB", False), (str(file), True)):
        cluster = parse(devices)
        plan = evaluate(
            GRAPH,
            cluster,
            Pricer(GRAPH, cluster, "bfloat16", solve_mlp),
            mesh=MESH,
            stage_bounds=(0, 4),
            strategies=[Strategy((Role.DATA,), offload="both")] * 4,
            schedule=Schedule("none", 1, 1),
            precision="bfloat16",
        )
        assert plan.stages[0].host_bytes == 4 * (18 * TRAINABLE + 2 * S * (H + 2 * F))
        assert ("which does not fit" in " ".join(plan.notes)) == full


# -- programs --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two halves of one product's result, a value that two ops save, a constant."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.up, self.down = how, nn.Linear(8, 32), nn.Linear(16, 8)

    def compute(self, x: Tensor, scale: Tensor) -> Tensor:
        left, right = self.up(x).chunk(2, dim=-1)
        return self.down(torch.tanh(left * right)) * scale

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        if self.how == "here":
            return self.compute(x, scale)
        with saved(self, scale):
            if self.how == "recomputed":
                return checkpoint(self.compute, x, scale, use_reentrant=False)
            return self.compute(x, scale)


def run_blocks(how: str) -> list[Tensor]:
    torch.manual_seed(1)
    blocks = nn.ModuleList(Block(how) for _ in range(3)).double()
    x, scale = torch.randn(4, 3, 8, dtype=torch.float64, requires_grad=True), torch.rand(8, dtype=torch.float64)
    hidden = x
    for block in blocks:
        hidden = block(hidden, scale)
    hidden.square().sum().backward()
    return [x.grad, *(p.grad for p in blocks.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("how", ["there", "recomputed"])
def test_gradients_are_the_same_to_the_bit(how: str) -> None:
    assert all(torch.equal(a, b) for a, b in zip(run_blocks("here"), run_blocks(how), strict=True))


def test_all_but_parameters_and_constants_is_put_aside_once_and_comes_back_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stays: list[Tensor] = []
    aside: list[_Storage] = []
    hooks = torch.autograd.graph.saved_tensors_hooks

    def watched(put: Callable[[Tensor], Any], take: Callable[[Any], Tensor]) -> Any:
        def note(tensor: Tensor) -> Any:
            kept = put(tensor)
            if isinstance(kept, Tensor):
                stays.append(kept)
            elif not any(kept.storage is storage for storage in aside):
                aside.append(kept.storage)
            return kept

        return hooks(note, take)

    monkeypatch.setattr(torch.autograd.graph, "saved_tensors_hooks", watched)
    first, second = Block("there"), Block("there")
    x, scale = torch.randn(4, 3, 8, requires_grad=True), torch.rand(8)
    between = first(x, scale)
    mine = len(aside)
    between.register_hook(lambda _: backs.extend(storage.back is not None for storage in aside))
    result = second(between, scale)
    known = {t.untyped_storage().data_ptr() for t in (scale, *first.parameters(), *second.parameters())}
    assert {t.untyped_storage().data_ptr() for t in stays} <= known
    # the input, each half of the first product's result, the second product's input
    assert [s.host.numel() for s in aside[:mine]] == [s.host.numel() for s in aside[mine:]]
    assert sorted(s.host.numel() for s in aside[:mine]) == [4 * 3 * n * 4 for n in (8, 16, 16, 16)]
    assert not any(s.back is not None for s in aside)
    # the device's own copies go one layer later
    assert not any(s.call.begun for s in aside[:mine]) and all(s.call.begun for s in aside[mine:])
    backs: list[bool] = []
    copies = [weakref.ref(storage) for storage in aside]
    result.square().sum().backward()
    assert backs == [True] * len(aside)  # when the second block is done, the first one's are on their way
    assert not any(s.call.begun for s in aside)
    aside.clear()
    del result, between
    gc.collect()
    assert not any(copy() for copy in copies)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"data": 2, "zero": 3}),
    ("gpt2", {"pipeline": 2, "schedule": "1f1b", "microbatches": 4, "recompute": True}),
    ("llama", {"tensor": 2, "sequence": True, "microbatches": 2}),
    # their kernels write parts of a storage after other parts were saved
    ("recurrent", {"data": 2, "zero": 3}),
    ("lstm", {"data": 2}),
]


@pytest.mark.parametrize(("model", "degrees"), CASES, ids=["zero 3", "pipeline, recomputed", "tensor", "gru", "lstm"])
def test_programs_are_exact(model: str, degrees: dict[str, Any], workers2: WorkerPool) -> None:
    """The loss and every gradient, where the only tied parameters are owned by the stage (gpt2) and where FSDP has them (llama)."""
    outcome = run_case(model, kind("activations in the host's memory", offload="activations", **degrees), workers2)
    assert outcome.error.value <= 1e-9 and outcome.stages_typed == degrees.get("pipeline", 1)


def test_a_compiled_model_trains_alike() -> None:
    batch = (torch.randn(4, 8), torch.randn(4, 8))
    losses = []
    for offload in ("none", "activations"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        with compile(model, ["cpu"], batch, nn.functional.mse_loss, offload=offload) as program:
            losses.append([program.step(batch) for _ in range(3)])
    assert losses[0] == losses[1] and losses[0][2] < losses[0][0]
