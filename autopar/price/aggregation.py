"""Ways to sum a gradient of *B* bytes over *N* nodes so that all have the sum, as every course on the subject lists them.

====================  ==========  ======================  ==================  ==============
way                   steps       bytes in sequence       most of a node      of all nodes
====================  ==========  ======================  ==================  ==============
parameter server      2           2 N B                   N B                 2 N B
sequential            2 (N-1)     2 (N-1) B               B                   2 (N-1) B
ring                  2 (N-1)     2 (N-1)/N B             B / N               2 (N-1) B
parallel              2           2 (N-1)/N B             (N-1)/N B           2 (N-1) B
recursive halving     2 log2 N    2 (N-1)/N B             B / 2               2 (N-1) B
====================  ==========  ======================  ==================  ==============

*Bytes in sequence* is what the slowest way from start to end carries, step after step: over bandwidth it is the time, besides *steps*
times the latency. *Most of a node* is what one node sends or receives in one step, the network card it must have for that. *Parallel* cuts
the gradient into N parts and makes every node the server of one; recursive halving does the same in log2 N exchanges of pairs.
``collectives`` prices plans' all-reduces with ``ring`` (and NCCL's double tree, which is not on the list).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Aggregation:
    """What one way costs (see the module's docstring): ``steps``, and bytes in sequence, at most in a node's step, and in total."""

    steps: int
    sequence_bytes: float
    node_bytes: float
    total_bytes: float

    def seconds(self, hop_s: float, bytes_per_s: float) -> float:
        """Time with a latency of ``hop_s`` for each step, every node sending and receiving ``bytes_per_s``."""
        return self.steps * hop_s + self.sequence_bytes / bytes_per_s


def parameter_server(size: float, nodes: int) -> Aggregation:
    """All send to one, which sends the sum back to all: one card carries everything."""
    return Aggregation(2, 2 * nodes * size, nodes * size, 2 * nodes * size)


def sequential(size: float, nodes: int) -> Aggregation:
    """The sum is passed from node to node, whole, and the result all the way again."""
    return Aggregation(2 * (nodes - 1), 2 * (nodes - 1) * size, size, 2 * (nodes - 1) * size)


def ring(size: float, nodes: int) -> Aggregation:
    """N parts go round at one time, one behind the other: a reduce-scatter, then an all-gather."""
    return Aggregation(2 * (nodes - 1), 2 * (nodes - 1) / nodes * size, size / nodes, 2 * (nodes - 1) * size)


def parallel(size: float, nodes: int) -> Aggregation:
    """Every node is the server of one part of N."""
    moved = (nodes - 1) / nodes * size
    return Aggregation(2, 2 * moved, moved, 2 * (nodes - 1) * size)


def recursive_halving(size: float, nodes: int) -> Aggregation:
    """Pairs at distance N/2, N/4, ... exchange halves of what they still sum, and the sums the same way back. N is a power of two."""
    assert nodes & (nodes - 1) == 0, nodes
    return Aggregation(2 * int(math.log2(nodes)), 2 * (nodes - 1) / nodes * size, size / 2, 2 * (nodes - 1) * size)


WAYS: dict[str, Callable[[float, int], Aggregation]] = {
    "parameter server": parameter_server,
    "sequential": sequential,
    "ring": ring,
    "parallel": parallel,
    "recursive halving": recursive_halving,
}
