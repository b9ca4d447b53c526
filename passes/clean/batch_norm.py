"""Splits batch norm into statistics of the batch, an elementwise op, and a write to two buffers.

The statistics are a separate op, because only they need every example; the op's sharding rule names the kernel that combines the ranks'
statistics. The pass runs before in-place ops are removed, because it writes running statistics with ``copy_``.
"""

from __future__ import annotations

from torch import fx

from autopar.ops.facts import op_name
from autopar.ops.meta import graph_meta
from autopar.ops.operands import dtype_of, shape_of
from autopar.program import kernels_norm
from passes.clean.nodes import add, aten, calls, module_path, note, replace


def batch_norm_pass(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace ``aten.batch_norm`` and ``aten.instance_norm``; note which op couples the batch, or that the user allows local statistics."""
    for node in calls(gm):
        if op_name(node) == "aten.batch_norm":
            replace(node, _batch_norm(gm, node))
        elif op_name(node) == "aten.instance_norm":
            replace(node, _instance_norm(node))
    return gm


def _batch_norm(gm: fx.GraphModule, node: fx.Node) -> fx.Node:
    x, weight, bias, running_mean, running_var, training, momentum, eps, _ = node.args
    assert isinstance(x, fx.Node)
    if not training:
        return add(node, kernels_norm.normalise, (x, running_mean, running_var, weight, bias, eps))
    if graph_meta(gm).get("local_batch_norm"):
        note(gm, "batch norm takes the statistics of each rank's part of each microbatch, as local_batch_norm allows")
        normalised = add(node, kernels_norm.local_batch_norm, (x, weight, bias, eps, *_both(running_mean, running_var)))
        if isinstance(running_mean, fx.Node) and isinstance(running_var, fx.Node):
            detached = add(node, aten.detach.default, (x,))
            _update_running(node, add(node, kernels_norm.step_statistics, (detached,)), running_mean, running_var)
        return normalised
    path = module_path(node)
    where = f", first in {path}" if path else ""
    graph_meta(gm).setdefault(
        "unmicrobatchable",
        f"batch norm couples the batch{where} (local_batch_norm=True, or --local-batch-norm, allows local statistics)",
    )
    statistics = add(node, kernels_norm.batch_statistics, (x, *_both(running_mean, running_var)))
    mean, var = (add(node, aten.select.int, (statistics, 0, row)) for row in (0, 1))
    if isinstance(running_mean, fx.Node) and isinstance(running_var, fx.Node):
        _update_running(node, add(node, aten.detach.default, (statistics,)), running_mean, running_var)
    return add(node, kernels_norm.normalise, (x, mean, var, weight, bias, eps))


def _both(running_mean: object, running_var: object) -> tuple[fx.Node, ...]:
    """Return the running statistics, which evaluation mode uses; nothing if they aren't tracked."""
    return tuple(each for each in (running_mean, running_var) if isinstance(each, fx.Node))


def _instance_norm(node: fx.Node) -> fx.Node:
    """Return instance norm as group norm with one group per channel."""
    x, weight, bias, running_mean, running_var, use_input_stats, _, eps, _ = node.args
    assert isinstance(x, fx.Node)
    if not use_input_stats:
        return add(node, kernels_norm.normalise, (x, running_mean, running_var, weight, bias, eps))
    if isinstance(running_mean, fx.Node) and isinstance(running_var, fx.Node):
        detached, spatial_dims = add(node, aten.detach.default, (x,)), list(range(2, len(shape_of(x))))
        mean = add(node, aten.mean.dim, (detached, spatial_dims))
        var = add(node, aten.var.correction, (detached, spatial_dims), {"correction": 1})
        _update_average(node, running_mean, add(node, aten.mean.dim, (mean, [0])))
        _update_average(node, running_var, add(node, aten.mean.dim, (var, [0])))
    return add(node, aten.group_norm.default, (x, shape_of(x)[1], weight, bias, eps))


def _update_running(node: fx.Node, statistics: fx.Node, running_mean: fx.Node, running_var: fx.Node) -> None:
    """Update the running averages of the mean and of the unbiased variance."""
    for buffer, row in ((running_mean, 0), (running_var, 2)):
        _update_average(node, buffer, add(node, aten.select.int, (statistics, 0, row)))


def _update_average(node: fx.Node, buffer: fx.Node, new: fx.Node) -> None:
    """Move the running average towards ``new`` by ``node``'s momentum."""
    old = buffer if dtype_of(buffer) == dtype_of(new) else add(node, aten.to.dtype, (buffer, dtype_of(new)))
    add(node, aten.copy_.default, (buffer, add(node, aten.lerp.Scalar, (old, new, node.args[6]))))
