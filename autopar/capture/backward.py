"""Refuses model code that changes gradients outside of the forward pass, such as hooks: a forward graph would lack these changes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointFunction

from autopar.capture.blocks import stack
from autopar.capture.functions import applied, apply_of_torch
from autopar.capture.opaque import Opaque
from autopar.errors import OPAQUE_HINT, CaptureError
from autopar.ops.facts import facts, op_name
from autopar.ops.operands import arguments
from autopar.ops.source import source_line
from autopar.torch_private import gradient_hooks, is_optimized_module, patch_backward

OP_HINT = (
    "make it a torch.library.custom_op with register_autograd (and autopar.register_rule, to shard it), or "
    + OPAQUE_HINT
)

TORCH = str(Path(torch.__file__).parent)
NOT_USER_CODE = (TORCH, str(Path(__file__).parent), gradient_hooks.__code__.co_filename)
"""Prefixes of the paths of files that aren't the user's code."""


class NotTraceableError(CaptureError):
    """Code can't be traced, but capture may make a module that contains the code one opaque op. ``paths`` are the modules that contain
    the code, outermost first; ``function`` is the refused ``autograd.Function``, if any."""

    def __init__(self, message: str, hint: str, paths: tuple[str, ...] = (), function: Any = None) -> None:
        super().__init__(message, hint)
        self.paths, self.function = paths, function


@contextmanager
def custom_gradients_refused(engine: Callable[..., Any]) -> Iterator[None]:
    """A context in which hooks on saved tensors, and a user's ``autograd.Function`` that ``functions_as_ops`` doesn't handle, raise
    ``CaptureError`` with the calling line; ``engine`` replaces torch's autograd engine."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    enter = hooks.__enter__

    def refuse_hooks(self: Any) -> Any:
        if type(self) is hooks or not type(self).__module__.startswith("torch."):
            raise CaptureError(
                f"{caller()} sets hooks for saved tensors (saved_tensors_hooks, save_on_cpu), which torch.export drops",
                hint="leave them out: a plan recomputes if memory is short, or, with --pin activations=any, uses the host's memory",
            )
        return enter(self)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(torch.autograd.Function, "apply", classmethod(_apply)))
        patches.enter_context(mock.patch.object(hooks, "__enter__", refuse_hooks))
        patches.enter_context(patch_backward(refuse_backward, engine))
        yield


def refuse_unregistered_tensors(model: nn.Module) -> None:
    """Raise ``CaptureError`` if a module holds a tensor that requires grad and isn't a parameter: nothing would train it. A computed
    tensor in an attribute is refused only when forward reads it, because a hook may recompute it first."""
    for path, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        for name, value in (buffers | vars(module)).items():
            if isinstance(value, torch.Tensor) and value.requires_grad and (value.is_leaf or name in buffers):
                kind = "a buffer" if name in buffers else "a plain attribute"
                raise CaptureError(
                    f"{path + '.' if path else ''}{name} requires a gradient and is {kind}, not a parameter",
                    hint="make it a torch.nn.Parameter if it is to be trained; if it is computed from parameters, compute it in forward",
                )


def refuse_scripts(model: nn.Module) -> None:
    """Raise ``CaptureError`` for TorchScript modules with parameters or buffers, because their compiled code holds other references to
    these tensors. TorchScript without tensors is traced like a function."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and (held := [*module.parameters(), *module.buffers()]):
            name = getattr(module, "original_name", type(module).__name__)
            raise CaptureError(
                f"{path or 'the model'} ({name}) is compiled by TorchScript and has {len(held)} parameters and buffers, which "
                "torch.export cannot trace",
                hint="give the Python module itself, before torch.jit.script or torch.jit.trace; --pin compile=layers compiles layers",
            )


def refuse_optimized_modules(model: nn.Module) -> None:
    """Raise ``CaptureError`` for modules that ``torch.compile`` made: what they run is no longer the model's Python code."""
    opaque = {f"{path}.module": path for path, module in model.named_modules() if isinstance(module, Opaque)}
    for path, module in model.named_modules():
        if is_optimized_module(module):
            original = f"autopar.opaque(module) as {opaque[path]}" if path in opaque else "the module itself"
            raise CaptureError(
                f"{path or 'the model'} is compiled by torch.compile, and a program contains the model's own code",
                hint=f"use {original}, before torch.compile; --pin compile=layers (compile='layers') compiles layers",
            )


def refuse_unregistered(reader: str, tensor: torch.Tensor) -> NoReturn:
    """Raise ``CaptureError`` for ``tensor``; ``reader`` names the code that reads it and begins the message."""
    raise CaptureError(
        f"{reader} {list(tensor.shape)} that requires a gradient and is no parameter of the model: it would never be trained",
        hint="make it a parameter of the model, or call requires_grad_(False) on it if it is not to be trained",
    )


def refuse_nodes(gm: fx.GraphModule) -> None:
    """Raise ``CaptureError`` for autocast that is on, and embeddings that renormalise their weight, or scale or sparsify its gradient."""
    for graph_module in gm.modules():
        for node in graph_module.graph.nodes if isinstance(graph_module, fx.GraphModule) else ():
            if getattr(node.target, "__name__", "") == "wrap_with_autocast" and node.args[2] is not False:
                raise NotTraceableError(
                    "the model switches torch.autocast on inside forward; its casts are decided while running",
                    hint="remove the autocast block, and choose the precision of the plan instead: precision='bfloat16'",
                    paths=tuple(path for path, _, _ in stack(node)),
                )
            if op_name(node) == "aten.embedding_renorm_":
                raise CaptureError(
                    f"an embedding with max_norm changes its own weight in forward\n{source_line(node)}",
                    hint="leave max_norm out and scale the rows that were looked up: F.normalize(embedding(ids), dim=-1) * norm",
                )
            if facts(node).looks_up:
                _refuse_lookup(node)


def _refuse_lookup(node: fx.Node) -> None:
    options = arguments(node)
    if options["scale_grad_by_freq"]:
        raise CaptureError(
            f"an embedding with scale_grad_by_freq divides gradients by the counts of the ids in the full batch\n{source_line(node)}",
            hint="leave scale_grad_by_freq out, and weight the loss by the ids' counts instead",
        )
    if options["sparse"]:
        raise CaptureError(
            f"an embedding with sparse=True has a sparse gradient, and a program's gradients are dense\n{source_line(node)}",
            hint="pass sparse=False: the values are the same, and dense optimizers accept them",
        )


def _apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``autograd.Function.apply`` during export, because torch.export keeps a function's forward and loses its backward."""
    if function is CheckpointFunction:  # the derivative of its forward is right; the plan decides on recomputation
        run, _, *inputs = args
        return run(*inputs)
    if function.__module__.partition(".")[0] == "torch":
        return apply_of_torch(function, *args, **kwargs)
    if (result := applied(function, *args, **kwargs)) is not None:
        return result
    raise NotTraceableError(
        f"{caller()} calls the autograd.Function {function.__name__}: torch.export traces its forward and drops its backward",
        hint=OP_HINT,
        function=function,
    )


def refuse_backward(name: str) -> NoReturn:
    """Raise ``NotTraceableError``, because forward computes gradients or transforms a function; ``name`` describes the user's call."""
    raise NotTraceableError(
        f"{caller()} computes derivatives or transforms a function inside forward ({name}), which cannot be traced",
        hint=OPAQUE_HINT,
    )


def caller() -> str:
    """Return the file, line and text of the innermost frame of the user's code."""
    skipped = (*NOT_USER_CODE, "<")
    frames = [f for f in traceback.extract_stack()[:-1] if not f.filename.endswith("contextlib.py")]
    frame = next((f for f in reversed(frames) if not f.filename.startswith(skipped)), frames[-1])
    return f"{frame.filename}:{frame.lineno} `{frame.line}`"
