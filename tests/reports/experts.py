"""Expert parallelism on four limited nodes: ``make report NAME=experts`` writes ``docs/evidence/experts.{jsonl,md}``.

The links are measured first (``autopar profile`` on such nodes), and plans are priced by them. Then autopar's programs (without a pin, and
with expert parallelism pinned, with its all-to-alls hidden and not) and those written by hand (``experts_by_hand``) take turns on the same
nodes, in an order drawn anew each round. It needs root and a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experts_by_hand import VARIANTS, open_by_hand
from limited_nodes import limited_nodes
from mixture import MODEL, config
from overlap import ROUNDING, How, described, measure_link
from overlap_cases import FAST
from overlap_page import links, plan_words
from overlap_trace import communication_share, draw, hidden_share, traced
from places import EVIDENCE

from autopar.bench.contest import BenchmarkSession
from autopar.devices import Cluster
from autopar.errors import LaunchError, ProgramError
from autopar.planning import plan_graph
from autopar.search import SearchOptions
from autopar.timing import paired_ratio
from autopar.timing.session import LEARNING_RATE

NODES, RATE = 4, FAST
AUTOMATIC, WITHOUT, WITH = "no pin", "expert parallelism", "expert parallelism, overlapped"
PINS: dict[str, dict[str, Any]] = {
    AUTOMATIC: {},
    WITHOUT: {"expert": NODES, "overlap": "none"},
    WITH: {"expert": NODES, "overlap": "halves"},
}
RESULTS, PAGE, PICTURE = EVIDENCE / "experts.jsonl", EVIDENCE / "experts.md", EVIDENCE / "experts.svg"

Line = dict[str, Any]


def measure(cluster: Cluster, how: How) -> Line:
    """All programs in turn: their plans and prices, times of rounds, losses, and traces of one more step."""
    with (
        limited_nodes(NODES, RATE, own_processors=True) as netns,
        tempfile.TemporaryDirectory() as temporary,
        BenchmarkSession(MODEL, NODES, how.steps, Path(temporary), netns) as session,
    ):
        captured, plans = session.workload.capture(), {}
        for name, pins in PINS.items():
            options = SearchOptions(precision="float32", pin=pins)
            graph, plans[name] = plan_graph(captured, cluster, options, session.workload.resized)
            session.open_program(name, graph, plans[name])
        for variant in VARIANTS:
            opener = f"{open_by_hand.__module__}:{open_by_hand.__name__}"
            session.open_other(variant.name, opener, variant.to_dict(), LEARNING_RATE, str(session.state_file))
        order = random.Random(how.seed)
        for _ in range(how.rounds):
            for name in order.sample(session.remaining, len(session.remaining)):
                session.measure(name)
        for name, error in session.errors.items():
            raise LaunchError(f"{name} fails: {error.message}")
        kept = ("mesh", "pipeline", "microbatches", "schedule", "layers", "notes")
        return {
            "rounds_s": session.rounds,
            "plans": {
                name: {"priced_s": plan.prediction.step_time_s, **{key: plan.to_json()[key] for key in kept}}
                for name, plan in plans.items()
            },
            "losses": check_losses(session.losses),
            "traces": {
                name: session.call(f"overlap_trace:{traced.__name__}", name, str(session.batch_file))
                for name in session.remaining
            },
            "load": round(os.getloadavg()[0], 2),
            **how.settings,
        }


def check_losses(losses: Mapping[str, list[float]]) -> Line:
    """The number of steps of each program, and the largest relative difference between two programs' losses in the first step, and in any.

    Raises:
        ProgramError: losses of the first step differ by more than rounding. Later a router's choice may tip over by rounding.
    """
    differences = [max(found) / min(found) - 1 for found in zip(*losses.values(), strict=True)]
    if not differences[0] <= ROUNDING:  # or NaN
        raise ProgramError(
            f"the first losses are {', '.join(f'{name}: {found[0]!r}' for name, found in losses.items())}"
        )
    return {"steps": len(differences), "first_difference": differences[0], "largest_difference": max(differences)}


def best_by_hand(line: Line) -> str:
    """The program by hand with the least median; picked after the fact."""
    return min((variant.name for variant in VARIANTS), key=lambda name: statistics.median(line["rounds_s"][name]))


def ratio(line: Line, ours: str, theirs: str) -> tuple[float, tuple[float, float]]:
    """The median over rounds of one program's time over another's, with its interval."""
    return paired_ratio(tuple(line["rounds_s"][ours]), tuple(line["rounds_s"][theirs]), line["seed"])


# -- the page ---------------------------------------------------------------------------------------------------------


def page(lines: list[Line]) -> str:
    link, line = lines
    c, best, losses, machine = config(), best_by_hand(line), line["losses"], link["calibration"]["machine"]
    return f"""# Expert parallelism on limited nodes

{NODES} nodes, each a network namespace with a link of {RATE} and its own share of the processors, as in [overlap](overlap.md). Measured
on {machine["cores"]} cores of {machine["processor"]}, at a load average of {line["load"]}, of which the report itself causes about 2.

The model is Qwen3-MoE of transformers: {c.num_hidden_layers} layers of {c.hidden_size} features, each with {c.num_experts} experts of
{c.moe_intermediate_size}, with {c.num_experts_per_tok} experts per token; batches of {MODEL.rows} rows, {MODEL.tokens:,} tokens in all,
float32, AdamW. The hand-written program (`tests/reports/experts_by_hand.py`) sorts rows by expert, and calls `all_to_all_single` with split
sizes and `grouped_mm`. The gradients of the other parameters are averaged by DDP, whose hooks ignore the experts, or in one all-reduce. A
test compares its loss and gradients with transformers' model on one device, in float64.

Programs take turns on the same nodes: each of {line["rounds"]} rounds runs every program once, in a new random order, with one warm-up
step and {line["steps"]} timed steps. Times are medians over rounds; ratios are medians over rounds of the ratio within the round, with a
bootstrap 95 % interval. The best by hand is picked by its measured times. The losses of the programs differ by at most a share of
{losses["first_difference"]:.1g} in the first step, and of {losses["largest_difference"]:.1g} in {losses["steps"]} steps.

## With and without overlap

Both plans have expert parallelism over all nodes. With overlap (`overlap=halves`) each layer computes its rows in two halves, and the
all-to-alls of one half run during the computation of the other. The communication share is taken from a trace of one more step.

{_overlap(line)}

![spans of computation and communication](experts.svg)

## Against hand-written programs

{_contest(line, best)}
{links([link])}
Made by `make report NAME=experts`. Do not edit.
"""


def _overlap(line: Line) -> str:
    rows = ["| | with | without | with / without |", "|---|---|---|---|"]
    priced = {name: line["plans"][name]["priced_s"] for name in (WITH, WITHOUT)}
    rows.append(f"| measured | {_ms(line, WITH)} | {_ms(line, WITHOUT)} | {_ratio(line, WITH, WITHOUT)} |")
    rows.append(
        f"| predicted | {1e3 * priced[WITH]:.0f} ms | {1e3 * priced[WITHOUT]:.0f} ms | {priced[WITH] / priced[WITHOUT]:.2f} |"
    )
    shares = {name: communication_share(line["traces"][name]) for name in (WITH, WITHOUT)}
    hidden = {name: hidden_share(line["traces"][name]) for name in (WITH, WITHOUT)}
    rows.append(f"| communication, share of a step | {shares[WITH]:.0%} | {shares[WITHOUT]:.0%} | |")
    rows.append(f"| of it overlapped with computation | {hidden[WITH]:.0%} | {hidden[WITHOUT]:.0%} | |")
    return "\n".join(rows)


def _contest(line: Line, best: str) -> str:
    rows = ["| program | step | predicted | ratio to the best by hand | plan |", "|---|---|---|---|---|"]
    order = sorted(line["rounds_s"], key=lambda name: statistics.median(line["rounds_s"][name]))
    for name in order:
        plan = line["plans"].get(name)
        cells = [name if plan is None else f"autopar, {name}", _ms(line, name)]
        cells += (
            ["", "", ""]
            if plan is None
            else [f"{1e3 * plan['priced_s']:.0f} ms", _ratio(line, name, best), plan_words(plan)]
        )
        if plan is None and name != best:
            cells[3] = _ratio(line, name, best)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _ms(line: Line, name: str) -> str:
    return f"{1e3 * statistics.median(line['rounds_s'][name]):.0f} ms"


def _ratio(line: Line, ours: str, theirs: str) -> str:
    middle, (low, high) = ratio(line, ours, theirs)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def read(path: Path = RESULTS) -> list[Line]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, metavar="N")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="timed steps of a measurement")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--same-link", action="store_true", help="price by the link as it was measured before")
    parser.add_argument("--page", action="store_true", help="make the page anew, measure nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the lines go; elsewhere no page is made")
    asked = parser.parse_args()
    if not asked.page:
        if not asked.same_link:
            link = {"part": "link", "name": f"{NODES} nodes at {RATE}", **measure_link(NODES, RATE)}
            asked.results.write_text(json.dumps(link) + "\n")
        link = read(asked.results)[0]
        line = measure(described(link), How(asked.rounds, asked.steps, asked.seed))
        asked.results.write_text("".join(json.dumps(each) + "\n" for each in (link, {"part": "contest", **line})))
        for name, rounds_s in line["rounds_s"].items():
            print(f"{name}: {1e3 * statistics.median(rounds_s):.0f} ms", file=sys.stderr)
    if asked.results == RESULTS:
        lines = read()
        line = lines[1]
        draw({name: line["traces"][name] for name in (WITH, WITHOUT, best_by_hand(line))}, PICTURE)
        PAGE.write_text(page(lines))


if __name__ == "__main__":
    main()
