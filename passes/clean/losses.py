"""Rewrites losses as a sum over the batch times a factor that does not depend on the activations.

If ranks have different numbers of valid tokens, the mean over the batch does not follow from the ranks' means. A sum stays exact under
any split of the batch over ranks and microbatches. The denominator is either a constant or a 0-d value that depends on the inputs
alone; it is computed for the complete batch before the first forward.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from autopar.ops.facts import OpKind, facts, is_pointwise, op_name
from autopar.ops.meta import meta
from autopar.ops.operands import args_of, argument, arguments, dtype_of, shape_of
from autopar.program import kernels
from passes.clean.nodes import add, aten, calls, cast_like, evaluate, replace

_NONE = 0
_MEAN = 1  # torch's Reduction.MEAN
_SUM = 2


def cross_entropy_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """``cross_entropy_loss`` with integer labels becomes ``kernels.cross_entropy_sum``; a mean is divided by the number of valid labels.

    The pass undoes the flattening before the loss, so that batch and sequence are separate dims: ``[b, s, v]`` and ``[b, s]``. With class
    weights the mean divides by the sum of the valid labels' weights. The loss stays torch's op if the class weights are trained,
    the targets are class probabilities, or it is not reduced. If all labels are ignored, the result is 0/0 = nan, as in torch.
    """
    for node in calls(gm, aten.cross_entropy_loss.default):
        logits, labels = args_of(node)[:2]
        assert isinstance(logits, fx.Node) and isinstance(labels, fx.Node)
        reduction = argument(node, 3, "reduction", _MEAN)
        weight = argument(node, 2, "weight")
        trained = weight is not None and meta(weight).get("gradient", True)
        if trained or dtype_of(labels).is_floating_point or reduction not in (_MEAN, _SUM):
            continue
        ignore_index = argument(node, 4, "ignore_index", -100)
        smoothing = argument(node, 5, "label_smoothing", 0.0)
        logits, labels = _plain_dims(node, logits, labels)
        weights = () if weight is None else (weight,)
        new = add(node, kernels.cross_entropy_sum, (logits, labels, ignore_index, smoothing, *weights))
        if reduction == _MEAN:
            valid = add(node, aten.ne.Scalar, (labels, ignore_index))
            if weight is not None:
                chosen = add(node, aten.mul.Tensor, (labels, valid))  # an ignored label need not be a valid index
                valid = add(node, aten.mul.Tensor, (add(node, aten.index.Tensor, (weight, [chosen])), valid))
            count = add(node, aten.sum.default, (valid,))
            count = add(node, aten.to.dtype, (count, dtype_of(new)))
            meta(count)["scalar_name"] = "valid_labels"
            new = add(node, aten.div.Tensor, (new, count))
        replace(node, cast_like(node, new))
    return gm


def _widened(gm: fx.GraphModule, node: fx.Node, new: fx.Node) -> None:
    """Let the readers of ``node`` that lead to the loss read ``new``, of a wider dtype, and update the dtypes of the nodes after them."""
    readers = [user for user in node.users if _leads_to_loss(user, node)]
    if not readers:
        return
    for user in readers:
        user.replace_input_with(node, new)
    if not node.users:
        gm.graph.erase_node(node)
    wider = {new}
    for each in gm.graph.nodes:
        if each is not node and each.op == "call_function" and not wider.isdisjoint(each.all_input_nodes):
            meta(each)["val"] = evaluate(each.target, each.args, dict(each.kwargs))
            wider.add(each)


def _is_loss(node: fx.Node) -> bool:
    """Return whether the node leads to nothing but the loss, through 0-d pointwise ops only."""
    return all(_leads_to_loss(user, node) for user in node.users)


def _leads_to_loss(user: fx.Node, node: fx.Node) -> bool:
    if user.op == "output":
        results = args_of(user)[0]
        return not isinstance(results, tuple | list) or node not in results[1:]  # buffers' new values follow the loss
    return is_pointwise(user) and shape_of(user) == () and _is_loss(user)


def wide_losses_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Compute and report the last sum of a 16-bit loss in float32; its terms and all gradients keep their dtypes.

    ``sum(x)`` of bfloat16 becomes ``sum(x, dtype=float32)``; ``mse_loss(x, y, sum)`` becomes the sum of ``mse_loss(x, y, none)``. A sum
    that is in float32 already is no longer cast.
    """
    for node in calls(gm):
        name = op_name(node)
        if node.target is aten.to.dtype and shape_of(node) == () and dtype_of(node) in _NARROW:
            source = args_of(node)[0]
            if dtype_of(source) == torch.float32 and meta(source).get("gradient", True):
                _widened(gm, node, source)
            continue
        if name != "aten.sum" and facts(node).kind is not OpKind.LOSS:
            continue
        narrow = isinstance(meta(node)["val"], torch.Tensor) and shape_of(node) == () and dtype_of(node) in _NARROW
        if not narrow or not meta(node).get("gradient", True) or not _is_loss(node):
            continue
        if name == "aten.sum":
            terms = args_of(node)[0]
            if node.target is not aten.sum.default or dtype_of(terms) not in _NARROW:
                continue
        else:
            if arguments(node)["reduction"] != _SUM:
                continue
            terms = _reduced(node, _NONE)
        _widened(gm, node, add(node, aten.sum.default, (terms,), {"dtype": torch.float32}))
    return gm


_NARROW = (torch.bfloat16, torch.float16)


def _plain_dims(node: fx.Node, logits: fx.Node, labels: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return logits with the classes last, and labels with the same leading dims, as they were before any flattening."""
    if len(shape_of(logits)) == 1:
        return logits, labels
    if len(shape_of(logits)) > 2:  # torch's own layout: (batch, classes, dims...)
        order = [0, *range(2, len(shape_of(logits))), 1]
        inverse = [order.index(d) for d in range(len(order))]
        if op_name(logits) in ("aten.permute", "aten.transpose") and _permutation(logits) == inverse:
            return args_of(logits)[0], labels
        return add(node, aten.permute.default, (logits, order)), labels
    source = args_of(logits)[0] if logits.target in (aten.reshape.default, aten.view.default) else logits
    assert isinstance(source, fx.Node)
    lead = shape_of(source)[:-1]
    if shape_of(source)[-1] != shape_of(logits)[-1] or math.prod(lead) != shape_of(labels)[0]:
        return logits, labels
    while labels.target in (aten.reshape.default, aten.view.default) and shape_of(labels) != lead:
        labels = args_of(labels)[0]
    if shape_of(labels) != lead:
        labels = add(node, aten.reshape.default, (labels, list(lead)))
    return source, labels


def _permutation(node: fx.Node) -> list[int]:
    rank = len(shape_of(node))
    if op_name(node) == "aten.permute":
        return [d % rank for d in args_of(node)[1]]
    order = list(range(rank))
    a, b = (d % rank for d in args_of(node)[1:3])
    order[a], order[b] = order[b], order[a]
    return order


def mean_losses_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """A mean over all elements becomes a sum times ``1/N``: ``mean`` of a tensor with a gradient, and the mean of a pointwise loss
    (``OpKind.LOSS``: ``mse_loss``, ``l1_loss``, ``kl_div``, binary cross entropy, ...)."""
    for node in calls(gm):
        is_mean = op_name(node) == "aten.mean"
        if is_mean:
            source = args_of(node)[0]
            assert isinstance(source, fx.Node)
            sizes = shape_of(source)
            if (
                shape_of(node)
                or not meta(node).get("gradient", True)
                or dtype_of(node) != dtype_of(source)
                or not sizes
            ):
                continue
        elif facts(node).kind is OpKind.LOSS and arguments(node)["reduction"] == _MEAN and shape_of(node) == ():
            sizes = torch.broadcast_shapes(*map(shape_of, args_of(node)[:2]))
        else:
            continue
        if dtype_of(node) in _NARROW:  # a mean is finite where float16 has no number for the sum
            terms = args_of(node)[0] if is_mean else _reduced(node, _NONE)
            total = add(node, aten.sum.default, (terms,), {"dtype": torch.float32})
        else:
            total = add(node, aten.sum.default, (args_of(node)[0],)) if is_mean else _reduced(node, _SUM)
        replace(node, cast_like(node, add(node, aten.mul.Tensor, (total, 1.0 / math.prod(sizes)))))
    return gm


def _reduced(node: fx.Node, reduction: int) -> fx.Node:
    """Return the same loss with another reduction."""
    given = arguments(node)
    names = list(given)
    place = names.index("reduction")
    args = (*list(given.values())[:place], reduction, *node.args[place + 1 :])
    rest = {key: value for key, value in node.kwargs.items() if names.index(key) > place}
    return add(node, node.target, args, rest)
