"""The formulas of textbook collectives against messages that are sent one by one, and their sums checked."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from autopar.devices import Cluster, Gpu, Link
from autopar.price.algorithms import ALGORITHMS, Algorithm, algorithm
from autopar.price.collectives import RankGroup, group_time_s
from autopar.types import Collective

SIZE = 5040 * 16.0
COLLECTIVES = (Collective.REDUCE, Collective.BROADCAST, Collective.ALL_REDUCE)
GPU = Gpu("g", 10**10, {"bfloat16": 1e14}, 1.0, 1e12, 1.0, 1e-6)
TOY = Cluster("toy", 4, 8, "cuda", GPU, Link(2e-6, 1e11, ""), Link(1e-5, 5e9, ""), collective_s=1e-6)
Messages = list[tuple[int, int, Iterable[int]]]  # sender, receiver, pieces


class Ranks:
    """Ranks that hold pieces of a tensor, each with the set of ranks whose terms it is the sum of; and what they send."""

    def __init__(self, ranks: int, pieces: int) -> None:
        self.pieces, self.size = pieces, SIZE / pieces
        self.held = [[{rank} for _ in range(pieces)] for rank in range(ranks)]
        self.rounds = 0
        self.in_turn = 0.0
        self.sent, self.received = [0.0] * ranks, [0.0] * ranks

    def round(self, messages: Messages, add: bool) -> None:
        """All messages at once. A piece that is added must bring terms that the receiver lacks."""
        senders, receivers = [m[0] for m in messages], [m[1] for m in messages]
        assert len(set(senders)) == len(senders) and len(set(receivers)) == len(receivers)
        arriving = [(to, piece, set(self.held[at][piece])) for at, to, pieces in messages for piece in pieces]
        for to, piece, terms in arriving:
            assert not add or not terms & self.held[to][piece], "a term would count twice"
            self.held[to][piece] = self.held[to][piece] | terms if add else terms
        sizes = [len(list(pieces)) * self.size for _, _, pieces in messages]
        for (at, to, _), size in zip(messages, sizes, strict=True):
            self.sent[at] += size
            self.received[to] += size
        self.rounds += 1
        self.in_turn += max(sizes)

    def has(self, rank: int, terms: set[int]) -> bool:
        return all(piece == terms for piece in self.held[rank])


def by_server(n: int, collective: Collective) -> Ranks:
    ranks = Ranks(n, 1)
    if collective is not Collective.BROADCAST:
        for other in range(1, n):
            ranks.round([(other, 0, [0])], add=True)
    if collective is not Collective.REDUCE:
        for other in range(1, n):
            ranks.round([(0, other, [0])], add=False)
    return ranks


def around_the_ring(n: int, collective: Collective) -> Ranks:
    """Piece ``c`` is summed at rank ``c - 1``: it starts at rank ``c`` and goes all the way around."""
    ranks = Ranks(n, n)
    if collective is Collective.BROADCAST:  # the piece of the farthest rank leaves first
        for t in range(n - 1):
            ranks.round([(t - i, t - i + 1, [(n - 1 - i + 1) % n]) for i in range(t + 1)], add=False)
    else:
        for t in range(n - 1):
            ranks.round([(r, (r + 1) % n, [(r - t) % n]) for r in range(n)], add=True)
    if collective is Collective.REDUCE:  # the ring's last link leads to rank 0
        for t in range(n - 1):
            ranks.round([(r, (r + 1) % n, [(r - t + 1) % n]) for r in range(1 + t, n)], add=False)
    else:
        for t in range(n - 1):
            ranks.round([(r, (r + 1) % n, [(r + 1 - t) % n]) for r in range(n)], add=False)
    return ranks


def by_halves(ranks_in_all: int, collective: Collective) -> Ranks:
    n = 1
    while 2 * n <= ranks_in_all:
        n *= 2
    extra = ranks_in_all - n
    ranks = Ranks(ranks_in_all, n)
    real = [2 * i for i in range(extra)] + list(
        range(2 * extra, ranks_in_all)
    )  # those that go on; their neighbours rest
    everything = range(n)

    def block(v: int, width: int) -> range:
        """The pieces of the aligned block of ``width`` ranks around ``v``."""
        return range(v // width * width, v // width * width + width)

    distances = [n >> i for i in range(1, n.bit_length())]
    if collective is Collective.BROADCAST:
        for d in distances:
            ranks.round([(real[v], real[v + d], block(v + d, d)) for v in range(0, n, 2 * d)], add=False)
    else:
        if extra:
            ranks.round([(2 * i + 1, 2 * i, everything) for i in range(extra)], add=True)
        for d in distances:
            ranks.round([(real[v], real[v ^ d], block(v ^ d, d)) for v in range(n)], add=True)
    if collective is Collective.REDUCE:
        for d in reversed(distances):
            ranks.round([(real[v + d], real[v], block(v + d, d)) for v in range(0, n, 2 * d)], add=False)
        return ranks
    for d in reversed(distances):
        ranks.round([(real[v], real[v ^ d], block(v, d)) for v in range(n)], add=False)
    if extra:
        ranks.round([(2 * i, 2 * i + 1, everything) for i in range(extra)], add=False)
    return ranks


SIMULATED = {"sequential": by_server, "ring": around_the_ring, "halving-doubling": by_halves}


@pytest.mark.parametrize(("name", "collective"), list(itertools.product(ALGORITHMS, COLLECTIVES)))
def test_the_formulas_count_the_messages(name: str, collective: Collective) -> None:
    for n in (*range(2, 19), 31, 32, 33):
        ranks, found = SIMULATED[name](n, collective), algorithm(name, collective, n, SIZE)
        everyone = set(range(n))
        if collective is Collective.REDUCE:
            assert ranks.has(0, everyone), n
        else:
            terms = {0} if collective is Collective.BROADCAST else everyone
            assert all(ranks.has(rank, terms) for rank in range(n)), n
        counted = (
            ranks.rounds,
            ranks.in_turn,
            sum(ranks.sent),
            max(map(sum, zip(ranks.sent, ranks.received, strict=True))),
        )
        in_turn = sum(one.size * one.times for one in found.rounds)
        figures = found.messages, in_turn, found.traffic_bytes, found.busiest_bytes
        assert figures == pytest.approx(counted, rel=1e-12), n


def test_the_published_formulas() -> None:
    """Thakur, Rabenseifner and Gropp (2005), without the arithmetic of the sums: ring 2 (p-1) alpha + 2 n (p-1) / p beta, recursive
    halving and doubling 2 lg p alpha + 2 n (p-1) / p beta."""
    alpha_s, beta_s = 2e-6, 1 / 1e11

    def seconds(name: str, collective: Collective, n: int) -> float:
        return algorithm(name, collective, n, SIZE).seconds(RankGroup(n, n, 1), TOY) - TOY.collective_s

    for collective in COLLECTIVES:
        moved_s = 2 * SIZE * 7 / 8 * beta_s
        assert seconds("ring", collective, 8) == pytest.approx(2 * 7 * alpha_s + moved_s)
        assert seconds("halving-doubling", collective, 8) == pytest.approx(2 * 3 * alpha_s + moved_s)
        ways = 2 if collective is Collective.ALL_REDUCE else 1
        assert seconds("sequential", collective, 8) == pytest.approx(ways * 7 * (alpha_s + SIZE * beta_s))
    assert algorithm("ring", Collective.REDUCE, 1, SIZE) == Algorithm((), 0.0)
    assert algorithm("ring", Collective.REDUCE, 1, SIZE).seconds(RankGroup(1, 1, 1), TOY) == 0.0


def test_messages_between_nodes_take_the_network() -> None:
    """Four nodes of eight: halving crosses nodes twice with all ranks at once; the ring crosses with one in eight of its links."""
    members = RankGroup(32, 8, 4)
    halving = algorithm("halving-doubling", Collective.ALL_REDUCE, 32, SIZE).seconds(members, TOY)
    outside = 2 * (2 * 1e-5 + SIZE * (1 / 2 + 1 / 4) / 5e9)
    inside = 2 * (3 * 2e-6 + SIZE * (1 / 8 + 1 / 16 + 1 / 32) / 1e11)
    assert halving == pytest.approx(1e-6 + outside + inside)
    sequential = algorithm("sequential", Collective.REDUCE, 32, SIZE).seconds(members, TOY)
    assert sequential == pytest.approx(1e-6 + 7 * (2e-6 + SIZE / 1e11) + 24 * (1e-5 + SIZE / 5e9))
    ring = algorithm("ring", Collective.ALL_REDUCE, 32, SIZE).seconds(members, TOY)
    assert ring == pytest.approx(1e-6 + 62 * (1e-5 + SIZE / 32 / (8 * 5e9)))


def test_a_large_ring_takes_as_long_as_the_priced_one() -> None:
    """Of many bytes latency is nothing, and both send the same bytes over the same slowest link."""
    for members in (RankGroup(8, 8, 1), RankGroup(32, 8, 4)):
        ring = algorithm("ring", Collective.ALL_REDUCE, members.size, 1e12).seconds(members, TOY)
        assert ring == pytest.approx(group_time_s(Collective.ALL_REDUCE, 1e12, members, TOY), rel=1e-3)
