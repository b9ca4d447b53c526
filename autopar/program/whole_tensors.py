"""Unsharded tensors for optimizers that need them, such as Muon: for each parameter, one rank has the full tensor and updates it.

If ranks have slices, parts or ZeRO shards of a parameter, one of these ranks is its *owner*, which keeps the full master copy and the
optimizer state. In a step each owner gathers the gradients' pieces, updates its parameters, and sends the new values back to all
ranks that have pieces of them. No parameter has two owners, so none is updated twice (K. Jordan et al., "Muon: an optimizer
for hidden layers in neural networks", 2024, distribute matrices over ranks likewise).

Elements are balanced over owners: each rank has about its share of the pipeline stage. Every rank computes the same owners from the
layouts, and tells each owner which boxes of the owner's parameters it has. A parameter that all of its ranks have in full, as under plain
data parallelism, is updated on all of them, and nothing is sent. The cost model leaves all this out: the full masters take about 4 more
bytes per element of a rank's share in float32, their gradients as many during the update, and each step sends the gradients and the new
values once.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .box_exchange import MasterValues
from .boxes import Box, Piece, part_of
from .collectives import exchange
from .parameters import Master, upload
from .world import Layout, LoadedProgram, World

ROUND_BYTES = 256 * 2**20
"""The size of send and receive buffers, unless one tensor is larger."""

Values = Callable[[Master], Tensor | None]

_Name = tuple[int, str]
"""A stage, and the name of a parameter in the user's model."""


class _Key(NamedTuple):
    """A parameter. Copies of a tied parameter in several stages, and in several local SGD replicas, are updated separately."""

    replica: tuple[int, ...]
    stage: int
    original: str


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A box of a parameter that is sent between the ranks ``holder`` and ``owner``. It is box ``number`` of the holder's master ``index``;
    the owner doesn't use these two. Owners gather only ``counted`` boxes: if several ranks have the same values, those of one rank are
    counted, so each value is sent once. All holders get the new values."""

    key: _Key
    holder: int
    owner: int
    box: Box
    counted: bool
    index: int = -1
    number: int = -1


class WholeTensors:
    """This rank's masters for an optimizer that needs unsharded tensors: all ``masters`` are full tensors.

    All ranks create one, with their masters of the same parameters, and call its methods in the same order.
    """

    def __init__(self, masters: Sequence[Master], program: LoadedProgram, world: World) -> None:
        self._world = world
        self._held = [master for master in masters if any(True for _ in _pieces(master, master.tensor.detach(), world))]
        local_sgd_axes = program.split_local_sgd_axes(list(program.spec.mesh))[1]
        replica = tuple(world.coordinates[axis][0] for axis in local_sgd_axes)
        trained = [layout for layout in reversed(program.layouts) if layout.trainable]
        layouts = {(layout.stage, name): layout for layout in trained for name in layout.originals}
        names = sorted(layouts)
        in_parts = _stored_in_parts(self._held, names, world)
        owners = _owners({name: layouts[name] for name in names if name in in_parts}, program, world)
        self.masters = [m for m in self._held if (m.layout.stage, m.layout.originals[0]) not in in_parts]
        self._owned: dict[_Key, Master] = {}
        for key in sorted(key for key, owner in owners.items() if owner == dist.get_rank()):
            layout = layouts[key.stage, key.original]
            shape = layout.original_shape
            device = torch.device("cpu") if program.placement(layout).place else world.device
            tensor = nn.Parameter(torch.empty(shape, dtype=program.placement(layout).master_dtype, device=device))
            self._owned[key] = Master(layout.of(key.original), tensor, ())
        self.masters += self._owned.values()
        held = [
            _Transfer(
                key, dist.get_rank(), owners[key], piece.box, world.first_on(master.replicated_axes), index, number
            )
            for index, master in enumerate(self._held)
            for number, piece in enumerate(_pieces(master, master.tensor.detach(), world))
            if (key := _Key(replica, master.layout.stage, piece.path[1])) in owners
        ]
        numbers = {_Key(replica, *name): number for number, name in enumerate(names)}
        owned = _exchange_box_lists(held, numbers, world)
        self._rounds = [
            (dtype, [t for t in held if t.key in keys], [t for t in owned if t.key in keys])
            for dtype, keys in _rounds(owners, layouts, program)
        ]
        self.gather_values()

    def gather_values(self) -> None:
        """Copy the pieces' values into the owners' full masters."""
        self._gather(_value)

    def gather_gradients(self) -> None:
        """Send the gradients' pieces to the owners."""
        for master in self._owned.values():
            master.tensor.grad = torch.empty_like(master.tensor)
        self._gather(lambda master: None if master.gradient is None else master.gradient.contiguous())

    @torch.no_grad()
    def scatter_values(self) -> None:
        """Write the owners' values into the pieces on all ranks, after an update. The owners' gradients are freed."""
        for dtype, held, owned in self._rounds:
            boxes = self._boxes_of(held, _value)
            sent = [(t.holder, part_of(self._owned[t.key].tensor.detach(), t.box)) for t in owned]
            received = [(t.owner, boxes[t.index][t.number]) for t in held]
            exchange(sent, received, dtype, self._world.device)
        for master in self._owned.values():
            master.tensor.grad = None
        upload(self._held)

    @torch.no_grad()
    def _gather(self, values: Values) -> None:
        for dtype, every_held, every_owned in self._rounds:
            held, owned = ([t for t in every if t.counted] for every in (every_held, every_owned))
            boxes = self._boxes_of(held, values)
            received: list[tuple[int, Tensor]] = []
            for transfer in owned:
                full = values(self._owned[transfer.key])
                assert full is not None
                received.append((transfer.holder, part_of(full, transfer.box)))
            sent = [(t.owner, boxes[t.index][t.number]) for t in held]
            exchange(sent, received, dtype, self._world.device)

    def _boxes_of(self, transfers: Sequence[_Transfer], values: Values) -> dict[int, list[Tensor]]:
        """Return views of this rank's boxes, by the index of the master."""
        found = {}
        for index in {transfer.index for transfer in transfers}:
            tensor = values(self._held[index])
            tensor = torch.zeros_like(self._held[index].tensor) if tensor is None else tensor
            found[index] = [piece.values for piece in _pieces(self._held[index], tensor, self._world)]
        return found


def _value(master: Master) -> Tensor:
    return master.tensor.detach()


def _pieces(master: Master, values: Tensor, world: World) -> Iterator[Piece]:
    """Return the pieces of the user's parameters that a master has, with its ``values``."""
    return MasterValues(("model", master.layout.original), master, values).pieces(world)


def _stored_in_parts(held: Sequence[Master], names: Sequence[_Name], world: World) -> set[_Name]:
    """Return the parameters in ``names`` that some rank has only in part. This takes one small all-reduce."""
    number = {name: i for i, name in enumerate(names)}
    marks = torch.zeros(len(names), dtype=torch.int32, device=world.device)
    for master in held:
        shape = master.layout.original_shape
        full = [Box((0,) * len(shape), shape)]
        boxes = [piece.box for piece in _pieces(master, master.tensor.detach(), world)]
        if tuple(master.tensor.shape) != shape or boxes != full:
            marks[[number[master.layout.stage, name] for name in master.layout.originals]] = 1
    dist.all_reduce(marks, dist.ReduceOp.MAX)
    return {name for name, mark in zip(names, marks.tolist(), strict=True) if mark}


def _owners(layouts: Mapping[_Name, Layout], program: LoadedProgram, world: World) -> dict[_Key, int]:
    """Assign each parameter, from the largest to the smallest, to the rank of its stage that owns the fewest elements so far."""
    names, local_sgd_axes = list(world.coordinates), program.split_local_sgd_axes(list(program.spec.mesh))[1]
    replicas = list(itertools.product(*(range(world.coordinates[axis][1]) for axis in local_sgd_axes)))
    loads: dict[tuple[int, tuple[int, ...]], list[tuple[int, int]]] = {}  # heaps of elements and ranks
    owners: dict[_Key, int] = {}
    elements_of = {name: math.prod(layout.original_shape) for name, layout in layouts.items()}
    for stage, original in sorted(layouts, key=lambda name: (-elements_of[name], *name)):
        row = world.placed[stage]
        # if every stage has two copies, ``grid`` has one row for both pipeline ranks of a stage: ``r`` and ``P - 1 - r``
        row = row if row < len(world.grid) else max(world.placed) - row
        for replica in replicas:
            if (row, replica) not in loads:
                at = dict(zip(local_sgd_axes, replica, strict=True))
                ranks = world.grid[row][tuple(at.get(name, slice(None)) for name in names)]
                loads[row, replica] = [(0, rank) for rank in sorted(ranks.flatten().tolist())]
            elements, rank = loads[row, replica][0]
            heapq.heapreplace(loads[row, replica], (elements + elements_of[stage, original], rank))
            owners[_Key(replica, stage, original)] = rank
    return owners


def _rounds(
    owners: Mapping[_Key, int], layouts: Mapping[_Name, Layout], program: LoadedProgram
) -> list[tuple[torch.dtype, frozenset[_Key]]]:
    """Return the parameters of each round of transfers, with their dtype; the same list on every rank."""
    found: dict[tuple[str, int], set[_Key]] = {}
    dtypes: dict[str, torch.dtype] = {}
    sums: Counter[tuple[int, str]] = Counter()
    for key in sorted(owners):
        layout = layouts[key.stage, key.original]
        dtype = program.placement(layout).master_dtype
        dtypes[str(dtype)] = dtype
        place = owners[key], str(dtype)
        found.setdefault((str(dtype), sums[place] // ROUND_BYTES), set()).add(key)
        sums[place] += math.prod(layout.original_shape) * dtype.itemsize
    return [(dtypes[name], frozenset(found[name, number])) for name, number in sorted(found)]


def _exchange_box_lists(held: Sequence[_Transfer], numbers: Mapping[_Key, int], world: World) -> list[_Transfer]:
    """Send each owner the list of its parameters' boxes that this rank holds; return the transfers of the parameters that this rank owns,
    in each holder's order. ``numbers`` has the numbers of this replica's parameters."""
    keys = list(numbers)
    lists: dict[int, list[int]] = {}
    for t in held:
        row = numbers[t.key], t.counted, len(t.box.sizes), *t.box.offsets, *t.box.sizes
        lists.setdefault(t.owner, []).extend(row)
    ranks = range(dist.get_world_size())
    sizes = torch.tensor([len(lists.get(rank, ())) for rank in ranks], device=world.device)
    others = torch.empty_like(sizes)
    dist.all_to_all_single(others, sizes)
    sending = torch.tensor([n for rank in ranks for n in lists.get(rank, ())], dtype=torch.int64, device=world.device)
    taken = others.tolist()
    coming = torch.empty(sum(taken), dtype=torch.int64, device=world.device)
    dist.all_to_all_single(coming, sending, taken, sizes.tolist())
    owned = []
    for holder, part in zip(ranks, coming.cpu().split(taken), strict=True):
        values = iter(part.tolist())
        for number in values:
            counted, dims = next(values), next(values)
            offsets, extents = (tuple(itertools.islice(values, dims)) for _ in range(2))
            owned.append(_Transfer(keys[number], holder, dist.get_rank(), Box(offsets, extents), bool(counted)))
    return owned
