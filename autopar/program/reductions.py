"""Decides when a rank reduces its gradients and when it sends updated parameters, so that most of this overlaps the computation.

FSDP2 reduces the gradients of its layers (ZeRO 2 and 3) by itself (``fsdp``). The flat groups' gradients (ZeRO 0 and 1) are always reduced
once a step: a group's reduction starts as soon as the last microbatch has computed the group's last gradient, while the backward pass
continues in earlier layers. Under Chimera a stage's reductions start where its schedule says so (``start_stage``).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from .parameters import FlatGroup, ParameterGroup
from .spec import LayerSpec
from .world import LoadedProgram


class Reductions:
    """Starts the reductions of a rank's groups, and waits for them.

    All ranks of a process group must start its collectives in one order. The flat groups are therefore in a fixed order, as DDP's buckets
    are: from the last layer to the first. A complete group waits until all groups before it have started; groups that are incomplete when
    the schedule ends start then. So the order depends neither on which gradients a rank got nor on when it got them.

    Two kinds of groups always start after the schedule, on every rank: tied copies in several stages, which are summed over the stages
    first; and parameters of layers with opaque modules or a user's ops (``LayerSpec.opaque``), which may lack a gradient on one rank
    alone. That rank would start the reduction later than the others, between other collectives of the layers.
    All other layers are graphs of torch's ops and of kernels, in which a parameter has a gradient on all ranks or on none.
    """

    def __init__(self, program: LoadedProgram, by_stage: Mapping[int, Sequence[ParameterGroup]]) -> None:
        self._groups = [group for groups in by_stage.values() for group in groups]
        self._by_stage, fsdp = by_stage, program.spec.fsdp
        found = {stage: _early(by_stage[stage], program.layers[stage]) for stage in sorted(by_stage, reverse=True)}
        ordered = [group for groups in found.values() for group in groups]
        chimera = program.directions == 2
        self._chimera_groups, self._early = (found, []) if chimera else ({}, ordered)
        self._late = [group for group in self._groups if isinstance(group, FlatGroup) and group not in ordered]
        self._limits = _limits(ordered)
        flat = [*ordered, *self._late]
        device = torch.get_device_module(flat[0].device if flat else "cpu")
        self._on_stream, self._stream = device.stream, device.Stream()
        self._fsdp = {} if fsdp is None else {stage: fsdp.last_backward(by_stage[stage], program) for stage in by_stage}
        self._started = 0  # the number of early groups whose reductions have started
        self._running: list[FlatGroup] = []
        for group in self._early:
            group.gradient_counter.complete = weakref.WeakMethod(self._advance)

    def clear(self) -> None:
        """Forget the last step's gradients, before another step."""
        for group in self._groups:
            group.zero_grad()
        for last in self._fsdp.values():
            last.begin_step()
        self._started = 0

    def watch(self, stage: int, outputs: Sequence[Tensor]) -> None:
        """Tell FSDP when the backward pass of a stage's ``outputs`` begins. The stage calls this in every forward pass."""
        if self._fsdp:
            self._fsdp[stage].watch(outputs)

    def _advance(self) -> None:
        """Start the reductions of the next groups, in order, as long as their gradients are complete."""
        while self._started < len(self._early) and self._early[self._started].gradient_counter.missing == 0:
            self._start(self._early[self._started])
            self._started += 1

    def _start(self, group: FlatGroup) -> None:
        """Start a reduction. Running reductions keep at most the bytes of two layers' reductions, which the cost model counts; ZeRO 0 sums
        in place and keeps nothing, so any number of its reductions may run."""
        limit = self._limits.get(group, group.reduction_bytes)
        while group.reduction_bytes and self._kept() + group.reduction_bytes > limit:
            oldest = next(other for other in self._running if other.reduction_bytes)
            self._running.remove(oldest)
            oldest.finish_reduction()
        group.start_reduction()
        if self._running:
            self._continue(self._running[-1])
        self._running.append(group)

    def _kept(self) -> int:
        return sum(group.reduction_bytes for group in self._running)

    def _continue(self, group: FlatGroup) -> None:
        """Under HSDP, start a reduction's all-reduce over the copies. It needs the reduce-scatter's result, for which a separate stream
        waits, so that the backward pass does not."""
        with self._on_stream(self._stream):
            group.continue_reduction()

    def start_stage(self, stage: int) -> None:
        """Start the reductions of a stage's gradients under Chimera, when all backward passes of both its copies have run. The ranks of
        both copies do this at the same point in the order of their transfers."""
        for group in self._chimera_groups[stage]:
            self._start(group)
        for member in self._by_stage[stage]:
            member.start_sum_over_copies()

    def start(self) -> None:
        """Start the remaining reductions after the schedule; tied copies are summed over their stages first."""
        for group in self._early[self._started :]:
            self._start(group)
        self._started = len(self._early)
        copies: dict[str, list[FlatGroup]] = {}
        for group in self._late:
            group.zero_missing_gradients()
            if group.shared is not None:
                copies.setdefault(group.shared, []).append(group)
        for key in sorted(copies):  # one order on every rank
            first, *others = copies[key]
            first.reduce_over_stages(others)
        for group in self._late:
            self._start(group)

    def finish(self) -> None:
        """Wait for all reductions. Raises ``RuntimeError`` if FSDP did not reduce some gradients."""
        for last in self._fsdp.values():
            last.finish()
        for flat in self._running:
            self._continue(flat)
        for flat in self._running:
            flat.finish_reduction()
        self._running.clear()
        for group in self._groups:
            if not isinstance(group, FlatGroup):
                group.finish_reduction()


def _limits(groups: Sequence[FlatGroup]) -> dict[FlatGroup, int]:
    """Return, for each group, the bytes that running reductions may keep when its own reduction starts: those of the group's layer and of
    the previous layer in the order of ``groups``."""
    layers = [list(own) for _, own in itertools.groupby(groups, key=lambda group: (group.stage, group.placement.layer))]
    kept = [sum(group.reduction_bytes for group in own) for own in layers]
    return {
        group: own + before for before, own, groups in zip([0, *kept], kept, layers, strict=False) for group in groups
    }


def _early(groups: Sequence[ParameterGroup], layers: Mapping[str, LayerSpec]) -> list[FlatGroup]:
    """Return the groups of a stage that may be reduced during the backward pass, in order; ``layers`` are the stage's."""
    found = [group for group in groups if isinstance(group, FlatGroup) and group.is_reduced and group.shared is None]
    found = [group for group in found if not layers[group.placement.layer].opaque]
    # The stage's own parameters come last: an early layer may use them.
    children = [*(child for child in reversed(list(layers)) if child), ""]
    return sorted(found, key=lambda group: children.index(group.placement.layer))


IN_FLIGHT = 2  # publications that run at a time: one for the next layer, one for the layer after it


class Publications:
    """Sends updated parameters to the ranks that read them (ZeRO 1, a parameter server), overlapping the next forward pass.

    The first ``IN_FLIGHT`` groups are sent right after the update. Before its first forward pass of the step, a layer waits for its
    parameters, and the next groups are sent. The order is that in which the forward pass reads the groups, which is the same on all ranks
    of a process group.
    """

    def __init__(
        self, program: LoadedProgram, stages: Mapping[int, nn.Module], by_stage: Mapping[int, Sequence[ParameterGroup]]
    ) -> None:
        self._groups = [group for groups in by_stage.values() for group in groups]
        self._sent: list[FlatGroup] = []
        for index in sorted(by_stage):
            # the stage's own parameters first: any layer may read them
            children = ["", *(child for child in program.layers[index] if child)]
            sent = [group for group in by_stage[index] if isinstance(group, FlatGroup) and group.is_sent]
            for group in sorted(sent, key=lambda group: children.index(group.placement.layer)):
                place = len(self._sent)
                self._sent.append(group)
                module = stages[index].get_submodule(group.placement.layer)
                module.register_forward_pre_hook(lambda *_, place=place: self._await(place))
        self._started = self._arrived = len(self._sent)

    def start(self) -> None:
        """Publish the groups after an update: at once if no other rank needs them, otherwise in order, while training continues."""
        self.finish()
        self._started = self._arrived = 0
        for group in self._groups:
            if group not in self._sent:
                group.publish()
        self._start_next()

    def finish(self) -> None:
        """Wait until all ranks have the updated parameters."""
        self._await(len(self._sent) - 1)

    def _await(self, place: int) -> None:
        """Wait for the groups up to the one at ``place``."""
        while self._arrived <= place:
            self._sent[self._arrived].finish_publication()
            self._arrived += 1
            self._start_next()

    def _start_next(self) -> None:
        while self._started < min(self._arrived + IN_FLIGHT, len(self._sent)):
            self._sent[self._started].start_publication()
            self._started += 1
