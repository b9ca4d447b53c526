"""``autopar verify``: loads the model at a size that local processes can run, verifies it and prints the report."""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from autopar.cli.collectives import print_collectives
from autopar.cli.commands import allowed
from autopar.cli.console import console, plain_table, progress_bar
from autopar.cli.load import Sizes, load_model, names_code, read_config
from autopar.graph import Graph
from autopar.measure import EXACT
from autopar.plan import Plan
from autopar.plan_files import check_model, read_plan
from autopar.run.processes import check_count
from autopar.search.concessions import Concession
from autopar.units import parse_size
from autopar.verify import Report, shrink_config
from autopar.verify.collectives import verify_collectives, verify_plan_collectives
from autopar.verify.run import verify_workload
from autopar.workload import Workload, with_concession
from autopar.zoo import find
from autopar.zoo.hf import build_config

_SEQ = 16  # tokens of a shrunken model's sequences
_ROWS = 8  # of a batch that is not given: enough for eight data-parallel devices, or four microbatches on two


def verify_command(
    model: str,
    devices: int,
    plan_file: str | None,
    collectives: bool,
    as_json: bool,
    **request: Any,
) -> None:
    """Ends the process with status 1 unless the model is exact under all plans that were checked, or, where a plan gives up exactness,
    agrees with what it is compared with; with ``collectives``, unless nothing is found."""
    if collectives:
        _collectives(model, devices, plan_file, request, as_json)
        return
    limit, seq, global_batch = parse_size(request["memory_limit"]), request["seq"], request["global_batch"]
    check_count(devices)
    plan = read_plan(plan_file) if plan_file else None
    torch.manual_seed(0)
    with (
        redirect_stdout(sys.stderr),
        progress_bar("verify", lines=True) as show,
    ):  # the model's own code may print, and stdout is for the result only
        sizes = Sizes(
            seq, global_batch
        )  # with a plan and a shrunken model, the sizes of the model that the plan is for
        workload, notes = _load(model, devices, Sizes() if plan_file and not names_code(model) else sizes)
        real = _real(model, plan, seq) if plan is not None and notes else None
        report = verify_workload(
            workload,
            devices,
            plan=plan,
            real=real,
            memory_limit_bytes=limit,
            allow=allowed(request),
            progress=show,
        )
    if as_json:
        data = report.to_json()
        print(json.dumps(data | {"notes": [*notes, *data["notes"]]}, indent=1))
    else:
        _print(report, notes)
    if not report.agrees:
        sys.exit(1)


def _collectives(model: str, devices: int, plan_file: str | None, request: dict[str, Any], as_json: bool) -> None:
    plan = read_plan(plan_file) if plan_file else None
    torch.manual_seed(0)
    with redirect_stdout(sys.stderr), progress_bar("verify", lines=True) as show:
        if plan is None:
            check_count(devices)
            workload, notes = _load(model, devices, Sizes(request["seq"], request["global_batch"]))
            report = verify_collectives(workload, devices, allow=allowed(request), progress=show)
        else:
            graph, notes = _real(model, plan, request["seq"]), []
            check_model(plan, graph)
            report = verify_plan_collectives(graph, plan, progress=show)
    if as_json:
        print(json.dumps(report.to_json() | {"notes": notes}, indent=1))
    else:
        print_collectives(report, notes)
    if not report.clean:
        sys.exit(1)


def _load(model: str, devices: int, sizes: Sizes) -> tuple[Workload, list[str]]:
    """The model with its batch, on the CPU, and notes about the sizes that were made smaller."""
    if names_code(model):
        return load_model(model, sizes, device="cpu", default_precision="float32"), []
    is_file = model.endswith(".json") or Path(model).is_file()
    config = read_config(Path(model)) if is_file else find(model).config
    small = shrink_config(config)
    rows, seq = sizes.global_batch or max(_ROWS, 2 * devices), sizes.seq or _SEQ
    module, batch = build_config(small, seq, rows, "float32", "cpu")
    changed = ", ".join(f"{key} {small[key]}" for key in small if small[key] != config.get(key))
    name = Path(model).stem if is_file else model
    return Workload(module, batch, name=name), [
        f"shrunk: {changed}; batch of {rows}" + (f" x {seq}" if "input_ids" in batch else "")
    ]


def _real(model: str, plan: Plan, seq: int | None) -> Graph:
    """The graph of the model that the plan was made for, at full size, captured on meta."""

    def again(*, global_batch: int | None = None, **_: Any) -> Graph:
        loaded = load_model(model, Sizes(seq, global_batch, plan.precision), device="meta")
        return dataclasses.replace(loaded, precision=plan.precision).capture()

    return with_concession(again(global_batch=plan.global_batch), again, Concession.of(plan))


def _print(report: Report, notes: list[str]) -> None:
    out = console()
    table = plain_table()
    table.add_column("plan", no_wrap=True)
    table.add_column("error", justify="right", no_wrap=True)
    table.add_column("largest in")
    for check in report.checked:
        table.add_row(check.kind, f"{check.error:.1e}", check.where, style=None if check.error <= EXACT else "red")
    out.print(table)
    if report.attacks:
        out.print(f"tried on one device: {', '.join(attack.name for attack in report.attacks)}", markup=False)
    for name, reason in report.attacks_skipped.items():
        out.print(f"not tried: {name}: {reason}", markup=False)
    for kind, reason in report.skipped.items():
        out.print(f"not admitted: {kind}: {reason}", markup=False)
    for failure in report.failures:
        out.print(f"failed: {failure.kind} ({failure.plan}): {failure.message}", markup=False, style="red")
        if failure.first is not None:
            out.print(f"  first to differ: {failure.first}", markup=False)
    for op in report.replicated_ops:
        out.print(f"replicated, because no sharding rule covers it: {op}", markup=False)
    for note in (*notes, *report.notes):
        out.print(note, markup=False)
    out.print(verdict(report), markup=False, style="bold green" if report.agrees else "bold red")


def verdict(report: Report) -> str:
    """The report in one sentence."""
    count = f"{len(report.checked)} plans of {report.model} on {report.devices} processes"
    count += f" and {len(report.attacks)} attacks on one device" if report.attacks else ""
    if report.exact:
        return (
            f"exact: {count}, the loss and every gradient within {report.max_relative_difference:.1e} of one device's"
        )
    if report.agrees:
        return f"agrees, and is not exact: {count}, within {report.max_relative_difference:.1e} of {report.reference}"
    if not report.checked and not report.failures:
        return f"nothing was checked: {report.model} admits no plan for {report.devices} processes"
    return f"not exact: {len(report.failures)} failures in {count}"
