"""Inlines the regions that ``torch.export`` keeps as sub-graphs: ``torch.no_grad()`` and ``torch.autocast(enabled=False)``."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.ops.meta import meta
from autopar.ops.operands import args_of
from passes.clean.nodes import add, aten, copy_origin

# The number of arguments before the sub-graph, keyed by the name of the higher-order op
_REGIONS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}


def inline_regions_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace each region by its nodes. Nested regions are inlined, too.

    Values that enter a no-grad region are detached, so that no gradient flows through them.
    """
    while regions := [n for n in gm.graph.nodes if _region(n) is not None]:
        for node in regions:
            _inline(gm, node)
    for name in [name for name, child in gm.named_children() if isinstance(child, fx.GraphModule)]:
        if not any(n.op == "get_attr" and n.target == name for n in gm.graph.nodes):
            delattr(gm, name)
    return gm


def _region(node: fx.Node) -> str | None:
    if node.op != "call_function":
        return None
    name = getattr(node.target, "__name__", "")
    return name if name in _REGIONS else None


def _inline(gm: fx.GraphModule, node: fx.Node) -> None:
    name = _region(node)
    assert name is not None
    head = _REGIONS[name]
    # capture refuses a region that switches autocast on (autopar.capture.backward): its casts are not in the graph
    assert name != "wrap_with_autocast" or args_of(node)[2] is False, node
    no_grad = name == "wrap_with_set_grad_enabled" and args_of(node)[0] is False
    body_node, operands = args_of(node)[head], list(args_of(node)[head + 1 :])
    assert isinstance(body_node, fx.Node)
    body = gm.get_submodule(str(body_node.target))
    assert isinstance(body, fx.GraphModule)
    results = _copy(gm, body, node, operands, no_grad)
    for user in list(node.users):
        assert user.target is operator.getitem, user
        user.replace_all_uses_with(results[args_of(user)[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(node)
    if not body_node.users:
        gm.graph.erase_node(body_node)


def _copy(gm: fx.GraphModule, body: fx.GraphModule, anchor: fx.Node, operands: list[Any], no_grad: bool) -> list[Any]:
    """Copy ``body``'s nodes before ``anchor``; return the values of its outputs."""
    env: dict[fx.Node, Any] = {}
    placeholders = iter(operands)
    for inner in body.graph.nodes:
        if inner.op == "placeholder":
            outer = next(placeholders)
            floating = isinstance(outer, fx.Node) and _floating(outer)
            env[inner] = outer
            if no_grad and floating:
                env[inner] = add(anchor, aten.detach.default, (outer,))
                meta(env[inner])["no_grad"] = True
        elif inner.op == "output":
            result = map_arg(inner.args[0], lambda n: env[n])
            return list(result) if isinstance(result, tuple | list) else [result]
        else:
            if inner.op == "get_attr":
                _adopt(gm, body, inner)
            with gm.graph.inserting_before(anchor):
                env[inner] = gm.graph.node_copy(inner, lambda n: env[n])
            if "nn_module_stack" not in meta(env[inner]):
                copy_origin(anchor, env[inner])
    raise AssertionError("a sub-graph without output")


def _adopt(gm: fx.GraphModule, body: fx.GraphModule, inner: fx.Node) -> None:
    """Store the object that an inner ``get_attr`` reads in the outer module, under a unique name."""
    value = getattr(body, str(inner.target))
    name, k = str(inner.target), 0
    while hasattr(gm, name) and getattr(gm, name) is not value:
        k += 1
        name = f"{inner.target}_{k}"
    setattr(gm, name, value)
    inner.target = name


def _floating(node: fx.Node) -> bool:
    value = meta(node).get("val")
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
