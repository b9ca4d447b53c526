"""Exports ``torch.autograd.grad`` in a model's forward as a marker op, which ``passes.clean.derivatives`` expands."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture.backward import NotTraceableError, caller, refuse_backward
from autopar.capture.blocks import stack
from autopar.errors import OPAQUE_HINT, CaptureError
from autopar.torch_private import is_traced
from passes.clean import DERIVATIVE_STEPS
from passes.clean.derivatives import derivative
from passes.clean.nodes import calls
from passes.runner import run as run_passes


def record_derivative(
    outputs: Sequence[Tensor],
    grad_outputs: Sequence[Tensor | None],
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any],
    allow_unused: bool = False,
    accumulate_grad: bool = False,
    **_: Any,
) -> tuple[Tensor | None, ...]:
    """Replace torch's autograd engine during export: record its call as one marker op.

    Like torch, it returns ``None`` for unused inputs (``RuntimeError`` without ``allow_unused``), and detached gradients without
    ``create_graph``. Raises ``NotTraceableError`` for ``backward()``, outside of a trace, or if inputs or ``grad_outputs`` aren't tensors.
    """
    cotangents = [tensor for tensor in grad_outputs if isinstance(tensor, Tensor)]
    if (
        accumulate_grad
        or not is_traced()
        or len(cotangents) != len(outputs)
        or not all(isinstance(x, Tensor) for x in inputs)
    ):
        refuse_backward("a backward pass")
    dependencies = _dependencies(outputs)
    used = [_autograd_key(tensor) in dependencies for tensor in inputs]
    if not allow_unused and not all(used):
        raise RuntimeError(f"{caller()} differentiates w.r.t. a tensor that was not used or requires no gradient")
    wanted = [tensor for tensor, is_used in zip(inputs, used, strict=True) if is_used]
    derivatives = iter(derivative(list(outputs), wanted, cotangents) if wanted else ())
    results = [next(derivatives) if is_used else None for is_used in used]
    return tuple(g if g is None or create_graph else g.detach() for g in results)


def _autograd_key(tensor: Tensor) -> tuple[int, int]:
    """Return a key of the tensor's position in the autograd graph."""
    return (id(tensor), -1) if tensor.grad_fn is None else (id(tensor.grad_fn), tensor.output_nr)


def _dependencies(outputs: Sequence[Tensor]) -> dict[tuple[int, int], Any]:
    """Return the autograd keys of all tensors that ``outputs`` depend on, with the objects whose ids they have: these must stay alive while
    keys are compared, because a new object could get the id of a freed one."""
    keys = {_autograd_key(tensor): tensor.grad_fn for tensor in outputs if tensor.requires_grad}
    seen: dict[int, Any] = {}
    pending = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    while pending:
        function = pending.pop()
        if id(function) in seen:
            continue
        seen[id(function)] = function
        if (leaf := getattr(function, "variable", None)) is not None:
            keys[id(leaf), -1] = leaf
        for operand, output_nr in function.next_functions:
            if operand is not None:
                keys[id(operand), output_nr] = operand
                pending.append(operand)
    return keys


def refuse_derivatives(gm: fx.GraphModule) -> None:
    """Raise ``NotTraceableError`` if a marker in the graph can't be expanded."""
    markers = calls(gm, torch.ops.autopar.derivative.default)
    if not markers:
        return
    try:
        run_passes(copy.deepcopy(gm), DERIVATIVE_STEPS)
    except CaptureError as error:
        paths = tuple(path for path, _, _ in stack(markers[0]))
        raise NotTraceableError(error.message, error.hint or OPAQUE_HINT, paths) from error
