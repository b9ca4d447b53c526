"""The process groups of a program: all with one time limit, each used once before the first step, and none that no rank needs.

NCCL makes a communicator when its group is first used, and then waits for all of the group's ranks. So groups that two ranks first use in
opposite orders hang, and so does a batch of transfers that some ranks of the group take no part in. ``ProcessGroups.warm_up`` uses every
group in the order in which all ranks have made them.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

ONE_BY_ONE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
"""Whether torch's pipeline schedules issue a send or a receive by itself; before 2.13 all of them are batches. Under NCCL a single transfer
of a group runs on a communicator of the two ranks alone, a batch on the group's communicator."""


class ProcessGroups:
    """Makes process groups of some ranks of the world; all ranks of the world call the methods, in the same order.

    ``timeout`` is the time limit of every group.
    """

    def __init__(self, timeout: datetime.timedelta) -> None:
        self._timeout = timeout
        self._own: list[dist.ProcessGroup] = []  # those that this rank is in, in the order in which they were made
        self._links: list[dist.ProcessGroup] = []
        self._alone: dist.ProcessGroup | None = None

    def rows(self, ranks: Tensor) -> dist.ProcessGroup | None:
        """Make a group of every row of ``ranks``; return this rank's, ``None`` if it is in no row.

        A row of all ranks is the world's group. Of rows with one rank, each rank makes only its own, once.
        """
        mine = self._rows(ranks)
        if mine is not None and dist.get_world_size(mine) > 1:
            self._own.append(mine)
        return mine

    def _rows(self, ranks: Tensor) -> dist.ProcessGroup | None:
        rank, world, mine = dist.get_rank(), dist.get_world_size(), None
        for row in ranks.tolist():
            if len(row) == world:
                mine = dist.group.WORLD
            elif len(row) > 1:
                group = dist.new_group(row, timeout=self._timeout)
                mine = group if rank in row else mine
            elif row == [rank]:
                mine = self._single()
        return mine

    def _single(self) -> dist.ProcessGroup:
        """The group of this rank alone."""
        if self._alone is None:
            ranks = [dist.get_rank()]
            self._alone = dist.new_group(ranks, timeout=self._timeout, use_local_synchronization=True)
        assert self._alone is not None
        return self._alone

    def flattened(
        self, wanted: Iterable[tuple[str, ...]], names: Sequence[str], ranks: Tensor
    ) -> dict[tuple[str, ...], dist.ProcessGroup]:
        """A group over each of ``wanted`` (axes outermost first); ``ranks`` has a dim of stages, or of pairs of stages that mirror each
        other, then one for every axis of ``names``."""
        groups = {}
        for axes in sorted(wanted):
            inner = [1 + names.index(axis) for axis in axes]
            outer = [dim for dim in range(ranks.dim()) if dim not in inner]
            group = self.rows(ranks.permute(*outer, *inner).flatten(len(outer)).flatten(0, len(outer) - 1))
            assert group is not None
            groups[axes] = group
        return groups

    def links(
        self, lines: Tensor, pairs: Iterable[tuple[int, int]], pipeline: dist.ProcessGroup
    ) -> Mapping[int, dist.ProcessGroup]:
        """A group of this rank and each rank that it exchanges tensors with, by that rank; ``lines[pipeline, ...]`` are all ranks.

        NCCL runs the transfers of a communicator in the order of their issue: on a communicator of all pipeline ranks, a receive that was
        issued early holds up a send to another rank. A ``pipeline`` of two ranks is a pair already.
        """
        found: dict[int, dist.ProcessGroup] = {}
        rank = dist.get_rank()
        # pairs without a common rank follow each other, so that their communicators are made at the same time
        for pair in sorted(set(pairs), key=lambda pair: (pair[0] % 2, pair)):
            rows = lines[list(pair)].flatten(1).t()
            group = pipeline if len(lines) == 2 else self._rows(rows)
            for row in rows.tolist() if group is not None else ():
                if rank in row:
                    assert group is not None
                    found[row[1 - row.index(rank)]] = group
                    self._links.append(group)
        return found

    def warm_up(self, device: torch.device) -> None:
        """Use every group of this rank once, in the order in which the groups were made. gloo connects when a group is made.

        Raises ``RuntimeError`` as NCCL does, if ranks cannot connect.
        """
        if dist.get_backend() == "gloo":
            return
        one = torch.zeros(1, device=device)
        for group in (dist.group.WORLD, *self._own):
            dist.all_reduce(one, group=group)
        for link in self._links:
            way, peer = (dist.isend, 1) if dist.get_rank(link) == 0 else (dist.irecv, 0)
            for work in start_transfers([dist.P2POp(way, one, group=link, group_peer=peer)]):
                work.wait()


def start_transfers(transfers: Sequence[dist.P2POp]) -> list[dist.Work]:
    """Start sends, or receives, as torch's pipeline schedules do, so that they run on the same communicator."""
    if not transfers:
        return []
    if not ONE_BY_ONE:
        return list(dist.batch_isend_irecv(list(transfers)))
    works = [transfer.op(transfer.tensor, transfer.peer, transfer.group) for transfer in transfers]
    return [work for work in works if work is not None]
