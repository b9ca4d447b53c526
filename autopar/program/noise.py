"""The gradient noise scale: the batch size up to which a larger batch saves steps (McCandlish et al. 2018, "An Empirical Model of
Large-Batch Training", https://arxiv.org/abs/1812.06162, appendix A.1).

The batch of a step has ``n`` parts of ``b`` rows with gradients of their own. Under data parallelism with ZeRO 0 or 1 these are the ranks'
rows, whose gradients exist until the reduction. With one data-parallel replica, on one device or under tensor or pipeline parallelism,
they are the microbatches, whose gradients are the differences of the sums after each of them. The mean over the parts of the squared norm
of a part's gradient, and the squared norm of their mean, give unbiased estimates of ``|G|^2``, for the true gradient ``G``, and of the sum
``S`` of the variances of a row's gradient:

    |G|^2 = (n b |mean|^2 - b mean(|own|^2)) / (n b - b)        S = (mean(|own|^2) - |mean|^2) / (1 / b - 1 / (n b))

The noise scale is ``S / |G|^2``, in rows. Both estimates are noisy, so each is averaged over the logged steps before the division.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .microbatches import Microbatches
from .parameters import FlatGroup, ParameterGroup, norm_of

DECAY = 0.95
"""The weight of the former logged steps in the averages: about the last twenty count."""


class NoiseError(ValueError):
    """The gradients of parts of the batch can't be measured under this plan."""

    def __init__(self, why: str) -> None:
        super().__init__(f"--noise-scale compares gradients of parts of the batch, and {why}")


class NoiseScale:
    """Measures the noise scale in some steps: ``begin`` before the step, ``end`` after it; all ranks call both.

    Raises ``NoiseError`` if the program combines data parallelism with other parallelism, or has groups whose gradients aren't summed over
    all ranks at the end of the step (ZeRO 2 and 3, parameter servers, local SGD), or one replica and one microbatch. A single replica also
    needs backward passes that end one after the other, and no parameter that several stages share.
    """

    def __init__(self, groups: Sequence[ParameterGroup], schedule: Microbatches) -> None:
        ranks, share = dist.get_world_size(), schedule.share
        trained = [group for group in groups if group.layouts[0].trainable]
        flat = [group for group in trained if isinstance(group, FlatGroup) and group.summed_ranks == ranks > 1]
        over_ranks = len(flat) == len(trained) and share.rows.numel() * ranks == share.batch and ranks > 1
        self._parts = ranks if over_ranks else share.microbatches
        one_replica = not any(group.placement.axes for group in trained)
        tied = [group.layouts[0].original for group in trained if group.shared is not None]
        reasons = {
            "this plan has none": self._parts == 1 or not (over_ranks or one_replica),
            f"several pipeline stages share {', '.join(tied) or 'a parameter'}": not over_ranks and bool(tied),
            f"under the schedule {schedule.program.plan['schedule']} backward passes of several microbatches overlap": not over_ranks
            and not schedule.ends_backwards,
        }
        holds = torch.tensor([*reasons.values()], dtype=torch.int32, device=schedule.world.device)
        dist.all_reduce(holds, dist.ReduceOp.MAX)  # other ranks have other groups, and all must raise
        for reason in (reason for reason, one in zip(reasons, holds.tolist(), strict=True) if one):
            raise NoiseError(
                f"{reason}: it needs data parallelism alone, over at least 2 ranks, with ZeRO 0 or 1, or at least 2 microbatches of one "
                "data-parallel replica"
            )
        self._reduced, self._groups = flat if over_ranks else [], trained
        self._schedule, self._rows = schedule, share.batch // self._parts
        self._variance = self._signal = 0.0
        self._sums: dict[int, list[Tensor]] = {}  # the accumulated gradients of each stage after its last microbatch
        self._norms: list[Tensor] = []  # of the gradients of each microbatch

    def begin(self) -> None:
        if not self._reduced:
            self._schedule.after_backward = self._add_microbatch
        for group in self._reduced:
            group.local_norm = torch.zeros((), device=group.device)  # any tensor: the reduction sets it

    @torch.no_grad()
    def _add_microbatch(self, stage: int) -> None:
        """Measure the gradient of the microbatch whose backward pass through the stage has ended. This keeps a copy of the gradients until
        the step ends."""
        sums = [tensor for group in self._groups if group.stage == stage for tensor in group.accumulated()]
        last = self._sums.get(stage)
        self._norms += map(
            norm_of, sums if last is None else [now - before for now, before in zip(sums, last, strict=True)]
        )
        self._sums[stage] = [now.clone() for now in sums]

    @torch.no_grad()
    def end(self, norm: Tensor | None) -> float | None:
        """Return the noise scale after a step whose gradient has this norm; ``None`` as long as the averages have no positive ``|G|^2``."""
        norms = [*self._norms, *(group.local_norm for group in self._reduced if group.local_norm is not None)]
        zero = torch.zeros((), dtype=torch.float64, device=self._schedule.world.device)
        squares = torch.stack([zero, *(norm.double() for norm in norms)]).square().sum()
        for group in self._reduced:
            group.local_norm = None
        self._schedule.after_backward, self._sums, self._norms = None, {}, []
        dist.all_reduce(squares)
        # losses are terms of the batch's mean: a part's own gradient is ``n`` times what it adds
        own, mean = self._parts * float(squares), math.nan if norm is None else float(norm) ** 2
        if math.isfinite(own) and math.isfinite(mean):  # a skipped step has neither
            batch = self._parts * self._rows
            signal = (batch * mean - self._rows * own) / (batch - self._rows)
            variance = (own - mean) / (1 / self._rows - 1 / batch)
            self._signal = DECAY * self._signal + (1 - DECAY) * signal
            self._variance = DECAY * self._variance + (1 - DECAY) * variance
        return self._variance / self._signal if self._signal > 0 else None
