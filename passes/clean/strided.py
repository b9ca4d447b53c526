"""Makes ``as_strided`` independent of its operand's strides, which may differ in a program."""

from __future__ import annotations

import math

from torch import fx

from autopar.errors import CaptureError
from autopar.ops.facts import op_name
from autopar.ops.operands import argument, val
from autopar.ops.source import source_line
from autopar.program import kernels
from passes.clean.nodes import add, aten, calls, replace


def strided_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """``as_strided(x, size, stride)`` becomes ``kernels.strided(x.permute(...), size, stride)``: the operand with its dims in memory order.

    Raises:
        CaptureError: the operand is not dense, or the op has a ``storage_offset`` or reads beyond the operand's elements.
    """
    for node in calls(gm):
        if op_name(node) != "aten.as_strided":
            continue
        x, size, stride = (argument(node, index, name) for index, name in enumerate(("self", "size", "stride")))
        value = val(x)
        steps = value.stride()
        order = sorted(range(value.dim()), key=lambda dim: (value.shape[dim] > 1, -steps[dim]))  # noqa: B023  sorted at once
        dense = math.prod(value.shape)
        for dim in order:
            dense //= value.shape[dim]
            if value.shape[dim] > 1 and steps[dim] != dense:
                raise _refused(node, "of a tensor that is not dense")
        if argument(node, 3, "storage_offset") is not None:
            raise _refused(node, "with a storage_offset")
        if sum((extent - 1) * step for extent, step in zip(size, stride, strict=True)) >= value.numel():
            raise _refused(node, "beyond the tensor's own elements")
        if order != list(range(value.dim())):
            x = add(node, aten.permute.default, (x, order))
        replace(node, add(node, kernels.strided, (x, size, stride)))
    return gm


def _refused(node: fx.Node, problem: str) -> CaptureError:
    return CaptureError(
        f"as_strided {problem} reads memory that a program does not have\n{source_line(node)}",
        "call it on x.contiguous(), without a storage_offset; for windows, call x.unfold(...)",
    )
