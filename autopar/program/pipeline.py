"""Runs this rank's pipeline stages by torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor

from .microbatches import Microbatches
from .tracing import action

Place = tuple[nn.Module, int, int, torch.device]


class TracedStage(PipelineStage):
    """A stage of torch's pipeline whose actions have names in a profile.

    ``links`` maps a peer rank to the process group for transfers with it; if it is empty, transfers use the pipeline's group. Torch before
    2.13 issues each transfer as a batch, and NCCL runs the batches of a group in the order of issue: an interleaved schedule of 8 ranks
    took 1.5 times as long over the pipeline's group. ``ended`` is called with the stage's index after each unsplit backward pass.
    """

    def __init__(
        self, *place: Any, links: Mapping[int, dist.ProcessGroup], ended: Callable[[int], None], **options: Any
    ) -> None:
        super().__init__(*place, **options)
        self._links, self._ended = links, ended

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._with_links(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._with_links(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._with_links(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._with_links(super().get_bwd_send_ops(bwd_chunk_id))

    def _with_links(self, transfers: list[dist.P2POp]) -> list[dist.P2POp]:
        if not self._links:
            return transfers
        return [dist.P2POp(each.op, each.tensor, each.peer, self._links[each.peer]) for each in transfers]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        with action("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with action("B" if full_backward else "I", self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if bwd_chunk_id == 0:
            self._copy_received_gradients()
        if full_backward:
            self._ended(self.stage_index)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with action("W", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _copy_received_gradients(self) -> None:
        """Copy gradients of parameters out of receive buffers: if the stage sends a view of a parameter, the parameter's gradient is a view
        of the receive buffer, which a later microbatch overwrites."""
        infos = self.grad_recv_info.get(0, ())
        buffers = [info.buffer for info in infos if isinstance(getattr(info, "buffer", None), Tensor)]
        received = {buffer.untyped_storage().data_ptr() for buffer in buffers}
        for parameter in self.submod.parameters() if received else ():
            gradient = parameter.grad  # a DTensor isn't a view of a buffer: FSDP2 has reduced the gradient
            if gradient is None or isinstance(gradient, DTensor):
                continue
            if gradient.untyped_storage().data_ptr() in received:
                parameter.grad = gradient.clone()


class _ReceiveBuffers(dict[int, Any]):
    """The receive buffers of torch's stage, for ``depth`` microbatches only: later microbatches reuse the buffers of finished ones.

    torch allocates buffers for each microbatch of the step, and keeps all of them.
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        self._depth = depth

    def __setitem__(self, microbatch: int, infos: Any) -> None:
        super().__setitem__(microbatch, self.get(microbatch - self._depth, infos))


class Pipeline(Microbatches):
    """Runs the microbatches with the torch schedule that the plan names."""

    schedules: ClassVar[dict[str, Any]] = {
        "interleaved-1f1b": ScheduleInterleaved1F1B,
        "zero-bubble": ScheduleInterleavedZeroBubble,
        "zbv": ScheduleZBVZeroBubble,
        "dualpipev": ScheduleDualPipeV,
    }
    """The schedules with several (virtual) stages per pipeline rank, by their names in plans."""

    def _prepare(self) -> None:
        self._schedule = self._make_schedule()

    def step(self, inputs: dict[str, Tensor]) -> None:
        # the schedule requires a target; the stage computes the loss
        target = torch.zeros(self.microbatches, device=self.world.device)
        self._schedule.step(target=target, return_outputs=False, **inputs)

    def _make_schedule(self) -> Any:
        stages: list[Any] = [self._stage(index) for index in self.world.stages]
        # scale_grads would divide the gradients by the number of microbatches
        options: dict[str, Any] = {"loss_fn": lambda loss, _: self._term(loss), "scale_grads": False}
        name = self.program.plan["schedule"]
        if name in self.schedules:
            return self.schedules[name](stages, self.microbatches, **options)
        schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name]
        (stage,) = stages
        if name == "1f1b":
            # When a stage receives a forward input into a reused buffer, the backward of the microbatch that used it has run. A stage may
            # send a gradient on from its receive buffer: this send has ended before the gradient after the next one arrives.
            stage.args_recv_info = _ReceiveBuffers(self.world.pipeline - self.world.stages[0])
            stage.grad_recv_info = _ReceiveBuffers(2)
        return schedule(stage, self.microbatches, **options)

    def _stage(self, index: int) -> TracedStage:
        options: dict[str, Any] = {
            "input_args": self.receives(index),
            "output_args": torch.empty((), device="meta", requires_grad=True)
            if index == self.last
            else self.sends(index),
            "group": self.world.mesh.get_group("pipeline"),
            "links": self.world.links,
            "ended": self._backward_ended,
        }
        return self._make_stage((self._modules[index], index, self.last + 1, self.world.device), options)

    def _make_stage(self, place: Place, options: dict[str, Any]) -> TracedStage:
        """Return torch's stage; ``place`` is its module, its index, the number of stages and the device."""
        return TracedStage(*place, **options)
