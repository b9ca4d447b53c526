"""Reads a node's tensor operands, named arguments, shape and dtype."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx

from autopar.ops.meta import meta
from autopar.torch_private import overload_schema


def is_tensor(node: fx.Node) -> bool:
    """Return whether the node's value is a tensor, or a tuple or list that holds one."""
    value = meta(node).get("val")
    if isinstance(value, tuple | list):
        return any(isinstance(item, torch.Tensor) for item in value)
    return isinstance(value, torch.Tensor)


def operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the tensor operands in flattened order of positional, then keyword arguments, with duplicates.

    ``mul(x, x)`` has two. Unlike ``node.all_input_nodes``, this order matches the operands of the op's rule.
    """
    found: list[fx.Node] = []

    def visit(item: fx.Node) -> fx.Node:
        if is_tensor(item):
            found.append(item)
        return item

    fx.map_arg(node.args, visit)
    fx.map_arg(node.kwargs, visit)
    return tuple(found)


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return the node's arguments by name, in the schema's order, with defaults.

    The positional arguments of a Python function without a readable signature are named ``"0"``, ``"1"``, ...
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


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """Return the positional arguments, typed as ``Any`` because fx's type is too wide to use without casts."""
    return node.args


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """Return the argument at position ``index`` or with the keyword ``name``, else ``default``."""
    return args_of(node)[index] if len(node.args) > index else node.kwargs.get(name, default)


def val(node: fx.Node) -> torch.Tensor:
    """Return the node's meta tensor."""
    value = meta(node)["val"]
    assert isinstance(value, torch.Tensor), (node, type(value))
    return value


def first_tensor(node: fx.Node, index: int = 0) -> torch.Tensor:
    """Return the node's meta tensor; the ``index``-th one if the value is a tuple."""
    value = meta(node)["val"]
    found: torch.Tensor = value[index] if isinstance(value, tuple | list) else value
    return found


def shape_of(node: fx.Node, index: int = 0) -> tuple[int, ...]:
    """Return the shape of the node's value; of its ``index``-th tensor if the value is a tuple."""
    return tuple(first_tensor(node, index).shape)


def dtype_of(node: fx.Node) -> torch.dtype:
    """Return the dtype of the node's value, which is one tensor."""
    return val(node).dtype
