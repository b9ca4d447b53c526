"""Keep a module whole: one node in the graph, which every rank executes in the same way, as the user wrote it.

This is for a module that ``torch.export`` refuses (control flow that depends on the data, a library call that it cannot
see into). The module becomes a torch custom op with its parameters among the operands, so that they stay
parameters of the graph and their gradients flow. The op has no sharding rule: every axis replicates it.

A module that capture finds to be of that kind is kept whole automatically (``autopar.capture.whole``).

Limits: tensors in, one tensor out; backward runs the module again, so it must not draw random numbers or change its buffers. An emitted
program creates the module again from its class's name and its attributes (``autopar.emit.opaque``), which must be plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from autopar.errors import UsageError
from autopar.torch_private import autograd_in_op

# By op name: the op and its module. Module-level, because the capture's copies of a wrapped module must find their original's op, and the
# emitter must find the original.
_OPS: dict[str, tuple[Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor], nn.Module]] = {}


class Opaque(nn.Module):
    """``module`` behind one op. Created by ``opaque``."""

    def __init__(self, module: nn.Module, op: str) -> None:
        super().__init__()
        self.module = module
        self.op = op

    def forward(self, *inputs: Tensor) -> Tensor:
        return call(self.op, self.module, *inputs)


def call(name: str, module: nn.Module, *inputs: Tensor) -> Tensor:
    """The op applied to ``inputs`` and the tensors of ``module``: the op's own module, a copy of it, or one that differs only in its
    tensors."""
    op, original = _OPS[name]
    # The original's names: its copies have buffers for tensors that are plain attributes of the original.
    buffers = [module.get_buffer(key) for key, _ in original.named_buffers()]
    return op(list(inputs), [*module.parameters(), *buffers])


def opaque_modules(graph: fx.Graph) -> dict[str, nn.Module]:
    """The wrapped modules whose ops the graph calls, by op name."""
    names = [str(node.target).removesuffix(".default") for node in graph.nodes if node.op == "call_function"]
    return {name: _OPS[name][1] for name in names if name in _OPS}


def opaque(module: nn.Module, output: Callable[..., Tensor] | None = None) -> nn.Module:
    """Wrap ``module`` so that capture keeps it whole and every rank executes it in the same way.

    ``output`` is called with the inputs (without values) and returns a tensor of the output's shape and dtype
    (``torch.empty``); without it the output is like the first input. A module is wrapped once: not inside another opaque one.
    """
    if not isinstance(module, nn.Module):
        raise UsageError(f"opaque takes a torch.nn.Module, not {module!r}", "wrap a function in a module")
    if any(isinstance(child, Opaque) for child in module.modules()):
        raise UsageError(f"{type(module).__name__} has an opaque module inside already", "wrap the outer one alone")
    return Opaque(module, register(module, output))


def register(module: nn.Module, output: Callable[..., Tensor] | None) -> str:
    """The name of a new op that computes ``module``; ``output`` as for ``opaque``."""
    name = f"autopar.opaque_{len(_OPS)}"
    names = [key for key, _ in (*module.named_parameters(), *module.named_buffers())]

    def compute(inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
        result = functional_call(module, dict(zip(names, tensors, strict=True)), tuple(inputs))
        assert isinstance(result, Tensor), f"an opaque module must return one tensor, not {type(result).__name__}"
        return result

    @torch.library.custom_op(name.replace(".", "::"), mutates_args=())
    def op(inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
        with autograd_in_op():
            return compute(inputs, tensors).detach().clone()  # an op may not return its operand; a module may

    @op.register_fake
    def _(inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
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
    _OPS[name] = op, module
    return name
