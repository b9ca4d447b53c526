"""``autopar sweep``."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from rich.table import Table

from autopar.cli.commands import asked, recapture
from autopar.cli.console import console, plain_table, progress_bar
from autopar.cli.output import output_file
from autopar.errors import InfeasibleError, UsageError
from autopar.precision import normalise
from autopar.sweep import Cell, Range, numbers, plot, read_prices, sweep
from autopar.units import seconds, size


def sweep_command(as_json: bool, plot_file: str | None, gpu: str, gpu_hour: tuple[str, ...], **request: Any) -> None:
    """Plans the range, prints a table or one JSON object, and draws the picture that was asked for."""
    prices = read_prices(gpu_hour)
    picture = output_file(plot_file, "--plot", picture=True) if plot_file else None
    gpus = tuple(part.strip() for part in gpu.split(",") if part.strip())
    if not gpus:
        raise UsageError("--gpu names no kind of GPU", "`autopar hardware` lists them")
    there = Range(
        numbers(request["devices"], "--devices"),
        gpus,
        _sizes(request["seq"], "--seq"),
        _sizes(request["global_batch"], "--global-batch"),
    )
    request |= {"seq": None, "global_batch": None, "devices": f"1x1x{gpus[0]}"}
    first, options = asked(request)
    precision = normalise(request["precision"]) if request["precision"] else "bfloat16"
    again = recapture(request, first)

    def capture(*, seq: int | None, global_batch: int | None) -> Any:
        return again(seq=seq, global_batch=global_batch)

    options = dataclasses.replace(options, precision=precision, memory_limit_bytes=first.memory_override_bytes)
    with progress_bar(request["model"], there.cells) as show:
        cells = sweep(capture, there, options, prices=prices, progress=show)
    if picture:
        plot(cells, picture, request["model"])
    if as_json:
        print(json.dumps({"model": request["model"], "cells": [cell.to_json() for cell in cells]}, indent=1))
    else:
        console().print(table(cells))
    if all(cell.step_time_s is None for cell in cells):
        raise InfeasibleError(f"no combination of the sweep has a plan: {cells[0].error}", "sweep more devices")


def _sizes(text: str | None, option: str) -> tuple[int | None, ...]:
    return (None,) if text is None else numbers(text, option)


def table(cells: list[Cell]) -> Table:
    """One row a cell; columns that say nothing are left out."""
    priced = any(cell.cost_per_billion_tokens is not None for cell in cells)
    long = any(cell.seq is not None for cell in cells)
    names = [*(["seq"] if long else []), "batch", "step", "tokens/s", "MFU", "memory", "gap"]
    found = plain_table(None, ("devices",), [*names, *(["1e9 tokens"] if priced else [])])
    found.add_column("plan", overflow="fold")
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
