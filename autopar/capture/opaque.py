"""Keep a module whole: one node in the graph, executed as the user wrote it, on every rank alike.

The way out for a module that ``torch.export`` refuses (control flow that depends on the data, a library call it cannot
see into). The module becomes a custom op of torch's with its parameters among the operands, so that they stay
parameters of the graph and their gradients flow. The op has no sharding rule: every axis replicates it.

Limits: tensors in, one tensor out; backward runs the module again, so it must not draw random numbers; and the op lives in the process that
wrapped the module, so a program that contains it cannot be run from an emitted folder alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

# By op name: the op. Module-level, because the capture's copies of a wrapped module must find the one op of their original.
_OPS: dict[str, Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]] = {}


class Opaque(nn.Module):
    """``module`` behind one op. Made by ``opaque``."""

    def __init__(self, module: nn.Module, op: str) -> None:
        super().__init__()
        self.module = module
        self.op = op

    def forward(self, *inputs: Tensor) -> Tensor:
        return _OPS[self.op](list(inputs), list(self.module.parameters()))


def opaque(module: nn.Module, output: Callable[..., Tensor] | None = None) -> nn.Module:
    """Wrap ``module`` so that capture keeps it whole and every rank executes it alike.

    ``output`` is called with the inputs (without values) and returns a tensor of the output's shape and dtype
    (``torch.empty``); without it the output is like the first input.
    """
    name = f"autopar::opaque_{len(_OPS)}"
    names = [key for key, _ in module.named_parameters()]

    def compute(inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        result = functional_call(module, dict(zip(names, parameters, strict=True)), tuple(inputs))
        assert isinstance(result, Tensor), f"an opaque module must return one tensor, not {type(result).__name__}"
        return result

    @torch.library.custom_op(name, mutates_args=())
    def op(inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        return compute(inputs, parameters).clone()  # an op may not return its operand, and a module may

    @op.register_fake
    def _(inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        return torch.empty_like(inputs[0]) if output is None else output(*inputs)

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.split = len(inputs[0])
        ctx.save_for_backward(*inputs[0], *inputs[1])

    def backward(ctx: Any, gradient: Tensor) -> tuple[list[Tensor | None], list[Tensor | None]]:
        floating = [t.detach().requires_grad_(t.is_floating_point()) for t in ctx.saved_tensors]
        with torch.enable_grad():
            result = compute(floating[: ctx.split], floating[ctx.split :])
        wanted = [t for t in floating if t.requires_grad]
        found = iter(torch.autograd.grad(result, wanted, gradient, allow_unused=True))
        gradients = [next(found) if t.requires_grad else None for t in floating]
        return gradients[: ctx.split], gradients[ctx.split :]

    op.register_autograd(backward, setup_context=remember)
    _OPS[name] = op
    return Opaque(module, name)
