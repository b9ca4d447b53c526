"""Predicted against measured timelines on limited nodes: ``make report NAME=timelines`` writes ``docs/evidence/timelines.{jsonl,md}``.

Three programs (1F1B, zero bubble, tensor parallelism) run on two nodes whose links have a rate (``limited_nodes``), and each writes traces
of some steps. Every kind of action is compared with its prediction, which is priced by the calibration of the nodes, measured anew. It
needs root and a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from limited_nodes import limited_nodes
from overlap import described, measure_link
from overlap_cases import FEATURES, Feature
from places import EVIDENCE
from planning import machine_words

from autopar.bench.models import MODELS
from autopar.compile import emit_program
from autopar.devices import Cluster
from autopar.price import Pricer
from autopar.report import predict_step
from autopar.report.trace import compare_actions, read_trace
from autopar.run.processes import Processes
from autopar.workload import Workload

PROGRAMS = ("1f1b-2", "zero-bubble-2", "tensor-2")
WARM_UP, TRACED = 3, 7  # steps
RESULTS, PAGE = EVIDENCE / "timelines.jsonl", EVIDENCE / "timelines.md"


def measure(feature: Feature, cluster: Cluster) -> dict[str, Any]:
    """One program: by kind of action and stage the predicted seconds, and the median of the traced steps."""
    subject = MODELS[feature.model]
    torch.manual_seed(0)
    workload = Workload(subject.build(), subject.batch(0), subject.loss_fn, subject.name)
    graph = workload.capture()
    plan = feature.plan(graph)
    step = predict_step(graph, cluster, Pricer(graph, cluster, "float32"), plan)
    batch = dict(zip([value.name for value in graph.inputs], subject.batch(0), strict=True))
    with (
        limited_nodes(feature.nodes, feature.rate, own_processors=True) as netns,
        tempfile.TemporaryDirectory() as temporary,
    ):
        folder, state = Path(temporary) / "program", Path(temporary) / "state.pt"
        emit_program(graph, plan, folder)
        torch.save(workload.model.state_dict(), state)
        workers = Processes(feature.nodes, placement=netns)
        try:
            options = {"optimizer": None, "lr": 3e-4, "seed": 0, "max_norm": None, "state": str(state)}
            workers.call("autopar.run.remote:open_program", str(folder), options, "cpu", 300.0)
            for _ in range(WARM_UP):
                workers.call("autopar.run.remote:call", "step", batch)
            traces = [str(Path(temporary) / f"{i}.json") for i in range(TRACED)]
            for path in traces:
                workers.call("autopar.run.remote:call", "trace", batch, path)
        finally:
            workers.close()
        found = [{one.name: one for one in compare_actions(step, read_trace(path))} for path in traces]
    return {
        "program": feature.name,
        "about": feature.about,
        "model": feature.model,
        "rate": feature.rate,
        "load": round(os.getloadavg()[0], 2),
        "actions": {
            name: [one.predicted_s, statistics.median(each[name].measured_s for each in found)]
            for name, one in found[0].items()
        },
    }


def page(lines: list[dict[str, Any]]) -> str:
    """The page of the results."""
    parts = [
        "# Predicted against measured timelines\n",
        f"Durations of the actions of a pipeline schedule on two limited nodes: medians of {TRACED} traced steps. {machine_words(lines)} "
        "The programs have no data parallelism, whose gradient collectives would slow the actions that they overlap with.\n",
        "| program | model, link | action | predicted | measured | measured / predicted |",
        "|---|---|---|---|---|---|",
    ]
    for line in lines:
        for name, (predicted, seen) in line["actions"].items():
            parts.append(
                f"| {line['program']} | {line['model']}, {line['rate']} | {name} | {predicted * 1e3:.2f} ms | {seen * 1e3:.2f} ms | "
                f"{seen / predicted:.2f} |"
            )
    errors = [abs(seen / predicted - 1) for line in lines for predicted, seen in line["actions"].values()]
    parts.append(f"\nThe median error of an action is {statistics.median(errors):.1%}, the largest {max(errors):.1%}.")
    return "\n".join(parts) + "\n\nMade by `make report NAME=timelines`. Do not edit.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the lines go; elsewhere no page is made")
    results = parser.parse_args().results
    chosen = [feature for feature in FEATURES if feature.name in PROGRAMS]
    links = {rate: described(measure_link(2, rate)) for rate in sorted({feature.rate for feature in chosen})}
    lines = []
    for feature in chosen:
        lines.append(measure(feature, links[feature.rate]))
        print(json.dumps(lines[-1]), file=sys.stderr, flush=True)
        results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if results == RESULTS:
        PAGE.write_text(page(lines))


if __name__ == "__main__":
    main()
