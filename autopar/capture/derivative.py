"""Derivatives that a forward computes: a marker op in the exported graph, which ``passes.clean.derivatives`` expands."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture.backward import OPAQUE_HINT, NotTraceableError, caller, refuse_backward
from autopar.capture.blocks import stack
from autopar.errors import CaptureError
from autopar.torch_private import is_traced
from passes.clean import DERIVATIVE_STEPS
from passes.clean.derivatives import derivative
from passes.clean.nodes import calls
from passes.runner import run as run_passes


def differentiated(
    outputs: Sequence[Tensor],
    seeds: Sequence[Tensor | None],
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any],
    allow_unused: bool = False,
    accumulate_grad: bool = False,
    **_: Any,
) -> tuple[Tensor | None, ...]:
    """Replaces torch's autograd engine during export by one marker op, and returns ``None`` for inputs where torch does.

    Without ``create_graph`` the results are detached, as torch's are. Raises ``NotTraceableError`` if the gradients would be added to
    parameters (``backward()``), or if the run isn't a trace.
    """
    given = [seed for seed in seeds if isinstance(seed, Tensor)]
    if (
        accumulate_grad
        or not is_traced()
        or len(given) != len(outputs)
        or not all(isinstance(x, Tensor) for x in inputs)
    ):
        refuse_backward("a backward pass")
    reached = _reached(outputs)
    used = [_place(tensor) in reached for tensor in inputs]
    if not allow_unused and not all(used):
        raise RuntimeError(f"{caller()} differentiates by a tensor that was not used, or that requires no gradient")
    wanted = [tensor for tensor, is_used in zip(inputs, used, strict=True) if is_used]
    derivatives = iter(derivative(list(outputs), wanted, given) if wanted else ())
    results = [next(derivatives) if is_used else None for is_used in used]
    return tuple(g if g is None or create_graph else g.detach() for g in results)


def _place(tensor: Tensor) -> tuple[int, int]:
    """Return a tensor's position in the autograd graph."""
    return (id(tensor), -1) if tensor.grad_fn is None else (id(tensor.grad_fn), tensor.output_nr)


def _reached(outputs: Sequence[Tensor]) -> set[tuple[int, int]]:
    """Return the positions in the autograd graph of all tensors that ``outputs`` depend on."""
    found = {_place(tensor) for tensor in outputs if tensor.requires_grad}
    seen: dict[int, Any] = {}  # keeps the functions alive: a new object could get the id of a freed one
    waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen[id(function)] = function
        if (leaf := getattr(function, "variable", None)) is not None:
            found.add((id(leaf), -1))
        for following, number in function.next_functions:
            if following is not None:
                found.add((id(following), number))
                waiting.append(following)
    return found


def refuse_derivatives(gm: fx.GraphModule) -> None:
    """Raise ``NotTraceableError`` if a derivative in the graph can't be expanded."""
    markers = calls(gm, torch.ops.autopar.derivative.default)
    if not markers:
        return
    try:
        run_passes(copy.deepcopy(gm), DERIVATIVE_STEPS)
    except CaptureError as error:
        paths = tuple(path for path, _, _ in stack(markers[0]))
        raise NotTraceableError(error.message, error.hint or OPAQUE_HINT, paths) from error
