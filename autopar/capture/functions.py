"""The user's ``autograd.Function``s, kept whole: one op for each way to call one, which every rank executes alike.

``torch.export`` would keep the forward of such a function and lose its backward. One that takes tensors and plain data, gives one
tensor of a shape that does not depend on values, draws no random numbers and writes nothing becomes an op (``autopar.capture.opaque``),
whose backward is the function's own. What it gives is found by running a copy of the model on the batch.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from autopar.capture.opaque import call, register
from autopar.program.opaque import Applied

Functions = dict[Any, "Kept"]
"""By the function's class."""
Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""The shape and dtype of every tensor of a call."""
_Form = tuple[str, Shapes]
"""Of a call: its plain arguments, and its tensors' shapes and dtypes."""

apply_of_torch: Any = vars(torch.autograd.Function)["apply"].__func__
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


@dataclass(slots=True)
class Kept:
    """A function, what its calls gave by their form, whether all that was seen of it is sound, and its ops by their plain arguments."""

    function: Any
    given: dict[_Form, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    sound: bool = True
    ops: dict[str, tuple[str, nn.Module]] = field(default_factory=dict)

    def applied(self, *args: Any) -> Tensor | None:
        """The op of these arguments; ``None`` for a call of a form that was not seen."""
        text, tensors = _plain(args), [arg for arg in args if isinstance(arg, Tensor)]
        if (text, shapes(tensors)) not in self.given:
            return None
        if text not in self.ops:
            module = Applied(self.function, [None if isinstance(arg, Tensor) else [arg] for arg in args])
            self.ops[text] = register(module, functools.partial(self._blank, text)), module
        return call(*self.ops[text], *tensors)

    def _blank(self, text: str, *inputs: Tensor) -> Tensor:
        shape, dtype = self.given[text, shapes(inputs)]
        return torch.empty(shape, dtype=dtype, device=inputs[0].device)


def observed(function: Any, model: nn.Module, run: Callable[[nn.Module], object]) -> Kept | None:
    """What the calls of ``function`` do when ``run`` runs a copy of ``model``; ``None`` where it may not be kept whole."""
    kept = Kept(function)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return _observe(kept, args, kwargs) if cls is function else apply_of_torch(cls, *args, **kwargs)

    with torch.random.fork_rng(devices=[]), mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        try:
            run(copy.deepcopy(model))
        except Exception:  # by itself the model fails, too: what export met says where
            return None
    return kept if kept.sound and kept.given else None


def _observe(kept: Kept, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    versions, drawn = [tensor._version for tensor in tensors], torch.get_rng_state()
    result = apply_of_torch(kept.function, *args, **kwargs)
    kept.sound &= bool(tensors) and not kwargs and type(result) is Tensor and all(map(_is_plain, args))
    kept.sound &= versions == [tensor._version for tensor in tensors]
    kept.sound &= torch.equal(drawn, torch.get_rng_state())
    if not kept.sound:
        return result
    shape = tuple(result.shape), result.dtype
    kept.sound = kept.given.setdefault((_plain(args), shapes(tensors)), shape) == shape
    for other in OTHERS:
        try:
            again = apply_of_torch(kept.function, *(other(a.detach()) if isinstance(a, Tensor) else a for a in args))
        except Exception:  # other values need not go together; a program compares the shape while it runs
            continue
        kept.sound &= again.shape == result.shape and torch.equal(drawn, torch.get_rng_state())
    return result


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list, torch.Size):
        return all(map(_is_plain, value)) and not any(isinstance(item, Tensor) for item in value)
    return isinstance(value, Tensor) or type(value) in _PLAIN


def _plain(args: Iterable[Any]) -> str:
    return repr([None if isinstance(arg, Tensor) else [arg] for arg in args])


def shapes(tensors: Iterable[Tensor]) -> Shapes:
    """The shapes and dtypes of a call's tensors."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def _of_floats(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: change(tensor) if tensor.is_floating_point() else tensor


OTHERS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda tensor: tensor.flip(0) if tensor.dim() else tensor,
    _of_floats(torch.neg),
    _of_floats(torch.zeros_like),
    _of_floats(torch.ones_like),
)
"""Other values for inputs: many shapes and branches that depend on values show at one of them."""

_KEPT: list[Functions] = []


@contextmanager
def functions_kept(functions: Functions) -> Iterator[None]:
    """Inside, calls of ``functions`` are their ops."""
    _KEPT.append(functions)
    try:
        yield
    finally:
        _KEPT.pop()


def kept_function(function: Any) -> Kept | None:
    return _KEPT[-1].get(function) if _KEPT else None
