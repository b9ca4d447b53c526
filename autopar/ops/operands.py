"""The tensor operands of a graph node, its arguments by name, and the name of its op."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx

from autopar.torch_private import overload_name, overload_schema

_TORCHS_OWN = frozenset(("aten", "prim", "prims", "autopar", "profiler", "higher_order"))


def is_tensor(node: fx.Node) -> bool:
    """Whether the node's value is a tensor, or a tuple or list that holds one."""
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        return any(isinstance(item, torch.Tensor) for item in value)
    return isinstance(value, torch.Tensor)


def operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """The tensor operands in flattened order of the arguments, then of the keyword arguments, with duplicates.

    ``mul(x, x)`` has two. Unlike ``node.all_input_nodes`` this aligns with the operands of the op's rule.
    """
    found: list[fx.Node] = []

    def visit(item: fx.Node) -> fx.Node:
        if is_tensor(item):
            found.append(item)
        return item

    fx.map_arg(node.args, visit)
    fx.map_arg(node.kwargs, visit)
    return tuple(found)


def op_name(target: Any) -> str:
    """``"aten.linear"`` for every overload of ``aten::linear``; for a Python function its module's last name and its own,
    as in ``"kernels.cross_entropy_sum"`` and ``"_operator.getitem"``."""
    name = overload_name(target)
    if name is not None:
        return name.partition(".")[0].replace("::", ".")
    return f"{getattr(target, '__module__', '').rpartition('.')[2]}.{getattr(target, '__name__', target)}"


def is_custom(target: Any) -> bool:
    """Whether ``target`` is an operator that is neither torch's nor autopar's."""
    return overload_name(target) is not None and op_name(target).partition(".")[0] not in _TORCHS_OWN


def aten_names(text: str) -> tuple[str, ...]:
    """The names of ATen ops given by their own, in one text: ``"aten.view"`` and so on."""
    return tuple(f"aten.{name}" for name in text.split())


def arguments(node: fx.Node) -> dict[str, Any]:
    """The node's arguments by their names in the op's schema, in its order, defaults filled in.

    A Python function without a readable signature gives its positional arguments, named ``"0"``, ``"1"``, ...
    """
    schema = overload_schema(node.target)
    if schema is not None:
        named = dict(schema)
        named.update(zip(named, node.args, strict=False))
        named.update(node.kwargs)
        return named
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return {str(i): arg for i, arg in enumerate(node.args)} | dict(node.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def shape_of(node: fx.Node, index: int = 0) -> tuple[int, ...]:
    """The global shape of the node's value; of its ``index``-th tensor where the value is a tuple."""
    value = node.meta["val"]
    if isinstance(value, tuple | list):
        value = value[index]
    return tuple(int(size) for size in value.shape)
