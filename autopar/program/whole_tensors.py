"""Whole tensors for optimizers that need them, where the plan cuts parameters: one rank has the whole of each, and updates it.

If ranks have slices, parts or ZeRO shards of a parameter, one of these ranks is its *owner*, which keeps the whole master copy and the
optimizer's state of it. In a step each owner gathers the gradient's pieces and updates its parameters, and the new values go back to all
ranks that have pieces of them. No such parameter is whole on two ranks, and none is updated twice (K. Jordan et al., "Muon: an optimizer
for hidden layers in neural networks", 2024, distribute matrices over ranks likewise).

Owners are balanced by elements: each rank has about its share of the pipeline stage. A parameter that is whole on all of its ranks, as
under plain data parallelism, is updated there, and nothing is sent. The planner does not price any of this: the whole masters are about
4 more bytes for each element of a rank's share in float32, their gradients as many during the update, and each step sends the gradients
and the new values once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.program.boxes import Box, pieces
from autopar.program.masters import Master
from autopar.program.state_places import upload
from autopar.program.world import Program, World

ROUND_BYTES = 256 * 2**20
"""What an owner receives at a time, unless one tensor is larger: the bound of the buffers that are sent and received."""

Values = Callable[[Master], Tensor | None]


class _Key(NamedTuple):
    """A parameter: copies of a tied one in several stages, and those of replicas that train apart, are updated by themselves."""

    replica: tuple[int, ...]
    stage: int
    original: str


class _Record(NamedTuple):
    """A master copy on some rank, as all ranks know it; of ranks with the same values one is ``counted``."""

    key: _Key
    dtype: str
    shape: tuple[int, ...]
    is_whole: bool
    counted: bool
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A box of a parameter, between the rank ``holder``, whose master ``index`` has it as its box ``number``, and the ``owner``."""

    key: _Key
    holder: int
    owner: int
    index: int
    number: int
    box: Box
    counted: bool


class WholeTensors:
    """The masters of this rank for an optimizer that looks at whole tensors: ``masters`` are all whole.

    All ranks make one, with their masters of the same parameters, and call its methods in the same order.
    """

    def __init__(self, masters: Sequence[Master], program: Program, world: World) -> None:
        self._world = world
        self._held = [master for master in masters if any(True for _ in _boxes(master, master.tensor.detach(), world))]
        replica = tuple(world.coordinates[axis][0] for axis in program.parted(list(program.spec.mesh))[1])
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, [tuple(_record(master, replica, world)) for master in self._held])
        records = [[_Record(_Key(*own[0]), *own[1:]) for own in theirs] for theirs in every]
        mine = records[dist.get_rank()]
        cut = {record.key for theirs in records for record in theirs if not record.is_whole}
        self.masters = [master for master, own in zip(self._held, mine, strict=True) if own.key not in cut]
        owners = _owners(records, cut)
        layouts = {own.key: master.layout for master, own in zip(self._held, mine, strict=True)}
        offloaded = {own.key: master.offloaded is not None for master, own in zip(self._held, mine, strict=True)}
        self._owned: dict[_Key, Master] = {}
        for record in mine:
            if owners.get(record.key) == dist.get_rank() and record.key not in self._owned:
                layout = replace(
                    layouts[record.key], part=None, shape=record.shape, padded=record.shape, sharded=(), replicated=()
                )
                device = torch.device("cpu") if offloaded[record.key] else world.device
                tensor = nn.Parameter(torch.empty(record.shape, dtype=getattr(torch, record.dtype), device=device))
                self._owned[record.key] = Master(layout, tensor, ())
        self.masters += self._owned.values()
        self._rounds = [(dtype, list(_transfers(records, owners, keys))) for dtype, keys in _rounds(records, owners)]
        self.gather_values()

    def gather_values(self) -> None:
        """Read the owners' whole masters from the pieces, which were set."""
        self._gather(_value)

    def gather_gradients(self) -> None:
        """Give the owners whole gradients."""
        for master in self._owned.values():
            master.tensor.grad = torch.empty_like(master.tensor)
        self._gather(lambda master: None if master.gradient is None else master.gradient.contiguous())

    @torch.no_grad()
    def scatter_values(self) -> None:
        """After an update: write the new values into the pieces on all ranks. The owners' gradients are freed."""
        for dtype, transfers in self._rounds:
            boxes = self._boxes_of(transfers, _value)
            sent = [(t.holder, _in(self._owned[t.key].tensor.detach(), t.box)) for t in self._owned_of(transfers)]
            _exchange(sent, [(t.owner, boxes[t.index][t.number]) for t in self._held_of(transfers)], dtype, self._world)
        for master in self._owned.values():
            master.tensor.grad = None
        upload(self._held)

    @torch.no_grad()
    def _gather(self, values: Values) -> None:
        for dtype, every in self._rounds:
            transfers = [transfer for transfer in every if transfer.counted]
            boxes = self._boxes_of(transfers, values)
            received: list[tuple[int, Tensor]] = []
            for transfer in self._owned_of(transfers):
                whole = values(self._owned[transfer.key])
                assert whole is not None
                received.append((transfer.holder, _in(whole, transfer.box)))
            sent = [(t.owner, boxes[t.index][t.number]) for t in self._held_of(transfers)]
            _exchange(sent, received, dtype, self._world)

    def _owned_of(self, transfers: Sequence[_Transfer]) -> list[_Transfer]:
        return [transfer for transfer in transfers if transfer.owner == dist.get_rank()]

    def _held_of(self, transfers: Sequence[_Transfer]) -> list[_Transfer]:
        return [transfer for transfer in transfers if transfer.holder == dist.get_rank()]

    def _boxes_of(self, transfers: Sequence[_Transfer], values: Values) -> dict[int, list[Tensor]]:
        """Views of this rank's boxes, by the index of the master."""
        found = {}
        for index in {transfer.index for transfer in self._held_of(transfers)}:
            tensor = values(self._held[index])
            tensor = torch.zeros_like(self._held[index].tensor) if tensor is None else tensor
            found[index] = [view for _, view in _boxes(self._held[index], tensor, self._world)]
        return found


def _value(master: Master) -> Tensor:
    return master.tensor.detach()


def _record(master: Master, replica: tuple[int, ...], world: World) -> _Record:
    layout, shape = master.layout, master.layout.original_shape
    boxes = tuple((box.offsets, box.sizes) for box, _ in _boxes(master, master.tensor.detach(), world))
    return _Record(
        _Key(replica, layout.stage, layout.original),
        str(master.tensor.dtype).removeprefix("torch."),
        shape,
        tuple(master.tensor.shape) == shape and boxes == (((0,) * len(shape), shape),),
        world.first_on(master.alike),
        boxes,
    )


def _boxes(master: Master, values: Tensor, world: World) -> Iterator[tuple[Box, Tensor]]:
    """The boxes of the original parameter that a master has, without padding, and its ``values`` in them: views."""
    window = master.layout.window(world.coordinates)
    for piece in pieces((), master.layout, window, values, master.first):
        yield piece.box, piece.values


def _in(tensor: Tensor, box: Box) -> Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def _owners(records: Sequence[Sequence[_Record]], cut: set[_Key]) -> dict[_Key, int]:
    """The rank that updates each parameter: from the largest to the smallest, the rank with the fewest elements so far."""
    holders: dict[_Key, list[int]] = {}
    elements: dict[_Key, int] = {}
    for rank, theirs in enumerate(records):
        for record in theirs:
            if record.key in cut:
                holders.setdefault(record.key, []).append(rank)
                elements[record.key] = math.prod(record.shape)
    owners: dict[_Key, int] = {}
    load: Counter[int] = Counter()
    for key in sorted(holders, key=lambda key: (-elements[key], key)):
        owners[key] = min(holders[key], key=lambda rank: (load[rank], rank))
        load[owners[key]] += elements[key]
    return owners


def _rounds(records: Sequence[Sequence[_Record]], owners: dict[_Key, int]) -> list[tuple[torch.dtype, frozenset[_Key]]]:
    """The parameters that are sent at a time, with their dtype; the same list on every rank."""
    found: dict[tuple[str, int], set[_Key]] = {}
    sums: Counter[tuple[int, str]] = Counter()
    for record in sorted({r.key: r for theirs in records for r in theirs if r.key in owners}.values()):
        dtype: torch.dtype = getattr(torch, record.dtype)
        place = owners[record.key], record.dtype
        found.setdefault((record.dtype, sums[place] // ROUND_BYTES), set()).add(record.key)
        sums[place] += math.prod(record.shape) * dtype.itemsize
    return [(getattr(torch, dtype), frozenset(found[dtype, number])) for dtype, number in sorted(found)]


def _transfers(
    records: Sequence[Sequence[_Record]], owners: dict[_Key, int], keys: frozenset[_Key]
) -> Iterator[_Transfer]:
    """This rank's transfers of ``keys``, in one order on both of their ranks."""
    me = dist.get_rank()
    for rank, theirs in enumerate(records):
        for index, record in enumerate(theirs):
            if record.key in keys and me in (rank, owners[record.key]):
                for number, (offsets, sizes) in enumerate(record.boxes):
                    box = Box(offsets, sizes)
                    yield _Transfer(record.key, rank, owners[record.key], index, number, box, record.counted)


def _exchange(
    sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]], dtype: torch.dtype, world: World
) -> None:
    """Send each tensor of ``sent`` to its rank, and fill those of ``received`` from theirs, in the lists' order; all ranks call this."""
    flat, sizes = [], []
    for own in (sent, received):
        flat.append([tensor for _, tensor in sorted(own, key=lambda item: item[0])])
        count: Counter[int] = Counter()
        for rank, tensor in own:
            count[rank] += tensor.numel()
        sizes.append([count[rank] for rank in range(dist.get_world_size())])
    outgoing = torch.empty(sum(sizes[0]), dtype=dtype, device=world.device)
    incoming = torch.empty(sum(sizes[1]), dtype=dtype, device=world.device)
    at = 0
    for tensor in flat[0]:
        outgoing[at : at + tensor.numel()].view(tensor.shape).copy_(tensor)
        at += tensor.numel()
    dist.all_to_all_single(incoming, outgoing, sizes[1], sizes[0])
    at = 0
    for tensor in flat[1]:
        tensor.copy_(incoming[at : at + tensor.numel()].view(tensor.shape))
        at += tensor.numel()
