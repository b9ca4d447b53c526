"""What single changes of a setting would gain: each decision changed alone, the others as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autopar.errors import AutoparError
from autopar.plan import Plan
from autopar.search.problem import divisors
from autopar.trainers.choose import MICROBATCHES, MOST_CHUNKS, TrainerPricers
from autopar.trainers.setting import Setting


@dataclass(frozen=True)
class Change:
    """One decision changed, with the plan that results: ``words`` name it, such as ``tensor 4 -> 2``."""

    words: str
    setting: Setting
    plan: Plan


def best_changes(pricers: TrainerPricers, s: Setting, now_s: float, most: int = 3) -> list[Change]:
    """Return the single changes that make a step of ``now_s`` seconds faster and fit, the best value of each decision, fastest first."""
    best: dict[str, Change] = {}
    for name, words, changed in _neighbours(pricers, s):
        if changed.chunks > 1 and changed.microbatches % changed.pipeline:
            continue  # interleaved 1F1B runs as many microbatches as ranks at a time
        try:
            plan = pricers.plan(changed)
        except AutoparError:
            continue  # the model or the batch does not admit it
        seconds = plan.prediction.step_time_s
        if not plan.too_full and seconds < (best[name].plan.prediction.step_time_s if name in best else now_s):
            best[name] = Change(words, changed, plan)
    return sorted(best.values(), key=lambda change: change.plan.prediction.step_time_s)[:most]


def _neighbours(pricers: TrainerPricers, s: Setting) -> Iterator[tuple[str, str, Setting]]:
    """Yield (decision, words, setting) for every other value of every decision."""
    space, per_node = pricers.trainer.space, pricers.cluster.gpus_per_node
    degrees = {
        "tensor": divisors(per_node) if space.tensor else [],
        "pipeline": divisors(pricers.cluster.count) if space.pipeline else [],
        "context": divisors(per_node) if space.context else [],
    }
    for name, values in degrees.items():
        for value in values:
            if (
                value != (now := getattr(s, name))
                and (moved := _with_degree(s, name, value, space.sequence)) is not None
            ):
                yield name, f"{name} {now} -> {value}", moved
    chunks = range(1, MOST_CHUNKS + 1) if space.chunks and s.pipeline > 1 else ()
    others: dict[str, Any] = {
        "zero": space.zero,
        "chunks": [n for n in chunks if n == 1 or s.microbatches % s.pipeline == 0],
        "microbatch": [n for n in MICROBATCHES if s.global_batch % (s.data * n) == 0],
        "activations": space.activations,
        "replicate": (divisors(s.data)[:-1] or [1]) if space.replicate and s.zero else [],
    }
    for name, values in others.items():
        for value in values:
            now = getattr(s, name)
            if value == now:
                continue
            if name == "activations":
                yield name, f"{name} {now} -> {value}", s.with_activations(value)
                continue
            changes: dict[str, Any] = {name: value}
            if name == "chunks":
                changes["cuts"] = None
            if name == "zero" and not value:
                changes["replicate"] = 1
            yield name, f"{name} {now} -> {value}", dataclasses.replace(s, **changes)


def _with_degree(s: Setting, name: str, value: int, sequence: bool) -> Setting | None:
    """Return the setting with another degree, which data parallelism makes up for; ``None`` if the ranks or the batch do not divide."""
    data, odd = divmod(s.data * getattr(s, name), value)
    if odd or not data or s.global_batch % (data * s.microbatch) or s.expert > 1:
        return None
    changes: dict[str, Any] = {name: value, "data": data}
    if name == "tensor":
        changes["sequence"] = sequence and value > 1
    if name == "pipeline":
        changes |= {"chunks": 1 if value == 1 else s.chunks, "cuts": None}
    if data % s.replicate:
        return None
    return dataclasses.replace(s, **changes)
