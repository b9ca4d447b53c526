"""Modules that capture keeps whole automatically: a graph cannot represent such a module, but every rank can execute it in the same way.

Export fails inside a module: its control flow or a shape depends on the data, it computes derivatives in forward, or it calls a
user's ``autograd.Function``. If the module takes tensors and returns tensors, of shapes that do not depend on
their values, draws no random numbers and keeps no state, it becomes one op (``autopar.capture.opaque``), and the model is exported
again. The shape of its result is found by running a copy of the model on the batch: without values the module stays refused.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.backward import OPAQUE_HINT, KeptWholeError
from autopar.capture.functions import OTHERS
from autopar.capture.opaque import Opaque, Shapes, call, described, register, shapes, without_values
from autopar.capture.state import describe, equal, state
from autopar.capture.storage import copied, identity
from autopar.errors import CaptureError
from autopar.program.opaque import tensors_in

_PLAIN = (bool, int, float, str, type(None))


@dataclass(slots=True)
class _Calls:
    """The common facts of a module's calls: the result's shape by the operands' shapes, and whether the module may be kept whole."""

    given: dict[Shapes, Any] = field(default_factory=dict)
    sound: bool = True


def keep(kept: dict[str, str], twin: nn.Module) -> None:
    """Replace each module of ``twin`` at a path in ``kept`` by the op whose name ``kept`` gives."""
    for path, name in kept.items():
        module = twin.get_submodule(path)
        vars(module)["forward"] = functools.partial(_call, name, module, module.forward)


def _call(name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    tensors = _tensors(forward, args, kwargs)
    if tensors is None:
        raise CaptureError(
            f"{type(module).__name__}, which is kept whole, is called with other arguments than on the batch",
            OPAQUE_HINT,
        )
    return call(name, module, *tensors)


def _tensors(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor] | None:
    """The tensors of a call, whether by position or by keyword; ``None`` unless they are the first arguments, and all others have their
    defaults."""
    signature = inspect.signature(forward)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    values, defaults = list(bound.args), [parameter.default for parameter in signature.parameters.values()]
    count = next((k for k, value in enumerate(values) if not isinstance(value, Tensor)), len(values))
    plain = all(
        type(v) in _PLAIN and type(v) is type(d) and v == d
        for v, d in zip(values[count:], defaults[count:], strict=False)
    )
    return values[:count] if count and plain and not bound.kwargs else None


def find(
    error: KeptWholeError, model: nn.Module, kept: dict[str, str], run: Callable[[nn.Module], object]
) -> tuple[dict[str, str], str]:
    """``kept``, extended by the innermost module around the error that may be kept whole, and all modules like it; and a note that says
    so.

    ``run`` runs a copy of the model on values. Raises ``error`` if there is no such module.
    """
    inside = [path for path in reversed(error.paths) if path and path not in kept]
    tensors = [*model.parameters(), *model.buffers()]
    if not inside or any(tensor.is_meta for tensor in tensors):
        raise error
    by_path = dict(model.named_modules())
    kinds = {type(by_path[path]) for path in inside}
    candidates = [path for path, module in by_path.items() if path and type(module) in kinds and _is_data(module)]
    calls = _observed(model, candidates, run)
    for path in inside:
        kind = type(by_path[path])
        alike = [p for p in candidates if type(by_path[p]) is kind and p not in kept]
        if kind.__module__.startswith("torch."):  # others of a container's or a layer's class do something else
            alike = [path]
        alike = [p for p in alike if p in calls and calls[p].sound and calls[p].given]
        if path in alike:
            found = dict(kept)
            found |= _ops({p: by_path[p] for p in alike}, calls)
            return found, _note(alike, by_path[path], error)
    raise error


def _note(paths: list[str], module: nn.Module, error: KeptWholeError) -> str:
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return (
        f"{paths[0]} ({type(module).__name__}){more} kept whole, every rank executes it alike: "
        f"{error.message.splitlines()[0]}"
    )


def _is_data(module: nn.Module) -> bool:
    """Whether the class and the module's attributes suffice to create an equal module, and no module inside is kept whole already."""
    return all(describe(each) is not None and not isinstance(each, Opaque) for each in module.modules())


def _ops(modules: dict[str, nn.Module], calls: dict[str, _Calls]) -> dict[str, str]:
    """An op for each module; modules that differ only in their tensors' values share one."""
    made: list[tuple[nn.Module, dict[Shapes, Any], str]] = []
    found = {}
    for path, module in modules.items():
        known = next((entry for entry in made if _alike(entry[0], module)), None)
        if known is None:
            given: dict[Shapes, Any] = {}
            known = module, given, register(module, functools.partial(_blank, given))
            made.append(known)
        known[1].update(calls[path].given)
        found[path] = known[2]
    return found


def _blank(given: dict[Shapes, Any], *inputs: Tensor) -> Any:
    return given[shapes(inputs)]


def _alike(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = list(one.named_modules(remove_duplicate=False)), list(other.named_modules(remove_duplicate=False))
    if [(path, type(m)) for path, m in ours] != [(path, type(m)) for path, m in theirs] or _ties(one) != _ties(other):
        return False
    return all(equal(describe(a), describe(b)) for (_, a), (_, b) in zip(ours, theirs, strict=True))


def _ties(module: nn.Module) -> list[tuple[Any, ...]]:
    """Every tensor by its name: the first of its names, its shape, dtype and whether it is trained."""
    first: dict[Any, str] = {}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return [(name, first.setdefault(identity(t), name), t.shape, t.dtype, t.requires_grad) for name, t in tensors]


def _observed(model: nn.Module, paths: list[str], run: Callable[[nn.Module], object]) -> dict[str, _Calls]:
    """The observed calls of the modules at ``paths``, in a run of a copy of the model; empty if the copy does not run."""
    (twin,) = copied([model])
    calls = {path: _Calls() for path in paths}
    with torch.random.fork_rng(devices=[]):
        for path in paths:
            module = twin.get_submodule(path)
            vars(module)["forward"] = functools.partial(_observe, module, module.forward, calls[path])
        try:
            run(twin)
        except Exception:  # the model fails by itself, too: the error of export says where
            return {}
    return calls


def _observe(module: nn.Module, forward: Callable[..., Any], calls: _Calls, *args: Any, **kwargs: Any) -> Any:
    held = [*module.parameters(), *module.buffers()]
    before = [t._version for t in held], state(module), torch.get_rng_state()
    result = forward(*args, **kwargs)
    after = [t._version for t in held], state(module), torch.get_rng_state()
    tensors = _tensors(forward, args, kwargs)
    calls.sound &= tensors is not None
    calls.sound &= before[0] == after[0] and equal(before[1], after[1]) and torch.equal(before[2], after[2])
    if calls.sound:
        try:
            found = without_values(result, type(module).__name__)
            calls.sound = described(calls.given.setdefault(shapes(tensors or ()), found)) == described(found)
        except CaptureError:
            calls.sound = False
        calls.sound &= _reaches_all(module, result)
    for other in OTHERS if calls.sound else ():
        try:
            again = forward(*(other(tensor.detach()) for tensor in tensors or ()))
        except Exception:  # other values may not fit together; a program compares the shape while it runs
            continue
        calls.sound &= described(again) == described(result) and torch.equal(before[2], torch.get_rng_state())
        calls.sound &= _reaches_all(module, again)
    return result


def _reaches_all(module: nn.Module, result: Any) -> bool:
    """Whether every trainable parameter of the module gets a gradient from ``result``. In eager PyTorch an expert that no token chose
    gets no gradient, and the optimizer leaves it alone; in a program, whose ranks see different tokens, it has a gradient."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trainable or not torch.is_grad_enabled():
        return True
    results = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
    if not results:
        return False
    ones = [torch.ones_like(tensor) for tensor in results]
    gradients = torch.autograd.grad(results, trainable, ones, retain_graph=True, allow_unused=True)
    return all(gradient is not None for gradient in gradients)


def paths_of(traceback: TracebackType | None, module: nn.Module) -> tuple[str, ...]:
    """The paths in ``module`` of the modules whose methods a traceback goes through, outermost first."""
    by_attributes = {id(vars(each)): path for path, each in module.named_modules()}
    found: dict[str, None] = {}
    while traceback is not None:
        caller = traceback.tb_frame.f_locals.get(
            "self"
        )  # possibly torch's proxy of a module, which has the module's attributes
        path = by_attributes.get(id(vars(caller))) if isinstance(caller, nn.Module) else None
        if path:
            found[path] = None
        traceback = traceback.tb_next
    return tuple(found)
