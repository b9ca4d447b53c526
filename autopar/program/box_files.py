"""Writes and reads a rank's file in a checkpoint: boxes (rectangular parts of tensors), then a table of the boxes with checksums.

``torch.save`` writes each box, and ``torch.distributed.checkpoint`` can read it at its offset: torch ignores the table at the file's end.
The table has the id of the save, the file's name, and for each box its tensor, its offset and a CRC-32 of every ``BLOCK`` bytes. A rank
of another plan reads and verifies only the blocks that overlap its boxes. The file ends with a footer: the offset, the length and the
CRC-32 of the table.
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
"""Bytes per checksum; the first block of a box begins at the first byte of its ``Region``."""
_MAGIC = b"autopar\x02"
_FOOTER = struct.Struct("<8sQQI")  # magic, the table's offset and length, its CRC-32


_READER_THREADS = 16  # a shared file system serves many reads at a time


class DamageError(ValueError):
    """Raised for a damaged file; the message begins with the file's name."""

    def __init__(self, file: str, problem: str) -> None:
        super().__init__(f"{file} {problem}")


@dataclass(frozen=True, slots=True)
class Region:
    """The bytes of a box in a file: offset ``begin`` and ``length``, the values' offset from ``begin``, and the CRC-32 of each block."""

    begin: int
    length: int
    values_offset: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A box in a file, and its tensor: ``path`` (the keys in the nested state dict), dtype and full ``shape``."""

    path: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box
    region: Region

    @property
    def name(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True)
class BoxTable:
    """The table at a file's end: the id of the save, the file's name, its boxes, and facts about the rank that wrote it."""

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
            "regions": [[r.begin, r.length, r.values_offset, r.checksums] for r in regions],
            "boxes": [
                [e.path, str(e.dtype).removeprefix("torch."), e.shape, e.box.offsets, e.box.sizes, index[e.region]]
                for e in self.entries
            ],
        }
        return json.dumps(content, separators=(",", ":")).encode()

    @staticmethod
    def decoded(text: bytes) -> BoxTable:
        content = json.loads(text)
        regions = [Region(begin, length, values, tuple(sums)) for begin, length, values, sums in content["regions"]]
        entries = [
            Entry(tuple(path), getattr(torch, dtype), tuple(shape), Box(tuple(offsets), tuple(sizes)), regions[index])
            for path, dtype, shape, offsets, sizes, index in content["boxes"]
        ]
        return BoxTable(content["save"], content["file"], content["facts"], tuple(entries))


def file_name(rank: int) -> str:
    """Return the name of a rank's file, the same as in ``torch.distributed.checkpoint``."""
    return f"__{rank}_0.distcp"


# -- writing ----------------------------------------------------------------------------------------------------------


def write(pieces: Iterable[Piece], folder: Path, rank: int, save: str, facts: Mapping[str, Any]) -> None:
    """Write a rank's file, and wait until it is on the disk.

    All of ``pieces`` are consumed, even after an error (raised at the end), because other ranks may take part in producing them.
    """
    problem: Exception | None = None
    try:
        opened = (folder / file_name(rank)).open("x+b")
    except OSError:
        for _ in pieces:
            pass
        raise
    with opened as file:
        writer = _BoxWriter(file)
        for piece in pieces:
            try:
                for part in divided(piece) if problem is None else ():
                    writer.add(part)
            except Exception as error:  # noqa: BLE001  raised below
                problem = error
        if problem is not None:
            raise problem
        table = BoxTable(save, file_name(rank), facts, tuple(writer.entries)).encoded()
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
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._scalars: dict[tuple[torch.dtype, bytes], Region] = {}

    def add(self, piece: Piece) -> None:
        values = self._on_cpu(piece.values)
        region = None
        key = values.dtype, bytes(bytes_of(values)) if not piece.shape else b""
        if not piece.shape:  # the optimizer's number of steps is the same for most parameters, and is written once
            region = self._scalars.get(key)
        if region is None:
            region = self._append(values)
        if not piece.shape:
            self._scalars[key] = region
        self.entries.append(Entry(piece.path, values.dtype, piece.shape, piece.box, region))

    def _on_cpu(self, values: Tensor) -> Tensor:
        """Return the values on the CPU, contiguous, in a storage of exactly their size, because ``torch.save`` writes storages.

        The result may be in the staging buffer: the next call overwrites it."""
        if values.device.type == "cpu" and values.is_contiguous():
            first = values.storage_offset() * values.element_size()
            storage = values.untyped_storage()[first : first + values.nbytes]
            return values.new_empty(0).set_(storage).view(values.shape)
        if self._staging.nbytes < values.nbytes:
            self._staging = torch.empty(values.nbytes, dtype=torch.uint8)
        storage = self._staging.untyped_storage()[: values.nbytes]
        return torch.empty(0, dtype=values.dtype).set_(storage).view(values.shape).copy_(values)

    def _append(self, values: Tensor) -> Region:
        begin = self._file.seek(0, os.SEEK_END)
        stream = _ChecksumStream(self._file)
        torch.save(values, cast(IO[bytes], stream))  # torch.save calls only write and flush
        values_offset = _values_begin(self._file, values.nbytes) - begin
        assert values_offset % 64 == 0 or not values.nbytes, values_offset
        return Region(begin, stream.length, values_offset, tuple(stream.checksums))


class _ChecksumStream:
    """Writes to a file, and computes the CRC-32 of every block."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.length = file, 0
        self.checksums: list[int] = []

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest:
            filled = self.length % BLOCK
            if not filled:
                self.checksums.append(0)
            part = rest[: BLOCK - filled]
            self._file.write(part)
            self.checksums[-1] = zlib.crc32(part, self.checksums[-1])
            self.length += len(part)
            rest = rest[len(part) :]
        return size

    def flush(self) -> None:
        self._file.flush()


def _values_begin(file: IO[bytes], size: int) -> int:
    """Return the offset of the values in a file that ends with an uncompressed archive of ``torch.save``."""
    with zipfile.ZipFile(file) as archive:
        (record,) = (info for info in archive.infolist() if info.filename.endswith("/data/0"))
    assert record.compress_type == zipfile.ZIP_STORED and record.file_size == size
    file.seek(record.header_offset + 26)  # in the local header (30 bytes): the lengths of its name and extra field
    name, extra = struct.unpack("<HH", file.read(4))
    return int(record.header_offset + 30 + name + extra)


# -- reading ----------------------------------------------------------------------------------------------------------


def has_table(path: Path) -> bool:
    """Return whether a file ends with the footer of a table."""
    with path.open("rb", buffering=0) as file:
        file.seek(max(file.seek(0, os.SEEK_END) - _FOOTER.size, 0))
        return file.read(len(_MAGIC)) == _MAGIC


def tables_of(folder: Path, names: Sequence[str], save: str) -> list[BoxTable]:
    """Return the tables of the files ``names``, in this order. Raises ``DamageError`` as ``read_table`` does."""
    if not names:
        return []
    with ThreadPoolExecutor(min(_READER_THREADS, len(names)), "tables") as pool:
        return list(pool.map(lambda name: read_table(folder / name, save), names))


def read_table(path: Path, save: str) -> BoxTable:
    """Return a file's table. Raises ``DamageError`` if the file is missing, damaged, renamed, or from another save than ``save``."""
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
        raise DamageError(name, "has a table that does not match its checksum")
    table = BoxTable.decoded(bytes(text))
    if table.save != save:
        raise DamageError(name, "is from another save than the rest of the checkpoint")
    if table.file != name:
        raise DamageError(name, f"was written as {table.file}")
    return table


def read(file: IO[bytes], entry: Entry, part: Box, into: Tensor) -> None:
    """Copy a part of a box into a tensor of the part's sizes, of any dtype and device; ``part.offsets`` count from the box's first element.

    Raises ``DamageError`` if the file ends early, or a block that overlaps the part does not match its checksum.
    """
    strides = _strides(entry.box.sizes)
    first = sum(offset * stride for offset, stride in zip(part.offsets, strides, strict=True))
    last = first + sum((size - 1) * stride for size, stride in zip(part.sizes, strides, strict=True))
    region, width, name = entry.region, entry.dtype.itemsize, Path(file.name).name
    low, high = region.values_offset + first * width, region.values_offset + (last + 1) * width
    begin, end = low // BLOCK * BLOCK, min(-(-high // BLOCK) * BLOCK, region.length)
    buffer = torch.empty(end - begin, dtype=torch.uint8)
    content = bytes_of(buffer)
    _fill(file, content, region.begin + begin, name)
    for at in range(begin, end, BLOCK):
        if zlib.crc32(content[at - begin : at - begin + BLOCK]) != region.checksums[at // BLOCK]:
            raise DamageError(
                name, f"has bytes of {entry.name} that do not match their checksum, at byte {region.begin + at}"
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
