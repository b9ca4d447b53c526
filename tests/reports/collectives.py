"""Every kind of plan, its ranks recorded without communication and checked under NCCL's rules: ``python tests/reports collectives``.

Each case is emitted, every rank is recorded with results that arrive late and with results at once, and the traces are checked: the same
sequence on all members of a communicator, no deadlock in any of NCCL's modes, no result that is read too early, no operand that is written
in flight. One JSON line a case; the page beside them is generated from them. Lines carry a fingerprint of the code: a run does what the
file lacks for this code (``--fresh``: everything). Ends with status 1 if something is found.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
from places import EVIDENCE
from recorded import Case, captured, cases
from results import Results, options, quiet

from autopar.errors import AutoparError
from autopar.verify.recording import Workers, record

RESULTS = EVIDENCE / "collectives.jsonl"


def passed(line: dict[str, Any]) -> bool:
    return "reason" in line or ("failure" not in line and not line["findings"])


def case_line(case: Case, workers: Workers) -> dict[str, Any]:
    """One line of the results; what goes wrong is recorded as ``failure``."""
    model, name = case.key
    start_s = time.perf_counter()
    line: dict[str, Any] = {"model": model, "kind": name, "devices": case.kind.devices}
    try:
        given = captured(case.model)
        plan = case.plan(given.graph)
    except AutoparError as error:
        return line | {"reason": error.message}
    except Exception as error:
        return line | {"failure": f"{type(error).__name__}: {error}".splitlines()[0]}
    try:
        recorded = record(given.graph, plan, given.state, given.batch, workers, case.recipe)
        found, notes = recorded.findings(), recorded.notes()
    except Exception as error:  # whatever it is, it is this case's result
        return line | {"failure": f"{type(error).__name__}: {error}".splitlines()[0]}
    traces = recorded.late.values()
    return line | {
        "ranks": len(recorded.late),
        "operations": sum(len(trace.operations) for trace in traces),
        "events": sum(len(trace.events) for trace in traces),
        "findings": [str(finding) for finding in found],
        "notes": list(notes),
        "seconds": round(time.perf_counter() - start_s, 2),
        "torch": torch.__version__,
    }


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = options(__doc__, RESULTS)
    parser.add_argument("--models", metavar="NAMES", help="these models only, separated by commas")
    parser.add_argument("--kinds", metavar="TEXT", help="kinds whose name has this text only")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the I-th of N parts of the cases")
    return parser.parse_args(argv)


def chosen(args: argparse.Namespace) -> list[Case]:
    part, parts = map(int, args.part.split("/"))
    found = [case for case in cases() if not args.models or case.model in args.models.split(",")]
    found = [case for case in found if not args.kinds or args.kinds in case.key[1]]
    return found[part - 1 :: parts]


def results_in(path: Any = RESULTS) -> Results:
    return Results(path, ("model", "kind"), passed)


def main() -> int:
    args = arguments()
    quiet()
    torch.set_num_threads(1)
    results = results_in(args.results)
    skipped, bad = results.kept(args), 0
    with Workers() as workers:
        for case in chosen(args):
            if case.key in skipped:
                continue
            line = case_line(case, workers)
            results.append(line)
            bad += not passed(line)
            print(
                json.dumps(line)[:600] if not passed(line) else f"{' / '.join(case.key)}: {line.get('seconds')}",
                flush=True,
            )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
