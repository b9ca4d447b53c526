"""The records: a GPU, a link, a cluster."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field

from autopar.devices import constants


@dataclass(frozen=True, slots=True)
class Link:
    """One device's way to another: latency of one hop, bytes per second in one direction as real code reaches them."""

    latency_s: float
    bytes_per_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Network:
    """What was measured of collectives on a cluster: bus bandwidth of all GPUs of 1, 2, 4, ... nodes together.

    ``gather`` (all-gather and reduce-scatter) and ``reduce`` (all-reduce) are bytes per second by the number of ``nodes``.
    ``hop_s`` is a step of a collective that spans nodes, ``pipelined_hop_s`` a step of any collective in a run that also sends
    between stages on other nodes.
    """

    nodes: tuple[int, ...]
    gather: tuple[float, ...]
    reduce: tuple[float, ...]
    per_node: int
    hop_s: float
    pipelined_hop_s: float
    source: str

    def bus(self, nodes: float, reduces: bool) -> float:
        """Bus bandwidth of as many ranks as ``nodes`` whole nodes have, interpolated in the logarithms; beyond what was measured it
        goes on falling as before."""
        known = self.reduce if reduces else self.gather
        i = max(1, min(bisect.bisect_left(self.nodes, nodes), len(self.nodes) - 1))
        (n0, n1), (b0, b1) = self.nodes[i - 1 : i + 1], known[i - 1 : i + 1]
        return b0 * (b1 / b0) ** (math.log(nodes / n0) / math.log(n1 / n0))


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device. ``peak_flops`` is dense FLOP/s by dtype name (``"bfloat16"``, ``"float32"``, ...)."""

    name: str
    memory_bytes: int
    peak_flops: dict[str, float] = field(hash=False)
    matmul_efficiency: float
    memory_bytes_per_s: float
    memory_efficiency: float
    op_floor_s: float
    kernel_s: float = constants.KERNEL_S.value
    attention_efficiency: float = constants.ATTENTION_EFFICIENCY.value
    sources: tuple[tuple[str, str], ...] = ()

    def flops_per_s(self, dtype: str) -> float:
        """FLOP/s that a large matrix product reaches."""
        return self.peak_flops[dtype] * self.matmul_efficiency

    def attention_flops_per_s(self, dtype: str) -> float:
        """FLOP/s that flash attention reaches; it has no 8-bit arithmetic."""
        return self.peak_flops["bfloat16" if dtype == "float8" else dtype] * self.attention_efficiency

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that a large copy reaches, read plus written."""
        return self.memory_bytes_per_s * self.memory_efficiency


@dataclass(frozen=True, slots=True)
class Cluster:
    """``nodes`` times ``gpus_per_node`` devices of one kind.

    ``intra`` links devices of a node (NVLink, PCIe, gloo), ``inter`` is one device's share of its node's network,
    all devices of the node sending at once. ``collective_s`` is the fixed cost of starting a collective. ``local``
    says that the devices are this machine's; ``devices`` names them where the user did.
    """

    name: str
    nodes: int
    gpus_per_node: int
    kind: str  # "cuda" or "cpu"
    gpu: Gpu
    intra: Link
    inter: Link
    local: bool = False
    devices: tuple[str, ...] = ()
    memory_override_bytes: int | None = None
    collective_s: float = constants.COLLECTIVE_BASE_S.value
    host_s: float = constants.HOST_S.value
    network: Network | None = None
    pipelined: bool = False  # whether stages on other nodes are sent to: what ``network.pipelined_hop_s`` is about

    def __post_init__(self) -> None:
        assert self.nodes > 0 and self.gpus_per_node > 0 and self.kind in ("cuda", "cpu"), self

    @property
    def count(self) -> int:
        """The number of devices."""
        return self.nodes * self.gpus_per_node

    @property
    def memory_limit_bytes(self) -> int:
        """What a plan may fill of one device: the user's word, or the usable fraction of its memory."""
        if self.memory_override_bytes is not None:
            return self.memory_override_bytes
        usable = constants.USABLE_MEMORY if self.kind == "cuda" else constants.USABLE_MEMORY_CPU
        return int(self.gpu.memory_bytes * usable.value)

    def __str__(self) -> str:
        return self.name
