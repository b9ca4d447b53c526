"""Opaque modules: a module becomes one node of the graph, and every rank executes its original code on the same inputs.

This is for a module that ``torch.export`` refuses (data-dependent control flow, a foreign library call). The module becomes a torch
custom op with the module's parameters among its operands, so that they stay parameters of the graph and get gradients. The op has no
sharding rule: every axis replicates it. ``autopar.capture.auto_opaque`` automatically does the same for modules that fail to trace.

Limits: the module takes tensors and returns a tensor, or tuples, lists and dicts of tensors and constant plain values. The backward pass
runs the module again, so the module must not draw random numbers or change its buffers. An emitted program creates the module from
its class name and its attributes (``autopar.emit.opaque``), which must be plain data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from autopar.capture.storage import copied
from autopar.errors import CaptureError, UsageError
from autopar.precision import name_of
from autopar.program.opaque import tensors_in
from autopar.torch_private import autograd_in_op, is_fake

Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""The shapes and dtypes of a call's tensors."""
_PLAIN = (bool, int, float, str, type(None))
_OUTPUT_HINT = "pass output, a function of the inputs that returns tensors of the result's shapes (torch.empty): opaque(module, output)"


@dataclass(slots=True)
class _Implementation:
    """The module that an op runs; ``output`` as for ``opaque``."""

    module: nn.Module
    output: Callable[..., Any] | None
    observed: dict[Shapes, Any] = field(default_factory=dict)
    """The results of calls with values, on meta, by the inputs' shapes and dtypes."""

    def result(self, *inputs: Tensor) -> Any:
        """Return the result on meta: by the user's ``output``, else as in an observed call with these shapes, else like the first input.
        Raise ``CaptureError`` in the last case if the result of an observed call wasn't like the call's first input."""
        if self.output is not None:
            return self.output(*inputs)
        key = shapes(inputs)
        if key in self.observed:
            return self.observed[key]
        if all(described(result) == given[0] for given, result in self.observed.items()):
            return torch.empty_like(inputs[0], device="meta")
        words = ", ".join(f"{name_of(dtype)} {list(shape)}" for shape, dtype in key)
        raise CaptureError(
            f"the opaque module {type(self.module).__name__} never ran on inputs like {words}, so the shape of its result is unknown",
            hint=_OUTPUT_HINT,
        )

    def compute(self, inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
        names = [key for key, _ in (*self.module.named_parameters(), *self.module.named_buffers())]
        return functional_call(self.module, dict(zip(names, tensors, strict=True)), tuple(inputs))


# By op name. Global, because copies of a wrapped module need the original's op, and the emitter needs the original. Each module has a
# second op, for results that aren't a single tensor: it returns a list.
_OPS: dict[str, _Implementation] = {}
_LIST_SUFFIX = "_list"


class Opaque(nn.Module):
    """Runs ``module`` as one op. Created by ``opaque``."""

    def __init__(self, module: nn.Module, op: str) -> None:
        super().__init__()
        self.module = module
        self.op = op

    def forward(self, *inputs: Tensor) -> Any:
        return call(self.op, self.module, *inputs)


def call(name: str, module: nn.Module, *inputs: Tensor) -> Any:
    """Apply the op to ``inputs`` and the tensors of ``module``, which is the op's module or a copy with other tensors. If all tensors have
    values, run the module instead, and store the shapes of its result."""
    implementation = _OPS[name]
    # the original's names: copies have more buffers, for tensors in plain attributes
    buffers = [module.get_buffer(key) for key, _ in implementation.module.named_buffers()]
    operands, tensors = list(inputs), [*module.parameters(), *buffers]
    if not any(map(is_fake, (*operands, *tensors))):
        result = implementation.compute(operands, tensors)
        implementation.observed[shapes(operands)] = without_values(result, type(implementation.module).__name__)
        return result
    result = implementation.result(*operands)
    if isinstance(result, Tensor):
        return target_of(name)(operands, tensors)
    return _rebuilt(result, iter(target_of(name, several=True)(operands, tensors)))


def target_of(name: str, *, several: bool = False) -> Any:
    """Return the torch op. It takes the inputs and the module's tensors, and returns a tensor or, with ``several``, a list of tensors."""
    return _op(name + _LIST_SUFFIX if several else name)


def opaque_modules(graph: fx.Graph) -> dict[str, nn.Module]:
    """Return the wrapped modules whose ops the graph calls, by op name."""
    names = [str(node.target).removesuffix(".default") for node in graph.nodes if node.op == "call_function"]
    return {name: _OPS[name].module for name in names if name in _OPS}


def opaque_note(what: str, reason: str, more: int = 0) -> str:
    """Return a note for the plan: ``what`` became an opaque op, and ``more`` like it, because of ``reason``."""
    runs = f"and {more} more run as opaque ops" if more else "runs as one opaque op"
    return f"{what} {runs}, replicated on every rank: {reason}"


def opaque(module: nn.Module, output: Callable[..., Any] | None = None) -> nn.Module:
    """Wrap ``module`` so that capture doesn't trace into it and every rank executes it on the same inputs.

    ``output`` is called with the inputs (without values) and returns the result's structure with tensors of its shapes and dtypes
    (``torch.empty``). Without ``output``, capture runs a copy of the model on the batch to find the shapes and dtypes; if the batch or the
    model has no values, it assumes that the result is like the first input. Opaque modules can't be nested.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"opaque takes a torch.nn.Module, not {module!r}", "wrap a function in a module")
    if any(isinstance(child, Opaque) for child in module.modules()):
        raise UsageError(f"{type(module).__name__} already contains an opaque module", "wrap only the outer one")
    return Opaque(module, register(module, output))


def observe(model: nn.Module, run: Callable[[nn.Module], object]) -> None:
    """Run a copy of ``model`` on the batch's values, to store the result shapes of opaque modules without ``output``."""
    wrapped = [module for module in model.modules() if isinstance(module, Opaque)]
    tensors = [*model.parameters(), *model.buffers()]
    if all(_OPS[module.op].output is not None for module in wrapped) or any(map(is_fake, tensors)):
        return
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            run(copied([model])[0])
        except CaptureError:
            raise
        except Exception:  # the model itself fails, and export reports where
            return


def register(module: nn.Module, output: Callable[..., Any] | None) -> str:
    """Register an op that computes ``module`` and return its name; ``output`` as for ``opaque``."""
    name = f"autopar.opaque_{len(_OPS) // 2}"
    implementation = _Implementation(module, output)
    _OPS[name] = _OPS[name + _LIST_SUFFIX] = implementation
    return name


@functools.cache
def _op(name: str) -> Any:
    """Return the op of that name, whose result is a tensor or, with the suffix ``_LIST_SUFFIX``, a list."""
    implementation = _OPS[name]

    def run(inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        with autograd_in_op():  # clone: unlike a module, an op may not return its operand
            return [tensor.detach().clone() for tensor in tensors_in(implementation.compute(inputs, tensors))]

    def fake(inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        results = tensors_in(implementation.result(*inputs))
        return [torch.empty(t.shape, dtype=t.dtype, device=inputs[0].device) for t in results]

    def one(inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
        return run(inputs, tensors)[0]

    several = name.endswith(_LIST_SUFFIX)
    op = torch.library.custom_op(name.replace(".", "::"), run if several else one, mutates_args=())
    op.register_fake(fake if several else lambda inputs, tensors: fake(inputs, tensors)[0])

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.split = len(inputs[0])
        ctx.save_for_backward(*inputs[0], *inputs[1])

    def backward(ctx: Any, gradient: Any) -> tuple[list[Tensor | None], list[Tensor | None]]:
        # only where needed: some ops have no gradient for some operands, such as the scale of fake quantisation
        needed = [*ctx.needs_input_grad[0], *ctx.needs_input_grad[1]]
        leaves = [t.detach().requires_grad_(needs) for t, needs in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            results = tensors_in(implementation.compute(leaves[: ctx.split], leaves[ctx.split :]))
        of_results = gradient if several else [gradient]
        pairs = [(r, g) for r, g in zip(results, of_results, strict=True) if r.requires_grad and g is not None]
        computed = iter(_gradients(pairs, [t for t in leaves if t.requires_grad]))
        gradients = [next(computed) if t.requires_grad else None for t in leaves]
        return gradients[: ctx.split], gradients[ctx.split :]

    op.register_autograd(backward, setup_context=setup_context)
    return getattr(torch.ops.autopar, name.removeprefix("autopar.")).default


def _gradients(pairs: list[tuple[Tensor, Tensor]], operands: list[Tensor]) -> Sequence[Tensor | None]:
    if not pairs:
        return [None] * len(operands)
    results, gradients = zip(*pairs, strict=True)
    return torch.autograd.grad(results, operands, gradients, allow_unused=True)


# -- results without values --------------------------------------------------------------------------------------------


def shapes(tensors: Iterable[Tensor]) -> Shapes:
    """Return the shapes and dtypes of a call's tensors."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def without_values(result: Any, name: str) -> Any:
    """Return ``result``, which the module ``name`` returned, with its tensors on meta.

    Raises ``CaptureError`` if it has no tensor, or has anything but tensors, plain values, and tuples, lists and dicts of these.
    """
    if not tensors_in(result):
        raise CaptureError(
            f"the opaque module {name} returns {type(result).__name__} without a tensor", hint="return tensors from it"
        )
    if (other := _unsupported_class(result)) is not None:
        raise CaptureError(
            f"the opaque module {name} returns an object of the class {other}",
            hint="return a tensor, or tuples, lists or dicts of tensors and plain values",
        )
    return _rebuilt(result, (torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors_in(result)))


def _unsupported_class(result: Any) -> str | None:
    """Return the class of a part of the result that is neither a tensor nor plain data, or ``None``."""
    if type(result) in _PLAIN or isinstance(result, Tensor):
        return None
    if type(result) is dict:
        return next(filter(None, map(_unsupported_class, result.values())), None)
    if type(result) in (tuple, list) or hasattr(type(result), "_fields"):
        return next(filter(None, map(_unsupported_class, result)), None)
    return type(result).__name__


def _rebuilt(result: Any, tensors: Iterator[Tensor]) -> Any:
    """Return ``result`` with its tensors replaced by ``tensors``, in order."""
    if isinstance(result, Tensor):
        return next(tensors)
    if isinstance(result, dict):
        return {key: _rebuilt(item, tensors) for key, item in result.items()}
    if isinstance(result, tuple | list):
        items = [_rebuilt(item, tensors) for item in result]
        return type(result)(*items) if hasattr(type(result), "_fields") else type(result)(items)
    return result


def described(result: Any) -> Any:
    """Return a key that is equal for results of equal structure, shapes, dtypes and plain values."""
    if isinstance(result, Tensor):
        return tuple(result.shape), result.dtype
    if isinstance(result, dict):
        return dict, [(key, described(item)) for key, item in result.items()]
    if isinstance(result, tuple | list):
        return type(result), [described(item) for item in result]
    return "plain", result
