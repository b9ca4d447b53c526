"""Finds the parameters that get a gradient: those that autograd reaches from the loss.

``gradients_pass`` marks every value that depends on a parameter, even through an argmax, a comparison or a ``detach``, which block
gradients. If the loss depends on a parameter only through such ops, eager PyTorch leaves ``grad`` at ``None``, and optimizers skip the
parameter, weight decay included. A zero gradient (of ``floor``, of a dead ReLU) counts as a gradient.

To find out whether a gradient flows from an op's result to an operand, the op runs on meta tensors.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.ops.meta import meta
from autopar.ops.operands import args_of, val
from autopar.torch_private import overload_name
from passes.clean.nodes import described, gradients_pass, like, note

_MAX_NAMES = 5
_FLOW_CACHE: dict[Any, tuple[bool, ...]] = {}
_CACHE_LIMIT = 4096


def freeze_unreached(gm: fx.GraphModule, loss: fx.Node) -> None:
    """Mark parameters that get no gradient as not trainable, and update ``meta["gradient"]`` of all nodes.

    A parameter that was sliced gets a gradient if one of its slices does. One without elements gets none.
    """
    reached = _reached(gm, loss)
    parameters = [node for node in gm.graph.nodes if node.op == "placeholder" and "parameter" in meta(node)]
    used = {meta(node)["parameter"].original for node in parameters if node in reached and val(node).numel()}
    frozen = [node for node in parameters if meta(node)["gradient"] and meta(node)["parameter"].original not in used]
    for node in frozen:
        meta(node)["parameter"] = dataclasses.replace(meta(node)["parameter"], trainable=False)
    if frozen:
        found = (meta(node)["parameter"] for node in frozen)
        names = sorted({name for parameter in found for name in parameter.originals})
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        shown = ", ".join(names[:_MAX_NAMES]) + more
        note(gm, f"{len(names)} parameters get no gradient from the loss, and are not trained: {shown}")
        gradients_pass(gm)


def _reached(gm: fx.GraphModule, loss: fx.Node) -> set[fx.Node]:
    """Return the nodes that a gradient of the loss reaches."""
    reached: dict[fx.Node, set[int]] = {loss: {0}}  # node -> indices of its results that have a gradient
    for node in reversed(gm.graph.nodes):
        if node not in reached or node.op != "call_function":
            continue
        if node.target is operator.getitem:
            source, index = args_of(node)[:2]
            if meta(source)["gradient"]:
                reached.setdefault(source, set()).add(index)
            continue
        for operand in node.all_input_nodes:
            flows = _flows(node, operand) if meta(operand)["gradient"] else None
            if flows is not None and (not flows or any(flows[index] for index in reached[node])):
                reached.setdefault(operand, set()).add(0)
    return set(reached)


def _flows(node: fx.Node, operand: fx.Node) -> tuple[bool, ...]:
    """Return for each result of the node whether its gradient flows to the operand; ``()`` if unknown (Python functions, autopar's ops,
    ops that don't run on meta). All results then count."""
    name = overload_name(node.target)
    if name is None or name.startswith("autopar::"):
        return ()
    marked = map_arg((node.args, node.kwargs), lambda n: (n is operand, described(n)))
    key = (node.target, described(marked))
    if key not in _FLOW_CACHE:
        if len(_FLOW_CACHE) >= _CACHE_LIMIT:
            _FLOW_CACHE.clear()
        _FLOW_CACHE[key] = _probe_autograd(node, operand)
    return _FLOW_CACHE[key]


def _probe_autograd(node: fx.Node, operand: fx.Node) -> tuple[bool, ...]:
    probe = like(val(operand)).requires_grad_()
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: probe if n is operand else meta(n)["val"])
    assert callable(node.target)
    try:
        with torch.enable_grad():
            result = node.target(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return ()  # an op that does not run on meta
    results = result if isinstance(result, tuple | list) else (result,)
    return tuple(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in results)
