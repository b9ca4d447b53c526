"""Every kind of plan, its ranks recorded without communication and checked under NCCL's rules: ``python tests/reports collectives``.

Each case is emitted, every rank is recorded with results that arrive late and with results at once, and the traces are checked: the same
sequence on all members of a communicator, no deadlock in any of NCCL's modes, no result that is read too early, no operand that is written
in flight. Then faults are planted, each of which must be found, and the distinct ranks of large plans are recorded at their real sizes.

One JSON line a case; the page beside them is generated from them. Lines carry a fingerprint of the code: a run does what the file lacks for
this code (``--fresh``: everything; ``--only programs``, ``faults`` or ``large``: a part). Ends with status 1 if something is found, or a
planted fault is not.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from collective_faults import FAULTS, Fault
from collectives_page import page, passed
from places import EVIDENCE
from recorded import Case, captured, cases
from results import Results, options, quiet

from autopar import zoo
from autopar.devices import parse
from autopar.errors import AutoparError
from autopar.planning import plan_model
from autopar.search import SearchOptions
from autopar.verify.collectives import verify_plan_collectives
from autopar.verify.mixtures import describe
from autopar.verify.recording import Workers, record
from autopar.workload import Workload
from autopar.zoo.hf import build_config

RESULTS = EVIDENCE / "collectives.jsonl"
Line = dict[str, Any]
PARTS = ("programs", "faults", "large")


@dataclass(frozen=True)
class Large:
    """A plan of a published model, found by the search, of which the distinct ranks are recorded."""

    model: str
    devices: str
    global_batch: int
    pins: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        pins = ", ".join(f"{name} {value}" for name, value in self.pins.items())
        return self.model, f"{self.devices}, batch {self.global_batch:,}{f', {pins}' if pins else ''}"


LARGE = (
    Large("llama3-405b", "2048x8xH100-80GB", 2048, {"pipeline": 16, "tensor": 8, "chunks": 1}),
    Large("mixtral-8x7b", "64x8xH100-80GB", 1024),
    Large("gpt3-175b", "256x8xA100-80GB", 1536),
    Large("deepseek-v3", "256x8xH800", 2048),
    Large("kimi-k2", "512x8xH800", 4096),
    Large("qwen3-235b-a22b", "64x8xH100-80GB", 1024),
    Large("gpt-oss-120b", "8x8xH100-80GB", 256),
)


def program_line(case: Case, workers: Workers) -> Line:
    given = captured(case.model)
    try:
        plan = case.plan(given.graph)
    except AutoparError as error:
        return {"reason": error.message}
    recorded = record(given.graph, plan, given.state, given.batch, workers, case.recipe)
    traces = recorded.late.values()
    return {
        "ranks": len(recorded.late),
        "operations": sum(len(trace.operations) for trace in traces),
        "events": sum(len(trace.events) for trace in traces),
        "findings": [str(finding) for finding in recorded.findings()],
        "notes": list(recorded.notes()),
    }


def fault_line(fault: Fault, workers: Workers) -> Line:
    found = fault.found(workers)
    expected = [finding for finding in found if finding.kind in fault.kinds]
    return {"expected": list(fault.kinds), "found": [str(finding) for finding in expected[:1]], "count": len(found)}


def large_line(large: Large) -> Line:
    entry = zoo.find(large.model)
    module, batch = build_config(entry.config, entry.seq, large.global_batch, "bfloat16", "meta")
    search = SearchOptions(pin=dict(large.pins), time_limit_s=60)
    workload = Workload(module, batch, None, large.model, "bfloat16")
    graph, plan = plan_model(workload, parse(large.devices), search, capture_check=False)
    start_s = time.perf_counter()
    (found,) = verify_plan_collectives(graph, plan).plans
    memory = [resource.getrusage(who).ru_maxrss * 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "plan": describe(plan),
        "devices": plan.device_count,
        "ranks": len(found.ranks),
        "operations": found.operations,
        "findings": [str(finding) for finding in found.findings],
        "notes": list(found.notes),
        "check_s": round(time.perf_counter() - start_s, 1),
        "memory_bytes": max(memory),
    }


def line_of(part: str, key: tuple[str, str], devices: int, do: Callable[[], Line]) -> Line:
    """One line of the results; what goes wrong is recorded as ``failure``."""
    start_s = time.perf_counter()
    line: Line = {"part": part, "model": key[0], "kind": key[1], "devices": devices}
    try:
        line |= do()
    except Exception as error:  # whatever it is, it is this case's result
        line |= {"failure": f"{type(error).__name__}: {error}".splitlines()[0]}
    return line | {"seconds": round(time.perf_counter() - start_s, 2), "torch": torch.__version__}


Task = tuple[str, tuple[str, str], int, Callable[[], Line]]


def tasks(workers: Workers | None = None) -> Iterator[Task]:
    """The part, the key and the work of every line."""
    held = workers or Workers()
    for case in cases():
        yield "programs", case.key, case.kind.devices, lambda case=case: program_line(case, held)  # type: ignore[misc]
    for fault in FAULTS:
        key = fault.case.model, f"fault: {fault.name}"
        yield "faults", key, fault.case.kind.devices, lambda fault=fault: fault_line(fault, held)  # type: ignore[misc]
    for large in LARGE:
        yield "large", large.key, 0, lambda large=large: large_line(large)  # type: ignore[misc]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = options(__doc__, RESULTS)
    parser.add_argument("--models", metavar="NAMES", help="these models only, separated by commas")
    parser.add_argument("--kinds", metavar="TEXT", help="kinds whose name has this text only")
    parser.add_argument("--only", choices=PARTS, help="this part only")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the I-th of N parts of the cases")
    parser.add_argument("--page", action="store_true", help="write the page from the lines, and do nothing else")
    return parser.parse_args(argv)


def chosen(args: argparse.Namespace, workers: Workers) -> list[Task]:
    part, parts = map(int, args.part.split("/"))
    found = [task for task in tasks(workers) if args.only in (None, task[0])]
    found = [task for task in found if not args.models or task[1][0] in args.models.split(",")]
    return [task for task in found if not args.kinds or args.kinds in task[1][1]][part - 1 :: parts]


def results_in(path: Any = RESULTS) -> Results:
    return Results(path, ("model", "kind"), passed)


def main() -> int:
    args = arguments()
    quiet()
    torch.set_num_threads(1)
    results = results_in(args.results)
    skipped, bad = results.kept(args), 0
    with Workers() as workers:
        for part, key, devices, do in [] if args.page else chosen(args, workers):
            if key in skipped:
                continue
            line = line_of(part, key, devices, do)
            results.append(line)
            bad += not passed(line)
            print(json.dumps(line)[:600] if not passed(line) else f"{' / '.join(key)}: {line['seconds']}", flush=True)
    lines = results.tidy(key for _, key, _, _ in tasks())
    args.results.with_suffix(".md").write_text(page(lines))
    print(f"{len(lines)} lines, {sum(not passed(line) for line in lines)} not as they should be: {args.results}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
