"""Weights in the safetensors format: one file, or a folder of files with an index, like those of transformers.

A file consists of the header's length, the header (JSON: for each tensor its dtype, shape and bytes), and the bytes. Files are mapped into
memory. Each rank reads and writes only its own boxes, so no process has a full model. A tensor with several
names is stored once; the header's metadata give, for each other name, the name that it is stored under, as in
``safetensors.torch.save_model``. The safetensors library isn't used: it writes only complete files, and has no complex128.
Format: https://github.com/huggingface/safetensors#format.
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

from .boxes import Box, Piece, divided, full_piece

INDEX, SUFFIX = "model.safetensors.index.json", ".safetensors"
FILE_BYTES = 5 * 10**9  # the file size of transformers
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "C128": torch.complex128,  # not in the format: only for a folder's initial values
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Described = Mapping[str, tuple[torch.dtype, Sequence[int]]]
"""Tensors by name: the dtype and the shape of each."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The place of a tensor in a file: ``begin`` is the offset of its first byte in the file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def size(self) -> int:
        """The tensor's bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


# -- reading ----------------------------------------------------------------------------------------------------------


def is_weights(path: Path) -> bool:
    """Return whether the path is a safetensors file or a folder."""
    return path.suffix == SUFFIX or path.is_dir()


def mapped(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, or of all files of a folder, under each of their names, memory-mapped: read when used.

    Raises ``ValueError`` for a file in another format, ``OSError`` for one that can't be opened.
    """
    files = [path] if path.is_file() else _files(path)
    return {name: tensor for file in files for name, tensor in _tensors(file).items()}


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    found = sorted(folder.glob(f"*{SUFFIX}"))
    if not found:
        raise ValueError(f"{folder} has no file of weights (*{SUFFIX})")
    return found


def _tensors(file: Path) -> dict[str, Tensor]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > size - 8:
            raise ValueError(f"{file} is not a complete file of weights")
        header = json.loads(opened.read(length))
    memory = torch.from_file(str(file), size=size, dtype=torch.uint8)
    found: dict[str, Tensor] = {}
    others = header.pop("__metadata__", {})
    for name, record in header.items():
        begin, end = record["data_offsets"]
        if record["dtype"] not in DTYPES:
            raise ValueError(f"{name} in {file} has the dtype {record['dtype']}, which no program has")
        dtype = DTYPES[record["dtype"]]
        part = memory[8 + length + begin : 8 + length + end]
        if not end - begin == len(part) == math.prod(record["shape"]) * dtype.itemsize:
            raise ValueError(f"{file} is not a complete file of weights: {name} has bytes {begin} to {end}")
        aligned = part.storage_offset() % dtype.itemsize == 0
        found[name] = (part if aligned else part.clone()).view(dtype).view(record["shape"])
    return found | {other: found[name] for other, name in others.items() if name in found and other not in found}


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, which must live as long as the view. NumPy, which may not be installed, isn't used."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


# -- writing ----------------------------------------------------------------------------------------------------------


def file_places(folder: Path, tensors: Described, file_bytes: int = FILE_BYTES) -> dict[str, Stored]:
    """Return the places of all tensors in files of up to ``file_bytes`` each (a larger tensor has a file of its own)."""
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
        found |= places_in(folder / file, {name: tensors[name] for name in names})
    return found


def places_in(file: Path, tensors: Described, others: Mapping[str, str] | None = None) -> dict[str, Stored]:
    """Return the places of tensors in one file. ``others`` gives, for each other name of a tensor, the name that it is stored under."""
    # wide dtypes first: then every tensor begins at a multiple of its elements' size
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1][0].itemsize))
    begin = 8 + len(_header_bytes(ordered, others or {}))
    found: dict[str, Stored] = {}
    for name, (dtype, shape) in ordered.items():
        found[name] = Stored(file, dtype, tuple(shape), begin)
        begin += found[name].size
    return found


def without_names(tensors: Described) -> list[str]:
    """Return the names of tensors whose dtype the format does not have."""
    format_has = set(_NAMES) - {torch.complex128}
    return [name for name, (dtype, _) in tensors.items() if dtype not in format_has]


def _header_bytes(tensors: Described, others: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt", **others}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-(8 + len(text)) % 16)  # 16: the bytes of the widest element


def create(places: Mapping[str, Stored], others: Mapping[str, str] | None = None) -> None:
    """Create the files with their headers and sizes, and an index if there are several. ``others`` is that of ``places_in``."""
    files: dict[Path, list[str]] = {}
    for name, place in places.items():
        files.setdefault(place.file, []).append(name)
    for file, names in files.items():
        header = _header_bytes({name: (places[name].dtype, places[name].shape) for name in names}, others or {})
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


def write_file(file: Path, state: Mapping[str, Tensor]) -> None:
    """Write full tensors into one file, which gets its name once it is complete; a tensor with several names is stored once."""
    stored_as: dict[object, str] = {}
    others: dict[str, str] = {}
    for name, tensor in state.items():
        place = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
        first = stored_as.setdefault(place, name) if tensor.numel() else name
        if first != name:
            others[name] = first
    own = {name: tensor for name, tensor in state.items() if name not in others}
    partial = file.with_name(f"{file.name}.partial")
    places = places_in(partial, {name: (tensor.dtype, tensor.shape) for name, tensor in own.items()}, others)
    try:
        create(places, others)
        write((places[name], full_piece((name,), tensor.detach())) for name, tensor in own.items())
        partial.rename(file)
    finally:
        partial.unlink(missing_ok=True)


def write(own: Iterable[tuple[Stored, Piece]]) -> None:
    """Write this rank's boxes at their places, and wait until they are on the disk."""
    opened: dict[Path, int] = {}
    try:
        for place, piece in own:
            if place.file not in opened:
                opened[place.file] = os.open(place.file, os.O_WRONLY)
            for part in divided(piece) if piece.values.numel() else ():
                values = part.values.to("cpu", place.dtype).resolve_conj().resolve_neg().contiguous()
                data, at = bytes_of(values), 0
                for first, count in runs(place.shape, part.box):
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
    """Yield the runs of consecutive elements that make up a box in a tensor of this shape: the first element, and their number."""
    inner = len(shape)
    while inner and box.sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)  # the box covers the dims after this one completely
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    count = math.prod(box.sizes[inner:])
    start = sum(offset * step for offset, step in zip(box.offsets, steps, strict=True))
    for outer in itertools.product(*(range(size) for size in box.sizes[:inner])):
        yield start + sum(index * steps[dim] for dim, index in enumerate(outer)), count
