"""The result of ``autopar verify --collectives`` as text."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cli.console import console, plain_table
from autopar.verify.collectives import CollectivesReport


def print_collectives(report: CollectivesReport, notes: Sequence[str]) -> None:
    """Print the plans, what was found, and the verdict."""
    out = console()
    table = plain_table(words=("plan",), numbers=("ranks", "operations", "found"))
    for plan in report.plans:
        style = "red" if plan.findings else None
        counts = (str(len(plan.ranks)), f"{plan.operations:,}", str(len(plan.findings)))
        table.add_row(plan.kind, *counts, style=style)
    out.print(table)
    for plan in report.plans:
        for finding in plan.findings:
            out.print(f"found: {plan.kind} ({plan.plan}): {finding}", markup=False, style="red")
        for note in plan.notes:
            out.print(f"{plan.kind}: {note}", markup=False)
    for kind, reason in report.skipped.items():
        out.print(f"not admitted: {kind}: {reason}", markup=False)
    for note in notes:
        out.print(note, markup=False)
    out.print(verdict(report), markup=False, style="bold green" if report.clean else "bold red")


def verdict(report: CollectivesReport) -> str:
    """The report in one sentence."""
    if not report.plans:
        return f"nothing was recorded: {report.model} admits no plan for so many devices"
    ranks = sum(len(plan.ranks) for plan in report.plans)
    operations = sum(plan.operations for plan in report.plans)
    several = f"{len(report.plans)} plans" if len(report.plans) > 1 else "1 plan"
    what = f"{operations:,} operations on {ranks} ranks of {several} of {report.model}"
    if report.clean:
        return f"clean: {what}, in {report.modes} modes of NCCL: no deadlock, and the same collectives on all ranks of every group"
    count = sum(len(plan.findings) for plan in report.plans)
    return f"not clean: {count} finding{'s' if count != 1 else ''} in {what}"
