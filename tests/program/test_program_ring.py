"""Ring attention on real process groups against attention on one device, in float64, and under the type checker."""

from __future__ import annotations

import itertools
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from spmd_types.checker import typecheck
from test_rules_kernels import close, values
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.program import kernels_ring
from autopar.program.kernels_ring import Ring, _ChunkOrder, ring_attention
from autopar.program.mesh_axes import on_mesh
from autopar.torch_private import fake_store

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:spmd_types")


# -- on ranks ---------------------------------------------------------------------------------------------------------


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh | None:
    """A mesh of the first ranks with axes outer and inner, or inner alone; None on the ranks that it leaves out."""
    mesh = DeviceMesh("cpu", torch.arange(prod(shape)).view(shape), mesh_dim_names=("outer", "inner")[-len(shape) :])
    return mesh if dist.get_rank() < prod(shape) else None


def slices(x: Tensor, n: int, dim: int = -2) -> Tensor:
    return x.chunk(n, dim)[dist.get_rank()].clone()


def axes_of(mesh: DeviceMesh) -> Any:
    names = mesh.mesh_dim_names
    return names[0] if len(names) == 1 else names


def against_one_device(
    shape: tuple[int, ...],
    heads: int,
    key_heads: int,
    length: int,
    mask: Tensor | None,
    causal: bool,
    scores: int,
    size: int = 4,
) -> None:
    """Result and gradients (the mask's too, if it has one) of every slice. Heads of the value have ``size`` numbers, the others' 6: with 6,
    and no mask, the device's kernel computes the steps."""
    mesh, n = mesh_of(shape), prod(shape)
    if mesh is None:
        return
    kernels_ring.SCORES = scores
    whole = [
        values(2, h, length, e, seed=i) for i, (h, e) in enumerate([(heads, 6), (key_heads, 6), (key_heads, size)])
    ]
    whole = [x.requires_grad_() for x in whole]
    floating = mask is not None and mask.is_floating_point()
    if floating:
        mask.requires_grad_()
    given = {"is_causal": causal, "scale": 0.3, "enable_gqa": heads != key_heads}
    expected = F.scaled_dot_product_attention(*whole, mask, **given)
    g = values(*expected.shape, seed=9)
    expected.backward(g)
    mine = [slices(x.detach(), n).requires_grad_() for x in whole]
    rows = None
    if mask is not None:
        rows = slices(mask.detach(), n) if mask.shape[-2] > 1 else mask.detach().clone()
        rows.requires_grad_(floating)
    assert kernels_ring.has_kernel(*mine, rows, 0.0, causal) == (size == 6 and mask is None)
    with on_mesh(mesh):
        out = ring_attention(*mine, axes_of(mesh), rows, **given)
        out.backward(slices(g, n))
    close(out.detach(), slices(expected.detach(), n))
    for got, x in zip(mine, whole, strict=True):
        close(got.grad, slices(x.grad, n))
    if floating:
        close(rows.grad, slices(mask.grad, n))


def dropped(p: float) -> None:
    """With one dropout mask throughout, the gradient is the slope: checked along random directions, by central differences."""
    mesh, rank = mesh_of((2,)), dist.get_rank()
    mine = [values(2, 2, 6, 4, seed=i + 10 * rank).requires_grad_() for i in range(3)]
    directions = [values(2, 2, 6, 4, seed=i + 50 + 10 * rank) for i in range(3)]
    g = values(2, 2, 6, 4, seed=99 + rank)

    def loss(at: float) -> Tensor:
        moved = [x.detach() + at * d for x, d in zip(mine, directions, strict=True)]
        return (ring_attention(*moved, "inner", is_causal=True, dropout_p=p, seed=7 + rank) * g).sum()

    with on_mesh(mesh):
        first = ring_attention(*mine, "inner", is_causal=True, dropout_p=p, seed=7 + rank)
        again = ring_attention(*mine, "inner", is_causal=True, dropout_p=p, seed=7 + rank)
        other = ring_attention(*mine, "inner", is_causal=True, dropout_p=p, seed=70 + rank)
        (first * g).sum().backward()
        numbers = torch.stack(
            [(loss(1e-5) - loss(-1e-5)) / 2e-5, sum((x.grad * d).sum() for x, d in zip(mine, directions, strict=True))]
        )
    dist.all_reduce(numbers)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert abs(float(numbers[0] / numbers[1]) - 1) < 1e-6, numbers


def mean_of_dropout(p: float, draws: int) -> float:
    """The largest distance between attention and the mean of many draws, in standard errors of the mean."""
    mesh, rank = mesh_of((2,)), dist.get_rank()
    whole = [values(1, 1, 8, 2, seed=i) for i in range(3)]
    mine = [slices(x, 2) for x in whole]
    with on_mesh(mesh):
        out = torch.stack([ring_attention(*mine, "inner", dropout_p=p, seed=2 * i + rank) for i in range(draws)])
    expected = slices(F.scaled_dot_product_attention(*whole), 2)
    return float(((out.mean(0) - expected).abs() / (out.std(0) / draws**0.5)).max())


def in_16_bits() -> None:
    """Accumulated in 32: as near to exact attention as one rounding of the result."""
    mesh = mesh_of((2,))
    whole = [values(1, 2, 64, 16, seed=i).bfloat16().requires_grad_() for i in range(3)]
    exact = F.scaled_dot_product_attention(*(x.double() for x in whole), is_causal=True)
    mine = [slices(x.detach(), 2).requires_grad_() for x in whole]
    with on_mesh(mesh):
        out = ring_attention(*mine, "inner", is_causal=True)
        out.sum().backward()
    assert out.dtype == mine[0].grad.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), slices(exact, 2), rtol=2**-8, atol=1e-6)


def kept_for_the_backward() -> set[tuple[int, ...]]:
    """The shapes of what autograd saves."""
    mesh, found = mesh_of((2,)), []
    mine = [values(2, 2, 8, 4, seed=i).requires_grad_() for i in range(3)]
    with (
        on_mesh(mesh),
        torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(tuple(t.shape)) or t, lambda t: t),
    ):
        ring_attention(*mine, "inner", is_causal=True)
    return found


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2,), (3,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_as_on_one_device(shape, causal, workers4):
    n = prod(shape)
    for size in (4, 6):
        workers4.run("test_program_ring:against_one_device", shape, 4, 4, 4 * n, None, causal, 2**26, size)
        workers4.run("test_program_ring:against_one_device", shape, 6, 2, 4 * n, None, causal, 2**26, size)


def test_lengths_that_do_not_halve_and_few_rows_at_once(workers4):
    for size in (4, 6):
        workers4.run("test_program_ring:against_one_device", (3,), 2, 1, 15, None, True, 2**26, size)
    workers4.run("test_program_ring:against_one_device", (2,), 4, 2, 24, None, True, 100)


def documents(length: int) -> Tensor:
    """Rows see their own document's earlier keys; one row sees nothing."""
    document = torch.arange(length) // 5
    allowed = (document[:, None] == document) & torch.ones(length, length, dtype=torch.bool).tril()
    allowed[7] = False
    return allowed


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=str)
def test_masks(shape, workers4):
    length = 16
    packed = documents(length).expand(2, 1, length, length).contiguous()
    bias = values(2, 4, length, length, seed=5)
    padding = torch.ones(2, 1, 1, length, dtype=torch.bool)
    padding[1, :, :, 11:] = False
    for mask in (packed, bias, padding, values(length, length, seed=3)):
        workers4.run("test_program_ring:against_one_device", shape, 4, 2, length, mask, False, 300)


def test_dropout(workers2):
    workers2.run("test_program_ring:dropped", 0.4)
    scores = torch.ones(2, 3)
    everything = SimpleNamespace(generator=torch.Generator(), dropout_p=1.0)
    assert not kernels_ring._Scores.dropout_mask(everything, scores).any()  # type: ignore[arg-type]
    assert max(workers2.run("test_program_ring:mean_of_dropout", 0.5, 100)) < 5


def test_16_bits(workers2):
    workers2.run("test_program_ring:in_16_bits")


def test_no_scores_are_kept(workers2):
    tensor, rows = (2, 2, 8, 4), (2, 2, 8)
    assert sorted(workers2.run("test_program_ring:kept_for_the_backward")[0]) == sorted([tensor] * 4 + [rows])


def test_a_gpus_kernel_is_not_called_for_heads_that_it_does_not_take() -> None:
    query = SimpleNamespace(shape=(1, 2, 4, 20), device=torch.device("cuda"))
    assert not kernels_ring.has_kernel(query, query, query, None, 0.0, True)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_every_step_of_a_causal_ring_is_one_call_of_the_kernel_and_as_much_work(n: int) -> None:
    chunk = 5
    for rank in range(n):
        ring = mock.Mock(size=n, coordinates=(rank,), index=lambda coordinates: coordinates[0])
        order = kernels_ring._ChunkOrder.of(ring, 2 * chunk, True)
        for origin in range(n):
            (part,) = kernels_ring._parts(order, origin, True, 2 * chunk)
            rows, keys = (s.stop - s.start for s in (part.rows, part.keys))
            assert part.causal == (origin == rank)
            assert rows * keys == (2 if origin != rank else 4) * chunk**2


def test_the_calls_of_a_gpus_kernel_fit_torch() -> None:
    """On meta, whose kernels check arguments and give shapes."""
    q, k, v = (torch.empty(2, 4, length, 64, dtype=torch.bfloat16, device="meta") for length in (8, 16, 16))
    out, lse = kernels_ring._attention(q, k, v, False, 0.1)
    assert out.shape == q.shape and lse.shape == q.shape[:-1] and lse.dtype == torch.float32
    found = kernels_ring._attention_backward((out, q, k, v, out, lse), False, 0.1)
    assert [t.shape for t in found] == [t.shape for t in (q, k, v)]


# -- types ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_mesh():
    dist.init_process_group("fake", rank=0, world_size=4, store=fake_store())
    try:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ring"))
    finally:
        dist.destroy_process_group()


def typed(shape: tuple[int, ...], *places: Any) -> Tensor:
    x = torch.empty(shape, device="meta", requires_grad=True)
    local = {axis: spmd.V if any(axis == place for place in places) else spmd.R for axis in ("data", "ring")}
    return spmd.assert_type(x, local, spmd.PartitionSpec(*places))


def test_types(fake_mesh):
    whole = ("data", None, "ring", None)
    with on_mesh(fake_mesh), typecheck(local=False):
        q, k, v = (typed((2, 4, 8, 6), *whole) for _ in range(3))
        rows = typed((2, 1, 8, 16), "data", None, "ring", None)
        out = ring_attention(q, k, v, "ring", rows)
        assert spmd.get_partition_spec(out) == spmd.get_partition_spec(q) and out.shape == q.shape
        with pytest.raises(spmd.SpmdTypeError, match="operands are sharded"):
            ring_attention(q, typed((2, 4, 16, 6), "data", None, None, None), v, "ring")
        with pytest.raises(spmd.SpmdTypeError, match="the ring is"):
            ring_attention(*(typed((2, 4, 16, 6), "data", None, None, None) for _ in range(3)), "ring")
        with pytest.raises(spmd.SpmdTypeError, match="the mask is sharded"):
            ring_attention(q, k, v, "ring", typed((2, 1, 16, 8), "data", None, None, "ring"))


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (4, 2), (4, 4), (4, 8), (16, 2), (2, 2, 2)], ids=str)
def test_all_ranks_of_a_group_exchange_chunks_together(sizes: tuple[int, ...]) -> None:
    """NCCL makes a communicator when all ranks of its group use it, and an exchange without some of them would wait for these forever."""
    places = list(itertools.product(*map(range, sizes)))
    exchanges: dict[Any, dict[int, list[Any]]] = {}

    def noted(got: Tensor, sent: Tensor, coming: list[int], leaving: list[int], *, group: Any) -> None:
        assert (len(got), len(sent)) == (sum(coming), sum(leaving))
        axis, others, here = group
        exchanges.setdefault((axis, others), {}).setdefault(here, []).append((coming, leaving))

    with (
        mock.patch.object(dist, "all_to_all_single", noted),
        mock.patch.object(dist, "batch_isend_irecv", side_effect=AssertionError("some ranks take no part")),
    ):
        for place in places:
            groups = tuple((axis, (*place[:axis], *place[axis + 1 :]), place[axis]) for axis in range(len(sizes)))
            ring = Ring(groups)  # type: ignore[arg-type]
            ring.__dict__.update(sizes=sizes, coordinates=place)
            order = _ChunkOrder.of(ring, 2, causal=True)
            order.enter(torch.zeros(2, 1))
            order.leave(torch.zeros(2, 1))
    assert exchanges
    for (axis, _), by in exchanges.items():
        assert sorted(by) == list(range(sizes[axis])) and len({len(calls) for calls in by.values()}) == 1
        for i in range(len(by[0])):
            for a, b in itertools.product(by, repeat=2):
                assert by[a][i][1][b] == by[b][i][0][a]
