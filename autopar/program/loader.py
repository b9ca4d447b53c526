"""Reads the global batches of a data set; every rank reads only its own rows.

The order of an epoch is that of ``torch.utils.data.DistributedSampler``: a permutation drawn from ``seed + epoch``, or the data set's
order. It doesn't depend on the plan. A position is an epoch and a row, so a training that resumes with another number of devices, or
with another global batch, continues at the next row.

Rows come from a map-style data set through torch's ``DataLoader``, optionally with worker processes. A checkpoint needs only the position:
a row depends only on its index, and rows that workers had prefetched are read again.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import random
import signal
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from .agree import digest
from .host import AsyncHostCopy
from .share import DataError, Rows, Share
from .spec import TensorSpec
from .world import LoadedProgram, World

_CHECKSUM_ROWS = 16  # rows that the checksum of a data set covers


@dataclass(frozen=True)
class Order:
    """The order of a data set's rows, and how to read them.

    With ``shuffle`` an epoch's order is a permutation from ``seed + epoch``. ``workers`` is the number of reader processes of each
    rank. ``last`` says what happens to an incomplete last batch of an epoch: ``"drop"``, or ``"pad"``, which fills the batch with rows that
    the loss ignores.
    """

    shuffle: bool = False
    seed: int = 0
    workers: int = 0
    last: str = "drop"


class Tensors(Dataset[Mapping[str, Tensor]]):
    """A data set of tensors by name, with one row per example in dim 0. A memory-mapped file's rows are read when they are needed."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        lengths = {name: len(tensor) for name, tensor in self.tensors.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(
                f"the data have different numbers of rows: {lengths}", "every tensor has one row per example"
            )

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Tensors:
        """Return the tensors in a file that ``torch.save({"input_ids": tensor, ...})`` wrote."""
        how = 'a file of torch.save({"NAME": tensor, ...}) has the rows of each input of the program'
        if not os.path.isfile(path):
            raise DataError(f"there is no file {path}", how)
        try:
            found = torch.load(path, weights_only=True, mmap=True)
        except Exception as error:  # of many kinds, depending on the file
            raise DataError(f"{path} cannot be read ({type(error).__name__})", how) from error
        if not isinstance(found, Mapping) or not found:
            raise DataError(f"{path} has no dict of tensors, but a {type(found).__name__}", how)
        if wrong := [name for name, each in found.items() if not isinstance(each, Tensor) or not each.dim()]:
            raise DataError(f"{path} has entries that are no tensors with rows: {', '.join(map(str, wrong[:5]))}", how)
        return Tensors(found)

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, row: int) -> Mapping[str, Tensor]:
        return {name: tensor[row] for name, tensor in self.tensors.items()}

    def __getitems__(self, rows: Sequence[int]) -> Mapping[str, Tensor]:
        index = torch.tensor(rows, dtype=torch.int64)
        return {name: tensor[index] for name, tensor in self.tensors.items()}


def first_key(seed: int) -> int:
    """Return the first of the 2**40 keys of random numbers that belong to ``seed``. Seeds that differ by a multiple of 2**23 share theirs,
    since a key is at most 63 bits long."""
    return seed % 2**23 << 40


class Synthetic(Tensors):
    """2**40 synthetic rows, each computed from its index: normal numbers, and integers that are 0 or 1, which are valid tokens and labels
    for any vocabulary."""

    def __init__(self, inputs: Mapping[str, TensorSpec], seed: int) -> None:
        self.inputs, self.seed = dict(inputs), seed

    def __len__(self) -> int:
        return 2**40

    def __getitem__(self, row: int) -> Mapping[str, Tensor]:
        generator = torch.Generator().manual_seed(first_key(self.seed) + row)
        found = {}
        for name, spec in self.inputs.items():
            random = torch.randn(spec.shape[1:], generator=generator)
            found[name] = (random if spec.dtype.is_floating_point else random > 0).to(spec.dtype)
        return found

    def __getitems__(self, rows: Sequence[int]) -> Mapping[str, Tensor]:
        return default_collate([self[row] for row in rows])


@dataclass(frozen=True)
class _Fetched:
    """This rank's rows of the batch at ``begin`` (epoch, row), or the error; ``check``: the check that all ranks read the same batch."""

    begin: tuple[int, int]
    tensors: Mapping[str, Tensor] | None
    problem: str
    check: AsyncHostCopy


class Loader:
    """This rank's rows of the global batches of a data set.

    Args:
        program, world: they determine which rows of which inputs this rank reads.
        dataset: a map-style data set; a mapping of tensors by name; or a ``DataLoader``, whose ``collate_fn``, workers and order are used.
        order: the order of the rows.
        collate: converts a list of samples to tensors; default: that of ``DataLoader``.

    Raises:
        DataError: the data set or its ``DataLoader`` doesn't fit the program, or has too few rows; or the program can't pad batches.
    """

    def __init__(
        self,
        program: LoadedProgram,
        world: World,
        dataset: Any,
        order: Order | None = None,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self._order, self._collate = order or Order(), collate
        self._share = Share(program, world)
        self._inputs, self._sample = program.inputs, program.spec.sample
        self.batch, self._pinned = self._share.batch, world.device.type == "cuda"
        self._dataset = self._map_style_dataset(dataset)
        if self._collate is not None and isinstance(self._dataset, Tensors):
            raise DataError(
                "the rows of tensors are read as they are, without a collate function",
                "give a map-style data set, or apply the function to the tensors",
            )
        self.rows = len(self._dataset)
        pads = self._order.last == "pad" and not program.local_steps
        self._ignored: Mapping[str, int] = program.spec.ignored if pads else {}
        if self._order.last == "pad" and not self._ignored:
            raise DataError(
                "a short batch cannot be padded: the model's loss is not proved to ignore rows, or the plan runs local SGD",
                'last="drop"; it is proved for cross entropies over the number of valid labels, where no op couples the rows of a batch',
            )
        if self.rows < (1 if self._ignored else self.batch):
            raise DataError(
                f"the data set has {self.rows} rows, and one global batch takes {self.batch}",
                "give more rows, or plan for a smaller batch",
            )
        self._batches: Iterator[Any] = iter(())
        self._next: tuple[int, int] | None = None  # the position of the next batch of ``_batches``
        self._fetched: _Fetched | None = None  # the prefetched batch

    def __len__(self) -> int:
        """Return the number of global batches in an epoch."""
        return -(-self.rows // self.batch) if self._ignored else self.rows // self.batch

    @property
    def order(self) -> str:
        """The number of rows and their order, in words."""
        order = f"shuffled with seed {self._order.seed}" if self._order.shuffle else "in order"
        return f"{self.rows} rows {order}"

    @functools.cached_property
    def key(self) -> str:
        """Identifies the data set and its order: a position is valid only for the same key. All ranks must read this property together.

        It includes a checksum of 16 rows, unless reading them twice gives different values.
        """
        found = [""]
        if dist.get_rank() == 0:
            with contextlib.suppress(Exception):  # an error in a row is reported when the row is read
                found = [self._content()]
        dist.broadcast_object_list(found, 0)
        return f"{self.order}, with checksum {found[0]}" if found[0] else self.order

    def _content(self) -> str:
        """Return a checksum of 16 collated rows, evenly spaced; ``""`` if they are synthetic or differ between two readings."""
        if isinstance(self._dataset, Synthetic):
            return ""
        rows = sorted({i * (self.rows - 1) // (_CHECKSUM_ROWS - 1) for i in range(_CHECKSUM_ROWS)})
        with _preserved_rng_state():
            one, other = (
                self._digest(batch)
                for batch in self._data_loader(self._full_dataset, [rows, rows], self._order.workers and 1)
            )
        return f"{one:08x}" if one == other else ""

    def _digest(self, collated: Any) -> int:
        """Return the checksum of a batch's inputs: all inputs of the program, not only those that this rank reads."""
        named = self._named(collated)
        tensors = {name: torch.as_tensor(named[name]) for name in sorted(self._inputs) if name in named}
        return zlib.crc32(repr([(name, digest(tensor)) for name, tensor in tensors.items()]).encode())

    def _map_style_dataset(self, given: Any) -> Any:
        """Return the data set in ``given``, without tensors that this rank doesn't read. Raises ``DataError`` if it isn't map-style."""
        if isinstance(given, DataLoader):
            given = self._adopt_loader(given)
        if isinstance(given, Mapping):
            given = Tensors(given)
        if isinstance(given, IterableDataset) or not hasattr(given, "__getitem__") or not hasattr(given, "__len__"):
            raise DataError(
                f"{type(given).__name__} cannot be read by row: it has no length, or no __getitem__",
                "each rank reads only its own rows, so the data set must be map-style: implement __len__ and __getitem__, or write a file",
            )
        self._full_dataset = given
        if type(given) is Tensors and self._share.inputs:  # never read the other inputs of a file
            given = Tensors({name: self._fitting(name, given.tensors) for name in self._share.inputs})
        return given

    def _adopt_loader(self, loader: DataLoader[Any]) -> Any:
        """Return the data set of a user's loader, after adopting its options."""
        if loader.batch_size not in (1, self.batch):
            raise DataError(
                f"the loader's batches have {loader.batch_size} rows, and the plan's global batch has {self.batch}",
                f"batch_size={self.batch}, or leave it out",
            )
        if type(loader.sampler) not in (SequentialSampler, RandomSampler) and not isinstance(
            loader.dataset, IterableDataset
        ):
            raise DataError(
                f"the loader's sampler is a {type(loader.sampler).__name__}, which does not define which rows each rank reads",
                "give the data set itself; shuffle and seed are options of program.loader",
            )
        sampler = loader.sampler
        drawn = isinstance(sampler, RandomSampler)
        if isinstance(sampler, RandomSampler) and (
            sampler.replacement or sampler.num_samples != len(sampler.data_source)
        ):
            raise DataError(
                "the loader's RandomSampler has num_samples or replacement, and an epoch reads each row once",
                "give the data set itself; shuffle and seed are options of program.loader",
            )
        shuffled = self._order.shuffle or drawn
        self._order = replace(self._order, shuffle=shuffled, workers=self._order.workers or loader.num_workers)
        if self._collate is None and loader.collate_fn is not default_collate:
            self._collate = loader.collate_fn
        return loader.dataset

    # -- reading --

    def read(self, position: Sequence[int], *, ahead: bool = False) -> tuple[Rows, tuple[int, int]]:
        """Return this rank's rows of the global batch at ``position`` (epoch, row), and the position after it; all ranks call this.

        ``ahead`` prefetches the batch after it for the next call, so that no call waits for the device to compare the ranks' batches.
        Raises ``DataError`` on every rank; the same position can be read again.
        """
        begin = self._begin(*position)
        fetched, self._fetched = self._fetched, None
        if fetched is None or fetched.begin != begin:
            fetched = self._fetch(begin)
        self._share.finish_check(fetched.check, fetched.problem)
        assert fetched.tensors is not None
        after = begin[0], begin[1] + self.batch
        if ahead:
            self._fetched = self._fetch(self._begin(*after))
        return Rows(fetched.tensors), after

    def _fetch(self, begin: tuple[int, int]) -> _Fetched:
        """Read this rank's rows of the batch at ``begin``, and start to check that all ranks read the same batch."""
        tensors, problem = None, ""
        try:
            if begin != self._next and len(self._share.rows):
                self._batches = iter(self._source(begin))
            tensors = self._checked(next(self._batches)) if len(self._share.rows) else {}
            beyond = self._share.rows + begin[1] >= self.rows
            for name, value in self._ignored.items():
                if name in tensors and beyond.any():
                    tensors[name] = tensors[name].clone()
                    tensors[name][beyond] = value
        except Exception as error:  # noqa: BLE001  whatever a data set raises, all ranks must raise
            # the text of a worker's error is its traceback
            kind, lines = type(error).__name__, str(error).strip().splitlines() or [""]
            what = error.message if isinstance(error, DataError) else f"{kind}: {lines[-1].removeprefix(f'{kind}: ')}"
            problem = f"rows {begin[1]} to {begin[1] + self.batch - 1} of epoch {begin[0]}: {what}"
        self._next = None if problem else self._begin(begin[0], begin[1] + self.batch)
        return _Fetched(begin, tensors, problem, self._share.start_check(tensors, (*begin, self.rows), problem))

    def ends(self, position: Sequence[int]) -> bool:
        """Return whether the epoch has no batch after ``position``."""
        return position[1] + (1 if self._ignored else self.batch) > self.rows

    def epoch_of(self, position: Sequence[int]) -> int:
        """Return the epoch of the batch after ``position``."""
        return self._begin(*position)[0]

    def epoch(self) -> Iterator[Rows]:
        """Yield this rank's rows of the global batches of epoch 0."""
        position = (0, 0)
        while not self.ends(position):
            rows, position = self.read(position)
            yield rows

    def close(self) -> None:
        """End the worker processes."""
        self._batches, self._next, self._fetched = iter(()), None, None

    def _begin(self, epoch: int, row: int) -> tuple[int, int]:
        return (epoch + 1, 0) if self.ends((epoch, row)) else (epoch, row)

    def _source(self, begin: tuple[int, int]) -> DataLoader[Any]:
        return self._data_loader(self._dataset, _Sampler(self, begin), self._order.workers)

    def _data_loader(self, dataset: Any, batches: Iterable[list[int]], workers: int) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_sampler=cast(Any, batches),
            num_workers=workers,
            collate_fn=_identity if isinstance(dataset, Tensors) else self._collate or default_collate,
            pin_memory=self._pinned,
            multiprocessing_context="fork" if workers else None,
            worker_init_fn=_end_with_parent,
        )

    def indices(self, begin: tuple[int, int]) -> Iterator[list[int]]:
        """Yield the indices of the rows that this rank reads, batch by batch without end."""
        epoch, row = begin
        own = self._share.rows
        for current in itertools.count(epoch):
            order = self._permutation(current)
            while not self.ends((current, row)):
                wanted = own + row
                wanted = torch.where(wanted < self.rows, wanted, row)  # padding repeats a row; its labels are ignored
                yield (wanted if order is None else order[wanted]).tolist()
                row += self.batch
            row = 0

    def _permutation(self, epoch: int) -> Tensor | None:
        if not self._order.shuffle:
            return None
        generator = torch.Generator().manual_seed(self._order.seed + epoch)
        return torch.randperm(self.rows, generator=generator)

    # -- names, shapes and dtypes --

    def _checked(self, collated: Any) -> dict[str, Tensor]:
        """Return the inputs that this rank reads, in the program's dtypes and shapes. Raises ``DataError`` if they don't fit."""
        named = self._named(collated)
        found = {}
        for name in self._share.inputs:
            tensor = self._fitting(name, named)
            if len(tensor) != len(self._share.rows):
                raise DataError(
                    f"{len(tensor)} rows of {name!r} were made of {len(self._share.rows)} samples",
                    "collate makes one row of each sample, in their order",
                )
            found[name] = tensor.to(self._dtype(name, tensor)).contiguous()
        return found

    def _named(self, collated: Any) -> Mapping[str, Any]:
        """Return a collated batch as a mapping from input names; raise ``DataError`` if it is neither one nor as ``ProgramSpec.sample``."""
        named = collated
        if self._sample is not None and not (isinstance(named, Mapping) and named.keys() >= set(self._share.inputs)):
            named = dict(_leaves(self._sample, collated))
        if not isinstance(named, Mapping):
            raise DataError(
                f"a sample is a {type(named).__name__}, not a dict by the names of the program's inputs",
                f"the program reads {', '.join(sorted(self._inputs))}",
            )
        return named

    def _fitting(self, name: str, named: Mapping[str, Any]) -> Tensor:
        """Return an input's rows; raise ``DataError`` if the input is missing or doesn't fit. Floating-point dtypes may differ."""
        if name not in named:
            raise DataError(
                f"the batch has no {name!r}; it has {', '.join(sorted(map(str, named))) or 'nothing'}",
                f"a row has the names of the program's inputs: {', '.join(sorted(self._inputs))}",
            )
        tensor = torch.as_tensor(named[name])
        row, dtype = (
            tuple(self._inputs[name].shape[1:] if name in self._inputs else tensor.shape[1:]),
            self._dtype(name, tensor),
        )
        both_floating = tensor.is_floating_point() and dtype.is_floating_point
        if tuple(tensor.shape[1:]) != row or tensor.dtype != dtype and not both_floating:
            raise DataError(
                f"a row of {name!r} has shape {tuple(tensor.shape[1:])} and dtype {tensor.dtype}, and the program takes {row} and {dtype}",
                "rows have the shape and the dtype of those that the model was captured with",
            )
        return tensor

    def _dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the program's dtype of an input, or the tensor's dtype if only the prelude reads the input."""
        return self._inputs[name].dtype if name in self._inputs else tensor.dtype


class _Sampler:
    """Yields the indices of the rows that this rank reads, as the batch sampler of a ``DataLoader``."""

    def __init__(self, loader: Loader, begin: tuple[int, int]) -> None:
        self._loader, self._begin = loader, begin

    def __iter__(self) -> Iterator[list[int]]:
        return self._loader.indices(self._begin)


@contextlib.contextmanager
def _preserved_rng_state() -> Iterator[None]:
    """Restore the CPU states of the random generators of Python, NumPy and torch at the end of this context."""
    before = random.getstate()
    numpy = sys.modules.get("numpy")  # a data set may draw from numpy; the program itself doesn't need numpy
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def _end_with_parent(_: int) -> None:
    """Make this worker process end as soon as its rank is killed; on systems other than Linux that takes up to five seconds."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _identity(batch: Any) -> Any:
    return batch


def _leaves(names: Any, sample: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a collated sample, by the names at their positions; raise ``DataError`` if the structures differ."""
    if isinstance(names, str):
        yield names, sample
    elif isinstance(names, Mapping):
        for key, part in names.items():
            if not isinstance(sample, Mapping) or key not in sample:
                raise DataError(f"a sample has no {key!r}", "samples have the structure of the model's batch")
            yield from _leaves(part, sample[key])
    elif names is not None:
        parts = (sample,) if isinstance(sample, Tensor) and len(names) == 1 else sample
        if not isinstance(parts, tuple | list) or len(parts) != len(names):
            raise DataError(
                f"a sample is not a tuple of {len(names)}", "samples have the structure of the model's batch"
            )
        for part, value in zip(names, parts, strict=True):
            yield from _leaves(part, value)
