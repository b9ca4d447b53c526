"""What a model does to gradients besides its forward pass: a graph of the forward pass would lose it, so it is found and refused."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from autopar.errors import CaptureError
from autopar.torch_private import has_gradient_hooks

OPAQUE_HINT = "keep that module whole and replicated: wrap it in autopar.opaque(module)"

_apply_of_torch: Any = vars(torch.autograd.Function)["apply"].__func__


@contextmanager
def own_gradients_refused() -> Iterator[None]:
    """Inside, an ``autograd.Function`` of the user's and a tensor's ``register_hook`` raise ``CaptureError`` with the line that calls."""
    with (
        mock.patch.object(torch.autograd.Function, "apply", classmethod(_apply)),
        mock.patch.object(torch.Tensor, "register_hook", _register_hook),
    ):
        yield


def refuse_hooks(model: nn.Module) -> None:
    """Raise ``CaptureError`` where a module or a parameter has a hook that gradients pass through."""
    for kind, things in (("module", model.named_modules()), ("parameter", model.named_parameters())):
        for name, thing in things:
            if has_gradient_hooks(thing):
                raise CaptureError(
                    f"the {kind} {name or type(thing).__name__} has a hook on its gradient, which a captured graph would lose",
                    hint="remove the hook; what it does to gradients belongs into the loss, the optimizer, or a torch.library.custom_op "
                    "with register_autograd",
                )


def _apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands for ``autograd.Function.apply`` during export, which would keep the forward of a function and lose its backward."""
    if function is CheckpointFunction:  # its backward is the function's own: autopar recomputes by itself where it pays
        run, _, *inputs = args
        return run(*inputs)
    if function.__module__.partition(".")[0] == "torch":
        return _apply_of_torch(function, *args, **kwargs)
    raise CaptureError(
        f"{_caller()} calls the autograd.Function {function.__name__}: torch.export keeps its forward and loses its backward",
        hint="make it a torch.library.custom_op with register_autograd (and autopar.register_rule, to shard it), or "
        + OPAQUE_HINT,
    )


def _register_hook(tensor: torch.Tensor, hook: Any) -> Any:
    """Stands for ``Tensor.register_hook`` during export, which would forget the hook."""
    raise CaptureError(
        f"{_caller()} hooks a function into a gradient: torch.export keeps the tensor and loses the hook",
        hint="make it a torch.library.custom_op with register_autograd (and autopar.register_rule, to shard it), or "
        + OPAQUE_HINT,
    )


def _caller() -> str:
    """The file, line and text of the innermost frame that is not capture's."""
    here = str(Path(__file__).parent)
    frames = traceback.extract_stack()[:-1]
    frame = next(f for f in reversed(frames) if not f.filename.startswith((here, "<")))
    return f"{frame.filename}:{frame.lineno} `{frame.line}`"
