"""``autopar dev rehearse`` runs single ranks of a plan on one device, and compares their memory and step time with the prediction."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from autopar.cli.commands import make_plan
from autopar.cli.console import console, plain_table, progress_bar
from autopar.cli.options import PlanRequest
from autopar.cli.pricing import price_plan
from autopar.compile import emit_program
from autopar.errors import UsageError
from autopar.price import Pricer
from autopar.run.rehearsal import (
    Rehearsal,
    check_ranks,
    random_batch,
    rank_of_each_position,
    rehearse,
    with_free_communication,
)
from autopar.units import seconds, size


def rehearse_command(
    request: PlanRequest, ranks: tuple[int, ...], device: str | None, steps: int, as_json: bool
) -> None:
    """Run the ranks, and print predicted and measured memory and step times as a table, or as one JSON object for each rank."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("this machine has no GPU to rehearse on", "leave --device out, or write --device cpu")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    _, cluster, graph, plan = make_plan(request)
    cluster = cluster.used_by(plan.device_count)
    check_ranks(plan, ranks)
    ranks = ranks or rank_of_each_position(plan)
    free = with_free_communication(cluster)
    alone = price_plan(graph, free, plan, Pricer(graph, free, plan.precision))
    found: list[Rehearsal] = []
    with tempfile.TemporaryDirectory() as folder, progress_bar("rehearsal", len(ranks), lines=True) as show:
        emit_program(graph, plan, Path(folder), type_check=request.type_check)
        show(f"rank {ranks[0]}", 0, len(ranks))
        for rehearsal in rehearse(folder, alone, random_batch(graph), ranks, device, steps):
            found.append(rehearsal)
            if as_json:
                print(json.dumps(rehearsal.to_json()), flush=True)
            if len(found) < len(ranks):
                show(f"rank {ranks[len(found)]}", len(found), len(ranks))
    if as_json:
        return
    name = cluster.gpu.name if cluster.kind == "cuda" else "CPU"
    table = plain_table(
        f"single ranks of {plan.device_count} on {found[0].device}; predicted for {name} without communication",
        numbers=("rank", "stages", "memory predicted", "measured", "off by", "step predicted", "measured", "off by"),
    )
    for one in found:
        table.add_row(
            str(one.rank),
            ", ".join(map(str, one.stages)),
            size(one.predicted.total),
            size(one.peak_bytes),
            f"{one.memory_error:+.1%}",
            seconds(one.predicted_s),
            seconds(one.step_s),
            f"{one.time_error:+.0%}",
        )
    console().print(table)
