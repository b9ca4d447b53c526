"""Saves and loads checkpoints and weights under any plan of the same model: parameters, buffers, optimizer state, counters.

Tensors are written in the format of ``torch.distributed.checkpoint``, under the names of the user's model: ``model.NAME`` for a parameter
or buffer, ``optimizer.NAME.KEY`` for the optimizer's state. Each rank knows from the layouts which boxes (``boxes``) it writes, into its
own file. If several ranks have a box, one of them writes it; small ranges from ZeRO are first regrouped (``box_exchange``).
Rank 0 writes the metadata from these files' tables (``checkpoint_metadata``). To load, each rank reads only those parts of the stored boxes
that overlap its own boxes, so no process ever has the full model.

Master weights are saved in their dtype. Random numbers depend only on the seed and the number of steps (``Trainer``), so no generator
state is saved. Each local SGD replica has different weights, and saves them under ``replica0``, ``replica1``, and so on.
"""

from __future__ import annotations

import copy
import datetime
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from . import box_files, weights
from .agree import digest, same_values
from .box_exchange import MasterValues, regrouped, writes
from .boxes import Piece
from .checkpoint_files import (
    FORMAT,
    PARTIAL,
    CheckpointError,
    FolderLock,
    StoredCheckpoint,
    begin,
    discard,
    explained,
    final_of,
    finish,
    has_any,
    lock_folder,
    lock_for_save,
    newest,
    open_or_reason,
    partial_of,
    sync,
)
from .checkpoint_metadata import (
    Reads,
    explained_damage,
    metadata_of,
    plan_reads,
    read_values,
    write_metadata,
)
from .model_tensors import TrainingTensors, source_of
from .optimizer_state import (
    Restored,
    check_scheduler,
    described,
    described_scheduler,
    merged,
    restore_scheduler,
    saved,
    without_state,
)
from .state import other_names, sentence, wrong_state
from .weights import Stored, mapped
from .world import LoadedProgram

T = TypeVar("T")


# -- save and load ----------------------------------------------------------------------------------------------------


def save(
    training: TrainingTensors, folder: str | os.PathLike[str], counters: Mapping[str, Any], keep: int | None
) -> Path:
    """Write the checkpoint ``folder/step-N``, ``N`` being ``counters["steps"]``; all ranks call this.

    The folder gets this name once all files are on disk. Of the checkpoints up to this one, the last ``keep`` are kept (``None``: all).
    Raises ``CheckpointError`` on every rank; the training state is unchanged.
    """
    job = _prepared(training, folder, counters, keep)
    return job.write(gathered_pieces(training, job), None)


class Background:
    """Saves checkpoints in a background thread, from copies in host memory, with its own process group; all ranks create one."""

    def __init__(self, timeout_s: float) -> None:
        before = os.environ.get(_LAZY)
        os.environ[_LAZY] = "1"  # else gloo connects every pair of ranks, and may reach the limit of 1,024 open files
        try:
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        finally:
            os.environ.pop(_LAZY) if before is None else os.environ.update({_LAZY: before})
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._last: Future[Path] | None = None

    def save(
        self, training: TrainingTensors, folder: str | os.PathLike[str], counters: Mapping[str, Any], keep: int | None
    ) -> Path:
        """Start to write a checkpoint, and return the folder's final path. All ranks call this, after ``finish``."""
        job = _prepared(training, folder, counters, keep)
        copies: list[Piece] = []
        try:
            # a rank without memory for its copy must not leave the others waiting for it
            on_every_rank(lambda: _copy(gathered_pieces(training, job), copies), job.partial, writing=True)
        except CheckpointError:
            job.discard()
            raise
        self._last = self._thread.submit(job.write, copies, self._group)
        return final_of(job.partial)

    def finish(self) -> None:
        """Wait until the checkpoint is written. Raises ``CheckpointError`` on every rank if it failed."""
        last, self._last = self._last, None
        if last is not None:
            last.result()


_LAZY = (
    "TORCH_GLOO_LAZY_INIT"  # gloo reads it when a group is made: two ranks connect when they first exchange something
)


def _copy(pieces: Iterable[Piece], copies: list[Piece]) -> None:
    """Append copies in host memory to ``copies``, because training changes the pieces while a thread writes. ``pieces`` is consumed to its
    end even after an error, because other ranks take part in producing them."""
    problem: Exception | None = None
    for piece in pieces:
        try:
            if problem is None:
                copies.append(replace(piece, values=piece.values.to("cpu", copy=True)))
        except Exception as error:  # noqa: BLE001  raised below
            problem = error
    if problem is not None:
        raise problem


@dataclass(frozen=True)
class _Job:
    """This rank's part of a save: parameters and state of their shapes (``sharded``), other pieces (``unsharded``), and the kind of each
    key of the optimizer state (``keys``). ``lock`` is rank 0's lock on the folder if it was taken for this save only."""

    partial: Path
    save: str
    sharded: Sequence[MasterValues]
    unsharded: Sequence[Piece]
    keys: Mapping[str, str]
    facts: Mapping[str, Any]
    keep: int | None
    lock: FolderLock | None

    def write(self, pieces: Iterable[Piece], group: dist.ProcessGroup | None) -> Path:
        """Write this rank's file, and on rank 0 everything else; return the checkpoint's folder."""
        try:
            on_every_rank(lambda: self._write_file(pieces), self.partial, writing=True, group=group)
            path = Path(on_every_rank(self._finish, self.partial, writing=True, group=group))
        except CheckpointError:
            self.discard()
            raise
        self._release()
        return path

    def _write_file(self, pieces: Iterable[Piece]) -> None:
        box_files.write(pieces, self.partial, dist.get_rank(), self.save, {"keys": self.keys})

    def _finish(self) -> str:
        if dist.get_rank() != 0:
            return ""
        files = [box_files.file_name(rank) for rank in range(dist.get_world_size())]
        with explained_damage(self.partial):
            tables = box_files.tables_of(self.partial, files, self.save)
        write_metadata(metadata_of(tables), self.partial)
        optimizer = merged(self.facts["optimizer"], [table.facts["keys"] for table in tables])
        return str(finish(self.partial, {**self.facts, "optimizer": optimizer}, self.keep))

    def discard(self) -> None:
        """Remove the files of this save."""
        if dist.get_rank() == 0:
            discard(self.partial)
        self._release()

    def _release(self) -> None:
        if self.lock is not None:
            self.lock.close(remove=True)


def _prepared(
    training: TrainingTensors, folder: str | os.PathLike[str], counters: Mapping[str, Any], keep: int | None
) -> _Job:
    """Create the folder on rank 0, and collect this rank's tensors. Raises ``CheckpointError`` on every rank."""
    partial, updates = partial_of(Path(folder), counters["steps"]), training.updates
    states, locks = list[tuple[list[MasterValues], list[Piece], dict[str, str]]](), list[FolderLock | None]()
    assert updates is not None

    def prepare() -> str:
        if keep is not None and keep < 1:
            raise CheckpointError(
                f"keep is {keep}, but at least the new checkpoint is kept", "give a number of at least 1"
            )
        masters = [m for m in updates.masters if training.program.is_first_copy(m.layout)]
        states.append(saved(updates.optimizer, masters, training.program, training.world))
        if dist.get_rank() != 0:
            return ""
        locks.append(lock_for_save(Path(folder)))
        begin(partial)
        return secrets.token_hex(16)

    try:
        save = on_every_rank(prepare, partial, writing=True)
    except CheckpointError:
        if locks:  # rank 0 had locked the folder
            discard(partial)
        for taken in locks:
            if taken is not None:
                taken.close(remove=True)
        raise
    sharded, unsharded, keys = states[0]
    replicated_axes = tuple(training.world.coordinates)
    written = [p for p in training.written() if writes(p, replicated_axes, training.program, training.world)]
    facts = {
        **_facts(training),
        **counters,
        "save": save,
        "optimizer": described(updates.optimizer),
        "scheduler": described_scheduler(updates.scheduler),
    }
    model = [own for own in training.master_values() if training.program.is_first_copy(own.master.layout)]
    # the positions in the data and a scheduler's state change while a thread writes
    facts = copy.deepcopy(facts)
    return _Job(
        partial, save, [*model, *sharded], [*unsharded, *written], keys, facts, keep, locks[0] if locks else None
    )


def gathered_pieces(training: TrainingTensors, job: _Job) -> Iterator[Piece]:
    """Yield the pieces that this rank writes; all ranks call this, and consume the iterator."""
    prefix = _prefix(training)
    yield from _under(prefix, job.unsharded)
    yield from _under(prefix, regrouped(job.sharded, training.program, training.world))


def load(training: TrainingTensors, folder: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Load the checkpoint ``folder``, or the newest complete one in it; all ranks call this. Returns its facts, counters included.

    Raises ``CheckpointError`` on every rank. The training state is unchanged if the checkpoint is of another model or optimizer, or if its
    metadata are damaged.
    """
    opened, reads, restored, updates = list[StoredCheckpoint](), list[Reads](), list[Restored](), training.updates
    assert updates is not None

    def find() -> str:
        if dist.get_rank() != 0:
            return ""
        checkpoint, note = newest(Path(folder))
        if checkpoint.save is None:
            note += f"{'; ' if note else ''}{checkpoint.path} was written without checksums, and is read unverified"
        if note:
            print(note, file=sys.stderr, flush=True)
        return str(checkpoint.path)

    path = Path(on_every_rank(find, Path(folder), writing=False))

    def prepare() -> list[str]:
        # rank 0 checked that all files exist; ``plan_reads`` reads the tables of the files that this rank needs
        checkpoint = open_or_reason(path, files=False)
        if isinstance(checkpoint, str):
            raise CheckpointError(
                f"the checkpoint {path} is incomplete here: {checkpoint}", "all machines read one shared folder"
            )
        _check_model(training.program, checkpoint)
        prefix = _prefix_of(training, checkpoint)
        stored = _stored(checkpoint.metadata, prefix)
        state = Restored(updates, training.world, checkpoint.facts["optimizer"], stored)
        check_scheduler(updates.scheduler, checkpoint.facts.get("scheduler"))
        numbers = [number for stack in state.numbers for number in stack]
        read_values(plan_reads(list(_under(prefix, numbers)), checkpoint), checkpoint, partially_loaded=False)
        state.check_numbers()
        reads.append(plan_reads(list(_under(prefix, (*training.all_pieces(), *state.pieces))), checkpoint))
        opened.append(checkpoint)
        restored.append(state)
        return without_state(training.program, checkpoint.facts["optimizer"], stored)

    stateless = on_every_rank(prepare, path, writing=False)
    if stateless and dist.get_rank() == 0:
        what = f"{opened[0].facts['optimizer']['class']} starts without state, because {path} has none, for"
        print(sentence(what, stateless), file=sys.stderr, flush=True)
    on_every_rank(lambda: read_values(reads[0], opened[0]), path, writing=False, replaces=True)
    restored[0].install()
    restore_scheduler(updates.scheduler, opened[0].facts.get("scheduler"))
    training.copy_masters_to_parameters()
    return opened[0].facts


def lock_checkpoints(folder: str | os.PathLike[str], timeout_s: float) -> FolderLock | None:
    """Lock ``folder`` against other programs' checkpoints, and return the lock on rank 0, ``None`` on others; all ranks call this.

    Raises ``CheckpointError`` on every rank if another program has the lock after ``timeout_s`` seconds, or the folder isn't writable.
    """
    taken = list[FolderLock]()

    def take() -> None:
        if dist.get_rank() == 0:
            taken.append(lock_folder(Path(folder), timeout_s))

    on_every_rank(take, Path(folder), writing=True)
    return taken[0] if taken else None


def has_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Return whether ``folder`` has a checkpoint to load; all ranks call this, and get the same answer."""
    return on_every_rank(lambda: dist.get_rank() == 0 and has_any(Path(folder)), Path(folder), writing=False)


def on_every_rank(
    work: Callable[[], T],
    folder: Path,
    writing: bool,
    group: dist.ProcessGroup | None = None,
    *,
    replaces: bool = False,
) -> T:
    """Run ``work`` on every rank and return rank 0's result everywhere. If it fails on some ranks, every rank raises the lowest such rank's
    error as a ``CheckpointError``. ``replaces`` says that ``work`` overwrites the training state.

    The ranks all-reduce one number; then rank 0, or the lowest rank with an error, broadcasts its result or error.
    """
    mine: list[Any] = [None]
    rank, size = dist.get_rank(), dist.get_world_size()
    first = size
    try:
        mine = [work()]
    except Exception as error:  # noqa: BLE001  the other ranks wait for this one
        failure = explained(error, folder, writing, replaces)
        mine, first = [(failure.message, failure.hint, failure.partially_loaded)], rank
    on_gpu = dist.get_backend(group) == "nccl"
    number = torch.tensor(first, device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu")
    dist.all_reduce(number, dist.ReduceOp.MIN, group=group)
    first = int(number)
    dist.broadcast_object_list(mine, first % size, group=group)
    if first < size:
        raise CheckpointError(*mine[0])
    result: T = mine[0]
    return result


# -- weights -----------------------------------------------------------------------------------------------------------

_SAMPLED_BYTES = 2**16  # of each tensor, to check that ranks read the same files


def load_weights(training: TrainingTensors, path: str | os.PathLike[str]) -> None:
    """Set parameters and buffers from a file or folder of weights; optimizer state is kept. All ranks call this, and then
    ``copy_masters_to_parameters``.

    Before any value changes, every rank checks the names and shapes, that tied parameters have one value, and that all ranks read
    the same files. Raises ``CheckpointError`` on every rank.
    """
    source, opened = Path(path), list[Mapping[str, Tensor]]()

    def check() -> None:
        opened.append(mapped(source))
        if wrong := wrong_state(training.program.records, opened[0]):
            raise CheckpointError(
                f"{source} has no weights of the model that was compiled: {wrong}",
                "give weights of the model that was compiled",
            )

    on_every_rank(check, source, writing=False)
    (state,) = opened
    try:
        same_values({name: digest(state[name], _SAMPLED_BYTES) for name in sorted(state)}, training.world.device)
    except ValueError as error:
        raise CheckpointError(str(error), "all machines read one shared folder, or equal copies") from error
    on_every_rank(lambda: training.fill(source_of(state), state), source, writing=False, replaces=True)


def save_weights(training: TrainingTensors, folder: str | os.PathLike[str], file_bytes: int) -> None:
    """Write the weights into a new folder, in the model's own dtypes; all ranks call this.

    The folder must not exist; it gets its name once all files are on disk. Raises ``CheckpointError`` on every rank, and leaves nothing
    behind.
    """
    target = Path(folder)
    partial = target.with_name(f"{target.name}{PARTIAL}")
    places, begun = dict[str, Stored](), list[Path]()

    def prepare() -> None:
        if training.program.local_steps:
            raise CheckpointError("local SGD replicas have different weights", "state_dict() has their mean")
        tensors = _weights(training)
        if odd := weights.without_names(tensors):
            raise CheckpointError(
                f"safetensors files have no {', '.join(sorted({str(tensors[name][0]) for name in odd}))}, the dtype of {odd[0]}",
                "state_dict() has it",
            )
        places.update(weights.file_places(partial, tensors, file_bytes))
        if dist.get_rank() == 0:
            if target.exists():
                raise CheckpointError(f"{target} exists", "give the name of a new folder")
            begun.append(partial)
            begin(partial)
            weights.create(places)

    def end() -> None:
        if dist.get_rank() == 0:
            for path in (*partial.iterdir(), partial):
                sync(path)
            partial.rename(final_of(partial))
            sync(target.parent)

    try:
        on_every_rank(prepare, partial, writing=True)
        on_every_rank(
            lambda: weights.write((places[piece.path[1]], piece) for piece in training.pieces_once()),
            partial,
            writing=True,
        )
        on_every_rank(end, partial, writing=True)
    except CheckpointError:
        for path in begun:
            discard(path)
        raise


def _weights(training: TrainingTensors) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the dtypes and shapes, by name, of the parameters, and of the state dict's buffers that the program writes."""
    layouts = training.program.layouts
    found = {name: (layout.dtype, layout.original_shape) for layout in layouts for name in layout.originals}
    written = [record for record in training.program.buffers if record.written and record.persistent]
    return found | {record.original: (record.dtype, record.shape) for record in written}


# -- saving ------------------------------------------------------------------------------------------------------------


def _facts(training: TrainingTensors) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "torch": torch.__version__,
        "devices": dist.get_world_size(),
        "replicas": training.replica()[1],
        "tensors": {name: list(shape) for name, shape in _tensors(training.program).items()},
        "other_names": _other_names(training.program),
        "left_out": _left_out(training.program),
    }


def _tensors(program: LoadedProgram) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters and buffers in a checkpoint, by original name."""
    found = {name: layout.original_shape for layout in program.layouts for name in layout.originals}
    return found | {record.original: record.shape for record in program.buffers if record.written}


def _other_names(program: LoadedProgram) -> dict[str, str]:
    """Return the other names of tied parameters and shared buffers, each with the name in the checkpoint."""
    tied = {name: layout.original for layout in program.layouts for name in layout.tied}
    return tied | other_names(program.records, _tensors(program))


def _left_out(program: LoadedProgram) -> list[str]:
    """Return the tensors of the model's state dict that no checkpoint contains, because the program neither trains nor writes them."""
    known = {*_tensors(program), *_other_names(program)}
    return [entry["name"] for entry in program.records.get("model", ()) if entry["name"] not in known]


def _prefix(training: TrainingTensors) -> tuple[str, ...]:
    """Return the prefix of this rank's tensor names in a checkpoint: its local SGD replica, if there are several."""
    index, count = training.replica()
    return (f"replica{index}",) if count > 1 else ()


def _under(prefix: tuple[str, ...], pieces: Iterable[Piece]) -> Iterator[Piece]:
    return (replace(piece, path=(*prefix, *piece.path)) for piece in pieces)


# -- loading -----------------------------------------------------------------------------------------------------------


def _check_model(program: LoadedProgram, checkpoint: StoredCheckpoint) -> None:
    """Raise ``CheckpointError`` with the tensors whose names or shapes differ between the checkpoint and the program."""
    own = _tensors(program)
    theirs = {name: tuple(shape) for name, shape in checkpoint.facts["tensors"].items()}
    shapes = [f"{n} ({theirs[n]}, in the model {own[n]})" for n in own if n in theirs and theirs[n] != own[n]]
    sentences = [
        sentence("it has no", [name for name in own if name not in theirs]),
        sentence("the model has no", [name for name in theirs if name not in own]),
        sentence("wrong shape:", shapes),
    ]
    if any(sentences):
        raise CheckpointError(
            f"the checkpoint {checkpoint.path} is of another model: {'; '.join(each for each in sentences if each)}",
            "load a checkpoint of the model that was compiled",
        )


def _prefix_of(training: TrainingTensors, checkpoint: StoredCheckpoint) -> tuple[str, ...]:
    """Return the prefix to load this rank's tensors from. Several replicas can load a single model's checkpoint, but not the reverse."""
    there, here = checkpoint.facts["replicas"], training.replica()[1]
    if there == 1:
        return ()
    if there != here:
        program = f"{here} of them" if here > 1 else "none"
        raise CheckpointError(
            f"the checkpoint {checkpoint.path} has {there} local SGD replicas (sync=local-steps), and the program has {program}",
            f"load it in a program with {there} replicas, whose state_dict() is their mean",
        )
    return _prefix(training)


def _stored(metadata: Metadata, prefix: tuple[str, ...]) -> dict[str, TensorStorageMetadata]:
    """Return the metadata of tensors whose names begin with ``prefix``, by the rest of the name."""
    start = "".join(f"{part}." for part in prefix)
    return {
        name.removeprefix(start): stored
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata) and name.startswith(start)
    }
