"""The gradient noise scale: the batch size up to which a larger batch saves steps (McCandlish et al. 2018, "An Empirical Model of
Large-Batch Training", https://arxiv.org/abs/1812.06162, appendix A.1).

The batch of a step has ``n`` parts of ``b`` rows with gradients of their own. Under data parallelism with ZeRO 0 or 1 these are the ranks'
rows, whose gradients exist until the reduction. On one device they are the microbatches, whose gradients are the differences of the sums
after each of them. The mean over the parts of the squared norm of a part's gradient, and the squared norm of their mean, give unbiased
estimates of ``|G|^2``, for the true gradient ``G``, and of the sum ``S`` of the variances of a row's gradient:

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

    Raises ``NoiseError`` if the program has other parallelism than data parallelism, or groups whose gradients aren't summed over all
    ranks at the end of the step (ZeRO 2 and 3, parameter servers, local SGD), or one device and one microbatch.
    """

    def __init__(self, groups: Sequence[ParameterGroup], schedule: Microbatches) -> None:
        ranks, share = dist.get_world_size(), schedule.share
        trained = [group for group in groups if group.layouts[0].trainable]
        flat = [group for group in trained if isinstance(group, FlatGroup) and group.summed_ranks == ranks]
        local = [group for group in trained if type(group) is ParameterGroup] if ranks == 1 else []
        self._parts = ranks if ranks > 1 else share.microbatches
        if self._parts == 1 or share.rows.numel() * ranks != share.batch or len(flat) + len(local) < len(trained):
            raise NoiseError(
                "this plan has none: it needs data parallelism alone, over at least 2 ranks, with ZeRO 0 or 1, or one device and at least "
                "2 microbatches"
            )
        self._reduced, self._groups = flat if ranks > 1 else [], [*flat, *local]
        self._schedule, self._rows = schedule, share.batch // self._parts
        self._variance = self._signal = 0.0
        self._sums: list[Tensor] = []  # the accumulated gradients after the last microbatch
        self._norms: list[Tensor] = []  # of the gradients of each microbatch

    def begin(self) -> None:
        if not self._reduced:
            self._schedule.after_backward = self._add_microbatch
        for group in self._reduced:
            group.local_norm = torch.zeros((), device=group.device)  # any tensor: the reduction sets it

    @torch.no_grad()
    def _add_microbatch(self) -> None:
        """Measure the gradient of the microbatch whose backward pass has ended. This keeps a copy of the gradients until the step ends."""
        sums = [tensor for group in self._groups for tensor in group.accumulated()]
        own = [now - before for now, before in zip(sums, self._sums, strict=True)] if self._sums else sums
        self._norms += map(norm_of, own)
        self._sums = [now.clone() for now in sums]

    @torch.no_grad()
    def end(self, norm: Tensor | None) -> float | None:
        """Return the noise scale after a step whose gradient has this norm; ``None`` as long as the averages have no positive ``|G|^2``."""
        norms = [*self._norms, *(group.local_norm for group in self._reduced if group.local_norm is not None)]
        squares = torch.stack(norms).double().square().sum()
        for group in self._reduced:
            group.local_norm = None
        self._schedule.after_backward, self._sums, self._norms = None, [], []
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
