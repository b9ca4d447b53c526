"""``autopar sweep`` plans a model over a range of requests."""

from __future__ import annotations

from dataclasses import replace

from rich.table import Table

from autopar.cli.commands import cluster_and_options, recapture
from autopar.cli.console import output_file, plain_table, progress_bar, show
from autopar.cli.options import PlanRequest
from autopar.errors import InfeasibleError, UsageError
from autopar.picture import pyplot
from autopar.sweep import Cell, Range, numbers, plot, read_prices, sweep
from autopar.units import seconds, size


def sweep_command(
    request: PlanRequest,
    counts: str,
    gpu: str,
    lengths: str | None,
    batches: str | None,
    gpu_hour: tuple[str, ...],
    plot_file: str | None,
    as_json: bool,
) -> None:
    """Plan each combination, print a table or one JSON object, and draw a plot if requested."""
    prices = read_prices(gpu_hour)
    picture = output_file(plot_file, "--plot", picture=True) if plot_file else None
    if picture:
        pyplot()  # raises now, not after the sweep, if matplotlib is not installed
    gpus = tuple(part.strip() for part in gpu.split(",") if part.strip())
    if not gpus:
        raise UsageError("--gpu names no GPU", "`autopar help hardware` lists them")
    ranges = Range(numbers(counts, "--devices"), gpus, _sizes(lengths, "--seq"), _sizes(batches, "--global-batch"))
    first, options = cluster_and_options(request := replace(request, devices=f"1x1x{gpus[0]}"))
    limit = first.memory_override_bytes
    with progress_bar(request.model, ranges.cells) as progress:
        cells = sweep(
            recapture(request, first), ranges, options, prices=prices, memory_limit_bytes=limit, progress=progress
        )
    show(as_json, {"model": request.model, "cells": [cell.to_json() for cell in cells]}, table(cells))
    if all(cell.step_time_s is None for cell in cells):
        raise InfeasibleError(f"no combination of the sweep has a plan: {cells[0].error}", "sweep more devices")
    if picture:
        plot(cells, picture, request.model)


def _sizes(text: str | None, option: str) -> tuple[int | None, ...]:
    return (None,) if text is None else numbers(text, option)


def table(cells: list[Cell]) -> Table:
    """Return a table with a row for each cell, without empty columns."""
    priced = any(cell.cost_per_billion_tokens is not None for cell in cells)
    long = any(cell.seq is not None for cell in cells)
    names = [*(["seq"] if long else []), "batch", "step", "tokens/s", "MFU", "memory", "gap"]
    found = plain_table(None, ("devices",), [*names, *(["1e9 tokens"] if priced else [])], ("plan",))
    for cell in cells:
        head = [cell.spec, *([f"{cell.seq:,}" if cell.seq else "-"] if long else []), f"{cell.global_batch or '-'}"]
        if cell.step_time_s is None:
            found.add_row(*head, *["-"] * (1 + len(names) - len(head) + priced), cell.error)
            continue
        assert cell.tokens_per_s is not None and cell.mfu is not None and cell.gap is not None
        cost = cell.cost_per_billion_tokens
        found.add_row(
            *head,
            seconds(cell.step_time_s),
            f"{cell.tokens_per_s:,.0f}",
            f"{cell.mfu:.1%}",
            size(cell.memory_bytes or 0),
            f"{cell.gap:.1%}",
            *([f"{cost:,.0f}" if cost is not None else "-"] if priced else []),
            cell.summary,
        )
    return found
