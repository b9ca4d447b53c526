"""The reduce-scatter of programs on gloo: exact, and at half the bytes of gloo's own."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from workers import WorkerPool

from autopar.program import collectives


def reduced(dtype: torch.dtype, late: bool) -> tuple[Tensor, Tensor, list[str]]:
    """This rank's slice by ``reduce_scatter``, all ranks' operands, and which collectives ran."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    mine, part = torch.randn(3 * size, 5, dtype=dtype), torch.full((3, 5), torch.nan, dtype=dtype)
    called: list[str] = []
    exchange, total = dist.all_to_all_single, dist.all_reduce

    def noting(name: str, call: object) -> object:
        return lambda *args, **kwargs: (called.append(name), call(*args, **kwargs))[1]  # type: ignore[operator]

    with (
        mock.patch.object(dist, "all_to_all_single", noting("all_to_all", exchange)),
        mock.patch.object(dist, "all_reduce", noting("all_reduce", total)),
    ):
        work = collectives.reduce_scatter(part, mine, async_op=late)
        if late:
            assert work is not None
            work.wait()
    whole = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(whole, mine)
    return part, torch.stack(whole), called


@pytest.mark.parametrize("late", [False, True], ids=["waits", "async"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_every_rank_gets_the_sum_of_its_slice(dtype: torch.dtype, late: bool, workers4: WorkerPool) -> None:
    for rank, (part, operands, called) in enumerate(workers4.run("test_program_collectives:reduced", dtype, late)):
        assert torch.equal(part, operands.sum(0)[3 * rank : 3 * rank + 3])
        assert called == ["all_to_all"]


def fsdp_refuses_an_average() -> str:
    try:
        collectives.ShardedReduceScatter()(torch.zeros(1), torch.zeros(2), dist.group.WORLD, dist.ReduceOp.AVG)  # type: ignore[arg-type]
    except AssertionError as error:
        return str(error)
    return ""


def test_only_sums_are_exchanged(workers2: WorkerPool) -> None:
    assert all(workers2.run("test_program_collectives:fsdp_refuses_an_average"))
