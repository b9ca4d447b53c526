"""Algorithms that sum a gradient of *B* bytes over *N* nodes so that every node has the sum.

====================  ==========  ======================  ==================  ==============
algorithm             steps       bytes in sequence       peak of one node    all nodes
====================  ==========  ======================  ==================  ==============
parameter server      2           2 N B                   N B                 2 N B
sequential            2 (N-1)     2 (N-1) B               B                   2 (N-1) B
ring                  2 (N-1)     2 (N-1)/N B             B / N               2 (N-1) B
parallel              2           2 (N-1)/N B             (N-1)/N B           2 (N-1) B
recursive halving     2 log2 N    2 (N-1)/N B             B / 2               2 (N-1) B
====================  ==========  ======================  ==================  ==============

*Bytes in sequence* are the bytes on the longest path from start to end: divided by bandwidth, and with *steps* times the latency added,
they give the time. *Peak of one node* is the most that one node sends or receives in one step, the load of its network card. *Parallel*
divides the gradient into N parts, one server each; recursive halving does so in log2 N exchanges of pairs.
``collectives`` prices the all-reduces of plans with ``ring`` (and with NCCL's double tree, which is not in this table).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Aggregation:
    """The cost of one algorithm (see the module's docstring): ``steps``, bytes in sequence, the peak of one node, the total."""

    steps: int
    sequence_bytes: float
    node_bytes: float
    total_bytes: float

    def seconds(self, hop_s: float, bytes_per_s: float) -> float:
        """Time with a latency of ``hop_s`` for each step, every node sending and receiving ``bytes_per_s``."""
        return self.steps * hop_s + self.sequence_bytes / bytes_per_s


def parameter_server(size: float, nodes: int) -> Aggregation:
    """All nodes send to one, which sends the sum back to all: one network card carries everything."""
    return Aggregation(2, 2 * nodes * size, nodes * size, 2 * nodes * size)


def sequential(size: float, nodes: int) -> Aggregation:
    """The whole sum passes from node to node, then the result takes the same route again."""
    return Aggregation(2 * (nodes - 1), 2 * (nodes - 1) * size, size, 2 * (nodes - 1) * size)


def ring(size: float, nodes: int) -> Aggregation:
    """N parts travel around the ring at the same time: a reduce-scatter, then an all-gather."""
    return Aggregation(2 * (nodes - 1), 2 * (nodes - 1) / nodes * size, size / nodes, 2 * (nodes - 1) * size)


def parallel(size: float, nodes: int) -> Aggregation:
    """Every node is the server of one part of N."""
    moved = (nodes - 1) / nodes * size
    return Aggregation(2, 2 * moved, moved, 2 * (nodes - 1) * size)


def recursive_halving(size: float, nodes: int) -> Aggregation:
    """Pairs at distance N/2, N/4, ... exchange halves of their part of the sum, then the sums in reverse. N is a power of two."""
    assert nodes & (nodes - 1) == 0, nodes
    return Aggregation(2 * int(math.log2(nodes)), 2 * (nodes - 1) / nodes * size, size / 2, 2 * (nodes - 1) * size)


WAYS: dict[str, Callable[[float, int], Aggregation]] = {
    "parameter server": parameter_server,
    "sequential": sequential,
    "ring": ring,
    "parallel": parallel,
    "recursive halving": recursive_halving,
}
