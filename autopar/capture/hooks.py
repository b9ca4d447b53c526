"""Replaces gradient hooks that multiply by constants with graph ops.

A tensor ``y`` with a hook ``g -> g * c`` becomes ``y.detach() + (y - y.detach()) * c``: this has the same value, and multiplies the
gradient by ``c``, by the hook's own ops. Infinite elements of ``y``, where every function's gradient is zero, stay as they are. A symbolic
trace of the hook proves that it does nothing else. Other hooks are refused: clamping a gradient, for
example, would be right only after the sum over all ranks and microbatches.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from autopar.errors import CaptureError
from autopar.torch_private import gradient_hooks, remove_gradient_hooks

Hook = Callable[[Any], Any]
"""A function of a gradient that returns a new gradient."""
HINT = (
    "remove the hook, unless it multiplies by constants; move what it does to gradients into the loss, the optimizer, or a "
    "torch.library.custom_op with register_autograd"
)

_PRODUCTS = (operator.mul, torch.mul, "mul")
_QUOTIENTS = (operator.truediv, torch.div, "div")
_SIGNS = (operator.neg, torch.neg, "neg")


def scales(hook: Hook) -> bool:
    """Return whether ``hook`` only multiplies its argument by constants."""

    def of_gradient(gradient: Any) -> Any:
        return hook(gradient)  # hides the hook's default arguments, which fx would trace as tensors

    try:
        graph = fx.Tracer().trace(of_gradient)
    except Exception:  # a branch on values, or an error of the hook itself
        return False
    found: Any = None
    for node in graph.nodes:
        if node.op == "placeholder":
            found = node
        elif node.op == "output":
            return node.args == (found,)
        elif node.op != "get_attr":  # a tensor among the constants
            others = [arg for arg in node.args if arg is not found]
            factor = node.target in _PRODUCTS or (node.target in _QUOTIENTS and node.args[0] is found)
            if node.kwargs or len(node.args) - len(others) != 1 or len(others) != (0 if node.target in _SIGNS else 1):
                return False
            if not factor and node.target not in _SIGNS:
                return False
            found = node
    return False


def scaled(value: Tensor, hook: Hook) -> Tensor:
    """Return ``value`` with its gradient multiplied by the constants of ``hook``."""
    constant = value.detach()
    with _ConstantsDetached(zero := value - constant):
        product = hook(zero)
    return torch.where(constant.abs() < torch.inf, constant + product, value)


class _ConstantsDetached(TorchFunctionMode):
    """Detaches the tensors by which a hook multiplies ``zero``: gradients don't flow through a hook."""

    def __init__(self, zero: Tensor) -> None:
        super().__init__()
        self.products = {id(zero): zero}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(id(arg) in self.products for arg in args):
            return func(*args, **kwargs or {})
        detached = [a.detach() if isinstance(a, Tensor) and id(a) not in self.products else a for a in args]
        result = func(*detached, **kwargs or {})
        self.products[id(result)] = result
        return result


def refuse_hooks(model: nn.Module) -> None:
    """Raise ``CaptureError`` if a module or parameter has a gradient hook that does more than multiply."""
    named: list[tuple[str, Any]] = [("module", model.named_modules()), ("parameter", model.named_parameters())]
    for kind, owners in named:
        for name, owner in owners:
            hooks = gradient_hooks(owner)
            if hooks is None or not all(map(scales, (*_input_hooks(owner), *_output_hooks(owner)))):
                raise CaptureError(
                    f"the {kind} {name or type(owner).__name__} has a hook on its gradient, which a captured graph would lose",
                    HINT,
                )


def has_hooks(model: nn.Module) -> bool:
    owners: list[Any] = [*model.modules(), *model.parameters()]
    return any(gradient_hooks(owner) != ([], []) for owner in owners)


def _input_hooks(owner: Any) -> list[Hook]:
    """Return the hooks on the gradient of a parameter, or of a module's only input."""
    hooks, _ = gradient_hooks(owner) or ([], [])
    return [_one_gradient_hook(hook, owner) for hook in hooks] if isinstance(owner, nn.Module) else hooks


def _output_hooks(owner: Any) -> list[Hook]:
    _, hooks = gradient_hooks(owner) or ([], [])
    return [_one_gradient_hook(hook, owner, pre=True) for hook in hooks]


def _one_gradient_hook(hook: Any, module: nn.Module, pre: bool = False) -> Hook:
    """Return a module's hook as a function of one gradient."""

    def of_one(gradient: Any) -> Any:
        result = hook(module, (gradient,)) if pre else hook(module, (gradient,), (None,))
        return result[0] if isinstance(result, tuple | list) else None

    return of_one


def move_hooks(fake: nn.Module) -> None:
    """Replace the gradient hooks of a fake model's modules by forward hooks that scale inputs and outputs with ``scaled``."""
    for module in fake.modules():
        before, after = _input_hooks(module), _output_hooks(module)
        if before or after:
            remove_gradient_hooks(module)
            module.register_forward_pre_hook(lambda module, args, hooks=before: _rescale(module, args, hooks))
            module.register_forward_hook(lambda module, _, result, hooks=after: _rescale(module, (result,), hooks)[0])


def _rescale(module: nn.Module, values: tuple[Any, ...], hooks: list[Hook]) -> tuple[Any, ...]:
    if hooks and (len(values) != 1 or not isinstance(values[0], Tensor)):
        raise CaptureError(
            f"{type(module).__name__} has a hook on its gradients, and does not take or return exactly one tensor", HINT
        )
    for hook in hooks:
        values = (scaled(values[0], hook),)
    return values


def parameter_hooks(model: nn.Module, fake: nn.Module) -> list[tuple[nn.Module, str, list[Hook]]]:
    """Return the fake copy's module, the name and the hooks of every parameter that has hooks in ``model``."""
    found = []
    for name, parameter in model.named_parameters():
        hooks, _ = gradient_hooks(parameter) or ([], [])
        path, _, own = name.rpartition(".")
        if hooks:
            found.append((fake.get_submodule(path), own, hooks))
    return found
