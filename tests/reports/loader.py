"""Data sets under plans of every kind: who reads which rows, and how many bytes (``make report NAME=loader``).

A case emits a program, writes a data set of 30 rows to a file, and trains from it in gloo processes with global batches of 8 rows: two
shuffled epochs of 3 batches, a checkpoint in the middle of the second epoch, and the rest of that epoch again by new trainers that load the
checkpoint. Each process notes the rows that it reads and the bytes that it copies out of the file.

One JSON line per case; a run does what the file lacks for this code (``--fresh``: everything). Ends with status 1 if a case fails.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from exactness import KINDS, subject
from loading import order
from places import EVIDENCE
from results import Results, options, quiet
from torch import Tensor
from workers import WorkerPool

from autopar.emit import emit
from autopar.verify import PlanKind

RESULTS = EVIDENCE / "loader.jsonl"
ROWS, BATCH, STEPS = 30, 8, 3
NAMES = """
data 2|data 2, zero 3|tensor 2|tensor+sequence 2|ulysses 2|ring 2|pipeline 2|pipeline 2 of 2 chunks|pipeline 2, ZBV|pipeline 2, Chimera
data 4, zero 3|data 2 in 2 copies, zero 3|data 2 x tensor 2, zero 3|data 2 x ring 2, zero 3|pipeline 2 x data 2, zero 2
pipeline 2 x ring 2, zero 2, recompute|mixed on 4: zero-3 ends, tensor blocks|mixed: ring, ulysses, data and tensor+sequence
"""
KINDS_OF_PLANS = [kind for name in NAMES.strip().replace("\n", "|").split("|") for kind in KINDS if kind.name == name]
MODELS = ("llama", "mlp")


def rows_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A data set of rows like the batch's, all different."""
    generator = torch.Generator().manual_seed(2)
    chosen = torch.randint(BATCH, (ROWS,), generator=generator)
    found = {}
    for name, tensor in batch.items():
        rows = tensor[chosen]
        if rows.is_floating_point():
            found[name] = rows + torch.randn(rows.shape, generator=generator, dtype=rows.dtype)
        else:
            found[name] = torch.where(
                rows < 0, rows, (rows + torch.arange(ROWS).view(-1, *[1] * (rows.dim() - 1))) % 96
            )
    return found


def case_line(model: str, kind: PlanKind, pools: dict[int, WorkerPool]) -> dict[str, Any]:
    """One line of the results. What goes wrong is recorded as ``failure`` and does not end the report."""
    line: dict[str, Any] = {"model": model, "plan": kind.name, "devices": kind.devices}
    line |= {"torch": torch.__version__}
    try:
        given = subject(model)
        plan = kind.plan(given.graph)
        data = rows_of(given.batch)
        with tempfile.TemporaryDirectory() as there:
            emit(given.graph, plan, Path(there, "program"))
            torch.save(given.state, Path(there, "state.pt"))
            torch.save(data, Path(there, "data.pt"))
            paths = [str(Path(there, name)) for name in ("program", "state.pt", "data.pt", "saved")]
            pool = pools.setdefault(plan.device_count, WorkerPool(plan.device_count))
            ranks = pool.run("loading:epochs", *paths, timeout_s=300)
        return line | summary(ranks, data)
    except Exception as error:  # noqa: BLE001  whatever it is, it is this case's result
        return line | {"failure": f"{type(error).__name__}: {error}".splitlines()[0]}


def summary(ranks: list[dict[str, Any]], data: dict[str, Tensor]) -> dict[str, Any]:
    """Whether every row of an epoch is read, and by equally many ranks; the share of the bytes that each rank reads."""
    once = True
    for epoch in range(2):
        wanted = sorted(order(ROWS, True, 3, epoch)[: STEPS * BATCH].tolist())
        for name in data:
            counts = Counter(row for rank in ranks if name in rank["inputs"] for row in rank["reads"][epoch])
            once = once and sorted(counts) == wanted and len(set(counts.values())) == 1
            # a rank reads a row of an epoch at most once
            once = once and all(len(set(rank["reads"][epoch])) == len(rank["reads"][epoch]) for rank in ranks)
    whole = sum(tensor[0].numel() * tensor.element_size() for tensor in data.values()) * STEPS * BATCH
    return {
        "every_row_once": once,
        "same": all(rank["same"] for rank in ranks),
        "resumed": all(rank["resumed"] for rank in ranks),
        "row_shares": [round(len(rank["reads"][0]) / (STEPS * BATCH), 4) for rank in ranks],
        "byte_shares": [round(rank["bytes"] / whole, 4) for rank in ranks],
    }


def passed(line: dict[str, Any]) -> bool:
    return "failure" not in line and all(line[what] for what in ("every_row_once", "same", "resumed"))


# -- the page ---------------------------------------------------------------------------------------------------------


def page(lines: list[dict[str, Any]]) -> str:
    versions = ", ".join(sorted({line["torch"] for line in lines}))
    rows = "".join(_row(line) for line in lines)
    return f"""# Data sets

{sum(map(passed, lines))} of {len(lines)} cases pass. A case trains a program on a file of {ROWS} rows with global batches of {BATCH}:
two shuffled epochs of {STEPS} batches. It passes if

- every row of an epoch's batches is read by the same number of processes, and by no process twice;
- losses and gradients are bitwise those of a run in which every process gets the full global batches;
- runs that resume from a checkpoint in the middle of the second epoch read the same rows in the same order, with the same losses.

The last two columns have, for each process, the share of the rows of an epoch that it reads, and the share of the bytes of all rows that
it copies out of the file. Data axes divide the rows. Processes along a tensor or sequence axis read the same rows, because the first
layer takes full sequences. In a pipeline, the first stage copies the inputs and the last stage the labels.

| model | plan | rows once | bitwise equal | resumed | rows | bytes |
|---|---|---|---|---|---|---|
{rows}
Made by `make report NAME=loader` with torch {versions}, gloo, on CPUs, from the lines of [loader.jsonl](loader.jsonl). Do not edit.
"""


def _row(line: dict[str, Any]) -> str:
    if "failure" in line:
        return f"| {line['model']} | {line['plan']} | {line['failure']} | | | | |\n"
    yes = " | ".join("yes" if line[what] else "**no**" for what in ("every_row_once", "same", "resumed"))
    shares = " | ".join(", ".join(f"{share:.3g}" for share in line[what]) for what in ("row_shares", "byte_shares"))
    return f"| {line['model']} | {line['plan']} | {yes} | {shares} |\n"


# -- the command ------------------------------------------------------------------------------------------------------


def main() -> int:
    args = options(__doc__, RESULTS).parse_args()
    quiet()
    torch.set_num_threads(1)
    results = Results(args.results, ("model", "plan"), passed)
    kept = results.kept(args)
    pools: dict[int, WorkerPool] = {}
    cases = [(model, kind) for model in MODELS for kind in KINDS_OF_PLANS]
    try:
        for model, kind in cases:
            if (model, kind.name) not in kept:
                line = case_line(model, kind, pools)
                results.append(line)  # after every case, so that an interrupted run can be resumed
                print(json.dumps(line), file=sys.stderr)
    finally:
        for pool in pools.values():
            pool.close()
    lines = results.tidy((model, kind.name) for model, kind in cases)
    args.results.with_suffix(".md").write_text(page(lines))
    bad = [line for line in lines if not passed(line)]
    print(f"{len(lines)} cases, {len(bad)} fail: {args.results}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
