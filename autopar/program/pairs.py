"""Runs the forward pass of one microbatch and the backward pass of another in turns, so that each pass computes while an all-to-all of the
other one is in flight (DualPipe, in DeepSeek-V3, arXiv:2412.19437, section 3.2.1).

torch's DualPipeV names the pairs of passes. The backward pass runs in a thread of its own, because autograd cannot be suspended in any
other way, but only one of the two threads runs at any time. The one that runs issues an all-to-all of a mixture of experts, hands over to
the other, and waits for its all-to-all when it is handed back. The backward pass begins: its first all-to-all, the gradient of a
combine, overlaps attention in the forward pass, and the last one of the forward pass, a combine, overlaps attention in the backward pass.

Where a pass hands over depends on the layers alone. So all ranks issue their collectives in the same order, whichever thread is faster.
All-to-alls of a recomputation do not hand over: they would take the turns of all-to-alls in the passes.

On GPUs both threads launch kernels on the same stream; all-to-alls have their own.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from threading import Semaphore
from typing import Any

import torch
from torch.distributed.pipelining import ScheduleDualPipeV
from torch.distributed.pipelining.schedules import OVERLAP_F_B

from .halves import send as start_exchange
from .split_pipeline import SplitPipeline

FORWARD, BACKWARD = 0, 1


class Turns:
    """The turns of two passes, ``FORWARD`` and ``BACKWARD``, which begins."""

    def __init__(self) -> None:
        self._turn = Semaphore(0), Semaphore(0)
        self.running, self._ended = BACKWARD, False
        self.error: BaseException | None = None
        """The error of the pass that failed first."""

    def hand_over(self, side: int) -> None:
        """Let the other pass run until it hands over. Return at once if it has ended, or if the running pass is not ``side``: the
        backward pass recomputes a forward pass."""
        if self._ended or self.running != side:
            return
        self.running = 1 - side
        self._turn[1 - side].release()
        self.wait(side)

    def run(self, side: int, compute: Callable[[], None]) -> None:
        """Run a pass in its turns. If it fails, the other pass ends at its next turn."""
        try:
            if side == FORWARD:
                self.wait(side)
            compute()
        except BaseException as error:
            self.error = self.error or error
        self._ended, self.running = True, 1 - side
        self._turn[1 - side].release()

    def wait(self, side: int) -> None:
        """Wait for the turn of a pass. Raises ``RuntimeError`` if the other pass has failed."""
        self._turn[side].acquire()
        if self.error is not None:
            raise RuntimeError("the other pass of the pair has failed")


_turns: Turns | None = None
"""The turns of the running pair; ``None`` outside of pairs."""


def _hand_over(side: int) -> None:
    if _turns is not None:
        _turns.hand_over(side)


send = functools.partial(
    start_exchange,
    issued=functools.partial(_hand_over, FORWARD),
    issued_backward=functools.partial(_hand_over, BACKWARD),
)
"""Exchanges the rows of a mixture of experts (``kernels_experts.Send``), and lets the other pass of a pair compute meanwhile."""


class _Schedule(ScheduleDualPipeV):
    """torch's schedule, whose pairs run in turns instead of one pass after the other. ``in_mesh`` returns the context of a backward pass,
    which may recompute: the current mesh belongs to a thread."""

    in_mesh: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._thread = ThreadPoolExecutor(1)
        self._stage = {stage.stage_index: stage for stage in self._stages}
        self.register_custom_function(OVERLAP_F_B, self._run_pair)

    def _run_pair(self, action: Any, ctx: Any) -> None:
        """Run a pair of actions after the receives of both."""
        global _turns
        forward, backward = action.sub_actions
        for received, one in ((self.fwd_recv_ops, forward), (self.bwd_recv_ops, backward)):
            for work in received.pop((one.stage_index, one.microbatch_index), ()):
                work.wait()
        _turns = turns = Turns()
        stream = torch.cuda.current_stream() if self._stages[0].device.type == "cuda" else None

        def run_backward() -> None:
            if stream is not None:
                torch.cuda.set_stream(stream)  # and its device: both belong to a thread
            with self.in_mesh(), torch.autograd.set_multithreading_enabled(False):  # as in the main thread
                self._backward(backward)

        other = self._thread.submit(contextvars.copy_context().run, turns.run, BACKWARD, run_backward)
        turns.run(FORWARD, functools.partial(self._forward, forward, ctx))
        other.result()
        _turns = None
        if turns.error is not None:
            raise turns.error

    def _forward(self, action: Any, context: Any) -> None:
        index, microbatch = action.stage_index, action.microbatch_index
        stage, inputs = self._stage[index], (context.arg_mbs[microbatch], context.kwarg_mbs[microbatch])
        output = stage.forward_one_chunk(microbatch, *inputs, save_forward_output=False)
        self._maybe_compute_loss(stage, output, context.target_mbs, microbatch)
        if (following := self._stage.get(index + 1)) is not None:
            following.set_local_fwd_input(output, microbatch)

    def _backward(self, action: Any) -> None:
        index, microbatch = action.stage_index, action.microbatch_index
        stage = self._stage[index]
        stage.backward_one_chunk(microbatch, loss=self._maybe_get_loss(stage, microbatch))
        self.backward_counter[index] += 1
        if (previous := self._stage.get(index - 1)) is not None:
            previous.set_local_bwd_input(stage.get_local_bwd_output(microbatch), microbatch)


class PairedPipeline(SplitPipeline):
    """A pipeline under DualPipeV whose paired passes run in turns."""

    threaded = True
    schedules = SplitPipeline.schedules | {"dualpipev": _Schedule}

    def _make_schedule(self) -> Any:
        schedule = super()._make_schedule()
        schedule.in_mesh = self.world.in_mesh
        return schedule
