"""What the dispatch of tokens to experts sends between nodes, in one hop and through relays, against the formulas of its papers.

Each of T tokens of a rank has k of E experts, on N nodes, and a row of h elements.

* In one hop (Lepikhin et al. 2020, section 3.2) a row is sent for every choice of an expert elsewhere: k (N - 1) / N rows a token between
  nodes, if all experts are equally likely.
* Through relays (DeepSeek-V3, arXiv:2412.19437, section 3.2.2) a token is sent once to each node with any of its experts; where the router
  is limited to M nodes, at most M rows. Its choices (8 bytes each) and their weights go with it.

What returns, and the gradients of both, are as many rows again; choices have no gradient.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from limited_routers import captured, deepseek_v2, mixture, priced_routing
from test_rules_kernels import values
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from autopar.checks.sample_experts import plain_experts
from autopar.program.mesh_axes import on_mesh

TOKENS, WIDTH, EXPERTS, CHOICES, ITEM = 96, 8, 16, 4, 8
ROW = WIDTH * ITEM


def routed(rank: int, nodes: int, limit: int) -> Tensor:
    """The choices of a rank's tokens: of all experts, or of those of the ``limit`` nodes with the highest scores."""
    scores = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(rank))
    if limit:
        by_node = scores.view(TOKENS, nodes, -1)
        best = by_node.amax(-1).topk(limit).indices
        allowed = torch.zeros(TOKENS, nodes, dtype=torch.bool).scatter(1, best, True)
        scores = by_node.masked_fill(~allowed.unsqueeze(-1), -1.0).flatten(1)
    return scores.topk(CHOICES).indices


def sent(nodes: int, limit: int, relayed: bool) -> tuple[list[int], list[int], int]:
    """On a rank: the bytes that it sends to other nodes forward and backward, by all-to-all, and its node."""
    inside = dist.get_world_size() // nodes
    sizes = {"node": nodes, "gpu": inside} if relayed else {"rank": nodes * inside}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    axes = {"owners": tuple(sizes)} | (
        {"relay": ("node",), "exchange": ("gpu",)} if relayed else {"exchange": ("rank",)}
    )
    node, exchange, counted = dist.get_rank() // inside, dist.all_to_all_single, [list[int](), list[int]()]
    of_node = range(node * inside, (node + 1) * inside)
    passes = counted[0]

    def exchanged(into: Tensor, own: Tensor, taken: list[int], given: list[int], group: Any) -> Any:
        away = [n for to, n in zip(dist.get_process_group_ranks(group), given, strict=True) if to not in of_node]
        passes.append(sum(away) * own[:1].numel() * own.element_size() if len(own) else 0)
        return exchange(into, own, taken, given, group=group)

    op = plain_experts(TOKENS, WIDTH, EXPERTS, inner=6)
    own = EXPERTS // dist.get_world_size()
    parameters = [
        torch.stack([values(*p.meta["val"].shape[1:], seed=9 + i) for _ in range(own)]).requires_grad_()
        for i, p in enumerate(op.parameters)
    ]
    x, weights = values(TOKENS, WIDTH, seed=1).requires_grad_(), values(TOKENS, CHOICES, seed=2).requires_grad_()
    dist.all_to_all_single = exchanged
    try:
        with on_mesh(mesh):
            out = op(x, routed(dist.get_rank(), nodes, limit), weights, *parameters, **axes)
            passes = counted[1]
            out.backward(torch.ones_like(out))
    finally:
        dist.all_to_all_single = exchange
    return counted[0], counted[1], node


@pytest.mark.parametrize("relayed", [False, True], ids=["one hop", "relayed"])
@pytest.mark.parametrize(("nodes", "limit"), [(2, 0), (2, 1), (4, 0), (4, 2)])
def test_nodes_get_what_the_formulas_say(nodes: int, limit: int, relayed: bool, workers4) -> None:
    ranks = workers4.run("test_volumes_dispatch:sent", nodes, limit, relayed)
    rows = 0
    for rank, (_, _, node) in enumerate(ranks):
        at = routed(rank, nodes, limit) // (EXPERTS // nodes)
        reached = [set(each.tolist()) for each in at]
        rows += sum(len(each - {node}) for each in reached) if relayed else int((at != node).sum())
        assert not limit or max(map(len, reached)) <= limit
    forward, backward = (sum(sum(rank[i]) for rank in ranks) for i in (0, 1))
    counts = 8 * ((nodes - 1) if relayed else EXPERTS - EXPERTS // nodes)  # how many rows to expect, from every rank
    choices, weights = (rows * CHOICES * size * relayed for size in (8, ITEM))
    assert forward == 2 * rows * ROW + choices + weights + 4 * counts
    assert backward == 2 * rows * ROW + weights
    # DeepSeek-V2's router scores a node by its best expert, as ``routed`` does
    router = deepseek_v2(EXPERTS, CHOICES, *((nodes, limit) if limit else (1, 1)))
    expected = priced_routing(mixture(captured(router))[1]).reached(nodes) if relayed else CHOICES
    assert math.isclose(rows / (4 * TOKENS), expected * (nodes - 1) / nodes, rel_tol=0.1)
