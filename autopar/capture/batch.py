"""Maps a user's batch to named tensors.

A batch is a tensor, a tuple (positional arguments), or a dict (keyword arguments); with a ``loss_fn`` it is the pair ``(inputs,
targets)``, where ``inputs`` is one of those three. Tensors may be nested deeper (a dict of tuples); values that aren't tensors (``None``,
a flag) are part of the structure and must stay the same. A 0-d tensor, or a single row for all examples, is expanded over the batch.
"""

from __future__ import annotations

import inspect
import keyword
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar.capture.layers import unique
from autopar.errors import BatchError
from autopar.graph import Value
from autopar.techniques import ALL


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor in a batch: its name in ``Graph.inputs``, global shape and dtype. For a tensor that is expanded over the batch, ``shared``
    is the shape in the user's batch: no dims, or one row."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    shared: tuple[int, ...] | None = None

    @property
    def user_shape(self) -> tuple[int, ...]:
        """The shape in the user's batch."""
        return self.shape if self.shared is None else self.shared

    def __str__(self) -> str:
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')}{list(self.user_shape)}"


@dataclass(frozen=True, slots=True)
class Static:
    """A value in a batch that isn't a tensor."""

    value: Any


class ListOf(tuple[Any, ...]):
    """A list in a batch. Unlike a list, it can't change; unlike a tuple, it becomes a list again."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class BatchStructure:
    """A tree of tuples, ``ListOf`` and dicts with ``Leaf`` and ``Static`` as leaves; ``paired`` is true for ``(inputs, targets)``."""

    tree: Any
    paired: bool = False

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return tuple(_leaves(self.tree))

    @property
    def sample(self) -> Any:
        """The structure of a sample, as ``autopar.program.spec.ProgramSpec.sample``."""
        return _sample(self.tree)


def _sample(tree: Any) -> Any:
    if isinstance(tree, Leaf):
        return tree.name
    if isinstance(tree, dict):
        return {key: _sample(value) for key, value in tree.items()}
    return tuple(_sample(value) for value in tree) if isinstance(tree, tuple) else None


def count_tokens(inputs: Sequence[Leaf | Value]) -> int:
    """Return the tokens of a global batch: the elements of its first two-dimensional integer tensor, else its examples."""
    for value in inputs:
        if len(value.shape) == 2 and not value.dtype.is_floating_point:
            return math.prod(value.shape)
    return inputs[0].shape[0]


def describe_batch(
    model: nn.Module, batch: Any, loss_fn: Any = None, dtype: torch.dtype | None = None
) -> BatchStructure:
    """Return the structure of an example batch, with ``dtype`` (unless it is ``None``) as the dtype of floating tensors.

    Raises ``BatchError`` if there is no tensor or no row, or a numpy array; if the tensors disagree on the batch size (dim 0); if the batch
    isn't the pair that ``loss_fn`` needs; or if ``forward`` doesn't take its keys or its number of tensors.
    """
    paired = loss_fn is not None and takes_targets(loss_fn)
    if paired:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise BatchError(
                f"with a loss_fn the batch must be the pair (inputs, targets), not {_kind(batch)}",
                hint="the model is called with the inputs and loss_fn with (output, targets)",
            )
        names = _Names(dtype)
        tree: Any = (names.arguments(model, batch[0]), names.walk("targets", batch[1]))
    else:
        names = _Names(dtype)
        tree = names.arguments(model, batch)
    structure = BatchStructure(_expand_shared(tree), paired=paired)
    leaves = structure.leaves
    if not leaves:
        raise BatchError(
            f"the batch contains no tensor: {_kind(batch)}", hint="give a tensor, a tuple or a dict of tensors"
        )
    if leaves[0].shape and leaves[0].shape[0] == 0:
        raise BatchError(f"the batch has no rows: {leaves[0]}", hint="give an example of one global batch")
    for leaf in leaves:
        if not leaf.shape or leaf.shape[0] != leaves[0].shape[0]:
            raise BatchError(
                f"the batch's tensors disagree on dim 0, the batch: {leaves[0]} and {leaf}",
                hint="every tensor of a batch has one row per example in dim 0, or one row for all examples, or no dims",
            )
    return structure


def _expand_shared(tree: Any) -> Any:
    """Expand tensors without dims or with one row to the rows of the other tensors."""
    rows = max((leaf.shape[0] for leaf in _leaves(tree) if leaf.shape), default=0)

    def expand(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: expand(item) for key, item in value.items()}
        if isinstance(value, tuple):
            return type(value)(map(expand, value))
        if isinstance(value, Leaf) and rows and (not value.shape or value.shape[0] == 1 < rows):
            return Leaf(value.name, (rows, *value.shape[1:]), value.dtype, shared=value.shape)
        return value

    return expand(tree)


def check_tensors(where: str, value: Any) -> None:
    """Raise ``BatchError`` if ``value`` is a numpy array."""
    if isinstance(value, np.ndarray):
        raise BatchError(
            f"{where} is a numpy array, {value.dtype}{list(value.shape)}, not a tensor",
            hint="torch.from_numpy(array) makes it a tensor, without a copy",
        )


def takes_targets(loss_fn: Callable[..., Any]) -> bool:
    """Return whether ``loss_fn`` takes ``(output, targets)``. A ``loss_fn`` with exactly one required argument takes only the output."""
    try:
        called = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn  # a module's own signature is (*args)
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return True
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in positional and p.default is p.empty]
    return len(required) != 1


def flatten_batch(structure: BatchStructure, batch: Any) -> dict[str, torch.Tensor]:
    """Return the batch's tensors by name, in the order of ``Graph.inputs``, with floating tensors cast to the captured dtype.

    Raises ``BatchError`` if the structure, or a tensor's shape or dtype, differs from the captured batch.
    """
    tensors: dict[str, torch.Tensor] = {}
    _flatten(structure.tree, batch, "the batch", tensors)
    return tensors


def rebuild_batch(structure: BatchStructure, tensors: Sequence[torch.Tensor], *, by_rows: bool = False) -> Any:
    """Invert ``flatten_batch``: put ``tensors``, in the order of the leaves, into the structure. With ``by_rows`` a single row that
    ``flatten_batch`` expanded over the batch stays expanded."""
    return _rebuild(structure.tree, iter(tensors), by_rows)


def _rebuild(tree: Any, tensors: Iterator[torch.Tensor], by_rows: bool) -> Any:
    if isinstance(tree, Leaf):
        tensor = next(tensors)
        if tree.shared is None or (tree.shared and by_rows):
            return tensor
        return tensor[:1] if tree.shared else tensor[0]
    if isinstance(tree, Static):
        return tree.value
    if isinstance(tree, dict):
        return {key: _rebuild(value, tensors, by_rows) for key, value in tree.items()}
    rebuilt = (_rebuild(value, tensors, by_rows) for value in tree)
    return list(rebuilt) if isinstance(tree, ListOf) else tuple(rebuilt)


def _leaves(tree: Any) -> Iterator[Leaf]:
    if isinstance(tree, Leaf):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, tuple):
        for value in tree:
            yield from _leaves(value)


def _flatten(tree: Any, batch: Any, where: str, out: dict[str, torch.Tensor]) -> None:
    if isinstance(tree, Leaf):
        out[tree.name] = _checked(tree, batch, where)
    elif isinstance(tree, Static):
        if batch is not tree.value and batch != tree.value:
            raise BatchError(f"{where} was {tree.value!r} when the model was captured and is {batch!r} now")
    elif isinstance(tree, dict):
        if not _is_mapping(batch) or set(batch) != set(tree):
            got = sorted(batch) if _is_mapping(batch) else _kind(batch)
            raise BatchError(
                f"{where} must have the keys {sorted(tree)}, but is {got}", hint="give what the model was captured with"
            )
        for key, value in tree.items():
            _flatten(value, batch[key], f"{where}[{key!r}]", out)
    else:
        if isinstance(batch, torch.Tensor) and len(tree) == 1:
            batch = (batch,)
        check_tensors(where, batch)
        if not isinstance(batch, tuple | list) or len(batch) != len(tree):
            raise BatchError(
                f"{where} must be a tuple of {len(tree)}, but is {_kind(batch)}",
                hint="give what the model was captured with",
            )
        for index, (value, item) in enumerate(zip(tree, batch, strict=True)):
            _flatten(value, item, f"{where}[{index}]", out)


def _checked(leaf: Leaf, tensor: Any, where: str) -> torch.Tensor:
    check_tensors(where, tensor)
    if not isinstance(tensor, torch.Tensor):
        raise BatchError(
            f"{where} must be the tensor {leaf}, but is {_kind(tensor)}", hint="give what the model was captured with"
        )
    if tensor.is_floating_point() and leaf.dtype.is_floating_point and tensor.dtype != leaf.dtype:
        tensor = tensor.to(leaf.dtype)
    if tuple(tensor.shape) != leaf.user_shape or tensor.dtype != leaf.dtype:
        got = Leaf(leaf.name, tuple(tensor.shape), tensor.dtype)
        raise BatchError(
            f"{where} does not fit the captured graph: it takes {leaf}, and this is {got}",
            hint="a graph is captured for one global batch shape: pad or drop the last batch, or capture again",
        )
    return tensor if leaf.shared is None else tensor.expand(leaf.shape)


# names that a stage's forward and the schedule's step use for other variables
_RESERVED = frozenset(
    ("self", "key", "hidden", "loss", "layer", "target", "losses", "return_outputs", "batch", "constants")
).union(
    keyword.kwlist,
    """torch nn F spmd kernels opaque new float range str checkpoint seeds prelude Layer LayerSpec Prelude ProgramSpec StageSpec TensorSpec
    Tensors Total OPTIONS custom flattened guards kernels_ctc kernels_experts kernels_fp8 kernels_norm kernels_random kernels_ring
    kernels_rnn kernels_vocab weight_gradients""".split(),  # noqa: SIM905  words
    (module for technique in ALL for module in technique.modules),
)
"""Names that emitted code uses (``emit.names``): an input of such a name gets a number."""


class _Names:
    """Gives every tensor of a batch a unique name."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self.taken: set[str] = set(_RESERVED)

    def arguments(self, model: nn.Module, batch: Any) -> Any:
        """Name the model's arguments after ``forward``'s parameters."""
        if _is_mapping(batch):
            _check_keywords(model, [str(key) for key in batch])
            return {str(key): self.walk(str(key), value) for key, value in batch.items()}
        positional = batch if isinstance(batch, tuple | list) else (batch,)
        names = _forward_names(model, len(positional))
        return tuple(self.walk(name, value) for name, value in zip(names, positional, strict=True))

    def walk(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            dtype = self.dtype if self.dtype is not None and value.is_floating_point() else value.dtype
            return Leaf(self.unique(name), tuple(value.shape), dtype)
        if _is_mapping(value):
            return {key: self.walk(f"{name}_{key}", item) for key, item in value.items()}
        if isinstance(value, tuple | list):
            kind = ListOf if isinstance(value, list) else tuple
            return kind(self.walk(f"{name}_{index}", item) for index, item in enumerate(value))
        check_tensors(f"{name!r} of the batch", value)
        return Static(value)

    def unique(self, name: str) -> str:
        return unique("".join(c if c.isalnum() or c == "_" else "_" for c in name), self.taken, separator="_")


def _check_keywords(model: nn.Module, keys: list[str]) -> None:
    parameters = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    if unknown := [key for key in keys if key not in parameters]:
        raise BatchError(
            f"the batch has the keys {keys}, but {type(model).__name__}.forward has no parameter {', '.join(unknown)}",
            hint=f"it takes {', '.join(parameters)}",
        )


def _forward_names(model: nn.Module, count: int) -> list[str]:
    names: list[str] = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{i}" for i in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    if len(names) < count:
        raise BatchError(
            f"the batch has {count} positional tensors, but {type(model).__name__}.forward takes {len(names)}",
            hint="with a loss_fn, give the batch as (inputs, targets) and pass loss_fn",
        )
    return names[:count]


def _is_mapping(value: Any) -> bool:
    return hasattr(value, "keys") and hasattr(value, "__getitem__")


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
