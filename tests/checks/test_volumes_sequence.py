"""What Ulysses and ring attention move, as emitted and as sent, against the formulas of their papers.

N are the rows of an activation (batch times sequence), h its hidden size, k that of the keys, P the devices.

* Ulysses (Jacobs et al. 2023, section 3.2): four all-to-alls a layer, of 4 N h / P elements for every device; with fewer heads of keys
  than of queries (2 h + 2 k) N / P. The backward is the same again.
* Ring attention (Liu et al. 2023, section 3): keys and values pass P - 1 devices, 2 (P - 1) / P N k elements sent by each. Backward they
  pass again, and so do their gradients, which take one step more to come home: 2 (P - 1) / P N k + 2 N k.
* The balanced order of a causal mask: what is sharded is exchanged once on the way in and once on the way out, at most N h / P (or
  N k / P) elements sent by each device; on two devices half of it, the other half being in its place already.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exactness import subject
from test_program_ring import mesh_of, slices
from test_rules_kernels import values
from torch import Tensor

from autopar.checks.collectives import exchanges
from autopar.program.kernels_ring import ring_attention
from autopar.program.mesh_axes import on_mesh
from autopar.search.manual import manual_plan
from autopar.shard import plan_shardings
from passes.layer import LocalLayer
from passes.stages import cut_stages

ITEM = 8  # float64
N = 8 * 16  # rows of the models' batches


def block(model: str, **options: int) -> LocalLayer:
    graph = subject(model).graph
    plan = manual_plan(graph, **options)
    return cut_stages(graph, plan, plan_shardings(graph, plan)).layers[1]


def moved(layer: LocalLayer, backward: bool) -> Counter[str]:
    """Bytes of the whole tensors, over all devices, by collective."""
    found: Counter[str] = Counter()
    for one in exchanges(layer):
        if one.backward == backward:
            found[one.collective] += one.bytes
    return found


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize(("model", "hidden", "keys"), [("gpt2", 32, 32), ("bert", 32, 32), ("llama", 32, 16)])
def test_ulysses_is_four_all_to_alls(model: str, hidden: int, keys: int, devices: int) -> None:
    layer = block(model, ulysses=devices)
    found = [one.collective for one in exchanges(layer) if not one.backward]
    assert found == ["all_to_all"] * 4
    expected = {"all_to_all": (2 * hidden + 2 * keys) * N * ITEM}  # of all devices; each has 1/P of it
    assert moved(layer, backward=False) == moved(layer, backward=True) == expected


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize(("model", "hidden", "keys", "causal"), [("bert", 32, 32, False), ("llama", 32, 16, True)])
def test_ring_passes_keys_and_values(model: str, hidden: int, keys: int, causal: bool, devices: int) -> None:
    layer = block(model, ring=devices)
    forward, backward = moved(layer, backward=False), moved(layer, backward=True)
    kv = 2 * keys * N * ITEM
    order = (2 * hidden + 2 * keys) * N * ITEM if causal else 0
    assert forward == Counter(rotate=kv, shift=order) - Counter()
    assert backward == Counter(rotate=2 * kv, shift=kv + order)


# -- as sent ----------------------------------------------------------------------------------------------------------


def sent(devices: int, heads: int, key_heads: int, causal: bool) -> tuple[int, int]:
    """On a rank: the bytes that it sends forward and backward."""
    mesh, count = mesh_of((devices,)), [0]
    if mesh is None:
        return 0, 0
    start, exchange = dist.batch_isend_irecv, dist.all_to_all_single

    def counted(operations: list[dist.P2POp]) -> list[dist.Work]:
        count[0] += sum(o.tensor.numel() * o.tensor.element_size() for o in operations if o.op is dist.isend)
        return start(operations)

    def exchanged(into: Tensor, own: Tensor, taken: list[int], given: list[int], group: Any) -> Any:
        assert given[dist.get_rank(group)] == 0  # what stays is no part of the exchange
        count[0] += own.numel() * own.element_size()
        return exchange(into, own, taken, given, group=group)

    whole = [values(2, h, 16, 4, seed=i) for i, h in enumerate((heads, key_heads, key_heads))]
    mine = [slices(x, devices).requires_grad_() for x in whole]
    dist.batch_isend_irecv, dist.all_to_all_single = counted, exchanged
    try:
        with on_mesh(mesh):
            out = ring_attention(*mine, "inner", is_causal=causal, enable_gqa=heads != key_heads)
            forward = count[0]
            out.backward(torch.ones_like(out))
    finally:
        dist.batch_isend_irecv, dist.all_to_all_single = start, exchange
    return forward, count[0] - forward


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_a_ring_sends_what_its_formula_says(devices: int, causal: bool, workers4) -> None:
    ranks = workers4.run("test_volumes_sequence:sent", devices, 4, 2, causal)[:devices]
    rows, hidden, keys = 2 * 16, 4 * 4, 2 * 4
    kv = 2 * rows * keys * ITEM
    pass_once = kv * (devices - 1) // devices
    order = (2 * hidden + 2 * keys) * rows * ITEM // devices if causal else 0
    order = order // 2 if devices == 2 else order
    assert max(forward for forward, _ in ranks) == pass_once + order
    assert max(backward for _, backward in ranks) == 2 * pass_once + kv // devices + order
