"""What of a layer is in the host's memory: plans, prices, the search, programs."""

from __future__ import annotations

import gc
import itertools
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
from autopar.errors import InfeasibleError, UsageError
from autopar.layer_price import LayerPrice
from autopar.plan import Plan, Role, Strategy
from autopar.price import Pricer
from autopar.program.activation_storage import _Offloaded, in_host
from autopar.schedules import Schedule
from autopar.search import SearchOptions, evaluate, make_mesh, manual_plan, price_pins, search, steps
from autopar.search.options import pins_by_layer
from autopar.techniques.activations import ACTIVATIONS
from autopar.techniques.states import STATES
from autopar.verify import kind


def test_the_plan_says_it_and_reads_it_back() -> None:
    plan = manual_plan(subject("mlp").graph, data=2)
    assert {"activations": "keep", "states": "device"}.items() <= plan.to_json()["layers"][0].items()
    for kept, states in itertools.product(ACTIVATIONS.values, STATES.values):
        layers = (replace(x, strategy=x.strategy.with_options(activations=kept, states=states)) for x in plan.layers)
        written = replace(plan, layers=tuple(layers), nvme_path="/nvme")
        assert {"activations": kept, "states": states}.items() <= written.to_json()["layers"][0].items()
        assert Plan.from_json(written.to_json()) == written


@pytest.mark.parametrize(
    ("older", "kept", "states"),
    [
        ("optimizer", "keep", "host"),
        ("both", "host", "host"),
        ("none", "keep", "device"),
        (None, "keep", "device"),
    ],
)
def test_older_plans_are_read(older: str | None, kept: str, states: str) -> None:
    """They had one word for both."""
    text = manual_plan(subject("mlp").graph, data=2).to_json()
    for layer in text["layers"]:
        del layer["states"], layer["activations"]
        layer |= {"recomputation": {"kind": "none", "layers": 1}}
        layer |= {} if older is None else {"offload": older}
    strategy = Plan.from_json(text).layers[0].strategy
    assert (strategy.options[ACTIVATIONS], strategy.options[STATES]) == (kept, states)


# -- prices ----------------------------------------------------------------------------------------------------------

B, S, H, F = 8, 128, 256, 1024
GRAPH, MESH = chain(mlp(B, S, H, F), 4), make_mesh(("data", 8))
TRAINABLE = 2 * H * F


def price(activations: str, zero: int = 0, devices: str = "8xH100-80GB", states: str = "device") -> LayerPrice:
    pricer = Pricer(GRAPH, parse(devices), "bfloat16", solve_mlp)
    found = pricer.layer("mlp", MESH, Strategy((Role.DATA,), zero, activations=activations, states=states), 1)
    assert found is not None
    return found


NVME = 'gpu = "H100-80GB"\nnvme_gb = 1000\nnvme_read_gb_per_s = 6\nnvme_write_gb_per_s = 3'


@pytest.mark.parametrize("states", ["host", "nvme"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_optimizer_states_elsewhere(zero: int, states: str, tmp_path: Path) -> None:
    """Per element a gradient of 4 bytes goes down, is written and read; 12 of states and master copy are read and written; the new
    value is read in 4 bytes and goes up in 2, or in 4 where FSDP's shard has 4. On NVMe the 12 are read and written once."""
    (tmp_path / "nvme.toml").write_text(NVME)
    devices = str(tmp_path / "nvme.toml")
    here, there = price("keep", zero, devices), price("keep", zero, devices, states=states)
    mine = TRAINABLE // 8 if zero else TRAINABLE
    assert (here.optimizer_bytes, here.host_bytes, here.nvme_bytes) == ((8 if zero == 3 else 12) * mine, 0, 0)
    assert (there.optimizer_bytes, there.host_saved_bytes) == (0, 0)
    assert (there.host_bytes, there.nvme_bytes) == ((12 * mine, 0) if states == "host" else (0, 12 * mine))
    # the master copy was ZeRO 2's shard
    assert there.parameters_bytes - here.parameters_bytes == (4 * mine if zero == 2 else 0)
    up = 4 if zero >= 2 else 2
    link, memory = 614.4e9 * 0.83 / 16, 614.4e9 * 0.5 / 8  # of the node's memory: each device's share
    update = max(max(4, up) * mine / link, (2 * 4 + 2 * 12 + 4 + 2 * up) * mine / memory)
    if states == "nvme":
        update = max(update, 12 * mine * (1 / 6e9 + 1 / 3e9) * 8)
    gpu = parse(devices).gpu
    assert there.step_s - here.step_s == pytest.approx(update - (4 + 2 * 12 + 2 * 2) * mine / gpu.bytes_per_s)
    same = ("forward_s", "backward_s", "gradients_bytes", "saved_bytes", "transient_bytes")
    assert all(getattr(here, name) == getattr(there, name) for name in same)


def test_activations_in_the_host() -> None:
    """x, up(x) and gelu(up(x)) of one device's row; two layers' worth of them is on the device while one is at work."""
    here, there = price("keep"), price("host")
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
    here, there = price("keep"), price("host", devices=str(file))
    way = 2 * S * (H + 2 * F) / (1e9 * 0.85)
    assert there.forward_s == pytest.approx(way) and way > here.forward_s
    assert there.backward_s == pytest.approx(way) and way > here.backward_s
    assert there.communication_s - here.communication_s == pytest.approx(2 * way - here.forward_s - here.backward_s)


def test_a_recomputed_layer_puts_its_input_aside() -> None:
    here, there = price("full"), price("full+host", states="host")
    assert here.saved_bytes == there.host_saved_bytes == 2 * S * H
    assert there.saved_bytes == 0 and there.transient_bytes == here.transient_bytes + 2 * here.saved_bytes
    assert there.host_bytes == 12 * TRAINABLE


def test_processes_of_this_machine_have_no_memory_but_the_hosts() -> None:
    """States in the host's memory are in theirs, and those on NVMe are not; what is saved is copied there and back."""
    cluster = parse(["cpu"] * 8)

    def found(precision: str, **where: str) -> LayerPrice:
        price = Pricer(GRAPH, cluster, precision, solve_mlp).layer("mlp", MESH, Strategy((Role.DATA,), **where), 1)
        assert price is not None
        return price

    here, saved = found("bfloat16"), found("bfloat16", activations="host")
    for precision, size in (("bfloat16", 12), ("float32", 12)):  # in float32 the master copy is one copy more
        host, nvme = found(precision, states="host"), found(precision, states="nvme")
        assert (host.optimizer_bytes, host.host_bytes, host.nvme_bytes) == (size * TRAINABLE, 0, 0)
        assert (nvme.optimizer_bytes, nvme.host_bytes, nvme.nvme_bytes) == (0, 0, size * TRAINABLE)
        assert nvme.step_s > host.step_s > found(precision).step_s
    assert (saved.saved_bytes, saved.host_saved_bytes) == (here.saved_bytes, 0)
    # of which the optimizer's own copies, when all backwards are done, leave room for some
    assert here.transient_bytes < saved.transient_bytes <= here.transient_bytes + 2 * here.saved_bytes
    copy = 2 * here.saved_bytes / cluster.gpu.bytes_per_s
    assert saved.forward_s == pytest.approx(here.forward_s + copy)
    assert saved.backward_s == pytest.approx(here.backward_s + copy)


# -- the search ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_host_memory_is_kept_to_without_the_exact_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison by the hundred has a family of its own (``brute_force``), which the exact method closes."""
    monkeypatch.setattr(steps, "LABEL_LAYERS", 0)
    outcomes = []
    for seed in range(1000, 1050):
        graph, cluster, pricer, options = random_offload(seed)
        best = brute_force(graph, cluster, pricer, options)
        try:
            plan = search(graph, cluster, pricer, options)
        except InfeasibleError as error:
            assert best is None, seed
            outcomes.append("host" if "of host memory" in error.message else "device")
            continue
        assert best is not None, seed
        assert plan.bound_s <= best * (1 + 1e-6) and best <= plan.prediction.step_time_s * (1 + 1e-9), seed
        assert all(stage.host_bytes <= cluster.host_limit_bytes for stage in plan.stages)
        there = any(layer.strategy.options.offload_tier for layer in plan.layers)
        outcomes.append("there" if there else "here")
    assert all(outcomes.count(outcome) >= 2 for outcome in ("host", "device", "here", "there")), outcomes


def test_pins() -> None:
    assert SearchOptions().offload is None and SearchOptions(offload="any").pins == {"offload": "any"}
    with pytest.raises(UsageError, match="states is 'disk', it must be one of device, host, nvme, any"):
        SearchOptions(states="disk")
    with pytest.raises(
        UsageError,
        match=r"layers.1 is pinned to activations=selective\+host.* the search never selects: what selective",
    ):
        pins_by_layer(GRAPH, SearchOptions(recompute="selective", pin={"layers.1.offload": "activations"}))
    graph, cluster, pricer, _ = random_offload(0)
    everything = replace(cluster, memory_limit_bytes=10**9, host_limit_bytes=10**9)
    plan = search(graph, everything, pricer, SearchOptions(pin={"layers.0.states": "host"}))
    assert [layer.strategy.options[STATES] for layer in plan.layers] == ["host", *["device"] * (len(plan.layers) - 1)]
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
            strategies=[Strategy((Role.DATA,), activations="host", states="host")] * 4,
            schedule=Schedule("none", 1, 1),
            precision="bfloat16",
        )
        assert plan.stages[0].host_bytes == 4 * (12 * TRAINABLE + 2 * S * (H + 2 * F))
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
        with in_host(self, scale):
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
    aside: list[_Offloaded] = []
    hooks = torch.autograd.graph.saved_tensors_hooks

    def watched(put: Callable[[Tensor], Any], take: Callable[[Any], Tensor]) -> Any:
        def note(tensor: Tensor) -> Any:
            kept = put(tensor)
            if isinstance(kept, Tensor):
                stays.append(kept)
            elif not any(kept.stored is storage for storage in aside):
                aside.append(kept.stored)
            return kept

        return hooks(note, take)

    monkeypatch.setattr(torch.autograd.graph, "saved_tensors_hooks", watched)
    first, second = Block("there"), Block("there")
    x, scale = torch.randn(4, 3, 8, requires_grad=True), torch.rand(8)
    between = first(x, scale)
    mine = len(aside)
    between.register_hook(lambda _: backs.extend(storage.fetched is not None for storage in aside))
    result = second(between, scale)
    known = {t.untyped_storage().data_ptr() for t in (scale, *first.parameters(), *second.parameters())}
    assert {t.untyped_storage().data_ptr() for t in stays} <= known
    # the input, each half of the first product's result, the second product's input
    assert [s.host.numel() for s in aside[:mine]] == [s.host.numel() for s in aside[mine:]]
    assert sorted(s.host.numel() for s in aside[:mine]) == [4 * 3 * n * 4 for n in (8, 16, 16, 16)]
    assert not any(s.fetched is not None for s in aside)
    # the device's own copies go one layer later
    assert not any(s.call.in_flight for s in aside[:mine]) and all(s.call.in_flight for s in aside[mine:])
    backs: list[bool] = []
    copies = [weakref.ref(storage) for storage in aside]
    result.square().sum().backward()
    assert backs == [True] * len(aside)  # when the second block is done, the first one's are on their way
    assert not any(s.call.in_flight for s in aside)
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
