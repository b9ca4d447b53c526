"""Runs this rank's pipeline stages by torch's schedules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    RECV_B,
    RECV_F,
)

from .microbatches import Microbatches
from .processes import start_transfers
from .tracing import action

Place = tuple[nn.Module, int, int, torch.device]


class TracedStage(PipelineStage):
    """A stage of torch's pipeline whose actions have names in a profile.

    ``links`` maps a peer rank to the process group for transfers with it; if it is empty, transfers use the pipeline's group. Torch before
    2.13 issues each transfer as a batch, and NCCL runs the batches of a group in the order of issue: an interleaved schedule of 8 ranks
    took 1.5 times as long over the pipeline's group. ``ended`` is called with the stage's index after each unsplit backward pass.

    Under schedules with several stages per rank torch keeps every tensor that it sends until the step ends. Such a stage (``frees_sent``)
    starts its sends itself. Before a backward pass it waits for the send of the microbatch's outputs, which have arrived, and for that of
    the gradients of two microbatches earlier. torch lists each receive where its send is listed, so no wait is a deadlock.

    A layer may pass a gradient on unchanged: then a stage would send from its receive buffer, which the gradient of a later microbatch
    overwrites (``_ReceiveBuffers``), and sends a copy. Outputs that are passed on have arrived when their buffer is used again.
    """

    def __init__(
        self,
        *place: Any,
        links: Mapping[int, dist.ProcessGroup],
        ended: Callable[[int], None],
        frees_sent: bool,
        **options: Any,
    ) -> None:
        super().__init__(*place, **options)
        self._links, self._ended, self._frees_sent = links, ended, frees_sent
        self._sending: dict[tuple[str, int], list[dist.Work]] = {}  # by the kind and the microbatch of the pass

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._with_links(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._started("F", fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._with_links(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        transfers = super().get_bwd_send_ops(bwd_chunk_id)
        for each in transfers:
            each.tensor = self._outside_buffers(bwd_chunk_id, each.tensor)
        return self._started("B", bwd_chunk_id, transfers)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        # the stage before, on the same rank, may read the gradients when the buffers are in use again
        return tuple(self._outside_buffers(mb_index, gradient) for gradient in super().get_local_bwd_output(mb_index))

    def _outside_buffers(self, microbatch: int, gradient: Any) -> Any:
        """Return a copy of a gradient that is a view of a receive buffer; any other value as it is."""
        if not isinstance(gradient, Tensor):
            return gradient
        buffers = (getattr(info, "buffer", None) for info in self.grad_recv_info.get(microbatch, ()))
        storages = {buffer.untyped_storage().data_ptr() for buffer in buffers if isinstance(buffer, Tensor)}
        return gradient.clone() if gradient.untyped_storage().data_ptr() in storages else gradient

    def _started(self, kind: str, microbatch: int, transfers: list[dist.P2POp]) -> list[dist.P2POp]:
        """Start the sends of a pass, or return them for the schedule to start."""
        transfers = self._with_links(transfers)
        if not self._frees_sent:
            return transfers
        self._sending[kind, microbatch] = start_transfers(transfers)
        return []

    def end_sends(self, *passes: tuple[str, int]) -> None:
        """Wait for the sends of these passes (kind and microbatch), or of all."""
        for key in passes or tuple(self._sending):
            for work in self._sending.pop(key, ()):
                work.wait()

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
        self.end_sends(("F", bwd_chunk_id), ("B", bwd_chunk_id - 2))
        with action("B" if full_backward else "I", self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self._give_up_buffers(bwd_chunk_id)
            self._ended(self.stage_index)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with action("W", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._give_up_buffers(bwd_chunk_id)

    def _give_up_buffers(self, microbatch: int) -> None:
        """After the first microbatch, make new receive buffers for gradients: if the stage sends a view of a parameter, the parameter's
        gradient is a view of the old ones, to which later microbatches add theirs."""
        for info in self.grad_recv_info.get(0, ()) if microbatch == 0 else ():
            if isinstance(getattr(info, "buffer", None), Tensor):
                info.buffer = torch.empty_like(info.buffer)


class _ReceiveBuffers(dict[int, Any]):
    """The receive buffers of torch's stage, for ``depth`` microbatches only: later microbatches reuse the buffers of finished ones.

    torch allocates buffers for each microbatch of the step, and keeps all of them.
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        self._depth = depth

    def __setitem__(self, microbatch: int, infos: Any) -> None:
        super().__setitem__(microbatch, self.get(microbatch - self._depth, infos))


def _actions(order: Iterable[Any]) -> Iterator[tuple[Any, int, int]]:
    """Yield the kind, the stage and the microbatch of each of torch's actions."""
    for group in order:
        for each in group.sub_actions or (group,):
            yield each.computation_type, each.stage_index, each.microbatch_index


def received_at_once(order: Iterable[Any]) -> tuple[dict[int, int], dict[int, int]]:
    """Return for how many microbatches each stage of a rank needs buffers for inputs, and for gradients, if the rank runs these actions of
    a torch schedule. A buffer is in use from the receive until the microbatch's backward pass, with all of its parts, has ended; between
    two stages of this rank, it has the result of the other stage."""
    mine = {stage for kind, stage, _ in _actions(order) if kind == FORWARD}
    in_use: tuple[dict[int, set[int]], dict[int, set[int]]] = defaultdict(set), defaultdict(set)
    depths: tuple[dict[int, int], dict[int, int]] = {}, {}

    def receive(of_gradients: bool, stage: int, microbatch: int) -> None:
        used = in_use[of_gradients][stage]
        used.add(microbatch)
        depths[of_gradients][stage] = max(depths[of_gradients].get(stage, 1), max(used) - min(used) + 1)

    for group in order:
        actions = list(_actions([group]))  # both passes of a pair run at the same time
        for kind, stage, microbatch in actions:
            if kind == RECV_F:
                receive(False, stage, microbatch)
            elif kind == RECV_B:
                receive(True, stage, microbatch)
            elif kind == FORWARD and stage + 1 in mine:
                receive(False, stage + 1, microbatch)
            elif kind in (FULL_BACKWARD, BACKWARD_INPUT) and stage - 1 in mine:
                receive(True, stage - 1, microbatch)
        for kind, stage, microbatch in actions:
            if kind in (FULL_BACKWARD, BACKWARD_WEIGHT):
                for stages in in_use:
                    stages[stage].discard(microbatch)
    return depths


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
        for stage in self._stages:
            stage.end_sends()

    def _make_schedule(self) -> Any:
        self._stages = stages = [self._stage(index) for index in self.world.stages]
        # scale_grads would divide the gradients by the number of microbatches
        options: dict[str, Any] = {"loss_fn": lambda loss, _: self._term(loss), "scale_grads": False}
        name = self.program.plan["schedule"]
        if name in self.schedules:
            schedule = self.schedules[name](stages, self.microbatches, **options)
            inputs, gradients = received_at_once(schedule.pipeline_order_with_comms[schedule.rank])
        else:
            (stage,) = stages
            schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name](stage, self.microbatches, **options)
            # an input is received after the backward pass of the microbatch whose buffer it takes, a gradient after the one before
            inputs = {stage.stage_index: self.world.pipeline - stage.stage_index} if name == "1f1b" else {}
            gradients = {stage.stage_index: 1}
        for stage in stages:
            if stage.stage_index in inputs:
                stage.args_recv_info = _ReceiveBuffers(inputs[stage.stage_index])
            if stage.stage_index in gradients:
                stage.grad_recv_info = _ReceiveBuffers(gradients[stage.stage_index])
        return schedule

    def _stage(self, index: int) -> TracedStage:
        options: dict[str, Any] = {
            "input_args": self.receives(index),
            "output_args": torch.empty((), device="meta", requires_grad=True)
            if index == self.last
            else self.sends(index),
            "group": self.world.mesh.get_group("pipeline"),
            "links": self.world.links,
            "ended": self._backward_ended,
            "frees_sent": self.program.plan["schedule"] in self.schedules,
        }
        return self._make_stage((self._modules[index], index, self.last + 1, self.world.device), options)

    def _make_stage(self, place: Place, options: dict[str, Any]) -> TracedStage:
        """Return torch's stage; ``place`` is its module, its index, the number of stages and the device."""
        return TracedStage(*place, **options)
