"""Rewrites products with weight matrices as ``aten.linear`` on unflattened dims, and a fused projection as one linear per part."""

from __future__ import annotations

import dataclasses
import math

from torch import fx

from autopar.graph import Parameter
from autopar.ops.facts import op_name
from autopar.ops.meta import meta
from autopar.ops.operands import args_of, shape_of
from passes.clean.nodes import add, aten, calls, copy_origin, like, replace


def linear_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """``addmm``, ``mm`` and ``matmul`` become ``linear`` if the second factor is a parameter matrix, as does ``matmul`` with a vector;
    ``bilinear`` becomes einsums. An ``addmm`` with ``alpha`` or ``beta``, or whose bias is computed or not a vector, stays.

    A parameter that is stored input-first (GPT-2's Conv1D) enters through ``aten.t``. The pass undoes the flattening around a
    two-dimensional product: ``reshape(x, [-1, h]) -> addmm -> reshape`` becomes a linear on ``[b, s, h]``.
    """
    for node in calls(gm, aten.bilinear.default):
        _emit_bilinear(node)
    for node in calls(gm, aten.matmul.default):
        x, vector = args_of(node)
        if len(shape_of(vector)) == 1 < len(shape_of(x)):
            row = add(node, aten.linear.default, (x, add(node, aten.unsqueeze.default, (vector, 0))))
            replace(node, add(node, aten.squeeze.dim, (row, -1)))
    for node in calls(gm):
        name = op_name(node)
        if name == "aten.addmm" and _is_bias(args_of(node)[0]) and not node.kwargs:
            bias, x, weight = args_of(node)
        elif name in ("aten.mm", "aten.matmul"):
            (x, weight), bias = node.args, None
        elif name == "aten.linear":
            x, weight, bias = (*node.args, None)[:3]
        else:
            continue
        assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
        if name != "aten.linear":
            if not _is_parameter(weight) or len(shape_of(weight)) != 2:
                continue
            stored_output_first = op_name(weight) == "aten.t"
            weight = args_of(weight)[0] if stored_output_first else add(node, aten.t.default, (weight,))
        _emit_linear(node, x, weight, bias)
    return gm


def _emit_bilinear(node: fx.Node) -> None:
    """Replace ``sum over i, j of x[i] w[o, i, j] y[j] + b[o]`` by a product with the weight and one with ``y``."""
    x, y, weight, bias = (*node.args, None)[:4]
    assert isinstance(x, fx.Node) and isinstance(y, fx.Node) and isinstance(weight, fx.Node)
    lead = "abcdefgh"[: len(shape_of(x)) - 1]
    product = add(node, aten.einsum.default, (f"{lead}i,oij->{lead}oj", [x, weight]))
    new = add(node, aten.einsum.default, (f"{lead}oj,{lead}j->{lead}o", [product, y]))
    replace(node, new if bias is None else add(node, aten.add.Tensor, (new, bias)))


def _is_parameter(node: fx.Node) -> bool:
    if op_name(node) == "aten.t":
        node = args_of(node)[0]
    return node.op == "placeholder" and "parameter" in meta(node)


def _is_bias(node: fx.Node) -> bool:
    return node.op == "placeholder" and len(shape_of(node)) == 1


def _emit_linear(node: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> None:
    """Put the linear in place of ``node``; undo a reshape that flattens the leading dims, and the reshapes that restore them."""
    parameters = (weight,) if bias is None else (weight, bias)
    lead = _restored_dims(node, x)
    if lead is None:
        if op_name(node) != "aten.linear":
            replace(node, add(node, aten.linear.default, (x, *parameters)))
        return
    source, sizes = args_of(x)[0], [*lead, shape_of(x)[-1]]
    assert isinstance(source, fx.Node)
    if list(shape_of(source)) != sizes:
        source = add(node, aten.reshape.default, (source, sizes))
    new = add(node, aten.linear.default, (source, *parameters))
    for user in list(node.users):
        replace(user, new)
    node.graph.erase_node(node)


def _restored_dims(node: fx.Node, x: fx.Node) -> tuple[int, ...] | None:
    """Return the leading dims that were flattened for ``x`` and that every reader of ``node`` restores; ``None`` if there are none."""
    if x.target is not aten.reshape.default or len(shape_of(x)) != 2 or not node.users:
        return None
    restored = {shape_of(user) if user.target is aten.reshape.default else None for user in node.users}
    (sizes, *others) = restored
    if others or sizes is None or sizes[-1] != shape_of(node)[-1]:
        return None
    lead, source = sizes[:-1], shape_of(args_of(x)[0])
    return lead if source[: len(lead)] == lead and math.prod(lead) == shape_of(x)[0] else None


def fused_projections_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """A linear whose readers take slices that partition its output becomes one linear per slice, unless its parameters have other readers.

    New parameters replace the weight and the bias; each is a slice of the stored tensor (``Parameter.dim`` and ``.start``). Without
    this, sharding the fused output dim would give one rank all of q and another all of v.
    """
    for node in calls(gm, aten.linear.default):
        found = pieces(node)
        if found is None:
            continue
        weight, bias = args_of(node)[1], args_of(node)[2] if len(node.args) > 2 else None
        transposed = op_name(weight) == "aten.t"
        stored = args_of(weight)[0] if transposed else weight
        tensors = [stored] if bias is None else [stored, bias]
        if not all(map(splittable, tensors)):
            continue
        for index, ((start, end), slices) in enumerate(found.items()):
            weight_part = part(stored, index, int(transposed), start, end)
            operand = add(node, aten.t.default, (weight_part,)) if transposed else weight_part
            args: tuple[fx.Node, ...] = (args_of(node)[0], operand)
            if bias is not None:
                args = (*args, part(bias, index, 0, start, end))
            new = add(node, aten.linear.default, args)
            for piece in slices:
                replace(piece, new)
        for dead in (node, weight if transposed else None, *tensors):
            if isinstance(dead, fx.Node):
                gm.graph.erase_node(dead)
    return gm


def pieces(node: fx.Node) -> dict[tuple[int, int], list[fx.Node]] | None:
    """Return the slices that read ``node``, keyed by (start, end) in order; ``None`` unless at least two partition its last dim, and
    nothing else reads it."""
    last = len(shape_of(node)) - 1
    found: dict[tuple[int, int], list[fx.Node]] = {}
    for user in node.users:
        if user.target is not aten.slice.Tensor or len(user.args) != 4 or args_of(user)[1] != last:
            return None
        found.setdefault((args_of(user)[2], args_of(user)[3]), []).append(user)
    ordered = dict(sorted(found.items()))
    expected = 0
    for start, end in ordered:
        if start != expected:
            return None
        expected = end
    return ordered if len(ordered) > 1 and expected == shape_of(node)[-1] else None


def splittable(tensor: fx.Node) -> bool:
    """Return whether the tensor is a complete parameter, not a slice of one, with a single reader."""
    parameter = meta(tensor).get("parameter")
    return parameter is not None and parameter.dim is None and len(tensor.users) == 1


def part(tensor: fx.Node, index: int, dim: int, start: int, end: int) -> fx.Node:
    """Return a new placeholder for the slice ``start:end`` of a parameter along ``dim``."""
    whole: Parameter = meta(tensor)["parameter"]
    sizes = list(whole.shape)
    sizes[dim] = end - start
    record = dataclasses.replace(whole, name=f"{whole.name}.part{index}", shape=tuple(sizes), dim=dim, start=start)
    with tensor.graph.inserting_before(tensor):
        node = tensor.graph.placeholder(f"{tensor.name}_part{index}")
    copy_origin(tensor, node)
    meta(node)["parameter"] = record
    meta(node)["val"] = like(meta(tensor)["val"].narrow(dim, start, end - start).contiguous())
    return node
