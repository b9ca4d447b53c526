"""The number of ranks or nodes that have any of a token's experts: relays and dispatch kernels send a row once to each node."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

STANDARD_ERRORS = 5.0
"""A sampled mean that is within as many standard errors of the formula is taken to agree with it: by chance, one in two million is not."""


@dataclass(frozen=True, eq=False, slots=True)
class SampledChoices:
    """The experts that a router chose for random scores: ``choices`` is ``[tokens, k]``."""

    choices: Tensor
    _means: dict[int, tuple[float, float]] = field(default_factory=dict)

    def reached(self, block: int) -> tuple[float, float]:
        """Return the mean number of ranks with any of a token's experts if each has ``block`` contiguous ones, and its standard
        error."""
        if block not in self._means:
            owner = self.choices // block
            number = torch.zeros(len(owner), int(owner.max()) + 1, dtype=torch.float64).scatter_(1, owner, 1.0).sum(1)
            self._means[block] = number.mean().item(), number.std().item() / math.sqrt(len(owner))
        return self._means[block]

    def __deepcopy__(self, memo: object) -> SampledChoices:
        return self  # immutable


@dataclass(frozen=True, slots=True)
class Routing:
    """A router that chooses ``choices`` of ``experts`` for each token; ``consecutive`` ones, as benchmarks do that force equal loads.
    ``sample`` has choices of a router that prefers some sets of experts, such as those of a few nodes; without it all sets are equally
    likely."""

    experts: int
    choices: int
    consecutive: bool = False
    sample: SampledChoices | None = None

    def reached(self, ranks: int) -> float:
        """Return the expected number of ranks with any of a token's experts, if each of ``ranks`` has equally many contiguous experts (the
        last ones fewer if ``ranks`` doesn't divide them)."""
        if self.consecutive:
            return min(max(1.0, self.choices * ranks / self.experts), float(self.choices))
        missed = 1.0
        for i in range(self.choices):
            missed *= max(0.0, self.experts - self.experts / ranks - i) / (self.experts - i)
        expected = min(float(self.choices), ranks * (1 - missed))
        if self.sample is None:
            return expected
        mean, error = self.sample.reached(math.ceil(self.experts / ranks))
        return expected if _agree(mean, error, expected) else mean

    def agrees_with(self, sample: SampledChoices) -> bool:
        """Return whether the formula gives the sampled numbers of reached ranks, up to the sampling error."""
        divisors = [n for n in range(1, self.experts + 1) if self.experts % n == 0]
        return all(_agree(*sample.reached(self.experts // n), self.reached(n)) for n in divisors)


def _agree(mean: float, error: float, expected: float) -> bool:
    return math.isclose(mean, expected, rel_tol=1e-6, abs_tol=STANDARD_ERRORS * error)
