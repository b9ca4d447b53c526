"""A model on meta gets its first values from its own initialisers, and no process has the whole model.

The values are those of one device that runs the initialisers on whole tensors, bit for bit:

    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    initialise(model)

``initialise`` is ``model.apply(function)`` where a function is given. Otherwise it goes through ``model.modules()``: a module with a
method ``init_weights`` (a model of transformers) initialises itself and what it contains; of other modules each runs its
``reset_parameters``, if it has one. A tied parameter is one tensor. Those that transformers ties get the value of the parameter that they
are tied to, as its ``init_weights`` does it; modules that it has marked as initialised are initialised again.

The initialisers run on a copy of the model that stays on meta. A mode gives each function of torch, in place of a tensor on meta, the
tensor's part of a safetensors file that is mapped into memory, and gives the memory back to the system as the initialisers go on. So the
process has about the largest tensor in memory. Tensors are filled with NaN first (integers with their largest value): what no initialiser
writes is refused by name.
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
"""The name of the model's own initialisers, where a function could be given."""

Initialiser = Callable[[nn.Module], object]


def is_path(init: Initialiser | str | os.PathLike[str] | None) -> bool:
    """Whether ``init`` names files of weights: it is neither a function nor ``OWN``."""
    return isinstance(init, str | os.PathLike) and init != OWN


_RESIDENT_BYTES = 2**28  # of the file that may be in the process's memory, besides the tensor that is being written
_CHECKED = 2**24  # elements at a time


def with_tables(model: nn.Module, init: Initialiser | str | os.PathLike[str] | None) -> nn.Module:
    """The model that is captured. Where ``init`` is a function or ``OWN``, it is a copy of a model on meta whose buffers have the values
    that the initialisers give them, because a program computes with these as constants; parameters stay on meta, and so does a buffer
    that no initialiser writes. Otherwise values come from elsewhere, if at all, and only buffers that are in no state dict, such as rotary
    frequencies, get those that the model's own initialisers give them; without such buffers it is the model itself.

    Raises ``ModelError`` where an initialiser raises or ties parameters; ``UsageError`` where no parameter is on meta.
    """
    if init is None or is_path(init):
        return _with_derived(model)
    if not any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError(
            "init= initialises a model on meta, and this model has values already",
            "build it under torch.device('meta'), or leave init out to start from its values",
        )
    copied = _copied(model)
    _fill(copied, _written(copied, init, 0))
    return copied


def _with_derived(model: nn.Module) -> nn.Module:
    """The model, or where buffers on meta are in no state dict, a copy in which they have the values of the model's own initialisers. Those
    that random numbers or parameters decide stay on meta."""
    if not isinstance(model, nn.Module):  # which capture refuses
        return model
    kept = model.state_dict(keep_vars=True).keys()
    wanted = {name for name, buffer in model.named_buffers() if buffer.is_meta and name not in kept}
    if not wanted:
        return model
    copied = _copied(model)
    try:
        values, others = _written(copied, OWN, 0), _written(_copied(model), OWN, 1)
    except ModelError:  # an initialiser wants values of parameters
        return model
    same = {name for name in wanted & values.keys() & others.keys() if torch.equal(values[name], others[name])}
    _fill(copied, {name: values[name] for name in same})
    return copied


def _written(copied: nn.Module, init: Initialiser | str | os.PathLike[str], seed: int) -> dict[str, Tensor]:
    """The values that the initialisers give to buffers on meta, by name; parameters stay on meta.

    Raises ``ModelError`` where they raise, or tie parameters.
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
    """The first name of every parameter, by all of its names."""
    first: dict[Any, str] = {}
    return {
        name: first.setdefault(storage.identity(p), name) for name, p in model.named_parameters(remove_duplicate=False)
    }


def _fill(copied: nn.Module, values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        copied.get_submodule(path)._buffers[leaf] = value


def given_values(
    model: nn.Module,
    init: Initialiser | str | os.PathLike[str],
    seed: int,
    home: Path,
    folder: str | os.PathLike[str] | None,
) -> Path:
    """The files with the values that ``init`` gives: its own, or those that the machine's first process writes into ``home``.

    ``folder`` is the program's folder that all of the machine's processes see, if it has one. Raises the errors of ``write_values``.
    """
    if is_path(init):
        return Path(init)  # type: ignore[arg-type]
    if folder is None and ranks.is_one_of_several():
        raise UsageError(
            "init= writes values that all processes of a machine read",
            "under torchrun give folder=, where the program goes",
        )
    ranks.after_first_of_machine(lambda: write_values(model, init, seed, home))
    return (home if folder is None else Path(folder)).resolve() / INITIAL


def write_values(model: nn.Module, init: Initialiser | str | os.PathLike[str], seed: int, folder: Path) -> None:
    """Initialise a model (of ``with_tables``) into the file of the initial values of a program's folder.

    Raises ``ModelError`` with the names of tensors that no initialiser writes, and of buffers that other random numbers or parameters
    would change; ``UsageError`` where the disk has no room.
    """
    copied = _copied(model)
    first: dict[int, str] = {}
    others: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in _state(copied):
        if first.setdefault(id(tensor), name) == name:
            tensors[name] = tensor
        else:
            others[name] = first[id(tensor)]
    partial = folder / f"{INITIAL}.partial"
    places = places_in(partial, {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, others)
    try:
        create(places, others)
        file = _Mapped(partial)
        memory = _Memory(file)
        for name, tensor in tensors.items():
            memory.add(tensor, places[name])
        for buffer in copied.buffers():  # those that are in no state dict
            memory.add(buffer)
        for parameter in _untied(copied):
            memory.add(parameter)
        _initialise(copied, init, seed, memory)
        for name, tensor in _state(copied):
            place = others.get(name, name)
            if (
                tensor is not tensors[place] or not tensor.is_meta
            ):  # an initialiser made a new tensor, or it has had values all the time
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
    """A copy in which parameters over the same elements are one. Raises ``CaptureError`` for other tensors that share memory with one."""
    storage.refuse_overlaps(model)
    (copied,) = storage.copied([model])
    for module in copied.modules():
        vars(module).pop("_is_hf_initialized", None)  # the mark of transformers
    return copied


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the model's state dict, which are its own objects, under all names."""
    return ((name, tensor) for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor))


def _untied(model: nn.Module) -> Iterator[nn.Parameter]:
    """Give parameters that transformers ties to others a tensor of their own, as ``to_empty`` does; ``init_weights`` ties them again."""
    for module in model.modules():
        for target in getattr(module, "all_tied_weights_keys", None) or ():
            path, _, leaf = target.rpartition(".")
            owner = module.get_submodule(path)
            tied = owner._parameters.get(leaf)
            if tied is not None and tied.is_meta:
                owner._parameters[leaf] = nn.Parameter(torch.empty_like(tied), tied.requires_grad)
                yield owner.get_parameter(leaf)


def _initialise(model: nn.Module, init: Initialiser | str | os.PathLike[str], seed: int, memory: _Memory) -> None:
    """Run the initialisers in their order, as the module's docstring has it, from the seed on; other random numbers stay as they are."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), memory:
        torch.default_generator.manual_seed(seed)
        try:
            if callable(init):
                model.apply(init)  # type: ignore[arg-type]  # what it returns is not used
                return
            inside: set[nn.Module] = set()
            for module in model.modules():
                if module in inside:
                    continue
                if callable(own := getattr(module, "init_weights", None)):
                    own()
                    inside |= {*module.modules()}
                elif callable(own := getattr(module, "reset_parameters", None)):
                    own()
        except AutoparError:
            raise
        except Exception as error:
            raise ModelError(
                f"an initialiser of the model raised {type(error).__name__}: {error}",
                "it runs with the parameters in the host's memory: init_weights() or reset_parameters() of its modules, or init=",
            ) from error


class _Mapped:
    """A file that is mapped into memory. Dropped pages are in the system's cache of the file, or on the disk."""

    def __init__(self, path: Path) -> None:
        size = path.stat().st_size
        with path.open("r+b") as opened:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(
                    opened.fileno(), 0, size
                )  # writing to a full disk through memory would end the process
            self._map = mmap.mmap(opened.fileno(), size)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._used = 0

    def tensor(self, place: Stored) -> Tensor:
        """A stored tensor: a view of the file."""
        own = self._bytes[place.begin : place.begin + place.size]
        return own.view(place.dtype).view(place.shape).data  # with a version of its own

    def use(self, size: int) -> None:
        """Note that bytes are about to be used, and drop all pages if there are too many."""
        if self._used + size > _RESIDENT_BYTES:
            self._map.madvise(mmap.MADV_DONTNEED)
            self._used = 0
        self._used += size

    def flush(self) -> None:
        """Write everything to the disk."""
        self._map.flush()


class _Memory(TorchFunctionMode):
    """A context in which functions of torch get, in place of tensors on meta that were added, tensors with memory."""

    def __init__(self, file: _Mapped | None) -> None:
        super().__init__()
        self._file = file
        self._added: dict[int, tuple[Tensor, Stored | None]] = {}  # the tensor itself, so that its id is no other's
        self._values: dict[int, Tensor] = {}

    def add(self, tensor: Tensor, place: Stored | None = None) -> None:
        """Give a tensor on meta a place in the file, or memory of its own if it has no place there."""
        if tensor.is_meta:
            self._added.setdefault(id(tensor), (tensor, place))

    def values(self, tensor: Tensor) -> Tensor:
        """The tensor with memory, which is blank at first."""
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
        """The part of the file of a tensor; blank if no initialiser has used it."""
        assert self._file is not None
        self._file.use(tensor.nbytes)
        return self._values[id(tensor)] if id(tensor) in self._values else _blank(self._file.tensor(place))

    def has_written(self, tensor: Tensor) -> bool:
        """Whether all of an added tensor was written."""
        if id(tensor) not in self._values:
            return False
        values = self._values[id(tensor)].detach()
        if values.dtype == torch.bool:  # either value is a value: filling it was the first change
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
        return func(*self._real(args), **self._real(kwargs or {}))

    def _real(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.values(value) if id(value) in self._added else value
        if isinstance(value, dict):
            return {key: self._real(item) for key, item in value.items()}
        return type(value)(map(self._real, value)) if type(value) in (list, tuple) else value


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
    """Fill a tensor with what no initialiser gives it."""
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
    """Raise ``ModelError`` with the names of tensors that were not written, or are not what was planned with."""
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
