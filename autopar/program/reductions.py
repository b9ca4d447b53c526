"""When a rank reduces its gradients: most reductions run under the backward pass.

FSDP2 reduces the gradients of its layers (ZeRO 2 and 3) by itself, in every microbatch, or, where the plan says so, in the last one alone
(``LastBackward``). The flat groups' gradients (ZeRO 0 and 1) are always reduced once a step: a group's reduction starts as soon as the last
microbatch has given the group's last gradient, while the backward pass goes on in earlier layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from autopar.program.parameters import FlatGroup, Group, ShardedGroup
from autopar.program.world import Program

IN_FLIGHT = 2  # reductions that run at a time: one is on the network while the next is being prepared


class LastBackward:
    """Lets FSDP reduce the gradients of ``layers`` of one stage in the last of the step's ``microbatches`` backward passes alone.

    In the passes before, FSDP adds up whole gradients on each rank. Every schedule runs the backward passes of a stage one after the
    other: the last one is the one that begins after all others, whichever microbatch it belongs to.
    """

    def __init__(self, layers: Sequence[FSDPModule], microbatches: int) -> None:
        self._layers, self._microbatches = layers, microbatches
        self._begun = 0

    def clear(self) -> None:
        """Before a step."""
        self._begun = 0

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """Expect the backward pass of a microbatch from its ``outputs``: it begins at one of them."""
        begun = False

        def begin(_: Tensor) -> None:
            nonlocal begun
            if not begun:
                begun = True
                self._begin()

        for output in outputs if self._layers else ():
            if output.requires_grad:
                output.register_hook(begin)

    def _begin(self) -> None:
        self._begun += 1
        if self._begun in (1, self._microbatches):
            for layer in self._layers:
                layer.set_requires_gradient_sync(self._begun == self._microbatches, recurse=False)

    def finish(self) -> None:
        """After a step. Raises ``RuntimeError`` if gradients were left unreduced. A stage without gradients has no backward passes."""
        if self._begun not in (0, self._microbatches):
            raise RuntimeError(
                f"a stage had {self._begun} backward passes in a step of {self._microbatches} microbatches, and its gradients are not "
                "reduced"
            )


class Reductions:
    """Starts the reductions of a rank's groups, and waits for them.

    All ranks of a process group must start its collectives in one order. The flat groups are therefore in a fixed order, as DDP's buckets
    are: from the last layer to the first. A group that is complete waits until all groups before it have started, and the groups that are
    left when the schedule ends start then. So the order depends neither on which gradients a rank got nor on when it got them.

    Two kinds of groups start after the schedule on every rank, because ``model.py`` says so and whatever happens in a step: tied copies in
    several stages, which are summed over the stages first; and parameters of layers with opaque modules or a user's ops, which may leave
    out a gradient on one rank alone. That rank would start the reduction later than the others, between other collectives of the layers.
    All other layers are graphs of torch's ops and of kernels, in which a parameter has a gradient on all ranks or on none.
    """

    def __init__(self, program: Program, by_stage: Mapping[int, Sequence[Group]]) -> None:
        self._groups = [group for groups in by_stage.values() for group in groups]
        self._early: list[FlatGroup] = []
        for stage in sorted(by_stage, reverse=True):
            self._early += _early(by_stage[stage], program.model.STAGES[stage].GROUPS)
        self._late = [group for group in self._groups if isinstance(group, FlatGroup) and group not in self._early]
        self._last = {stage: _last_backward(groups, program) for stage, groups in by_stage.items()}
        self._started = 0  # of the early groups
        self._running: list[FlatGroup] = []
        for group in self._early:
            group.arrivals.complete = weakref.WeakMethod(self._advance)

    def clear(self) -> None:
        """Before a step: forget the last one's gradients."""
        for group in self._groups:
            group.zero_grad()
        for last in self._last.values():
            last.clear()
        self._started = 0

    def watch(self, stage: int, outputs: Sequence[Tensor]) -> None:
        """Called with the outputs of a stage for every microbatch, before its backward pass."""
        self._last[stage].watch(outputs)

    def _advance(self) -> None:
        """Start the reductions of the next groups in order that are complete."""
        while self._started < len(self._early) and self._early[self._started].arrivals.missing == 0:
            self._start(self._early[self._started])
            self._started += 1

    def _start(self, group: FlatGroup) -> None:
        """Start a reduction once the last but one has ended: each holds its result, and on CPUs a copy of its input."""
        if len(self._running) == IN_FLIGHT:
            self._running.pop(0).finish_reduction()
        group.start_reduction()
        if self._running:
            self._running[-1].continue_reduction()
        self._running.append(group)

    def start(self) -> None:
        """After the schedule: start the reductions that are left, those of tied copies after the sum over their stages."""
        for group in self._early[self._started :]:
            self._start(group)
        self._started = len(self._early)
        copies: dict[str, list[FlatGroup]] = {}
        for group in self._late:
            group.settle()
            if group.shared is not None:
                copies.setdefault(group.shared, []).append(group)
        for key in sorted(copies):  # one order on every rank
            first, *others = copies[key]
            first.reduce_over_stages(others)
        for group in self._late:
            self._start(group)

    def finish(self) -> None:
        """Wait for all reductions. Raises ``RuntimeError`` if FSDP did not reduce some gradients."""
        for last in self._last.values():
            last.finish()
        for flat in self._running:
            flat.continue_reduction()
        for flat in self._running:
            flat.finish_reduction()
        self._running.clear()
        for group in self._groups:
            if not isinstance(group, FlatGroup):
                group.finish_reduction()


def _last_backward(groups: Sequence[Group], program: Program) -> LastBackward:
    layers = [group.module for group in groups if isinstance(group, ShardedGroup) and group.reduces_once]
    return LastBackward(layers, program.passes)


def _early(groups: Sequence[Group], records: Mapping[str, Mapping[str, object]]) -> list[FlatGroup]:
    """The groups of a stage that are reduced under the backward pass, in order; ``records`` are the stage's ``GROUPS``."""
    found = [group for group in groups if isinstance(group, FlatGroup) and group.is_reduced and group.shared is None]
    found = [group for group in found if not records[group.child].get("opaque")]
    # The stage's own parameters come last: an early layer may use them.
    children = [*(child for child in reversed(list(records)) if child), ""]
    return sorted(found, key=lambda group: children.index(group.child))
