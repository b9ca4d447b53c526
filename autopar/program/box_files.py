"""The file of one rank in a checkpoint: boxes, then a table of them with checksums.

A box is stored as ``torch.save`` writes it, which is what ``torch.distributed.checkpoint`` reads at the box's place; it ignores the table
at the file's end. The table names the save and the file, and for each box the tensor, its place, and a CRC-32 of every ``BLOCK`` bytes. A
part of a box is read by the blocks that it is in, each compared with its checksum, so a reader under another plan reads and verifies what
it needs. The file ends with a footer: the place, the length and the CRC-32 of the table.
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from .boxes import Box, Piece, divided
from .weights import bytes_of

BLOCK = 2**20
"""Bytes that have one checksum, counted from the beginning of a box's region."""
_MAGIC = b"autopar\x02"
_FOOTER = struct.Struct("<8sQQI")  # magic, the table's first byte and length, its CRC-32


_THREADS = 16  # that read tables: a shared file system serves many at a time


class DamageError(ValueError):
    """A damaged file; the message begins with the file's name."""

    def __init__(self, file: str, what: str) -> None:
        super().__init__(f"{file} {what}")


@dataclass(frozen=True, slots=True)
class Region:
    """The bytes of a box in a file: the first byte and the length, where in them the values begin, and the blocks' checksums."""

    begin: int
    length: int
    data: int
    sums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A box in a file: a part of the tensor ``path`` of ``shape``."""

    path: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box
    region: Region

    @property
    def name(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True)
class FileHeader:
    """What a file says of itself: the save that it belongs to, its name, its boxes, and facts of the rank that wrote it."""

    save: str
    file: str
    facts: Mapping[str, Any]
    entries: tuple[Entry, ...]

    def encoded(self) -> bytes:
        regions = list(dict.fromkeys(entry.region for entry in self.entries))
        index = {region: i for i, region in enumerate(regions)}
        content = {
            "save": self.save,
            "file": self.file,
            "facts": self.facts,
            "regions": [[r.begin, r.length, r.data, r.sums] for r in regions],
            "boxes": [
                [e.path, str(e.dtype).removeprefix("torch."), e.shape, e.box.offsets, e.box.sizes, index[e.region]]
                for e in self.entries
            ],
        }
        return json.dumps(content, separators=(",", ":")).encode()

    @staticmethod
    def decoded(text: bytes) -> FileHeader:
        content = json.loads(text)
        regions = [Region(begin, length, data, tuple(sums)) for begin, length, data, sums in content["regions"]]
        entries = [
            Entry(tuple(path), getattr(torch, dtype), tuple(shape), Box(tuple(offsets), tuple(sizes)), regions[index])
            for path, dtype, shape, offsets, sizes, index in content["boxes"]
        ]
        return FileHeader(content["save"], content["file"], content["facts"], tuple(entries))


def file_of(rank: int) -> str:
    """Return the name of a rank's file, as ``torch.distributed.checkpoint`` has it."""
    return f"__{rank}_0.distcp"


# -- writing ----------------------------------------------------------------------------------------------------------


def write(pieces: Iterable[Piece], folder: Path, rank: int, save: str, facts: Mapping[str, Any]) -> None:
    """Write a rank's file, and wait until it is on the disk.

    All of ``pieces`` are taken, even after an error, which is raised at the end: making them may involve other ranks.
    """
    problem: Exception | None = None
    with (folder / file_of(rank)).open("x+b") as file:
        writer = _BoxWriter(file)
        for piece in pieces:
            try:
                for part in divided(piece) if problem is None else ():
                    writer.add(part)
            except Exception as error:  # noqa: BLE001  raised below
                problem = error
        if problem is not None:
            raise problem
        table = FileHeader(save, file_of(rank), facts, tuple(writer.entries)).encoded()
        begin = file.seek(0, os.SEEK_END)
        file.write(table)
        file.write(_FOOTER.pack(_MAGIC, begin, len(table), zlib.crc32(table)))
        file.flush()
        os.fsync(file.fileno())


class _BoxWriter:
    """Appends boxes to a file."""

    def __init__(self, file: IO[bytes]) -> None:
        self.entries: list[Entry] = []
        self._file = file
        self._copy = torch.empty(0, dtype=torch.uint8)
        self._numbers: dict[tuple[torch.dtype, bytes], Region] = {}

    def add(self, piece: Piece) -> None:
        values = self._on_the_host(piece.values)
        region = None
        number = values.dtype, bytes(bytes_of(values)) if not piece.shape else b""
        if not piece.shape:  # the optimizer's number of steps is the same for most parameters, and is in the file once
            region = self._numbers.get(number)
        if region is None:
            region = self._written(values)
        if not piece.shape:
            self._numbers[number] = region
        self.entries.append(Entry(piece.path, values.dtype, piece.shape, piece.box, region))

    def _on_the_host(self, values: Tensor) -> Tensor:
        """Contiguous values whose storage is no larger than they are: ``torch.save`` writes storages. What has to be copied is overwritten
        by the next copy, when this box is in the file."""
        if values.device.type == "cpu" and values.is_contiguous():
            first = values.storage_offset() * values.element_size()
            storage = values.untyped_storage()[first : first + values.nbytes]
            return values.new_empty(0).set_(storage).view(values.shape)
        if self._copy.nbytes < values.nbytes:
            self._copy = torch.empty(values.nbytes, dtype=torch.uint8)
        copied = self._copy.untyped_storage()[: values.nbytes]
        return torch.empty(0, dtype=values.dtype).set_(copied).view(values.shape).copy_(values)

    def _written(self, values: Tensor) -> Region:
        begin = self._file.seek(0, os.SEEK_END)
        stream = _Summed(self._file)
        torch.save(values, cast(IO[bytes], stream))  # all that it needs is to write
        data = _place_of_values(self._file, values.nbytes) - begin
        assert data % 64 == 0 or not values.nbytes, data
        return Region(begin, stream.length, data, stream.sums())


class _Summed:
    """A stream into a file that computes the CRC-32 of every block on the way."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.length = file, 0
        self._sums: list[int] = []

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest:
            filled = self.length % BLOCK
            if not filled:
                self._sums.append(0)
            part = rest[: BLOCK - filled]
            self._file.write(part)
            self._sums[-1] = zlib.crc32(part, self._sums[-1])
            self.length += len(part)
            rest = rest[len(part) :]
        return size

    def flush(self) -> None:
        self._file.flush()

    def sums(self) -> tuple[int, ...]:
        return tuple(self._sums)


def _place_of_values(file: IO[bytes], size: int) -> int:
    """Return the first byte of the values in the archive of ``torch.save`` that the file ends with: its records are stored as they are."""
    with zipfile.ZipFile(file) as archive:
        (record,) = (info for info in archive.infolist() if info.filename.endswith("/data/0"))
    assert record.compress_type == zipfile.ZIP_STORED and record.file_size == size
    file.seek(record.header_offset + 26)
    name, extra = struct.unpack("<HH", file.read(4))
    return int(record.header_offset + 30 + name + extra)


# -- reading ----------------------------------------------------------------------------------------------------------


def has_table(path: Path) -> bool:
    """Return whether a file ends as the files do that have a table."""
    with path.open("rb", buffering=0) as file:
        file.seek(max(file.seek(0, os.SEEK_END) - _FOOTER.size, 0))
        return file.read(len(_MAGIC)) == _MAGIC


def tables_of(folder: Path, names: Sequence[str], save: str) -> list[FileHeader]:
    """Return the tables of files of one save, in order. Raises as ``read_table`` does."""
    if not names:
        return []
    with ThreadPoolExecutor(min(_THREADS, len(names)), "tables") as pool:
        return list(pool.map(lambda name: read_table(folder / name, save), names))


def read_table(path: Path, save: str) -> FileHeader:
    """Return a file's table. Raises ``DamageError`` if it is missing or not as it was written, or is of another save than ``save``."""
    name = path.name
    try:
        file = path.open("rb", buffering=0)
    except FileNotFoundError as error:
        raise DamageError(name, "is missing") from error
    with file:
        size = file.seek(0, os.SEEK_END)
        footer = os.pread(file.fileno(), _FOOTER.size, max(size - _FOOTER.size, 0))
        magic, begin, length, checksum = _FOOTER.unpack(footer.ljust(_FOOTER.size))
        if magic != _MAGIC or begin + length + _FOOTER.size != size:
            raise DamageError(name, "does not end with the table of its boxes")
        text = bytearray(length)
        _fill(file, memoryview(text), begin, name)
    if zlib.crc32(text) != checksum:
        raise DamageError(name, "has a table that does not have its checksum")
    table = FileHeader.decoded(bytes(text))
    if table.save != save:
        raise DamageError(name, "is of another save than the rest of the checkpoint")
    if table.file != name:
        raise DamageError(name, f"was written as {table.file}")
    return table


def read(file: IO[bytes], entry: Entry, part: Box, into: Tensor) -> None:
    """Copy a part of a box (``part`` counts from the box's first element) into a tensor of the part's sizes, of any dtype and device.

    Raises ``DamageError`` if a block that the part is in does not have its checksum.
    """
    strides = _strides(entry.box.sizes)
    first = sum(offset * stride for offset, stride in zip(part.offsets, strides, strict=True))
    last = first + sum((size - 1) * stride for size, stride in zip(part.sizes, strides, strict=True))
    region, width, name = entry.region, entry.dtype.itemsize, Path(file.name).name
    low, high = region.data + first * width, region.data + (last + 1) * width
    begin, end = low // BLOCK * BLOCK, min(-(-high // BLOCK) * BLOCK, region.length)
    buffer = torch.empty(end - begin, dtype=torch.uint8)
    content = bytes_of(buffer)
    _fill(file, content, region.begin + begin, name)
    for at in range(begin, end, BLOCK):
        if zlib.crc32(content[at - begin : at - begin + BLOCK]) != region.sums[at // BLOCK]:
            raise DamageError(
                name, f"has bytes of {entry.name} that do not have their checksum, at {region.begin + at}"
            )
    into.copy_(buffer[low - begin : high - begin].view(entry.dtype).as_strided(part.sizes, strides))


def _fill(file: IO[bytes], into: memoryview, at: int, name: str) -> None:
    while into:
        count = os.preadv(file.fileno(), [into], at)
        if not count:
            raise DamageError(name, "ends early")
        into, at = into[count:], at + count


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    return tuple(strides)
