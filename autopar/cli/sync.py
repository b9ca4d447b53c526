"""``autopar sync``: traffic and seconds of the ways to synchronise replicas, by textbook algorithm and as priced."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from autopar.cli.console import console, plain_table
from autopar.devices import Cluster, parse
from autopar.plan import ALL_REDUCE, PARAMETER_SERVER, Axis
from autopar.price.algorithms import ALGORITHMS, algorithm
from autopar.price.collectives import Group, group, group_time_s
from autopar.price.state import Precision, precision
from autopar.types import Collective
from autopar.units import parse_count, seconds, size

PRICED = "as priced"
"""The row of the collectives that emitted programs call, as plans price them."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way to synchronise, by one algorithm, per step of training. ``messages`` follow one another; ``busiest_bytes`` pass through one
    rank, in and out, and all ranks send ``traffic_bytes``: no figures where NCCL or gloo choose the algorithm."""

    sync: str
    algorithm: str
    seconds: float
    messages: float | None = None
    busiest_bytes: float | None = None
    traffic_bytes: float | None = None


def rows(elements: int, cluster: Cluster, numbers: Precision) -> list[Row]:
    """The synchronisations of a model of ``elements`` parameters whose replicas are the devices of ``cluster``, one on each."""
    members = group((Axis("data", cluster.count, 1),), cluster)
    gradients, parameters = elements * numbers.averaged, elements * numbers.width
    syncs = {
        ALL_REDUCE: [(Collective.ALL_REDUCE, gradients)],
        PARAMETER_SERVER: [(Collective.REDUCE, gradients), (Collective.BROADCAST, parameters)],
    }
    return [
        row
        for sync, parts in syncs.items()
        for row in (
            *(_row(sync, name, parts, members, cluster) for name in ALGORITHMS),
            _priced(sync, parts, members, cluster),
        )
    ]


def _row(sync: str, name: str, parts: list[tuple[Collective, int]], members: Group, cluster: Cluster) -> Row:
    found = [algorithm(name, collective, members.size, count) for collective, count in parts]
    return Row(
        sync,
        name,
        sum(each.seconds(members, cluster) for each in found),
        sum(each.messages for each in found),
        sum(each.busiest_bytes for each in found),
        sum(each.traffic_bytes for each in found),
    )


def _priced(sync: str, parts: list[tuple[Collective, int]], members: Group, cluster: Cluster) -> Row:
    return Row(sync, PRICED, sum(group_time_s(collective, count, members, cluster) for collective, count in parts))


def sync_command(parameters: str, devices: str, precision_name: str, calibration: str | None, as_json: bool) -> None:
    """Prints the table."""
    cluster = parse(devices, calibration=calibration)
    found = rows(parse_count(parameters), cluster, precision(precision_name))
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in found], indent=1))
        return
    table = plain_table(
        f"{parameters} parameters in {precision_name}, a replica on each of {cluster.count} devices ({cluster}); per step"
    )
    for name in ("sync", "algorithm"):
        table.add_column(name, no_wrap=True)
    for name in ("messages in turn", "busiest rank", "all ranks", "time"):
        table.add_column(name, justify="right")
    for row in found:
        through, sent = ("-" if n is None else size(round(n)) for n in (row.busiest_bytes, row.traffic_bytes))
        messages = "-" if row.messages is None else f"{row.messages:,}"
        table.add_row(row.sync, row.algorithm, messages, through, sent, seconds(row.seconds))
    console().print(table)
