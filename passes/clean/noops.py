"""Removes what computes nothing (device arguments, assertions, aliases, dropout that drops nothing), and normalises attention and views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar.ops.facts import OpKind, facts, is_random, op_name
from autopar.ops.meta import meta
from autopar.ops.operands import args_of, argument, dtype_of, shape_of, val
from passes.clean.nodes import add, aten, calls, evaluate, replace

_DEVICE_ARGUMENTS = ("device", "pin_memory", "layout")
_TRANSPOSED = ("aten.numpy_T", "aten.mT")  # ``.T`` and ``.mT`` of the user's code
_BITWISE = {"aten.__and__": "bitwise_and", "aten.__or__": "bitwise_or", "aten.__xor__": "bitwise_xor"}


def devices_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Remove devices from the graph: the program chooses them, not the model.

    Factories lose ``device``, ``pin_memory`` and ``layout``; every form of ``to`` becomes ``to.dtype`` or disappears; ``zeros_like`` and
    similar ops, which read only a shape, become ``full``.
    """
    for node in calls(gm):
        if any(key in node.kwargs for key in _DEVICE_ARGUMENTS) and op_name(node) != "aten.to":
            node.kwargs = {key: value for key, value in node.kwargs.items() if key not in _DEVICE_ARGUMENTS}
        if facts(node).kind is OpKind.CAST and node.target is not aten.to.dtype:
            source = args_of(node)[0]
            assert isinstance(source, fx.Node)
            same = dtype_of(node) == dtype_of(source)
            replace(node, source if same else add(node, aten.to.dtype, (source, dtype_of(node))))
        elif (fill := _like_factory(node)) is not None:
            replace(node, add(node, aten.full.default, (list(shape_of(node)), fill), {"dtype": dtype_of(node)}))
    return gm


def _like_factory(node: fx.Node) -> Any:
    """Return the fill value of a ``*_like`` or ``new_*`` factory; ``None`` for other nodes."""
    name = op_name(node).removeprefix("aten.")
    if name in ("zeros_like", "new_zeros", "empty_like", "new_empty"):
        return False if dtype_of(node) == torch.bool else 0
    if name in ("ones_like", "new_ones"):
        return True if dtype_of(node) == torch.bool else 1
    if name in ("full_like", "new_full"):
        value = argument(node, 1 if name == "full_like" else 2, "fill_value")
        return value if isinstance(value, int | float | bool) else None
    return None


def noops_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Remove nodes that return their operand unchanged, and assertions (about metadata, which export has checked, and about values).

    ``contiguous`` and ``clone`` disappear as well: in a functional graph they only change strides, and ``views_pass`` later handles the ops
    that depend on strides (``view``). ``.T`` and ``.mT`` become ``permute``, and ``&``, ``|`` and ``^`` become ``bitwise_and`` etc.
    """
    for node in calls(gm):
        name = op_name(node)
        if name in ("aten._assert_tensor_metadata", "aten._assert_async", "aten.sym_constrain_range_for_size"):
            gm.graph.erase_node(node)
        elif name in _TRANSPOSED:
            dims = list(range(len(shape_of(node))))
            order = dims[::-1] if name == "aten.numpy_T" else [*dims[:-2], *dims[:-3:-1]]
            replace(node, add(node, aten.permute.default, (args_of(node)[0], order)))
        elif name in _BITWISE:
            target = getattr(getattr(aten, _BITWISE[name]), str(node.target).rsplit(".", 1)[1])
            replace(node, add(node, target, node.args))
        elif _is_identity(node):
            replace(node, args_of(node)[0])
    return gm


def _is_identity(node: fx.Node) -> bool:
    name, kind = op_name(node), facts(node).kind
    if kind is OpKind.IDENTITY:
        return True
    source = args_of(node)[0] if node.args else None
    if not isinstance(source, fx.Node) or not isinstance(meta(source).get("val"), torch.Tensor):
        return False
    if not isinstance(meta(node).get("val"), torch.Tensor):
        return False
    unchanged = shape_of(node) == shape_of(source) and dtype_of(node) == dtype_of(source)
    if name in ("aten.to", "aten.view", "aten.reshape", "aten.expand", "aten.slice", "aten.flatten", "aten.squeeze"):
        return unchanged
    if kind is OpKind.DROPOUT:
        return not is_random(node)
    if kind is OpKind.DETACH:
        return not meta(source).get("gradient", True)
    if kind is OpKind.ADDITION:  # `position + 0`
        return unchanged and isinstance(args_of(node)[1], int | float) and args_of(node)[1] == 0
    return False


def attention_defaults_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Remove arguments of attention that equal their defaults (a dropout of 0, for instance), so that equal calls have equal arguments."""
    for node in calls(gm, aten.scaled_dot_product_attention.default):
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        defaults: dict[str, Any] = {
            "attn_mask": None,
            "dropout_p": 0.0,
            "is_causal": False,
            "scale": None,
            "enable_gqa": False,
        }
        kwargs = {key: value for key, value in given.items() if key in defaults and value != defaults[key]}
        mask = kwargs.pop("attn_mask", None)
        tensors = [given[key] for key in names[:3]] + ([mask] if mask is not None else [])
        node.args, node.kwargs = tuple(tensors), kwargs
    return gm


def views_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Use ``view`` where it is valid for all strides of its operand, ``reshape`` elsewhere, ``contiguous`` before ops that need it.

    Traced strides may differ from those at run time, which convolutions, attention and collectives choose. Updates every ``meta["val"]``.
    """
    for node in calls(gm):
        if node.target in (aten.view.default, aten.reshape.default):
            source, sizes = val(args_of(node)[0]), args_of(node)[1]
            meta(node)["val"] = source.reshape(sizes)
            node.target = aten.view.default if _only_splits(source.shape, sizes) else aten.reshape.default
            continue
        if node.target in _NEED_CONTIGUOUS and args_of(node)[0].target is not aten.contiguous.default:
            node.args = (add(node, aten.contiguous.default, (args_of(node)[0],)), *node.args[1:])
        meta(node)["val"] = evaluate(node.target, node.args, dict(node.kwargs))
    return gm


_NEED_CONTIGUOUS = (aten.view_as_complex.default, aten.view.dtype)
"""Ops that need an operand contiguous along the last dim: ``noops_pass`` has removed every ``contiguous`` of the user's code."""


def _only_splits(sizes: Sequence[int], wanted: Sequence[int]) -> bool:
    """Return whether a view from ``sizes`` to ``wanted`` merges no dims: it only splits them, and adds or removes dims of size 1."""
    left = [size for size in wanted if size != 1]
    for size in sizes:
        product = 1
        while product < size and left:
            product *= left.pop(0)
        if product != size:
            return False
    return not left
