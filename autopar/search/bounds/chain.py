"""``chain_bound``: a bound that counts resharding, for steps that are one chain of layers: one stage, or one microbatch.

Such a step takes the sum of all layers' seconds, of the resharding between them and of the sends (twice, with several stages), plus at
least the mean of the devices' once-per-step seconds. For any price of memory lambda >= 0 the step is no less than

    min  sum_i (seconds + lambda live)(i, k(i)) + resharding + sends  -  lambda sum_s room_s

because a stage that fits has no more live bytes than its room: its limit without the least transient. The minimum over cuts and candidates
is found by Viterbi's algorithm over stages and layouts, on which alone resharding and sends depend. The largest value over a ladder of
prices, and over finer ones around the best, is the bound. The other bounds leave resharding out.
"""

from __future__ import annotations

import numpy as np

from autopar.search.bounds.cheap import TOLERANCE
from autopar.search.pareto import Array, Indices
from autopar.search.tables import Instance

LADDER = (0.0, *np.geomspace(1e-4, 1e4, 25).tolist())
"""Prices of memory, in units of a stage's least time per device memory."""

FINER, AROUND = 3, 7
"""How often finer prices around the best are tried, and how many."""


def is_chain(instance: Instance) -> bool:
    """Whether a step is one chain of layers."""
    schedule = instance.schedule
    return not schedule.interleaved and (schedule.stages == 1 or schedule.microbatches == 1)


def chain_bound(instance: Instance, at_least_s: float) -> float:
    """The bound of the module's docstring in seconds, not below ``at_least_s``."""
    chain = _Chain(instance)
    unit = (
        float(instance.least("time").sum()) * instance.schedule.microbatches / instance.schedule.stages / instance.limit
    )
    prices = np.array(LADDER) * unit
    values = chain.values(prices)
    best = float(values.max())
    for _ in range(FINER):
        at = int(values.argmax())
        prices = np.linspace(prices[max(at - 1, 0)], prices[min(at + 1, len(prices) - 1)], AROUND)
        values = chain.values(prices)
        best = max(best, float(values.max()))
    return max(at_least_s, best * (1 - TOLERANCE))


class _Chain:
    """The chain of an instance: by stage, the cheapest candidates of each kind and layout under many prices at once."""

    def __init__(self, instance: Instance) -> None:
        self.instance, self.stages = instance, instance.schedule.stages
        self.layouts: list[
            tuple[Indices, Indices]
        ] = []  # of each kind: every candidate's layout, and one candidate of each layout
        for table in instance.kinds:
            _, first = np.unique(table.layout, return_index=True)
            self.layouts.append((table.layout, first))

    def _room(self, s: int) -> float:
        _, passing, place, limit = self.instance.regime(s)
        least = [float(table.at_work(passing).min()) for table in self.instance.at(place)]
        return limit - (max if self.stages == 1 else min)(least[k] for k in set(self.instance.kind.tolist()))

    def _costs(self, s: int, prices: Array) -> list[Array]:
        """Per kind: ``[price, layout]``, the cheapest candidate in stage ``s``."""
        n, _, place, _ = self.instance.regime(s)
        m, found = self.instance.schedule.microbatches, []
        for table, (layout, first) in zip(self.instance.at(place), self.layouts, strict=True):
            each = (m * table.time + table.step / self.stages)[None, :] + prices[:, None] * table.live(n)[None, :]
            found.append(np.stack([each[:, layout == k].min(axis=1) for k in range(len(first))], axis=1))
        return found

    def values(self, prices: Array) -> Array:
        """The bound under each price."""
        instance, kind = self.instance, self.instance.kind.tolist()
        m, layout = instance.schedule.microbatches, instance.layout
        costs = [self._costs(s, prices) for s in range(self.stages)]
        room = sum(self._room(s) for s in range(self.stages))
        best = [
            costs[0][kind[0]],
            *[np.full_like(costs[0][kind[0]], np.inf)] * (self.stages - 1),
        ]  # by stage: [price, layout]
        for i in range(instance.layers - 1):
            left, right = self.layouts[kind[i]][1], self.layouts[kind[i + 1]][1]
            after = []
            for s in range(self.stages):
                edge = m * instance.edge(i, layout.place[s])[np.ix_(left, right)]
                through = (best[s][:, :, None] + edge).min(axis=1)
                if s:
                    sent = best[s - 1] + 2 * instance.p2p(i, s - 1)[left]
                    through = np.minimum(through, (sent[:, :, None] + edge).min(axis=1))
                after.append(through + costs[s][kind[i + 1]])
            best = after
        return np.asarray(best[-1].min(axis=1) - prices * room)
