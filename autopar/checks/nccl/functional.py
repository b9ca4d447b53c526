"""Records functional collectives of fake and meta tensors, for which torch only computes shapes and calls no process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from autopar.checks.nccl.group import RecordingGroup
from autopar.checks.nccl.recorder import Recorder
from autopar.checks.nccl.works import LateWork
from autopar.torch_private import awaited_at_first_use, memory

NAMESPACE = "_c10d_functional"
_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class Functional:
    """Issues functional collectives on the recorder's groups, as torch itself does for tensors with values."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._running: dict[int, LateWork] = {}  # the key identifies a result's storage

    def run(self, op: Any, args: tuple[Any, ...], result: Any) -> Any:
        """Issue the collective ``op``, or wait for one if ``op`` is a wait; return ``result``, which torch has computed.

        If ``op`` wraps a result for autograd, return the wrapped tensor, for which torch waits at its first use.
        Raises ``NotImplementedError`` for an unknown op.
        """
        name = op.overloadpacket.__name__
        if name == "wait_tensor":
            work = self._running.pop(memory(args[0]), None)
            if work is not None:
                work.wait()
            return result
        if name == "_wrap_tensor_autograd":
            return awaited_at_first_use(args[0])
        coalesced = isinstance(args[0], list | tuple)
        inputs: list[Tensor] = list(args[0]) if coalesced else [args[0]]
        results: list[Tensor] = list(result) if coalesced else [result]
        work = self._issue(name.removesuffix("_").removesuffix("_out"), inputs, results, args[1:])
        for tensor in results:
            self._running[memory(tensor)] = work
        return result

    def _issue(self, name: str, inputs: list[Tensor], results: list[Tensor], rest: Sequence[Any]) -> LateWork:
        group = self._group(rest[-1])
        if name in ("all_reduce", "all_reduce_coalesced"):
            return group.allreduce(results, _with_reduce_op(dist.AllreduceOptions(), rest[0]))
        if name == "broadcast":
            options = dist.BroadcastOptions()
            options.rootRank = rest[0]
            return group.broadcast(results, options)
        if name in ("all_gather_into_tensor", "all_gather_into_tensor_coalesced"):
            return group.all_gather_single_coalesced(results, inputs)
        if name in ("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"):
            options = _with_reduce_op(dist.ReduceScatterOptions(), rest[0])
            return group.reduce_scatter_single_coalesced(results, inputs, options)
        if name == "all_to_all_single":
            return group.all_to_all_single(results[0], inputs[0], rest[0], rest[1])
        raise NotImplementedError(f"{NAMESPACE}::{name} cannot be recorded without values")

    def _group(self, name: str) -> RecordingGroup:
        return next(group for group in self._recorder.groups if group.communicator.name == name)


def _with_reduce_op(options: Any, op: str) -> Any:
    options.reduceOp = _REDUCE_OPS[op.lower()]
    return options
