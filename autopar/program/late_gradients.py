"""Applies gradients late (delayed SGD, Langford et al. 2009, arXiv:0911.0491; stale synchronous parallel training, Ho et al. 2013, also
allows fresher ones): an update uses the gradients of ``ProgramSpec.late`` steps ago, and the first updates use zeros.

A step's gradients are summed over the replicas while the following steps compute: each group's gradients are copied, an async reduction of
the copy starts, and the update that needs the sum waits for it. A checkpoint stores the sums that no update has used yet as optimizer
state.
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

_KEY_PREFIX = "late_"
"""A sum's key in a checkpoint's optimizer state is this prefix, followed by the number of updates that come before the sum is used."""


@dataclass(eq=False)
class _Sum:
    """A copy of a group's gradients of one step; ``work`` is the async reduction that sums it over the replicas."""

    step: int
    gradients: Tensor
    work: Work | None = None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.gradients


class LateReductions(Reductions):
    """Starts the reductions of a rank's groups; later updates wait for them."""

    def __init__(self, program: LoadedProgram, by_stage: Mapping[int, Sequence[ParameterGroup]]) -> None:
        super().__init__(program, by_stage)
        self._delay = program.spec.late
        self._step = 0  # the number of updates so far
        self._uses_due = False  # whether the groups' gradients are those of the next update
        self._sums: dict[FlatGroup, list[_Sum]] = {
            group: [] for group in self._groups if isinstance(group, FlatGroup) and group.masters
        }

    def clear(self) -> None:
        super().clear()
        self.discard()

    def discard(self) -> None:
        """Discard the gradients since the last update, for example because their loss is not finite, or because no update uses them."""
        for sums in self._sums.values():
            while sums and sums[-1].step == self._step:
                sums.pop().wait()

    def _start(self, group: FlatGroup) -> None:
        if group not in self._sums:  # its parameters are not trained
            super()._start(group)
            return
        self._sums[group].append(_Sum(self._step, *group.start_reduction_of_copy()))
        self._uses_due = False

    @torch.no_grad()
    def use_last_gradients(self) -> None:
        """Set the groups' gradients to those of the last forward and backward pass."""
        for group, sums in self._sums.items():
            group.flat_gradients.copy_(sums[-1].wait())
        self._uses_due = False

    @torch.no_grad()
    def use_due_gradients(self) -> None:
        """Set the groups' gradients to the sums that the next update uses."""
        if self._uses_due:
            return
        for group, sums in self._sums.items():
            group.flat_gradients.zero_()
            for due in [s for s in sums if s.step + self._delay <= self._step]:
                group.flat_gradients.add_(due.wait())
                sums.remove(due)
        self._uses_due = True

    def advance(self) -> None:
        """Count an update, even if it was skipped."""
        self._step, self._uses_due = self._step + 1, False

    @contextlib.contextmanager
    def sums_in_state(self, updates: Updates) -> Iterator[None]:
        """Add the sums that no update has used yet to the optimizer's state inside this context, so that a checkpoint includes them.

        Raises ``CheckpointError`` if the optimizer needs unsharded tensors: these sums are sharded.
        """
        states, known = updates.optimizer.state, {id(master.tensor) for master in updates.masters}
        added = []
        for group, sums in self._sums.items():
            for master in group.masters:
                if id(master.tensor) not in known:
                    raise CheckpointError(
                        f"the optimizer needs {master.layout.original} unsharded, and gradients are applied "
                        f"{self._delay} updates late: a checkpoint cannot store the gradients that later updates use",
                        "train with an elementwise optimizer, or with another synchronization",
                    )
                for late in sums:
                    key = f"{_KEY_PREFIX}{late.step + self._delay - self._step}"
                    states.setdefault(master.tensor, {})[key] = _part(late.wait(), group, master.holder)
                    added.append((master.tensor, key))
        try:
            yield
        finally:
            for tensor, key in added:
                del states[tensor][key]
                if not states[tensor]:
                    del states[tensor]

    @torch.no_grad()
    def take_sums_from_state(self, updates: Updates) -> None:
        """Move the sums of a loaded checkpoint from the optimizer's state to this object."""
        self._step, self._uses_due = 0, False
        for group, sums in self._sums.items():
            found: dict[int, _Sum] = {}
            for master in group.masters:
                state = updates.optimizer.state.get(master.tensor, {})
                for key in [key for key in state if key.startswith(_KEY_PREFIX)]:
                    step = int(key.removeprefix(_KEY_PREFIX)) - self._delay
                    late = found.setdefault(step, _Sum(step, torch.zeros_like(group.flat_gradients)))
                    _part(late.gradients, group, master.holder).copy_(state.pop(key))
            sums[:] = [found[step] for step in sorted(found)]


def _part(gradients: Tensor, group: FlatGroup, holder: Tensor) -> Tensor:
    """Return the part of a group's ``gradients`` that belongs to the parameter ``holder``."""
    view = holder.grad
    assert view is not None
    start = view.storage_offset() - group.flat_gradients.storage_offset()
    return gradients[start : start + view.numel()].view(view.shape)
