"""Gradients that are applied late (delayed SGD, Langford et al. 2009, arXiv:0911.0491; staleness as in stale synchronous parallel training,
Ho et al. 2013): the update of a step uses the gradients of the step ``ProgramSpec.late`` steps before, and the first ones use zeros.

A step's gradients are summed over the replicas while the following steps compute: each group's gradients are copied, the sum of the copy
starts as a reduction would, and it is awaited when an update needs it. A checkpoint has the sums that no update has used yet, as states of
the optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .checkpoint_files import CheckpointError
from .collectives import Work
from .optimizers import Updates
from .parameters import FlatGroup, ParameterGroup
from .reductions import Reductions
from .world import LoadedProgram

_STATE = "late_"
"""The prefix of such sums' names in a checkpoint's optimizer state; the number of updates until their use follows."""


@dataclass(eq=False)
class _Sum:
    """A group's gradients of one step, which are summed while ``work`` runs."""

    step: int
    gradients: Tensor
    work: Work | None = None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.gradients


class LateReductions(Reductions):
    """Starts the reductions of a rank's groups, which later updates await."""

    def __init__(self, program: LoadedProgram, by_stage: Mapping[int, Sequence[ParameterGroup]]) -> None:
        super().__init__(program, by_stage)
        self._by = program.spec.late
        self._step = 0  # the updates so far
        self._placed = False  # whether the groups have the gradients of the next update
        self._sums: dict[FlatGroup, list[_Sum]] = {
            group: [] for group in self._groups if isinstance(group, FlatGroup) and group.masters
        }

    def clear(self) -> None:
        super().clear()
        self.leave_out()

    def leave_out(self) -> None:
        """Discard the gradients since the last update: no update follows them, or their loss is not finite."""
        for sums in self._sums.values():
            while sums and sums[-1].step == self._step:
                sums.pop().wait()

    def _start(self, group: FlatGroup) -> None:
        if group not in self._sums:  # of parameters that are not trained
            super()._start(group)
            return
        self._sums[group].append(_Sum(self._step, *group.start_reduction_of_copy()))
        self._placed = False

    @torch.no_grad()
    def show(self) -> None:
        """Set the groups' gradients to those of the last forward and backward pass."""
        for group, sums in self._sums.items():
            group.flat_gradients.copy_(sums[-1].wait())
        self._placed = False

    @torch.no_grad()
    def place(self) -> None:
        """Set the groups' gradients to those that the next update uses."""
        if self._placed:
            return
        for group, sums in self._sums.items():
            due = [each for each in sums if each.step + self._by <= self._step]
            group.flat_gradients.zero_()
            for each in due:
                group.flat_gradients.add_(each.wait())
                sums.remove(each)
        self._placed = True

    def advance(self) -> None:
        """Count an update, also a skipped one."""
        self._step, self._placed = self._step + 1, False

    @contextlib.contextmanager
    def saved(self, updates: Updates) -> Iterator[None]:
        """A context in which the sums that no update has used yet are states of the optimizer.

        Raises ``CheckpointError`` if the optimizer needs unsharded tensors, which these are not.
        """
        states, known = updates.optimizer.state, {id(master.tensor) for master in updates.masters}
        added = []
        for group, sums in self._sums.items():
            for master in group.masters:
                if id(master.tensor) not in known:
                    raise CheckpointError(
                        f"the optimizer needs {master.layout.original} unsharded, and gradients are applied "
                        f"{self._by} updates late: a checkpoint cannot have those that wait",
                        "train with an elementwise optimizer, or with another synchronization",
                    )
                for each in sums:
                    state = (
                        states.setdefault(master.tensor, {}) if master.tensor not in states else states[master.tensor]
                    )
                    key = f"{_STATE}{each.step + self._by - self._step}"
                    state[key] = _part(each.wait(), group, master.holder)
                    added.append((master.tensor, key))
        try:
            yield
        finally:
            for tensor, key in added:
                del states[tensor][key]
                if not states[tensor]:
                    del states[tensor]

    @torch.no_grad()
    def loaded(self, updates: Updates) -> None:
        """After a checkpoint was loaded: take its sums from the optimizer's states."""
        self._step, self._placed = 0, False
        for group, sums in self._sums.items():
            found: dict[int, _Sum] = {}
            for master in group.masters:
                state = updates.optimizer.state.get(master.tensor, {})
                for key in [key for key in state if key.startswith(_STATE)]:
                    step = int(key.removeprefix(_STATE)) - self._by
                    each = found.setdefault(step, _Sum(step, torch.zeros_like(group.flat_gradients)))
                    _part(each.gradients, group, master.holder).copy_(state.pop(key))
            sums[:] = [found[step] for step in sorted(found)]


def _part(gradients: Tensor, group: FlatGroup, holder: Tensor) -> Tensor:
    """The elements of a group's ``gradients`` that the gradient of ``holder`` has."""
    view = holder.grad
    assert view is not None
    start = view.storage_offset() - group.flat_gradients.storage_offset()
    return gradients[start : start + view.numel()].view(view.shape)
