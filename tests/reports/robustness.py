"""How much a plan loses if its prices are wrong: ``make report NAME=robustness`` writes ``docs/evidence/robustness.{jsonl,md}``.

Each request is searched once. Its fastest plan, the simplest within 1 %, and the plan that the search returns, which must also hold under
wrong prices and leave a margin of memory (``search.robustness``), are priced under perturbed tables: FLOP/s, memory bandwidth and the
bandwidths of the links inside and between nodes are each multiplied by a random factor. A search under the same table shows what the best
plan would have been. A plan's regret is its step time over the best plan's, less one.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from places import EVIDENCE
from planning import machine_words, resumed
from simplicity import ROWS, WITHIN, captured

from autopar.devices import Cluster, parse
from autopar.errors import InfeasibleError
from autopar.graph import Graph
from autopar.price import Pricer
from autopar.search import PriceSource, SearchOptions, evaluate
from autopar.search.driver import explore, search_again
from autopar.search.evaluation import PricedPlan
from autopar.search.robustness import hardened
from autopar.search.simplicity import simplest

PLANS = ("fastest found", "simplest within 1 %", "returned")
ERROR = 0.1
"""Factors are uniform in 1 - ERROR to 1 + ERROR."""
FACTORS = ("arithmetic", "memory", "intra", "inter")
TABLES = 10
"""Perturbed tables for each request."""
MODELS = ("bert-large", "llama3-8b", "qwen3-30b-a3b", "llama3-70b", "gpt3-175b")
CLUSTERS = ("1x8xH100-80GB", "4x8xA100-80GB-SXM", "16x8xH100-80GB", "64x8xH100-80GB")
CASES: tuple[dict[str, Any], ...] = tuple({"model": m, "devices": d} for m in MODELS for d in CLUSTERS)


def tables(case: dict[str, Any]) -> list[dict[str, float]]:
    """Return the perturbed tables of a request, always the same ones."""
    draw = random.Random(f"{case['model']} {case['devices']}")
    return [{name: draw.uniform(1 - ERROR, 1 + ERROR) for name in FACTORS} for _ in range(TABLES)]


def work(case: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Return the line of a request."""
    cluster = parse(case["devices"])
    graph = captured(case["model"], ROWS * cluster.count)
    pricer = Pricer(graph, cluster, "bfloat16")
    options = SearchOptions(precision="bfloat16", within=WITHIN)
    try:
        state = explore(graph, cluster, pricer, options)
    except InfeasibleError as error:
        return case | {"error": error.message}
    found = simplest(graph, state)
    hard = hardened(graph, cluster, state, found)
    plans = dict(zip(PLANS, (found.fastest, found.plan, hard.chosen.plan), strict=True))
    regrets: dict[str, list[float]] = {name: [] for name in PLANS}
    for factors in tables(case):
        there = cluster.faster(**factors)
        on = pricer.on(there)
        steps = {name: step_time_s(graph, there, on, plan) for name, plan in plans.items()}
        trial = replace(options, within=0.0)
        best = search_again(graph, there, on, trial, min(steps.values()))
        assert best is not None
        for name, step_s in steps.items():
            regrets[name].append(step_s / best.step_s - 1)
    return case | {"regrets": regrets, "reason": hard.chosen.reason, "sensitivity": asdict(hard.sensitivity)}


def step_time_s(graph: Graph, cluster: Cluster, pricer: PriceSource, plan: PricedPlan) -> float:
    """Return the step time of a plan on ``cluster``."""
    config = plan.config
    decisions = {
        "mesh": config.mesh,
        "stage_bounds": plan.bounds,
        "strategies": plan.strategies,
        "schedule": config.schedule,
    }
    return evaluate(graph, cluster, pricer, precision="bfloat16", **decisions).prediction.step_time_s


def page(lines: list[dict[str, Any]]) -> str:
    """Return the page of the lines."""
    planned = [line for line in lines if "error" not in line]
    parts = [
        "# Plans under wrong prices\n",
        f"{len(planned)} requests under {TABLES} perturbed price tables each: FLOP/s, memory bandwidth and the bandwidths of the links",
        f"inside and between nodes are each multiplied by a random factor between {1 - ERROR:g} and {1 + ERROR:g}. The "
        "*regret* of a plan under",
        "a table is its step time divided by that of the best plan that a search with the same table finds, minus one. A search",
        f"takes up to {SearchOptions().time_limit_s:g} s of processor time, the default. If the first search of a request misses a good "
        "plan, the regret is",
        "high in all its tables, whatever their prices.\n",
        "| plan | median | 95th percentile | worst |",
        "|---|---|---|---|",
    ]
    for name in PLANS:
        regrets = [regret for line in planned for regret in line["regrets"][name]]
        parts.append(
            f"| {name} | {statistics.median(regrets):.2%} | {np.quantile(regrets, 0.95):.2%} | {max(regrets):.2%} |"
        )
    parts += [
        "",
        f"{machine_words([])}\n",
        f"| model | devices | {' | '.join(f'{name}: median, worst' for name in PLANS)} |",
        "|---|---|---|---|---|",
    ]
    for line in lines:
        rest = "does not fit | - | -"
        if "error" not in line:
            both = (line["regrets"][name] for name in PLANS)
            rest = " | ".join(f"{statistics.median(each):.2%}, {max(each):.2%}" for each in both)
        parts.append(f"| {line['model']} | {line['devices']} | {rest} |")
    return "\n".join([*parts, "", "Made by `make report NAME=robustness`. Do not edit."]) + "\n"


def main() -> None:
    lines = resumed(
        EVIDENCE / "robustness.jsonl", CASES, lambda case, limit_s: work(dict(case), limit_s), __doc__, 1800.0
    )
    (EVIDENCE / "robustness.md").write_text(page(lines))


if __name__ == "__main__":
    main()
