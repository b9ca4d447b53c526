"""The gradient noise scale: the batch size up to which a larger batch saves steps (McCandlish et al. 2018, "An Empirical Model of
Large-Batch Training", https://arxiv.org/abs/1812.06162, appendix A.1).

Under data parallelism with ZeRO 0 or 1, each of the ``n`` ranks has the gradient of its own rows until the reduction. With ``b`` rows per
rank, the mean over the ranks of the squared norm of a rank's gradient, and the squared norm of their mean, give unbiased estimates of
``|G|^2``, for the true gradient ``G``, and of the sum ``S`` of the variances of a row's gradient:

    |G|^2 = (n b |mean|^2 - b mean(|own|^2)) / (n b - b)        S = (mean(|own|^2) - |mean|^2) / (1 / b - 1 / (n b))

The noise scale is ``S / |G|^2``, in rows. Both estimates are noisy, so each is averaged over the logged steps before the division.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .parameters import FlatGroup, ParameterGroup
from .share import Share

DECAY = 0.95
"""The weight of the former logged steps in the averages: about the last twenty count."""


class NoiseError(ValueError):
    """The plan has no measured norm of each rank's gradient of its own rows."""

    def __init__(self, why: str) -> None:
        super().__init__(f"--noise-scale compares the gradients that ranks have of their own rows, and {why}")


class NoiseScale:
    """Measures the noise scale in some steps: ``begin`` before the step, ``end`` after it; all ranks call both.

    Raises ``NoiseError`` if the program has other parallelism than data parallelism, or groups whose gradients aren't summed over all
    ranks at the end of the step (ZeRO 2 and 3, parameter servers, local SGD).
    """

    def __init__(self, groups: Sequence[ParameterGroup], share: Share) -> None:
        ranks, rows = dist.get_world_size(), share.rows.numel()
        trained = [group for group in groups if group.layouts[0].trainable]
        flat = [group for group in trained if isinstance(group, FlatGroup) and group.summed_ranks == ranks]
        if ranks == 1 or rows * ranks != share.batch or len(flat) < len(trained):
            raise NoiseError(
                "this plan keeps none: it needs data parallelism alone, over at least 2 ranks, with ZeRO 0 or 1"
            )
        self._groups, self._ranks, self._rows = flat, ranks, rows
        self._variance = self._signal = 0.0

    def begin(self) -> None:
        for group in self._groups:
            group.local_norm = torch.zeros((), device=group.device)  # any tensor: the reduction sets it

    @torch.no_grad()
    def end(self, norm: Tensor | None) -> float | None:
        """Return the noise scale after a step whose gradient has this norm; ``None`` as long as the averages have no positive ``|G|^2``."""
        norms = [group.local_norm for group in self._groups if group.local_norm is not None]
        squares = torch.stack(norms).double().square().sum()
        for group in self._groups:
            group.local_norm = None
        dist.all_reduce(squares)
        # losses are terms of the batch's mean: a rank's own gradient is ``n`` times what it adds
        own, mean = self._ranks * float(squares), math.nan if norm is None else float(norm) ** 2
        if math.isfinite(own) and math.isfinite(mean):  # a skipped step has neither
            batch = self._ranks * self._rows
            signal = (batch * mean - self._rows * own) / (batch - self._rows)
            variance = (own - mean) / (1 / self._rows - 1 / batch)
            self._signal = DECAY * self._signal + (1 - DECAY) * signal
            self._variance = DECAY * self._variance + (1 - DECAY) * variance
        return self._variance / self._signal if self._signal > 0 else None
