"""Selective recomputation: what runs again, what is kept, and that the price says the same as the program."""

from __future__ import annotations

import math

import pytest
import torch
from exactness import subject
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from autopar.devices import parse
from autopar.errors import UsageError
from autopar.ops.cost import tensors
from autopar.pins import PINS
from autopar.plan import Plan, Role, Strategy
from autopar.price import Pricer
from autopar.program.recomputing import keep, selectively
from autopar.search import SearchOptions, manual_plan
from autopar.search.manual import make_mesh
from autopar.shard import plan_shardings
from passes.stages import cut_stages

ROLES = (Role.DATA, Role.TENSOR, Role.TENSOR_SEQUENCE, Role.ULYSSES, Role.RING)


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.up, self.down, self.last = how, nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 8)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        up = keep(self.up, x)
        down = keep(self.down, torch.nn.functional.gelu(up))
        return self.last(torch.tanh(down)) + x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return selectively(self.compute, x) if self.how == "selective" else self.compute(x)


def test_products_do_not_run_again_and_gradients_are_the_same() -> None:
    found = {}
    for how in ("none", "selective"):
        torch.manual_seed(1)
        block, x = Block(how).double(), torch.randn(4, 3, 8, dtype=torch.float64, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            block(x).sum().backward()
        found[how] = counter.get_total_flops(), x.grad, [p.grad for p in block.parameters()]
    assert found["none"][0] == found["selective"][0] > 0
    assert torch.equal(found["none"][1], found["selective"][1])
    assert all(torch.equal(a, b) for a, b in zip(found["none"][2], found["selective"][2], strict=True))


def test_what_is_not_kept_is_not_held() -> None:
    """Besides the input the results of two products live from forward to backward; of three products and two functions."""
    held: list[int] = []
    for how in ("none", "selective"):
        block, x = Block(how).double(), torch.randn(4, 3, 8, dtype=torch.float64, requires_grad=True)
        storages: dict[int, int] = {}

        def pack(t: torch.Tensor, into: dict[int, int] = storages) -> torch.Tensor:
            into[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = block(x)
        parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
        held.append(sum(n for at, n in storages.items() if at not in parameters))
        out.sum().backward()
    rows = 4 * 3 * 8  # bytes of one column
    assert (
        held[0] == rows * (8 + 32 + 32 + 8) and held[1] == rows * 8
    )  # the input; what is kept is outside of autograd's graph


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.value)
@pytest.mark.parametrize("model", ["llama", "gpt2", "bert"])
def test_the_price_counts_the_bytes_that_the_program_keeps(model: str, role: Role) -> None:
    graph = subject(model).graph
    mesh = make_mesh(("axis", 2))
    index = len(graph.layers) // 2
    layer = graph.layers[index]
    strategy = Strategy((role,), activations="selective")
    pricer = Pricer(graph, parse("1x2xH100-80GB"), "float64")
    price = pricer.layer(layer.cls, mesh, strategy, 1)
    try:
        plan = manual_plan(graph, mesh=mesh, strategies=dict.fromkeys(range(len(graph.layers)), strategy))
        shardings = plan_shardings(graph, plan)
    except UsageError:
        assert price is None
        return
    assert price is not None
    local = cut_stages(graph, plan, shardings).layers[index]
    expected = 0
    nodes = list(local.graph.graph.nodes)
    for node in nodes:
        values = tensors(node.meta.get("val"))
        if node.op == "placeholder" and nodes.index(node) < len(local.cls.activations):
            expected += values[0].nbytes
        elif node.meta.get("caller"):
            expected += sum(value.nbytes for value in values)
            if "attention" in str(node.target):
                expected += 4 * math.prod(values[0].shape[:-1])  # the logarithms of its sums
    assert price.saved_bytes == expected
    assert (role is Role.RING) == (not any("attention" in str(n.target) for n in nodes if n.meta.get("caller")))


@pytest.mark.parametrize("role", ROLES[:4], ids=lambda role: role.value)
def test_it_lies_between_none_and_full(role: Role) -> None:
    graph = subject("llama").graph
    mesh, layer = make_mesh(("axis", 2)), graph.layers[len(graph.layers) // 2]
    pricer = Pricer(graph, parse("1x2xH100-80GB"), "float64")
    none, part, full = (
        pricer.layer(layer.cls, mesh, Strategy((role,), activations=how), 1) for how in ("keep", "selective", "full")
    )
    assert none is not None and part is not None and full is not None
    assert none.forward_s == part.forward_s == full.forward_s
    assert none.backward_s < part.backward_s <= full.backward_s
    assert none.saved_bytes > part.saved_bytes > full.saved_bytes
    assert none.transient_bytes < part.transient_bytes


def test_every_spelling_is_one_pin() -> None:
    for given, pinned in ((True, "full"), ("full", "full"), (False, "none"), ("selective", "selective")):
        options = SearchOptions(recompute=given, pin={"layers.0-3.recompute": given})
        assert (
            options.pins == {"recompute": pinned, "layers.0-3.recompute": pinned} and pinned in PINS["recompute"].values
        )
    assert SearchOptions(recompute=True, pin={"recompute": "full"}).recompute == "full"
    with pytest.raises(UsageError, match="pinned to full and to selective"):
        SearchOptions(recompute=True, pin={"recompute": "selective"})


def test_the_plan_says_it_and_reads_it_back() -> None:
    plan = manual_plan(subject("llama").graph, data=2, recompute="selective")
    assert all(layer["activations"] == "selective" for layer in plan.to_json()["layers"])
    assert Plan.from_json(plan.to_json()) == plan
