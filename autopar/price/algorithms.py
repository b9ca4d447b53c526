"""Three textbook algorithms for a reduction, a broadcast and an all-reduce, in rounds of messages.

The model is that of Thakur, Rabenseifner and Gropp (Optimization of Collective Communication Operations in MPICH, 2005): in one round a
rank sends at most one message and receives at most one, and a message of *b* bytes takes *alpha + b / beta*. For *n* ranks and a tensor of
*B* bytes:

* ``sequential``: a server receives the tensor from each rank in turn, and sends the result to each in turn::

      reduce, broadcast   (n-1) (alpha + B / beta)           all-reduce: both, twice as long

* ``ring``: every rank passes pieces of *B / n* bytes on to its neighbour, in a reduce-scatter and then an all-gather. A reduction to one
  rank replaces the all-gather by a gather around the ring, and a broadcast replaces the reduce-scatter by a scatter::

      all of them         2 (n-1) (alpha + B / n / beta)

* ``halving-doubling``: the reduce-scatter halves the tensor with partners *n/2*, *n/4*, ..., 1 ranks away, the all-gather doubles it again
  (Rabenseifner); a reduction ends, and a broadcast begins, with a binomial tree of pieces::

      all of them         2 log2(n) alpha + 2 B (n-1) / n / beta

  If *n* is not a power of two, the ranks beyond the largest power below *n* first send their tensor to a neighbour, and at the end receive
  the result from it. Each takes *alpha + B / beta*; a reduction needs only the first, a broadcast only the second.

The additions take no time in this model. Emitted programs call NCCL or gloo, whose collectives ``autopar.price.collectives`` prices; this
module is for comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.devices import Cluster
from autopar.price.collectives import RankGroup
from autopar.types import Collective

ALL_REDUCE = Collective.ALL_REDUCE


@dataclass(frozen=True, slots=True)
class Round:
    """``times`` successive rounds of ``senders`` simultaneous messages of ``size`` bytes. Each goes to a rank at most ``distance`` away;
    with ``on_ring`` to the next rank on a ring of all ranks."""

    size: float
    senders: int
    distance: int
    times: int = 1
    on_ring: bool = False


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The rounds of a collective, and the bytes that the busiest rank sends and receives in total."""

    rounds: tuple[Round, ...]
    busiest_bytes: float

    @property
    def messages(self) -> int:
        """The number of rounds; each takes one latency."""
        return sum(r.times for r in self.rounds)

    @property
    def traffic_bytes(self) -> float:
        """The bytes that all ranks send in total."""
        return sum(r.size * r.senders * r.times for r in self.rounds)

    def seconds(self, members: RankGroup, cluster: Cluster) -> float:
        """Return the seconds over ``members``, whose ranks fill one node after another.

        A message between nodes has one device's share of the network. A ring crosses each node's border once, with the shares of all
        members on that node, as in ``autopar.price.collectives``.
        """
        total_s = cluster.collective_s if self.rounds else 0.0
        for r in self.rounds:
            link = cluster.inter if members.nodes > 1 and r.distance >= members.per_node else cluster.intra
            beta = link.bytes_per_s * (members.per_node if r.on_ring else 1)
            total_s += r.times * (link.latency_s + r.size / min(beta, cluster.intra.bytes_per_s))
        return total_s


def sequential(collective: Collective, ranks: int, size: float) -> Algorithm:
    """Return the rounds in which a server exchanges the tensor with one rank at a time."""
    directions = 2 if collective is ALL_REDUCE else 1
    rounds = tuple(Round(size, 1, distance, directions) for distance in range(1, ranks))
    return Algorithm(rounds, directions * (ranks - 1) * size)


def ring(collective: Collective, ranks: int, size: float) -> Algorithm:
    """Return the rounds of a ring, which pass pieces from neighbour to neighbour."""
    n, piece = ranks, size / ranks
    around = Round(piece, n, n - 1, n - 1, True)  # the last rank's neighbour is the first
    if collective is ALL_REDUCE:
        return Algorithm((around, around), 4 * (n - 1) * piece)
    to_one = tuple(Round(piece, left, n - 1, 1, True) for left in range(n - 1, 0, -1))
    rounds = (around, *to_one) if collective is Collective.REDUCE else (*reversed(to_one), around)
    return Algorithm(rounds, (4 * n - 5) * piece)


def halving_doubling(collective: Collective, ranks: int, size: float) -> Algorithm:
    """Return the rounds of recursive halving, recursive doubling and binomial trees."""
    n = 1 << (ranks.bit_length() - 1)
    extra = ranks - n
    piece, steps = size / n, [1 << i for i in range(n.bit_length() - 1)]
    # of the first 2 * extra ranks only every other one continues, so partners may be twice as far apart
    doubling = [Round(piece * step, n, step + min(step, extra)) for step in steps]
    to_one = [Round(piece * step, n // (2 * step), step + min(step, extra)) for step in steps]
    fold = [Round(size, extra, 1)] if extra else []
    first, last = {
        Collective.ALL_REDUCE: ([*fold, *reversed(doubling)], [*doubling, *fold]),
        Collective.REDUCE: ([*fold, *reversed(doubling)], to_one),
        Collective.BROADCAST: ([*reversed(to_one)], [*doubling, *fold]),
    }[collective]
    busiest_bytes = (4 if collective is ALL_REDUCE else 3) * (n - 1) * piece
    return Algorithm((*first, *last), busiest_bytes + (2 if collective is ALL_REDUCE else 1) * size * bool(extra))


ALGORITHMS: dict[str, Callable[[Collective, int, float], Algorithm]] = {
    "sequential": sequential,
    "ring": ring,
    "halving-doubling": halving_doubling,
}
"""The algorithms for ``Collective.REDUCE``, ``BROADCAST`` and ``ALL_REDUCE``, by name; each takes the collective, ranks and bytes."""


def algorithm(name: str, collective: Collective, ranks: int, size: float) -> Algorithm:
    """Return the rounds of ``collective`` over ``ranks`` on a tensor of ``size`` bytes; none for one rank."""
    assert collective in (Collective.REDUCE, Collective.BROADCAST, Collective.ALL_REDUCE), collective
    return ALGORITHMS[name](collective, ranks, size) if ranks > 1 else Algorithm((), 0.0)
