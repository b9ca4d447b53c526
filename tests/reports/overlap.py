"""Communication under computation, measured on limited nodes: ``make report NAME=overlap`` writes ``docs/evidence/overlap.md``.

Nodes are network namespaces of this machine whose links have a rate (``limited_nodes``); the report needs root and a machine that does
nothing else. In turn it measures the links and prices plans by them; for every kind of overlap, the emitted program, the same program
without the overlap, and one written by hand; FSDP on a clock with streams; and contests of automatic programs with hand-written ones.
Programs take turns inside the same nodes, in an order drawn anew each round.

One JSON line for each of these; a run does what the file lacks, and what failed before (``--fresh``: everything).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from limited_nodes import limited_nodes
from overlap_cases import FEATURES, MATCHES, OWN_ROOTS, Feature, Match
from overlap_page import CLOCK, CONTEST, FEATURE, LINK, PAGE, RESULTS, WITH, WITHOUT, read, write_page
from overlap_trace import traced
from places import TESTS, file_of
from workers import WorkerPool

from autopar.bench.contest import BenchmarkSession, contest
from autopar.bench.models import MODELS
from autopar.cli.pricing import price_plan
from autopar.devices import Cluster, parse
from autopar.errors import AutoparError, LaunchError, ProgramError
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.price import Pricer
from autopar.profile.run import calibration, measured
from autopar.profile.sweep import Task, tasks
from autopar.run.processes import Processes

CLOCK_GATHERS = (0.25, 0.5, 1.0)  # seconds of a layer's gather, whose forward pass takes 1 s and its backward pass 2 s
ROUNDING = 1e-5  # relative, of a loss in float32 after some steps
LARGEST_BYTES, WIDEST = 1 << 22, 512  # of what is sent when a link is measured; longer transfers are in proportion

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class How:
    """How long and in which order programs are measured."""

    rounds: int
    steps: int
    seed: int

    @property
    def settings(self) -> Line:
        return {**dataclasses.asdict(self), "torch": torch.__version__}


# -- links ------------------------------------------------------------------------------------------------------------


def link_name(nodes: int, rate: str) -> str:
    return f"{nodes} nodes at {rate}"


def _is_needed(task: Task) -> bool:
    given = task.arguments
    if task.function == "product" and given["dtype"] != "float32":
        return False
    return given.get("size", 0) <= LARGEST_BYTES and (task.function != "sharded" or given["width"] <= WIDEST)


def measure_link(nodes: int, rate: str) -> Line:
    """The calibration of processes on such nodes: ``autopar profile`` there."""
    with limited_nodes(nodes, rate, own_processors=True) as netns:
        workers = Processes(nodes, placement=netns)
        try:
            found = measured(workers, "cpu", [task for task in tasks(nodes, "cpu") if _is_needed(task)])
            figures = [figure for of_task in found for figure in of_task]
        finally:
            workers.close()
    return {"nodes": nodes, "rate": rate, "calibration": json.loads(calibration(figures).dumps())}


def described(line: Mapping[str, Any]) -> Cluster:
    """The nodes as a cluster, for prices."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calibration.json"
        path.write_text(json.dumps(line["calibration"]))
        cluster = parse(line["nodes"], calibration=path)
    return dataclasses.replace(cluster, name=link_name(line["nodes"], line["rate"]), notes=())


# -- kinds of overlap -------------------------------------------------------------------------------------------------


def measure_feature(feature: Feature, cluster: Cluster, how: How) -> Line:
    """The emitted program, the same without the overlap, and the one by hand: times of rounds, losses, prices, traces.

    Raises:
        ProgramError: the losses of any step differ in any bit between the emitted programs, or much from those by hand.
        LaunchError: a program fails.
    """
    subject, by_hand = MODELS[feature.model], feature.by_hand.name
    with (
        limited_nodes(feature.nodes, feature.rate, own_processors=True) as netns,
        tempfile.TemporaryDirectory() as folder,
        BenchmarkSession(subject, feature.nodes, how.steps, Path(folder), netns) as session,
    ):
        graph = session.workload.capture()
        plans = {WITH: feature.plan(graph), WITHOUT: feature.plan_without(graph)}
        session.open_program(WITH, graph, plans[WITH])
        session.open_program(WITHOUT, graph, plans[WITHOUT], feature.change)
        session.open_hand_tuned(feature.by_hand)
        order = random.Random(how.seed)
        for _ in range(how.rounds):
            for name in order.sample(session.remaining, len(session.remaining)):
                session.measure(name)
        for name, error in session.errors.items():
            raise LaunchError(f"{name} of {feature.name} fails: {error.message}")
        losses = check_losses(session, by_hand, in_bits=bool(feature.patch))
        traces = {
            name: session.call(f"overlap_trace:{traced.__name__}", name, str(session.batch_file))
            for name in session.remaining
        }
        return {
            "nodes": feature.nodes,
            "rate": feature.rate,
            "model": feature.model,
            "by_hand": by_hand,
            "rounds_s": session.rounds,
            "priced_s": {
                WITH: price_s(graph, cluster, plans[WITH]),
                WITHOUT: price_s(graph, without_overlap(cluster) if feature.patch else cluster, plans[WITHOUT]),
            },
            "losses": losses,
            "traces": traces,
            **how.settings,
        }


def check_losses(session: BenchmarkSession, by_hand: str, in_bits: bool) -> dict[str, float]:
    """The number of steps, and the largest relative difference from the emitted program's loss at the same step: of the program without
    overlap, and of that by hand.

    Programs of one plan do the same arithmetic: their losses must be equal in every bit (``in_bits``). Another plan may add in another
    order: its losses differ by float32's rounding.
    """
    session.check_losses(WITH)
    ours, same, theirs = (session.losses[name] for name in (WITH, WITHOUT, by_hand))

    def difference(others: list[float]) -> float:
        return max(abs(a - b) / abs(b) for a, b in zip(ours, others, strict=True))

    for step, (a, b) in enumerate(zip(ours, same, strict=True)):
        if a != b if in_bits else abs(a - b) > ROUNDING * abs(b):
            raise ProgramError(f"the loss of step {step} is {a!r} with overlap and {b!r} without")
    return {"steps": len(ours), "without_difference": difference(same), "by_hand_difference": difference(theirs)}


def without_overlap(cluster: Cluster) -> Cluster:
    """The cluster for prices of programs that hide nothing: what is hidden costs as much as what is not."""
    return dataclasses.replace(cluster, overlap_slowdown=1.0)


def price_s(graph: Graph, cluster: Cluster, plan: Plan) -> float:
    """The price of a step, in seconds."""
    return price_plan(graph, cluster, plan, Pricer(graph, cluster, plan.precision)).prediction.step_time_s


# -- FSDP on a clock --------------------------------------------------------------------------------------------------


def measure_clock(gather_s: float) -> Line:
    """Seconds of a step of the clock (``tests/program/fsdp_clock.py``) of ZeRO 3 on two ranks. A layer's reduction takes as long as both
    of its gathers."""
    sys.path.append(str(TESTS / "program"))  # the workers' search path too
    from test_overlap import LAYERS, TIMES, program, timed

    times = {**TIMES, "gather": gather_s, "reduce": 2 * gather_s}
    found = {}
    with tempfile.TemporaryDirectory() as home, WorkerPool(2) as pool:
        for number, (name, ahead) in enumerate((("own roots", 1), ("a layer ahead", 1), ("two layers ahead", 2))):
            folder = Path(home) / str(number)
            program(folder, prefetch=ahead, data=2, zero=3)
            for file, lines in OWN_ROOTS.items() if name == "own roots" else ():
                file_of(folder, file).write_text(f"{file_of(folder, file).read_text()}\n\n{lines}")
            answers = pool.run(f"{timed.__module__}:{timed.__name__}", str(folder), times, timeout_s=120)
            found[name] = max(answer["seconds"] for answer in answers)
    return {"times_s": times, "layers": LAYERS, "step_s": found}


# -- contests ---------------------------------------------------------------------------------------------------------


def measure_match(match: Match, cluster: Cluster, how: How) -> Line:
    """A contest on limited nodes."""
    with limited_nodes(match.nodes, match.rate, own_processors=True) as netns:
        result = contest(
            match.model,
            cluster,
            choices=match.choices,
            placement=netns,
            rounds=how.rounds,
            steps=how.steps,
            seed=how.seed,
        )
    return {"nodes": match.nodes, "rate": match.rate, "result": result.to_json()}


# -- all of it --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the results, by ``part`` and ``name``. ``work`` gets the cluster of the link that it is measured on, if there is one."""

    part: str
    name: str
    work: Callable[[Any], Line]
    link: str = ""


def cases(how: How) -> list[Case]:
    """All cases, each after the link that it needs."""
    found: dict[tuple[str, str], Case] = {}

    def add(part: str, name: str, work: Callable[[Any], Line], nodes: int, rate: str) -> None:
        link = link_name(nodes, rate)
        found.setdefault((LINK, link), Case(LINK, link, lambda _: measure_link(nodes, rate)))
        found[part, name] = Case(part, name, work, link)

    for feature in FEATURES:
        add(FEATURE, feature.name, lambda c, f=feature: measure_feature(f, c, how), feature.nodes, feature.rate)
    for gather_s in CLOCK_GATHERS:
        found[CLOCK, str(gather_s)] = Case(CLOCK, str(gather_s), lambda _, s=gather_s: measure_clock(s))
    for match in MATCHES:
        add(CONTEST, match.name, lambda c, m=match: measure_match(m, c, how), match.nodes, match.rate)
    return list(found.values())


def measure(case: Case, lines: list[Line]) -> Line:
    """The line of a case; one that fails has an ``error``, and the others go on."""
    start = time.perf_counter()
    try:
        link = next((line for line in lines if line["part"] == LINK and line["name"] == case.link), None)
        if case.link and (link is None or "error" in link):
            raise LaunchError(f"the link of {case.link} was not measured")
        found = case.work(described(link) if link else None)
    except AutoparError as error:
        found = {"error": error.message}
    except Exception as error:  # noqa: BLE001  the other cases have nothing to do with it
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    took = {"took_s": round(time.perf_counter() - start, 1), "load": round(os.getloadavg()[0], 2)}
    return {"part": case.part, "name": case.name, **found, **took}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="measure everything anew")
    parser.add_argument("--page", action="store_true", help="make the page anew, measure nothing")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="only these of the cases that are lacking")
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="timed steps of a measurement")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    asked = parser.parse_args()
    lines = [] if asked.fresh else read()
    how = How(asked.rounds, asked.steps, asked.seed)
    failed = False
    everything = cases(how)
    wanted = {case.name for case in everything} if asked.only is None else set(asked.only)
    wanted |= {case.link for case in everything if case.name in wanted}
    for case in () if asked.page else everything:
        before = next((line for line in lines if (line["part"], line["name"]) == (case.part, case.name)), None)
        if case.name not in wanted or (before is not None and "error" not in before):
            continue
        lines = [line for line in lines if line is not before]
        line = measure(case, lines)
        lines.append(line)
        failed |= "error" in line
        print(
            f"{case.part} {case.name}: {line.get('error') or 'done'} ({line['took_s']} s)", file=sys.stderr, flush=True
        )
        RESULTS.write_text("".join(json.dumps(each) + "\n" for each in lines))
    write_page(lines)
    print(PAGE)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
