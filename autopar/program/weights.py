"""Weights in the safetensors format: one file, or a folder of files with an index, as transformers has them.

A file is the length of a header, the header (JSON: for each tensor its dtype, shape and bytes), and the bytes. Each rank reads the parts
of its own boxes through a memory map, and writes its own boxes at their places: no process has a whole model.
Format: https://github.com/huggingface/safetensors#format.

This file is copied into every emitted program; it needs torch alone.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from autopar.program.boxes import Box, Piece

INDEX, SUFFIX = "model.safetensors.index.json", ".safetensors"
FILE_BYTES = 5 * 10**9  # as transformers divides a model
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: its first byte is ``begin``, counted from the beginning of the file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


# -- reading ----------------------------------------------------------------------------------------------------------


def is_weights(path: Path) -> bool:
    """Whether this is a file or a folder of weights."""
    return path.suffix == SUFFIX or path.is_dir()


def stored(path: Path) -> dict[str, Stored]:
    """The tensors of a file, or of all files of a folder, by name. Raises ``ValueError`` for a file that is not of the format."""
    files = [path] if path.is_file() else _files(path)
    return {name: tensor for file in files for name, tensor in _header(file).items()}


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    found = sorted(folder.glob(f"*{SUFFIX}"))
    if not found:
        raise ValueError(f"{folder} has no file of weights (*{SUFFIX})")
    return found


def _header(file: Path) -> dict[str, Stored]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > size - 8:
            raise ValueError(f"{file} is no whole file of weights")
        header = json.loads(opened.read(length))
    found = {}
    for name, record in header.items():
        if name == "__metadata__":
            continue
        begin, end = record["data_offsets"]
        if record["dtype"] not in _DTYPES:
            raise ValueError(f"{name} in {file} has the dtype {record['dtype']}, which no program has")
        tensor = Stored(file, _DTYPES[record["dtype"]], tuple(record["shape"]), 8 + length + begin)
        if tensor.size != end - begin or tensor.begin + tensor.size > size:
            raise ValueError(f"{file} is no whole file of weights: {name} has bytes {begin} to {end}")
        found[name] = tensor
    return found


def read(tensor: Stored, box: Box) -> Tensor:
    """A box of a tensor; of the file only the pages of its rows are read."""
    if not math.prod(box.sizes):
        return torch.empty(box.sizes, dtype=tensor.dtype)
    file = torch.from_file(str(tensor.file), shared=False, size=tensor.file.stat().st_size, dtype=torch.uint8)
    first, rows = (box.offsets[0], box.sizes[0]) if box.sizes else (0, 1)
    row = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
    own = file[tensor.begin + first * row : tensor.begin + (first + rows) * row]
    own = own.clone() if own.storage_offset() % tensor.dtype.itemsize else own
    values = own.view(tensor.dtype).view(rows, *tensor.shape[1:]) if box.sizes else own.view(tensor.dtype).view(())
    for dim in range(1, len(box.sizes)):
        values = values.narrow(dim, box.offsets[dim], box.sizes[dim])
    return values


# -- writing ----------------------------------------------------------------------------------------------------------


def divided(
    folder: Path, tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], file_bytes: int = FILE_BYTES
) -> dict[str, Stored]:
    """The places of all tensors in files of up to ``file_bytes`` each (a larger tensor has a file of its own)."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        if groups[-1] and filled + size > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    found: dict[str, Stored] = {}
    for i, names in enumerate(groups):
        file = f"model-{i + 1:05}-of-{len(groups):05}{SUFFIX}" if len(groups) > 1 else f"model{SUFFIX}"
        begin = 8 + len(_encoded({name: tensors[name] for name in names}))
        for name in names:
            dtype, shape = tensors[name]
            found[name] = Stored(folder / file, dtype, tuple(shape), begin)
            begin += found[name].size
    return found


def _encoded(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def create(places: Mapping[str, Stored]) -> None:
    """Make the files with their headers and sizes, and the index of several files."""
    files: dict[Path, list[str]] = {}
    for name, place in places.items():
        files.setdefault(place.file, []).append(name)
    for file, names in files.items():
        header = _encoded({name: (places[name].dtype, places[name].shape) for name in names})
        with file.open("wb") as opened:
            opened.write(len(header).to_bytes(8, "little") + header)
            opened.truncate(max(places[name].begin + places[name].size for name in names))
    if len(files) > 1:
        total = sum(place.size for place in places.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: place.file.name for name, place in places.items()},
        }
        (next(iter(files)).parent / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write(own: Iterable[tuple[Stored, Piece]]) -> None:
    """Write this rank's boxes at their places, and wait until they are on the disk."""
    opened: dict[Path, int] = {}
    try:
        for place, piece in own:
            if place.file not in opened:
                opened[place.file] = os.open(place.file, os.O_WRONLY)
            values = piece.values.to("cpu", place.dtype).contiguous()
            size = values.numel() * values.element_size()
            data = memoryview((ctypes.c_ubyte * size).from_address(values.data_ptr()))
            at = 0
            for first, count in runs(place.shape, piece.box):
                length = count * place.dtype.itemsize
                _write_all(opened[place.file], data[at : at + length], place.begin + first * place.dtype.itemsize)
                at += length
        for descriptor in opened.values():
            os.fsync(descriptor)
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def _write_all(descriptor: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written


def runs(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
    """The runs of consecutive elements that a box is in a tensor of this shape: the first element, and their number."""
    inner = len(shape)
    while inner and box.sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)  # the dims after this one are whole
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    count = math.prod(box.sizes[inner:])
    start = sum(offset * step for offset, step in zip(box.offsets, steps, strict=True))
    for outer in itertools.product(*(range(size) for size in box.sizes[:inner])):
        yield start + sum(index * steps[dim] for dim, index in enumerate(outer)), count
