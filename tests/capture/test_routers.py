"""The number of nodes that a token reaches is that of the model's own router."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from expert_models import mixtral, qwen3_moe
from limited_routers import captured, deepseek_v2, deepseek_v3, mixture, priced_routing
from survey_text import MIXTURES
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.routers import sampled_choices
from autopar.checks.collectives import check_collectives, priced
from autopar.ops.experts import Experts
from autopar.ops.routing import Routing
from autopar.search.manual import make_mesh, manual_plan
from autopar.shard import plan_shardings
from passes.stages import cut_stages

TOKENS, WIDTH, COUNT = 4096, 256, 8


def mean_reached(index: Tensor, experts: int, ranks: int) -> float:
    owners = index // (experts // ranks)
    return sum(len(set(each)) for each in owners.tolist()) / len(owners)


@pytest.mark.parametrize(
    ("sizes", "precision"),
    [((16, 4, 4, 2), "float32"), ((16, 4, 8, 2), "bfloat16"), ((64, 8, 8, 4), "bfloat16"), ((32, 6, 4, 3), "float32")],
)
@pytest.mark.parametrize("build", [deepseek_v3, deepseek_v2])
def test_it_is_what_the_models_router_reaches(build: Callable[..., nn.Module], sizes: Any, precision: str) -> None:
    torch.manual_seed(0)
    experts, choices, groups, chosen = sizes
    model = build(*sizes)
    routing = priced_routing(mixture(captured(model, precision))[1])
    router = next(m for m in model.modules() if "TopkRouter" in type(m).__name__)
    chosen_experts = []
    for _ in range(8):  # other weights for each part of the tokens
        nn.init.normal_(router.weight, std=0.02)
        with torch.no_grad():
            results = router(torch.randn(1, TOKENS // 8, WIDTH))
        chosen_experts.append(next(r for r in results if not r.is_floating_point()).reshape(-1, choices))
    index = torch.cat(chosen_experts)
    for ranks in (n for n in range(1, experts + 1) if experts % n == 0):
        assert routing.reached(ranks) == pytest.approx(mean_reached(index, experts, ranks), rel=0.03), ranks
    assert routing.reached(groups) <= chosen
    assert routing.reached(groups) < 0.9 * Routing(experts, choices).reached(groups)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "ungrouped deepseek_v3"])
def test_a_router_without_limit_is_priced_by_the_formula(name: str) -> None:
    models: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
        "mixtral": lambda: mixtral(num_local_experts=16),
        "qwen3_moe": qwen3_moe,
        "gpt_oss": MIXTURES["gpt_oss"],
        "ungrouped deepseek_v3": lambda: (deepseek_v3(32, 4, 1, 1), None, None),
    }
    model, batch, _ = models[name]()
    graph = captured(model) if batch is None else capture(model.train(), batch, precision="bfloat16")
    cls, node = mixture(graph)
    assert sampled_choices(cls, node, graph.constants) is not None  # it was run, and agrees with the formula
    routing = priced_routing(node)
    assert isinstance(node.target, Experts)
    assert routing == Routing(node.target.count, routing.choices)
    assert routing.sample is None


def test_a_trained_bias_does_not_count() -> None:
    """It balances the loads of trained scores, and would unbalance those of random ones."""
    plain, trained = deepseek_v3(16, 4, 4, 2), deepseek_v3(16, 4, 4, 2)
    for name, buffer in trained.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(0, 0.3, 16))
    found = [priced_routing(mixture(captured(model))[1]) for model in (plain, trained)]
    assert found[0].sample is not None
    assert [found[0].reached(n) for n in (2, 4, 8)] == [found[1].reached(n) for n in (2, 4, 8)]


def test_padded_experts_are_in_blocks_of_equal_size() -> None:
    """Ten experts on four ranks: three, three, three and one."""
    routing = priced_routing(mixture(captured(deepseek_v3(10, 2, 5, 1)))[1])
    assert routing.sample is not None
    owners = routing.sample.choices // 3
    expected = (1 + (owners[:, 0] != owners[:, 1]).double().mean()).item()
    assert routing.reached(4) == replace(routing, experts=12).reached(4) == pytest.approx(expected)


def test_programs_and_prices_send_as_much_through_relays() -> None:
    graph = captured(deepseek_v3(16, 4, 4, 2), "float64")
    plan = manual_plan(graph, mesh=make_mesh(("relay", 4), ("expert", 2)))
    program = cut_stages(graph, plan, plan_shardings(graph, plan))
    assert check_collectives(program) > 0
    cls, node = mixture(graph)
    layer = next(one for one in program.layers if one.cls.name == cls.name)
    tokens = math.prod(node.args[0].meta["val"].shape) * 8
    sent = {one.bytes for one in priced(layer) if one.collective == "all_to_all" and one.axes == ("relay",)}
    assert any(math.isclose(one, tokens * priced_routing(node).reached(4) / 2, rel_tol=1e-6) for one in sent), sent


class Router(nn.Module):
    """A router that chooses experts by the function ``route(self, scores, tokens)``."""

    def __init__(self, route: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.route = route
        self.linear = nn.Linear(32, COUNT)
        self.scale = nn.Parameter(torch.ones(COUNT))
        self.first = nn.Buffer(torch.arange(0, COUNT, COUNT // 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.linear(x)
        index = self.route(self, scores, x)
        return scores, scores.softmax(-1).gather(1, index), index


def routed(route: Callable[[Any, Tensor, Tensor], Tensor]) -> Routing:
    model, batch, _ = mixtral(num_local_experts=COUNT, num_hidden_layers=1)
    model.model.layers[0].mlp.gate = Router(route)
    return priced_routing(mixture(capture(model.train(), batch))[1])


def test_a_router_that_chooses_an_expert_of_each_group_reaches_all() -> None:
    routing = routed(lambda self, scores, x: scores.view(-1, 2, COUNT // 2).argmax(-1) + self.first)
    assert routing.reached(2) == 2.0 > replace(routing, sample=None).reached(2)


@pytest.mark.parametrize(
    "route",
    [
        lambda self, scores, x: (scores.unflatten(1, (2, -1)) + torch.randn(1)).amax(-1).topk(2)[1],
        lambda self, scores, x: (scores * self.scale).view(-1, 2, COUNT // 2).argmax(-1) + self.first,
        lambda self, scores, x: (scores + x[:, :COUNT]).view(-1, 2, COUNT // 2).argmax(-1) + self.first,
        lambda self, scores, x: x[:, :COUNT].topk(2)[1],
        lambda self, scores, x: scores.cumsum(0)[:, :2].topk(2)[1],
    ],
    ids=["random", "scaled by a parameter", "other activations", "no scores", "some experts"],
)
def test_a_router_that_cannot_be_sampled_is_priced_by_the_formula(route: Any) -> None:
    routing = routed(route)
    assert routing == Routing(COUNT, 2)
