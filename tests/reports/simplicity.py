"""The simplest plan within 1 % of the fastest, for fifty requests: ``make report NAME=simplicity`` writes
``docs/evidence/simplicity.{jsonl,md}``.

Each line is one request: a model of the zoo on a cluster, planned once. The search's fastest plan and the plan that ``within`` selects
are compared by ``search.simplicity.Complexity``. All models of one architecture are captured once.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from typing import Any

from places import EVIDENCE
from planning import machine_words, resumed

from autopar.devices import parse
from autopar.errors import InfeasibleError
from autopar.graph import Graph
from autopar.planning import capture_model
from autopar.price import Pricer
from autopar.search import SearchOptions
from autopar.search.driver import explore
from autopar.search.simplicity import Simplifier, simplest
from autopar.workload import Workload
from autopar.zoo import find
from autopar.zoo.hf import build_config

WITHIN = 0.01
LIMIT_S = 10.0
"""Time limit of one search."""

MODELS = (
    ("gpt2-xl", 1024),
    ("bert-large", 512),
    ("t5-large", 512),
    ("llama3-8b", 4096),
    ("qwen3-8b", 4096),
    ("mixtral-8x7b", 4096),
    ("qwen3-30b-a3b", 4096),
    ("llama3-70b", 4096),
    ("gpt3-175b", 2048),
    ("llama3-405b", 4096),
)
"""Models with the tokens of a sequence."""

CLUSTERS = ("1x8xA100-40GB-SXM", "1x8xH100-80GB", "4x8xA100-80GB-SXM", "16x8xH100-80GB", "64x8xH100-80GB")
ROWS = 8
"""Rows of the global batch for each device."""

CASES: tuple[dict[str, Any], ...] = tuple({"model": m, "devices": d} for m, _ in MODELS for d in CLUSTERS)


@functools.lru_cache(1)
def captured(model: str, batch: int) -> Graph:
    """Return the graph of a model with a batch of ``batch`` rows."""
    entry = find(model)
    module, rows = build_config(entry.config, dict(MODELS)[model], batch, "bfloat16", "meta")
    return capture_model(Workload(module, rows, None, model, "bfloat16"))


def work(case: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Return the line of a request."""
    cluster = parse(case["devices"])
    graph = captured(case["model"], ROWS * cluster.count)
    options = SearchOptions(precision="bfloat16", time_limit_s=LIMIT_S, within=WITHIN)
    started = time.thread_time()
    try:
        state = explore(graph, cluster, Pricer(graph, cluster, "bfloat16"), options)
    except InfeasibleError as error:
        return case | {"error": error.message}
    assert state.best is not None
    searched_s = time.thread_time() - started
    found = simplest(graph, state)
    names = Simplifier(state, tuple(layer.cls for layer in graph.layers), 0.0, 0.0)
    before, after = (names.complexity(plan.config, plan.strategies) for plan in (found.fastest, found.plan))
    return case | {
        "fastest": dataclasses.asdict(before),
        "simplest": dataclasses.asdict(after),
        "fastest_s": found.fastest_s,
        "simplest_s": found.plan.cost.step_time_s,
        "search_s": round(searched_s, 2),
        "simplify_s": round(time.thread_time() - started - searched_s, 2),
    }


def page(lines: list[dict[str, Any]]) -> str:
    """Return the page of the lines."""
    planned = [line for line in lines if "error" not in line]
    lost = [line["simplest_s"] / line["fastest_s"] - 1 for line in planned]
    changed = [line for line in planned if line["fastest"] != line["simplest"]]
    names = ("exceptions", "strategies", "axes", "techniques")

    def mean(which: str, name: str) -> str:
        return f"{statistics.mean(line[which][name] for line in planned):.2f}"

    parts = [
        "# The simplest plan within 1 %\n",
        f"{len(lines)} requests: {len(MODELS)} models on {len(CLUSTERS)} clusters, {ROWS} rows per device, bfloat16, at "
        f"most {LIMIT_S:.0f} s for a search.",
        f"{len(lines) - len(planned)} do not fit. A plan's complexity has four counts:\n",
        "- *exceptions*: additional strategies within a layer class; with 0, equal layers have equal strategies;",
        "- *strategies*: distinct strategies of the plan;",
        "- *axes*: axes of parallelism, the pipeline included;",
        "- *techniques*: options of layers that are not at their first value.\n",
        "| means over all plans | " + " | ".join(names) + " |",
        "|---|---|---|---|---|",
        *(
            f"| {title} | " + " | ".join(mean(which, name) for name in names) + " |"
            for which, title in (("fastest", "fastest"), ("simplest", "simplest within 1 %"))
        ),
        "",
        f"{len(changed)} of {len(planned)} plans become simpler. The step takes {statistics.median(lost):.2%} longer in the median, "
        f"{max(lost):.2%} at most.",
        f"Equal layers have equal strategies in {_uniform(planned, 'fastest')} of the fastest plans and in "
        f"{_uniform(planned, 'simplest')} of the simplest.",
        f"Finding the simplest plan takes {statistics.median(line['simplify_s'] for line in planned):.2f} s in the median, "
        f"{max(line['simplify_s'] for line in planned):.2f} s at most. {machine_words([])}\n",
        "| model | devices | fastest | simplest | exceptions | strategies | axes | techniques |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        rest = "does not fit | - | - | - | - | -"
        if "error" not in line:
            pairs = (f"{line['fastest'][name]} → {line['simplest'][name]}" for name in names)
            rest = (
                f"{line['fastest_s']:.4g} s | +{line['simplest_s'] / line['fastest_s'] - 1:.2%} | {' | '.join(pairs)}"
            )
        parts.append(f"| {line['model']} | {line['devices']} | {rest} |")
    return "\n".join([*parts, "", "Made by `make report NAME=simplicity`. Do not edit."]) + "\n"


def _uniform(lines: list[dict[str, Any]], which: str) -> int:
    return sum(line[which]["exceptions"] == 0 for line in lines)


def main() -> None:
    lines = resumed(
        EVIDENCE / "simplicity.jsonl", CASES, lambda case, limit_s: work(dict(case), limit_s), __doc__, 600.0
    )
    (EVIDENCE / "simplicity.md").write_text(page(lines))


if __name__ == "__main__":
    main()
