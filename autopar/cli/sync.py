"""``autopar dev sync`` compares how replicas synchronise: traffic and time by textbook algorithms, and time by the cost model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from autopar.cli.console import plain_table, show
from autopar.devices import Cluster, parse
from autopar.plan import Axis
from autopar.price.algorithms import ALGORITHMS, algorithm
from autopar.price.collectives import group, group_time_s
from autopar.price.state import Precision
from autopar.price.state import precision as numbers_of
from autopar.techniques.sync import ALL_REDUCE, LOCAL_STEPS, PARAMETER_SERVER
from autopar.types import Collective
from autopar.units import parse_count, seconds, size

PRICED = "as priced"
"""The ``SyncRow.algorithm`` of rows with the cost model's time of the collectives that emitted programs call."""


@dataclass(frozen=True, slots=True)
class SyncRow:
    """Figures of one kind of synchronisation by one algorithm, per training step (averaged over the steps between synchronisations).

    ``messages`` is the number of sequential messages, ``busiest_bytes`` is sent and received by the busiest rank, ``traffic_bytes`` is sent
    by all ranks together. The three are ``None`` if NCCL or gloo chooses the algorithm.
    """

    sync: str
    algorithm: str
    seconds: float
    messages: float | None = None
    busiest_bytes: float | None = None
    traffic_bytes: float | None = None


def rows(elements: int, cluster: Cluster, numbers: Precision, steps: int) -> list[SyncRow]:
    """Return the rows for ``elements`` parameters and one replica on each device; local SGD synchronises every ``steps`` steps."""
    members = group((Axis("data", cluster.count, 1),), cluster)
    gradients, parameters = elements * numbers.averaged, elements * numbers.width
    masters = elements * (numbers.at_rest or numbers.width)
    syncs: list[tuple[str, int, list[tuple[Collective, int]]]] = [
        (ALL_REDUCE, 1, [(Collective.ALL_REDUCE, gradients)]),
        (PARAMETER_SERVER, 1, [(Collective.REDUCE, gradients), (Collective.BROADCAST, parameters)]),
        (f"{LOCAL_STEPS}:{steps}", steps, [(Collective.ALL_REDUCE, masters)]),
    ]
    found = []
    for sync, period, collectives in syncs:
        for name in ALGORITHMS:
            runs = [algorithm(name, collective, members.size, count) for collective, count in collectives]
            found.append(
                SyncRow(
                    sync,
                    name,
                    sum(run.seconds(members, cluster) for run in runs) / period,
                    sum(run.messages for run in runs) / period,
                    sum(run.busiest_bytes for run in runs) / period,
                    sum(run.traffic_bytes for run in runs) / period,
                )
            )
        priced_s = sum(group_time_s(collective, count, members, cluster) for collective, count in collectives)
        found.append(SyncRow(sync, PRICED, priced_s / period))
    return found


def sync_command(
    parameters: str, devices: str, precision: str | None, steps: int, calibration: str | None, as_json: bool
) -> None:
    """Print the rows as a table or as JSON."""
    cluster = parse(devices, calibration=calibration)
    numbers = numbers_of(precision or "bfloat16")
    found = rows(parse_count(parameters), cluster, numbers, steps)
    table = plain_table(
        f"{parameters} parameters in {numbers.name}, one replica on each of {cluster.count} devices ({cluster}); per step",
        ("sync", "algorithm"),
        ("sequential messages", "busiest rank", "all ranks", "time"),
    )
    for row in found:
        busiest, traffic = ("-" if n is None else size(round(n)) for n in (row.busiest_bytes, row.traffic_bytes))
        messages = "-" if row.messages is None else f"{row.messages:,.4g}"
        table.add_row(row.sync, row.algorithm, messages, busiest, traffic, seconds(row.seconds))
    show(as_json, [dataclasses.asdict(row) for row in found], table)
