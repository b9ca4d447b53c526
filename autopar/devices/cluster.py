"""The records: a GPU, a link, a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.devices import constants


@dataclass(frozen=True, slots=True)
class Link:
    """One device's way to another: latency of one hop, bytes per second in one direction as real code reaches them."""

    latency_s: float
    bytes_per_s: float
    source: str


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
    sources: tuple[tuple[str, str], ...] = ()

    def flops_per_s(self, dtype: str) -> float:
        """FLOP/s that a large matrix product reaches."""
        return self.peak_flops[dtype] * self.matmul_efficiency

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
