"""Checkpoints that any plan of the same model can load: parameters, buffers, optimizer state, counters.

Tensors are written and read with ``torch.distributed.checkpoint``, under the names of the user's model: ``model.NAME`` for a parameter or
buffer, ``optimizer.NAME.KEY`` for the optimizer's state. Each rank plans to write its own boxes (``boxes``); of a box that several ranks
have, one writes. To load, each rank reads the boxes that its own boxes overlap, so no process has the whole model.

Master copies are saved in their own dtype. Random numbers depend on the seed and the number of steps (``Trainer``), so these two are all of
their state. Replicas that train apart each have a model: their tensors are under ``replica0``, ``replica1``, and so on.
"""

from __future__ import annotations

import copy
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from autopar.program import schedulers
from autopar.program.boxes import Piece, divided, pieces, whole
from autopar.program.checkpoint_files import (
    FORMAT,
    CheckpointError,
    Found,
    begin,
    claimed,
    discard,
    explained,
    final_of,
    finish,
    has_any,
    newest,
    opened_or_why,
    partial_of,
)
from autopar.program.masters import Group
from autopar.program.optimizer_state import Restored, described, merged, saved
from autopar.program.optimizers import Updates
from autopar.program.state import sentence
from autopar.program.world import BufferRecord, Program, World

T = TypeVar("T")


class StageBuffers(Protocol):
    """As of ``buffers``."""

    def own(self) -> list[tuple[BufferRecord, Tensor]]: ...


@dataclass(frozen=True)
class Training:
    """The parts of a trainer that a checkpoint saves and restores, besides its counters."""

    program: Program
    world: World
    groups: Sequence[Group]
    buffers: StageBuffers | None  # that the model writes
    updates: Updates | None  # not yet there when weights are loaded at the start


# -- save and load ----------------------------------------------------------------------------------------------------


def save(training: Training, folder: str | os.PathLike[str], counters: Mapping[str, Any], keep: int | None) -> Path:
    """Write the checkpoint ``folder/step-N``, ``N`` being ``counters["steps"]``; all ranks call this.

    The folder gets this name once all files are on the disk. Of the checkpoints up to this one, the last ``keep`` stay (``None``: all).
    Raises ``CheckpointError`` on every rank; the training goes on as if nothing had been called.
    """
    return _prepared(training, folder, counters, keep).write(None)


class Background:
    """Saves checkpoints in a thread, from copies in the host's memory and over a process group of its own; all ranks make one."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._last: Future[Path] | None = None

    def save(
        self, training: Training, folder: str | os.PathLike[str], counters: Mapping[str, Any], keep: int | None
    ) -> Path:
        """Start to write a checkpoint; the folder that it will have. All ranks call this, after ``finish``."""
        prepared = _prepared(training, folder, counters, keep)
        copies: list[Any] = []
        try:
            # a rank without memory for its copy must not leave the others waiting for it
            on_every_rank(lambda: copies.append(prepared.copied()), prepared.partial, writing=True)
        except CheckpointError:
            if dist.get_rank() == 0:
                discard(prepared.partial)
            raise
        (job,) = copies
        self._last = self._thread.submit(job.write, self._group)
        return final_of(job.partial)

    def finish(self) -> None:
        """Wait until the checkpoint is written. Raises ``CheckpointError`` on every rank if it failed."""
        last, self._last = self._last, None
        if last is not None:
            last.result()


@dataclass(frozen=True)
class _Job:
    """A checkpoint to write: this rank's pieces, and the facts."""

    partial: Path
    own: Sequence[Piece]
    facts: Mapping[str, Any]
    keep: int | None

    def copied(self) -> _Job:
        """The same with copies in the host's memory, which the training does not change while a thread writes them."""
        own = [replace(piece, values=piece.values.to("cpu", copy=True)) for piece in self.own]
        return replace(self, own=own, facts=copy.deepcopy(self.facts))

    def write(self, group: dist.ProcessGroup | None) -> Path:
        try:
            return self._written(group)
        except CheckpointError:
            if dist.get_rank() == 0:
                discard(self.partial)
            raise

    def _written(self, group: dist.ProcessGroup | None) -> Path:
        _write(self.own, self.partial, group)

        def end() -> str | None:
            return str(finish(self.partial, self.facts, self.keep)) if dist.get_rank() == 0 else None

        return Path(str(on_every_rank(end, self.partial, writing=True, group=group)[0]))


def _prepared(
    training: Training, folder: str | os.PathLike[str], counters: Mapping[str, Any], keep: int | None
) -> _Job:
    """Make the folder, and collect what this rank has."""
    partial, own, updates = partial_of(Path(folder), counters["steps"]), list[Piece](), training.updates
    assert updates is not None

    def prepare() -> Mapping[str, Any]:
        if keep is not None and keep < 1:
            raise CheckpointError(
                f"keep is {keep}, and the new checkpoint is one that stays", "give a number of at least 1"
            )
        masters = [m for m in updates.masters if training.program.is_first_copy(m.layout)]
        states, keys = saved(updates.optimizer, masters, training.world)
        model = (*parameters(training, every_copy=False), *buffers(training, every_copy=False))
        own.extend(part for piece in (*model, *states) for part in divided(piece))
        return described(updates.optimizer, keys)

    optimizer = merged(on_every_rank(prepare, partial, writing=True))
    on_every_rank(lambda: begin(partial) if dist.get_rank() == 0 else None, partial, writing=True)
    scheduler = schedulers.described(updates.scheduler)
    facts = {**_facts(training), **counters, "optimizer": optimizer, "scheduler": scheduler}
    return _Job(partial, _under(_replica(training)[0], own), facts, keep)


def load(training: Training, folder: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Read the checkpoint ``folder``, or the newest whole one in it; all ranks call this. Returns its facts, counters included.

    Raises ``CheckpointError`` on every rank, before anything is changed if the checkpoint is of another model or optimizer, or damaged.
    """
    opened, own, restored, updates = list[Found](), list[Piece](), list[Restored](), training.updates
    assert updates is not None

    def find() -> str | None:
        if dist.get_rank() != 0:
            return None
        found, note = newest(Path(folder))
        if note:
            print(note, file=sys.stderr, flush=True)
        return str(found.path)

    path = Path(str(on_every_rank(find, Path(folder), writing=False)[0]))

    def prepare() -> list[str]:
        found = opened_or_why(path)
        if isinstance(found, str):
            raise CheckpointError(
                f"the checkpoint {path} is not whole here: {found}", "all machines read one shared folder"
            )
        _check_model(training.program, found)
        prefix = _prefix_of(training, found)
        stored = _stored(found.metadata, prefix)
        state = Restored(updates.optimizer, updates.masters, training.world, found.facts["optimizer"], stored)
        schedulers.check(updates.scheduler, found.facts.get("scheduler"))
        model = (*parameters(training, every_copy=True), *buffers(training, every_copy=True))
        own.extend(_under(prefix, (*model, *state.pieces)))
        opened.append(found)
        restored.append(state)
        return state.anew

    anew = sorted({name for names in on_every_rank(prepare, path, writing=False) for name in names})
    if anew and dist.get_rank() == 0:
        what = f"{path} has no state of {opened[0].facts['optimizer']['class']}, which starts anew, for"
        print(sentence(what, anew), file=sys.stderr, flush=True)
    _read(own, opened[0])
    restored[0].install()
    schedulers.restore(updates.scheduler, opened[0].facts.get("scheduler"))
    updates.read_masters()
    for group in training.groups:
        group.upload()
        group.publish()
    return opened[0].facts


def claim(folder: str | os.PathLike[str], patience_s: float) -> IO[str] | None:
    """Keep other trainings from writing into ``folder`` for as long as rank 0 keeps the result; all ranks call this.

    Raises ``CheckpointError`` on every rank where another training writes there.
    """
    files = list[IO[str] | None]()

    def take() -> None:
        if dist.get_rank() == 0:
            files.append(claimed(Path(folder), patience_s))

    on_every_rank(take, Path(folder), writing=True)
    return files[0] if files else None


def has_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Whether there is a checkpoint to load in ``folder``; all ranks call this, and get the same answer."""
    return bool(on_every_rank(lambda: dist.get_rank() == 0 and has_any(Path(folder)), Path(folder), writing=False)[0])


def on_every_rank(
    work: Callable[[], T],
    folder: Path,
    writing: bool,
    group: dist.ProcessGroup | None = None,
    *,
    replaces: bool = False,
) -> list[T]:
    """Run ``work`` on every rank; all results, by rank, which are numbers, text, or lists of them. Raises ``CheckpointError`` on every
    rank if one has an error; ``replaces`` says that the work replaces values of the training."""
    mine: T | None = None
    problem: tuple[str, str, bool] | None = None
    try:
        mine = work()
    except Exception as error:  # noqa: BLE001  the other ranks wait for this one
        found = explained(error, folder, writing, replaces)
        problem = found.message, found.hint, found.half_read
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (mine, problem), group=group)
    for _, other in every:
        if other is not None:
            raise CheckpointError(*other)
    return [result for result, _ in every]


# -- saving ------------------------------------------------------------------------------------------------------------


def _facts(training: Training) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "torch": torch.__version__,
        "devices": dist.get_world_size(),
        "replicas": _replica(training)[1],
        "tensors": {name: list(shape) for name, shape in _tensors(training.program).items()},
        "other_names": dict(_other_names(training.program)),
        "left_out": _left_out(training.program),
    }


def _tensors(program: Program) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters and buffers that a checkpoint has, by original name."""
    found = {layout.original: layout.original_shape for layout in program.layouts}
    return found | {record.original: record.shape for record in program.buffers if record.written}


def _other_names(program: Program) -> Iterator[tuple[str, str]]:
    """For each other name of a tied parameter, the name that a checkpoint has it under."""
    return ((tied, layout.original) for layout in program.layouts for tied in layout.tied)


def _left_out(program: Program) -> list[str]:
    """The tensors of the model's state dict that the program neither trains nor writes: no checkpoint has them."""
    known = {*_tensors(program), *dict(_other_names(program))}
    return [entry["name"] for entry in program.records.get("model", ()) if entry["name"] not in known]


def parameters(training: Training, *, every_copy: bool, every_rank: bool = True) -> Iterator[Piece]:
    """This rank's pieces of the parameters, those that are not trained included: of the first copy of tied ones, or of ``every_copy``.

    Without ``every_rank`` only the first of the ranks that have a piece yields it.
    """
    world = training.world
    for group in training.groups:
        for master in (*group.masters, *group.frozen):
            layout = master.layout
            copy = every_copy or training.program.is_first_copy(layout)
            if copy and (every_rank or world.first_on(master.alike)):
                window = layout.window(world.coordinates)
                yield from pieces(("model", layout.original), layout, window, master.tensor.detach(), master.first)


def buffers(training: Training, *, every_copy: bool, every_rank: bool = True) -> Iterator[Piece]:
    """The buffers that this rank's stages write; with ``every_copy`` also those that they only read."""
    for record, tensor in () if training.buffers is None else training.buffers.own():
        copy = every_copy or record.written
        if copy and (every_rank or training.world.first_on(training.world.coordinates)):
            yield whole(("model" if record.persistent else "buffer", record.original), tensor)


def _replica(training: Training) -> tuple[tuple[str, ...], int]:
    """What the names of this rank's tensors begin with, and the number of replicas that train apart."""
    index, count = 0, 1
    for axis in training.program.parted(list(training.program.spec.mesh))[1]:
        place, size = training.world.coordinates[axis]
        index, count = index * size + place, count * size
    return ((f"replica{index}",) if count > 1 else ()), count


def _under(prefix: tuple[str, ...], own: Iterable[Piece]) -> list[Piece]:
    return [replace(piece, path=(*prefix, *piece.path)) for piece in own]


# -- loading -----------------------------------------------------------------------------------------------------------


def _check_model(program: Program, found: Found) -> None:
    """Raise ``CheckpointError`` with the names of tensors that differ."""
    own = _tensors(program)
    theirs = {name: tuple(shape) for name, shape in found.facts["tensors"].items()}
    shapes = [f"{n} ({theirs[n]}, in the model {own[n]})" for n in own if n in theirs and theirs[n] != own[n]]
    sentences = [
        sentence("it has no", [name for name in own if name not in theirs]),
        sentence("the model has no", [name for name in theirs if name not in own]),
        sentence("of another shape is", shapes),
    ]
    if any(sentences):
        raise CheckpointError(
            f"the checkpoint {found.path} is of another model: {'; '.join(each for each in sentences if each)}",
            "load a checkpoint of the model that was compiled",
        )


def _prefix_of(training: Training, found: Found) -> tuple[str, ...]:
    """What the names of the tensors for this rank begin with. All replicas can start from one model, and not the other way round."""
    there, (prefix, here) = found.facts["replicas"], _replica(training)
    if there == 1:
        return ()
    if there != here:
        program = f"{here} of them" if here > 1 else "none"
        raise CheckpointError(
            f"the checkpoint {found.path} has {there} replicas that train apart (sync=local-steps), and the program has {program}",
            f"load it in a program with {there} replicas, whose state_dict() is their mean",
        )
    return prefix


def _stored(metadata: Metadata, prefix: tuple[str, ...]) -> dict[str, TensorStorageMetadata]:
    """The metadata of tensors whose names begin with ``prefix``, by the rest of the name."""
    start = "".join(f"{part}." for part in prefix)
    return {
        name.removeprefix(start): stored
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata) and name.startswith(start)
    }


# -- torch.distributed.checkpoint -------------------------------------------------------------------------------------


class _Writes(dcp.DefaultSavePlanner):
    """Plans to write this rank's pieces; the default planner chooses a rank for each box that several ranks have, and checks that all
    boxes of a tensor fill it without overlaps."""

    def __init__(self, own: Sequence[Piece]) -> None:
        super().__init__()
        self._own = {_index(piece): piece for piece in own}
        self._copy = torch.empty(0, dtype=torch.uint8)

    def create_local_plan(self) -> SavePlan:
        # the paths let torch's tools (dcp_to_torch_save) rebuild nested dicts
        paths = {piece.name: piece.path for piece in self._own.values()}
        self.plan = SavePlan([_write_item(index, piece) for index, piece in self._own.items()], planner_data=paths)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """A box whose storage is no larger than the box: of any other ``FileSystemWriter`` makes a copy, and keeps it until the file's end.
        What has to be copied is overwritten by the next copy, which is asked for when this box is in the file."""
        values = self._own[write_item.index].values
        if values.device.type == "cpu" and values.is_contiguous():
            first = values.storage_offset() * values.element_size()
            storage = values.untyped_storage()[first : first + values.nbytes]
            return values.new_empty(0).set_(storage).view(values.shape)
        if self._copy.nbytes < values.nbytes:
            self._copy = torch.empty(values.nbytes, dtype=torch.uint8)
        copied = self._copy.untyped_storage()[: values.nbytes]
        return torch.empty(0, dtype=values.dtype).set_(copied).view(values.shape).copy_(values)


class _Reads(dcp.LoadPlanner):
    """Plans to read this rank's pieces, in place."""

    def __init__(self, own: Sequence[Piece]) -> None:
        self._own: dict[str, list[Piece]] = {}
        for piece in own:
            self._own.setdefault(piece.name, []).append(piece)
        self._metadata = Metadata({})

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, wanted in self._own.items():
            stored = self._metadata.state_dict_metadata.get(name)
            chunks = [_chunk(piece) for piece in wanted]
            reads = (
                create_read_items_for_chunk_list(name, stored, chunks)
                if isinstance(stored, TensorStorageMetadata)
                else []
            )
            if sum(math.prod(item.lengths) for item in reads) != sum(math.prod(chunk.sizes) for chunk in chunks):
                raise ValueError(f"it lacks parts of {name}")  # torch pickles it for the other ranks
            items += reads
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        raise AssertionError("checkpoints have tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index.index
        assert index is not None
        values = self._own[read_item.dest_index.fqn][index].values  # copies of tied tensors have equal boxes
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            values = values.narrow(dim, offset, length)
        return values

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: the tensor is a view of this rank's own."""


def _index(piece: Piece) -> MetadataIndex:
    return MetadataIndex(piece.name, piece.box.offsets)


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.box.offsets), torch.Size(piece.box.sizes))


def _write_item(index: MetadataIndex, piece: Piece) -> WriteItem:
    data = TensorWriteData(_chunk(piece), TensorProperties(piece.values.dtype), torch.Size(piece.shape))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


class _Writer(dcp.FileSystemWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)  # it asks for a box when the last one is in the file

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # else the folder's path, which is going to change


class _Reader(dcp.FileSystemReader):
    def __init__(self, found: Found) -> None:
        super().__init__(found.path)
        self._metadata = found.metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def _write(own: Sequence[Piece], partial: Path, group: dist.ProcessGroup | None) -> None:
    try:
        dcp.save({}, storage_writer=_Writer(partial), planner=_Writes(own), process_group=group)
    except CheckpointException as error:
        raise explained(_cause(error), partial, writing=True) from error


def _read(own: Sequence[Piece], found: Found) -> None:
    try:
        dcp.load({}, storage_reader=_Reader(found), planner=_Reads(own))
    except CheckpointException as error:
        raise explained(_cause(error), found.path, writing=False, half_read=True) from error


def _cause(error: CheckpointException) -> BaseException:
    """The error of the first rank that has one."""
    return error.failures[min(error.failures)][0]
