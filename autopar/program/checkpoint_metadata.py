"""Computes torch's metadata of a checkpoint from the tables of the ranks' files (``box_files``), and which boxes a rank reads.

A box is a rectangular part of a tensor; torch's metadata calls it a chunk.
Rank 0 reads the tables from the shared folder, so ranks need not send it their lists of boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo  # names in the format
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from . import box_files
from .box_files import BoxTable, DamageError, Entry
from .boxes import Box, Piece
from .checkpoint_files import METADATA, CheckpointError, StoredCheckpoint

# -- writing ----------------------------------------------------------------------------------------------------------


def metadata_of(tables: Sequence[BoxTable]) -> Metadata:
    """Return the metadata of the boxes; of several with the same offsets, only the first counts.

    Raises ``CheckpointError`` unless they cover each element once, with one dtype and shape per tensor.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, tuple[str, ...]] = {}
    for table in tables:
        for entry in table.entries:
            name = entry.name
            paths[name] = entry.path
            there = tensors.get(name)
            if there is None:
                there = tensors[name] = TensorStorageMetadata(
                    TensorProperties(entry.dtype), torch.Size(entry.shape), []
                )
            if (there.properties.dtype, tuple(there.size)) != (entry.dtype, entry.shape):
                raise _inconsistent(name, "ranks have it with different dtypes or shapes")
            index = MetadataIndex(name, entry.box.offsets, len(there.chunks))
            if index not in places:  # a tensor without elements may be in several files
                places[index] = _StorageInfo(table.file, entry.region.begin, entry.region.length)
                there.chunks.append(ChunkStorageMetadata(torch.Size(entry.box.offsets), torch.Size(entry.box.sizes)))
    for name, tensor in tensors.items():
        if wrong := _coverage_error(tensor):
            raise _inconsistent(name, wrong)
    return Metadata(dict(tensors), paths, places, StorageMeta(), CURRENT_DCP_VERSION)


class _MetadataWriter(dcp.FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # torch's would contain the folder's path, which changes when the save is complete


def write_metadata(metadata: Metadata, folder: Path) -> None:
    """Write torch's metadata file, and wait until it is on the disk."""
    places = [WriteResult(index, place.length, place) for index, place in metadata.storage_data.items()]
    _MetadataWriter(folder).finish(metadata, [places])


def _inconsistent(name: str, why: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint's {name} is inconsistent: {why}", "this is a bug in autopar: report it")


def _coverage_error(tensor: TensorStorageMetadata) -> str:
    """Return why boxes do not cover each element of a tensor exactly once, or an empty string."""
    size = tuple(tensor.size)
    elements = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
    if elements != math.prod(size):
        return f"its boxes have {elements} elements of {math.prod(size)}"
    open_boxes: list[ChunkStorageMetadata] = []
    for chunk in sorted(tensor.chunks, key=lambda chunk: chunk.offsets):
        ends = [offset + extent for offset, extent in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > extent for end, extent in zip(ends, size, strict=True)):
            return f"a box ends at {tuple(ends)} in a tensor of {size}"
        open_boxes = [box for box in open_boxes if not size or box.offsets[0] + box.sizes[0] > chunk.offsets[0]]
        if any(_overlap(_box(box), _box(chunk)) for box in open_boxes):
            return f"two boxes have the element {tuple(chunk.offsets)}"
        open_boxes.append(chunk)
    return ""


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Read:
    """A part of a stored box, and ``into``, the view of one of this rank's tensors to read it into."""

    index: MetadataIndex
    entry: Entry | None  # ``None`` in format 1, which has no checksums
    part: Box  # its offsets count from the stored box's first element
    into: Tensor


Reads = Mapping[str, Sequence[Read]]
"""The reads of a rank, by file name."""


def plan_reads(pieces: Sequence[Piece], checkpoint: StoredCheckpoint) -> Reads:
    """Return the reads that fill this rank's pieces. Of the files, only the tables (format 1 has none) are read, to check the metadata.

    Raises ``CheckpointError`` if the checkpoint lacks parts of a piece, or a table is damaged or from another save.
    """
    reads: dict[str, list[Read]] = {}
    for piece in pieces:
        stored = checkpoint.metadata.state_dict_metadata.get(piece.name)
        elements = 0
        for chunk in stored.chunks if isinstance(stored, TensorStorageMetadata) else ():
            if common := _overlap(_box(chunk), piece.box):
                index = MetadataIndex(piece.name, chunk.offsets)
                into = piece.values
                for dim, (offset, size) in enumerate(zip(common.offsets, common.sizes, strict=True)):
                    into = into.narrow(dim, offset - piece.box.offsets[dim], size)
                part = Box(tuple(a - b for a, b in zip(common.offsets, chunk.offsets, strict=True)), common.sizes)
                elements += math.prod(common.sizes)
                reads.setdefault(checkpoint.metadata.storage_data[index].relative_path, []).append(
                    Read(index, None, part, into)
                )
        if elements != math.prod(piece.box.sizes):
            raise CheckpointError(f"the checkpoint {checkpoint.path} lacks parts of {piece.name}", "load another one")
    if checkpoint.save is None:
        return reads
    return {name: _verified(name, file_reads, checkpoint, checkpoint.save) for name, file_reads in reads.items()}


def _verified(name: str, reads: Sequence[Read], checkpoint: StoredCheckpoint, save: str) -> list[Read]:
    """Return the reads of a file with their entries in its table; raise ``CheckpointError`` if the table contradicts the metadata."""
    with explained_damage(checkpoint.path):
        table = box_files.read_table(checkpoint.path / name, save)
        entries = {(entry.name, entry.box.offsets): entry for entry in table.entries}
        verified = []
        for read in reads:
            entry = entries.get((read.index.fqn, tuple(read.index.offset or ())))
            place = checkpoint.metadata.storage_data[read.index]
            if entry is None or (entry.region.begin, entry.region.length) != (place.offset, place.length):
                raise DamageError(name, f"does not have {read.index.fqn} where {METADATA} has it")
            verified.append(Read(read.index, entry, read.part, read.into))
    return verified


def read_values(reads: Reads, checkpoint: StoredCheckpoint, partially_loaded: bool = True) -> None:
    """Execute the reads of ``plan_reads``: fill this rank's pieces. Raises ``CheckpointError`` if a checksum differs (not in format 1);
    ``partially_loaded``: some state may have changed then."""
    for name, file_reads in reads.items():
        with (
            explained_damage(checkpoint.path, partially_loaded),
            (checkpoint.path / name).open("rb", buffering=0) as file,
        ):
            box: tuple[MetadataIndex, Tensor] | None = None
            for read in file_reads:
                if read.entry is not None:
                    box_files.read(file, read.entry, read.part, read.into)
                    continue
                if box is None or box[0] != read.index:
                    place = checkpoint.metadata.storage_data[read.index]
                    file.seek(place.offset)
                    box = read.index, torch.load(BytesIO(file.read(place.length)), weights_only=True)
                values = box[1]
                for dim, (offset, size) in enumerate(zip(read.part.offsets, read.part.sizes, strict=True)):
                    values = values.narrow(dim, offset, size)
                read.into.copy_(values)


@contextmanager
def explained_damage(path: Path, partially_loaded: bool = False) -> Iterator[None]:
    """Convert a ``DamageError`` inside this context to a ``CheckpointError``; ``partially_loaded``: some state may have changed."""
    try:
        yield
    except DamageError as error:
        hint = "load an earlier one" + (
            " before training continues: some parameters have been replaced" if partially_loaded else ""
        )
        raise CheckpointError(f"the checkpoint {path} is damaged: its file {error}", hint, partially_loaded) from error


def _box(chunk: ChunkStorageMetadata) -> Box:
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _overlap(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes of a tensor, or ``None`` if it is empty."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    ends = (min(a + x, b + y) for a, x, b, y in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True))
    sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None
