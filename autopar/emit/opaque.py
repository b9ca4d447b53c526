"""Describes a graph's opaque modules as data, from which the program rebuilds them: ``runtime/opaque.json``.

Classes are described by name, without pickle. An attribute that isn't plain data raises an error that names it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError, ProgramError
from autopar.graph import Graph
from autopar.precision import name_of
from autopar.program.opaque import AutogradFunctionModule, TorchOp

# modules of the program's folder, which shadow a user's modules of the same name
RESERVED = frozenset({"model", "train", "runtime"})

_FUNCTION = f":{AutogradFunctionModule.__qualname__}"
_RUNTIME_CLASSES = {AutogradFunctionModule: _FUNCTION, TorchOp: f":{TorchOp.__qualname__}"}
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # of every module; all but ``training`` are described separately


def describe_opaque(graph: Graph) -> dict[str, list[dict[str, Any]]]:
    """Return for every opaque op the records of its module and submodules, outermost first.

    Raises ``ProgramError`` for a class that can't be imported by name, or an attribute that isn't plain data.
    """
    return {op: _describe(module) for op, module in graph.opaque.items()}


def imported_modules(descriptions: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the names of the Python modules that define the described classes, except torch's."""
    everything = [record for records in descriptions.values() for record in records]
    classes = [record["class"] for record in everything if record["class"] not in _RUNTIME_CLASSES.values()]
    classes += [record["attributes"]["function"]["class"] for record in everything if record["class"] == _FUNCTION]
    names = {name.partition(":")[0] for name in classes}
    return sorted(name for name in names if name.partition(".")[0] != "torch")


def _describe(module: nn.Module) -> list[dict[str, Any]]:
    tensors: Sequence[Tensor] = [*module.parameters(), *module.buffers()]
    operands = {id(tensor): i for i, tensor in enumerate(tensors)}
    modules = list(module.named_modules())
    indices = {id(each): i for i, (_, each) in enumerate(modules)}

    def tensor(value: Tensor | None) -> dict[str, Any] | None:
        if value is None:
            return None
        return {"operand": operands[id(value)], "shape": list(value.shape), "dtype": name_of(value.dtype)}

    records = []
    for path, each in modules:
        where = f"{type(module).__name__}.{path}" if path else type(module).__name__
        records.append(
            {
                "class": _class(each, where),
                "attributes": _attributes(each, where),
                "parameters": {name: tensor(value) for name, value in each._parameters.items()},
                "buffers": {name: tensor(value) for name, value in each._buffers.items()},
                "children": {
                    name: None if value is None else indices[id(value)] for name, value in each._modules.items()
                },
            }
        )
    return records


def _class(module: nn.Module, where: str) -> str:
    """Return the ``module:Class`` of an opaque module; for an ``autograd.Function`` or an op, that of the runtime's class that calls it."""
    return _RUNTIME_CLASSES.get(type(module)) or _named(type(module), where)


def _named(cls: type, where: str) -> str:
    name, path = cls.__module__, cls.__qualname__
    if name == "__main__" or "<locals>" in path:
        place = "the script itself" if name == "__main__" else "a function"
        raise _refusal(where, f"its class {path} is defined in {place}, where the program's processes cannot import it")
    if name.partition(".")[0] in RESERVED:
        raise _refusal(where, f"its class {path} is in a module named {name}, which a file of the program shadows")
    try:
        imported: Any = functools.reduce(getattr, path.split("."), importlib.import_module(name))
    except (ImportError, AttributeError):
        imported = None
    if imported is not cls:
        raise _refusal(where, f"its class cannot be imported as {name}:{path}")
    return f"{name}:{path}"


def _refusal(where: str, why: str) -> AutoparError:
    return ProgramError(
        f"the opaque module {where} cannot be written into a program: {why}",
        f"move the class to a separate Python file, not named {' or '.join(sorted(RESERVED))}, and import it",
    )


def _attributes(module: nn.Module, where: str) -> dict[str, Any]:
    fresh, attributes = nn.Module(), {}
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            continue
        if name in _MODULE_ATTRIBUTES and name != "training":
            if value != vars(fresh)[name]:
                raise _not_plain(where, name, "a hook")
            continue
        attributes[name] = _data(value, where, name)
    return attributes


def _data(value: Any, where: str, name: str) -> Any:
    """Return plain data as JSON, as ``autopar.program.opaque`` reads it; exact types only, since subclasses may have more state."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is torch.dtype:
        return {"dtype": name_of(value)}
    if isinstance(value, type) and issubclass(value, torch.autograd.Function):
        return {"class": _named(value, where)}
    if kind is list:
        return [_data(item, where, name) for item in value]
    if kind is dict:
        return {"dict": [[_data(key, where, name), _data(item, where, name)] for key, item in value.items()]}
    if kind in (tuple, torch.Size):
        return {"tuple" if kind is tuple else "size": [_data(item, where, name) for item in value]}
    raise _not_plain(where, name, f"a {kind.__name__}")


def _not_plain(where: str, name: str, what: str) -> AutoparError:
    return ProgramError(
        f"the opaque module {where} cannot be written into a program: its attribute {name} is {what}",
        "keep numbers, text, dtypes and lists, tuples or dicts of them as attributes; register tensors as buffers and modules as "
        "children, and create anything else in forward",
    )
