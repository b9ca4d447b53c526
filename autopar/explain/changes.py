"""Finds the smallest change of each kind that makes an infeasible request feasible.

Each kind of change is tried separately, and a change is proposed only if a search with it found a plan. Quantities (devices, rows, tokens)
are bisected. Feasibility isn't quite monotone, because sizes must divide: the proposed value is feasible and the next smaller change that
the bisection tried isn't, but untried ones may be.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from autopar.devices import Cluster, hardware, parse
from autopar.errors import AutoparError, InfeasibleError, UsageError
from autopar.explain.study import Study
from autopar.pins import OWNERS
from autopar.plan import Plan
from autopar.summary import describe, memory_bytes
from autopar.techniques import LAYER
from autopar.techniques.technique import ANY, Context

MOST_DEVICES = 65_536
MOST_PROCESSES = 64  # on this machine's CPU
ENOUGH_S = 60.0  # time limit of one search, which usually stops much earlier: at its first feasible plan
LIMIT_S = 2.5  # CPU seconds for all searches together
SEQ_STEP = 128
FIRST = 1.0 - 1e-9  # the gap at which a search stops at the first feasible plan


@dataclass(frozen=True, slots=True)
class Change:
    """A change that makes a request feasible: ``request`` has pairs of an option, a pin or ``nodes`` with its new value, ``free`` the
    pins to leave out. The last three fields describe the plan that the search found with the change."""

    kind: str
    text: str
    request: tuple[tuple[str, Any], ...]
    free: tuple[str, ...]
    step_time_s: float
    memory_bytes: int
    summary: str

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"request": dict(self.request), "free": list(self.free)}


def suggest(
    study: Study,
    error: InfeasibleError,
    progress: Callable[[str], None] = lambda text: None,
    limit_s: float = LIMIT_S,
) -> InfeasibleError:
    """Return ``error`` with changes that make the request feasible; changes that need no new capture come first.

    The search for changes stops after ``limit_s`` CPU seconds.
    """
    deadline = time.thread_time() + limit_s
    kinds: list[tuple[str, Callable[[Study, float], Iterator[Change]]]] = [
        ("without a pin", _without_pins),
        ("with the host's memory", _offload),
        ("on more devices", _devices),
        ("on other devices", _other_devices),
        ("in half precision", _precision),
        ("with a smaller batch", _batch),
        ("with a shorter sequence", _sequence),
    ]
    found: list[Change] = []
    for words, kind in kinds:
        if time.thread_time() > deadline:
            break
        progress(f"nothing fits; looking for a plan {words}")
        found += kind(study, deadline)
    return InfeasibleError(error.message, error.hint, found)


def feasible(study: Study, deadline: float = math.inf, **changes: Any) -> Plan | None:
    """Return any feasible plan with ``changes`` (arguments of ``Study.solve``), or ``None`` if the search finds none before ``deadline``
    (CPU time) or rejects them."""
    left_s = deadline - time.thread_time()
    if left_s <= 0:
        return None
    try:
        return study.solve(target_gap=FIRST, time_limit_s=min(left_s, ENOUGH_S), explained=False, **changes)
    except (InfeasibleError, UsageError):
        return None


def _change(kind: str, text: str, plan: Plan, free: tuple[str, ...] = (), **request: Any) -> Change:
    return Change(
        kind,
        f"{text}: {describe(plan)}",
        tuple(request.items()),
        free,
        plan.prediction.step_time_s,
        memory_bytes(plan),
        describe(plan),
    )


def _without_pins(study: Study, deadline: float) -> Iterator[Change]:
    """Yield each pin whose removal makes the request feasible, or all pins together if no single one suffices."""
    pins = study.options.pins
    sufficient = 0
    for key, value in pins.items():
        if value == ANY:  # such a pin decides nothing
            continue
        plan = feasible(study, deadline, base=study.options.without(key))
        if plan is not None:
            sufficient += 1
            technique = OWNERS.get(key.rpartition(".")[2])
            kind = technique.name if technique is not None else "pin"
            yield _change(kind, f"remove the pin {key}={value}", plan, (key,))
    if not sufficient and len(pins) > 1:
        free = study.options
        for key in pins:
            free = free.without(key)
        plan = feasible(study, deadline, base=free)
        if plan is not None:
            yield _change("pins", f"remove the pins {', '.join(pins)}", plan, tuple(pins))


def _offload(study: Study, deadline: float) -> Iterator[Change]:
    """Yield each technique whose offload to host memory suffices, or all together if none does alone. Techniques that a pin decides, or
    whose offload the search tries without a pin, are left out."""
    if study.cluster.host is None:
        return
    parts: list[tuple[str, dict[str, Any]]] = []
    for technique in LAYER:
        for _, title, pins, needs in technique.alternatives():
            if needs != "host":
                continue
            names = (technique.name, *(pin.name for pin in technique.former_pins))
            if any(study.options.of(name) is not None for name in names):
                continue
            free = technique.candidates(Context(nvme=study.cluster.has_nvme))
            if not any(technique.mode(value).offload_tier for value in free):
                parts.append((title, dict(pins)))
    if not parts:
        return
    together = " and ".join(title for title, _ in parts), {k: v for _, pins in parts for k, v in pins.items()}
    sufficient = 0
    for title, pins in (*parts, *([together] if len(parts) > 1 else [])):
        if (len(pins) > 1 and sufficient) or time.thread_time() > deadline:
            break
        plan = feasible(study, deadline, **pins)
        if plan is not None:
            sufficient += 1
            flags = " ".join(f"--pin {name}={value}" for name, value in pins.items())
            yield _change("offload", f"put {title} ({flags})", plan, (), **pins)


def _precision(study: Study, deadline: float) -> Iterator[Change]:
    if study.recapture is None or study.graph.dtype.itemsize <= 2 or study.cluster.kind == "cpu":
        return
    plan = _resized(study, deadline, precision="bfloat16")
    if plan is not None:
        yield _change("precision", "use --precision bfloat16", plan, precision="bfloat16")


def _batch(study: Study, deadline: float) -> Iterator[Change]:
    rows = study.graph.batch_size
    if study.recapture is None or rows == 1:
        return
    fits = _smallest(rows - 1, deadline, lambda less: _resized(study, deadline, global_batch=rows - less))
    if fits is not None:
        less, plan = fits
        yield _change("batch", f"use --global-batch {rows - less} instead of {rows}", plan, global_batch=rows - less)


def _sequence(study: Study, deadline: float) -> Iterator[Change]:
    if study.recapture is None or study.seq is None or study.seq < 2:
        return
    step = SEQ_STEP if study.seq >= 2 * SEQ_STEP else 1
    seq = study.seq // step * step
    top = seq - step if seq == study.seq else seq
    fits = _smallest(top // step, deadline, lambda k: _resized(study, deadline, seq=top - (k - 1) * step))
    if fits is not None:
        k, plan = fits
        short = top - (k - 1) * step
        yield _change("sequence", f"use --seq {short} instead of {study.seq}", plan, seq=short)


def _resized(study: Study, deadline: float, **sizes: Any) -> Plan | None:
    if time.thread_time() > deadline:
        return None
    try:
        return feasible(study, deadline, graph=study.sized(**sizes))
    except AutoparError:
        return None


def _devices(study: Study, deadline: float) -> Iterator[Change]:
    """Yield the smallest sufficient number of devices of the same kind: first up to a full node, then more nodes."""
    counts = larger_counts(study.cluster)
    if not counts:
        return

    def attempt(k: int) -> Plan | None:
        return feasible(study, deadline, cluster=grown(study.cluster, counts[k - 1]))

    fits = _smallest(len(counts), deadline, attempt)
    if fits is not None:
        k, plan = fits
        cluster = grown(study.cluster, counts[k - 1])
        text = f"use {cluster.count} devices instead of {study.cluster.count}"
        spec = spec_of(cluster)
        request = {"nodes": cluster.nodes} if spec is None else {"devices": spec}
        yield _change("devices", text if spec is None else f"{text} (--devices {spec})", plan, **request)


def larger_counts(cluster: Cluster) -> list[int]:
    """Return the larger numbers of devices to try, in ascending order; none for local GPUs and heterogeneous clusters."""
    if cluster.parts or (cluster.local and cluster.kind == "cuda"):
        return []
    if cluster.local:
        return list(range(cluster.count + 1, MOST_PROCESSES + 1))
    node, full = cluster.gpus_per_node, hardware.gpus_per_node(cluster.gpu.name)
    filling = range(node + 1, full + 1) if cluster.nodes == 1 else range(0)
    if len(filling):
        node = full
    first = (cluster.nodes if not len(filling) else 1) + 1
    return [*filling, *(n * node for n in range(first, MOST_DEVICES // node + 1))]


def grown(cluster: Cluster, count: int) -> Cluster:
    """Return ``cluster`` with ``count`` devices."""
    limit = cluster.memory_override_bytes
    if cluster.local:  # processes share the machine's memory
        return parse(["cpu"] * count, memory_limit_bytes=limit)
    node, full = cluster.gpus_per_node, hardware.gpus_per_node(cluster.gpu.name)
    if cluster.nodes == 1 and node < full:
        node = min(count, full)
    nodes = count // node
    if node == cluster.gpus_per_node:
        return dataclasses.replace(cluster, nodes=nodes, name=f"{nodes}x{node}x{cluster.gpu.name}")
    intra, inter = cluster.intra, cluster.inter
    if spec_of(cluster) is not None:  # more GPUs per node mean a smaller share of the node's network for each
        intra, inter = hardware.links(cluster.gpu.name, node)
    name = f"{nodes}x{node}x{cluster.gpu.name}"
    return dataclasses.replace(cluster, nodes=nodes, gpus_per_node=node, intra=intra, inter=inter, name=name)


def spec_of(cluster: Cluster) -> str | None:
    """Return the ``--devices`` value of the cluster's GPUs and links (without its host and NVMe); ``None`` if only a file can describe
    them."""
    if cluster.local:
        return str(cluster.count)
    name = cluster.gpu.name
    if name not in hardware.table() or hardware.gpu(name) != cluster.gpu:
        return None
    if hardware.links(name, cluster.gpus_per_node) != (cluster.intra, cluster.inter):
        return None
    if hardware.nvlink_domain(name) != cluster.nvlink_domain:
        return None
    return f"{cluster.nodes}x{cluster.gpus_per_node}x{name}"


def _other_devices(study: Study, deadline: float) -> Iterator[Change]:
    """Yield the GPU kind with the smallest sufficient memory above the current kind's, for the same number of devices; nothing if the user
    sets a memory limit."""
    cluster = study.cluster
    if (
        cluster.kind != "cuda"
        or cluster.parts
        or cluster.memory_override_bytes is not None
        or study.options.memory_limit_bytes is not None
    ):
        return
    larger = [n for n in hardware.gpu_names() if hardware.gpu(n).memory_bytes > cluster.gpu.memory_bytes]
    for name in sorted(larger, key=lambda n: hardware.gpu(n).memory_bytes):
        if time.thread_time() > deadline:
            return
        node = min(cluster.gpus_per_node, hardware.gpus_per_node(name))
        if cluster.count % node:
            continue
        spec = f"{cluster.count // node}x{node}x{name}"
        plan = feasible(study, deadline, cluster=parse(spec))
        if plan is not None:
            yield _change("gpu", f"use {name} instead of {cluster.gpu.name} (--devices {spec})", plan, devices=spec)
            return


def _smallest(most: int, deadline: float, attempt: Callable[[int], Plan | None]) -> tuple[int, Plan] | None:
    """Return the smallest ``n`` up to ``most`` that doubling and bisection find such that ``attempt`` returns a plan, and the plan."""
    n, below, plan = 1, 0, None
    while True:
        plan = attempt(n)
        if plan is not None:
            break
        if n >= most or time.thread_time() > deadline:
            return None
        below, n = n, min(2 * n, most)
    while n - below > 1 and time.thread_time() < deadline:
        middle = (n + below) // 2
        found = attempt(middle)
        if found is None:
            below = middle
        else:
            n, plan = middle, found
    return n, plan
