"""DualPipeV's pairs on four limited nodes: ``make report NAME=pairs`` writes ``docs/evidence/pairs.{jsonl,md}``.

The links are measured first (``autopar profile`` on such nodes), and plans are priced by them. Then the programs of a mixture under
DualPipeV with expert parallelism, with its all-to-alls hidden and not, take turns on the same nodes, in an order drawn anew each round. It
needs root and a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from experts import read
from limited_nodes import limited_nodes
from limited_processors import compute_here
from mixture import MODEL, config
from overlap import How, described, link_name, measure_link, price_s
from overlap_cases import FAST, SLOW
from overlap_page import links
from places import EVIDENCE

from autopar.bench.contest import BenchmarkSession
from autopar.devices import Cluster
from autopar.errors import LaunchError, ProgramError
from autopar.search.manual import manual_plan
from autopar.shard import annotate
from autopar.timing import paired_ratio

NODES, RATES = 4, (FAST, SLOW)
WITHOUT, WITH = "one after the other", "in turns"
OVERLAP = {WITHOUT: "none", WITH: "pairs"}
PLAN: dict[str, Any] = {"pipeline": 2, "chunks": 2, "microbatches": 8, "schedule": "dualpipev", "expert": 2}
CUTS = (2, 3, 4)
"""One block in each stage, and the embedding and the loss in the first and the last: both on the first device."""
RESULTS, PAGE = EVIDENCE / "pairs.jsonl", EVIDENCE / "pairs.md"

Line = dict[str, Any]


BESIDE = f"""
import {compute_here.__module__}

ThreadPoolExecutor = functools.partial(ThreadPoolExecutor, initializer={compute_here.__module__}.{compute_here.__name__})
"""
"""Lines at the end of a program's file, so that the thread of the backward passes shares the processor time of its node."""


def compute_in_thread(folder: Path) -> None:
    """Edit an emitted program that runs pairs in turns."""
    file = folder / "runtime" / "pairs.py"
    if file.is_file():
        file.write_text(file.read_text() + BESIDE)


def measure(rate: str, cluster: Cluster, how: How) -> Line:
    """Both programs in turn: prices, times of rounds and losses.

    Raises:
        ProgramError: the losses of any step differ in any bit between the programs, which do the same arithmetic.
        LaunchError: a program fails.
    """
    with (
        limited_nodes(NODES, rate, own_processors=True) as netns,
        tempfile.TemporaryDirectory() as temporary,
        BenchmarkSession(MODEL, NODES, how.steps, Path(temporary), netns) as session,
    ):
        graph = annotate(session.workload.capture())
        plans = {
            name: manual_plan(graph, precision="float32", cuts=CUTS, overlap=value, **PLAN)
            for name, value in OVERLAP.items()
        }
        for name, plan in plans.items():
            session.open_program(name, graph, plan, compute_in_thread)
        for name in plans:
            session.call(f"{compute_here.__module__}:{compute_here.__name__}", name)
        order = random.Random(how.seed)
        for _ in range(how.rounds):
            for name in order.sample(session.remaining, len(session.remaining)):
                session.measure(name)
        for name, error in session.errors.items():
            raise LaunchError(f"{name} fails: {error.message}")
        if session.losses[WITH] != session.losses[WITHOUT]:
            raise ProgramError(
                f"the losses are {session.losses[WITH]} with and {session.losses[WITHOUT]} without overlap"
            )
        return {
            "part": "pairs",
            "name": link_name(NODES, rate),
            "rate": rate,
            "rounds_s": session.rounds,
            "priced_s": {name: price_s(graph, cluster, plan) for name, plan in plans.items()},
            "losses": len(session.losses[WITH]),
            "load": round(os.getloadavg()[0], 2),
            **how.settings,
        }


# -- the page ---------------------------------------------------------------------------------------------------------


def page(lines: list[Line]) -> str:
    measured, first = [line for line in lines if line["part"] == "pairs"], lines[0]
    c, machine, line = config(), first["calibration"]["machine"], measured[0]
    loads = " and ".join(str(each["load"]) for each in measured)
    return f"""# DualPipeV's pairs on limited nodes

{NODES} nodes, each a network namespace with a link of its own rate and its own share of the processors, as in [overlap](overlap.md).
Measured on {machine["cores"]} cores of {machine["processor"]}, at load averages of {loads}, of which
the report itself causes about 2.

The model is Qwen3-MoE of transformers: {c.num_hidden_layers} layers of {c.hidden_size} features, each with {c.num_experts} experts of
{c.moe_intermediate_size}, with {c.num_experts_per_tok} experts per token; batches of {MODEL.rows} rows, {MODEL.tokens:,} tokens in all,
float32, AdamW. The plan has {PLAN["pipeline"]} pipeline ranks of two stages under DualPipeV, {PLAN["microbatches"]} microbatches,
and expert parallelism over {PLAN["expert"]} nodes. *In turns* (`overlap=pairs`, the default) the two passes of a pair hand over to
each other while their all-to-alls are in flight; *one after the other* (`overlap=none`) is torch's schedule unchanged. Both do the
same arithmetic: the report fails unless the losses of all {line["losses"]} steps are bitwise equal.

The two threads of a node share its processor time. Programs take turns on the same nodes: each of {line["rounds"]} rounds runs
both, in a new random order, with one warm-up step and {line["steps"]} timed steps. Times are medians over rounds; ratios are medians
over rounds of the ratio within the round, with a bootstrap 95 % interval. Predictions charge what is hidden with the slow-down of
computation that `autopar profile` measured under an all-reduce.

{_table(measured)}
{links([each for each in lines if each["part"] == "link"])}
Made by `make report NAME=pairs`. Do not edit.
"""


def _table(measured: list[Line]) -> str:
    rows = [
        "| link | in turns | one after the other | ratio | predicted: in turns | one after the other | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in measured:
        rounds, priced = line["rounds_s"], line["priced_s"]
        middle, (low, high) = paired_ratio(tuple(rounds[WITH]), tuple(rounds[WITHOUT]), line["seed"])
        cells = [
            line["rate"],
            *(f"{1e3 * statistics.median(rounds[name]):.0f} ms" for name in (WITH, WITHOUT)),
            f"{middle:.3f} ({low:.3f} to {high:.3f})",
            *(f"{1e3 * priced[name]:.0f} ms" for name in (WITH, WITHOUT)),
            f"{priced[WITH] / priced[WITHOUT]:.3f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, metavar="N")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="timed steps of a measurement")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--rates", nargs="+", default=RATES, help="of the links, as tc(8) writes them")
    parser.add_argument("--same-links", action="store_true", help="price by the links as they were measured before")
    parser.add_argument("--page", action="store_true", help="make the page anew, measure nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the lines go; elsewhere no page is made")
    asked = parser.parse_args()
    if not asked.page:
        known = (
            {line["rate"]: line for line in read(asked.results) if line["part"] == "link"} if asked.same_links else {}
        )
        found: list[Line] = [
            known.get(rate) or {"part": "link", "name": link_name(NODES, rate), **measure_link(NODES, rate)}
            for rate in asked.rates
        ]
        for link in list(found):
            how = How(asked.rounds, asked.steps, asked.seed)
            found.append(measure(link["rate"], described(link), how))
            asked.results.write_text("".join(json.dumps(each) + "\n" for each in found))
            times = {name: round(1e3 * statistics.median(each)) for name, each in found[-1]["rounds_s"].items()}
            print(f"{link['rate']}: ms {times}, priced {found[-1]['priced_s']}", file=sys.stderr)
    if asked.results == RESULTS:
        PAGE.write_text(page(read(RESULTS)))


if __name__ == "__main__":
    main()
