"""Runs this rank's pipeline stages by torch's schedules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
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
    SEND_B,
    SEND_F,
)
from torch.distributed.tensor import DTensor

from .microbatches import Microbatches
from .processes import start_transfers
from .tracing import action

Place = tuple[nn.Module, int, int, torch.device]
Pass = tuple[str, int, int]
"""A forward (``"F"``) or a backward pass (``"B"``), its stage and its microbatch."""


class TracedStage(PipelineStage):
    """A stage of torch's pipeline whose actions have names in a profile.

    ``links`` maps a peer rank to the process group for transfers with it; if it is empty, transfers use the pipeline's group. Torch before
    2.13 issues each transfer as a batch, and NCCL runs the batches of a group in the order of issue: an interleaved schedule of 8 ranks
    took 1.5 times as long over the pipeline's group. ``ended`` is called with the stage's index after each unsplit backward pass.

    ``sends`` starts the sends if the rank has several stages; otherwise the schedule does.

    If a layer passes a gradient on unchanged, a stage would send from its receive buffer, which the gradient of a later microbatch
    overwrites (``_ReceiveBuffers``): it sends a copy. Outputs have arrived before the backward pass that ends the use of their buffer.
    """

    sends: _Sends | None = None

    def __init__(
        self, *place: Any, links: Mapping[int, dist.ProcessGroup], ended: Callable[[int], None], **options: Any
    ) -> None:
        super().__init__(*place, **options)
        self._links, self._ended = links, ended

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._with_links(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._started(super().get_fwd_send_ops(fwd_chunk_id), ("F", self.stage_index, fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._with_links(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        transfers = super().get_bwd_send_ops(bwd_chunk_id)
        received = _storages(self.grad_recv_info)
        for each in transfers:
            each.tensor = _copied_from(received, each.tensor)
        return self._started(transfers, ("B", self.stage_index, bwd_chunk_id))

    def _started(self, transfers: list[dist.P2POp], sender: Pass) -> list[dist.P2POp]:
        """Start the sends of a pass, or return them for the schedule to start."""
        transfers = self._with_links(transfers)
        if self.sends is None:
            return transfers
        self.sends.start(sender, transfers)
        return []

    def get_local_bwd_output(self, mb_index: int) -> Any:
        received = _storages(self.grad_recv_info)
        return tuple(_copied_from(received, gradient) for gradient in super().get_local_bwd_output(mb_index))

    def _with_links(self, transfers: list[dist.P2POp]) -> list[dist.P2POp]:
        if not self._links:
            return transfers
        return [dist.P2POp(each.op, each.tensor, each.peer, self._links[each.peer]) for each in transfers]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        if self.sends is not None:
            self.sends.end_before(("F", self.stage_index, fwd_chunk_id))
        with action("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if self.sends is not None:
            self.sends.end_before(("B", self.stage_index, bwd_chunk_id))
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
        received = _storages({0: self.grad_recv_info.get(0, ())})
        for parameter in self.submod.parameters() if received else ():
            gradient = parameter.grad  # a DTensor isn't a view of a buffer: FSDP2 has reduced the gradient
            if gradient is None or isinstance(gradient, DTensor):
                continue
            if gradient.untyped_storage().data_ptr() in received:
                parameter.grad = gradient.clone()


def _storages(received: Mapping[int, Iterable[Any]]) -> set[int]:
    """Return the addresses of the storages of torch's receive buffers, by microbatch."""
    buffers = (getattr(info, "buffer", None) for infos in received.values() for info in infos)
    return {buffer.untyped_storage().data_ptr() for buffer in buffers if isinstance(buffer, Tensor)}


def _copied_from(received: Container[int], value: Any) -> Any:
    """Return a copy of a tensor whose storage is one of the ``received``; any other value as it is."""
    is_view = isinstance(value, Tensor) and value.untyped_storage().data_ptr() in received
    return value.clone() if is_view else value


class _ReceiveBuffers(dict[int, Any]):
    """The receive buffers of torch's stage, for ``depth`` microbatches only: later microbatches reuse the buffers of finished ones.

    torch allocates buffers for each microbatch of the step, and keeps all of them.
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        self._depth = depth

    def __setitem__(self, microbatch: int, infos: Any) -> None:
        super().__setitem__(microbatch, self.get(microbatch - self._depth, infos))


class _Sends:
    """The sends of a rank's stages that have not ended.

    torch's schedules with several stages per rank hold all tensors that they send until the step ends. Here the rank waits for a send, and
    frees its tensor, before the first pass whose inputs show that the tensor was used, so that it never waits longer than for these
    inputs. ``orders`` are the actions of all pipeline ranks, as torch lists them.
    """

    def __init__(self, orders: Mapping[int, Sequence[Any]], rank: int) -> None:
        self._shown_by = used_before(orders, rank)
        self._works: dict[Pass, list[dist.Work]] = {}

    def start(self, sender: Pass, transfers: list[dist.P2POp]) -> None:
        """Start the transfers of what a pass has computed."""
        self._works[sender] = start_transfers(transfers)

    def end_before(self, receiver: Pass) -> None:
        """Wait for the sends that have ended when the inputs of this pass have arrived."""
        for sender in self._shown_by.get(receiver, ()):
            self._wait(sender)

    def end(self) -> None:
        """Wait for all sends."""
        for sender in list(self._works):
            self._wait(sender)

    def _wait(self, sender: Pass) -> None:
        for work in self._works.pop(sender, ()):
            work.wait()


def _passes(order: Iterable[Any]) -> Iterator[tuple[Any, int, int]]:
    """Yield the kind, the stage and the microbatch of each of torch's actions."""
    for group in order:
        for each in group.sub_actions or (group,):
            yield each.computation_type, each.stage_index, each.microbatch_index


def used_before(orders: Mapping[int, Sequence[Any]], rank: int) -> dict[Pass, list[Pass]]:
    """Map passes of a pipeline rank to those whose results other ranks have used when its inputs have arrived: the sender of the inputs
    used them before."""
    mine = {stage for kind, stage, _ in _passes(orders[rank]) if kind == FORWARD}
    found: dict[Pass, list[Pass]] = {}
    for peer, order in orders.items():
        used: list[Pass] = []
        for kind, stage, microbatch in _passes(order if peer != rank else ()):
            if kind == FORWARD and stage - 1 in mine:
                used.append(("F", stage - 1, microbatch))
            elif kind in (FULL_BACKWARD, BACKWARD_INPUT) and stage + 1 in mine:
                used.append(("B", stage + 1, microbatch))
            elif kind == SEND_F and stage + 1 in mine:
                found["F", stage + 1, microbatch], used = used, []
            elif kind == SEND_B and stage - 1 in mine:
                found["B", stage - 1, microbatch], used = used, []
    return found


def received_at_once(order: Iterable[Any]) -> tuple[dict[int, int], dict[int, int]]:
    """Return for how many microbatches each stage of a rank needs buffers for inputs, and for gradients, if the rank runs these actions of
    a torch schedule. A buffer is in use from the receive until the microbatch's backward pass, with all of its parts, has ended; between
    two stages of this rank, it has the result of the other stage."""
    mine = {stage for kind, stage, _ in _passes(order) if kind == FORWARD}
    in_use: tuple[dict[int, set[int]], dict[int, set[int]]] = defaultdict(set), defaultdict(set)
    depths: tuple[dict[int, int], dict[int, int]] = {}, {}
    for group in order:
        ended = []  # both passes of a pair run at the same time
        for kind, stage, microbatch in _passes([group]):
            receiver = None
            if kind == RECV_F or (kind == FORWARD and stage + 1 in mine):
                receiver = 0, stage + (kind == FORWARD)
            elif kind == RECV_B or (kind in (FULL_BACKWARD, BACKWARD_INPUT) and stage - 1 in mine):
                receiver = 1, stage - (kind != RECV_B)
            if receiver is not None:
                which, index = receiver
                in_use[which][index].add(microbatch)
                used = in_use[which][index]
                depths[which][index] = max(depths[which].get(index, 1), max(used) - min(used) + 1)
            if kind in (FULL_BACKWARD, BACKWARD_WEIGHT):
                ended.append((stage, microbatch))
        for stage, microbatch in ended:
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

    _sends: _Sends | None = None

    def _prepare(self) -> None:
        self._schedule = self._make_schedule()

    def step(self, inputs: dict[str, Tensor]) -> None:
        # the schedule requires a target; the stage computes the loss
        target = torch.zeros(self.microbatches, device=self.world.device)
        self._schedule.step(target=target, return_outputs=False, **inputs)
        if self._sends is not None:
            self._sends.end()

    def _make_schedule(self) -> Any:
        stages: list[Any] = [self._stage(index) for index in self.world.stages]
        # scale_grads would divide the gradients by the number of microbatches
        options: dict[str, Any] = {"loss_fn": lambda loss, _: self._term(loss), "scale_grads": False}
        name = self.program.plan["schedule"]
        if name in self.schedules:
            schedule = self.schedules[name](stages, self.microbatches, **options)
            orders, rank = schedule.pipeline_order_with_comms, schedule.rank
            inputs, gradients = received_at_once(orders[rank])
            self._sends = _Sends(orders, rank)
        else:
            (stage,) = stages
            schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name](stage, self.microbatches, **options)
            # an input is received after the backward pass of the microbatch whose buffer it takes, a gradient after the one before
            inputs = {stage.stage_index: self.world.pipeline - stage.stage_index} if name == "1f1b" else {}
            gradients = {stage.stage_index: 1}
        for stage in stages:
            stage.sends = self._sends
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
        }
        return self._make_stage((self._modules[index], index, self.last + 1, self.world.device), options)

    def _make_stage(self, place: Place, options: dict[str, Any]) -> TracedStage:
        """Return torch's stage; ``place`` is its module, its index, the number of stages and the device."""
        return TracedStage(*place, **options)
