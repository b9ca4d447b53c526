"""Dynamic loss scaling of float16 programs, with the rule, the defaults and the state of ``torch.amp.GradScaler``.

Small gradients underflow in float16. The last stage multiplies its loss by the scale before the backward pass, and the sums of
gradients, which are in float32, are divided by it before they are clipped and used. A step in which any rank has a gradient that is
infinite or NaN updates nothing on any rank, and halves the scale; 2,000 consecutive steps without one double it (Micikevicius et al.,
"Mixed precision training", ICLR 2018, section 3.2).

Each rank checks the gradients that it owns after their reduction: a non-finite term makes a non-finite sum. One all-reduce then sums
the results of all ranks, together with the squares of the gradients' norm if the step clips. The host reads the sum together with the
step's loss, once per step and before the update. So the update of any optimizer can be skipped, even if its class doesn't support scaling,
and the scale is a Python number, the same on all ranks.

``GradScaler`` uses an op that is private to torch (``_amp_foreach_non_finite_check_and_unscale_``). This module uses ``aminmax``, which
propagates NaN, and a multiplication: two passes over the flat buffers of gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .agree import same_options

_LIMITS = torch.finfo(torch.float32)  # GradScaler's scale is a tensor of this dtype


class LossScale:
    """The loss scale. Each step calls ``scaled`` and ``unscale``, may call ``reduce_overflow``, reads ``overflowed``, and calls ``update``
    with it.

    The arguments are those of ``torch.amp.GradScaler``. Factors that are powers of two are exact for gradients that neither overflow
    nor underflow.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.scale = scale
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval, self._good_steps = growth_interval, 0  # consecutive steps without an overflow
        self._device = device
        self._overflows = torch.zeros((), dtype=torch.float64, device=device)
        self._reduced = True

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, in float32 or wider: the scale itself is beyond float16."""
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.scale

    @torch.no_grad()
    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide this rank's gradients by the scale in place, and record whether one of them was infinite or NaN."""
        finite = torch.ones((), dtype=torch.bool, device=self._device)
        inverse = 1 / self.scale
        for gradient in gradients:
            if gradient.numel():
                finite &= torch.stack(torch.aminmax(gradient)).isfinite().all()
                gradient.mul_(inverse)
        self._overflows, self._reduced = finite.logical_not().double(), False

    def reduce_overflow(self, extra: Tensor | None = None) -> Tensor:
        """Sum the overflow flags of all ranks in one all-reduce, together with the float64 scalar ``extra``; return the sum of that."""
        both = torch.stack((self._overflows, torch.zeros_like(self._overflows) if extra is None else extra))
        dist.all_reduce(both)
        self._overflows, self._reduced = both[0], True
        return both[1]

    def overflowed(self) -> Tensor:
        """Return the number of ranks with a non-finite gradient in this step, a scalar on the device; the same on every rank."""
        if not self._reduced:
            self.reduce_overflow()
        return self._overflows

    def update(self, overflowed: bool) -> None:
        """Set the next step's scale.

        Raises ``RuntimeError`` if the scale would become smaller than float32 can represent: no scale makes the gradients finite.
        """
        if overflowed:
            self.scale, self._good_steps = self.scale * self._backoff_factor, 0
            if self.scale < _LIMITS.tiny:
                raise RuntimeError(
                    "the gradients are not finite at any loss scale: the model's loss or its values are NaN"
                )
            return
        self._good_steps += 1
        if self._good_steps == self._growth_interval:
            grown, self._good_steps = self.scale * self._growth_factor, 0
            self.scale = grown if grown <= _LIMITS.max else self.scale

    def state_dict(self) -> dict[str, float | int]:
        """Return the state, the same on every rank, under the names of ``torch.amp.GradScaler.state_dict``."""
        return {
            "scale": self.scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._good_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the state from the result of ``state_dict`` or of ``torch.amp.GradScaler.state_dict``, which every rank must pass.

        Raises ``ValueError`` if an entry is missing, or if ranks pass different states.
        """
        missing = [name for name in self.state_dict() if name not in state]
        if missing:
            raise ValueError(f"the state of the loss scale has no {', '.join(missing)}")
        same_options({"the state of the loss scale": sorted(state.items())}, self._device)
        self.scale = float(state["scale"])
        self._growth_factor, self._backoff_factor = float(state["growth_factor"]), float(state["backoff_factor"])
        self._growth_interval, self._good_steps = int(state["growth_interval"]), int(state["_growth_tracker"])
