r"""Seconds of a collective: latency per hop plus bytes over bandwidth, per link level.

A group has *n* members on *N* nodes, at least *k* per node. *B* is the bytes of the full tensor (not sharded over the axis): the result of
an all-gather, the input of a reduce-scatter, the tensor of an all-reduce or of an all-to-all (each rank has *B / n* bytes of it). *c* is
the fixed cost of a collective on a device, *a* the latency of a hop inside a node or between nodes.

* A ring sends *B (n-1)/n* over every link, at the speed of the slowest link. Each GPU has a share of its node's network bandwidth, because
  all groups of the node run the same collective at once; a group's ring between nodes has the shares of its *k* members::

      ring bandwidth  beta = intra                     if N = 1
                             min(intra, k * share)     otherwise
      ring latency    h    = (n - 1) a_intra             if N = 1
                             (n - N) a_intra + N a_inter otherwise
      all-gather, reduce-scatter   t = c + h + B (n-1)/n / beta
      all-reduce                   twice the hops and the bytes, or a double binary tree, whichever is faster:
                                   t = c + 2 ((ceil(n/N) - 1) a_intra + ceil(log2 N) a_inter) + 2 B / beta

* A reduction to one rank and a broadcast from one rank send all *B* along a chain of the ranks, pipelined in pieces, as in NCCL::

      reduce, broadcast            t = c + h + B / beta

* A rotation (in ring attention) passes every rank's slice on *n - 1* times, and costs as much as a ring all-gather. A shift is one such
  hop: *B / n* from every rank to another rank, at the speed of the slowest link.
* Kernels that dispatch tokens to experts send a token once to each node, instead of once to each expert (``dispatch_s``).
* In an all-to-all every rank sends *(n-k)/n* of its *B / n* over its share of the network and, at the same time, *(k-1)/n* in its node.

This is the textbook model in NCCL's tuner (``src/graph/tuning.cc``), without the tuner's tables for message sizes, NVLink SHARP and PAT.
Measurements calibrate it. A measured network gives *beta* by the number of ranks; a GPU sends to other nodes at most as fast as in a
collective over two nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from autopar.devices import Cluster, constants
from autopar.devices.cluster import slower
from autopar.ops.routing import Routing
from autopar.plan import Axis
from autopar.price.elementwise import least
from autopar.types import Collective

FLAT, SHARDED = "flat", "sharded"  # ZeRO 1's and FSDP's collectives, measured separately: see ``CollectiveTimes``


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks that run a collective together: ``size`` members on ``nodes`` nodes (or NVLink domains), with ``per_node`` members on each
    node, and ``per_part`` in each part of a joined cluster (``Cluster.parts``; 0 for other clusters).

    The groups of a mesh axis may be placed differently on the nodes: of groups of 3 on nodes of 8, some span two nodes. The slowest
    group determines the time, so ``per_node`` and ``per_part`` are the minimum over all groups and ``nodes`` the maximum.
    """

    size: int
    per_node: int
    nodes: int
    per_part: int = 0


def group(axes: tuple[Axis, ...], cluster: Cluster) -> RankGroup:
    """Return the group of ranks that differ only in their coordinates on ``axes``. An axis of stride 0 (the microbatch) has no ranks."""
    sizes = tuple((axis.size, axis.stride) for axis in axes if axis.stride > 0 and axis.size > 1)
    if not sizes:
        return RankGroup(1, 1, 1, 1 if cluster.parts else 0)
    if not cluster.parts:
        return _rank_group(sizes, ((cluster.count, cluster.linked_gpus),), cluster.first, False)
    return _rank_group(sizes, tuple((part.count, part.linked_gpus) for part in cluster.parts), cluster.first, True)


@lru_cache(maxsize=1 << 14)
def _rank_group(
    axes: tuple[tuple[int, int], ...], parts: tuple[tuple[int, int], ...], first: int, by_part: bool
) -> RankGroup:
    """Return the group of ``axes`` (size, stride) by counting its members on each node and, with ``by_part``, in each part.
    ``parts`` has (devices, devices per node) of each part; ``first`` is the index of rank 0's device on its node."""
    size = math.prod(size for size, _ in axes)
    count = sum(count for count, _ in parts) - first
    if len(parts) == 1:  # the pattern repeats when a group and a node start at the same rank
        count = min(count, math.lcm(parts[0][1], max(size * stride for size, stride in axes)))
    ranks = np.arange(count)
    groups = ranks - sum(ranks // stride % size * stride for size, stride in axes)
    ends = np.cumsum([count for count, _ in parts])
    part = np.searchsorted(ends, ranks + first, side="right")
    starts, per_node = ends - [count for count, _ in parts], np.array([per_node for _, per_node in parts])
    node = (ranks + first - starts[part]) // per_node[part] + count * part
    complete = np.bincount(groups)[groups] == size
    assert complete.any(), f"axes {axes} on {parts} devices"
    fewest, nodes = _fewest_and_most(groups[complete], node[complete])
    return RankGroup(size, fewest, nodes, _fewest_and_most(groups[complete], part[complete])[0] if by_part else 0)


def _fewest_and_most(groups: np.ndarray, nodes: np.ndarray) -> tuple[int, int]:
    """Return the minimum number of a group's members on one of its nodes, and the maximum number of a group's nodes."""
    width = int(nodes.max()) + 1
    pairs, members = np.unique(groups * width + nodes, return_counts=True)
    return int(members.min()), int(np.bincount(pairs // width).max())


def group_time_s(
    collective: Collective,
    bytes_total: float,
    members: RankGroup,
    cluster: Cluster,
    batched: bool = False,
    caller: str = "",
) -> float:
    """Return the seconds of ``collective`` on ``bytes_total`` over ``members``; zero if nothing is sent.

    A ``batched`` collective is one of many in sequence, such as gradient buckets, which hide each other's latency. ``caller`` selects the
    measurements: ``SHARDED`` for FSDP's collectives, including the copies around them, ``FLAT`` for ZeRO 1's.
    """
    n = members.size
    if n == 1 or not collective.sends:
        return 0.0
    if (measured_s := _measured(collective, bytes_total, n, cluster, caller)) is not None:
        return cluster.collective_s + measured_s
    if 0 < members.per_part < n and cluster.inter_part is not None:
        # the link between parts replaces the network if it is slower; a ring has the shares of all members in a part
        share = 1 if collective is Collective.ALL_TO_ALL else members.per_part / members.per_node
        part = replace(cluster.inter_part, bytes_per_s=cluster.inter_part.bytes_per_s * share)
        cluster = replace(cluster, inter=slower(cluster.inter, part), parts=(), network=None)
    nodes, k = members.nodes, members.per_node
    network = cluster.network
    if collective is Collective.ALL_TO_ALL:
        rank_bytes = bytes_total / n
        intra_s = rank_bytes * (k - 1) / n / cluster.intra.bytes_per_s
        inter_s = rank_bytes * (n - k) / n / cluster.inter.bytes_per_s
        hop_s = cluster.inter.latency_s if nodes > 1 else cluster.intra.latency_s
        return cluster.collective_s + hop_s + max(intra_s, inter_s)
    if network is not None and cluster.gpus_per_node > 1:
        # bandwidth falls with the number of ranks in a ring, and a GPU sends to other nodes no faster than between two of them
        reduces = collective is Collective.ALL_REDUCE
        beta = network.bus(max(1.0, n / network.per_node), reduces)
        if nodes > 1:
            beta = min(beta, k / network.per_node * network.bus(2, reduces))
        hops_s = (n - 1) * (cluster.intra.latency_s if nodes == 1 else network.hop_s)
    elif nodes == 1:
        beta, hops_s = cluster.intra.bytes_per_s, (n - 1) * cluster.intra.latency_s
    else:
        beta = min(cluster.intra.bytes_per_s, k * cluster.inter.bytes_per_s)
        hops_s = (n - nodes) * cluster.intra.latency_s + nodes * cluster.inter.latency_s
    if collective is Collective.SHIFT:
        hop_s = cluster.inter.latency_s if nodes > 1 else cluster.intra.latency_s
        return (
            cluster.collective_s + hop_s + bytes_total / n / (cluster.inter if nodes > 1 else cluster.intra).bytes_per_s
        )
    chain = collective in (Collective.REDUCE, Collective.BROADCAST)  # every link carries the full tensor
    share = 1.0 if chain else (n - 1) / n  # a ring's reduce-scatter or all-gather; an all-reduce is both
    transfer_s = share * bytes_total / beta
    round_s = hops_s * (not batched) + transfer_s
    if collective is not Collective.ALL_REDUCE:
        return cluster.collective_s + round_s
    if network is not None:
        return cluster.collective_s + 2 * round_s
    tree_hops_s = (math.ceil(n / nodes) - 1) * cluster.intra.latency_s + math.ceil(
        math.log2(nodes)
    ) * cluster.inter.latency_s
    return cluster.collective_s + 2 * min(round_s, tree_hops_s + bytes_total / beta)


def dispatch_s(row_bytes: float, router: Routing, members: RankGroup, cluster: Cluster) -> float:
    """Return the seconds in which kernels such as DeepEP's send rows, ``row_bytes`` on each rank, to their experts or back.

    A row crosses the network once for each other node with one of its experts, and is forwarded over NVLink to each rank with one, at the
    same time.
    """
    n, nodes, k = members.size, members.nodes, members.per_node
    if n == 1:
        return 0.0
    speed = constants.DISPATCH_NVLINK_EFFICIENCY.value / constants.INTRA_NODE_EFFICIENCY.value
    inter_s = row_bytes * router.reached(nodes) * (nodes - 1) / nodes / cluster.inter.bytes_per_s
    intra_s = row_bytes * router.reached(n) * (k - 1) / k / (speed * cluster.intra.bytes_per_s)
    hop_s = cluster.inter.latency_s if nodes > 1 else cluster.intra.latency_s
    return cluster.collective_s + hop_s + max(inter_s, intra_s)


def _measured(collective: Collective, size: float, n: int, cluster: Cluster, caller: str) -> float | None:
    """Return the seconds that ``autopar profile`` measured, or ``None``."""
    if cluster.collective_times is None:
        return None
    if collective in (Collective.SHIFT, Collective.ROTATE):
        hop_s = cluster.collective_times.seconds("p2p", 2, size / n)
        return None if hop_s is None else hop_s * (n - 1 if collective is Collective.ROTATE else 1)
    names = (f"{caller} {collective.value}", collective.value) if caller else (collective.value,)
    measured = (cluster.collective_times.seconds(name, n, size) for name in names)
    return next((seconds for seconds in measured if seconds is not None), None)


def overlapped_s(compute_s: float, communication_s: float, slowdown: float) -> float:
    """Return the seconds that overlapped communication adds to ``compute_s``: the exposed part, and the slow-down from the hidden part."""
    hidden_s = least(compute_s, communication_s)
    return communication_s - hidden_s + slowdown * hidden_s


def p2p_s(bytes_sent: float, cluster: Cluster, crosses_node: bool) -> float:
    """Return the seconds to send ``bytes_sent`` to one other rank while every device of the node does the same."""
    if (
        cluster.collective_times is not None
        and (measured_s := cluster.collective_times.seconds("p2p", 2, bytes_sent)) is not None
    ):
        return measured_s
    link = cluster.inter if crosses_node else cluster.intra
    return cluster.collective_s + link.latency_s + bytes_sent / link.bytes_per_s
