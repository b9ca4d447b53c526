"""Runs the user's model eagerly on one device, as the reference for captured graphs and programs.

A copy runs in float64, without dropout or with ``DeterministicDraws``, so that two runs can be compared to the last digits. Modules keep
their mode (``train`` or ``eval``).
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.capture.batch import BatchStructure
from autopar.capture.clone import choose_experts, stored_tensors
from autopar.capture.export import call_model
from autopar.capture.storage import cast, copied, ties

_DROPOUT_ARGUMENTS = ("dropout_p", "dropout")
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class WithoutDropout(TorchFunctionMode):
    """A context in which dropout has probability 0 in every form: module, function, argument of attention.

    ``seen``: the model called dropout with p > 0 (or drew random numbers); ``chances`` collects the probabilities of active dropout.
    """

    def __init__(self, chances: set[float] | None = None) -> None:
        super().__init__()
        self.seen = False
        self.chances = set() if chances is None else chances

    def _record(self, probability: Any, training: Any = True) -> None:
        self.seen = self.seen or bool(probability)
        if training:
            self.chances.add(float(probability))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name:
            # (input, p, training, ...) in every variant, of torch and of torch.nn.functional
            training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
            self._record(args[1] if len(args) > 1 else kwargs.get("p", 0.5), training)
            rest = {key: value for key, value in kwargs.items() if key != "p"}
            return func(args[0], 0.0, *args[2:], **rest) if args else func(p=0.0, **rest)
        if name in _RECURRENT:  # (..., has_biases, num_layers, dropout, training, ...)
            place = next(i for i, argument in enumerate(args) if isinstance(argument, bool)) + 2
            self._record(*args[place : place + 2])
            args = (*args[:place], 0.0, *args[place + 1 :])
        if name == "scaled_dot_product_attention" and len(args) > 4:
            self._record(args[4])
            args = (*args[:4], 0.0, *args[5:])
        elif name == "multi_head_attention_forward":
            bound = inspect.signature(func).bind(*args, **kwargs)
            args, kwargs = (), dict(bound.arguments)
        for key in _DROPOUT_ARGUMENTS:
            if isinstance(kwargs.get(key), float):
                self._record(kwargs[key], kwargs.get("training", True))
                kwargs[key] = 0.0
        return func(*args, **kwargs)


class DeterministicDraws(WithoutDropout):
    """A context without dropout in which random numbers follow a fixed pattern, the same for eager PyTorch and for the graph."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _RANDOM_FUNCTIONS:
            return super().__torch_function__(func, types, args, kwargs)
        drawn = func(*args, **(kwargs or {}))  # called for the result's shape, dtype and device
        if not isinstance(drawn, Tensor):
            return drawn
        self.seen = True
        with torch.no_grad():
            values = _pattern(drawn)
            if name == "bernoulli" and args and isinstance(args[0], Tensor) and len(args) == 1:
                values = (values < args[0]).to(drawn.dtype)
            elif name in ("bernoulli_", "bernoulli"):
                probability = args[1] if len(args) > 1 else (kwargs or {}).get("p", 0.5)
                values = (values < probability).to(drawn.dtype)
            elif name == "exponential_":
                values = values.abs() + 0.1  # never zero: a logarithm may follow
            elif name.startswith("randint"):
                values = torch.zeros_like(drawn)  # a valid index, whatever the range
                numbers = [value for value in args if isinstance(value, int)]
                values += numbers[0] if len(numbers) > 1 and not name.endswith("like") else 0
            return drawn.copy_(values) if name.endswith("_") else values.to(drawn.dtype)


_RANDOM_FUNCTIONS = frozenset(
    """rand randn rand_like randn_like randint randint_like bernoulli bernoulli_ uniform_ normal_ exponential_""".split()  # noqa: SIM905  a list of words
)


def _pattern(like: Tensor) -> Tensor:
    """Return distinct numbers between 0 and 1 in the shape of ``like``: multiples of the golden ratio, modulo 1."""
    count = math.prod(like.shape)
    kind = like.dtype if like.is_floating_point() else torch.float64
    numbers = torch.arange(1, count + 1, dtype=torch.float64, device=like.device) * 0.6180339887498949
    return (numbers - numbers.floor()).reshape(like.shape).to(kind)


@dataclass(frozen=True, slots=True)
class EagerStep:
    """The loss, the gradients (without ``None``) and the buffers after a forward and backward pass."""

    loss: float
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class EagerCopy:
    """Copies of a model and its loss function."""

    model: nn.Module
    loss_fn: Any


def copy_for_eager(model: nn.Module, loss_fn: Any = None, dtype: torch.dtype | None = torch.float64) -> EagerCopy:
    """Copy ``model``, and ``loss_fn`` if it is a module, to the CPU in ``dtype``, keeping the modules' modes.

    Parameters on meta get random values.
    """
    made = copied([model, loss_fn] if isinstance(loss_fn, nn.Module) else [model])
    _materialise(made[0])
    parameters = [parameter for module in made for parameter in module.parameters()]
    stored = (tensor for module in made for _, _, tensor in stored_tensors(module))
    cast([*parameters, *(tensor for tensor in stored if not isinstance(tensor, nn.Parameter))], dtype)
    for parameter in parameters:
        parameter.grad = None
    if dtype == torch.float64:
        choose_experts(made[0], "eager")
    return EagerCopy(made[0], made[1] if len(made) > 1 else loss_fn)


class EagerModel:
    """Runs copies of a model and its loss function on batches of one ``structure``. ``written`` names the frozen parameters that forward
    writes, which count as buffers."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        structure: BatchStructure,
        dtype: torch.dtype | None,
        written: Collection[str] = (),
    ) -> None:
        made = copy_for_eager(model, loss_fn, dtype)
        self.model, self.loss_fn, self.structure = made.model, made.loss_fn, structure
        self.written = frozenset(written)
        self.ties = ties(made.model)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.model.named_parameters() if n not in self.written}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The current values of every buffer, by each of its names."""
        written = [(n, p) for n, p in self.model.named_parameters() if n in self.written]
        named = [*self.model.named_buffers(remove_duplicate=False), *written]
        return {name: tensor.detach().clone() for name, tensor in named}

    def loss(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the loss of a batch; ``tensors`` are in the order of the structure's leaves."""
        # clones, because a model may write to its batch
        return call_model(self.model, self.structure, self.loss_fn, [tensor.clone() for tensor in tensors])

    def step(self, tensors: Sequence[Tensor]) -> EagerStep:
        """Run a forward and backward pass, which changes buffers but not parameters, and return its results."""
        loss, parameters = self.loss(tensors), self.parameters
        loss.backward()  # not torch.autograd.grad, which ignores what a custom backward adds to .grad
        grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        for parameter in parameters.values():
            parameter.grad = None
        return EagerStep(float(loss.detach()), summed(grads, self.ties), self.buffers)

    def evaluate(self, tensors: Sequence[Tensor]) -> tuple[float, list[str]]:
        """Return the loss in evaluation mode, and the names of the buffers that its forward pass changes."""
        before = self.buffers
        with in_evaluation_mode(self.model, self.loss_fn), torch.no_grad():
            loss = float(self.loss(tensors))
        return loss, [name for name, value in self.buffers.items() if not torch.equal(value, before[name])]

    def set_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Set the buffers, and the frozen parameters that count as buffers, by name."""
        with torch.no_grad():
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers(remove_duplicate=False)):
                if name in values and (name in self.written or not isinstance(tensor, nn.Parameter)):
                    tensor.copy_(values[name])


def roots(model: nn.Module, loss_fn: Any) -> list[nn.Module]:
    """Return the model, and the loss function if it is a module, too."""
    return [model, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]


@contextlib.contextmanager
def in_evaluation_mode(model: nn.Module, loss_fn: Any) -> Iterator[None]:
    """Set the model and its loss to evaluation mode, and restore the mode of each module at the end."""
    modes = [(module, module.training) for root in roots(model, loss_fn) for module in root.modules()]
    try:
        for root in roots(model, loss_fn):
            root.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def update(parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """Step every parameter against its gradient; the largest change is ``MOVE`` times the parameter's largest element, so that a tensor
    that shares the parameter's memory changes visibly."""
    with torch.no_grad():
        for name, gradient in gradients.items():
            largest, size = (float(t.abs().max()) if t.numel() else 0.0 for t in (gradient, parameters[name]))
            if largest and math.isfinite(largest):
                parameters[name].sub_(gradient * (MOVE * (size or 1.0) / largest))


MOVE = 2.0**-5
"""Size of the update between two compared steps, relative to the parameter's largest element."""


def gradients(loss: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of the trainable parameters that the loss depends on, by name."""
    wanted = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return {name: grad for name, grad in zip(wanted, grads, strict=True) if grad is not None}


def summed(gradients: Mapping[str, Tensor], ties: Mapping[str, str]) -> dict[str, Tensor]:
    """Sum the gradients of tied parameters under their first name, without those of empty parameters, which graphs don't train."""
    sums: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        first = ties.get(name, name)
        if gradient.numel():
            sums[first] = sums[first] + gradient if first in sums else gradient
    return sums


def with_zeros(
    gradients: dict[str, Tensor], parameters: Mapping[str, Tensor], names: Collection[str]
) -> dict[str, Tensor]:
    """Return the gradients, with zeros for the parameters in ``names`` that have none (``Graph.possibly_unused``)."""
    missing = [name for name in names if name in parameters and name not in gradients]
    return gradients | {name: torch.zeros_like(parameters[name]) for name in missing}


def _materialise(model: nn.Module) -> None:
    """Draw values for parameters on meta."""
    generator = torch.Generator().manual_seed(0)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                if id(parameter) not in made:
                    values = (
                        torch.randn(parameter.shape, generator=generator) / max(parameter.shape[-1:] or (1,)) ** 0.5
                    )
                    made[id(parameter)] = nn.Parameter(values.to(parameter.dtype), parameter.requires_grad)
                setattr(module, name, made[id(parameter)])
