"""Turns a module that can't be traced into an opaque op, if every rank can run the module and get the same result.

Export fails inside a module if its control flow or a shape depends on the data, if it computes derivatives in forward, or if it calls a
user's ``autograd.Function``. The module becomes one op (``autopar.capture.opaque``), and the model is exported again, if the module takes
and returns tensors with shapes that don't depend on values, draws no random numbers, keeps no state, has only plain attributes, and gives
every trainable parameter a gradient. A copy of the model runs on the batch to observe this; if batch or model has no values, export fails.
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

from autopar.capture.backward import NotTraceableError
from autopar.capture.functions import VALUE_CHANGES
from autopar.capture.opaque import Opaque, Shapes, call, described, opaque_note, register, shapes, without_values
from autopar.capture.state import describe, equal, state
from autopar.capture.storage import copied, identity
from autopar.errors import OPAQUE_HINT, CaptureError
from autopar.program.opaque import tensors_in

_PLAIN = (bool, int, float, str, type(None))


@dataclass(slots=True)
class _Calls:
    """Observed calls of a module. ``results`` maps operand shapes to a result on meta; ``replicable``: the module may become opaque."""

    results: dict[Shapes, Any] = field(default_factory=dict)
    replicable: bool = True


def install_opaque_ops(opaque_ops: dict[str, str], fake: nn.Module) -> None:
    """Make submodules of ``fake`` call their opaque ops. ``opaque_ops`` maps the submodules' paths to op names."""
    for path, name in opaque_ops.items():
        module = fake.get_submodule(path)
        vars(module)["forward"] = functools.partial(_call, name, module, module.forward)


def _call(name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    tensors = _tensors(forward, args, kwargs)
    if tensors is None:
        raise CaptureError(
            f"{type(module).__name__}, which is opaque, is called with other arguments than on the batch",
            OPAQUE_HINT,
        )
    return call(name, module, *tensors)


def _tensors(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor] | None:
    """Return the tensor arguments of a call; ``None`` unless they are the first arguments (at least one), and all others are positional
    and have plain default values."""
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


def find_opaque(
    error: NotTraceableError, model: nn.Module, opaque_ops: dict[str, str], run: Callable[[nn.Module], object]
) -> tuple[dict[str, str], str]:
    """Return ``opaque_ops`` plus the innermost module around ``error`` that may become opaque and, unless it is torch's own, the others of
    its class that may; and a note.

    ``run`` runs a copy of the model on the batch's values. Raises ``error`` if no module around it may become opaque.
    """
    inside = [path for path in reversed(error.paths) if path and path not in opaque_ops]
    tensors = [*model.parameters(), *model.buffers()]
    if not inside or any(tensor.is_meta for tensor in tensors):
        raise error
    by_path = dict(model.named_modules())
    kinds = {type(by_path[path]) for path in inside}
    candidates = [path for path, module in by_path.items() if path and type(module) in kinds and _is_plain_data(module)]
    calls = _observe_calls(model, candidates, run)
    for path in inside:
        kind = type(by_path[path])
        alike = [p for p in candidates if type(by_path[p]) is kind and p not in opaque_ops]
        if kind.__module__.startswith("torch."):  # two modules of a generic class may have little in common
            alike = [path]
        alike = [p for p in alike if p in calls and calls[p].replicable and calls[p].results]
        if path in alike:
            note = opaque_note(f"{alike[0]} ({kind.__name__})", error.message.splitlines()[0], len(alike) - 1)
            return opaque_ops | _register_ops({p: by_path[p] for p in alike}, calls), note
    raise error


def _is_plain_data(module: nn.Module) -> bool:
    """Return whether the class and plain attributes suffice to create an equal module, and no submodule is opaque."""
    return all(describe(each) is not None and not isinstance(each, Opaque) for each in module.modules())


def _register_ops(modules: dict[str, nn.Module], calls: dict[str, _Calls]) -> dict[str, str]:
    """Register an op for each module, and return the op names by path. Modules that differ only in their tensors' values share an op."""
    made: list[tuple[nn.Module, dict[Shapes, Any], str]] = []
    found = {}
    for path, module in modules.items():
        known = next((entry for entry in made if _same_but_values(entry[0], module)), None)
        if known is None:
            results: dict[Shapes, Any] = {}
            known = module, results, register(module, functools.partial(_meta_result, results))
            made.append(known)
        known[1].update(calls[path].results)
        found[path] = known[2]
    return found


def _meta_result(results: dict[Shapes, Any], *inputs: Tensor) -> Any:
    return results[shapes(inputs)]


def _same_but_values(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = list(one.named_modules(remove_duplicate=False)), list(other.named_modules(remove_duplicate=False))
    if [(path, type(m)) for path, m in ours] != [(path, type(m)) for path, m in theirs] or _ties(one) != _ties(other):
        return False
    return all(equal(describe(a), describe(b)) for (_, a), (_, b) in zip(ours, theirs, strict=True))


def _ties(module: nn.Module) -> list[tuple[Any, ...]]:
    """Return for every tensor name: the name, the tensor's first name, its shape, its dtype, and whether it is trained."""
    first: dict[Any, str] = {}
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return [(name, first.setdefault(identity(t), name), t.shape, t.dtype, t.requires_grad) for name, t in tensors]


def _observe_calls(model: nn.Module, paths: list[str], run: Callable[[nn.Module], object]) -> dict[str, _Calls]:
    """Return the observed calls of the modules at ``paths`` while ``run`` runs a copy of the model; an empty dict if ``run`` fails."""
    (copy_of_model,) = copied([model])
    calls = {path: _Calls() for path in paths}
    with torch.random.fork_rng(devices=[]):
        for path in paths:
            module = copy_of_model.get_submodule(path)
            vars(module)["forward"] = functools.partial(_observe, module, module.forward, calls[path])
        try:
            run(copy_of_model)
        except Exception:  # the model itself fails, and export reports where
            return {}
    return calls


def _observe(module: nn.Module, forward: Callable[..., Any], calls: _Calls, *args: Any, **kwargs: Any) -> Any:
    held = [*module.parameters(), *module.buffers(), *tensors_in((args, kwargs))]
    before = [t._version for t in held], state(module), torch.get_rng_state()
    result = forward(*args, **kwargs)
    after = [t._version for t in held], state(module), torch.get_rng_state()
    tensors = _tensors(forward, args, kwargs)
    calls.replicable &= tensors is not None
    calls.replicable &= before[0] == after[0] and equal(before[1], after[1]) and torch.equal(before[2], after[2])
    if calls.replicable:
        try:
            found = without_values(result, type(module).__name__)
            calls.replicable = described(calls.results.setdefault(shapes(tensors or ()), found)) == described(found)
        except CaptureError:
            calls.replicable = False
        calls.replicable &= _all_get_gradients(module, result)
    for change in VALUE_CHANGES if calls.replicable else ():
        try:
            again = forward(*(change(tensor.detach()) for tensor in tensors or ()))
        except Exception:  # the changed values may be invalid; a program checks shapes at run time
            continue
        calls.replicable &= described(again) == described(result) and torch.equal(before[2], torch.get_rng_state())
        calls.replicable &= _all_get_gradients(module, again)
    return result


def _all_get_gradients(module: nn.Module, result: Any) -> bool:
    """Return whether every trainable parameter of the module gets a gradient from ``result``. An expert that no token chose gets none in
    eager PyTorch, and the optimizer skips it; a program may give it a zero gradient, with which the optimizer would update it."""
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
    """Return the paths of the submodules of ``module`` with a method in the traceback, outermost first."""
    by_attributes = {id(vars(each)): path for path, each in module.named_modules()}
    found: dict[str, None] = {}
    while traceback is not None:
        caller = traceback.tb_frame.f_locals.get("self")  # a module, or torch's proxy of one with the same attributes
        path = by_attributes.get(id(vars(caller))) if isinstance(caller, nn.Module) else None
        if path:
            found[path] = None
        traceback = traceback.tb_next
    return tuple(found)
