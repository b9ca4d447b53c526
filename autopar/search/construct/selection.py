"""The cheapest candidates that fit for the layers of one stage or one device, resharding between neighbours included.

Viterbi's algorithm with a price of memory in the costs, found by bisection; the remaining memory is spent where a byte saves most time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autopar.search.knapsacks import only
from autopar.search.pareto import Array, Indices
from autopar.search.tables import Instance, Roles, Table

LADDER = (0.0, *np.geomspace(1e-3, 1e3, 13).tolist(), 1e9)
"""Prices of memory to try, in units of a stage's time per device memory; the last one is "memory alone"."""

PRESSURES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Prices of the other memories to try beside a price of device memory, all as shares of their limits: the first that lets a stage fit is
used."""


def seconds_of(instance: Instance, t: Table) -> Array:
    """Seconds per microbatch that count for a candidate: its time, and its share of the once-per-step seconds."""
    return t.time + t.step / instance.schedule.microbatches


def memory_scale(instance: Instance) -> float:
    """A stage's least time per byte of device memory."""
    least = np.array([float(seconds_of(instance, t).min()) for t in instance.kinds])
    return max(float(least[instance.kind].sum()) / instance.schedule.pipeline / instance.limit, 1e-30)


@dataclass(frozen=True)
class CandidateMode:
    """The candidates that may be used: all, or those of one layout for the kinds that have that layout."""

    roles: Roles | None
    allowed: tuple[Indices, ...]  # by kind


def every(instance: Instance) -> tuple[Indices, ...]:
    return tuple(np.arange(len(t)) for t in instance.kinds)


def modes_of(instance: Instance) -> list[CandidateMode]:
    """The candidates of every kind: all, then those of one layout at a time (all candidates, for a kind that lacks that layout)."""
    allowed = every(instance)
    layouts = dict.fromkeys(roles for t in instance.kinds for roles in t.layouts)
    modes = [CandidateMode(None, allowed)]
    for roles in layouts if len(layouts) > 1 else ():
        modes.append(CandidateMode(roles, tuple(only(table, roles) for table in instance.kinds)))
    return modes


def tied_cost(instance: Instance, layers: Sequence[int], price: float) -> float:
    """The cost of the cheapest candidates of some layers: their time, and their live bytes at a price in units of ``memory_scale``."""
    n, total = float(instance.in_flight.max()), 0.0
    for layer in layers:
        t = instance.table(layer)
        live = t.weights + n * t.saved + t.transient
        total += float((seconds_of(instance, t) + price * memory_scale(instance) * live).min())
    return total


class LayerSelection:
    """The layers, in order, whose candidates are chosen together under one memory limit. ``in_flight`` is how many microbatches of each
    are live, and how many of these are between the two parts of their backward; ``passing`` as in ``schedules.memory``.

    ``outside`` are the memories besides the device's that some candidate has bytes in: the bytes of each layer's candidates, and the room.
    """

    outside: Sequence[tuple[Sequence[Array], float]] = ()
    pressure = 0.0  # the price of filling one of them, relative to filling device memory

    def __init__(
        self,
        instance: Instance,
        allowed: tuple[Indices, ...],
        layers: Sequence[int],
        in_flight: Sequence[tuple[float, float]],
        place: int,
        passing: int,
        limit: float,
    ) -> None:
        self.limit, self.scale = limit, memory_scale(instance)
        kinds = instance.kind[list(layers)].tolist()
        self.tables = [instance.kinds[k].at(place) for k in kinds]
        self.keep = [allowed[k] for k in kinds]
        priced = list(zip(self.tables, self.keep, strict=True))
        self.weight = [seconds_of(instance, t)[keep] for t, keep in priced]
        self.live = [t.live(*n)[keep] for (t, keep), n in zip(priced, in_flight, strict=True)]
        self.transient = [t.at_work(passing)[keep] for t, keep in priced]
        self.edges = [
            _part(instance.edge(i, place), *keep) if j == i + 1 else np.zeros([len(k) for k in keep])
            for (i, j), keep in zip(pairwise(layers), pairwise(self.keep), strict=True)
        ]

    def solve(self) -> tuple[int, ...] | None:
        for pressure in PRESSURES if self.outside else (0.0,):
            self.pressure = pressure
            pick = self._solve()
            if pick is not None:
                return tuple(int(self.keep[a][k]) for a, k in enumerate(pick))
        return None

    def _solve(self) -> list[int] | None:
        pick = self._viterbi(0.0)
        if not self._fits(pick):
            low, high = 0.0, 0.0
            for step in LADDER[1:]:
                high, pick = step, self._viterbi(step * self.scale)
                if self._fits(pick):
                    break
                low = step
            else:
                return None
            for _ in range(8):
                middle = (max(low, high / 10) * high) ** 0.5
                trial = self._viterbi(middle * self.scale)
                if self._fits(trial):
                    high, pick = middle, trial
                else:
                    low = middle
            pick = self._spend(pick)
        return pick

    def outside_fits(self, pick: tuple[int, ...]) -> bool:
        """Whether what these candidates have outside of device memory fits there."""
        return self._room_for([int(np.searchsorted(keep, k)) for keep, k in zip(self.keep, pick, strict=True)])

    def _room_for(self, pick: list[int]) -> bool:
        return all(float(sum(h[k] for h, k in zip(sizes, pick, strict=True))) <= room for sizes, room in self.outside)

    def improved(self, pick: tuple[int, ...]) -> tuple[int, ...]:
        """These candidates, or better ones found by changing single layers."""
        at = [int(np.searchsorted(keep, k)) for keep, k in zip(self.keep, pick, strict=True)]
        if not self._fits(at):
            return pick
        return tuple(int(self.keep[a][k]) for a, k in enumerate(self._spend(at)))

    def seconds(self, pick: tuple[int, ...]) -> float:
        """Seconds of these candidates, resharding between them included."""
        at = [int(np.searchsorted(keep, k)) for keep, k in zip(self.keep, pick, strict=True)]
        own = sum(float(w[k]) for w, k in zip(self.weight, at, strict=True))
        return own + sum(float(edge[a, b]) for edge, (a, b) in zip(self.edges, pairwise(at), strict=True))

    def _fits(self, pick: list[int]) -> bool:
        live = sum(h[k] for h, k in zip(self.live, pick, strict=True))
        needs = float(live + max(t[k] for t, k in zip(self.transient, pick, strict=True)))
        return needs <= self.limit and self._room_for(pick)

    def _viterbi(self, price: float) -> list[int]:
        # a share of the transient is priced too: only the stage's largest counts, and it is not known yet
        local = [
            w + price * (h + t / len(self.live)) for w, h, t in zip(self.weight, self.live, self.transient, strict=True)
        ]
        for sizes, room in self.outside if self.pressure else ():
            each = price * self.pressure * self.limit / max(room, 1.0)
            local = [here + each * h for here, h in zip(local, sizes, strict=True)]
        best, came = local[0], []
        for edge, here in zip(self.edges, local[1:], strict=True):
            through = best[:, None] + edge
            came.append(through.argmin(axis=0))
            best = through.min(axis=0) + here
        pick = [int(best.argmin())]
        for back in reversed(came):
            pick.append(int(back[pick[-1]]))
        return pick[::-1]

    def _spend(self, pick: list[int]) -> list[int]:
        """Change single layers while a change saves time and fits, most seconds per byte first."""
        pick = list(pick)
        live = float(sum(h[k] for h, k in zip(self.live, pick, strict=True)))
        highest = max(float(t[k]) for t, k in zip(self.transient, pick, strict=True))
        moves = [self._move(pick, a, live, highest) for a in range(len(pick))]
        for _ in range(4 * len(pick)):
            a = max(range(len(pick)), key=lambda a: moves[a][0])
            if moves[a][0] <= 0:
                break
            fresh = self._move(pick, a, live, highest)  # memory may have been spent since
            if fresh != moves[a]:
                moves[a] = fresh
                continue
            k = fresh[1]
            live += float(self.live[a][k] - self.live[a][pick[a]])
            highest = max(highest, float(self.transient[a][k]))
            pick[a] = k
            for near in range(max(a - 1, 0), min(a + 2, len(pick))):
                moves[near] = self._move(pick, near, live, highest)
        return pick

    def _move(self, pick: list[int], a: int, live: float, highest: float) -> tuple[float, int]:
        """The best other candidate of layer ``a``: (seconds saved per byte, 0 if no candidate saves time and fits; the candidate)."""
        total = self.weight[a].copy()
        if a > 0:
            total += self.edges[a - 1][pick[a - 1]]
        if a + 1 < len(pick):
            total += self.edges[a][:, pick[a + 1]]
        saves = total[pick[a]] - total
        more = self.live[a] - self.live[a][pick[a]]
        ok = (saves > 1e-15) & (live + more + np.maximum(highest, self.transient[a]) <= self.limit)
        for sizes, room in self.outside:
            others = sum(float(h[k]) for h, k in zip(sizes, pick, strict=True)) - sizes[a][pick[a]]
            ok &= others + sizes[a] <= room
        if not ok.any():
            return 0.0, pick[a]
        ratio = np.where(ok, saves / np.maximum(more, 1.0), 0.0)
        k = int(ratio.argmax())
        return float(ratio[k]), k


def _part(matrix: Array, rows: Indices, columns: Indices) -> Array:
    """These rows and columns, which are distinct and rise; the matrix itself where they are all of it."""
    return matrix if matrix.shape == (len(rows), len(columns)) else matrix[np.ix_(rows, columns)]


def stage_of(
    instance: Instance,
    allowed: tuple[Indices, ...],
    i: int,
    j: int,
    s: int,
    before: int | None,
    spare: float = 0.0,
) -> LayerSelection:
    """Layers i..j-1 as stage ``s``, with resharding at its entry and its sends. ``before`` is the candidate of layer ``i - 1``, ``spare``
    the memory that is left free."""
    n, passing, place, limit = instance.regime(s)
    found = LayerSelection(instance, allowed, range(i, j), [(n, 0.0)] * (j - i), place, passing, limit - spare)
    if before is not None:
        found.weight[0] = found.weight[0] + instance.edge(i - 1, place)[before, found.keep[0]]
    if j < instance.layers:  # forwards, and backwards by the next stage
        found.weight[-1] = found.weight[-1] + 2 * instance.p2p(j - 1, s)[found.keep[-1]]
    found.outside = [
        (
            [t.outside(n)[i][keep] for t, keep in zip(found.tables, found.keep, strict=True)],
            instance.layout.outside[place][i],
        )
        for i in instance.outside
    ]
    return found
