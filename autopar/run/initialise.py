"""Initialises a model on meta with the model's initialisers, without ever materialising all of it.

The values equal, bit for bit, those of

    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    initialise(model)

``initialise`` is ``model.apply(function)`` for a user's function. Otherwise it walks ``model.modules()``: a module with ``init_weights``
(a transformers model) initialises itself and its submodules; any other module runs its ``reset_parameters``, if it has one. A tied
parameter is one tensor. Parameters that transformers ties get the value of their target, as in ``init_weights``; modules that
transformers marked as initialised are initialised again.

The initialisers run on a copy of the model on meta, under a ``TorchFunctionMode`` that replaces each meta tensor by its part of a
memory-mapped safetensors file and drops pages on the way, so that resident memory is about that of the largest tensor. Tensors are first
filled with NaN (integers with their largest value); if no initialiser overwrites one, an error names it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.capture import storage
from autopar.errors import AutoparError, ModelError, UsageError
from autopar.program.checkpoint_files import sync
from autopar.program.state import INITIAL, note_values, sentence
from autopar.program.weights import Stored, create, places_in
from autopar.run import ranks

OWN = "own"
"""The value of ``init`` that selects the model's initialisers."""

Initialiser = Callable[[nn.Module], object]


def is_path(init: Initialiser | str | os.PathLike[str] | None) -> bool:
    """Return whether ``init`` is a path of weights, and neither a function nor ``OWN``."""
    return isinstance(init, str | os.PathLike) and init != OWN


_RESIDENT_BYTES = 2**28  # maximum resident bytes of the mapped file, besides the tensor that is being written
_CHECKED = 2**24  # elements per comparison


def with_buffer_values(model: nn.Module, init: Initialiser | str | os.PathLike[str] | None) -> nn.Module:
    """Return the model to capture: ``model``, or a copy with values for buffers on meta, because programs hold buffers as constants.

    If ``init`` is a function or ``OWN``, the copy has the values of all buffers that the initialisers write; parameters stay on meta.
    Otherwise it has only those of non-persistent buffers, such as rotary frequencies, which no state dict provides.

    Raises ``ModelError`` if an initialiser raises or ties parameters; ``UsageError`` if no parameter is on meta.
    """
    if init is None or is_path(init):
        return _with_nonpersistent(model)
    if not any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError(
            "init= initialises a model on meta, and this model has values already",
            "build it under torch.device('meta'), or leave init out to start from its values",
        )
    copied = _copied(model)
    _fill(copied, _buffer_values(copied, init, 0))
    return copied


def _with_nonpersistent(model: nn.Module) -> nn.Module:
    """Return a copy whose non-persistent buffers on meta have the initialisers' values; the model itself if it has no such buffers.

    Buffers whose values depend on random numbers or parameters stay on meta.
    """
    if not isinstance(model, nn.Module):  # capture refuses it
        return model
    kept = model.state_dict(keep_vars=True).keys()
    wanted = {name for name, buffer in model.named_buffers() if buffer.is_meta and name not in kept}
    if not wanted:
        return model
    copied = _copied(model)
    try:
        values, others = _buffer_values(copied, OWN, 0), _buffer_values(_copied(model), OWN, 1)
    except ModelError:  # an initialiser reads the values of parameters
        return model
    same = {name for name in wanted & values.keys() & others.keys() if torch.equal(values[name], others[name])}
    _fill(copied, {name: values[name] for name in same})
    return copied


def _buffer_values(copied: nn.Module, init: Initialiser | str | os.PathLike[str], seed: int) -> dict[str, Tensor]:
    """Return the values of the buffers on meta that the initialisers write, by name; parameters stay on meta.

    Raises ``ModelError`` if an initialiser raises or ties parameters.
    """
    memory = _Memory(None)
    for buffer in copied.buffers():
        memory.add(buffer)
    before = _ties(copied)
    _initialise(copied, init, seed, memory)
    for name, first in _ties(copied).items():
        if first != before.get(name, name):
            raise ModelError(
                f"an initialiser of the model ties {name} to {first}, which were two parameters before",
                "tie them where the model is built, in its __init__: head.weight = embedding.weight",
            )
    known = copied.named_buffers(remove_duplicate=False)
    return {name: memory.values(buffer) for name, buffer in known if buffer.is_meta and memory.has_written(buffer)}


def _ties(model: nn.Module) -> dict[str, str]:
    """Map every name of a parameter to the parameter's first name."""
    first: dict[Any, str] = {}
    return {
        name: first.setdefault(storage.identity(p), name) for name, p in model.named_parameters(remove_duplicate=False)
    }


def _fill(copied: nn.Module, values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        copied.get_submodule(path)._buffers[leaf] = value


def initial_values(
    model: nn.Module,
    init: Initialiser | str | os.PathLike[str],
    seed: int,
    home: Path,
    folder: str | os.PathLike[str] | None,
    writer: str,
) -> Path:
    """Return the path of the initial weights: ``init`` itself, or the file that the program's ``writer`` (``ranks.writer_of``) writes.

    ``home`` is this process's folder of the program, ``folder`` the one that the user gave, if any. Raises the errors of
    ``write_initial_values``.
    """
    if is_path(init):
        return Path(init)  # type: ignore[arg-type]
    if folder is None and ranks.is_one_of_several():
        raise UsageError(
            "init= writes values that all processes of a machine read",
            "under torchrun give folder=, where the program goes",
        )
    ranks.after_writer(lambda: write_initial_values(model, init, seed, home), writer)
    return (home if folder is None else Path(folder)).resolve() / INITIAL


def write_initial_values(model: nn.Module, init: Initialiser | str | os.PathLike[str], seed: int, folder: Path) -> None:
    """Initialise a model (from ``with_buffer_values``) and write its values into a program's folder.

    Raises ``ModelError`` with the names of tensors that no initialiser writes, and of buffers whose values depend on random numbers or
    parameters; ``UsageError`` if the disk is full.
    """
    copied = _copied(model)
    name_of: dict[int, str] = {}
    aliases: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in _state(copied):
        if name_of.setdefault(id(tensor), name) == name:
            tensors[name] = tensor
        else:
            aliases[name] = name_of[id(tensor)]
    partial = folder / f"{INITIAL}.partial"
    places = places_in(partial, {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, aliases)
    try:
        create(places, aliases)
        file = _Mapped(partial)
        memory = _Memory(file)
        for name, tensor in tensors.items():
            memory.add(tensor, places[name])
        for buffer in copied.buffers():  # non-persistent ones
            memory.add(buffer)
        for parameter in _untied(copied):
            memory.add(parameter)
        _initialise(copied, init, seed, memory)
        for name, tensor in _state(copied):
            place = aliases.get(name, name)
            # an initialiser replaced it, or it never was on meta
            if tensor is not tensors[place] or not tensor.is_meta:
                _assign(name, memory.stored(tensors[place], places[place]), tensor)
        _check(copied, memory, tensors, places, model)
        file.flush()
        sync(partial)
        partial.rename(folder / INITIAL)
    except OSError as error:
        raise UsageError(
            f"the initial values cannot be written to {folder}: {error.strerror}",
            "give a folder on a disk with room for them",
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    note_values(folder)


def _copied(model: nn.Module) -> nn.Module:
    """Copy a model, merging parameters that share all of their memory. Raises ``CaptureError`` if tensors overlap in memory partly."""
    storage.refuse_overlaps(model)
    (copied,) = storage.copied([model])
    for module in copied.modules():
        vars(module).pop("_is_hf_initialized", None)  # set by transformers
    return copied


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the model's tensors (not copies) under all their names in the state dict."""
    return ((name, tensor) for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor))


def _untied(model: nn.Module) -> Iterator[nn.Parameter]:
    """Untie the parameters that transformers ties, as ``to_empty`` does, and yield the new ones; ``init_weights`` ties them again."""
    for module in model.modules():
        for target in getattr(module, "all_tied_weights_keys", None) or ():
            path, _, leaf = target.rpartition(".")
            owner = module.get_submodule(path)
            tied = owner._parameters.get(leaf)
            if tied is not None and tied.is_meta:
                owner._parameters[leaf] = nn.Parameter(torch.empty_like(tied), tied.requires_grad)
                yield owner.get_parameter(leaf)


def _initialise(model: nn.Module, init: Initialiser | str | os.PathLike[str], seed: int, memory: _Memory) -> None:
    """Seed the generator and run the initialisers as the module's docstring describes; the global RNG state is restored."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), memory:
        torch.default_generator.manual_seed(int(seed))  # numpy's integers are none to it
        try:
            if callable(init):
                model.apply(init)  # type: ignore[arg-type]  # its result is not used
                return
            inside: set[nn.Module] = set()
            for module in model.modules():
                if module in inside:
                    continue
                if callable(method := getattr(module, "init_weights", None)):
                    method()
                    inside |= {*module.modules()}
                elif callable(method := getattr(module, "reset_parameters", None)):
                    method()
        except AutoparError:
            raise
        except Exception as error:
            raise ModelError(
                f"an initialiser of the model raised {type(error).__name__}: {error}",
                "it runs with the parameters in the host's memory: init_weights() or reset_parameters() of its modules, or init=",
            ) from error


class _Mapped:
    """A memory-mapped file. Pages that the process drops stay in the page cache or on disk."""

    def __init__(self, path: Path) -> None:
        size = path.stat().st_size
        with path.open("r+b") as opened:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(opened.fileno(), 0, size)  # a write to a full disk through the mapping is a SIGBUS
            self._map = mmap.mmap(opened.fileno(), size)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._used = 0

    def tensor(self, place: Stored) -> Tensor:
        """Return a stored tensor as a view of the file."""
        part = self._bytes[place.begin : place.begin + place.size]
        return part.view(place.dtype).view(place.shape).data  # .data gives each tensor a version counter of its own

    def use(self, size: int) -> None:
        """Count ``size`` bytes that are about to be used; first drop all pages if the sum would exceed ``_RESIDENT_BYTES``."""
        if self._used + size > _RESIDENT_BYTES:
            self._map.madvise(mmap.MADV_DONTNEED)
            self._used = 0
        self._used += size

    def flush(self) -> None:
        self._map.flush()


class _Memory(TorchFunctionMode):
    """A ``TorchFunctionMode`` that replaces registered meta tensors by materialised ones in calls of torch functions."""

    def __init__(self, file: _Mapped | None) -> None:
        super().__init__()
        self._file = file
        self._added: dict[int, tuple[Tensor, Stored | None]] = {}  # the tensor stays alive, so that its id isn't reused
        self._values: dict[int, Tensor] = {}

    def add(self, tensor: Tensor, place: Stored | None = None) -> None:
        """Register a tensor on meta. It is materialised at ``place`` in the file, or in anonymous memory without one."""
        if tensor.is_meta:
            self._added.setdefault(id(tensor), (tensor, place))

    def values(self, tensor: Tensor) -> Tensor:
        """Return the materialised tensor; the first call creates it, filled with a sentinel."""
        if id(tensor) not in self._values:
            _, place = self._added[id(tensor)]
            if place is None:
                self._values[id(tensor)] = _blank(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
            else:
                self._values[id(tensor)] = self.stored(tensor, place)
            self._values[id(tensor)].requires_grad_(tensor.requires_grad)
        elif self._file is not None:
            self._file.use(tensor.nbytes)
        return self._values[id(tensor)]

    def stored(self, tensor: Tensor, place: Stored) -> Tensor:
        """Return the tensor as a view of the file, filled with a sentinel if no initialiser has used it."""
        assert self._file is not None
        self._file.use(tensor.nbytes)
        return self._values[id(tensor)] if id(tensor) in self._values else _blank(self._file.tensor(place))

    def has_written(self, tensor: Tensor) -> bool:
        """Return whether every element of a registered tensor was written; of a boolean tensor, whether anything was."""
        if id(tensor) not in self._values:
            return False
        values = self._values[id(tensor)].detach()
        if values.dtype == torch.bool:  # there is no sentinel: ``_blank`` made it version 1, and writes increment that
            return values._version > 1
        for part in values.reshape(-1).split(_CHECKED):
            if self._file is not None:
                self._file.use(part.nbytes)
            if bool(_blanks(part).any()):
                return False
        return True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__set__ and id(args[0]) in self._added:  # type: ignore[attr-defined]
            return _assign("a parameter", self.values(args[0]), args[1])
        return func(*self._materialised(args), **self._materialised(kwargs or {}))

    def _materialised(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.values(value) if id(value) in self._added else value
        if isinstance(value, dict):
            return {key: self._materialised(item) for key, item in value.items()}
        return type(value)(map(self._materialised, value)) if type(value) in (list, tuple) else value


def _assign(name: str, values: Tensor, new: Tensor) -> None:
    if new.is_meta or new.shape != values.shape or new.dtype != values.dtype:
        described = f"{'a tensor on meta' if new.is_meta else 'a tensor'} of {tuple(new.shape)} in {new.dtype}"
        raise ModelError(
            f"an initialiser gives {name} {described}, and the model has {tuple(values.shape)} in {values.dtype}",
            "write into the tensor in place",
        )
    with torch.no_grad():
        values.copy_(new)


@torch.no_grad()
def _blank(values: Tensor) -> Tensor:
    """Fill a tensor with a sentinel that no initialiser writes."""
    if values.dtype == torch.bool:
        return values.fill_(False)
    wide = values.is_floating_point() or values.is_complex()
    return values.fill_(float("nan") if wide else torch.iinfo(values.dtype).max)


def _blanks(part: Tensor) -> Tensor:
    if part.is_complex():
        return part.isnan()
    if part.is_floating_point():
        return (part.float() if part.dtype.itemsize == 1 else part).isnan()
    return part == torch.iinfo(part.dtype).max


def _check(
    model: nn.Module, memory: _Memory, tensors: dict[str, Tensor], places: dict[str, Stored], planned: nn.Module
) -> None:
    """Raise ``ModelError`` with the names of tensors that weren't written, or of buffers that differ from the captured constants."""
    blank = [name for name, tensor in tensors.items() if tensor.is_meta and not memory.has_written(tensor)]
    if blank:
        raise ModelError(
            sentence("no initialiser of the model writes", blank),
            "give their modules a reset_parameters() that writes all of their parameters and buffers, or init= a function of a module; "
            "or start from weights",
        )
    now = dict(model.named_buffers())
    known = ((name, buffer) for name, buffer in planned.named_buffers() if not buffer.is_meta)
    changed = [
        name
        for name, buffer in known
        if not _equal(memory.values(now[name]) if now[name].is_meta else now[name], buffer)
    ]
    if changed:
        raise ModelError(
            sentence("random numbers or parameters decide the values of the buffers", changed),
            "the program computes with their values as constants: build the model on the CPU",
        )


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
