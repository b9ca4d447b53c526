"""Handles side effects of a traced forward that aren't calls of torch functions, or refuses them with their line.

A trace runs a fake copy of the model once. Code that bypasses the copy (a loss function that holds the model), torch (Python's random
numbers) or autograd (``.data``) would bake the values of this run into the graph.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import MethodWrapperType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from autopar.capture.backward import OP_HINT, NotTraceableError, caller, custom_gradients_refused, refuse_unregistered
from autopar.capture.ctc import CtcLoss
from autopar.capture.derivative import record_derivative
from autopar.capture.hooks import Hook, parameter_hooks, scaled, scales
from autopar.errors import CaptureError
from autopar.program.opaque import tensors_in
from autopar.torch_private import (
    inference_as_no_grad,
    is_traced,
    requires_grad_outside_trace,
    target_of_to,
    without_function_modes,
)

_RANDOM_HINT = "draw with torch (torch.rand, nn.Dropout): a program draws new numbers in every step, the same numbers under every plan"


@contextmanager
def guarded(model: nn.Module, fake: nn.Module) -> Iterator[None]:
    """A context in which side effects are handled or refused while ``fake``, a fake copy of ``model``, is traced."""
    with ExitStack() as stack:
        stack.enter_context(custom_gradients_refused(record_derivative))
        stack.enter_context(inference_as_no_grad())
        stack.enter_context(_python_random_refused())
        stack.enter_context(_no_op_casts())
        stack.enter_context(_UnifyMasks())  # entered before the next mode, which handles CTC's masked labels
        redirect = _RedirectToFakeModel(model, fake)
        stack.enter_context(
            mock.patch.object(Tensor, "register_hook", lambda tensor, hook: redirect.register(tensor, hook))
        )
        stack.enter_context(redirect)
        yield


@contextmanager
def _no_op_casts() -> Iterator[None]:
    """Make ``module.to(...)`` a no-op if all tensors already have the device and dtype: torch would replace them, which export refuses."""
    to: Any = nn.Module.to

    def cast(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, layout = target_of_to(*args, **kwargs)
        tensors = [*module.parameters(), *module.buffers()]
        same_dtype = all(t.dtype == dtype for t in tensors if t.is_floating_point() or t.is_complex())
        same_device = device is None or all(t.device == device for t in tensors)
        same = same_device and (dtype is None or same_dtype) and layout is None
        return module if same else to(module, *args, **kwargs)

    with mock.patch.object(nn.Module, "to", cast):
        yield


@contextmanager
def assigned_buffers_written(module: nn.Module, registered: Collection[str]) -> Iterator[None]:
    """On exit, copy the tensors that forward assigned to ``registered`` buffers (``self.mean = new``) into the buffers, as traced writes.

    Export treats an assignment as Python state and restores the buffer. ``capture.state`` handles assignments to other attributes.
    """
    owners = {id(vars(each)): (path, each) for path, each in module.named_modules()}
    before = [(p, m, name, b) for p, m in owners.values() for name, b in m._buffers.items() if b is not None]
    yield
    for path, owner, name, buffer in before:
        new = owner._buffers.get(name)
        if new is buffer:
            continue
        full = f"{path}.{name}" if path else name
        if full not in registered:
            continue
        if new is None or new.shape != buffer.shape or new.dtype != buffer.dtype:
            became = "nothing" if new is None else f"{new.dtype} {list(new.shape)}"
            raise CaptureError(
                f"forward assigns {became} to the buffer {full}, which is {buffer.dtype} {list(buffer.shape)}",
                hint="a buffer keeps its shape and dtype from step to step: make it as large as it gets, and write a part of it",
            )
        with torch.no_grad():
            buffer.copy_(new)
        owner._buffers[name] = buffer


class _UnifyMasks(TorchFunctionMode):
    """Replaces equal boolean masks by the first one: export then knows that ``x[m > 0]`` and ``y[m > 0]`` have the same number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[Any, tuple[Tensor, int]] = {}
        self.known: dict[int, tuple[Any, Tensor, int]] = {}  # mask's id: how it was computed, the mask, its version

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        if name in _SELECTING and args and not kwargs:
            kept = args[:1] if name == "getitem" else ()  # the result may be a view of it, which is written to
            args = (*kept, *(self._first_equal(a) if isinstance(a, Tensor) else a for a in args[len(kept) :]))
            if name == "masked_select":
                value, mask = args if args[0].shape == args[1].shape else torch.broadcast_tensors(*args)
                return value[mask]
        if name not in _COMPARING or not args or kwargs:
            return func(*args, **kwargs)
        key = (name, *map(self._key, args))
        result = func(*args)
        if isinstance(result, Tensor) and result is not args[0] and result.dtype == torch.bool:
            self.known[id(result)] = key, result, result._version
            self.first.setdefault(key, (result, result._version))
        return result

    def _key(self, value: Any) -> Any:
        """Return the comparison that made a mask, unless the mask was written to; for any other tensor its id and version."""
        if not isinstance(value, Tensor):
            return repr(value)
        key, _, version = self.known.setdefault(id(value), (id(value), value, -1))
        return key if version == value._version else (id(value), value._version)

    def _first_equal(self, value: Tensor) -> Tensor:
        first, version = self.first.get(self._key(value), (value, value._version))
        return first if first._version == version else value


_SELECTING = frozenset(("getitem", "masked_select", "nonzero", "where"))
_COMPARING = frozenset(
    """gt ge lt le eq ne isnan isinf isfinite logical_not logical_and logical_or logical_xor bitwise_not bitwise_and bitwise_or invert
    and or""".split()  # noqa: SIM905  a list of words
)


class _RedirectToFakeModel(TorchFunctionMode):
    """Replaces the model's tensors by those of the fake copy, ``tensor.data`` by ``tensor.detach()``, and hooks by scaled gradients.
    Refuses writes to ``.data`` and changes of ``requires_grad``, which can't be traced."""

    def __init__(self, model: nn.Module, fake: nn.Module) -> None:
        super().__init__()
        self.ctc = CtcLoss()
        self.hooks = parameter_hooks(model, fake)
        self.scaled: dict[int, tuple[Tensor, Tensor]] = {}  # by id: the tensor, and its copy with a scaled gradient
        self.read: dict[int, Tensor] = {}
        # by the id of the model's tensor: the fake copy's module with the corresponding tensor, and the tensor's name there
        self.counterparts: dict[int, tuple[nn.Module, str]] = {}
        for path, module in model.named_modules():
            own = fake.get_submodule(path)
            tensors = [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]
            self.counterparts |= {id(t): (own, name) for name, t in tensors if isinstance(t, Tensor)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, MethodWrapperType):  # reads of attributes don't count
            self.read.update((id(tensor), tensor) for tensor in tensors_in((args, kwargs)))
        args, kwargs = self._redirected(args), self._redirected(kwargs or {})
        if func == _DATA.__set__:
            raise CaptureError(
                f"{caller()} assigns to .data of a tensor in forward, which neither autograd nor a captured graph sees",
                hint="make a new tensor, y = ...; write a buffer by buffer.copy_(new), a parameter after the step",
            )
        if func == _DATA.__get__:
            return args[0].detach()  # writes through it are checked by functionalisation
        self._check_requires_grad(func, args, kwargs)
        return self.ctc.call(func, args, kwargs)

    def register(self, tensor: Tensor, hook: Hook) -> RemovableHandle:
        """Replace ``tensor.register_hook(hook)`` in forward: scale the gradient if that is all that the hook does, else refuse it."""
        if id(tensor) in self.read or not scales(hook):
            raise NotTraceableError(
                f"{caller()} registers a hook on a tensor's gradient, which torch.export drops",
                OP_HINT,
            )
        assert self.hooks is not None
        self._scale(tensor, [hook])
        return RemovableHandle(OrderedDict())

    def _scale(self, tensor: Tensor, hooks: Sequence[Hook]) -> None:
        with without_function_modes():
            for hook in hooks:
                self.scaled[id(tensor)] = tensor, scaled(self.scaled.get(id(tensor), (tensor, tensor))[1], hook)

    def _with_hooks(self, tensor: Tensor) -> Tensor:
        for owner, name, hooks in self.hooks:  # looked up each time: a trace replaces the parameters
            if getattr(owner, name) is tensor and id(tensor) not in self.scaled and is_traced():
                self._scale(tensor, hooks)
        return self.scaled.get(id(tensor), (tensor, tensor))[1]

    def _redirected(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            module, name = self.counterparts.get(id(value), (None, ""))
            counterpart = None if module is None else getattr(module, name)
            if counterpart is None and requires_grad_outside_trace(value):
                refuse_unregistered(f"{caller()} reads a tensor", value)
            return self._with_hooks(value if counterpart is None else counterpart)
        if type(value) in (tuple, list):
            return type(value)(self._redirected(item) for item in value)
        if type(value) is dict:
            return {key: self._redirected(item) for key, item in value.items()}
        return value

    def _check_requires_grad(self, func: Any, args: Any, kwargs: Any) -> None:
        """Refuse changes of ``requires_grad``, except switching it on for an intermediate tensor, which is harmless."""
        if func is Tensor.requires_grad_:
            wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        elif func == _REQUIRES_GRAD.__set__:
            wanted = args[1]
        else:
            return
        if wanted != args[0].requires_grad and (isinstance(args[0], nn.Parameter) or not wanted):
            raise CaptureError(
                f"{caller()} switches requires_grad {'on' if wanted else 'off'} inside of forward, which cannot be traced",
                hint="set it before training; for a part of a forward pass use torch.no_grad() or .detach()",
            )


_DATA: Any = Tensor.data
_REQUIRES_GRAD: Any = Tensor.requires_grad


# -- random numbers of Python and numpy -----------------------------------------------------------------------------------


class _DrawnNumber:
    """A random number in [low, high] that only allows comparisons with the same result for every draw, such as ``draw < 0.0``."""

    def __init__(self, low: float, high: float, line: str) -> None:
        self.low, self.high, self.line = min(low, high), max(low, high), line

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise _not_torch_random(self.line)

    def _below(self, other: Any, equal: bool) -> bool:
        if type(other) in (int, float):
            if self.high < other or (self.high == other and equal):
                return True
            if self.low > other or (self.low == other and not equal):
                return False
        raise _not_torch_random(self.line)

    def __lt__(self, other: Any) -> bool:
        return self._below(other, equal=False)

    def __le__(self, other: Any) -> bool:
        return self._below(other, equal=True)

    def __gt__(self, other: Any) -> bool:
        return not self._below(other, equal=True)

    def __ge__(self, other: Any) -> bool:
        return not self._below(other, equal=False)

    __eq__ = __ne__ = __hash__ = __bool__ = __int__ = __float__ = __str__ = __repr__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __abs__ = __round__ = _refuse


def _not_torch_random(line: str) -> CaptureError:
    return CaptureError(
        f"{line} draws a random number outside of torch: every step of a program would reuse the one drawn during capture",
        hint=_RANDOM_HINT,
    )


_NOT_DRAWING = ("getstate", "get_state", "default_rng")


def _random_states() -> tuple[Any, dict[str, Any]]:
    """Return the states of Python's and of numpy's generator, which can be compared."""
    numpy = np.random.get_state(legacy=False)
    state = {key: value.tobytes() if isinstance(value, np.ndarray) else value for key, value in numpy["state"].items()}
    return random.getstate(), numpy | {"state": state}


@contextmanager
def _python_random_refused() -> Iterator[None]:
    """Refuse random functions of Python and numpy (but see ``_DrawnNumber``), and seeding of torch's generator."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise _not_torch_random(caller())

    def zero_to_one(*shape: Any, size: Any = None) -> Any:
        return refuse() if shape or size is not None else _DrawnNumber(0.0, 1.0, caller())

    def uniform(low: float = 0.0, high: float = 1.0, size: Any = None) -> Any:
        return refuse() if size is not None else _DrawnNumber(low, high, caller())

    def refuse_seeding(*_: Any, **__: Any) -> Any:
        raise CaptureError(
            f"{caller()} sets the state of torch's generator inside of forward, which cannot be traced",
            hint="seed before training; all devices with the same rows then draw the same numbers",
        )

    before = _random_states()
    with ExitStack() as stack:
        for module in (random, np.random):
            for name in module.__all__:
                function = getattr(module, name)
                if callable(function) and not isinstance(function, type) and name not in _NOT_DRAWING:
                    stack.enter_context(mock.patch.object(module, name, refuse))
        for name in ("random", "uniform"):
            stack.enter_context(mock.patch.object(random, name, zero_to_one if name == "random" else uniform))
        for name in ("random", "rand", "random_sample", "ranf", "sample"):
            if hasattr(np.random, name):
                stack.enter_context(mock.patch.object(np.random, name, zero_to_one))
        stack.enter_context(mock.patch.object(np.random, "uniform", uniform))
        for owner, name in ((torch, "manual_seed"), (torch.random, "manual_seed"), (torch, "set_rng_state")):
            stack.enter_context(mock.patch.object(owner, name, refuse_seeding))
        yield
    if before != _random_states():
        raise CaptureError(
            "the model's forward draws Python's or numpy's random numbers: every step of a program would reuse those drawn during capture",
            hint=_RANDOM_HINT,
        )
