"""Functions that the cleaning passes share: they add nodes with the right ``meta["val"]``, and query nodes.

``autopar.ops.meta`` declares the other keys of a node's ``meta``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.flow import carries_gradient
from autopar.ops.meta import graph_meta, meta

aten = torch.ops.aten

# Meta keys that a node keeps when it is replaced: they locate it in the user's model.
ORIGIN = ("nn_module_stack", "stack_trace")


def like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor with ``tensor``'s shape, strides and dtype."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


# Cached results of `evaluate`, keyed by op and described operands: the layers of a deep model repeat them.
_EVALUATED: dict[Any, Any] = {}
_EVALUATED_LIMIT = 4096


def evaluate(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the node's value on the meta device, from its operands' ``meta["val"]``. Random ops draw nothing there.

    A call without tensors is a factory, and gets the meta device as an argument.
    """
    key = (target, described(args), described(kwargs))
    if key not in _EVALUATED:
        if len(_EVALUATED) >= _EVALUATED_LIMIT:
            _EVALUATED.clear()
        _EVALUATED[key] = _evaluate(target, args, kwargs)
    return _EVALUATED[key]


def described(value: Any) -> Any:
    """Return a hashable description of an op's operands: if two are equal, the op's results have equal shapes, strides and dtypes."""
    if isinstance(value, fx.Node):
        value = meta(value)["val"]
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, tuple | list):
        return tuple(described(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, described(item)) for key, item in value.items())
    return (type(value), value)


def _evaluate(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    real_args, real_kwargs = map_arg(args, _plain), map_arg(kwargs, _plain)
    if not any(isinstance(value, torch.Tensor) for value in flat((real_args, list(real_kwargs.values())))):
        real_kwargs = {key: value for key, value in real_kwargs.items() if key != "pin_memory"} | {"device": "meta"}
    with torch.no_grad():
        return target(*real_args, **real_kwargs)


def _plain(node: fx.Node) -> Any:
    """Return the node's value as a meta tensor: in a region that was exported separately it is still a fake tensor on a device."""
    value = meta(node)["val"]
    return like(value) if isinstance(value, torch.Tensor) and type(value) is not torch.Tensor else value


def flat(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested tuples and lists."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from flat(item)
    else:
        yield value


def add(
    anchor: fx.Node,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    origin: fx.Node | None = None,
) -> fx.Node:
    """Add a call before ``anchor``, with its ``meta["val"]``, and return it; its position in the model is that of ``origin`` (default:
    ``anchor``)."""
    with anchor.graph.inserting_before(anchor):
        node = anchor.graph.call_function(target, args, kwargs or {})
    meta(node)["val"] = evaluate(target, args, node.kwargs)
    copy_origin(origin or anchor, node)
    return node


def cast_like(node: fx.Node, new: fx.Node) -> fx.Node:
    """Return ``new`` in the dtype of ``node``, which it replaces."""
    dtype = meta(node)["val"].dtype
    return new if meta(new)["val"].dtype == dtype else add(node, aten.to.dtype, (new, dtype))


def copy_origin(source: fx.Node, target: fx.Node) -> None:
    target.meta.update({key: value for key, value in source.meta.items() if key in ORIGIN})


def module_path(node: fx.Node) -> str:
    """Return the dotted name of the user's module that the node comes from; empty for the model itself."""
    modules = list((meta(node).get("nn_module_stack") or {}).values())
    return str(modules[-1][0]).removeprefix("module").lstrip(".").split("@")[0] if modules else ""


def replace(node: fx.Node, new: fx.Node) -> None:
    """Replace ``node`` by ``new`` in all its readers, and erase ``node``."""
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def calls(gm: fx.GraphModule, *targets: Callable[..., Any]) -> list[fx.Node]:
    """Return the calls of ``targets`` (without ``targets``: all calls), in order; a list, so that the graph may change during iteration."""
    return [n for n in gm.graph.nodes if n.op == "call_function" and (not targets or n.target in targets)]


def returned(gm: fx.GraphModule) -> list[Any]:
    """Return the values that the graph returns, in order."""
    results: Any = gm.graph.output_node().args[0]
    return list(results) if isinstance(results, tuple | list) else [results]


def ancestors(nodes: Iterable[fx.Node], among: Callable[[fx.Node], bool] = lambda _: True) -> set[fx.Node]:
    """Return ``nodes`` and all nodes that they depend on. The search leaves out a node for which ``among`` is false, and stops there."""
    found, waiting = set[fx.Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found and among(node):
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def note(gm: fx.GraphModule, sentence: str) -> None:
    notes = graph_meta(gm).setdefault("notes", [])
    if sentence not in notes:
        notes.append(sentence)


def gradients_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Set ``meta["gradient"]``: whether a gradient flows through the node, from trainable parameters forward."""
    for node in gm.graph.nodes:
        meta(node)["gradient"] = has_gradient(node, lambda operand: bool(meta(operand)["gradient"]))
    return gm


def has_gradient(node: fx.Node, known: Callable[[fx.Node], bool]) -> bool:
    """Return whether a gradient flows through the node; ``known`` says whether one flows through an operand."""
    if node.op == "placeholder":
        parameter = meta(node).get("parameter")
        return parameter is not None and parameter.trainable
    return node.op == "call_function" and carries_gradient(node, known)
