"""Joins the last product of a layer with its cross entropy, so that the logits are computed in slices of the vocabulary.

    linear = aten.linear(x, weight)                            loss = loss_in_slices(x, weight, labels, slices=16,
    div = aten.div(linear, 30.0)                                                     after=(("div", 30.0), ("tanh",), ("mul", 30.0)))
    tanh = aten.tanh(div)                                 ->
    mul = aten.mul(tanh, 30.0)
    loss = cross_entropy_sum(aten.to(mul, float32), labels)

The graph must show that nothing but the loss reads the logits, and that the ops in between are elementwise. The joined call is one op with
a rule, costs and a kernel (``program.kernels_logits``); a layer class that has it is an ordinary layer class.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.graph import LayerClass, cached_for_graphs
from autopar.ops.cost import tensors
from autopar.ops.facts import OpKind, facts, op_name
from autopar.ops.fused import ExtraWork, FusedOp, Size, register
from autopar.ops.meta import meta
from autopar.ops.operands import arguments, dtype_of, operands, shape_of, val
from autopar.program import kernels_logits
from autopar.rules.table import TABLE
from autopar.units import Constant
from passes.kernel_calls import KernelCall, KernelRequest, one_or_all

COLUMNS = 8192
"""Maximum columns of a slice of the unsharded vocabulary: 64 MB for 4,096 tokens in bfloat16, and products that are still large."""

Steps = tuple[kernels_logits.Step, ...]


@cached_for_graphs(maxsize=1024)
def rewrite(cls: LayerClass) -> LayerClass | str:
    """Return ``cls`` with its logits in slices, or the reason why that can't be done ("computes no ...")."""
    losses = [node for node in cls.graph.graph.nodes if facts(node).kind is OpKind.CLASS_LOSS]
    if len(losses) != 1:
        return "computes no cross entropy of classes" if not losses else f"computes {len(losses)} cross entropies"
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in cls.graph.graph.nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
        made[node].meta = dict(node.meta)
    if reason := _join(graph, made[losses[0]]):
        return reason
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    module = fx.GraphModule(cls.graph, graph)
    module.meta.update(cls.graph.meta)
    return dataclasses.replace(cls, graph=module)


def _join(graph: fx.Graph, loss: fx.Node) -> str:
    """Join the loss with the product before it; return why it can't be joined, or an empty string."""
    given = arguments(loss)
    logits, labels = given["logits"], given["labels"]
    if given["weight"] is not None:
        return "weighs the classes of its cross entropy"
    steps: list[kernels_logits.Step] = []
    cuts: list[fx.Node] = []
    bias = None
    while op_name(logits) != "aten.linear":
        if _is_biased(logits):
            logits, bias = logits.args
            break
        if reason := _read_elsewhere(logits):
            return reason
        step = _step(logits)
        if step is None:
            return (
                f"has {op_name(logits) or 'a value from another layer'} between its last product and its cross entropy"
            )
        if isinstance(step, fx.Node):
            cuts.append(step)
        elif step and not (step == ("wide",) and not steps):  # the loss is computed in float32 anyway
            steps.append(step)
        logits = logits.args[0]
    if reason := _read_elsewhere(logits):
        return reason
    product = arguments(logits)
    bias = product["bias"] if bias is None else bias
    vocabulary = shape_of(product["weight"])[0]
    with graph.inserting_before(loss):
        x = product["input"]
        for cut in reversed(cuts):
            before, x = x, graph.call_function(cut.target, (x, *cut.args[1:]), cut.kwargs)  # type: ignore[arg-type]
            x.meta = dict(cut.meta)
            shape = (*shape_of(cut)[:-1], shape_of(before)[-1])
            meta(x)["val"] = torch.empty(shape, dtype=dtype_of(before), device="meta")
        options: dict[str, Any] = {"slices": max(2, math.ceil(vocabulary / COLUMNS))}
        options |= {"after": tuple(reversed(steps))} if steps else {}
        options |= {name: given[name] for name in ("ignore_index", "label_smoothing")}
        read = (x, product["weight"], labels, *([] if bias is None else [bias]))
        new = graph.call_function(kernels_logits.loss_in_slices, read, options)
    new.meta = dict(loss.meta)
    loss.replace_all_uses_with(new)
    return ""


def _read_elsewhere(logits: fx.Node) -> str:
    if len(logits.users) == 1:
        return ""
    others = ", ".join(sorted({op_name(user) or "a later layer" for user in logits.users}))
    return f"reads its logits more than once ({others})"


def _is_biased(node: fx.Node) -> bool:
    """Return whether the node adds one number for each class to a product that nothing else reads."""
    if op_name(node) != "aten.add" or len(node.args) != 2 or node.kwargs:
        return False
    product, bias = node.args
    if not isinstance(product, fx.Node) or not isinstance(bias, fx.Node) or op_name(product) != "aten.linear":
        return False
    alone = len(node.users) == len(product.users) == 1 and arguments(product)["bias"] is None
    return alone and shape_of(bias) == shape_of(product)[-1:] and dtype_of(bias) == dtype_of(product)


def _step(node: fx.Node) -> kernels_logits.Step | fx.Node | tuple[()] | None:
    """Return a node between product and loss as an elementwise step; the node itself if it selects tokens, which moves before the product;
    an empty tuple if it changes nothing; ``None`` if it can't be joined."""
    name, numbers = op_name(node), node.args[1:]
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    if facts(node).kind is OpKind.CAST:
        wide = torch.promote_types(dtype_of(source), torch.float32)
        return (
            ("wide",)
            if dtype_of(node) == wide and wide != dtype_of(source)
            else ()
            if dtype_of(node) == dtype_of(source)
            else None
        )
    if facts(node).kind is OpKind.IDENTITY:
        return ()
    if name == "aten.tanh":
        return ("tanh",)
    if (
        name in ("aten.mul", "aten.div")
        and not node.kwargs
        and len(numbers) == 1
        and isinstance(numbers[0], int | float)
    ):
        return (name.removeprefix("aten."), float(numbers[0]))
    if (
        name in ("aten.slice", "aten.narrow")
        and int(arguments(node)["dim"]) % len(shape_of(node)) < len(shape_of(node)) - 1
    ):
        return node
    return None


# -- the op ------------------------------------------------------------------------------------------------------------

SLICE_PASSES = Constant(
    6.0,
    "passes over a slice of logits in float32, forward",
    "library: program/kernels_logits.py: the largest (1), the difference (2), its exponential (2), their sum (1)",
)
SLICE_PASSES_BACK = Constant(
    6.0,
    "passes over a slice of logits in float32, backward",
    "library: program/kernels_logits.py: the difference (2), its exponential (2), times the gradient (2)",
)
SLICE_KERNELS = Constant(
    15.0,
    "kernels for each slice of logits besides its product, forward",
    "library: program/kernels_logits.py: a conversion, the labels' places and logits (6), largest, exponentials and sums (8)",
)
SLICE_KERNELS_BACK = Constant(
    12.0,
    "kernels for each slice of logits besides its products, backward",
    "library: program/kernels_logits.py: conversions (2), the exponential's gradient (3), the labels' (6), the sum of the input's (1)",
)


def _extra_work(node: fx.Node, size: Size) -> ExtraWork:
    """Return the bytes that passes over the logits move, forward and backward, the live bytes of a slice, and the number of kernels. The
    input gradient is summed over the slices in float32 or wider."""
    slices = _slices(node)
    rows, weight = operands(node)[:2]
    x = tensors(meta(rows)["val"])[0]
    narrow, logits = size(x) / x.numel(), x.numel() // x.shape[-1] * tensors(meta(weight)["val"])[0].shape[0]
    wide = max(4.0, narrow)
    casts, steps = narrow < wide, len(node.kwargs.get("after", ()))  # type: ignore[arg-type]
    forward = SLICE_PASSES.value * wide + casts * (narrow + wide) + steps * 2 * narrow
    backward = SLICE_PASSES_BACK.value * wide + casts * 2 * (narrow + wide) + steps * 5 * narrow
    # live in the backward pass: the product, the slice in float32, its gradient in both dtypes, and one tensor for each step
    live = logits / slices * (2 * wide + casts * 2 * narrow + steps * narrow) + casts * x.numel() * wide
    adding = slices * x.numel() * 2 * wide * (1 + casts)  # each slice adds its part of the input gradient
    kernels = slices * SLICE_KERNELS.value, slices * SLICE_KERNELS_BACK.value
    return ExtraWork(forward * logits, backward * logits + adding, live, *kernels)


def _slices(node: fx.Node) -> float:
    return float(node.kwargs["slices"])  # type: ignore[arg-type]


def _flops(node: fx.Node) -> float:
    rows, weight = operands(node)[:2]
    return 2.0 * val(rows).numel() * shape_of(weight)[0]


def _resize(new: fx.Node, old: fx.Node) -> None:
    classes = shape_of(operands(old)[1])[0]
    if shape_of(operands(new)[1])[0] != classes:
        new.kwargs = {**new.kwargs, "vocabulary": classes}


def _call(request: KernelRequest) -> KernelCall:
    axis = {"axis": one_or_all(request.axes)} if request.axes else {}
    options = {**request.node.kwargs, "partial_axes": request.partial, **axis}
    return kernels_logits.loss_in_slices, request.node.args, options


def _samples(normal: Callable[..., Any], below: Callable[..., Any]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    steps = {"after": (("div", 2.0), ("tanh",)), "ignore_index": 0, "label_smoothing": 0.1}
    return [
        ((normal(6, 12, 5), normal(12, 5), below(12, 6, 12)), {"slices": 2}),
        ((normal(6, 5), normal(12, 5), below(12, 6), normal(12)), {"slices": 3, **steps}),
    ]


TABLE["kernels_logits.loss_in_slices"] = "* k!, v k!, *, v -> ; v = loss_in_slices -> I"
register(
    FusedOp(
        name="kernels_logits.loss_in_slices",
        function=kernels_logits.loss_in_slices,
        flops=_flops,
        slices=_slices,
        extra_work=_extra_work,
        padding_after=lambda zero: True if zero[0] is None and zero[2] is None else None,  # a vocabulary may be padded
        resize=_resize,
        call=_call,
        samples=_samples,
    )
)
