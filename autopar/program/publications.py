"""When updated parameters are sent to the ranks that read them: under the forward pass of the next step.

ZeRO 1's gathers and a parameter server's broadcasts follow the optimizer's update. Those of the first layers start at once, and each layer
starts another one when its own parameters have arrived, before its first forward pass of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from .masters import ParameterGroup
from .parameters import FlatGroup
from .world import LoadedProgram

IN_FLIGHT = 2  # publications that run at a time: one for the next layer, one for the layer after it


class Publications:
    """Publishes the groups of a rank's stages, in the order in which the forward pass reads them.

    The order is the same on all ranks of a process group, because these run the same layers in the same order.
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
            for group in sorted(sent, key=lambda group: children.index(group.child)):
                place = len(self._sent)
                self._sent.append(group)
                module = stages[index].get_submodule(group.child)
                module.register_forward_pre_hook(lambda *_, place=place: self._await(place))
        self._started = self._arrived = len(self._sent)

    def start(self) -> None:
        """After an update: publish every group, or begin to."""
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
