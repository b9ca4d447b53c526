"""Requests that cannot be met, what autopar suggests, and whether it helps (``make report NAME=infeasible``).

Every suggestion is applied to the request by itself, and the request is planned again from the start. With ``--seconds`` requests that are
impossible by far are given to the command line instead, and the processor seconds until it says so are printed; more than ten are too many.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from typing import Any

from places import EVIDENCE

from autopar.cli.load import SizeOptions, load_model
from autopar.devices import parse
from autopar.errors import InfeasibleError
from autopar.explain import Change, Study, suggest
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.planning import find_plan
from autopar.search import SearchOptions
from autopar.workload import Workload, sequence_length

REQUESTS: tuple[dict[str, Any], ...] = (
    {"model": "gpt2-xl", "devices": "1xA10G", "seq": 1024, "global_batch": 8},
    {"model": "gpt2-xl", "devices": "2xA10G", "seq": 1024, "global_batch": 8, "tensor": 1, "pipeline": 1, "zero": 0},
    {
        "model": "gpt2-large",
        "devices": "4xA10G",
        "seq": 1024,
        "global_batch": 64,
        "microbatches": 1,
        "recompute": False,
    },
    {
        "model": "bert-large",
        "devices": "1xRTX4090",
        "seq": 512,
        "global_batch": 64,
        "microbatches": 1,
        "recompute": False,
    },
    {"model": "llama3-8b", "devices": "1xH100-80GB", "seq": 8192, "global_batch": 8},
    {
        "model": "llama3-8b",
        "devices": "8xH100-80GB",
        "seq": 8192,
        "global_batch": 64,
        "zero": 0,
        "tensor": 1,
        "pipeline": 1,
    },
    {"model": "llama3-8b", "devices": "4xA100-40GB", "seq": 8192, "global_batch": 16, "recompute": False},
    {
        "model": "gpt2",
        "devices": "1xV100-32GB",
        "seq": 1024,
        "global_batch": 512,
        "microbatches": 1,
        "precision": "float32",
    },
    {"model": "llama3-70b", "devices": "8xH100-80GB", "seq": 8192, "global_batch": 32},
    {"model": "vit-large", "devices": "1xA10G", "global_batch": 256, "microbatches": 1, "recompute": False},
)
SIZES = ("seq", "global_batch", "precision")
LIMIT_S = 900.0
"""For all suggestions of a request: the command line gives them 2.5 processor seconds, here none is left out on a busy machine."""


def loaded(request: dict[str, Any]) -> Workload:
    return load_model(request["model"], SizeOptions(*(request.get(name) for name in SIZES)))


def captured(request: dict[str, Any]) -> Graph:
    """The graph of a request's model and batch."""
    return loaded(request).capture()


def planned(request: dict[str, Any], suggestions: bool = False) -> Plan:
    """The plan of a request; raises ``InfeasibleError``, with what would help if ``suggestions`` are asked for."""
    graph, cluster = captured(request), parse(request["devices"])
    pins = {key: value for key, value in request.items() if key not in ("model", "devices", *SIZES)}
    options = SearchOptions(time_limit_s=300, target_gap=0.1, **pins)

    def recapture(**sizes: Any) -> Graph:
        return captured(request | {key: value for key, value in sizes.items() if value is not None})

    try:
        return find_plan(graph, cluster, options)
    except InfeasibleError as error:
        if not suggestions:
            raise
        study = Study(graph, cluster, options, recapture=recapture, seq=sequence_length(graph))
        raise suggest(study, error, limit_s=LIMIT_S) from None


def applied(request: dict[str, Any], change: Change) -> dict[str, Any]:
    """The request with the change made."""
    return {key: value for key, value in (request | dict(change.request)).items() if key not in change.free}


def line(request: dict[str, Any]) -> dict[str, Any]:
    """A request, why it is infeasible, and every suggestion with what came of it."""
    try:
        plan = planned(request, suggestions=True)
    except InfeasibleError as error:
        changes = []
        for change in error.changes:
            assert isinstance(change, Change)
            try:
                again = planned(applied(request, change))
                fits = all(stage.memory.total <= stage.memory_limit_bytes for stage in again.stages)
            except InfeasibleError:
                fits = False
            changes.append(change.to_json() | {"helps": fits})
        return {"request": request, "error": error.message, "changes": changes}
    return {"request": request, "error": "", "changes": [], "plan": plan.prediction.step_time_s}


def page(lines: list[dict[str, Any]]) -> str:
    """The page that is made of the results."""
    text = [
        "# Infeasible requests, and what would help\n",
        "The suggestions come from searches. Each one was then applied to the request alone, and the changed request was "
        "planned from scratch.\n",
        "| request | reason | suggestion | the changed request fits |",
        "|---|---|---|---|",
    ]
    for one in lines:
        words = ", ".join(f"{key} {value}" for key, value in one["request"].items())
        why = one["error"].partition(":")[0] if one["error"] else "feasible"
        for number, change in enumerate(one["changes"] or [{"text": "-", "helps": False}]):
            head = f"| {words} | {why} " if not number else "| | "
            text.append(f"{head}| {change['text'].partition(':')[0]} | {'yes' if change['helps'] else 'no'} |")
    return "\n".join([*text, "", "Made by `make report NAME=infeasible`. Do not edit."]) + "\n"


IMPOSSIBLE = (
    ("gpt3-175b", "--devices", "1xRTX4090"),
    ("llama3-8b", "--devices", "8xH100-80GB", "--memory-limit", "1GB"),
    ("llama3-70b", "--devices", "1xA10G"),
    ("gpt3-175b", "--devices", "8xH100-80GB", "--memory-limit", "1GB"),
)
SOON_S = 10.0


def seconds() -> None:
    """Print the processor seconds of each impossible request; ends with status 1 where one takes too many."""
    late = False
    for words in IMPOSSIBLE:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "autopar", "plan", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        said = next((one for one in done.stderr.splitlines() if one.startswith("error:")), done.stderr[-200:])
        late |= took_s > SOON_S or done.returncode != 1
        print(f"{' '.join(words)}: {took_s:.1f} s, status {done.returncode}: {said[:90]}", flush=True)
    sys.exit(late)


def main() -> None:
    if sys.argv[1:] == ["--seconds"]:
        seconds()
    path = EVIDENCE / "infeasible.jsonl"
    known = [json.loads(one) for one in path.read_text().splitlines()] if path.exists() else []
    lines = [one for one in known if one["request"] in REQUESTS]  # an interrupted run goes on where it was
    for request in REQUESTS:
        if any(one["request"] == request for one in lines):
            continue
        lines.append(line(request))
        print(json.dumps(lines[-1])[:400], file=sys.stderr, flush=True)
        path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    (EVIDENCE / "infeasible.md").write_text(page(lines))


if __name__ == "__main__":
    main()
