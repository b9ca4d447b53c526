"""Lists the cells of a sweep, and plans each of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from autopar.devices import Cluster, hardware, parse
from autopar.errors import AutoparError, BatchError, UsageError
from autopar.explain.study import PricerOf, shared_pricers
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.planning import find_plan
from autopar.search import SearchOptions
from autopar.summary import describe, memory_bytes

HOUR_S = 3600.0
BILLION = 1e9


@dataclass(frozen=True, slots=True)
class Range:
    """The values to try: numbers of devices, GPU kinds, sequence lengths, and global batch sizes (``None``: the model's default)."""

    devices: tuple[int, ...]
    gpus: tuple[str, ...]
    seqs: tuple[int | None, ...] = (None,)
    global_batches: tuple[int | None, ...] = (None,)

    @property
    def cells(self) -> int:
        return len(self.devices) * len(self.gpus) * len(self.seqs) * len(self.global_batches)


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of values and the figures of its plan, or the ``error`` that explains why there is no plan.

    ``tokens_per_s`` is for all devices together (images per second for an image model). ``cost_per_billion_tokens`` is in the currency of
    the user's prices; it is ``None`` if the GPU kind has no price.
    """

    gpu: str
    devices: int
    spec: str
    seq: int | None
    global_batch: int | None
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    memory_bytes: int | None = None
    gap: float | None = None
    cost_per_billion_tokens: float | None = None
    summary: str = ""
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"feasible": self.step_time_s is not None}


class CaptureSized(Protocol):
    """A function that returns the model's graph with these sizes; it raises ``AutoparError`` if the model doesn't support them."""

    def __call__(self, *, seq: int | None, global_batch: int | None) -> Graph: ...


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Parse ``"8..1024"`` (8, 16, 32, ... 1024), ``"8,24"``, or a combination. Raises ``UsageError`` for other text or an empty range."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:\.\.\s*(\d+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if first < 1 or last < first:
            raise UsageError(f"{option} {text!r} is not a range", "write 8, 8,16,24 or 8..1024 (which doubles)")
        while first <= last:
            found.append(first)
            first *= 2
    return tuple(dict.fromkeys(found))


def read_prices(texts: Sequence[str]) -> dict[str, float]:
    """Parse prices of a GPU hour, such as ``"2.5"`` (for any GPU) or ``"H100-80GB=2.5"``; return them by GPU kind, ``"*"`` for any.

    Raises ``UsageError`` for an invalid number or an unknown GPU.
    """
    found: dict[str, float] = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        try:
            price = float(value)
        except ValueError:
            price = -1.0
        if not 0 < price < float("inf"):
            raise UsageError(f"--gpu-hour {text!r} is not a price", "write 2.5, or H100-80GB=2.5 for one kind")
        found[hardware.find(name) if name else "*"] = price
    return found


def clusters_of(request: Range, memory_limit_bytes: int | None = None) -> Iterator[Cluster]:
    """Yield a cluster for each GPU kind and number of devices: full nodes, or a part of one node. Each kind must have the memory of the
    limit."""
    for gpu in request.gpus:
        name = hardware.find(gpu)
        node = hardware.gpus_per_node(name)
        for count in request.devices:
            if count > node and count % node:
                raise UsageError(
                    f"{count} devices do not fill nodes of {node} {name}", f"use multiples of {node}, or at most {node}"
                )
            yield parse(f"{max(1, count // node)}x{min(count, node)}x{name}", memory_limit_bytes=memory_limit_bytes)


def sweep(
    capture: CaptureSized,
    request: Range,
    options: SearchOptions,
    *,
    prices: dict[str, float] | None = None,
    memory_limit_bytes: int | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    pricer_of: PricerOf | None = None,
) -> list[Cell]:
    """Plan every cell, one graph after the other; ``prices`` has the price of a GPU hour by kind (see ``read_prices``).

    Raises:
        AutoparError: the model can't be captured, a GPU is unknown or has less memory than the limit, or a number of devices doesn't fill
            its nodes.
        BatchError: the model supports none of the combinations of sequence length and batch.
    """
    found: list[Cell] = []
    refused: list[BatchError] = []
    clusters = list(clusters_of(request, memory_limit_bytes))
    for seq in request.seqs:
        for global_batch in request.global_batches:
            graph: Graph | BatchError
            progress("capture", len(found), request.cells)
            try:
                graph = capture(seq=seq, global_batch=global_batch)
            except BatchError as error:
                graph = error
                refused.append(error)
                if len(refused) == len(request.seqs) * len(request.global_batches):
                    raise refused[0] from None
            pricers = pricer_of or shared_pricers()
            for cluster in clusters:
                progress(cluster.name, len(found), request.cells)
                cell = Cell(cluster.gpu.name, cluster.count, cluster.name, seq, global_batch)
                found.append(_planned(cell, graph, cluster, options, pricers, prices or {}))
    progress("done", len(found), request.cells)
    return found


def _planned(
    cell: Cell,
    graph: Graph | BatchError,
    cluster: Cluster,
    options: SearchOptions,
    pricer_of: PricerOf,
    prices: dict[str, float],
) -> Cell:
    if isinstance(graph, BatchError):
        return dataclasses.replace(cell, error=graph.message)
    cell = dataclasses.replace(cell, global_batch=graph.batch_size)
    try:
        plan = find_plan(graph, cluster, options, pricer=pricer_of(graph, cluster), may_be_idle=True)
    except AutoparError as error:
        return dataclasses.replace(cell, error=error.message)
    price = prices.get(cluster.gpu.name, prices.get("*"))
    return dataclasses.replace(cell, **_figures(plan, graph, cluster, price))


def _figures(plan: Plan, graph: Graph, cluster: Cluster, hour_price: float | None) -> dict[str, Any]:
    step = plan.prediction.step_time_s
    rate = graph.tokens / step
    return {
        "step_time_s": step,
        "tokens_per_s": rate,
        "mfu": plan.prediction.mfu,
        "memory_bytes": memory_bytes(plan),
        "gap": plan.gap,
        "cost_per_billion_tokens": None if hour_price is None else hour_price / HOUR_S * cluster.count / rate * BILLION,
        "summary": describe(plan),
    }
