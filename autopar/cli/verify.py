"""``autopar verify`` loads the model at a size that local processes can run, verifies it, and prints the report."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import torch
from rich.console import RenderableType
from rich.text import Text

from autopar.cli.commands import allowed, capture_request
from autopar.cli.console import plain_table, progress_bar, show
from autopar.cli.load import SizeOptions, config_file, load_model, names_code, read_config
from autopar.cli.options import PlanRequest
from autopar.devices import parse
from autopar.graph import Graph
from autopar.measure import EXACT
from autopar.plan import Plan
from autopar.plan_files import check_model, read_plan
from autopar.run.processes import check_count
from autopar.units import parse_size
from autopar.verify import Report, shrink_config
from autopar.verify.collectives import CollectivesReport, verify_collectives, verify_plan_collectives
from autopar.verify.run import verify_workload
from autopar.workload import Workload
from autopar.zoo import find
from autopar.zoo.hf import build_config

_SEQ = 16  # sequence length of a shrunken model
_ROWS = 8  # default batch: enough for eight data-parallel devices, or four microbatches on two


def verify_command(request: PlanRequest, processes: int, collectives: bool, as_json: bool) -> None:
    """Print the report. Exit with 1 unless all checked plans are exact or, if they give up exactness, equal to their references; with
    ``collectives``, exit with 1 if nothing was recorded or there are findings."""
    limit = parse_size(request.memory_limit or "")
    plan = read_plan(request.plan_file) if request.plan_file else None
    sizes, allow = SizeOptions(request.seq, request.global_batch), allowed(request.allow)
    if plan is None or not collectives:
        check_count(processes)
    torch.manual_seed(0)
    report: Report | CollectivesReport
    with redirect_stdout(sys.stderr), progress_bar("verify", lines=True) as progress:  # the model's code may print
        notes: list[str] = []
        real = None
        if plan is not None and (collectives or not names_code(request.model)):
            real = _full_size_graph(request, plan)
            check_model(plan, real)
        if collectives and plan is not None and real is not None:
            report = verify_plan_collectives(real, plan, progress=progress)
        else:
            # with a plan, --seq and --global-batch are those of the full-size model, not of the shrunken one
            workload, notes = _load(
                request.model, processes, sizes if plan is None or names_code(request.model) else SizeOptions()
            )
            if collectives:
                report = verify_collectives(workload, processes, allow=allow, progress=progress)
            else:
                report = verify_workload(
                    workload, processes, plan=plan, real=real, memory_limit_bytes=limit, allow=allow, progress=progress
                )
    data = report.to_json()
    parts = [Text(part) if isinstance(part, str) else part for part in _report_parts(report, notes)]
    show(as_json, data | {"notes": [*notes, *data.get("notes", ())]}, *parts)
    if not (report.clean if isinstance(report, CollectivesReport) else report.agrees):
        sys.exit(1)


def _load(model: str, devices: int, sizes: SizeOptions) -> tuple[Workload, list[str]]:
    """Return the model with its batch, on the CPU, and notes that say to which sizes it was shrunk."""
    if names_code(model):
        return load_model(model, sizes, device="cpu", default_precision="float32"), []
    file = config_file(model)
    config = find(model).config if file is None else read_config(file)
    small = shrink_config(config)
    rows, seq = sizes.global_batch or max(_ROWS, 2 * devices), sizes.seq or _SEQ
    module, batch = build_config(small, seq, rows, "float32", "cpu")
    changed = ", ".join(f"{key} {small[key]}" for key in small if small[key] != config.get(key))
    name = model if file is None else Path(model).stem
    return Workload(module, batch, name=name), [
        f"shrunk: {changed}; batch of {rows}" + (f" x {seq}" if "input_ids" in batch else "")
    ]


def _full_size_graph(request: PlanRequest, plan: Plan) -> Graph:
    """Return the graph of the full-size model for which the plan was made, captured on meta."""
    request = dataclasses.replace(request, precision=plan.precision)
    # the devices decide nothing but a precision that is missing
    return capture_request(request, parse(1), plan, None)[0]


def _report_parts(report: Report | CollectivesReport, notes: list[str]) -> Iterator[RenderableType]:
    """Yield the table of a report, its findings, the kinds of plans that were skipped, notes, and the verdict."""
    if isinstance(report, CollectivesReport):
        table = plain_table(words=("plan",), numbers=("ranks", "operations", "found"))
        for plan in report.plans:
            counts = (str(len(plan.ranks)), f"{plan.operations:,}", str(len(plan.findings)))
            table.add_row(plan.kind, *counts, style="red" if plan.findings else None)
        yield table
        for plan in report.plans:
            yield from (Text(f"found: {plan.kind} ({plan.plan}): {finding}", "red") for finding in plan.findings)
            yield from (f"{plan.kind}: {note}" for note in plan.notes)
    else:
        table = plain_table(words=("plan",), numbers=("error",), texts=("largest in",))
        for check in report.checked:
            table.add_row(check.kind, f"{check.error:.1e}", check.where, style=None if check.error <= EXACT else "red")
        yield table
        if report.attacks:
            yield f"compared on one device: {', '.join(attack.name for attack in report.attacks)}"
        yield from (f"not tried: {name}: {reason}" for name, reason in report.attacks_skipped.items())
    yield from (f"skipped: {kind}: {reason}" for kind, reason in report.skipped.items())
    if isinstance(report, CollectivesReport):
        yield from notes
        yield Text(collectives_verdict(report), "bold green" if report.clean else "bold red")
        return
    for failure in report.failures:
        yield Text(f"failed: {failure.kind} ({failure.plan}): {failure.message}", "red")
        if failure.first is not None:
            yield f"  first difference: {failure.first}"
    yield from (f"replicated, because no sharding rule covers it: {op}" for op in report.replicated_ops)
    yield from (*notes, *report.notes)
    yield Text(verdict(report), "bold green" if report.agrees else "bold red")


def collectives_verdict(report: CollectivesReport) -> str:
    """Return the report on collectives in one sentence."""
    if not report.plans:
        return f"nothing was recorded: no plan for this number of devices is valid for {report.model}"
    ranks = sum(len(plan.ranks) for plan in report.plans)
    operations = sum(plan.operations for plan in report.plans)
    several = f"{len(report.plans)} plans" if len(report.plans) > 1 else "1 plan"
    what = f"{operations:,} operations on {ranks} ranks of {several} of {report.model}"
    if report.clean:
        return f"clean: {what}, in {report.modes} modes of NCCL: no deadlock, and the same collectives on all ranks of every group"
    count = sum(len(plan.findings) for plan in report.plans)
    return f"not clean: {count} finding{'s' if count != 1 else ''} in {what}"


def verdict(report: Report) -> str:
    """Return the report in one sentence."""
    count = f"{len(report.checked)} plan{'s' if len(report.checked) != 1 else ''} of {report.model} on {report.devices} processes"
    count += f" and {len(report.attacks)} attacks on one device" if report.attacks else ""
    if report.exact:
        return (
            f"exact: {count}, the loss and every gradient within {report.max_relative_difference:.1e} of one device's"
        )
    if report.agrees:
        return f"matches its reference (not exact): {count}, within {report.max_relative_difference:.1e} of {report.reference}"
    if not report.checked and not report.failures:
        return f"nothing was checked: no plan for {report.devices} processes is valid for {report.model}"
    return f"not exact: {len(report.failures)} failures in {count}"
