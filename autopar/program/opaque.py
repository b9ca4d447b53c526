"""Runs opaque modules (``autopar.opaque``): each is one op of the graph, which every rank runs unchanged on the same inputs.

``runtime/opaque.json`` describes each op's module and its submodules: class, plain attributes, children, and which operand of the op each
parameter and buffer is. The modules are created without calling their constructors.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from spmd_types import I, R, SpmdTypeError
from torch import Tensor, nn
from torch.func import functional_call

from .spmd import spmd

OPAQUE = "runtime/opaque.json"
"""The file in a program's folder that describes the modules."""


class AutogradFunctionModule(nn.Module):
    """An ``autograd.Function`` as a module. ``template`` has ``None`` for each tensor argument, and ``[value]`` for any other one."""

    def __init__(self, function: Any, template: list[list[Any] | None]) -> None:
        super().__init__()
        self.function, self.template = function, template

    def forward(self, *inputs: Tensor) -> Any:
        tensors = iter(inputs)
        return self.function.apply(*(next(tensors) if place is None else place[0] for place in self.template))


class TorchOp(nn.Module):
    """An op of torch as a module. ``name`` includes the overload (``"istft.default"``); ``template`` is as for ``AutogradFunctionModule``,
    by argument name."""

    def __init__(self, name: str, template: dict[str, list[Any] | None]) -> None:
        super().__init__()
        self.name, self.template = name, template

    def forward(self, *inputs: Tensor) -> Any:
        tensors = iter(inputs)
        packet, _, overload = self.name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload)
        return op(**{key: next(tensors) if place is None else place[0] for key, place in self.template.items()})


def tensors_in(result: Any) -> list[Tensor]:
    """Return the tensors of a module's result, in order: the result itself, or those in nested tuples, lists and dicts."""
    if isinstance(result, Tensor):
        return [result]
    items = result.values() if isinstance(result, dict) else result if isinstance(result, tuple | list) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def call(
    op: str, inputs: Sequence[Tensor], tensors: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Run ``call_all`` for a module whose result is one tensor of ``shape`` and ``dtype``, and return this tensor."""
    return call_all(op, inputs, tensors, [(shape, dtype)])[0]


def call_all(
    op: str, inputs: Sequence[Tensor], tensors: Sequence[Tensor], results: Sequence[tuple[Sequence[int], torch.dtype]]
) -> list[Tensor]:
    """Run the op's module on ``inputs``, with ``tensors`` as its parameters and then its buffers; return the tensors of its result.

    The type checker refuses operands that are S or P; operands with gradients must all be I or all be R, and the results get their type.
    On the meta device the module does not run, because its control flow may need values. Raises ``ValueError`` if the shapes and dtypes
    of its result aren't ``results``, or if the module changes ``tensors`` in place or draws random numbers.
    """
    types = _common_types(op, [*inputs, *tensors]) if spmd.is_type_checking() else {}
    expected = [(tuple(shape), dtype) for shape, dtype in results]
    with spmd.no_typecheck():
        if inputs[0].is_meta:
            gradient = any(t.requires_grad for t in (*inputs, *tensors))
            found = [
                torch.empty(
                    shape,
                    dtype=dtype,
                    device="meta",
                    requires_grad=gradient and (dtype.is_floating_point or dtype.is_complex),
                )
                for shape, dtype in expected
            ]
        else:
            module, names = _module(op, Path(__file__).parent.parent / OPAQUE)
            versions, rng_states = [t._version for t in tensors], _rng_states(inputs[0].device)
            result = functional_call(module, {name: tensors[i] for name, i in names.items()}, tuple(inputs))
            found = tensors_in(result)
            if (actual := [(tuple(t.shape), t.dtype) for t in found]) != expected:
                raise ValueError(f"{op} returned {_text(actual)}, not {_text(expected)}")
            if versions != [t._version for t in tensors]:
                raise ValueError(f"{op} modified its parameters or buffers in place")
            if not all(map(torch.equal, rng_states, _rng_states(inputs[0].device))):
                raise ValueError(f"{op} drew random numbers, which differ between ranks and between runs")
            # a type belongs to a tensor object, and a result may be an operand
            found = [t.view_as(t) for t in found]
    if spmd.is_type_checking():
        for tensor in found:
            spmd.assert_type(tensor, types)
    return found


def _text(tensors: Sequence[tuple[Sequence[int], torch.dtype]]) -> str:
    return ", ".join(f"{tuple(shape)} {dtype}" for shape, dtype in tensors)


def _rng_states(device: torch.device) -> list[Tensor]:
    """Return the states of the random generators that a module may use."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _common_types(op: str, tensors: Sequence[Tensor]) -> dict[Any, Any]:
    """Return the types of the operands with gradients (of all, if none has one); ``SpmdTypeError`` if they differ, or one is S or P."""
    differentiable = [t for t in tensors if t.requires_grad] or list(tensors)
    found = [spmd.get_local_type(t) for t in differentiable]
    for t in tensors:
        if any(kind is not I and kind is not R for kind in spmd.get_local_type(t).values()):
            raise SpmdTypeError(f"{op}: an operand is sharded or partial: {spmd.get_local_type(t)}")
    if any(types != found[0] for types in found):
        raise SpmdTypeError(f"{op}: operands are neither all I nor all R on an axis: {found}")
    return dict(found[0])


@cache
def _module(op: str, file: Path) -> tuple[nn.Module, dict[str, int]]:
    """Return the op's module, with meta tensors, and for each parameter and buffer name its index in ``tensors`` of ``call_all``."""
    records = json.loads(file.read_text())[op]
    modules: list[nn.Module] = []
    for record in records:
        kind = _class_named(record["class"])
        module = kind.__new__(kind)
        nn.Module.__init__(module)
        module.__dict__.update({name: _value(text) for name, text in record["attributes"].items()})
        for name, tensor in record["parameters"].items():
            parameter = None if tensor is None else nn.Parameter(_placeholder(tensor), requires_grad=False)
            module.register_parameter(name, parameter)
        for name, tensor in record["buffers"].items():
            module.register_buffer(name, None if tensor is None else _placeholder(tensor), persistent=False)
        modules.append(module)
    for module, record in zip(modules, records, strict=True):
        for name, index in record["children"].items():
            module.add_module(name, None if index is None else modules[index])
    names = {}
    for path, module in modules[0].named_modules():
        record = records[modules.index(module)]
        for name, tensor in (*record["parameters"].items(), *record["buffers"].items()):
            if tensor is not None:
                names[f"{path}.{name}" if path else name] = tensor["operand"]
    return modules[0], names


def _class_named(text: str) -> Any:
    """Return the class named by ``"package.module:Outer.Inner"``."""
    name, _, path = text.partition(":")
    if not name:  # a class of this file
        return globals()[path]
    try:
        found: Any = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the program runs {text} as it is, and {error.name} cannot be imported: put its folder on PYTHONPATH",
            name=error.name,
        ) from error
    for part in path.split("."):
        found = getattr(found, part)
    assert isinstance(found, type), text
    return found


def _placeholder(tensor: dict[str, Any]) -> Tensor:
    return torch.empty(tensor["shape"], dtype=getattr(torch, tensor["dtype"]), device="meta")


def _value(text: Any) -> Any:
    """Return an attribute from its JSON form. A value that JSON cannot express is an object with one key that names its type."""
    if isinstance(text, list):
        return [_value(item) for item in text]
    if not isinstance(text, dict):
        return text
    ((kind, inner),) = text.items()
    if kind == "dtype":
        return getattr(torch, inner)
    if kind == "class":
        return _class_named(inner)
    if kind == "dict":
        return {_value(key): _value(value) for key, value in inner}
    items = [_value(item) for item in inner]
    return torch.Size(items) if kind == "size" else tuple(items)
