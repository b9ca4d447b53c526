"""Layers in halves of a microbatch, in synthetic problems: their prices, and brute force's own rule of when they are candidates."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from autopar.layer_price import LayerPrice
from autopar.plan import Strategy


def halved(whole: LayerPrice, rng: random.Random) -> LayerPrice:
    """A price in halves, from that of the whole layer: more memory, and more or less time."""
    forward_s, backward_s = whole.forward_s * rng.choice([0.6, 0.9, 1.1]), whole.backward_s * rng.uniform(0.6, 1.05)
    more = whole.transient_bytes + rng.randint(0, 20)
    return replace(whole, forward_s=forward_s, backward_s=backward_s, transient_bytes=more)


def overlapped(found: list[Strategy], overlap: str) -> list[Strategy]:
    """The candidates under a pin of ``overlap``."""
    apart = "selective" if overlap == "halves" else ""
    return [replace(s, overlap=overlap) for s in found if s.recomputation.kind != apart]


def in_halves(
    table: list[tuple[Strategy, list[LayerPrice]]], priced: Callable[[Strategy], list[LayerPrice]]
) -> list[tuple[Strategy, list[LayerPrice]]]:
    """The candidates in halves: where communication is a tenth of the time, and halves spare a tenth, on some devices."""
    found = []
    for strategy, whole in table:
        if strategy.recomputation.kind == "selective" or all(
            10 * p.communication_s < p.forward_s + p.backward_s for p in whole
        ):
            continue
        halved = replace(strategy, overlap="halves")
        times = [
            (p.forward_s + p.backward_s, q.forward_s + q.backward_s) for p, q in zip(priced(halved), whole, strict=True)
        ]
        if any(half <= 0.9 * one for half, one in times):
            found.append((halved, priced(halved)))
    return found
