"""Faults of collectives, planted: in emitted programs, by a change of one of their files, and in small functions of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from places import file_of
from recorded import Case, captured

from autopar.checks.nccl.findings import (
    DEADLOCK,
    DTYPE,
    IN_FLIGHT,
    LATE,
    NEVER_WAITED,
    NOT_CONTIGUOUS,
    SEQUENCE,
    CollectiveFinding,
)
from autopar.verify import kind
from autopar.verify.recording import RecordedSteps, Workers, record


@dataclass(frozen=True)
class Fault:
    """``old`` is replaced by ``new`` wherever it is in the program's ``file``; one of ``kinds`` is found then."""

    name: str
    case: Case
    file: str
    old: str
    new: str
    kinds: tuple[str, ...]

    def plant(self, folder: Path) -> None:
        path = file_of(folder, self.file)
        text = path.read_text()
        assert self.old in text, (self.name, self.old)
        path.write_text(text.replace(self.old, self.new))

    def found(self, workers: Workers) -> tuple[CollectiveFinding, ...]:
        given = captured(self.case.model)
        plan = self.case.plan(given.graph)
        return record(given.graph, plan, given.state, given.batch, workers, self.case.recipe, self.plant).findings()


ONE = "dist.get_rank() == 1"
TORCH = "__import__('torch')"
DATA = Case("mlp", kind("data 2", data=2, microbatches=2))
SHARDED = Case("mlp", kind("data 2, zero 1", data=2, zero=1, microbatches=2))
REDUCE = "dist.all_reduce(self._grads, group=self._group, async_op=True)"
CLIP = "dist.all_reduce(squares, group=self.world.replica)"
CLIPPED = Case("mlp", kind("data 2", data=2), RecordedSteps(max_norm=1.0), "clipped")
SCATTER = "self._work = reduce_scatter(self._sum, self._grads, group=self._group, async_op=True)"
RING = Case("llama", kind("ring 2", ring=2))
EXPERTS = Case("mixtral", kind("expert 2", expert=2))
EXCHANGE = "dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)"
RECEIVE = "operations.append(dist.P2POp(dist.irecv, into, group=group, group_peer=(here - distance) % n))"
CLIP_START = "self._reductions.start()"
WAITS = (LATE, NEVER_WAITED)

FAULTS = (
    Fault("flat reductions: no wait", DATA, "parameters.py", "self._work.wait()", "pass", WAITS),
    Fault("publications: no wait", SHARDED, "parameters.py", "self._sending.wait()", "pass", WAITS),
    Fault(
        "overlapped products: no wait",
        Case("llama", kind("tensor 2", tensor=2)),
        "kernels_overlap.py",
        "work.wait()",
        "pass",
        WAITS,
    ),
    Fault(
        "halves: no wait",
        Case("llama", kind("tensor+sequence 2, in halves", tensor=2, sequence=True, overlap="halves", microbatches=2)),
        "halves.py",
        "work.wait()",
        "pass",
        WAITS,
    ),
    Fault("ring: no wait", RING, "kernels_ring.py", "work.wait()", "pass", WAITS),
    Fault(
        "Chimera: no wait",
        Case("llama", kind("pipeline 2, Chimera", pipeline=2, microbatches=4, schedule="chimera")),
        "chimera.py",
        "work.wait()",
        "pass",
        WAITS,
    ),
    Fault("experts: nobody waits", EXPERTS, "kernels_experts.py", EXCHANGE, EXCHANGE[:-1] + ", async_op=True)", WAITS),
    Fault(
        "reductions in another order on one rank",
        DATA,
        "reductions.py",
        "key=lambda group: children.index(group.placement.layer))",
        "key=lambda group: children.index(group.placement.layer), reverse=__import__('torch').distributed.get_rank() == 1)",
        (SEQUENCE,),
    ),
    Fault(
        "a wrong dtype",
        DATA,
        "parameters.py",
        REDUCE,
        f"dist.all_reduce(self._grads.float() if {ONE} else self._grads, group=self._group, async_op=True)",
        (SEQUENCE,),
    ),
    Fault(
        "a wrong count",
        DATA,
        "parameters.py",
        REDUCE,
        f"dist.all_reduce(self._grads[:-1] if {ONE} else self._grads, group=self._group, async_op=True)",
        (SEQUENCE,),
    ),
    Fault(
        "another reduce op",
        CLIPPED,
        "trainer.py",
        CLIP,
        f"dist.all_reduce(squares, dist.ReduceOp.MAX if {ONE} else dist.ReduceOp.SUM, group=self.world.replica)",
        (SEQUENCE,),
    ),
    Fault("a missing member", CLIPPED, "trainer.py", CLIP, f"{ONE} or {CLIP}", (SEQUENCE,)),
    Fault(
        "another root",
        Case("mlp", kind("parameter server", data=2, sync="parameter-server")),
        "parameters.py",
        "group_src=0, async_op=True",
        "group_src=dist.get_rank(), async_op=True",
        (SEQUENCE,),
    ),
    Fault("a one-sided batch", RING, "kernels_ring.py", RECEIVE, f"here or {RECEIVE}", (SEQUENCE,)),
    Fault(
        "an operand that is not contiguous",
        DATA,
        "parameters.py",
        REDUCE,
        "dist.all_reduce(self._grads[::2], group=self._group, async_op=True)",
        (NOT_CONTIGUOUS,),
    ),
    Fault(
        "an operand that is written in flight",
        SHARDED,
        "parameters.py",
        SCATTER,
        f"{SCATTER}; self._grads.zero_()",
        (IN_FLIGHT,),
    ),
    Fault(
        "a dtype that NCCL lacks",
        CLIPPED,
        "trainer.py",
        CLIP,
        "dist.all_reduce(squares.to(__import__('torch').int16), group=self.world.replica)",
        (DTYPE,),
    ),
    Fault(
        "a send that nobody receives",
        Case("mlp", kind("pipeline 2", pipeline=2, microbatches=2)),
        "trainer.py",
        CLIP_START,
        f"dist.get_rank() or dist.isend({TORCH}.zeros(1), 1)\n        {CLIP_START}",
        (SEQUENCE,),
    ),
)
QUICK = ("flat reductions: no wait", "a wrong count", "a missing member", "an operand that is written in flight")
"""Those of the default tests."""


# -- small functions, called on every rank ------------------------------------------------------------------------------


def in_opposite_orders() -> None:
    """Two groups of the same ranks, each reduced and awaited: rank 1 begins with the other one."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups if dist.get_rank() == 0 else reversed(groups):
        dist.all_reduce(torch.ones(2), group=group)


def in_opposite_orders_at_a_time() -> None:
    """The same, with both in flight before the first wait: NCCL runs both at a time if it finds room, once they are connected."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    several = [torch.ones(2) for _ in groups]
    pairs = list(zip(groups, several, strict=True))
    ordered = pairs if dist.get_rank() == 0 else pairs[::-1]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for group, tensor in ordered]
    for work in works:
        work.wait()


def first_use_by_some() -> None:
    """A batch that two of three ranks take part in, at the group's first use, and then an all-reduce of all."""
    group, rank = dist.new_group([0, 1, 2]), dist.get_rank()
    if rank < 2:
        way = dist.isend if rank == 0 else dist.irecv
        for work in dist.batch_isend_irecv([dist.P2POp(way, torch.ones(2), 1 - rank, group)]):
            work.wait()
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), group=group)


def first_use_after_warm_up() -> None:
    """The same after all groups were used once."""
    dist.all_reduce(torch.ones(1))
    group, rank = dist.new_group([0, 1, 2]), dist.get_rank()
    dist.all_reduce(torch.ones(1), group=group)
    if rank < 2:
        way = dist.isend if rank == 0 else dist.irecv
        for work in dist.batch_isend_irecv([dist.P2POp(way, torch.ones(2), 1 - rank, group)]):
            work.wait()
    dist.all_reduce(torch.ones(1), group=group)


def sends_that_cross() -> None:
    """Both ranks send before they receive, one by one: a deadlock unless a send returns before its receive is there."""
    peer = 1 - dist.get_rank()
    dist.send(torch.ones(2), peer)
    dist.recv(torch.ones(2), peer)


def reads_on_the_host() -> None:
    """The host reads a sum before it waits for it."""
    total = torch.ones(1, dtype=torch.int64)
    work = dist.all_reduce(total, async_op=True)
    if total.item() == 2:
        dist.all_reduce(torch.ones(1))
    work.wait()


FUNCTIONS = {
    "in_opposite_orders": (2, DEADLOCK, 6),
    "in_opposite_orders_at_a_time": (2, DEADLOCK, 3),
    "first_use_by_some": (3, DEADLOCK, 1),
    "first_use_after_warm_up": (3, "", 0),
    "sends_that_cross": (2, DEADLOCK, 6),
    "reads_on_the_host": (2, LATE, 0),
}
"""Each function's ranks, what is found, and in how many modes."""
