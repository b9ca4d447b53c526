"""``autopar dev sync`` shows the traffic and time of each way to synchronise replicas, by textbook algorithm and by the cost model."""

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
"""The row with the cost model's time of the collectives that emitted programs call."""


@dataclass(frozen=True, slots=True)
class SyncRow:
    """One way to synchronise by one algorithm, per training step (averaged over the steps between synchronisations).

    ``messages`` are sequential; ``busiest_bytes`` pass through the busiest rank, in and out; all ranks together send ``traffic_bytes``.
    They are ``None`` if NCCL or gloo chooses the algorithm.
    """

    sync: str
    algorithm: str
    seconds: float
    messages: float | None = None
    busiest_bytes: float | None = None
    traffic_bytes: float | None = None


def rows(elements: int, cluster: Cluster, numbers: Precision, steps: int) -> list[SyncRow]:
    """Return the rows for ``elements`` parameters with a replica on each device; local SGD synchronises every ``steps`` steps."""
    members = group((Axis("data", cluster.count, 1),), cluster)
    gradients, parameters = elements * numbers.averaged, elements * numbers.width
    masters = elements * (numbers.at_rest or numbers.width)
    reduced, sent = (Collective.REDUCE, gradients), (Collective.BROADCAST, parameters)
    syncs: list[tuple[str, int, list[tuple[Collective, int]]]] = [
        (ALL_REDUCE, 1, [(Collective.ALL_REDUCE, gradients)]),
        (PARAMETER_SERVER, 1, [reduced, sent]),
        (f"{LOCAL_STEPS}:{steps}", steps, [(Collective.ALL_REDUCE, masters)]),
    ]
    found = []
    for sync, every, parts in syncs:
        for name in ALGORITHMS:
            ways = [algorithm(name, collective, members.size, count) for collective, count in parts]
            found.append(
                SyncRow(
                    sync,
                    name,
                    sum(way.seconds(members, cluster) for way in ways) / every,
                    sum(way.messages for way in ways) / every,
                    sum(way.busiest_bytes for way in ways) / every,
                    sum(way.traffic_bytes for way in ways) / every,
                )
            )
        priced_s = sum(group_time_s(collective, count, members, cluster) for collective, count in parts)
        found.append(SyncRow(sync, PRICED, priced_s / every))
    return found


def sync_command(
    parameters: str, devices: str, precision: str | None, steps: int, calibration: str | None, as_json: bool
) -> None:
    """Print a table or JSON."""
    cluster = parse(devices, calibration=calibration)
    numbers = numbers_of(precision or "bfloat16")
    found = rows(parse_count(parameters), cluster, numbers, steps)
    table = plain_table(
        f"{parameters} parameters in {numbers.name}, one replica on each of {cluster.count} devices ({cluster}); per step",
        ("sync", "algorithm"),
        ("sequential messages", "busiest rank", "all ranks", "time"),
    )
    for row in found:
        through, sent = ("-" if n is None else size(round(n)) for n in (row.busiest_bytes, row.traffic_bytes))
        messages = "-" if row.messages is None else f"{row.messages:,.4g}"
        table.add_row(row.sync, row.algorithm, messages, through, sent, seconds(row.seconds))
    show(as_json, [dataclasses.asdict(row) for row in found], table)
