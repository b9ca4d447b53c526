"""Everything besides calls of torch's functions that a forward does while it is traced: capture follows it, or refuses it with its line.

A trace runs a twin of the model once, on tensors without values. Code that reaches past the twin (a loss function that stores the model
itself), past torch (Python's random numbers) or past autograd (``.data``) would be in the graph with the values of this one run.
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

from autopar.capture.backward import OP_HINT, KeptWholeError, caller, own_gradients_refused, refuse_stray
from autopar.capture.ctc import CtcLoss
from autopar.capture.derivative import differentiated
from autopar.capture.hooks import Hook, parameter_hooks, scaled, scales
from autopar.errors import CaptureError
from autopar.program.opaque import tensors_in
from autopar.torch_private import inference_as_no_grad, is_stray, is_traced, target_of_to, without_function_modes

_RANDOM_HINT = "draw with torch (torch.rand, nn.Dropout): such draws are made anew in every step, the same on one device and on many"


@contextmanager
def guarded(model: nn.Module, twin: nn.Module) -> Iterator[None]:
    """The context in which ``twin`` of ``model`` is traced."""
    with ExitStack() as stack:
        stack.enter_context(own_gradients_refused(differentiated))
        stack.enter_context(inference_as_no_grad())
        stack.enter_context(_no_draws())
        stack.enter_context(_casts_without_effect())
        stack.enter_context(_Selecting())  # after the next mode, which follows labels that are selected for a loss
        meant = _Meant(model, twin)
        stack.enter_context(
            mock.patch.object(Tensor, "register_hook", lambda tensor, hook: meant.register(tensor, hook))
        )
        stack.enter_context(meant)
        yield


@contextmanager
def _casts_without_effect() -> Iterator[None]:
    """Inside, ``module.to(...)`` returns the module unchanged if all of its tensors already are as requested: torch would replace each
    tensor, which an export refuses."""
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
    """A tensor that a forward assigns to a ``registered`` buffer (``self.mean = new``) is written into the buffer at the end, which a
    graph records.

    Export treats an assignment as Python state, and restores the buffer. Other tensors that are attributes of ``module``, a twin, are the
    model's own Python state (``state``).
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


class _Selecting(TorchFunctionMode):
    """Selects rows by the first of equal boolean masks: ``x[m > 0]`` and ``y[m > 0]`` then have the same number of rows, which export
    cannot know for two masks."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[Any, tuple[Tensor, int]] = {}
        self.known: dict[
            int, tuple[Any, Tensor, int]
        ] = {}  # by the mask's id: how it was computed, and its version then

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        if name in _SELECTING and args and not kwargs:
            args = tuple(self._equal(arg) if isinstance(arg, Tensor) else arg for arg in args)
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
        """How a tensor was computed, if it is a mask that was not written to since; another tensor by its identity and version."""
        if not isinstance(value, Tensor):
            return repr(value)
        key, _, version = self.known.setdefault(id(value), (id(value), value, -1))
        return key if version == value._version else (id(value), value._version)

    def _equal(self, value: Tensor) -> Tensor:
        first, version = self.first.get(self._key(value), (value, value._version))
        return first if first._version == version else value


_SELECTING = frozenset(("getitem", "masked_select", "nonzero", "where"))
_COMPARING = frozenset(
    """gt ge lt le eq ne isnan isinf isfinite logical_not logical_and logical_or logical_xor bitwise_not bitwise_and bitwise_or invert
    and or""".split()  # noqa: SIM905  a list of words
)


class _Meant(TorchFunctionMode):
    """Reads a tensor of the model as its twin's, ``tensor.data`` as ``tensor.detach()``, a tensor with hooks as one whose gradient is
    scaled, and refuses changes to tensors that a graph cannot see."""

    def __init__(self, model: nn.Module, twin: nn.Module) -> None:
        super().__init__()
        self.ctc = CtcLoss()
        self.hooks = parameter_hooks(model, twin)
        self.scaled: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # by the id of the first: the tensor, and it with a scaled gradient
        self.read: dict[int, Tensor] = {}
        # by the tensor's id: the twin's module with the corresponding tensor, and the tensor's name
        self.twins: dict[int, tuple[nn.Module, str]] = {}
        for path, module in model.named_modules():
            own = twin.get_submodule(path)
            tensors = [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]
            self.twins |= {id(t): (own, name) for name, t in tensors if isinstance(t, Tensor)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, MethodWrapperType):  # reading an attribute is no computation
            self.read.update((id(tensor), tensor) for tensor in tensors_in((args, kwargs)))
        args, kwargs = self._meant(args), self._meant(kwargs or {})
        if func == _DATA.__set__:
            raise CaptureError(
                f"{caller()} gives a tensor other data in forward, which autograd and a captured graph do not see",
                hint="make a new tensor, y = ...; a buffer is written by buffer.copy_(new), a parameter after the step",
            )
        if func == _DATA.__get__:
            return args[0].detach()  # writes through it are checked when the graph is made functional
        self._check_toggle(func, args, kwargs)
        return self.ctc.call(func, args, kwargs)

    def register(self, tensor: Tensor, hook: Hook) -> RemovableHandle:
        """``tensor.register_hook(hook)`` in forward."""
        if id(tensor) in self.read or not scales(hook):
            raise KeptWholeError(
                f"{caller()} hooks a function into a gradient: torch.export keeps the tensor and loses the hook",
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
        for owner, name, hooks in self.hooks:  # a trace puts other tensors in place of the twin's parameters
            if getattr(owner, name) is tensor and id(tensor) not in self.scaled and is_traced():
                self._scale(tensor, hooks)
        return self.scaled.get(id(tensor), (tensor, tensor))[1]

    def _meant(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            module, name = self.twins.get(id(value), (None, ""))
            found = None if module is None else getattr(module, name)
            if found is None and is_stray(value):
                refuse_stray(f"{caller()} reads a tensor", value)
            return self._with_hooks(value if found is None else found)
        if type(value) in (tuple, list):
            return type(value)(self._meant(item) for item in value)
        if type(value) is dict:
            return {key: self._meant(item) for key, item in value.items()}
        return value

    def _check_toggle(self, func: Any, args: Any, kwargs: Any) -> None:
        """Refuse to set ``requires_grad`` except on a tensor of the forward: eager allows that too, and it changes nothing by itself."""
        if func is Tensor.requires_grad_:
            wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        elif func == _REQUIRES_GRAD.__set__:
            wanted = args[1]
        else:
            return
        if wanted != args[0].requires_grad and (isinstance(args[0], nn.Parameter) or not wanted):
            raise CaptureError(
                f"{caller()} switches requires_grad {'on' if wanted else 'off'} inside of forward, which a graph does not follow",
                hint="set it before training; for a part of a forward pass use torch.no_grad() or .detach()",
            )


_DATA: Any = Tensor.data
_REQUIRES_GRAD: Any = Tensor.requires_grad


# -- numbers that are drawn outside of torch's graph ---------------------------------------------------------------------


class _Drawn:
    """A number drawn from ``low`` to ``high``. Only comparisons with the same answer for every draw are allowed: ``draw < 0.0``."""

    def __init__(self, low: float, high: float, line: str) -> None:
        self.low, self.high, self.line = min(low, high), max(low, high), line

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise _frozen(self.line)

    def _below(self, other: Any, equal: bool) -> bool:
        if type(other) in (int, float):
            if self.high < other or (self.high == other and equal):
                return True
            if self.low > other or (self.low == other and not equal):
                return False
        raise _frozen(self.line)

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


def _frozen(line: str) -> CaptureError:
    return CaptureError(
        f"{line} draws a random number outside of torch: every step of a program would use the one of the capture",
        hint=_RANDOM_HINT,
    )


_HARMLESS = ("getstate", "get_state", "default_rng")


@contextmanager
def _no_draws() -> Iterator[None]:
    """Inside, Python's and numpy's random functions raise an error, except where every draw would give the same comparisons."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise _frozen(caller())

    def unit(*shape: Any, size: Any = None) -> Any:
        return refuse() if shape or size is not None else _Drawn(0.0, 1.0, caller())

    def uniform(low: float = 0.0, high: float = 1.0, size: Any = None) -> Any:
        return refuse() if size is not None else _Drawn(low, high, caller())

    def seed(*_: Any, **__: Any) -> Any:
        raise CaptureError(
            f"{caller()} sets the state of torch's generator inside of forward, which a graph does not follow",
            hint="seed before training; a program draws the same numbers on every device that holds the same rows",
        )

    before = random.getstate(), np.random.get_state(legacy=False)
    with ExitStack() as stack:
        for module in (random, np.random):
            for name in module.__all__:
                function = getattr(module, name)
                if callable(function) and not isinstance(function, type) and name not in _HARMLESS:
                    stack.enter_context(mock.patch.object(module, name, refuse))
        for name in ("random", "uniform"):
            stack.enter_context(mock.patch.object(random, name, unit if name == "random" else uniform))
        for name in ("random", "rand", "random_sample", "ranf", "sample"):
            if hasattr(np.random, name):
                stack.enter_context(mock.patch.object(np.random, name, unit))
        stack.enter_context(mock.patch.object(np.random, "uniform", uniform))
        for owner, name in ((torch, "manual_seed"), (torch.random, "manual_seed"), (torch, "set_rng_state")):
            stack.enter_context(mock.patch.object(owner, name, seed))
        yield
    if repr(before) != repr((random.getstate(), np.random.get_state(legacy=False))):
        raise CaptureError(
            "the model's forward draws from Python's or numpy's random numbers: every step of a program would use those of the capture",
            hint=_RANDOM_HINT,
        )
