"""Turns calls of a user's ``autograd.Function`` into opaque ops that every rank executes: one op for each set of plain arguments.

``torch.export`` would keep the forward of such a function and lose its backward. A function becomes an op (``autopar.capture.opaque``)
with the function's backward if it takes tensors and plain data, returns tensors with shapes that don't depend on values, draws no random
numbers and writes to no operand. A copy of the model runs to observe the shapes of its results. A function that takes modules (a reversible
stack takes its blocks) is traced like plain code; comparing graph and model then shows whether its backward is its forward's derivative.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from autopar.capture.opaque import Shapes, call, described, register, shapes, without_values
from autopar.capture.storage import copied
from autopar.errors import CaptureError
from autopar.program.opaque import AutogradFunctionModule

Functions = dict[Any, "RecordedFunction | None"]
"""Function class -> its observed calls, which become ops; ``None`` if the function is traced like plain code."""
_Signature = tuple[str, Shapes]
"""A call's plain arguments, and its tensors' shapes and dtypes."""

apply_of_torch: Any = vars(torch.autograd.Function)["apply"].__func__
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


@dataclass(slots=True)
class RecordedFunction:
    """An observed function, its results on meta by signature, its ops by plain arguments; ``replicable``: it may become ops."""

    function: Any
    results: dict[_Signature, Any] = field(default_factory=dict)
    replicable: bool = True
    ops: dict[str, tuple[str, nn.Module]] = field(default_factory=dict)

    def applied(self, *args: Any) -> Any:
        """Call the op and return its result; ``None`` for a signature that wasn't observed."""
        text, tensors = _plain_text(args), [arg for arg in args if isinstance(arg, Tensor)]
        if (text, shapes(tensors)) not in self.results:
            return None
        if text not in self.ops:
            module = AutogradFunctionModule(self.function, [None if isinstance(arg, Tensor) else [arg] for arg in args])
            self.ops[text] = register(module, functools.partial(self._meta_result, text)), module
        return call(*self.ops[text], *tensors)

    def _meta_result(self, text: str, *inputs: Tensor) -> Any:
        return self.results[text, shapes(inputs)]


def observed(function: Any, model: nn.Module, run: Callable[[nn.Module], object]) -> RecordedFunction | None:
    """Return the calls of ``function`` that occur while ``run`` runs a copy of ``model``; ``None`` if it may not become an op."""
    record = RecordedFunction(function)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return _observe(record, args, kwargs) if cls is function else apply_of_torch(cls, *args, **kwargs)

    with torch.random.fork_rng(devices=[]), mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        try:
            run(copied([model])[0])
        except Exception:  # the model itself fails, and export reports where
            return None
    return record if record.replicable and record.results else None


def _observe(record: RecordedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    versions, drawn = [tensor._version for tensor in tensors], torch.get_rng_state()
    result = apply_of_torch(record.function, *args, **kwargs)
    record.replicable &= bool(tensors) and not kwargs and all(map(_is_plain, args))
    record.replicable &= versions == [tensor._version for tensor in tensors]
    record.replicable &= torch.equal(drawn, torch.get_rng_state())
    if not record.replicable:
        return result
    try:
        found = without_values(result, record.function.__name__)
    except CaptureError:
        record.replicable = False
        return result
    known = record.results.setdefault((_plain_text(args), shapes(tensors)), found)
    record.replicable = described(known) == described(found)
    for change in VALUE_CHANGES:
        try:
            again = apply_of_torch(record.function, *(change(a.detach()) if isinstance(a, Tensor) else a for a in args))
        except Exception:  # the changed values may be invalid; a program checks shapes at run time
            continue
        record.replicable &= described(again) == described(result) and torch.equal(drawn, torch.get_rng_state())
    return result


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list, torch.Size):
        return all(map(_is_plain, value)) and not any(isinstance(item, Tensor) for item in value)
    return isinstance(value, Tensor) or type(value) in _PLAIN


def _plain_text(args: Iterable[Any]) -> str:
    return repr([None if isinstance(arg, Tensor) else [arg] for arg in args])


def _floats_only(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: change(tensor) if tensor.is_floating_point() else tensor


VALUE_CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda tensor: tensor.flip(0) if tensor.dim() else tensor,
    _floats_only(torch.neg),
    _floats_only(torch.zeros_like),
    _floats_only(torch.ones_like),
)
"""Functions that change the inputs' values. A shape or branch that depends on values changes under at least one of them in most cases."""


class _AllTrue:
    def __getitem__(self, index: int) -> bool:
        return True


class _Context:
    """A stand-in for the ``ctx`` of a function when its backward isn't used."""

    needs_input_grad = _AllTrue()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    mark_dirty = mark_non_differentiable = set_materialize_grads = save_for_forward = lambda self, *_: None


def trace_forward(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the function's forward like plain code, with gradients enabled, so that autograd differentiates the forward."""
    context = () if function.setup_context is not torch.autograd.Function.setup_context else (_Context(),)
    with (
        mock.patch.object(torch.no_grad, "__enter__", lambda _: None),
        mock.patch.object(torch.no_grad, "__exit__", lambda *_: None),
    ):
        return function.forward(*context, *args, **kwargs)


def _has_module(value: Any) -> bool:
    return isinstance(value, nn.Module) or (isinstance(value, tuple | list) and any(map(_has_module, value)))


def assumption(function: Any, hint: str) -> tuple[str, str]:  # (sentence, hint) for ``GraphMeta.assumed``
    return f"the backward of {function.__name__} is taken to be the derivative of its forward", hint


_FUNCTIONS: list[Functions] = []


@contextmanager
def functions_as_ops(functions: Functions) -> Iterator[None]:
    """A context in which calls of ``functions`` use their ops, or are traced like plain code if there is no op."""
    _FUNCTIONS.append(functions)
    try:
        yield
    finally:
        _FUNCTIONS.pop()


def applied(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function through its op or like plain code; return ``None`` for other functions and for signatures that weren't observed."""
    if not _FUNCTIONS or function not in _FUNCTIONS[-1]:
        return None
    record = _FUNCTIONS[-1][function]
    if record is None:
        return trace_forward(function, *args, **kwargs) if any(map(_has_module, args)) else None
    return record.applied(*args) if not kwargs else None
