"""Tuning from wrong calibrations, on limited nodes: ``make report NAME=tune`` writes ``docs/evidence/tune.{jsonl,md}``.

The links are measured first, as in ``overlap``. The calibration is then falsified in three ways, and ``autopar.tune`` starts from each. In
the end, for each model, every plan that was measured, the plan under the calibration as it was measured, and all hand-written programs take
turns on the same nodes. It needs root and a machine that does nothing else.

One JSON line for each link, tuning and contest; a run does what the file lacks, and what failed before (``--fresh``: everything).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from limited_nodes import limited_nodes
from overlap import described, link_name, measure_link
from overlap_cases import FAST
from overlap_page import LINK
from places import EVIDENCE

from autopar.bench.baselines import recipes
from autopar.bench.contest import BenchmarkSession
from autopar.bench.models import MODELS
from autopar.cli.render import parallelism
from autopar.devices.calibration import Calibration, from_json
from autopar.devices.corrections import ARITHMETIC, LAUNCH, OPTIMIZER, corrected, groups
from autopar.errors import AutoparError, LaunchError
from autopar.plan import Plan
from autopar.planning import plan_graph
from autopar.search import SearchOptions
from autopar.timing import paired_ratio
from autopar.tune import Effort, tune
from autopar.tune.fit import program_of
from autopar.workload import Workload

RESULTS, PAGE = EVIDENCE / "tune.jsonl", EVIDENCE / "tune.md"
TUNING, CONTEST = "tuning", "contest"
COMPUTE = (ARITHMETIC, LAUNCH, OPTIMIZER)
FALSE = {"compute x 0.6": (0.6, 1.0), "links x 0.5": (1.0, 0.5), "both": (0.6, 0.5)}
"""By what the times of ops and those of links are multiplied."""
TRUE = "measured calibration"

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class How:
    """``minutes`` of each tuning; ``rounds`` of ``steps`` timed steps of the contest."""

    minutes: float
    rounds: int
    steps: int
    seed: int


def falsified(base: Calibration, nodes: int, name: str) -> Calibration:
    """The calibration with the planted errors."""
    compute, links = FALSE[name]
    names = groups(base, "cpu", nodes)
    wires = {group for group in names if group.startswith(("collectives over", "sends"))}
    factors = dict.fromkeys(COMPUTE, compute) | dict.fromkeys(wires, links)
    return corrected(base, factors, "cpu", nodes)


def measure_tuning(link: Line, model: str, name: str, how: How) -> Line:
    """One tuning: its trials, corrections and time."""
    subject, nodes = MODELS[model], link["nodes"]
    workload = Workload(subject.build(), subject.batch(0), subject.loss_fn, subject.name, "float32")
    base = falsified(from_json(link["calibration"]), nodes, name)
    effort = Effort(seconds=60 * how.minutes, seed=how.seed)
    with limited_nodes(nodes, link["rate"], own_processors=True) as netns:
        found = tune(
            workload,
            described(link),
            SearchOptions(precision="float32"),
            effort,
            base=base,
            placement=netns,
            progress=tell,
        )
    return {"model": model, "nodes": nodes, "false": name, "minutes": found.took_s / 60, **found.to_json()}


def tell(stage: str, text: str) -> None:
    if stage == "run":
        print(f"  {text}", file=sys.stderr, flush=True)


def measure_contest(link: Line, model: str, tunings: list[Line], how: How) -> Line:
    """All plans that the tunings measured, the plan under the measured calibration, and the hand-written programs, in turns."""
    subject, nodes = MODELS[model], link["nodes"]
    with (
        limited_nodes(nodes, link["rate"], own_processors=True) as netns,
        tempfile.TemporaryDirectory() as folder,
        BenchmarkSession(subject, nodes, how.steps, Path(folder), netns) as session,
    ):
        options = SearchOptions(precision="float32")
        graph, planned = plan_graph(session.workload.capture(), described(link), options, session.workload.resized)
        programs = {program_of(planned): planned}
        chosen = {TRUE: program_of(planned)}
        for line in tunings:
            plans = [Plan.from_json(trial["plan"]) for trial in line["trials"] if not trial["failure"]]
            programs |= {program_of(plan): plan for plan in plans}
            chosen[line["false"]] = program_of(plans[0])  # sorted, the best one first
        names = {key: f"program-{i}" for i, key in enumerate(programs)}
        for key, plan in programs.items():
            session.open_program(names[key], graph, plan, required=key in chosen.values())
        for recipe in recipes(nodes, subject):
            session.open_hand_tuned(recipe)
        order = random.Random(how.seed)
        for number in range(how.rounds):
            print(f"  round {number + 1} of {how.rounds}", file=sys.stderr, flush=True)
            for name in order.sample(session.remaining, len(session.remaining)):
                session.measure(name)
            session.drop_slow(slower_than=2.0)
        session.check_losses(names[chosen[TRUE]])
        return {
            "model": model,
            "nodes": nodes,
            "chosen": {name: names[key] for name, key in chosen.items()},
            "plans": {names[key]: parallelism(plan) for key, plan in programs.items()},
            "rounds_s": {name: session.rounds[name] for name in session.remaining},
            "tried": len(session.rounds),
            "failed": {name: error.message for name, error in session.errors.items()},
            "seed": how.seed,
        }


# -- all of it --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the results; ``work`` gets the other lines, by part and name."""

    part: str
    name: str
    work: Callable[[Mapping[tuple[str, str], Line]], Line]


def cases(all_nodes: list[int], models: list[str], how: How) -> Iterator[Case]:
    """Each link before its tunings, these before their contest."""
    for nodes in all_nodes:
        link = link_name(nodes, FAST)
        yield Case(LINK, link, lambda _, nodes=nodes: measure_link(nodes, FAST))  # type: ignore[misc]
        for model in models:
            title = f"{model} on {nodes} nodes"
            tunings = {f"{title}, {name}": name for name in FALSE}
            for key, name in tunings.items():
                yield Case(
                    TUNING,
                    key,
                    lambda done, link=link, model=model, name=name: measure_tuning(  # type: ignore[misc]
                        needed(done, LINK, link), model, name, how
                    ),
                )
            yield Case(
                CONTEST,
                title,
                lambda done, link=link, model=model, tunings=tunings: measure_contest(  # type: ignore[misc]
                    needed(done, LINK, link), model, [needed(done, TUNING, key) for key in tunings], how
                ),
            )


def needed(done: Mapping[tuple[str, str], Line], part: str, name: str) -> Line:
    line = done.get((part, name))
    if line is None or "error" in line:
        raise LaunchError(f"{part} {name} was not measured")
    return line


def measured(case: Case, done: Mapping[tuple[str, str], Line]) -> Line:
    """The line of a case; one that fails has an ``error``, and the others go on."""
    start = time.perf_counter()
    try:
        found = case.work(done)
    except AutoparError as error:
        found = {"error": error.message}
    took = {"took_s": round(time.perf_counter() - start, 1), "load": round(os.getloadavg()[0], 2)}
    return {"part": case.part, "name": case.name, **found, **took}


# -- the page ---------------------------------------------------------------------------------------------------------


HEAD = """# Plans tuned from wrong calibrations

Nodes are network namespaces with links of {rate} and their own share of the processors, as in [overlap](overlap.md), on {cores} cores of
{processor}. Their measured calibration is falsified: the times of all ops, launches and the optimizer are multiplied by 0.6, those of all
collectives and sends by 0.5, or both. [`autopar tune`](../guide/tune.md) starts from the falsified calibration.

Then all plans that the three tunings measured, the plan with the true calibration, and all hand-written programs take turns, in a new
random order in each round. Programs more than twice as slow as the best by hand are dropped. Times are medians over rounds; ratios are
medians over rounds of the ratio within the round, with a bootstrap 95 % interval. *Best other* is the fastest of all programs except the
tuned one, picked by its measured times, which favours it.

The contest is a later run of other processes, so its times are independent of those that the tuning measured. A tuned plan is *predicted*
by the falsified calibration, priced by the *corrected* one, and *expected* to take what the corrected price and the measurements of this
plan and of similar ones say together.

{summary}
"""


def page(lines: list[Line]) -> str:
    machine = next(line["calibration"]["machine"] for line in lines if line["part"] == LINK)
    parts = [HEAD.format(rate=FAST, cores=machine["cores"], processor=machine["processor"], summary=_summary(lines))]
    parts += ["\n## Tuned plans against all others\n", "\n".join(_contests(lines))]
    parts += ["\n\n## Predictions of the tuned plans\n", "\n".join(_predictions(lines))]
    return "\n".join(parts) + "\n\nMade by `make report NAME=tune`. Do not edit.\n"


def _by_key(lines: list[Line]) -> dict[tuple[str, str], Line]:
    return {(line["part"], line["name"]): line for line in lines if "error" not in line}


def _ratio(contest: Line, ours: str) -> tuple[str, float, tuple[float, float]]:
    """Return the fastest of all other programs of a contest, and the ratio of ours to it with its interval."""
    times = {name: statistics.median(rounds) for name, rounds in contest["rounds_s"].items()}
    best = min((name for name in times if name != ours), key=times.__getitem__)
    return best, *paired_ratio(contest["rounds_s"][ours], contest["rounds_s"][best], contest["seed"])


def _tuned(lines: list[Line]) -> Iterator[tuple[Line, Line]]:
    """Yield every tuning with its contest."""
    done = _by_key(lines)
    for line in lines:
        contest = done.get((CONTEST, f"{line.get('model')} on {line.get('nodes')} nodes"))
        if line["part"] == TUNING and "error" not in line and contest is not None:
            yield line, contest


def _contest_s(line: Line, contest: Line) -> float:
    """Return the seconds that the contest measured of a tuned plan."""
    return statistics.median(contest["rounds_s"][contest["chosen"][line["false"]]])


def _summary(lines: list[Line]) -> str:
    ratios, inside, later, drift = [], [], [], []
    for line, contest in _tuned(lines):
        best, contest_s = line["trials"][0], _contest_s(line, contest)
        ratios.append(_ratio(contest, contest["chosen"][line["false"]])[1])
        inside.append(abs(best["expected_s"] / best["measured_s"] - 1))
        later.append(abs(best["expected_s"] / contest_s - 1))
        drift.append(abs(contest_s / best["measured_s"] - 1))

    def both(values: list[float], form: str) -> str:
        return f"{statistics.median(values):{form}} in the median, {max(values):{form}} at most"

    return (
        f"{len(ratios)} tunings: tuned / best other is {both(ratios, '.2f')}. Expected times err by {both(inside, '.0%')}, from what the "
        f"tuning measured, and by {both(later, '.0%')}, from what the contest measured; these two measurements of one program differ by "
        f"{both(drift, '.0%')}."
    )


def _contests(lines: list[Line]) -> Iterator[str]:
    yield "| model | calibration | tuned plan | measured | best other | tuned / best other |"
    yield "|---|---|---|---|---|---|"
    for line in lines:
        if line["part"] != CONTEST or "error" in line:
            continue
        times = {name: statistics.median(rounds) for name, rounds in line["rounds_s"].items()}
        for false, ours in line["chosen"].items():
            best, ratio, (low, high) = _ratio(line, ours)
            other = f"{1e3 * times[best]:.0f} ms: {line['plans'].get(best, best)}, of {line['tried'] - 1}"
            title = false if false == TRUE else f"tuned from {false}"
            yield (
                f"| {line['name']} | {title} | {line['plans'][ours]} | {1e3 * times[ours]:.0f} ms | {other} "
                f"| {ratio:.2f} ({low:.2f} to {high:.2f}) |"
            )


def _predictions(lines: list[Line]) -> Iterator[str]:
    yield (
        "| tuning | minutes | plans run | predicted before | corrected price | expected | measured in the tuning | in the contest "
        "| errors of the three, from the contest |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for line, contest in _tuned(lines):
        best = line["trials"][0]
        measured_s = _contest_s(line, contest)
        predictions = [best[key] for key in ("predicted_s", "corrected_s", "expected_s")]
        cells = [f"{1e3 * seconds:.0f} ms" for seconds in (*predictions, best["measured_s"], measured_s)]
        cells.append(", ".join(f"{predicted_s / measured_s - 1:+.0%}" for predicted_s in predictions))
        yield f"| {line['name']} | {line['minutes']:.1f} | {len(line['trials'])} | {' | '.join(cells)} |"


def read(path: Path) -> list[Line]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="*", default=[2, 4], metavar="N")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--minutes", type=float, default=5.0, metavar="M", help="of each tuning")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="of a contest")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="timed steps of a measurement in a contest")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--fresh", action="store_true", help="measure everything anew")
    parser.add_argument("--page", action="store_true", help="make the page anew, measure nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the lines go; elsewhere no page is made")
    asked = parser.parse_args()
    how = How(asked.minutes, asked.rounds, asked.steps, asked.seed)
    lines, failed = [] if asked.fresh else read(asked.results), False
    for case in itertools.islice(cases(asked.nodes, asked.models, how), 0 if asked.page else None):
        if (case.part, case.name) in _by_key(lines):
            continue
        lines = [line for line in lines if (line["part"], line["name"]) != (case.part, case.name)]
        line = measured(case, _by_key(lines))
        lines.append(line)
        failed |= "error" in line
        print(
            f"{case.part} {case.name}: {line.get('error') or 'done'} ({line['took_s']} s)", file=sys.stderr, flush=True
        )
        asked.results.write_text("".join(json.dumps(each) + "\n" for each in lines))
    if asked.results == RESULTS:
        PAGE.write_text(page(lines))
    else:
        print(page(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
