"""Dataclasses for GPUs, links and clusters."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.devices import constants
from autopar.devices.measured import ATTENTION, GROUPED, CollectiveTimes, Floats, Ops
from autopar.precision import FLOAT8, FP8_PRECISIONS


@dataclass(frozen=True, slots=True)
class Link:
    """A link between devices: the latency of a hop, and the achieved (not peak) bytes per second in one direction."""

    latency_s: float
    bytes_per_s: float
    source: str

    def faster(self, factor: float) -> Link:
        """Return the link with ``factor`` times the bandwidth."""
        return replace(self, bytes_per_s=factor * self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class Host:
    """A node's host memory, to which its devices can offload.

    ``memory_bytes`` (installed) and ``bytes_per_s`` (peak bandwidth) are per node; ``link_bytes_per_s`` is the peak bandwidth of a device's
    link to the host, per direction.
    """

    memory_bytes: int
    bytes_per_s: float
    link_bytes_per_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Nvme:
    """All NVMe drives of a node together: capacity, and sequential bytes per second read and written, as in data sheets.

    ``path`` is the folder in which programs keep files; it is empty if the cluster file names none.
    """

    capacity_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    path: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Network:
    """Measured collectives over all GPUs of 1, 2, 4, ... nodes of a cluster, with ``per_node`` GPUs each.

    ``gather`` (all-gather and reduce-scatter) and ``reduce`` (all-reduce) have the bus bandwidth in bytes per second for each entry of
    ``nodes``. ``hop_s`` is the latency of one step of a collective that spans nodes. ``pipelined_host_s`` are the host's seconds for one
    step of any collective of a layer if pipeline stages send between nodes at the same time.
    """

    nodes: tuple[int, ...]
    gather: tuple[float, ...]
    reduce: tuple[float, ...]
    per_node: int
    hop_s: float
    pipelined_host_s: float
    source: str

    def bus(self, nodes: float, reduces: bool) -> float:
        """Return the bus bandwidth of ``nodes`` nodes in bytes per second, interpolated (and extrapolated) as a power law."""
        known = self.reduce if reduces else self.gather
        i = max(1, min(bisect.bisect_left(self.nodes, nodes), len(self.nodes) - 1))
        (n0, n1), (b0, b1) = self.nodes[i - 1 : i + 1], known[i - 1 : i + 1]
        return b0 * (b1 / b0) ** (math.log(nodes / n0) / math.log(n1 / n0))

    def faster(self, intra: float, inter: float) -> Network:
        """Return the network with multiples of the bandwidths of one node and of several."""
        factors = [inter if nodes > 1 else intra for nodes in self.nodes]
        gather, reduce = (
            tuple(factor * bus for factor, bus in zip(factors, curve, strict=True))
            for curve in (self.gather, self.reduce)
        )
        return replace(self, gather=gather, reduce=reduce)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or one process on a CPU. ``peak_flops`` has dense FLOP/s by precision (``"bfloat16"``, ``"float32"``, ...). ``op_floor_s`` is
    the host's time to launch an op, ``kernel_s`` the device's time to start a kernel. ``vendor_attention_speedup`` is the speed of the
    vendor's attention kernels (cuDNN) over FlashAttention-2, whose rate ``attention_efficiency`` is. ``efficiencies`` has the fractions of
    peaks that products reach in those precisions for which it is not ``matmul_efficiency``. ``measured`` has the times that
    ``autopar profile`` measured, if any."""

    name: str
    memory_bytes: int
    peak_flops: dict[str, float] = field(hash=False)
    matmul_efficiency: float
    memory_bytes_per_s: float
    memory_efficiency: float
    op_floor_s: float
    kernel_s: float = constants.KERNEL_S.value
    attention_efficiency: float = constants.ATTENTION_EFFICIENCY.value
    vendor_attention_speedup: float = 1.0
    efficiencies: dict[str, float] = field(default_factory=dict, hash=False)
    sources: tuple[tuple[str, str], ...] = ()
    measured: Ops | None = field(default=None, hash=False)

    def seconds(self, kinds: NDArray[np.str_], flops: Floats, moved: Floats, dtype: str, backward: bool) -> Floats:
        """Return the seconds of each op, without its launch. ``kinds`` (see ``devices.measured``), ``flops`` and ``moved`` (bytes) have one
        entry per op."""
        if self.measured is not None:
            return self.measured.seconds(kinds, flops, moved, dtype, backward)
        rates = np.where(kinds == ATTENTION, self.attention_flops_per_s(dtype), self.flops_per_s(dtype))
        for precision in FP8_PRECISIONS:
            if (narrow := kinds == precision).any():
                rates = np.where(narrow, self.flops_per_s(precision), rates)
        arithmetic_s, memory_s = flops / rates, moved / self.bytes_per_s
        # a product's loads and stores partly overlap its arithmetic, the more so if one of them takes much longer; those of a grouped
        # product, which is many small ones, do not
        partly_s = np.hypot(arithmetic_s, memory_s)
        return np.asarray(np.where(kinds == GROUPED, arithmetic_s + memory_s, partly_s))

    @property
    def rounds_in_few_kernels(self) -> bool:
        """Whether emitted programs round to 8 bits in few kernels: on GPUs with 8-bit tensor cores (``program.kernels_fp8``)."""
        return self.is_faster_in(FLOAT8)

    def is_faster_in(self, precision: str) -> bool:
        """Return whether matrix products have a higher peak in this precision than in bfloat16."""
        return self.peak_flops.get(precision, 0.0) > self.peak_flops.get("bfloat16", 0.0)

    def update_s(self, moved: float, tensors: int) -> float:
        """Return the seconds of an optimizer step that moves ``moved`` bytes in total, over ``tensors`` tensors of equal size."""
        if self.measured is None or np.all(tensors == 0):
            return moved / self.bytes_per_s
        if isinstance(moved, np.ndarray) or isinstance(
            tensors, np.ndarray
        ):  # of several candidates (``price.assemble``)
            each = zip(*np.broadcast_arrays(moved, tensors), strict=True)
            return np.array([self.update_s(*one) for one in each])
        return tensors * self.measured.update.beyond(moved / tensors)

    def flops_per_s(self, dtype: str) -> float:
        """Return the achieved FLOP/s of a large matrix product."""
        return self.peak_flops[dtype] * self.efficiencies.get(dtype, self.matmul_efficiency)

    def with_vendor_attention(self) -> Gpu:
        """Return the GPU as trainers see it that call the vendor's attention kernels."""
        return replace(self, attention_efficiency=self.attention_efficiency * self.vendor_attention_speedup)

    def attention_flops_per_s(self, dtype: str) -> float:
        """Return the achieved FLOP/s of flash attention, which isn't done in FP8."""
        return self.peak_flops["bfloat16" if dtype in FP8_PRECISIONS else dtype] * self.attention_efficiency

    def fastest_flops_per_s(self, dtype: str) -> float:
        """Return an upper bound of the FLOP/s that the cost model assumes for ops in ``dtype``; 0 if the peak is unknown."""
        if dtype not in self.peak_flops:
            return 0.0
        if self.measured is not None:
            return max(self.peak_flops[dtype], self.measured.fastest_flops_per_s(dtype))
        return max(self.flops_per_s(dtype), self.attention_flops_per_s(dtype))

    def faster(self, arithmetic: float, memory: float) -> Gpu:
        """Return the GPU with multiples of its FLOP/s and of its memory bandwidth."""
        return replace(
            self,
            peak_flops={name: arithmetic * flops for name, flops in self.peak_flops.items()},
            memory_bytes_per_s=memory * self.memory_bytes_per_s,
            measured=self.measured and self.measured.faster(arithmetic, memory),
        )

    @property
    def bytes_per_s(self) -> float:
        """Achieved bytes per second of a large copy, read plus written."""
        return self.memory_bytes_per_s * self.memory_efficiency


@dataclass(frozen=True, slots=True)
class Cluster:
    """``nodes`` times ``gpus_per_node`` devices of one kind, or several such ``parts`` (see ``joined``).

    ``intra`` links devices of a node (NVLink, PCIe, gloo), ``inter`` is a device's share of its node's network when all devices of the
    node send. ``collective_s`` is the device's fixed time per collective, ``host_s`` the host's. ``local``: the devices are this
    machine's; ``devices`` has the names of its GPUs. ``collective_times`` has measured collectives. ``host`` is a node's host memory,
    ``None`` for CPU processes, whose memory is the host's; ``nvme`` the node's drives, ``None`` if the cluster file has none.
    ``nvlink_domain`` is the number of GPUs that NVLink connects if that is more than a node (72 in GB200 NVL72), else 0. ``first`` is the
    index of the first device in its node or NVLink domain; it is not 0 if a pipeline stage begins inside one.
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
    memory_beyond: float = 1.0  # the measured bytes of programs over the predicted ones; limits are divided by it
    collective_s: float = constants.COLLECTIVE_BASE_S.value
    host_s: float = constants.HOST_S.value
    network: Network | None = None
    collective_times: CollectiveTimes | None = field(default=None, hash=False)
    overlap_slowdown: float = constants.OVERLAP_SLOWDOWN.value  # seconds that a second of hidden communication costs
    notes: tuple[str, ...] = ()  # every plan on this cluster shows them
    pipelined: bool = False  # whether there are other pipeline stages, which may be on other nodes
    parts: tuple[Cluster, ...] = ()
    inter_part: Link | None = None  # a device's share of the link between parts
    host: Host | None = None
    nvlink_domain: int = 0
    nvme: Nvme | None = None
    first: int = 0

    def __post_init__(self) -> None:
        assert self.nodes > 0 and self.gpus_per_node > 0 and self.kind in ("cuda", "cpu"), self

    @property
    def count(self) -> int:
        """The number of devices."""
        return sum(part.count for part in self.parts) if self.parts else self.nodes * self.gpus_per_node

    def host_collective_s(self, ranks: int) -> float:
        """Return the host's seconds for a collective of a layer over this many ranks."""
        if self.network is None or not self.pipelined:
            return self.host_s
        return self.host_s + (ranks - 1) * self.network.pipelined_host_s

    @property
    def node_size(self) -> int:
        """The number of GPUs per node; 0 if nodes differ, or if the devices are CPU processes."""
        sizes = {part.gpus_per_node for part in self.parts or (self,)}
        return self.gpus_per_node if len(sizes) == 1 and self.kind == "cuda" else 0

    @property
    def linked_gpus(self) -> int:
        """The number of devices that the ``intra`` link connects: those of a node or of an NVLink domain.

        Schedulers place jobs in equal segments, each in one domain (Slurm's ``--segment``): 256 devices are 4 x 64 in domains of 72, unless
        they would leave half of the domain or more.
        """
        whole = max(self.gpus_per_node, min(self.nvlink_domain, self.count))
        equal = (size for size in range(whole, whole // 2, -1) if self.count % size == size % self.gpus_per_node == 0)
        return next(equal, whole)

    @property
    def memory_limit_bytes(self) -> int:
        """The memory of a device that a plan may use: the user's limit, or the usable fraction of the device's memory."""
        if self.memory_override_bytes is not None:
            return int(self.memory_override_bytes / self.memory_beyond)
        if self.parts:
            return min(part.memory_limit_bytes for part in self.parts)
        usable = constants.USABLE_MEMORY if self.kind == "cuda" else constants.USABLE_MEMORY_CPU
        return int(self.gpu.memory_bytes * usable.value / self.memory_beyond)

    @property
    def host_limit_bytes(self) -> int:
        """The host memory that a plan may use per device: a share of the node's usable memory."""
        if self.host is None:
            return 0
        return int(self.host.memory_bytes * constants.USABLE_HOST_MEMORY.value) // self.gpus_per_node

    @property
    def has_nvme(self) -> bool:
        """Whether the cluster file describes NVMe drives."""
        return self.nvme is not None

    @property
    def nvme_path(self) -> str:
        """The folder on NVMe in which programs keep files; empty if the cluster file names none."""
        return self.nvme.path if self.nvme is not None else ""

    @property
    def nvme_limit_bytes(self) -> int:
        """The NVMe capacity that a plan may use per device: an equal share of the node's usable capacity."""
        capacity = self._drives.capacity_bytes * constants.USABLE_NVME.value
        return int(capacity) // self.gpus_per_node

    def nvme_s(self, read: float, written: float) -> float:
        """Return the seconds in which a device reads and writes these bytes on NVMe while all devices of its node do the same."""
        drives = self._drives
        return (read / drives.read_bytes_per_s + written / drives.write_bytes_per_s) * self.gpus_per_node

    @property
    def _drives(self) -> Nvme:
        """The drives of the cluster file; if it has none, an assumed drive, for plans in which a pin requires NVMe."""
        return self.nvme or Nvme(
            int(constants.DEFAULT_NVME_BYTES.value),
            constants.DEFAULT_NVME_READ_BYTES_PER_S.value,
            constants.DEFAULT_NVME_WRITE_BYTES_PER_S.value,
        )

    @property
    def host_bytes_per_s(self) -> float:
        """A device's share of its node's host memory bandwidth."""
        assert self.host is not None
        return self.host.bytes_per_s * constants.HOST_MEMORY_EFFICIENCY.value / self.gpus_per_node

    @property
    def host_link_bytes_per_s(self) -> float:
        """Bytes per second between a device and its host, per direction, while all devices of the node copy: the minimum of its link and
        half its share of host memory bandwidth."""
        assert self.host is not None
        memory = self.host.bytes_per_s * constants.MEMORY_EFFICIENCY.value / self.gpus_per_node
        return min(self.host.link_bytes_per_s * constants.HOST_LINK_EFFICIENCY.value, memory / 2)

    def peak_flops(self, precision: str) -> float:
        """Return the peak FLOP/s of all devices together; 0 if the peak of one kind is unknown."""
        peaks = [(part.count, part.gpu.peak_flops.get(precision, 0.0)) for part in self.parts or (self,)]
        return sum(n * peak for n, peak in peaks) if all(peak for _, peak in peaks) else 0.0

    def fastest_flops_per_s(self, precision: str) -> float:
        """Return an upper bound of the FLOP/s that the cost model assumes for all devices together: each counts as the fastest kind. Return
        0 if the peak of one kind is unknown."""
        fastest = [part.gpu.fastest_flops_per_s(precision) for part in self.parts or (self,)]
        return self.count * max(fastest) if all(fastest) else 0.0

    def smaller_clusters(self) -> tuple[Cluster, ...]:
        """Return smaller clusters, which leave some nodes idle (in a single node: some devices). Their sizes have only small factors: 127
        or 9 devices have few meshes, perhaps none that divides the model and the batch. Local devices and heterogeneous clusters have no
        such clusters."""
        if self.local or self.parts:
            return ()
        units = self.nodes if self.nodes > 1 else self.gpus_per_node
        power = 2 ** (units.bit_length() - 1)
        fewer = sorted({n for n in (power, power // 2 * 3) if 0 < n < units}, reverse=True)
        shape = [(n, self.gpus_per_node) if self.nodes > 1 else (1, n) for n in fewer]
        return tuple(replace(self, name=f"{n}x{m}x{self.gpu.name}", nodes=n, gpus_per_node=m) for n, m in shape)

    def used_by(self, count: int) -> Cluster:
        """Return the one of ``smaller_clusters`` that has ``count`` devices, for a plan that leaves the others idle; or else this
        cluster."""
        return next((fewer for fewer in self.smaller_clusters() if fewer.count == count), self)

    def faster(
        self, *, arithmetic: float = 1.0, memory: float = 1.0, intra: float = 1.0, inter: float = 1.0
    ) -> Cluster:
        """Return the cluster with multiples of its FLOP/s, its memory bandwidth, and the bandwidths of the links inside nodes and between
        them; latencies stay. Measured collectives, which don't tell links apart, change with ``intra``."""
        factors = {"arithmetic": arithmetic, "memory": memory, "intra": intra, "inter": inter}
        return replace(
            self,
            gpu=self.gpu.faster(arithmetic, memory),
            intra=self.intra.faster(intra),
            inter=self.inter.faster(inter),
            network=self.network and self.network.faster(intra, inter),
            collective_times=self.collective_times and self.collective_times.wider(intra),
            parts=tuple(part.faster(**factors) for part in self.parts),
            inter_part=self.inter_part and self.inter_part.faster(inter),
        )

    def with_vendor_attention(self) -> Cluster:
        """Return the devices as trainers see them that call the vendor's attention kernels."""
        parts = tuple(part.with_vendor_attention() for part in self.parts)
        return replace(self, gpu=self.gpu.with_vendor_attention(), parts=parts)

    def stages(self, pipeline: int) -> tuple[Cluster, ...]:
        """Return the part (without parts: this cluster) with the devices of each of ``pipeline`` stages, in order. All stages have the same
        number of devices. For a stage on several parts, these are joined, with their worst figures."""
        size, starts = self.count // pipeline, [0, *itertools.accumulate(part.count for part in self.parts)]
        views = []
        for i, touched in enumerate(self._parts_by_stage(pipeline)):
            view = self._joined_parts(touched, across=False)
            inside = (i * size - starts[touched[0]]) % self.parts[touched[0]].linked_gpus if touched else 0
            views.append(replace(view, first=inside) if inside else view)
        return tuple(views)

    def borders(self, pipeline: int) -> tuple[Cluster, ...]:
        """Return the part, or the joined parts, with the devices of each pair of adjacent stages. These send over its ``inter`` link, or
        over its ``intra`` link inside a node."""
        touched = self._parts_by_stage(pipeline)
        return tuple(self._joined_parts(tuple(sorted({*a, *b})), across=True) for a, b in itertools.pairwise(touched))

    def _parts_by_stage(self, pipeline: int) -> list[tuple[int, ...]]:
        """Return, for each stage, the indices of the parts that its devices belong to."""
        size, ends = self.count // pipeline, list(itertools.accumulate(part.count for part in self.parts))
        starts = [0, *ends[:-1]]
        return [
            tuple(i for i, (a, b) in enumerate(zip(starts, ends, strict=False)) if b > first and a < first + size)
            for first in range(0, size * pipeline, size)
        ]

    def _joined_parts(self, parts: tuple[int, ...], across: bool) -> Cluster:
        if not parts:
            return self
        chosen = [self.parts[i] for i in parts]
        view = chosen[0] if len(chosen) == 1 else joined(self.name, chosen, self.inter_part, across)
        return self._with_memory_limit(view)

    def _with_memory_limit(self, view: Cluster) -> Cluster:
        """Return ``view`` with the user's memory limit, if there is one."""
        if self.memory_override_bytes is None:
            return view
        return replace(view, memory_override_bytes=self.memory_override_bytes)

    @property
    def memory_capacity_bytes(self) -> int:
        """The maximum bytes of tensors on a device: its memory divided by the allocator's overhead. ``memory_limit_bytes`` is lower, as a
        safety margin."""
        if self.memory_override_bytes is not None or self.kind != "cuda":
            return self.memory_limit_bytes
        return int(self.gpu.memory_bytes / constants.ALLOCATOR_RESERVE.value)

    def __str__(self) -> str:
        return self.name


def slower(link: Link, other: Link) -> Link:
    """Return the worse latency and bandwidth of two links that a message crosses; the source is that of the bandwidth."""
    slow = other if other.bytes_per_s < link.bytes_per_s else link
    return replace(slow, latency_s=max(link.latency_s, other.latency_s))


def joined(name: str, parts: Sequence[Cluster], inter_part: Link | None, across: bool = False) -> Cluster:
    """Join parts into one cluster with their worst figures: slowest device and link, smallest memory. With ``across``, devices of one part
    send to another, so the ``inter`` link is no better than the link between parts, ``inter_part``."""
    gpus = [part.gpu for part in parts]
    inter = min((part.inter for part in parts), key=lambda link: link.bytes_per_s)
    if across and inter_part is not None:
        inter = slower(inter, inter_part)
    return Cluster(
        name=name,
        nodes=sum(part.nodes for part in parts),
        gpus_per_node=max(part.gpus_per_node for part in parts),
        kind=parts[0].kind,
        gpu=_slowest(gpus),
        intra=min((part.intra for part in parts), key=lambda link: link.bytes_per_s),
        inter=inter,
        collective_s=max(part.collective_s for part in parts),
        host_s=max(part.host_s for part in parts),
        parts=tuple(parts),
        inter_part=inter_part,
        host=_smallest([part.host for part in parts]),
        nvlink_domain=min(min(part.nvlink_domain, part.count) for part in parts),  # domains don't span parts
        nvme=_smallest([part.nvme for part in parts]),
    )


Part = TypeVar("Part", Host, Nvme)


def _smallest(given: Sequence[Part | None]) -> Part | None:
    """Return host memory (or NVMe) with the minimum of each figure, the first nonempty path, and all sources; ``None`` if a part has
    none."""
    known = [each for each in given if each is not None]
    if len(known) < len(given):
        return None
    found: dict[str, Any] = {}
    for name in (each.name for each in fields(known[0])):
        values = [getattr(each, name) for each in known]
        found[name] = next(filter(None, values), "") if isinstance(values[0], str) else min(values)
    return replace(known[0], **found | {"source": "; ".join(dict.fromkeys(each.source for each in known))})


def _slowest(gpus: Sequence[Gpu]) -> Gpu:
    """Return a device with the worst value of each figure among ``gpus``."""
    if len(set(gpus)) == 1:
        return gpus[0]
    efficiency = min(gpu.matmul_efficiency for gpu in gpus)
    common = [name for name in gpus[0].peak_flops if all(name in gpu.peak_flops for gpu in gpus)]
    return Gpu(
        name=" + ".join(dict.fromkeys(gpu.name for gpu in gpus)),
        memory_bytes=min(gpu.memory_bytes for gpu in gpus),
        peak_flops={name: min(gpu.flops_per_s(name) for gpu in gpus) / efficiency for name in common},
        matmul_efficiency=efficiency,
        memory_bytes_per_s=min(gpu.bytes_per_s for gpu in gpus),
        memory_efficiency=1.0,
        op_floor_s=max(gpu.op_floor_s for gpu in gpus),
        kernel_s=max(gpu.kernel_s for gpu in gpus),
        attention_efficiency=min(gpu.attention_efficiency for gpu in gpus),
        sources=tuple(dict.fromkeys(source for gpu in gpus for source in gpu.sources)),
    )
