"""Replaces derivatives that a forward computes (``torch.autograd.grad``) by ordinary nodes, which are differentiable themselves.

An exported graph has one call of ``autopar::derivative`` for each derivative: its arguments are those of ``torch.autograd.grad`` (outputs,
inputs, gradients of the outputs). torch's autograd differentiates the nodes between inputs and outputs on fake tensors; the pass copies the
ops that autograd calls into the graph, where they read the values of the forward from the nodes that computed them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.errors import OPAQUE_HINT, CaptureError
from autopar.ops.facts import is_random, op_name
from autopar.ops.meta import meta
from autopar.ops.operands import args_of
from autopar.ops.source import source_line
from autopar.torch_private import backward_decompositions, fake_tensors, is_overload, written_arguments
from passes.clean.functional import functionalise_pass
from passes.clean.nodes import ancestors, aten, calls, copy_origin, like, note

_SIMPLE = (
    *("tanh", "sigmoid", "softplus", "elu", "hardsigmoid", "hardtanh", "hardswish", "threshold", "leaky_relu", "gelu"),
    *("mish", "silu", "logit", "glu", "mse_loss", "smooth_l1_loss", "huber_loss"),
)
"""Ops whose ``*_backward`` is decomposed into simpler ops, for which there are more rules. These backwards read only the forward's operands
and results: any other tensor that a forward saves for backward (a layer norm's mean) has a derivative that only torch's op knows."""


@torch.library.custom_op("autopar::derivative", mutates_args=())
def derivative(outputs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor]) -> list[Tensor]:
    """Stand for ``torch.autograd.grad(outputs, inputs, seeds)`` while a model is exported."""
    raise AssertionError("autopar::derivative only marks a derivative for the pass")


@derivative.register_fake
def _(outputs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in inputs]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.counts = [len(each) for each in inputs]


def _backward(ctx: Any, gradients: list[Tensor]) -> tuple[list[None], ...]:
    raise AssertionError("autopar::derivative only marks a derivative for the pass")


derivative.register_autograd(_backward, setup_context=_setup_context)


def derivatives_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """``derivative([y], [x], [s])``, where ``y = tanh(x)``, becomes ``mul(s, rsub(mul(y, y), 1))``.

    Raises:
        CaptureError: an op between ``x`` and ``y`` draws random numbers, writes in place or is not ATen's, or autograd fails.
    """
    for node in calls(gm, torch.ops.autopar.derivative.default):
        _inline(gm, node)
    return gm


def _inline(gm: fx.GraphModule, marker: fx.Node) -> None:
    outputs, inputs, seeds = (list(each) for each in args_of(marker))
    between = _between(outputs, inputs)
    for node in between:
        _check(node, marker)
    given = list(dict.fromkeys([*inputs, *(n for each in between for n in each.all_input_nodes), *outputs, *seeds]))
    given = [node for node in given if node not in set(between)]
    traced, kept = _traced(given, between, outputs, inputs, seeds, marker)
    known = dict(zip(traced.graph.find_nodes(op="placeholder"), given, strict=True))
    results: Any = traced.graph.output_node().args[0]
    for theirs, ours in zip(results[len(inputs) :], kept, strict=True):
        if isinstance(theirs, fx.Node):
            known.setdefault(theirs, ours)
    made = _copied(traced, list(results[: len(inputs)]), known, marker)
    for item in list(marker.users):
        assert item.target is operator.getitem, item
        item.replace_all_uses_with(made[args_of(item)[1]])
        gm.graph.erase_node(item)
    line = source_line(marker).strip().replace("\n", " ").removeprefix("File ")
    note(gm, f"{line}: the derivative is part of the graph, and sharded as such")
    gm.graph.erase_node(marker)


def _between(outputs: list[fx.Node], inputs: list[fx.Node]) -> list[fx.Node]:
    """Return, in order, the nodes through which ``outputs`` depend on ``inputs``."""
    leading = ancestors(outputs)
    found: dict[fx.Node, None] = {}
    reached = set(inputs)
    for node in outputs[0].graph.nodes:
        if node in leading and any(operand in reached for operand in node.all_input_nodes):
            found[node] = None
            reached.add(node)
    return list(found)


def _check(node: fx.Node, marker: fx.Node) -> None:
    if is_random(node):
        why = "which draws random numbers"
    elif node.target is not operator.getitem and not (is_overload(node.target) and op_name(node).startswith("aten.")):
        why = "which is not an ATen op"
    elif written_arguments(node.target):
        why = "which writes in place"
    else:
        return
    raise CaptureError(
        f"forward computes a derivative through {op_name(node)}, {why}, at\n{source_line(node)}\n{source_line(marker)}",
        hint=OPAQUE_HINT,
    )


def _traced(
    given: list[fx.Node],
    between: list[fx.Node],
    outputs: list[fx.Node],
    inputs: list[fx.Node],
    seeds: list[fx.Node],
    marker: fx.Node,
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """Return a graph whose inputs are the values of ``given``, and whose results are the derivatives, then the tensors that the nodes in
    ``between`` compute; and the list of these nodes."""
    kept = [node for node in between if isinstance(meta(node)["val"], Tensor)]

    def compute(*values: Tensor) -> list[Tensor]:
        env: dict[fx.Node, Any] = dict(zip(given, values, strict=True))
        for node in inputs:
            if node in env and not env[node].requires_grad:
                env[node].requires_grad_()
        for node in between:
            env[node] = node.target(*map_arg(node.args, env.get), **map_arg(node.kwargs, env.get))  # type: ignore[operator]
            if node in inputs and not env[node].requires_grad:
                env[node].requires_grad_()
        flowing = [(env[y], env[seed]) for y, seed in zip(outputs, seeds, strict=True) if env[y].requires_grad]
        found = torch.autograd.grad(
            [y for y, _ in flowing],
            [env[node] for node in inputs],
            [seed for _, seed in flowing],
            create_graph=True,  # without it, some of autograd's formulas cannot be differentiated
            allow_unused=True,
        )
        gradients = [torch.zeros_like(env[n]) if g is None else g for g, n in zip(found, inputs, strict=True)]
        return [*gradients, *(env[node] for node in kept)]

    try:
        with fake_tensors(), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            values = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype) for v in (meta(n)["val"] for n in given)]
            traced = make_fx(compute, decomposition_table=backward_decompositions(_SIMPLE))(*values)
    except RuntimeError as error:
        raise CaptureError(
            f"forward computes a derivative that autograd refuses: {str(error).splitlines()[0]}\n{source_line(marker)}",
            hint="check that the model runs on this batch without autopar",
        ) from error
    for node in traced.graph.nodes:
        value = meta(node).get("val")
        if isinstance(value, Tensor):
            meta(node)["val"] = like(value)
        elif isinstance(value, tuple | list):
            meta(node)["val"] = type(value)(like(item) if isinstance(item, Tensor) else item for item in value)
    return functionalise_pass(traced), kept


def _copied(
    traced: fx.GraphModule, results: list[fx.Node], known: dict[fx.Node, fx.Node], marker: fx.Node
) -> list[Any]:
    """Copy the nodes that compute ``results`` from ``traced`` into the marker's graph, and return the copies of ``results``. ``known`` maps
    nodes of ``traced`` to nodes of the marker's graph with the same value, which are not copied."""
    needed = ancestors((node for node in results if isinstance(node, fx.Node)), lambda node: node not in known)
    env = dict(known)
    for node in traced.graph.nodes:
        if node not in needed:
            continue
        # autograd saved a result detached, but its derivative must flow through the result
        if node.target is aten.detach.default:
            env[node] = env[node.args[0]]
            continue
        assert node.op == "call_function", node
        with marker.graph.inserting_before(marker):
            env[node] = marker.graph.node_copy(node, lambda n: env[n])
        env[node].meta = {"val": meta(node)["val"]}
        copy_origin(marker, env[node])
    return [env[node] for node in results]
