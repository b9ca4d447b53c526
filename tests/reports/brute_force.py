"""The search against brute force on random small problems, by the hundred: ``python tests/reports brute-force --instances 2000 -o FILE``.

A problem is a seed and a family. Each line of FILE is one problem: what the search found, what trying every plan found, and whether
they agree: the same optimum to 1e-9, the same set of problems without a plan. Ends with 1 if any does not.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from search_models import Devices, RandomPricer, brute_force, random_problem, with_logits

from autopar.errors import InfeasibleError, UsageError
from autopar.graph import Graph
from autopar.schedules import SPLIT
from autopar.search import SearchOptions, search
from autopar.techniques.activations import INT8_ACTIVATIONS as INT8

FAMILIES = (
    "plain",
    "memory",
    "skips",
    "pins",
    "odd counts",
    "mixed devices",
    "chunks",
    "split",
    "offload",
    "any chunks",
    "int8",
    "pins, little memory",
    "nvme",
    "logits",
    "sequences",
)
EXACT = SearchOptions(target_gap=0.0, time_limit_s=120)


def random_pins(seed: int, layers: int, devices: int) -> SearchOptions:
    """One to three pins, most of which can be had."""
    rng = random.Random(f"pins {seed}")
    degrees = [n for n in (1, 2, 4) if n <= devices]
    choices: list[tuple[str, list[Any]]] = [
        ("pipeline", degrees), ("microbatches", [1, 2]), ("schedule", ["gpipe", "1f1b"]), ("tensor", degrees), ("data", degrees),
        ("zero", [0, 1, 2, 3]), ("recompute", [True, False, "selective"]), ("layers.0.tensor", degrees), ("c0.zero", [0, 3]),
        (f"layers.0-{layers - 1}.recompute", [True, False, "selective"]), (f"layers.{layers - 1}.zero", [1, 2]), ("layers.0.data", degrees),
    ]  # fmt: skip
    pin = {key: rng.choice(values) for key, values in rng.sample(choices, rng.randint(1, 3))}
    return SearchOptions(target_gap=0.0, time_limit_s=120, pin=pin)


def random_chunks(seed: int, family: str) -> tuple[Graph, Devices, RandomPricer, SearchOptions]:
    """Four or five layers on a line of devices: each may have several stages. Memory is often short, devices are sometimes mixed.

    ``family`` "any chunks": one stage on each device is as welcome; "split": backwards are in two parts.
    """
    rng = random.Random(f"{family} {seed}")
    graph, cluster, pricer = random_problem(seed, layers=rng.choice([4, 4, 5]), devices=(2, 2, 4))
    limits = [rng.choice([90, 150, 220, 300, 10_000]) for _ in range(2)]
    kinds = tuple((rng.choice([1.0, 2.0]), limit) for limit in limits) if rng.random() < 0.3 else ()
    interleaved = {"schedule": "interleaved-1f1b"}
    chosen = [
        interleaved,
        interleaved,
        {"chunks": 2},
        interleaved,
        {"pipeline": 2} | interleaved,
        {"chunks": 2, "microbatches": 2},
    ]
    pins: dict[str, Any] = rng.choice(chosen)
    if family == "any chunks":
        pins = rng.choice([{"pipeline": 2}, {"pipeline": 2}, {"pipeline": 2, "microbatches": 2}, {"tensor": 1}])
    if family == "split":
        fit = [name for name in SPLIT if name == "zero-bubble" or len(graph.layers) >= 4]
        fit = [name for name in fit if name != "dualpipev" or graph.batch_size >= 4]
        pins = {"schedule": rng.choice(fit)} | rng.choice([{}, {}, {"pipeline": 2}])
    options = SearchOptions(target_gap=0.0, time_limit_s=120, pin=pins)
    return graph, Devices(cluster.count, limits[0] if not kinds else min(limits), kinds=kinds), pricer, options


def random_offload(seed: int) -> tuple[Graph, Devices, RandomPricer, SearchOptions]:
    """Little memory, and anything, or some things, may be in the host's, which is little too."""
    rng = random.Random(f"offload {seed}")
    graph, cluster, pricer = random_problem(seed, devices=(1, 2, 2))
    limit, host = rng.choice([50, 70, 100]), rng.choice([0, 20, 40, 60, 10_000])
    chosen: list[dict[str, Any]] = [
        {"offload": "any", "states": "any"},
        {"offload": "any", "states": "any"},
        {"states": "host"},
        {"layers.0.offload": "any", "layers.0.states": "any"},
    ]
    options = SearchOptions(target_gap=0.0, time_limit_s=120, pin=rng.choice(chosen))
    return graph, Devices(cluster.count, limit, host_limit_bytes=host), pricer, options


def random_nvme(seed: int) -> tuple[Graph, Devices, RandomPricer, SearchOptions]:
    """Little memory, on the device and in the host, and NVMe that is described, or pinned though it is not."""
    rng = random.Random(f"nvme {seed}")
    graph, cluster, pricer = random_problem(seed, devices=(1, 2, 2))
    chosen: list[dict[str, Any]] = [
        {},
        {},
        {"states": "nvme"},
        {"layers.0.states": "device"},
        {"offload": "any", "recompute": "none"},
    ]
    options = SearchOptions(target_gap=0.0, time_limit_s=120, pin=rng.choice(chosen))
    limit, host, nvme = rng.choice([50, 70, 100]), rng.choice([0, 20, 40]), rng.choice([0, 40, 70, 10_000])
    described = rng.random() < 0.8
    outside = {"host_limit_bytes": host, "nvme_limit_bytes": nvme, "has_nvme": described}
    return graph, Devices(cluster.count, limit, **outside), pricer, options  # type: ignore[arg-type]


def random_int8(seed: int) -> tuple[Graph, Devices, RandomPricer, SearchOptions]:
    """Little memory, and saved activations may be in 8 bits: or must be, or must not, beside the host's memory."""
    rng = random.Random(f"int8 {seed}")
    graph, cluster, pricer = random_problem(seed, devices=(1, 2, 2, 4))
    chosen: list[dict[str, Any]] = [
        {},
        {},
        {},
        {"saved": "int8"},
        {"saved": "exact"},
        {"offload": "any", "states": "any"},
    ]
    options = SearchOptions(target_gap=0.0, time_limit_s=120, pin=rng.choice(chosen), allow={INT8})
    return graph, Devices(cluster.count, rng.choice([80, 120, 160, 220]), host_limit_bytes=40), pricer, options


def random_logits(seed: int) -> tuple[Graph, Devices, RandomPricer, SearchOptions]:
    """Little memory, and the last layer may compute its logits in slices: or must, or must not, recomputed and offloaded, too."""
    rng = random.Random(f"logits {seed}")
    graph, cluster, pricer = random_problem(seed, devices=(1, 2, 2, 4))
    pricer.graph = graph = with_logits(graph)
    chosen: list[dict[str, Any]] = [
        {},
        {},
        {},
        {"logits": "sliced"},
        {"logits": "whole"},
        {"recompute": "full"},
        {"offload": "any", "states": "any"},
    ]
    options = SearchOptions(target_gap=0.0, time_limit_s=120, pin=rng.choice(chosen))
    return graph, Devices(cluster.count, rng.choice([80, 120, 160, 220]), host_limit_bytes=40), pricer, options


def random_sequences(seed: int) -> tuple[Graph, Devices, RandomPricer, SearchOptions]:
    """Few rows for the devices, and every layer may have ring attention or Ulysses of some degrees, beside pins or without."""
    rng = random.Random(f"sequences {seed}")
    graph, cluster, pricer = random_problem(seed, layers=rng.choice([2, 3]), devices=(2, 2, 4))
    every = [(kind, degree) for kind in ("ring", "ulysses") for degree in (2, 4)]
    sequences = tuple(sorted(rng.sample(every, rng.randint(1, 3))))
    chosen: list[dict[str, Any]] = [
        {},
        {},
        {},
        {"tensor": 1},
        {"pipeline": 1},
        {"pipeline": 2},
        {"zero": 3},
        {"recompute": True},
    ]
    options = SearchOptions(target_gap=0.0, time_limit_s=120, pin=rng.choice(chosen), sequences=sequences)
    return graph, Devices(cluster.count, rng.choice([60, 90, 120, 180, 10_000])), pricer, options


def problem(family: str, seed: int) -> tuple[Graph, Devices, RandomPricer, SearchOptions]:
    """The problem of a family with that seed."""
    if family in ("chunks", "any chunks", "split"):
        return random_chunks(seed, family)
    if family == "offload":
        return random_offload(seed)
    if family == "int8":
        return random_int8(seed)
    if family == "nvme":
        return random_nvme(seed)
    if family == "logits":
        return random_logits(seed)
    if family == "sequences":
        return random_sequences(seed)
    devices = (3, 3, 1) if family == "odd counts" else (1, 2, 4, 4)
    graph, cluster, pricer = random_problem(seed, devices=devices, skips=family == "skips")
    if family == "memory":
        limit = random.Random(f"memory {seed}").randint(60, 260)
        return graph, Devices(cluster.count, limit), pricer, EXACT
    if family == "mixed devices":
        rng = random.Random(f"kinds {seed}")
        limits = [rng.choice([60, 120, 180, 240, 300, 10_000]) for _ in range(2)]
        kinds = tuple((rng.choice([1.0, 1.5, 3.0]), limit) for limit in limits)
        return graph, Devices(cluster.count, min(limits), kinds=kinds), pricer, EXACT
    options = random_pins(seed, len(graph.layers), cluster.count) if family.startswith("pins") else EXACT
    if family == "pins, little memory":
        cluster = Devices(cluster.count, random.Random(f"{family} {seed}").choice([80, 120, 160, 220]))
    return graph, cluster, pricer, options


def compare(family: str, seed: int) -> dict[str, Any]:
    """One problem, solved both ways."""
    graph, cluster, pricer, options = problem(family, seed)
    row: dict[str, Any] = {"family": family, "seed": seed, "layers": len(graph.layers), "devices": cluster.count}
    if options.pins:
        row["pins"] = options.pins
    started = time.process_time()
    gap = 0.0
    try:
        plan = search(graph, cluster, pricer, options)
        found, gap = plan.prediction.step_time_s, plan.gap
        row |= {"outcome": "optimum", "pipeline": plan.pipeline, "chunks": plan.chunks, "schedule": plan.schedule}
    except InfeasibleError:
        found, row["outcome"] = None, "infeasible"
    except UsageError:  # pins that contradict each other or the problem: there is nothing to compare
        return row | {"outcome": "refused", "agrees": True}
    row["search_cpu_s"] = round(time.process_time() - started, 3)
    best = brute_force(graph, cluster, pricer, options)
    if found is None or best is None:
        agrees = found is best
    else:
        agrees = abs(found - best) <= 1e-9 * best and gap <= 1e-6
    return row | {"found_s": found, "best_s": best, "gap": gap, "agrees": agrees}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first problem")
    parser.add_argument("-o", "--output", type=Path, help="one JSON object a line; an existing file is gone on with")
    args = parser.parse_args()
    rows = (
        [json.loads(line) for line in args.output.read_text().splitlines()]
        if args.output and args.output.exists()
        else []
    )
    done = {(row["family"], row["seed"]) for row in rows}
    for number in range(args.instances):
        family, seed = FAMILIES[number % len(FAMILIES)], args.seed + number // len(FAMILIES)
        if (family, seed) in done:
            continue
        rows.append(compare(family, seed))
        if args.output:
            with args.output.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    counts = collections.Counter((row["family"], row["outcome"]) for row in rows)
    for family in FAMILIES:
        print(
            f"{family:13}",
            *(f"{outcome} {counts[family, outcome]:4}" for outcome in ("optimum", "infeasible", "refused")),
        )
    wrong = [row for row in rows if not row["agrees"]]
    print(f"{len(rows)} problems, {len(wrong)} disagreements", *(f"{row['family']} {row['seed']}" for row in wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
